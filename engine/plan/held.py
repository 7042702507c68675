"""What lies where, layer by layer, as times count it: bytes by residence, and what is restored."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from engine.model.formats import TensorFormats, TensorSpec, align
from engine.plan.memory import MemoryPlan
from engine.plan.units import RESIDENT, Residence, Slots


@dataclass(frozen=True)
class Packed:
    """Bytes of weights that products restore."""

    stored: int = 0
    plain: int = 0
    """Once they are restored."""
    quantised: int = 0
    """The part of `stored` that a checkpoint keeps quantised."""
    quantised_plain: int = 0
    """Once they are restored."""

    def __add__(self, other: "Packed") -> "Packed":
        """Return both together."""
        return Packed(
            self.stored + other.stored,
            self.plain + other.plain,
            self.quantised + other.quantised,
            self.quantised_plain + other.quantised_plain,
        )

    def share(self, part: float) -> "Packed":
        """Return a share of them."""
        sizes = (self.stored, self.plain, self.quantised, self.quantised_plain)
        return Packed(*(round(part * size) for size in sizes))

    @classmethod
    def among(cls, tensors: Iterable[TensorSpec], formats: TensorFormats) -> "Packed":
        """Return those among some tensors."""
        restored = formats.restored(tensors)
        quantised = [tensor for tensor, _ in formats.unpacked(restored)]
        return cls(
            *(
                size
                for each in (restored, quantised)
                for size in (formats.total_bytes(each), sum(map(formats.default.num_bytes, each)))
            )
        )


NONE_PACKED: Final = Packed()


@dataclass(frozen=True)
class Moved:
    """Bytes of layers that have one residence in host memory."""

    residence: Residence
    sizes: tuple[int, ...]
    """Bytes in each layer; 0: none."""
    num_slots: int


Held = Mapping[Residence, Sequence[tuple[int, Packed]]]
"""Bytes that products read of each layer, and those of them that they restore, by residence."""


def held_bytes(plan: MemoryPlan, *, of_experts: bool) -> Held:
    """Return the bytes of each layer by residence: of experts, or of all but them."""
    found: dict[Residence, list[tuple[int, Packed]]] = {}
    for layer in plan.layers:
        slabs = [(RESIDENT, layer.resident), *((unit.residence, unit.slab) for unit in layer.units)]
        for residence, slab in slabs:
            experts = [tensor for tensor in slab.tensors if tensor.num_experts]
            size = sum(align(plan.formats.num_bytes(tensor)) for tensor in experts)
            chosen = experts
            if not of_experts:
                size = slab.num_bytes - size
                chosen = [tensor for tensor in slab.tensors if not tensor.num_experts]
            if residence not in found:
                found[residence] = [(0, NONE_PACKED)] * len(plan.layers)
            found[residence][layer.index] = size, Packed.among(chosen, plan.formats)
    return found


def moved_by(plan: MemoryPlan, slots: Slots) -> Moved:
    """Return the bytes of each layer that are copied into some slots."""
    sizes = [0] * len(plan.layers)
    for layer in plan.layers:
        for unit in layer.units:
            if unit.residence is slots.residence:
                sizes[layer.index] = unit.slab.num_bytes
    return Moved(slots.residence, tuple(sizes), slots.count)
