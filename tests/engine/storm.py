"""On a GPU: each stream delayed at random, slots and KV blocks poisoned in the order of streams."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from engine import LLM
from engine.device.cuda import CUDACopyStream
from engine.run.executor import DeviceExecutor
from engine.weights import residence
from engine.weights.residence import OnDemandSlot, SlotRing
from engine.weights.store import WeightStore
from tests.engine.feeds import feeds
from tests.engine.two_streams import poison, poison_freed_blocks

DELAYS = {
    "copies": (1.0, 0.0, 0.0),
    "compute": (0.0, 1.0, 0.1),
    "both": (0.4, 0.4, 0.1),
    "device": (0.0, 1.0, 1.0),
}
"""Chances of a delay: before each copy, before and after each layer, and of a lag before a step."""
MOST_CYCLES = 400_000
"""Some 0.2 ms, several times what the layers of a tiny model take."""
LONG_CYCLES = 6_000_000
"""Some 3 ms, longer than the host takes to enqueue a layer."""
LAG_CYCLES = 10_000_000
"""Some milliseconds, in which the host enqueues the whole step."""


class StormStream:
    """A copy stream that fills what a copy will overwrite with NaN, and lags."""

    def __init__(self, stream: CUDACopyStream, delay: Any) -> None:
        self._copies, self._delay = stream, delay
        self.after_compute, self.record = stream.after_compute, stream.record
        self.compute_after, self.wait = stream.compute_after, stream.wait

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        with torch.cuda.stream(self._copies._stream):
            poison(dst)
            self._delay()
        self._copies.copy(dst, src)


@contextmanager
def storm(delays: str, seed: int = 0, most_cycles: int = MOST_CYCLES) -> Iterator[None]:
    """Let engines that are opened and run inside be delayed and poisoned.

    Delays that a graph captures are the same in each of its replays; those before each step, on
    both streams, are not.
    """
    chance = random.Random(f"{delays} {seed}")
    of_copies, of_compute, of_steps = DELAYS[delays]

    def delay(share: float) -> None:
        if chance.random() < share:
            torch.cuda._sleep(chance.randrange(most_cycles // 4, most_cycles))

    acquire, release, execute = WeightStore.acquire, WeightStore.release, DeviceExecutor.execute
    on_demand = OnDemandSlot.acquire

    def late_acquire(self: WeightStore, layer: int) -> Any:
        weights = acquire(self, layer)
        delay(of_compute)  # between the wait for the copy and the layer
        return weights

    def late_release(self: WeightStore, layer: int) -> None:
        delay(of_compute)
        release(self, layer)

    def late_execute(self: DeviceExecutor, batch: Any) -> torch.Tensor:
        if chance.random() < of_steps:
            torch.cuda._sleep(LAG_CYCLES)
        rings = [feed for feed in feeds(self._decoder.weights) if isinstance(feed, SlotRing)]
        for feed in rings:
            with torch.cuda.stream(feed._stream._copies._stream):  # type: ignore[attr-defined]
                delay(of_copies)
        return execute(self, batch)

    def poisoned_acquire(self: OnDemandSlot, k: int) -> int:
        poison(self._slot)
        return on_demand(self, k)

    def ring(stream: CUDACopyStream, *args: Any, **keywords: Any) -> SlotRing:
        return SlotRing(StormStream(stream, partial(delay, of_copies)), *args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightStore, "acquire", late_acquire)
        patch.setattr(WeightStore, "release", late_release)
        patch.setattr(DeviceExecutor, "execute", late_execute)
        patch.setattr(OnDemandSlot, "acquire", poisoned_acquire)
        patch.setattr(residence, "SlotRing", ring)
        yield


@contextmanager
def poisoned_blocks(llm: LLM) -> Iterator[None]:
    """Fill all KV blocks with NaN, and each one again when it becomes free."""
    assert llm._engine is not None
    llm._engine.cache.tensor.fill_(torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        poison_freed_blocks(patch, llm, lambda fill: fill())
        yield
