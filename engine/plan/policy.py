"""Policies: which tensor lives where, and how it reaches the compute. No torch, no bytes moved."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from engine.asked.offload import OffloadConfig
from engine.errors import ConfigError
from engine.model.formats import EMBEDDING, TensorFormats, TensorSpec
from engine.model.spec import ModelSpec
from engine.plan.units import CACHED, ON_DEMAND, PREFETCH, RESIDENT, UVA, Residence
from engine.sealed import GIB


def matches(selector: str, name: str) -> bool:
    """Whether the selector's segments occur as whole, adjacent segments of the name.

    `experts.w2_weight` matches `mlp.experts.w2_weight`; `w2` does not.
    """
    wanted, have = selector.split("."), name.split(".")
    width = len(wanted)
    return any(have[i : i + width] == wanted for i in range(len(have) - width + 1))


WEIGHT_ALIASES: Final = ("qweight", "weight_packed")
"""What quantised checkpoints call a weight."""


EXPERT_ALIASES: Final = ("w13_weight", "w2_weight")
"""What matrices of all experts of a layer are called."""
_EXPERT_PART: Final = re.compile(r"(w13|w2)_(q?weight|scales|qzeros|input_scale)(_\w+)?")
"""What else quantised checkpoints name of them, such as w13_weight_scale."""


def _usual(selector: str) -> str:
    """Return a selector with the weight under its usual name."""
    *before, last = selector.split(".")
    if last in WEIGHT_ALIASES:
        last = "weight"
    if found := _EXPERT_PART.fullmatch(last):
        last = f"{found[1]}_weight"
    return ".".join([*before, last])


def selected(tensor: TensorSpec, selectors: Sequence[str]) -> bool:
    """Whether any selector matches the tensor's fused name or one of its parts."""
    names = [tensor.name, *(part.name for part in tensor.parts)]
    return any(matches(_usual(selector), name) for selector in selectors for name in names)


def check_selectors(setting: str, selectors: Sequence[str], tensors: Iterable[TensorSpec]) -> None:
    """Raise ConfigError for a selector of a setting that matches none of the tensors."""
    candidates = list(tensors)
    for selector in selectors:
        if any(selected(tensor, [selector]) for tensor in candidates):
            continue
        names = (part.name for tensor in candidates for part in tensor.parts)
        segments = {segment for name in names for segment in name.split(".")}
        segments -= {"model", "layers", "weight", "bias"}
        shown = ", ".join(sorted(segment for segment in segments if not segment.isdigit()))
        raise ConfigError(
            f"{setting}: expected whole dotted segments of a parameter name, got {selector!r}, "
            f"which matches no parameter of this model. Segments here: {shown}; aliases: qkv_proj, "
            f"gate_up_proj, {', '.join((*WEIGHT_ALIASES, *EXPERT_ALIASES))}."
        )


def widened(tensors: Iterable[TensorSpec], selectors: Sequence[str]) -> list[str]:
    """Name the fused products that a selector takes whole although it names only a part."""
    found: list[str] = []
    if not selectors:
        return found
    for tensor in tensors:
        if len(tensor.parts) > 1 and not any(matches(_usual(s), tensor.name) for s in selectors):
            hit = [selected(TensorSpec(part.name, (part,)), selectors) for part in tensor.parts]
            if any(hit) and not all(hit):
                found.append(tensor.name)
    return found


@dataclass(frozen=True)
class Assignment:
    """A residence for every tensor, and what a reader of the record must know about it."""

    placements: dict[str, Residence]
    lookahead: int = 1
    """Offloaded layers that are copied ahead (prefetch)."""
    notes: list[str] = field(default_factory=list)
    bank_slots: tuple[int, ...] = ()
    """Slots of each layer's bank of experts; empty: as many as have room."""
    kv_blocks: int | None = None
    """KV blocks of the first group that banks leave room for; None: one sequence's."""


def assign(spec: ModelSpec, config: OffloadConfig, formats: TensorFormats) -> Assignment:
    """Place every tensor as the backend in force says; fields without effect are noted.

    Raises:
        ConfigError: A selector matches nothing, or nothing would move although something was asked.
    """
    match config.backend:
        case "uva":
            found = assign_uva(spec, config, formats)
        case "prefetch":
            found = assign_prefetch(spec, config)
        case "experts":
            found = assign_experts(spec, config)
        case _:
            if config.uva.cpu_offload_params:
                assign_uva(spec, config, formats)  # raises: there is no budget
            if config.prefetch.offload_params:
                raise ConfigError(
                    "offload.prefetch.offload_params: expected offload_group_size >= 1 beside it, "
                    "got 0: nothing would move. Set a group size, or remove the selectors."
                )
            found = assign_resident(spec)
    return replace(found, notes=[*found.notes, *_unused_notes(config)])


def _unused_notes(config: OffloadConfig) -> list[str]:
    """What backend auto does not use, beyond what OffloadConfig warns of itself."""
    if config.offload_backend != "auto":
        return []
    if config.backend != "prefetch":
        if not config.prefetch.is_set:
            return []
        return [
            "offload.prefetch: fields are set but offload_group_size=0, so they are ignored. Set a "
            "group size, or remove them."
        ]
    if config.uva.is_set and config.uva.cpu_offload_gb == 0:
        return [
            "offload.uva: cpu_offload_params is set but cpu_offload_gb=0, so it is ignored. Set a "
            "size and offload=uva, or remove it."
        ]
    return []


def assign_resident(spec: ModelSpec) -> Assignment:
    """Place everything on the GPU."""
    return Assignment({tensor.name: RESIDENT for tensor in spec.tensors()})


def _with_layers(
    spec: ModelSpec, layers: Iterable[int], residence: Residence
) -> dict[str, Residence]:
    """Place whole layers in a residence, everything else on the GPU."""
    taken = (tensor.name for layer in layers for tensor in spec.layer_tensors(layer))
    return assign_resident(spec).placements | dict.fromkeys(taken, residence)


def assign_layers_on_demand(spec: ModelSpec) -> Assignment:
    """Place every layer in host memory, copied when it runs: the reference of equality checks."""
    placements = _with_layers(spec, range(spec.num_hidden_layers), ON_DEMAND)
    return Assignment(placements, notes=["reference: every layer is copied on demand"])


def assign_cached(spec: ModelSpec) -> Assignment:
    """Place all experts in host memory, with a bank for some in each layer; the rest on the GPU."""
    experts = (tensor.name for tensor in spec.tensors() if tensor.num_experts)
    return Assignment(assign_resident(spec).placements | dict.fromkeys(experts, CACHED))


def assign_experts(spec: ModelSpec, config: OffloadConfig) -> Assignment:
    """Place as `assign_cached` does, with banks of as many slots as are set.

    Raises:
        ConfigError: The model has no experts.
    """
    if not spec.expert_layers:
        raise ConfigError(
            f"offload=experts: expected a model with experts, got {spec.model_type}, which is "
            "dense. Set offload=uva or offload=prefetch."
        )
    found, slots = assign_cached(spec), config.experts.expert_slots
    if slots is None:
        return found
    return replace(found, bank_slots=(slots,) * len(spec.expert_layers))


def assign_uva(spec: ModelSpec, config: OffloadConfig, formats: TensorFormats) -> Assignment:
    """Place tensors in layer order until their bytes reach cpu_offload_gb.

    With experts_first those of experts come before all others. The last tensor may overshoot the
    budget; a product joined of several parameters counts as one.

    Raises:
        ConfigError: A selector matches nothing, or nothing would move.
    """
    setting = "offload.uva.cpu_offload_params"
    selectors = config.uva.cpu_offload_params
    budget = config.uva.cpu_offload_gb * GIB
    layers = [t for i in range(spec.num_hidden_layers) for t in spec.layer_tensors(i)]
    candidates = layers
    if selectors:
        is_tied = spec.tie_word_embeddings
        outer = [t for t in spec.outer_tensors() if not (is_tied and t.name == EMBEDDING)]
        check_selectors(setting, selectors, [*layers, *outer])
        candidates = [t for t in [*layers, *outer] if selected(t, selectors)]
    if config.uva.experts_first:
        if not spec.expert_layers:
            raise ConfigError(
                "offload.uva.experts_first: expected a model with experts, got "
                f"{spec.model_type}, which is dense: it would have no effect. Remove it."
            )
        candidates = sorted(candidates, key=lambda tensor: not tensor.num_experts)
    if budget <= 0:
        raise ConfigError(
            "offload.uva.cpu_offload_gb: expected more than 0 GiB with "
            f"offload={config.offload_backend}"
            f"{' and cpu_offload_params set' if selectors else ''}, "
            f"got {config.uva.cpu_offload_gb:g}: nothing would move. Set a size, or offload=none."
        )
    placements = assign_resident(spec).placements
    taken = 0.0
    last: TensorSpec | None = None
    for tensor in candidates:
        if taken >= budget:
            break
        placements[tensor.name] = UVA
        taken += formats.num_bytes(tensor)
        last = tensor
    notes = _widened_notes(setting, candidates, selectors)
    if last is not None and taken > budget and len(last.parts) > 1:
        notes.append(
            f"offload.uva.cpu_offload_gb: the budget ends inside {last.name}, which is one product "
            f"and is taken whole ({taken / GIB:.4g} instead of {budget / GIB:.4g} GiB)."
        )
    return Assignment(placements, notes=notes)


def assign_prefetch(spec: ModelSpec, config: OffloadConfig) -> Assignment:
    """Place the last num_in_group layers of each group in host memory, copied ahead.

    Raises:
        ConfigError: A selector matches nothing, or nothing would move.
    """
    setting = "offload.prefetch.offload_params"
    node = config.prefetch
    size, num, selectors = node.offload_group_size, node.offload_num_in_group, node.offload_params
    every = [t for i in range(spec.num_hidden_layers) for t in spec.layer_tensors(i)]
    check_selectors(setting, selectors, every)
    layers = [i for i in range(spec.num_hidden_layers) if i % size >= size - num]
    if not layers:
        raise ConfigError(
            f"offload.prefetch: expected at least one offloaded layer, got none: "
            f"offload_group_size={size} with offload_num_in_group={num} takes layers from "
            f"{size - num} on, and the model has {spec.num_hidden_layers}. Lower the group size."
        )
    tensors = [t for i in layers for t in spec.layer_tensors(i)]
    if selectors:
        tensors = [t for t in tensors if selected(t, selectors)]
        layers = [i for i in layers if any(selected(t, selectors) for t in spec.layer_tensors(i))]
    if not tensors:
        raise ConfigError(
            f"{setting}: expected selectors that match a parameter of the offloaded layers, got "
            f"{selectors!r} with offload_group_size={size} and offload_num_in_group={num}: nothing "
            "would move. Change one of the three."
        )
    placements = assign_resident(spec).placements
    placements |= {tensor.name: PREFETCH for tensor in tensors}
    notes = _widened_notes(setting, tensors, selectors)
    return Assignment(placements, lookahead=node.offload_prefetch_step, notes=notes)


def spread_layers(total: int, count: int) -> list[int]:
    """Return `count` of `total` layers at even distances, the first among them.

    Their copies then follow each other without a gap, and those for the next step begin as soon as
    the first layer of this one is done.
    """
    return [layer for layer in range(total) if layer * count % total < count]


def assign_spread(spec: ModelSpec, num_layers: int) -> Assignment:
    """Place `num_layers` layers, spread evenly, in host memory, copied one ahead."""
    layers = spread_layers(spec.num_hidden_layers, num_layers)
    return Assignment(_with_layers(spec, layers, PREFETCH))


def fall_back(assignment: Assignment, *, can_pin: bool, can_uva: bool, reason: str) -> Assignment:
    """Replace placements that this machine cannot serve, for a reason that a note gives."""
    places = assignment.placements
    instead = {
        place: place.served(can_pin=can_pin, can_uva=can_uva) for place in set(places.values())
    }
    changed = [name for name, place in places.items() if instead[place] is not place]
    if not changed:
        return assignment
    served = {name: instead[place] for name, place in places.items()}
    kinds = sorted({places[name].name for name in changed})
    memory = "pinned" if can_pin else "pageable"
    note = (
        f"fallback: {', '.join(kinds)} is not possible ({reason}); {len(changed)} tensors are "
        f"copied on demand from {memory} host memory."
    )
    return replace(assignment, placements=served, notes=[*assignment.notes, note])


def _widened_notes(
    setting: str, tensors: Sequence[TensorSpec], selectors: Sequence[str]
) -> list[str]:
    names = sorted({name.split(".", 3)[-1] for name in widened(tensors, selectors)})
    if not names:
        return []
    return [f"{setting}: {', '.join(names)} is one product and is taken whole."]
