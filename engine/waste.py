"""Settings that take memory for nothing, in words with figures. Pure arithmetic, no torch."""

from dataclasses import replace
from typing import Final

from engine.accounting import GIB, Asked
from engine.cost import CONTEXT_TOKENS, Shape, decode_step_s, shape_of
from engine.placement import Placement
from engine.plan import MemoryPlan
from engine.rates import Rates
from engine.spec import DTYPE_BYTES

WORTH_SAYING: Final = 0.02
"""Share of the GPU budget below which nothing is said."""
SAME_TIME: Final = 0.01
"""Predicted times that differ by less count as equal."""


def waste_notes(plan: MemoryPlan, asked: Asked, rates: Rates) -> list[str]:
    """Return what takes memory that nothing uses: offload room, slots, sequences, budget."""
    return [
        *_offload_room(plan, asked),
        *_slots(plan, asked, rates),
        *_sequences(plan),
        *_budget(plan),
        *_host_tier(plan, asked),
        *_pin_limit(plan, asked),
    ]


def _offload_room(plan: MemoryPlan, asked: Asked) -> list[str]:
    """cpu_offload_gb beyond all that can be moved."""
    if asked.config.offload.backend != "uva" or asked.config.planner.choose:
        return []
    placed = plan.placed_bytes()
    moved = sum(placed.values()) - placed[Placement.RESIDENT.value]
    room = asked.config.offload.uva.cpu_offload_gb
    if moved >= room * GIB:
        return []
    return [
        f"offload.uva.cpu_offload_gb={room:g} is more than the {moved / GIB:.3f} GiB that can be "
        "moved, and the rest of it has no use."
    ]


def _slots(plan: MemoryPlan, asked: Asked, rates: Rates) -> list[str]:
    """Slots of prefetch beyond those that make a step shorter."""
    is_prefetch = any(x.placement is Placement.PREFETCH for x in plan.offloaded_layers)
    if not is_prefetch or plan.num_slots <= 2 or asked.config.planner.choose:
        return []
    shape = shape_of(plan, asked.spec)
    now = _steps_s(shape, rates)
    enough = next(
        slots
        for slots in range(2, plan.num_slots + 1)
        if _is_near(_steps_s(replace(shape, num_slots=slots), rates), now)
    )
    saved = (plan.num_slots - enough) * plan.slot_bytes
    if saved < WORTH_SAYING * plan.gpu_budget_bytes:
        return []
    return [
        f"offload.prefetch.offload_prefetch_step={plan.lookahead} holds {plan.num_slots} slots; "
        f"{enough - 1} would leave {saved / GIB:.2f} GiB more for the KV cache, and a decode step "
        f"would take as long (predicted; {rates.source})."
    ]


def _steps_s(shape: Shape, rates: Rates) -> tuple[float, float]:
    """A decode step of one sequence, and of as many as have room."""
    context = min(CONTEXT_TOKENS, shape.max_model_len)
    batches = (1, shape.concurrency(context))
    one, full = (decode_step_s(shape, rates, batch, context) for batch in batches)
    return one, full


def _is_near(found: tuple[float, float], wanted: tuple[float, float]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(value <= (1 + SAME_TIME) * best for value, best in pairs)


def _sequences(plan: MemoryPlan) -> list[str]:
    """More sequences than KV blocks: some never run."""
    most, blocks = plan.max_num_seqs, plan.num_gpu_blocks
    if blocks >= most or not blocks:
        return []
    return [
        f"engine.max_num_seqs={most}: the KV cache has {blocks} blocks, so no more than {blocks} "
        "sequences run at once, while buffers are held for all. Lower it."
    ]


def _budget(plan: MemoryPlan) -> list[str]:
    """GPU memory that stays empty while weights are moved out of it."""
    left = plan.gpu_budget_bytes - plan.gpu_total_bytes
    if not plan.offloaded_layers or left < WORTH_SAYING * plan.gpu_budget_bytes:
        return []
    if left < plan.block_bytes or left < min(
        tensor.numel * DTYPE_BYTES[plan.dtype]
        for layer in plan.offloaded_layers
        for tensor in layer.offloaded.tensors
    ):
        return []
    return [
        f"{left / GIB:.2f} GiB of the GPU budget stay unused: the KV cache holds all that "
        f"engine.max_num_seqs={plan.max_num_seqs} sequences of {plan.max_model_len} tokens can "
        "use. Offload less, or raise engine.max_num_seqs or engine.max_model_len."
    ]


def _host_tier(plan: MemoryPlan, asked: Asked) -> list[str]:
    """A host tier that all sequences together cannot fill; a prefix cache fills any."""
    if plan.host_kv is None or plan.prefix_caching:
        return []
    count, use = plan.kv.host_blocks[0], max(0, plan.kv.useful[0] - plan.num_gpu_blocks)
    unused = (count - use) * sum(plan.kv.block_bytes)
    if unused < WORTH_SAYING * plan.gpu_budget_bytes:
        return []
    [name] = asked.config.kv.sizes
    return [
        f"kv.{name}: the host tier has {count} blocks, of which {use} have a use: "
        f"engine.max_num_seqs={plan.max_num_seqs} sequences of {plan.max_model_len} tokens take "
        f"{plan.kv.useful[0]}, and the GPU holds {plan.num_gpu_blocks}. {unused / GIB:.2f} GiB of "
        "host memory stay unused. Make it smaller, or set kv.enable_prefix_caching=true, which "
        "keeps prefixes in it."
    ]


def _pin_limit(plan: MemoryPlan, asked: Asked) -> list[str]:
    """A cap of pinned memory that caps nothing."""
    limit = asked.config.kv.pin_limit_gib
    if limit is None or not plan.pin or plan.kv.groups[0].num_pageable:
        return []
    size = plan.kv.num_bytes(plan.kv.host_blocks)
    return [f"kv.pin_limit_gib={limit:g} caps nothing: the host tier has {size / GIB:.2f} GiB."]
