"""Experts of a plan: banks of slots on the GPU, how often they are hit, what crosses the link.

Pure arithmetic, no torch. T tokens of a step, k experts of each, E experts, S slots of a bank.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Final

from engine.asked.config import ModelConfig
from engine.errors import ConfigError
from engine.model.formats import ParamSpec, TensorFormats, TensorSpec, View, align
from engine.model.routing import (
    ROUTER,
    WINDOW_TOKENS,
    Routing,
    check_trace,
    trace_hit_shares,
    trace_reuse,
)
from engine.model.schemes import ELEMENT_BYTES
from engine.model.spec import ModelSpec
from engine.plan.units import CACHED, RESIDENT, LayerPlan, Residence
from kernels.sizes import expert_cache_bytes, num_expert_parts

COUNTER_BYTES: Final = 16
"""Hits and misses of one layer."""
ROUTER_REUSE: Final = 0.5
"""Reuse that is assumed of real weights. Of Qwen3-30B-A3B others report hits as of 0.8, of some
models hardly any; the counted hits of a run say what it is."""
_MOST_DOUBLINGS: Final = 20.0
"""Steps that a bank remembers at most, as a power of two."""


def bank_tensor(tensor: TensorSpec, num_slots: int) -> TensorSpec:
    """Return a tensor with the rows of so many experts."""
    rows = num_slots * tensor.expert_rows
    part = ParamSpec(tensor.name, (rows, *tensor.shape[1:]))
    return TensorSpec(tensor.name, (part,), num_slots)


@dataclass(frozen=True)
class BankArray:
    """One array of a bank."""

    tensor: TensorSpec
    """Whose bytes it is among."""
    source: View
    """Among the bytes of the tensor, with all experts."""
    place: View
    """Among the bytes of the bank, with as many experts as there are slots."""
    is_whole: bool
    """It has no part for each expert; the bank has all of it."""


@dataclass(frozen=True)
class BankLayout:
    """The arrays of a bank, one after another, aligned."""

    arrays: tuple[BankArray, ...]
    num_bytes: int

    @classmethod
    def of(
        cls,
        tensors: Iterable[TensorSpec],
        formats: TensorFormats,
        num_experts: int,
        num_slots: int,
    ) -> "BankLayout":
        """Lay out what a layer's tensors of experts take with so many slots.

        Raises:
            ConfigError: A tensor is stored so that it has no equal parts for each expert.
        """
        found: list[BankArray] = []
        total = 0
        for tensor in tensors:
            form = formats[tensor.name]
            for view in form.views(tensor):
                rows, *rest = view.shape
                is_whole = view.name in form.whole_views
                if not is_whole and rows % num_experts:
                    raise ConfigError(
                        f"{tensor.name}: expected equal parts for each of {num_experts} experts, "
                        f"got {rows} rows of {view.name or 'weights'} in {form.name}. Set "
                        "offload=uva, which reads experts in place."
                    )
                shape = view.shape if is_whole else (rows // num_experts * num_slots, *rest)
                place = replace(view, shape=shape, offset=total)
                found.append(BankArray(tensor, view, place, is_whole))
                total += align(math.prod(shape) * ELEMENT_BYTES[view.dtype])
        return cls(tuple(found), total)


def bank_bytes(
    tensors: Sequence[TensorSpec], formats: TensorFormats, num_experts: int, num_slots: int
) -> int:
    """Return the bytes of a bank and of what says which experts are in it."""
    layout = BankLayout.of(tensors, formats, num_experts, num_slots)
    return layout.num_bytes + align(expert_cache_bytes(num_experts, num_slots))


@dataclass(frozen=True)
class ExpertLayer:
    """A layer with experts: bytes of one of them, all arrays together, by where they lie."""

    index: int
    resident_bytes: int = 0
    in_place_bytes: int = 0
    """In host memory, read there by steps that do not stage them."""
    cached_bytes: int = 0
    """In host memory, copied into the bank when they are missed."""
    copied_bytes: int = 0
    """In host memory, copied with all others of their layer."""
    num_slots: int = 0
    """Of its bank."""

    @property
    def crossing_bytes(self) -> int:
        """Bytes that cross the link when an expert is missed, or read in place."""
        return self.in_place_bytes + self.cached_bytes


@dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    """The experts of a model: where they lie, and what is expected of their routing."""

    num_experts: int
    top_k: int
    layers: tuple[ExpertLayer, ...]
    """Those with experts, in order."""
    bank_bytes: int
    """All banks, with what says which experts are in them, and counters."""
    reuse: float | None
    """Share of picks that are expected to repeat one of the last WINDOW_TOKENS tokens; None: any
    expert is as likely as any other."""
    routing: str
    """What that follows from."""
    is_constant: bool = False
    """All tokens have the same experts: a synthetic table that only repeats."""
    trace: str | None = None
    """File of a trace, whose replay says what banks hold."""

    @cached_property
    def by_index(self) -> Mapping[int, ExpertLayer]:
        """The layers by their index in the model."""
        return {layer.index: layer for layer in self.layers}

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots of each bank, in the order of layers; empty where none is cached."""
        return tuple(layer.num_slots for layer in self.layers if layer.num_slots)

    def distinct(self, num_tokens: float) -> float:
        """Return how many experts of a layer a step of so many tokens is expected to route to."""
        if self.is_constant:
            return self.top_k
        absent = math.pow(1 - self.top_k / self.num_experts, num_tokens)
        return self.num_experts * (1 - absent)

    @cached_property
    def recent(self) -> float:
        """Experts of a layer that the last WINDOW_TOKENS tokens of one sequence probably have.

        As many become so with a token as cease to be, after as many tokens that do not repeat them.
        """

        def entered(recent: float) -> float:
            """How many there are if each stays as long as it does among so many."""
            repeated = self.top_k * self._repeats(recent)
            drawn = min(1.0, repeated / recent)
            idle = math.pow(1 - drawn, WINDOW_TOKENS)
            stay = (1 - idle) / (drawn * idle) if drawn and idle else WINDOW_TOKENS
            return (self.top_k - repeated) * stay

        low, high = float(self.top_k), float(self.num_experts)
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if entered(middle) > middle else (low, middle)
        return high

    def _repeats(self, recent: float) -> float:
        """Return the share of picks among so many recent experts: all where no others are left."""
        others = self.num_experts - recent
        return max(self.reuse or 0.0, 1 - others / self.top_k)

    def hit_share(self, num_slots: int, num_sequences: int = 1) -> float:
        """Return the share of a layer's routed experts that is expected to lie in its bank.

        Of a trace it is what a replay finds. Else a bank holds what the last so many steps routed
        to (Che, Tung, Wang 2002: Hierarchical web caching systems); an expert is hit if its own
        sequence or another one did within them. A bank of fewer slots than a step has experts holds
        some of the newest step's.

        Args:
            num_slots: Of the bank.
            num_sequences: That decode, at least 1.
        """
        if self.trace is not None:
            return trace_hit_shares(self.trace, num_sequences)[num_slots]
        key = num_slots, 1 if self.is_constant else num_sequences
        if key not in self._hit_shares:
            self._hit_shares[key] = self._hit_share(*key)
        return self._hit_shares[key]

    @cached_property
    def _hit_shares(self) -> dict[tuple[int, int], float]:
        """What was found, by arguments."""
        return {}

    def _hit_share(self, num_slots: int, num_sequences: int) -> float:
        experts, reuse = self.num_experts, self.reuse
        if reuse is None or num_slots >= experts:
            return min(1.0, num_slots / experts)

        def held(steps: float) -> float:
            """How many experts so many steps of all sequences routed to."""
            absent = 1 - self.seen(steps) / experts
            return experts * (1 - math.pow(absent, num_sequences))

        low, high = 0.0, _MOST_DOUBLINGS
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if held(2**middle) < num_slots else (low, middle)
        seen, recent = self.seen(2**high), self.recent
        if recent >= experts:  # every pick repeats
            own = seen / recent
        else:
            reuse = self._repeats(recent)
            own = reuse * min(1.0, seen / recent)
            own += (1 - reuse) * max(0.0, seen - recent) / (experts - recent)
        missed = (1 - own) * math.pow(1 - seen / experts, num_sequences - 1)
        return (1 - missed) * min(1.0, num_slots / held(1.0))

    def seen(self, steps: float) -> float:
        """Return how many experts of a layer so many steps of one sequence route to.

        Picks that do not repeat one of the last WINDOW_TOKENS tokens fall on any other expert.
        """
        top_k, recent, window = self.top_k, self.recent, WINDOW_TOKENS
        if steps <= window:
            return top_k + (recent - top_k) * (steps - 1) / (window - 1)
        others = self.num_experts - recent
        if not others:
            return recent
        drawn = top_k * (1 - self._repeats(recent)) / others
        return recent + others * (1 - math.exp(-drawn * (steps - window)))

    def missed(self, num_slots: int, num_tokens: float, num_sequences: int = 1) -> float:
        """Return how many experts of a layer a step is expected to copy into the bank.

        Tokens of a prompt route to most experts: those that are there are as likely as others.
        """
        share = num_slots / self.num_experts
        if num_tokens <= num_sequences or self.is_constant:
            share = self.hit_share(num_slots, num_sequences)
        return self.distinct(num_tokens) * (1 - share)

    def num_parts(self, num_slots: int, num_tokens: int) -> int:
        """Return how many parts a step runs in."""
        return num_expert_parts(num_tokens * self.top_k, self.num_experts, num_slots)

    def bytes_per_step(self, num_decodes: int = 1) -> int:
        """Return the bytes of experts that are expected to cross the link in one decode step.

        Without those of layers that are copied as a whole, or staged.
        """
        total = 0.0
        for layer in self.layers:
            total += layer.in_place_bytes * self.distinct(num_decodes)
            if layer.num_slots:
                missed = self.missed(layer.num_slots, num_decodes, num_decodes)
                total += layer.cached_bytes * missed
        return round(total)

    @property
    def mean_hit_share(self) -> float | None:
        """Share of routed experts that banks are expected to hold; None: no banks."""
        return sum(map(self.hit_share, self.slots)) / len(self.slots) if self.slots else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a record."""
        return {
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "layers": len(self.layers),
            "slots": list(self.slots),
            "bank_bytes": self.bank_bytes,
            "expert_bytes": [layer.crossing_bytes for layer in self.layers],
            "routing": self.routing,
            "reuse": self.reuse,
            "hit_share": self.mean_hit_share,
            "bytes_per_step": self.bytes_per_step(),
        }


def expected_reuse(model: ModelConfig) -> tuple[float | None, str]:
    """Return the reuse that a plan expects of a model's routing, and what it follows from."""
    routing = None if model.routing is None else Routing.parse(model.routing)
    if routing is not None and routing.reuse is not None:
        return routing.reuse, str(model.routing)
    if routing is not None and routing.file is not None:
        return trace_reuse(routing.file), f"{model.routing}, replayed"
    if model.load_format == "dummy":
        return None, "dummy: any expert is as likely as any other"
    return ROUTER_REUSE, f"{ROUTER} of real weights, reuse {ROUTER_REUSE:g} assumed"


def plan_experts(
    model: ModelConfig,
    spec: ModelSpec,
    formats: TensorFormats,
    layers: Iterable[LayerPlan],
    fixed: Sequence[int],
    room: int,
) -> ExpertPlan | None:
    """Return where experts lie, and banks that take `room` bytes at most; None: a dense model.

    Every bank has at least one slot, whether or not there is room for it, and at most one for each
    expert. What is left of equal banks gives some layers, evenly spread, one slot more.

    Args:
        model: What is expected of the routing.
        spec: Sizes of the model.
        formats: Of its tensors.
        layers: Where its tensors lie.
        fixed: Slots of each bank; empty: as many as have room.
        room: Bytes.

    Raises:
        ConfigError: Experts are cached that cannot be, or `fixed` has more slots than experts.
    """
    if not spec.expert_layers:
        return None
    found = [_layer(layer, formats, spec.num_experts) for layer in layers]
    held = [layer for layer in found if layer is not None]
    banked = {layer.index for layer in held if layer.cached_bytes}
    tensors = [_cached_tensors(layer) for layer in layers if layer.index in banked]
    slots, total = _slots(tensors, formats, spec.num_experts, fixed, room)
    given = iter(slots)
    num_counted = sum(1 for layer in held if layer.in_place_bytes)
    if num_counted or banked:
        counted = num_counted * align(expert_cache_bytes(spec.num_experts, 0))
        total += counted + align(COUNTER_BYTES * len(held))
    check_trace(model.routing, spec)
    reuse, words = expected_reuse(model)
    routing = None if model.routing is None else Routing.parse(model.routing)
    return ExpertPlan(
        num_experts=spec.num_experts,
        top_k=spec.num_experts_per_tok,
        layers=tuple(
            replace(layer, num_slots=next(given)) if layer.index in banked else layer
            for layer in held
        ),
        bank_bytes=total,
        reuse=reuse,
        routing=words,
        is_constant=routing is not None and routing.reuse == 1,
        trace=None if routing is None else routing.file,
    )


def _layer(layer: LayerPlan, formats: TensorFormats, num_experts: int) -> ExpertLayer | None:
    def each(tensors: Iterable[TensorSpec]) -> int:
        return formats.total_bytes(t for t in tensors if t.num_experts) // num_experts

    by_kind: dict[Residence, int] = {RESIDENT: each(layer.resident.tensors)}
    by_kind |= {unit.residence: each(unit.slab.tensors) for unit in layer.units}
    if not any(by_kind.values()):
        return None
    resident, cached = by_kind.pop(RESIDENT), by_kind.pop(CACHED, 0)
    in_place = sum(size for kind, size in by_kind.items() if kind.reads_in_place)
    copied = sum(by_kind.values()) - in_place
    return ExpertLayer(layer.index, resident, in_place, cached, copied)


def _cached_tensors(layer: LayerPlan) -> tuple[TensorSpec, ...]:
    [unit] = [unit for unit in layer.units if unit.residence is CACHED]
    return unit.slab.tensors


def _slots(
    tensors: Sequence[Sequence[TensorSpec]],
    formats: TensorFormats,
    num_experts: int,
    fixed: Sequence[int],
    room: int,
) -> tuple[list[int], int]:
    """Return the slots of the bank of each layer, and the bytes of all banks."""
    count = len(tensors)
    if not count:
        return [], 0
    sizes = _bank_sizes(tensors, formats, num_experts)

    def total(slots: Sequence[int]) -> int:
        return sum(size(each) for size, each in zip(sizes, slots, strict=True))

    if fixed:
        if max(fixed) > num_experts:
            raise ConfigError(
                f"offload.experts.expert_slots: expected at most the {num_experts} experts of a "
                f"layer, got {max(fixed)}. Lower it, or remove it."
            )
        return list(fixed), total(fixed)

    def spread(num_slots: int) -> list[int]:
        least, more = divmod(num_slots, count)
        return [least + (at * more % count < more) for at in range(count)]

    good, bad = count, count * num_experts + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if total(spread(middle)) <= room else (good, middle)
    found = spread(good)
    return found, total(found)


def _bank_sizes(
    tensors: Sequence[Sequence[TensorSpec]], formats: TensorFormats, num_experts: int
) -> list[Callable[[int], int]]:
    """Return of each layer what tells the bytes of its bank; layers alike have one in common."""
    known: dict[tuple[object, ...], Callable[[int], int]] = {}
    found = []
    for each in tensors:
        key = tuple((tensor.shape, formats[tensor.name]) for tensor in each)
        if key not in known:
            known[key] = _sized(tuple(each), formats, num_experts)
        found.append(known[key])
    return found


def _sized(
    tensors: tuple[TensorSpec, ...], formats: TensorFormats, num_experts: int
) -> Callable[[int], int]:
    @cache
    def size(num_slots: int) -> int:
        return bank_bytes(tensors, formats, num_experts, num_slots)

    return size
