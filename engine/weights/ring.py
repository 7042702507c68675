"""Slots on the GPU that offloaded layers are copied into, ahead of their use or on demand.

Layer k of n offloaded layers always uses slot k mod S, so addresses are fixed and a step can be
captured in a CUDA graph. A slot is refilled with the next layer of its own chain (k + S), and after
the chain's last layer with its first, for the next step; so between steps slot s holds layer s.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from engine.device.base import CopyStream


class LayerFeed(Protocol):
    """Brings offloaded layers to where compute reads them."""

    copied_bytes: int
    """Bytes enqueued host to device so far."""

    def begin_step(self) -> None:
        """Prepare the first layers of a step."""

    def acquire(self, k: int) -> int:
        """Make layer k readable on the compute stream; return its slot."""

    def release(self, k: int) -> None:
        """Layer k's last use is enqueued; its slot may be refilled."""

    def end_step(self) -> None:
        """Join all copies to the compute stream."""


class SlotRing:
    """Copies run ahead on a stream of their own.

    Args:
        stream: The copy stream.
        slots: uint8 tensors on the device, all of one size.
        sources: uint8 host tensors, one per offloaded layer in order of use.
        wrap: After a chain's last layer copy its first again, for the next step. Without it the
            first layers are copied when a step begins.
    """

    def __init__(
        self,
        stream: CopyStream,
        slots: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        *,
        wrap: bool,
    ) -> None:
        self._stream = stream
        self._sources = list(sources)
        self._targets = [
            slots[k % len(slots)][: source.numel()] for k, source in enumerate(self._sources)
        ]
        self._num_slots = len(slots)
        self._wrap = wrap
        self._held: list[int | None] = [None] * self._num_slots
        self._pending: list[Any] = [None] * self._num_slots
        self.copied_bytes = 0

    def begin_step(self) -> None:
        """Start the copies of first layers that are not in their slot already."""
        missing = [s for s in range(self._num_slots) if self._held[s] != s]
        if missing:
            self._stream.after_compute()
        for slot in missing:
            self._start(slot)

    def acquire(self, k: int) -> int:
        """Let the compute stream wait for layer k's copy; return its slot."""
        slot = k % self._num_slots
        event = self._pending[slot]
        if event is not None:
            self._stream.compute_after(event)
            self._pending[slot] = None
        return slot

    def release(self, k: int) -> None:
        """Refill the slot with the next layer of its chain, after what is enqueued so far."""
        following = k + self._num_slots
        if following >= len(self._sources):
            if not self._wrap:
                return
            following = k % self._num_slots
        if self._held[k % self._num_slots] != following:
            self._stream.after_compute()
            self._start(following)

    def end_step(self) -> None:
        """Let the compute stream wait for every copy; needed where a graph capture ends."""
        for slot, event in enumerate(self._pending):
            if event is not None:
                self._stream.compute_after(event)
                self._pending[slot] = None

    def _start(self, k: int) -> None:
        slot, source = k % self._num_slots, self._sources[k]
        self._stream.copy(self._targets[k], source)
        self._pending[slot] = self._stream.record()
        self._held[slot] = k
        self.copied_bytes += source.numel()


class OnDemandSlot:
    """Each layer is copied into one slot on the compute stream when it runs.

    Args:
        slot: uint8 tensor on the device.
        sources: uint8 host tensors, pinned or pageable, one per offloaded layer.
    """

    def __init__(self, slot: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        self._slot = slot
        self._sources = list(sources)
        self.copied_bytes = 0

    def begin_step(self) -> None:
        """Nothing runs ahead."""

    def acquire(self, k: int) -> int:
        """Copy layer k on the compute stream."""
        source = self._sources[k]
        self._slot[: source.numel()].copy_(source, non_blocking=True)
        self.copied_bytes += source.numel()
        return 0

    def release(self, k: int) -> None:
        """The next copy follows on the same stream; nothing to do."""

    def end_step(self) -> None:
        """Nothing runs ahead."""
