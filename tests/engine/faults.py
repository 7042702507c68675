"""Faults of the slot ring that are put in on purpose, and what becomes of tokens then."""

from collections.abc import Callable
from typing import Any

from engine.device.base import CopyStream
from engine.errors import EngineError
from engine.weights.residence import SlotRing

_START, _ACQUIRE = SlotRing._start, SlotRing.acquire


def or_poison(run: Callable[[], Any]) -> Any:
    """Return what `run` returns, or None where the sampler found poison."""
    try:
        return run()
    except EngineError as error:
        if "expected finite logits" not in str(error):
            raise
        return None


def skip_wait(layer: int) -> Callable[[SlotRing, int], int]:
    """Return an `acquire` that does not wait for one layer's copy."""

    def acquire(self: SlotRing, k: int) -> int:
        return k % self._num_slots if k == layer else _ACQUIRE(self, k)

    return acquire


def leave_stale(layer: int) -> Callable[[SlotRing, int], None]:
    """Return a `_start` that copies one layer the first time only."""

    def start(self: SlotRing, k: int) -> None:
        if k == layer and self.copied_bytes > sum(source.numel() for source in self._sources):
            self._held[k % self._num_slots] = k
        else:
            _START(self, k)

    return start


class _Heedless:
    """A copy stream that does not wait for compute."""

    def __init__(self, stream: CopyStream) -> None:
        self.copy, self.record = stream.copy, stream.record

    def after_compute(self) -> None:
        """Wait for no more than the copies before."""


def heedless(method: Callable[..., None], layer: int | None) -> Callable[..., None]:
    """Let the copies that a method of the ring starts, for one layer or any, wait for nothing."""

    def run(self: SlotRing, *args: int) -> None:
        stream = self._stream
        if layer is None or args == (layer,):
            self._stream = _Heedless(stream)  # type: ignore[assignment]
        method(self, *args)
        self._stream = stream

    return run
