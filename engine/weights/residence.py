"""Residences of units made real: where a layer's tensors are read in a step, one class a kind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.device.base import Device
from engine.plan.units import ON_DEMAND, PREFETCH, UVA, Residence, Slots
from engine.weights.ring import LayerFeed, OnDemandSlot, SlotRing

Operands = Mapping[str, Any]
"""What products take, by short name."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """One unit in host memory."""

    source: torch.Tensor
    """uint8, its slab in host memory."""
    num_bytes: int
    """Bytes of its tensors, without what aligns them."""
    in_place: Operands | None
    """Views of host memory; None where the residence does not read there."""
    copied: Sequence[Operands]
    """Views of each slot."""


class HeldUnits(Protocol):
    """The units of one residence, in the order of their layers."""

    slots: list[torch.Tensor]
    """What units are copied into, uint8 on the device."""
    feed: LayerFeed | None
    """Copies them there; None where nothing ever does."""
    in_place_bytes: int
    """Bytes that steps read in host memory so far."""

    @property
    def copied_bytes(self) -> int:
        """Bytes enqueued host to device so far."""
        ...

    def places(self, k: int) -> Sequence[Operands]:
        """Return what `acquire` of unit k may choose from, by number."""
        ...

    def begin_step(self, *, is_staged: bool) -> None:
        """Start the first copies of a step."""

    def acquire(self, k: int) -> int:
        """Make unit k readable on the compute stream; return the number of its place."""
        ...

    def release(self, k: int) -> None:
        """Say that the last use of unit k in this step is enqueued."""

    def end_step(self) -> None:
        """Join the copies to the compute stream."""


class _Fed:
    """Units that are copied into slots in every step."""

    def __init__(self, units: Sequence[Held], slots: list[torch.Tensor], feed: LayerFeed) -> None:
        self._units, self._feed = units, feed
        self.slots = slots
        self.feed: LayerFeed | None = feed
        self.in_place_bytes = 0

    @property
    def copied_bytes(self) -> int:
        """Bytes enqueued host to device so far."""
        return self._feed.copied_bytes

    def places(self, k: int) -> Sequence[Operands]:
        """Return the views of each slot."""
        return self._units[k].copied

    def begin_step(self, *, is_staged: bool) -> None:  # noqa: ARG002  they are always copied
        """Start the first copies of a step."""
        self._feed.begin_step()

    def acquire(self, k: int) -> int:
        """Return the slot of unit k, whose copy the compute stream waits for."""
        return self._feed.acquire(k)

    def release(self, k: int) -> None:
        """Let the slot be refilled."""
        self._feed.release(k)

    def end_step(self) -> None:
        """Join the copies to the compute stream."""
        self._feed.end_step()


class CopiedAheadUnits(_Fed):
    """Units that a ring of slots holds ahead of their use, refilled for the next step."""

    def __init__(self, units: Sequence[Held], slots: list[torch.Tensor], device: Device) -> None:
        sources = [unit.source for unit in units]
        ring = SlotRing(device.copy_stream(), slots, sources, wrap=True)
        super().__init__(units, slots, ring)


class OnDemandUnits(_Fed):
    """Units that are copied into one slot, in line with the compute."""

    def __init__(self, units: Sequence[Held], slots: list[torch.Tensor], device: Device) -> None:  # noqa: ARG002  copies on the compute stream
        feed = OnDemandSlot(slots[0], [unit.source for unit in units])
        super().__init__(units, slots, feed)


class InPlaceUnits:
    """Units that products read in host memory; a step of many tokens stages them through slots."""

    def __init__(self, units: Sequence[Held], slots: list[torch.Tensor], device: Device) -> None:
        self._units, self.slots = units, slots
        self.feed: LayerFeed | None = None
        if slots:
            sources = [unit.source for unit in units]
            self.feed = SlotRing(device.copy_stream(), slots, sources, wrap=False)
        self._staging: LayerFeed | None = None
        """The feed while a step stages."""
        self.in_place_bytes = 0

    @property
    def copied_bytes(self) -> int:
        """Bytes enqueued host to device so far."""
        return 0 if self.feed is None else self.feed.copied_bytes

    def places(self, k: int) -> Sequence[Operands]:
        """Return the views of host memory, then those of each slot."""
        in_place = self._units[k].in_place
        assert in_place is not None
        return [in_place, *self._units[k].copied]

    def begin_step(self, *, is_staged: bool) -> None:
        """Decide between reading in place and staging; start the first copies."""
        self._staging = self.feed if is_staged else None
        if self._staging is not None:
            self._staging.begin_step()

    def acquire(self, k: int) -> int:
        """Return 0 for host memory, else the slot's number."""
        if self._staging is None:
            self.in_place_bytes += self._units[k].num_bytes
            return 0
        return 1 + self._staging.acquire(k)

    def release(self, k: int) -> None:
        """Let the slot be refilled, where the step stages."""
        if self._staging is not None:
            self._staging.release(k)

    def end_step(self) -> None:
        """Join the copies to the compute stream."""
        if self._staging is not None:
            self._staging.end_step()


def hold(
    units: Sequence[Held], slots: Slots, memory: list[torch.Tensor], device: Device
) -> HeldUnits:
    """Return the units of one residence, ready for steps.

    Args:
        units: In the order of their layers.
        slots: As planned.
        memory: uint8 tensors on the device, one for each slot.
        device: Gives the copy stream.
    """
    kinds: dict[Residence, type[CopiedAheadUnits | OnDemandUnits | InPlaceUnits]] = {
        UVA: InPlaceUnits,
        PREFETCH: CopiedAheadUnits,
        ON_DEMAND: OnDemandUnits,
    }
    return kinds[slots.residence](units, memory, device)
