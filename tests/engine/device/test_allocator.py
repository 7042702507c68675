"""The allocator that engines of one process share, on a stand-in for torch's."""

import gc
from typing import Any

import pytest
import torch

from engine.device.cuda import SharedAllocator


class Card:
    """Counts of torch's allocator on a card of 1000 bytes."""

    def __init__(self, reserved: int) -> None:
        self.reserved = self.peak = reserved
        self.share = 1.0
        self.clears = 0

    def clear_workspaces(self) -> None:
        self.clears += 1

    def take(self, num_bytes: int) -> None:
        self.reserved += num_bytes
        self.peak = max(self.peak, self.reserved)

    def reset_peak_memory_stats(self, _: int) -> None:
        self.peak = self.reserved

    def set_per_process_memory_fraction(self, share: float, _: int) -> None:
        self.share = share

    def memory_reserved(self, _: int) -> int:
        return self.reserved

    def max_memory_reserved(self, _: int) -> int:
        return self.peak

    def mem_get_info(self, _: int) -> tuple[int, int]:
        return 1000 - self.reserved, 1000


class Engine:
    """Something that a bound belongs to."""


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card(reserved=100)
    for name in vars(Card):
        if not name.startswith("_") and name not in ("take", "clear_workspaces"):
            monkeypatch.setattr(torch.cuda, name, getattr(card, name))
    clear = "_cuda_clearCublasWorkspaces"  # absent where torch is built for CPUs
    monkeypatch.setattr(torch._C, clear, card.clear_workspaces, raising=False)
    return card


def open_engine(shared: SharedAllocator, num_bytes: int) -> Any:
    engine = Engine()
    shared.open()
    shared.bound(engine, num_bytes)
    return engine


def test_engines_may_take_the_sum_of_their_bounds(card: Card) -> None:
    shared = SharedAllocator(0)
    first = open_engine(shared, 300)
    assert card.share == 0.4
    card.take(300)
    second = open_engine(shared, 200)
    assert card.share == 0.6
    shared.release(first)
    assert card.share == 0.3
    shared.release(second)
    shared.release(second)
    assert card.share == 1.0


def test_a_device_that_is_only_asked_changes_no_account(card: Card) -> None:
    shared = SharedAllocator(0)
    engine = open_engine(shared, 300)
    card.take(250)
    card.take(-50)
    shared.open()
    shared.release(Engine())
    assert (shared.peak_bytes(), card.share) == (250, 0.4)
    shared.release(engine)


def test_the_peak_is_that_of_all_that_are_open(card: Card) -> None:
    shared = SharedAllocator(0)
    first = open_engine(shared, 300)
    card.take(250)
    second = open_engine(shared, 200)
    card.take(150)
    assert shared.peak_bytes() == 400
    card.take(-250)
    shared.release(first)
    assert shared.peak_bytes() == 400
    card.take(-150)
    shared.release(second)
    third = open_engine(shared, 200)
    card.take(120)
    assert shared.peak_bytes() == 120
    shared.release(third)


def test_an_engine_that_is_gone_has_no_bound(card: Card) -> None:
    shared = SharedAllocator(0)
    engine = open_engine(shared, 300)
    del engine
    gc.collect()
    other = open_engine(shared, 200)
    assert card.share == 0.3
    shared.release(other)
