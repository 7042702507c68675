"""Units of one residence made real: where a step reads them, and what copies them to the GPU.

T tokens, k experts of each.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from engine.device.base import CopyStream, Device
from engine.plan.units import Feed, Slots
from kernels.expert_arguments import ExpertArrays, ExpertCache
from kernels.ops import expert_cache
from kernels.sizes import num_expert_parts

Operands = Mapping[str, Any]
"""What products take, by short name."""


class SlotRing:
    """Copies run ahead on a stream of their own.

    Unit k of n always uses slot k mod S, so addresses are fixed and a step can be captured in a
    CUDA graph. A slot is refilled with the next unit of its own chain (k + S), and, where it wraps,
    after the chain's last unit with its first, for the next step; so between steps slot s holds
    unit s. Without wrapping the first units are copied when a step begins.

    Slots are uint8 tensors of one size on the device, sources uint8 host tensors, one per unit in
    order of use.
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
        """Bytes enqueued host to device so far."""

    def begin_step(self) -> None:
        """Start the copies of first units that are not in their slot already."""
        missing = [s for s in range(self._num_slots) if self._held[s] != s]
        if missing:
            self._stream.after_compute()
        for slot in missing:
            self._start(slot)

    def acquire(self, k: int) -> int:
        """Let the compute stream wait for unit k's copy; return its slot."""
        slot = k % self._num_slots
        event = self._pending[slot]
        if event is not None:
            self._stream.compute_after(event)
            self._pending[slot] = None
        return slot

    def release(self, k: int) -> None:
        """Refill the slot with the next unit of its chain, after what is enqueued so far."""
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
    """Each unit is copied into one slot on the compute stream when its layer runs."""

    def __init__(self, slot: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        self._slot = slot
        self._sources = list(sources)
        self.copied_bytes = 0

    def begin_step(self) -> None:
        """Nothing runs ahead."""

    def acquire(self, k: int) -> int:
        """Copy unit k on the compute stream."""
        source = self._sources[k]
        self._slot[: source.numel()].copy_(source, non_blocking=True)
        self.copied_bytes += source.numel()
        return 0

    def release(self, k: int) -> None:
        """The next copy follows on the same stream; nothing to do."""

    def end_step(self) -> None:
        """Nothing runs ahead."""


LayerFeed = SlotRing | OnDemandSlot
"""Copies units to where compute reads them."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """One unit in host memory."""

    source: torch.Tensor
    """uint8, its slab in host memory."""
    num_bytes: int
    """Bytes of its tensors, without what aligns them, and without experts."""
    in_place: Operands | None
    """Views of host memory; None where the residence does not read there."""
    copied: Sequence[Operands]
    """Views of each slot."""


class HeldUnits:
    """Units that are read in place, or copied into slots.

    `slots` are uint8 tensors on the device, one for each planned slot.
    """

    def __init__(
        self, units: Sequence[Held], planned: Slots, slots: list[torch.Tensor], device: Device
    ) -> None:
        self._units, self._residence, self.slots = units, planned.residence, slots
        self.feed: LayerFeed | None = None
        """Copies units into the slots; None where nothing ever does."""
        if slots:
            sources = [unit.source for unit in units]
            if self._residence.feed(is_staged=True) is Feed.ON_COMPUTE:
                self.feed = OnDemandSlot(slots[0], sources)
            else:
                self.feed = SlotRing(device.copy_stream(), slots, sources, wrap=planned.wraps)
        self._copies: LayerFeed | None = None
        """The feed in a step that copies, else None."""
        self.in_place_bytes = 0
        """Bytes that steps read in host memory so far."""

    @property
    def copied_bytes(self) -> int:
        """Bytes enqueued host to device so far."""
        return 0 if self.feed is None else self.feed.copied_bytes

    def places(self, k: int) -> Sequence[Operands]:
        """Return what `acquire` of unit k chooses from: host memory if read there, each slot."""
        unit = self._units[k]
        return unit.copied if unit.in_place is None else [unit.in_place, *unit.copied]

    def begin_step(self, *, is_staged: bool) -> None:
        """Decide between reading in place and copying; start the first copies."""
        is_direct = self._residence.feed(is_staged=is_staged) is Feed.DIRECT
        self._copies = None if is_direct else self.feed
        if self._copies is not None:
            self._copies.begin_step()

    def acquire(self, k: int) -> int:
        """Make unit k readable on the compute stream; return the number of its place."""
        if self._copies is None:
            self.in_place_bytes += self._units[k].num_bytes
            return 0
        return self._residence.reads_in_place + self._copies.acquire(k)

    def release(self, k: int) -> None:
        """Say that the last use of unit k in this step is enqueued; its slot may be refilled."""
        if self._copies is not None:
            self._copies.release(k)

    def end_step(self) -> None:
        """Join the copies to the compute stream."""
        if self._copies is not None:
            self._copies.end_step()


ROUTED: Final = "mlp.experts.routed"
"""Short name, among a layer's tensors, of its RoutedExperts; none where all lie on the GPU."""


class RoutedExperts(Protocol):
    """Brings experts to where a layer's matrices of experts have them, or counts them there."""

    @property
    def arriving(self) -> ExpertCache | None:
        """Whose missing experts may still be copied when products begin."""

    def parts(self, ids_Tk: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield for each part of a step the blocks of rows of its experts, int32 [T, k].

        -1 where an expert is of another part. A part's products must be enqueued before the next
        one is asked for.

        Stream: enqueued on the current stream; waits for nothing.
        """


class CountedExperts:
    """Experts that are read in place: one part, its blocks are the experts themselves."""

    arriving: ExpertCache | None = None

    def __init__(self, cache: ExpertCache) -> None:
        self._cache = cache

    def parts(self, ids_Tk: torch.Tensor) -> Iterator[torch.Tensor]:
        """Count each expert once, and yield the ids."""
        expert_cache.count_routed(ids_Tk, self._cache)
        yield ids_Tk


class ExpertBank:
    """The slots of one layer, and the experts in host memory that are copied into them."""

    def __init__(self, cache: ExpertCache, arrays: ExpertArrays) -> None:
        self.cache, self.arrays = cache, arrays

    @property
    def arriving(self) -> ExpertCache:
        """Its state: experts are copied beside the products with others."""
        return self.cache

    def parts(self, ids_Tk: torch.Tensor) -> Iterator[torch.Tensor]:
        """Give slots to the experts of each part and copy those that are missing."""
        cache = self.cache
        count = num_expert_parts(ids_Tk.numel(), cache.num_experts, cache.num_slots)
        for part in range(count):
            slots = expert_cache.claim(ids_Tk, part, cache)
            expert_cache.gather(self.arrays, cache)
            yield slots


class CachedUnits:
    """The experts of all layers that have a bank, in the order of the layers."""

    copied_bytes = 0
    """Experts count apart, on the device."""
    in_place_bytes = 0

    def __init__(self, banks: Sequence[ExpertBank], operands: Sequence[Mapping[str, Any]]) -> None:
        self.banks = banks
        self._places = [
            [{**each, ROUTED: bank}] for bank, each in zip(banks, operands, strict=True)
        ]
        self._is_within = False
        """A step has begun and not ended."""

    def places(self, k: int) -> Sequence[Mapping[str, Any]]:
        """Return what `acquire` of layer k chooses from: its bank."""
        return self._places[k]

    def begin_step(self, *, is_staged: bool) -> None:  # noqa: ARG002
        """Forget what is in the slots if a step failed: some may be claimed and not filled."""
        if self._is_within:
            for bank in self.banks:
                bank.cache.forget()
        self._is_within = True

    def acquire(self, k: int) -> int:  # noqa: ARG002
        """Return the number of the only place."""
        return 0

    def release(self, k: int) -> None:
        """Nothing is copied ahead."""

    def end_step(self) -> None:
        """Say that all of the step is enqueued."""
        self._is_within = False
