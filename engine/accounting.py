"""From a placement to a MemoryPlan: every byte on both sides. Pure arithmetic, no torch."""

from dataclasses import dataclass, replace

from engine.config import EngineConfig
from engine.errors import CapacityError, ConfigError
from engine.host_kv import HostKVPlan
from engine.host_kv_sizes import HostTierSizes, host_tier_sizes
from engine.kv_sizes import KVSizes, kv_sizes
from engine.placement import Assignment, Placement, fall_back
from engine.plan import (
    DeviceFacts,
    MemoryPlan,
    WeightLayout,
    align,
    lay_out,
)
from engine.sizes import (
    HOST_DECODES,
    activation_bytes,
    captured_bytes,
    graph_sizes,
    load_staging_bytes,
    logits_bytes,
    prefill_sizes,
    runtime_bytes,
    tokenizer_bytes,
)
from engine.spec import DTYPE_BYTES, ModelSpec

GIB = 2**30
CUDA_PROCESS_BYTES = int(1.07 * GIB)
CPU_PROCESS_BYTES = int(0.26 * GIB)
"""Host memory of the process itself: interpreter, libraries, driver. Beside an H200 1.06 to 1.07
GiB (docs/performance.md); on a CPU 0.25 to 0.26 beside cuts of three models."""


@dataclass(frozen=True)
class Asked:
    """What a plan is made from, resolved."""

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
        ConfigError: The limit exceeds the model's.
    """
    limit = spec.max_position_embeddings
    asked = limit if config.engine.max_model_len is None else config.engine.max_model_len
    if not 2 <= asked <= limit:
        raise ConfigError(
            "engine.max_model_len: expected at least 2 (one token of prompt, one of output) and at "
            f"most the model's {limit} positions, got {asked}. Change it."
        )
    return asked


def resolve_windows(
    config: EngineConfig, spec: ModelSpec, max_model_len: int
) -> tuple[int | None, ...]:
    """Return the window in force in each layer; None where it attends to all that it can see."""
    if config.kv.disable_sliding_window:
        return (None,) * spec.num_hidden_layers
    return tuple(
        None if window is None or window >= max_model_len else window for window in spec.windows
    )


def served(asked: Asked, assignment: Assignment) -> Assignment:
    """What this machine makes of an assignment."""
    facts = asked.facts
    return fall_back(assignment, can_pin=facts.can_pin, can_uva=facts.can_uva, reason=facts.reason)


def fits(asked: Asked, assignment: Assignment) -> bool:
    """Whether this machine can serve it, in GPU and host memory."""
    return plan_fits(build_plan(asked, served(asked, assignment)))


def plan_fits(plan: MemoryPlan) -> bool:
    """Whether one sequence of max_model_len has room on the GPU, and the rest in host memory."""
    has_kv = plan.holds_one
    has_host = plan.host_total_bytes <= plan.host_limit_bytes and not plan.memlock_lack
    return has_kv and has_host


def build_plan(asked: Asked, assignment: Assignment) -> MemoryPlan:
    """Account for every byte; the KV cache takes what is left."""
    config, spec, facts, dtype = asked.config, asked.spec, asked.facts, asked.dtype
    settings, size = config.engine, DTYPE_BYTES[dtype]
    layout = lay_out(spec, assignment, dtype)
    slots, slot_bytes, outer_slot, stage = _slots(layout, assignment, config, dtype)
    sizes = () if facts.emulated else graph_sizes(settings.max_num_seqs)
    budget = gpu_budget_bytes(config, facts)
    notes = list(assignment.notes)
    use_graphs = bool(_captured_decodes(asked))
    if use_graphs and layout.offloaded_bytes and not facts.can_pin:
        use_graphs = False
        notes.append("fallback: decode runs without graphs, which cannot copy pageable memory.")
    notes += _window_notes(asked)
    prefills: tuple[tuple[int, int], ...] = ()
    if sizes:
        prefills = prefill_sizes(settings.max_num_seqs, settings.max_num_batched_tokens)
    offloads = any(layer.offloaded.num_bytes for layer in layout.layers)
    captured = prefills if use_graphs and not offloads else ()
    decodes = sizes if use_graphs else ()
    captured_pool, graph_nodes = captured_bytes(spec, facts.kind, decodes, captured, size)
    items = {
        "weights": layout.resident_bytes,
        "prefetch_slots": 0 if stage is not None else slots * slot_bytes,
        "staging_slots": (slots * slot_bytes if stage is not None else 0) + outer_slot,
        "activations": activation_bytes(spec, settings, size, asked.max_model_len) + captured_pool,
        "logits": logits_bytes(spec, settings, size),
        "graphs": graph_nodes,
        "runtime": runtime_bytes(facts.kind),
    }
    kv = asked_kv_sizes(asked)
    tier = asked_tier(asked, kv, layout.offloaded_bytes)
    if tier.num_blocks:
        items["kv_moves"] = tier.ids_bytes
    room = budget - sum(items.values())
    kv = tier.share_out(kv, room)
    if kv.groups[0].in_place:
        items["kv_stages"] = tier.stage_bytes(room)
        items["graphs"] += tier.graph_bytes
    items["kv_cache"] = kv.num_bytes(kv.pools)
    pinned = facts.can_pin
    host = {
        "pinned_weights" if pinned else "pageable_weights": layout.offloaded_bytes,
        **_host_kv_items(tier, kv),
        "load_staging": 0
        if config.model.load_format == "dummy"
        else load_staging_bytes(spec.weight_bytes(), facts.num_threads),
        "tokenizer": 0 if config.model.path is None else tokenizer_bytes(spec.vocab_size),
        "process": CPU_PROCESS_BYTES if facts.emulated else CUDA_PROCESS_BYTES,
    }
    if facts.emulated:
        host["emulated_gpu"] = sum(items.values())
    notes += _tier_notes(asked, tier)
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
        kv=kv,
        max_model_len=asked.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        graph_sizes=sizes,
        prefill_sizes=prefills,
        captured_prefills=captured,
        reads_files=config.model.load_format != "dummy",
        use_graphs=use_graphs,
        pin=pinned,
        gpu_budget_bytes=budget,
        gpu_items=items,
        host_limit_bytes=max(0, facts.host_available_bytes - reserve),
        host_items=host,
        notes=tuple(notes),
        swap_space_bytes=int(config.kv.swap_space * GIB),
        swap_weights_bytes=_swap_weights_bytes(asked, layout.offloaded_bytes),
        host_kv=_host_kv(tier, kv, room),
        prefix_caching=config.kv.enable_prefix_caching,
        longest_tokens=_longest_tokens(tier, kv, room, spec.max_position_embeddings),
        facts=facts,
    )


def prefill_graph_bytes(asked: Asked, plan: MemoryPlan) -> int:
    """GPU bytes that a plan without offloaded layers takes to capture steps with prompts."""
    sizes = plan.graph_sizes if plan.use_graphs else ()
    size, kind = DTYPE_BYTES[asked.dtype], asked.facts.kind
    with_prompts, without = (
        sum(captured_bytes(asked.spec, kind, sizes, prefills, size))
        for prefills in (plan.captured_prefills, ())
    )
    return with_prompts - without


def asked_kv_sizes(asked: Asked) -> KVSizes:
    """Return what sequences and blocks take."""
    settings = asked.config.engine
    return kv_sizes(
        asked.spec,
        asked.dtype,
        windows=resolve_windows(asked.config, asked.spec, asked.max_model_len),
        block_size=asked.config.kv.block_size,
        max_model_len=asked.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        step_tokens=settings.max_num_batched_tokens,
        keeps_idle=asked.config.kv.enable_prefix_caching,
    )


def asked_tier(asked: Asked, kv: KVSizes, offloaded_bytes: int) -> HostTierSizes:
    """Return the host tier that is asked for, beside so many bytes of weights in host memory."""
    tier = host_tier_sizes(
        asked.config.kv,
        kv,
        moved_bytes=_swap_weights_bytes(asked, offloaded_bytes),
        can_pin=asked.facts.can_pin,
        can_uva=asked.facts.can_uva,
        num_heads=asked.spec.num_attention_heads,
        head_dim=asked.spec.head_dim,
    )
    again = tuple(count for count in _captured_decodes(asked) if count <= HOST_DECODES)
    size = DTYPE_BYTES[asked.dtype]
    return replace(
        tier, graph_bytes=captured_bytes(asked.spec, asked.facts.kind, again, (), size)[1]
    )


def _captured_decodes(asked: Asked) -> tuple[int, ...]:
    """Decode batches that run as graphs where memory can be pinned; on a CPU none."""
    settings = asked.config.engine
    is_eager = asked.facts.emulated or settings.enforce_eager or asked.reference
    return () if is_eager else graph_sizes(settings.max_num_seqs)


def step_blocks(kv: KVSizes) -> int:
    """Return the blocks of the first group that the tokens of one step take, of one sequence."""
    return kv.blocks(min(kv.max_model_len, kv.step_tokens))[0]


def has_kv_room(plan: MemoryPlan) -> bool:
    """Whether what is chosen leaves room for KV.

    One sequence of max_model_len over both tiers, and on the GPU its tokens of one step: all that
    it has would else be read over the link.
    """
    least = min(plan.kv.blocks(plan.max_model_len)[0], step_blocks(plan.kv))
    return plan.holds_one and plan.num_gpu_blocks >= least


def takes_swap_space(asked: Asked) -> bool:
    """Whether weights that do not fit go to kv.swap_space: where nothing else places them."""
    is_placed = asked.config.offload.backend != "none" or asked.config.planner.choose
    return asked.config.kv.swap_space > 0 and not is_placed and not asked.reference


def _swap_weights_bytes(asked: Asked, offloaded_bytes: int) -> int:
    return offloaded_bytes if takes_swap_space(asked) else 0


def _host_kv(tier: HostTierSizes, kv: KVSizes, room: int) -> HostKVPlan | None:
    if not tier.num_blocks:
        return None
    return HostKVPlan(stage_blocks=tier.stage_blocks(room) if kv.groups[0].in_place else 0)


def _host_kv_items(tier: HostTierSizes, kv: KVSizes) -> dict[str, int]:
    """Host memory of the tier, by part."""
    if not tier.num_blocks:
        return {}
    block_bytes = sum(kv.block_bytes)
    return {
        "pinned_kv": tier.num_pinned * block_bytes,
        "pageable_kv": tier.num_pageable * block_bytes,
        "kv_staging": tier.staging_bytes + tier.ids_bytes,
    }


def _tier_notes(asked: Asked, tier: HostTierSizes) -> list[str]:
    """Say where host blocks are not what one would expect of them."""
    if not tier.num_blocks:
        return []
    facts, notes = asked.facts, []
    if not facts.can_pin:
        notes.append(
            f"fallback: KV blocks in host memory are pageable ({facts.reason}): they are reached "
            "by staged copies, and no sequence exceeds the GPU's room."
        )
    elif not facts.can_uva:
        notes.append(
            f"fallback: KV blocks in host memory are not read in place ({facts.reason}): no "
            "sequence exceeds the GPU's room."
        )
    if facts.can_pin and tier.num_pageable:
        notes.append(
            f"kv.pin_limit_gib={asked.config.kv.pin_limit_gib:g}: {tier.num_pinned} KV blocks in "
            f"host memory are pinned; {tier.num_pageable} are pageable, and reached by staged "
            "copies only."
        )
    return notes


def _longest_tokens(tier: HostTierSizes, kv: KVSizes, room: int, limit: int) -> int:
    """The longest sequence over both tiers, no longer than the model's positions."""
    on_gpu = kv.longest(room, 0, limit)
    if on_gpu == limit or not tier.reach:
        return on_gpu
    return max(on_gpu, kv.longest(room - tier.in_place_bytes(room), tier.reach, limit))


def _window_notes(asked: Asked) -> list[str]:
    """Say what kv.disable_sliding_window does."""
    if not asked.config.kv.disable_sliding_window:
        return []
    windows = [window for window in asked.spec.windows if window is not None]
    if not windows:
        return ["kv.disable_sliding_window: this model has no window, so nothing changes."]
    windows = [window for window in windows if window < asked.max_model_len]
    if not windows:
        return []
    tokens = " or ".join(map(str, sorted(set(windows))))
    return [
        f"kv.disable_sliding_window: {len(windows)} of {asked.spec.num_hidden_layers} layers "
        f"attend to the whole context instead of {tokens} tokens, which the model was not made for."
    ]


def gpu_budget_bytes(config: EngineConfig, facts: DeviceFacts) -> int:
    """Return memory_gib (or the card's) times gpu_memory_utilization.

    Raises:
        CapacityError: The budget is larger than what is free on the card.
    """
    memory = config.gpu.memory_gib
    total = facts.total_bytes if memory is None else int(memory * GIB)
    budget = int(total * config.engine.gpu_memory_utilization)
    if budget > facts.free_bytes and not facts.emulated:
        held = ", ".join(facts.holders) or "the driver names none"
        raise CapacityError(
            f"GPU budget: expected at most the {facts.free_bytes / GIB:.2f} GiB that are free of "
            f"{facts.total_bytes / GIB:.2f} GiB on {facts.name}, got {total / GIB:.2f} GiB x "
            f"gpu_memory_utilization {config.engine.gpu_memory_utilization:g} = "
            f"{budget / GIB:.2f} GiB. Lower gpu.memory_gib or engine.gpu_memory_utilization, or "
            f"stop the processes that hold the rest ({held})."
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
