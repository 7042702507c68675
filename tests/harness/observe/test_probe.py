"""The link probe where a machine cannot do what is probed; test_gpu_memory.py runs it on a GPU."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from engine.errors import CapacityError, PinningError
from harness.observe import probe


@dataclass
class Card:
    """A CUDA device as far as the probe asks it before it times anything."""

    pins: bool
    sees: bool = True
    kind: str = "cuda"
    closed: int = 0

    def host_buffer(self, num_bytes: int, *, pin: bool) -> Any:
        assert pin
        if not self.pins:
            raise PinningError("pinning: failed with CUDA error 2.")
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8)
        return self

    def in_place(self, buffer: Any, view: torch.Tensor) -> torch.Tensor:
        if not self.sees:
            raise CapacityError("in-place reads: another address.")
        return view

    def synchronize(self) -> None:
        return

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor | None]:
    """What would be read in place; nothing is timed."""
    seen: list[torch.Tensor | None] = []

    def rates(_: Any, host: torch.Tensor, view: torch.Tensor | None) -> dict[str, float | None]:
        seen.append(view)
        return dict.fromkeys(probe.RATES, 1.0)

    monkeypatch.setattr(probe, "_rates", rates)
    return seen


def use(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "open_device", lambda _: card)
    monkeypatch.setattr(probe, "COPY_BYTES", 64)


def test_a_driver_that_pins_nothing_has_no_rates(
    monkeypatch: pytest.MonkeyPatch, views: list[torch.Tensor | None]
) -> None:
    use(Card(pins=False), monkeypatch)
    assert probe.probe_link("cuda") == dict.fromkeys(probe.RATES)
    assert views == []


@pytest.mark.parametrize("sees", [True, False])
def test_host_memory_at_another_address_is_not_read_in_place(
    sees: bool, monkeypatch: pytest.MonkeyPatch, views: list[torch.Tensor | None]
) -> None:
    card = Card(pins=True, sees=sees)
    use(card, monkeypatch)
    assert probe.probe_link("cuda") == dict.fromkeys(probe.RATES, 1.0)
    (view,) = views
    assert (view is not None) == sees
    assert view is None or view.numel() == 64
    assert card.closed == 1


def test_a_cpu_has_the_same_names_and_copies_alone() -> None:
    found = probe.probe_link("cpu")
    assert tuple(found) == probe.RATES
    assert {name for name, rate in found.items() if rate} == {"h2d_gb_s", "d2h_gb_s"}
