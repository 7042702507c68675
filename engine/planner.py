"""plan_memory: from what was asked and what a machine has to a MemoryPlan, or a refusal.

Pure arithmetic: nothing is allocated, no torch is imported.
"""

import math
from dataclasses import dataclass, replace

from engine.config import EngineConfig
from engine.errors import CapacityError, ConfigError
from engine.offload_config import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from engine.placement import (
    Assignment,
    Placement,
    assign,
    assign_layers_on_demand,
    assign_prefetch,
    assign_resident,
    assign_spread,
    assign_uva,
    fall_back,
)
from engine.plan import (
    LOAD_STAGING_BYTES,
    DeviceFacts,
    MemoryPlan,
    WeightLayout,
    align,
    lay_out,
)
from engine.sizes import activation_bytes, graph_bytes, graph_sizes, logits_bytes, runtime_bytes
from engine.spec import DTYPE_BYTES, ModelSpec

GIB = 2**30
PROCESS_BYTES = GIB
"""Host memory of the process itself: interpreter, libraries, tokenizer."""


@dataclass(frozen=True)
class _Asked:
    config: EngineConfig
    spec: ModelSpec
    facts: DeviceFacts
    dtype: str
    max_model_len: int
    reference: bool


def resolve_dtype(config: EngineConfig, spec: ModelSpec, kind: str) -> str:
    """Return the dtype in force: auto is the checkpoint's on a GPU and float32 on a CPU."""
    if config.engine.dtype != "auto":
        return config.engine.dtype
    return "float32" if kind == "cpu" else spec.dtype


def resolve_max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    """Return the length limit in force.

    Raises:
        ConfigError: The model has a sliding window that was not disabled, or the limit exceeds the
            model's.
    """
    window = spec.sliding_window
    if window is not None and not config.kv.disable_sliding_window:
        raise ConfigError(
            f"model: it attends to a sliding window of {window} tokens, which is not available "
            "yet. Set kv.disable_sliding_window=true to attend to the whole context."
        )
    limit = spec.max_position_embeddings
    asked = limit if config.engine.max_model_len is None else config.engine.max_model_len
    if not 2 <= asked <= limit:
        raise ConfigError(
            "engine.max_model_len: expected at least 2 (one token of prompt, one of output) and at "
            f"most the model's {limit} positions, got {asked}. Change it."
        )
    return asked


def plan_memory(
    config: EngineConfig, spec: ModelSpec, facts: DeviceFacts, *, reference: bool = False
) -> MemoryPlan:
    """Plan every byte.

    Args:
        config: What was asked.
        spec: Sizes of the model.
        facts: What the machine has.
        reference: Ignore the offload settings and copy every layer on demand, eagerly.

    Returns:
        A plan that fits.

    Raises:
        ConfigError: The settings contradict each other or would have no effect.
        CapacityError: It does not fit; the message says what would.
    """
    asked = _Asked(
        config,
        spec,
        facts,
        resolve_dtype(config, spec, facts.kind),
        resolve_max_model_len(config, spec),
        reference,
    )
    if reference:
        return _fit(asked, assign_layers_on_demand(spec))
    backend = config.offload.backend
    assignment = assign(spec, config.offload, asked.dtype)
    if backend == "none" and config.kv.swap_space > 0:
        return _plan_with_swap_space(asked, assignment.notes)
    plan = _fit(asked, _served(asked, assignment))
    if config.kv.swap_space > 0:
        note = (
            f"kv.swap_space={config.kv.swap_space:g} GiB is not used: offload={backend} places the "
            "weights, and KV blocks in host memory are not available yet."
        )
        plan = replace(plan, notes=(*plan.notes, note))
    if backend != "none" and plan.num_gpu_blocks and _fits(asked, assign_resident(spec)):
        note = (
            f"offload={backend} is not needed: everything fits the GPU budget of "
            f"{plan.gpu_budget_bytes / GIB:.2f} GiB. Each decode step moves "
            f"{plan.bytes_per_step() / GIB:.2f} GiB over the link for nothing. Set offload=none."
        )
        plan = replace(plan, notes=(*plan.notes, note))
    return plan


def _served(asked: _Asked, assignment: Assignment) -> Assignment:
    """What this machine makes of an assignment."""
    facts = asked.facts
    return fall_back(assignment, can_pin=facts.can_pin, can_uva=facts.can_uva, reason=facts.reason)


def _plan_with_swap_space(asked: _Asked, notes: list[str]) -> MemoryPlan:
    """Offload as few layers, spread evenly, as make it fit; at most swap_space of weights."""
    layers = asked.spec.num_hidden_layers
    room = int(asked.config.kv.swap_space * GIB)
    count = _spread_that_fits(asked)
    if count is None or _spread_bytes(asked, count) > room:
        plan = _build(asked, assign_resident(asked.spec))
        text = f"{_refusal(plan, asked)} kv.swap_space={asked.config.kv.swap_space:g} GiB"
        if count is None:
            text += " does not help: it does not fit with every layer in host memory either."
        else:
            text += (
                f" is not enough: {count} of {layers} layers, "
                f"{_spread_bytes(asked, count) / GIB:.3f} GiB, would have to move."
            )
        raise CapacityError(text, plan.to_dict())
    plan = _build(asked, _served(asked, assign_spread(asked.spec, count)))
    _check_host(plan, asked)
    note = (
        f"swap_space={asked.config.kv.swap_space:g} GiB: {count} of {layers} layers "
        f"({_spread_bytes(asked, count) / GIB:.2f} GiB) live in host memory; the rest is unused "
        "(KV blocks in host memory are not available yet)."
    )
    return replace(plan, notes=(*plan.notes, *notes, note), swap_space_bytes=room)


def _spread_that_fits(asked: _Asked) -> int | None:
    """The fewest layers, spread evenly over the host, with which the GPU's part fits."""
    for count in range(asked.spec.num_hidden_layers + 1):
        plan = _build(asked, _served(asked, assign_spread(asked.spec, count)))
        if plan.kv_tokens >= asked.max_model_len:
            return count
    return None


def _spread_bytes(asked: _Asked, count: int) -> int:
    return count * lay_out(asked.spec, assign_spread(asked.spec, 1), asked.dtype).offloaded_bytes


def _fit(asked: _Asked, assignment: Assignment) -> MemoryPlan:
    plan = _build(asked, assignment)
    if plan.kv_tokens < asked.max_model_len:
        raise CapacityError(_refusal(plan, asked), plan.to_dict())
    _check_host(plan, asked)
    return plan


def _fits(asked: _Asked, assignment: Assignment) -> bool:
    """Whether this machine can serve it, in GPU and host memory."""
    plan = _build(asked, _served(asked, assignment))
    has_kv = plan.kv_tokens >= asked.max_model_len
    has_host = plan.host_total_bytes <= plan.host_limit_bytes and not plan.memlock_lack
    return has_kv and has_host


def _build(asked: _Asked, assignment: Assignment) -> MemoryPlan:
    """Account for every byte; the KV cache takes what is left."""
    config, spec, facts, dtype = asked.config, asked.spec, asked.facts, asked.dtype
    settings, size = config.engine, DTYPE_BYTES[dtype]
    layout = lay_out(spec, assignment, dtype)
    slots, slot_bytes, outer_slot, stage = _slots(layout, assignment, config, dtype)
    sizes = () if facts.emulated else graph_sizes(settings.max_num_seqs)
    budget = gpu_budget_bytes(config, facts)
    notes = list(assignment.notes)
    use_graphs = bool(sizes) and not settings.enforce_eager and not asked.reference
    if use_graphs and layout.offloaded_bytes and not facts.can_pin:
        use_graphs = False
        notes.append("fallback: decode runs without graphs, which cannot copy pageable memory.")
    if config.kv.disable_sliding_window and spec.sliding_window is None:
        notes.append("kv.disable_sliding_window: this model has no window, so nothing changes.")
    graph_pool, graph_nodes = graph_bytes(spec, sizes if use_graphs else (), size)
    workspace, runtime = runtime_bytes(facts.kind)
    items = {
        "weights": layout.resident_bytes,
        "prefetch_slots": 0 if stage is not None else slots * slot_bytes,
        "staging_slots": (slots * slot_bytes if stage is not None else 0) + outer_slot,
        "activations": activation_bytes(spec, settings, size, asked.max_model_len)
        + graph_pool
        + workspace,
        "logits": logits_bytes(spec, settings, size),
        "graphs": graph_nodes,
        "runtime": runtime,
    }
    block_bytes = spec.kv_bytes_per_token(dtype) * config.kv.block_size
    room = max(0, budget - sum(items.values()))
    useful = settings.max_num_seqs * math.ceil(asked.max_model_len / config.kv.block_size)
    blocks = min(room // block_bytes, useful)
    items["kv_cache"] = blocks * block_bytes
    pinned = facts.can_pin
    host = {
        "pinned_weights" if pinned else "pageable_weights": layout.offloaded_bytes,
        "load_staging": LOAD_STAGING_BYTES,
        "process": PROCESS_BYTES,
    }
    if facts.emulated:
        host["emulated_gpu"] = sum(items.values())
    reserve = int(settings.host_reserve_gib * GIB)
    return MemoryPlan(
        dtype=dtype,
        placements=assignment.placements,
        layers=layout.layers,
        outer_resident=layout.outer_resident,
        outer_offloaded=layout.outer_offloaded,
        lookahead=assignment.lookahead,
        num_slots=slots,
        slot_bytes=slot_bytes,
        outer_slot_bytes=outer_slot,
        stage_tokens=stage,
        block_size=config.kv.block_size,
        block_bytes=block_bytes,
        num_gpu_blocks=blocks,
        max_model_len=asked.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        graph_sizes=sizes,
        use_graphs=use_graphs,
        pin=pinned,
        gpu_budget_bytes=budget,
        gpu_items=items,
        host_limit_bytes=max(0, facts.host_available_bytes - reserve),
        host_items=host,
        notes=tuple(notes),
        facts=facts,
    )


def gpu_budget_bytes(config: EngineConfig, facts: DeviceFacts) -> int:
    """Return memory_gib (or the card's) times gpu_memory_utilization.

    Raises:
        CapacityError: The budget is larger than what is free on the card.
    """
    memory = config.gpu.memory_gib
    total = facts.total_bytes if memory is None else int(memory * GIB)
    budget = int(total * config.engine.gpu_memory_utilization)
    if budget > facts.free_bytes and not facts.emulated:
        raise CapacityError(
            f"GPU budget: expected at most the {facts.free_bytes / GIB:.2f} GiB that are free of "
            f"{facts.total_bytes / GIB:.2f} GiB on {facts.name}, got {total / GIB:.2f} GiB x "
            f"gpu_memory_utilization {config.engine.gpu_memory_utilization:g} = "
            f"{budget / GIB:.2f} GiB. Lower gpu.memory_gib or engine.gpu_memory_utilization, or "
            "stop the processes that hold the rest."
        )
    return budget


def _slots(
    layout: WeightLayout, assignment: Assignment, config: EngineConfig, dtype: str
) -> tuple[int, int, int, int | None]:
    """Return slots, bytes of one, bytes of the outer scratch, and the staging threshold."""
    moved = [layer for layer in layout.layers if layer.offloaded.num_bytes]
    slot_bytes = max((layer.offloaded.num_bytes for layer in moved), default=0)
    outer = [
        align(tensor.numel * DTYPE_BYTES[dtype])
        for tensor in layout.outer_offloaded.tensors
        if assignment.placements[tensor.name] is Placement.ON_DEMAND
    ]
    kinds = {layer.placement for layer in moved}
    stage = None
    if not moved:
        return 0, 0, max(outer, default=0), None
    if Placement.UVA in kinds:
        threshold = config.engine.uva_stage_tokens
        stage = threshold if threshold <= config.engine.max_num_batched_tokens else None
        count = min(2, len(moved)) if stage is not None else 0
    elif Placement.PREFETCH in kinds:
        count = min(assignment.lookahead + 1, len(moved))
    else:
        count = 1
    return count, slot_bytes, max(outer, default=0), stage


def _check_host(plan: MemoryPlan, asked: _Asked) -> None:
    if plan.memlock_lack:
        raise CapacityError(plan.memlock_lack, plan.to_dict())
    if plan.host_total_bytes <= plan.host_limit_bytes:
        return
    parts = ", ".join(f"{k} {v / GIB:.2f}" for k, v in plan.host_items.items() if v)
    what = "lower the GPU budget (gpu.memory_gib)" if plan.facts.emulated else "offload less"
    raise CapacityError(
        f"host memory: {plan.host_total_bytes / GIB:.2f} GiB are needed ({parts}), but "
        f"{plan.host_limit_bytes / GIB:.2f} GiB are available after a reserve of "
        f"{asked.config.engine.host_reserve_gib:g} GiB. Free memory, {what}, or lower "
        "engine.host_reserve_gib.",
        plan.to_dict(),
    )


def _gib(num_bytes: int) -> str:
    """GiB with two decimals, more below 1, so that a small lack is seen."""
    value = num_bytes / GIB
    decimals = 2 if abs(value) >= 1 else 3 if abs(value) >= 0.05 else 6
    return f"{value:.{decimals}f}"


def _refusal(plan: MemoryPlan, asked: _Asked) -> str:
    """Say what was needed, what is there, and the cheapest settings that would fit."""
    items = plan.gpu_items
    fixed = plan.gpu_total_bytes - items["kv_cache"]
    left = plan.gpu_budget_bytes - fixed
    blocks = math.ceil(asked.max_model_len / plan.block_size)
    need = blocks * plan.block_bytes
    parts = ", ".join(f"{k} {_gib(v)}" for k, v in items.items() if v and k != "kv_cache")
    text = (
        f"available KV cache memory: {_gib(left)} GiB; one sequence of max_model_len="
        f"{asked.max_model_len} needs {_gib(need)} GiB. GPU budget "
        f"{_gib(plan.gpu_budget_bytes)} GiB, taken by {parts} (GiB)."
    )
    advice = _advice(asked)
    length = left // plan.block_bytes * plan.block_size
    shorter = replace(asked, max_model_len=length)
    if length > 0 and _fits(shorter, Assignment(plan.placements, plan.lookahead)):
        advice.append(f"engine.max_model_len={length}")
    if not advice:
        return f"{text} {_last_resort(asked, plan, fixed + need)}"
    return text + " Fits with: " + "; or ".join(advice) + "."


def _last_resort(asked: _Asked, plan: MemoryPlan, num_bytes: int) -> str:
    """What remains where neither offload nor a shorter length fits: a larger budget."""
    memory = num_bytes / asked.config.engine.gpu_memory_utilization / GIB
    memory = math.ceil(memory * 100 + 1e-6) / 100
    config = replace(asked.config, gpu=replace(asked.config.gpu, memory_gib=memory))
    budget = int(memory * GIB) * asked.config.engine.gpu_memory_utilization
    larger = replace(asked, config=config)
    on_card = plan.facts.emulated or budget <= plan.facts.free_bytes
    if on_card and _fits(larger, Assignment(plan.placements, plan.lookahead)):
        return f"Fits with: gpu.memory_gib={memory:g}."
    roomy = _advice(replace(asked, facts=replace(asked.facts, host_available_bytes=2**60)))
    if roomy:
        return (
            f"It would fit with {'; or '.join(roomy)}, but not in the "
            f"{_gib(plan.host_limit_bytes)} GiB of host memory that are available here. Free host "
            "memory, or take a machine with more."
        )
    return (
        f"No offload makes it fit: lower engine.max_num_batched_tokens or engine.max_num_seqs, or "
        f"use a card of {memory:.2f} GiB."
    )


def _advice(asked: _Asked) -> list[str]:
    """Return settings of each backend with which the plan fits, the least offload first."""
    spec, found = asked.spec, []
    layers = spec.num_hidden_layers
    total = sum(t.numel for i in range(layers) for t in spec.layer_tensors(i))
    layer_gib = total / layers * DTYPE_BYTES[asked.dtype] / GIB
    for count in range(1, layers + 1):
        size = math.ceil(count * layer_gib * 100) / 100
        uva = OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=size))
        if _fits(asked, assign_uva(spec, uva, asked.dtype)):
            found.append(f"offload=uva offload.uva.cpu_offload_gb={size:g}")
            break
    group = min(8, layers)
    for count in range(1, group + 1):
        node = PrefetchOffloadConfig(offload_group_size=group, offload_num_in_group=count)
        if _fits(asked, assign_prefetch(spec, OffloadConfig(prefetch=node))):
            found.append(
                f"offload=prefetch offload.prefetch.offload_group_size={group} "
                f"offload.prefetch.offload_num_in_group={count} "
                "offload.prefetch.offload_prefetch_step=1"
            )
            break
    return found
