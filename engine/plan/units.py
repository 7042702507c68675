"""Units of weights and their residences: where each lives, how it reaches the compute. No torch.

A unit moves as a whole: what one layer has in one residence. A layer may hold several.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, TypeVar

from typing_extensions import override

from engine.model.formats import TensorFormats, TensorSpec, align

Size = TypeVar("Size", int, float)


class Feed(Enum):
    """How a step brings units to where products read them."""

    DIRECT = auto()
    """Products read them where they lie."""
    AHEAD = auto()
    """A stream of its own copies them into slots before their layer runs."""
    ON_COMPUTE = auto()
    """Units are copied into a slot in line with the compute."""
    ROUTED = auto()
    """Experts that a step routes to are copied into a bank in line with it, unless they are there.
    """


class Residence:
    """Where units live and how they reach the compute: one class a kind, one object of each."""

    name: str
    """Name in records."""
    words: str
    """How units reach the compute, in words."""
    usual_feed: Feed
    """How a step brings units to products, unless it stages them."""
    is_offloaded = True
    """Units lie in host memory."""
    reads_in_place = False
    """Products read host memory, unless a step stages the units."""
    needs_pin = False
    """Only a machine that can pin host memory serves it."""
    needs_uva = False
    """Only a GPU that can read host memory serves it."""

    def __repr__(self) -> str:
        """Return the name."""
        return self.name

    def feed(self, *, is_staged: bool) -> Feed:
        """Return how a step brings units to products; `is_staged`: those in place are staged."""
        return Feed.AHEAD if is_staged and self.reads_in_place else self.usual_feed

    def num_slots(self, num_units: int, *, lookahead: int, stages: bool) -> int:
        """Return the slots on the GPU that so many units, at least 1, are copied into.

        `lookahead` units are copied ahead; `stages`: some steps stage those read in place.
        """
        del num_units, lookahead, stages
        return 0

    def wraps(self, *, always_staged: bool) -> bool:
        """Whether slots are refilled for the next step, where units are copied ahead.

        `always_staged`: every step stages the units that are read in place.
        """
        return always_staged and self.reads_in_place

    def served(self, *, can_pin: bool, can_uva: bool) -> "Residence":
        """Return the residence that a machine can serve in place of this one."""
        lacks_any = (self.needs_pin and not can_pin) or (self.needs_uva and not can_uva)
        return ON_DEMAND if lacks_any else self

    def label(self, num_slots: int) -> str:
        """Return how units reach the compute, in words, where they have so many slots."""
        del num_slots
        return self.words

    def link_bytes(
        self, units: Sequence["Unit"], formats: TensorFormats, num_slots: int, *, is_staged: bool
    ) -> tuple[int, int]:
        """Return bytes that cross the link in a step: copied, and read in place.

        Experts that are read in place or cached are not counted: it depends on the routing.
        """
        sizes = [unit.slab.num_bytes for unit in units]
        match self.feed(is_staged=is_staged):
            case Feed.DIRECT if not self.is_offloaded:
                return 0, 0
            case Feed.DIRECT:
                tensors = [tensor for unit in units for tensor in unit.slab.tensors]
                return 0, formats.total_bytes(t for t in tensors if not t.num_experts)
            case Feed.ROUTED:
                return 0, 0
            case Feed.ON_COMPUTE:
                return sum(sizes), 0
            case Feed.AHEAD:  # a unit that has a slot to itself stays there
                return sum(moving(sizes, num_slots)), 0


def moving(sizes: Sequence[Size], num_slots: int) -> list[Size]:
    """Return those of units in order that are copied every step: they share their slot."""
    shared = enumerate(sizes)
    return [size for k, size in shared if k % num_slots + num_slots < len(sizes)]


class Resident(Residence):
    """In GPU memory."""

    name = "resident"
    words = "in GPU memory"
    usual_feed = Feed.DIRECT
    is_offloaded = False


class InPlace(Residence):
    """In pinned host memory, read in place; steps of many tokens stage it through slots."""

    name = "uva"
    words = "read in place"
    usual_feed = Feed.DIRECT
    reads_in_place = True
    needs_pin = needs_uva = True

    @override
    def num_slots(self, num_units: int, *, lookahead: int, stages: bool) -> int:
        return min(2, num_units) if stages else 0


class Cached(Residence):
    """In pinned host memory; experts that a step routes to are copied into a bank, and stay there.

    A bank has slots for some experts of one layer (engine.plan.experts).
    """

    name = "cached"
    words = "cached"
    usual_feed = Feed.ROUTED
    needs_pin = needs_uva = True


class CopiedAhead(Residence):
    """In pinned host memory, copied ahead into a ring of slots."""

    name = "prefetch"
    words = "copied ahead"
    usual_feed = Feed.AHEAD
    needs_pin = True

    @override
    def wraps(self, *, always_staged: bool) -> bool:
        return True

    @override
    def num_slots(self, num_units: int, *, lookahead: int, stages: bool) -> int:
        return min(lookahead + 1, num_units)

    @override
    def label(self, num_slots: int) -> str:
        return f"{self.words}, {num_slots} slots"


class OnDemand(Residence):
    """In host memory, pinned or pageable, copied when its layer runs."""

    name = "on_demand"
    words = "copied on demand"
    usual_feed = Feed.ON_COMPUTE

    @override
    def num_slots(self, num_units: int, *, lookahead: int, stages: bool) -> int:
        return 1


RESIDENT: Final = Resident()
UVA: Final = InPlace()
CACHED: Final = Cached()
PREFETCH: Final = CopiedAhead()
ON_DEMAND: Final = OnDemand()
RESIDENCES: Final[tuple[Residence, ...]] = (RESIDENT, UVA, CACHED, PREFETCH, ON_DEMAND)


@dataclass(frozen=True)
class Slab:
    """Tensors laid out one after another, aligned."""

    tensors: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, tensors: list[TensorSpec], formats: TensorFormats) -> "Slab":
        """Lay the tensors out in order."""
        offsets, total = [], 0
        for tensor in tensors:
            offsets.append(total)
            total += align(formats.num_bytes(tensor))
        return cls(tuple(tensors), tuple(offsets), total)


@dataclass(frozen=True)
class Unit:
    """What one layer has in one offloaded residence."""

    residence: Residence
    slab: Slab


@dataclass(frozen=True)
class Slots:
    """Slots on the GPU that units of one residence are copied into."""

    residence: Residence
    count: int
    num_bytes: int
    """Size of each: the largest unit."""
    wraps: bool
    """They are refilled for the next step."""


@dataclass(frozen=True)
class LayerPlan:
    """One layer: its tensors in GPU memory, and its units in host memory."""

    index: int
    resident: Slab
    units: tuple[Unit, ...] = ()
    """At most one of each residence, in the order of RESIDENCES."""

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of its units."""
        return sum(unit.slab.num_bytes for unit in self.units)

    @property
    def offloaded_tensors(self) -> tuple[TensorSpec, ...]:
        """Tensors of its units."""
        return tuple(tensor for unit in self.units for tensor in unit.slab.tensors)
