"""What lies where, layer by layer, as times count it: bytes by residence, and what is restored."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from engine.model.formats import TensorFormats, TensorSpec, align
from engine.plan.memory import MemoryPlan
from engine.plan.units import RESIDENT, Residence, Slots

RESTORING_WORK: Final[Mapping[str, float]] = MappingProxyType(
    {
        "uint4": 1.0,
        "uint4+sub": 1.35,
        "table4": 1.35,
        "uint5": 1.8,
        "uint5+sub": 1.8,
        "uint6+sub": 1.8,
        "uint8": 1.35,
        "float8_e4m3fn": 1.3,
    }
)
"""Time of products of 1 and 16 tokens over that of AWQ's values in float16, by kind: estimated for
an H200, held against the steps of docs/performance.md. 5 bits: assumed."""


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
    quantised_work: int = 0
    """quantised_plain, each times what its kind takes to restore (RESTORING_WORK)."""

    def __add__(self, other: "Packed") -> "Packed":
        """Return both together."""
        return Packed(*map(operator.add, vars(self).values(), vars(other).values()))

    def share(self, part: float) -> "Packed":
        """Return a share of them."""
        return Packed(*(round(part * size) for size in vars(self).values()))

    @classmethod
    def among(cls, tensors: Iterable[TensorSpec], formats: TensorFormats) -> "Packed":
        """Return those among some tensors."""
        restored, plain_bytes = formats.restored(tensors), formats.default.num_bytes
        unpacked = formats.unpacked(restored)
        quantised = [tensor for tensor, _ in unpacked]
        work = (
            RESTORING_WORK[kind] * plain_bytes(part)
            for tensor, form in unpacked
            for kind, part in form.kinds(tensor)
        )
        return cls(
            stored=formats.total_bytes(restored),
            plain=sum(map(plain_bytes, restored)),
            quantised=formats.total_bytes(quantised),
            quantised_plain=sum(map(plain_bytes, quantised)),
            quantised_work=round(sum(work)),
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
