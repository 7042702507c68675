"""Settings that are chosen so that a plan fits, and settings that waste memory.

Each is found by one search: the least or greatest value that fits. Pure arithmetic, no torch.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from engine.asked.config import MOST_MEMORY_GIB, EngineConfig
from engine.asked.kv import KVConfig
from engine.asked.offload import OffloadConfig
from engine.errors import CapacityError, ConfigError
from engine.plan.cards import gpu_budget_bytes, resolve_max_model_len
from engine.plan.choose import Chooser
from engine.plan.memory import (
    Asked,
    MemoryPlan,
    build_plan,
    fits,
    has_kv_room,
    lay_out,
    plan_fits,
    takes_swap_space,
)
from engine.plan.policy import (
    Assignment,
    assign,
    assign_layers_on_demand,
    assign_resident,
    assign_spread,
)
from engine.plan.times import Shape, decode_step_s, shape_of
from engine.plan.units import PREFETCH, RESIDENT
from engine.plan.weight_format import in_codes
from engine.sealed import GIB


def greatest(low: int, high: int, is_good: Callable[[int], bool]) -> int | None:
    """Return the greatest number from low to high for which a falling condition holds."""
    if high < low or not is_good(low):
        return None
    bad = high + 1
    while bad - low > 1:
        middle = (low + bad) // 2
        low, bad = (middle, bad) if is_good(middle) else (low, middle)
    return low


def least(low: int, high: int, is_good: Callable[[int], bool]) -> int | None:
    """Return the least number from low to high for which a rising condition holds."""
    if high < low or not is_good(high):
        return None
    bad = greatest(low, high, lambda number: not is_good(number))
    return low if bad is None else bad + 1


def no_offload(kv: KVConfig) -> tuple[str, ...]:
    """Return how to ask for every weight on the GPU; kv.swap_space would take some."""
    size = f"{kv.swap_space:.12g}"
    return ("offload=none", *(("kv.swap_space=0", f"kv.cpu_gib={size}") if kv.swap_space else ()))


def changed(asked: Asked, section: str, **values: Any) -> Asked:
    """Return the same question with other values in one section of the configuration."""
    node = replace(getattr(asked.config, section), **values)
    config: EngineConfig = replace(asked.config, **{section: node})
    return replace(asked, config=config, max_model_len=resolve_max_model_len(config, asked.spec))


def with_auto(asked: Asked) -> Asked:
    """Return the same question with every placement chosen."""
    return replace(asked, config=asked.config.choosing())


def would_fit(asked: Asked) -> bool:
    """Whether planning what is asked would succeed."""
    names = set() if asked.reference else set(asked.config.planner.auto_fields)
    try:
        gpu_budget_bytes(asked.config, asked.facts)
        if "max_num_seqs" in names:
            asked = changed(asked, "engine", max_num_seqs=1)
        if "max_model_len" in names:
            asked = changed(asked, "engine", max_model_len=2)
        return _with_least_offload(asked, names) is not None
    except (CapacityError, ConfigError):
        return False


DEFAULT_TOKENS: Final = 8192
"""Length that must have room where none is set and the model's own is longer."""


def with_default_length(asked: Asked) -> tuple[Asked, list[str]]:
    """Return the question with a length that fits where none was set, and a note about it.

    The model's own where it fits, else the longest that does without other settings (with
    everything on the GPU where placements are chosen), and at least DEFAULT_TOKENS, or what
    requests that are known need.
    """
    config, limit = asked.config, asked.max_model_len
    low = min(limit, max(DEFAULT_TOKENS, config.request_tokens or 0))
    is_open = config.engine.max_model_len is None
    if not is_open or low == limit or is_good_length(asked):
        return asked, []
    size = config.kv.block_size

    def at(count: int) -> Asked:
        return changed(asked, "engine", max_model_len=count * size)

    count = greatest(-(-low // size), (limit - 1) // size, lambda each: is_good_length(at(each)))
    found = changed(asked, "engine", max_model_len=low) if count is None else at(count)
    note = (
        f"engine.max_model_len={found.max_model_len}: reduced from the model's {limit} tokens, "
        "which do not fit with these settings. Set engine.max_model_len to choose another length."
    )
    return replace(found, own_length=limit), [note]


def is_good_length(asked: Asked) -> bool:
    """Whether a sequence of max_model_len has room without weights moved for it."""
    try:
        gpu_budget_bytes(asked.config, asked.facts)
    except CapacityError:
        return True  # planning it says what is short
    if asked.reference:
        return fits(asked, assign_layers_on_demand(asked.spec))
    if asked.config.offload.backend == "experts" and not asked.config.offload.experts.is_set:
        return _all_have_slots(asked)
    return Chooser(asked).resident_fits if asked.config.planner.choose else would_fit(asked)


def _all_have_slots(asked: Asked) -> bool:
    """Whether banks of experts get as many slots as there are experts."""
    plan = build_plan(asked, assign(asked.spec, asked.config.offload, asked.formats))
    every = plan.experts is not None and set(plan.experts.slots) == {plan.experts.num_experts}
    return every and plan_fits(plan)


def auto_fits(asked: Asked) -> bool:
    """Whether planning would succeed with every placement chosen, and the weight format."""
    coded = in_codes(asked)
    return would_fit(with_auto(asked)) or (coded is not None and would_fit(with_auto(coded)))


# Settings that are chosen.


def spread_that_fits(asked: Asked) -> int | None:
    """Return the fewest layers, spread evenly over kv.swap_space, with which KV has room."""
    layer_bytes = lay_out(asked, assign_spread(asked.spec, 1)).offloaded_bytes
    room = int(asked.config.kv.swap_space * GIB)
    for count in range(min(asked.spec.num_hidden_layers, room // layer_bytes) + 1):
        if has_kv_room(build_plan(asked, assign_spread(asked.spec, count))):
            return count
    return None


def with_least_swap_space(asked: Asked) -> Asked | None:
    """Return the question with the least swap_space that fits, to 0.01 GiB; None: none does."""

    def at(hundredths: int) -> Asked:
        return changed(asked, "kv", swap_space=hundredths / 100)

    kv_bytes = asked.kv.sequence_bytes(asked.max_model_len)
    most = math.ceil(100 * (asked.formats.total_bytes(asked.spec.tensors()) + kv_bytes) / GIB)
    found = least(1, most, lambda size: spread_that_fits(at(size)) is not None)
    return None if found is None else at(found)


def assign_as_set(asked: Asked) -> Assignment | None:
    """Return what the offload settings place; None: kv.swap_space is to take more than it holds."""
    if asked.reference:
        return assign_layers_on_demand(asked.spec)
    if not takes_swap_space(asked):
        return assign(asked.spec, asked.config.offload, asked.formats)
    count = spread_that_fits(asked)
    return None if count is None else assign_spread(asked.spec, count)


def with_least_uva(asked: Asked) -> EngineConfig | None:
    """Return the configuration with the least cpu_offload_gb that fits, to 0.01; None: none does.

    Its uva selectors stay, but for 0 GiB, which everything fits with.
    """
    config, node = asked.config, asked.config.offload.uva

    def moved(hundredths: int) -> Asked:
        # The backend stays as asked: uva with 0 GiB moves nothing and would be refused.
        backend = config.offload.offload_backend if hundredths else "auto"
        selectors = node.cpu_offload_params if hundredths else []
        uva = replace(node, cpu_offload_gb=hundredths / 100, cpu_offload_params=selectors)
        return changed(asked, "offload", offload_backend=backend, uva=uva)

    def plan(hundredths: int) -> MemoryPlan:
        wanted = moved(hundredths)
        return build_plan(wanted, assign(wanted.spec, wanted.config.offload, wanted.formats))

    most = math.ceil(asked.formats.total_bytes(asked.spec.tensors()) / GIB * 100)
    count = least(0, most, lambda size: has_kv_room(plan(size)))
    if count is None or not plan_fits(plan(count)):  # it may lack host memory
        return None
    return moved(count).config


def choose_fields(asked: Asked) -> tuple[EngineConfig, list[str]]:
    """Return the configuration with planner.auto_fields chosen, and a note for each.

    max_num_seqs is halved, and then max_model_len lowered, only where no offload is enough;
    cpu_offload_gb is the least with which it fits. Where nothing fits the configuration is returned
    as it is, and planning it refuses with the figures. The objective context chooses max_model_len
    too where none is set.
    """
    config, planner = asked.config, asked.config.planner
    names = set(planner.auto_fields)
    if planner.choose and planner.objective == "context" and config.engine.max_model_len is None:
        names.add("max_model_len")
    found = with_fields(asked, names) if names and not asked.reference else None
    if found is None:
        return config, []
    values = {
        "cpu_offload_gb": f"offload.uva.cpu_offload_gb={found.offload.uva.cpu_offload_gb:g}",
        "max_model_len": f"engine.max_model_len={found.engine.max_model_len}",
        "max_num_seqs": f"engine.max_num_seqs={found.engine.max_num_seqs}",
    }
    chosen = ", ".join(values[name] for name in sorted(names))
    most, count = config.engine.max_num_seqs, found.engine.max_num_seqs
    cost = f" No more than {count} sequences run at once, of the {most} that were asked for."
    return found, [f"planner.auto_fields: {chosen}.{cost if count < most else ''}"]


def with_fields(asked: Asked, names: set[str]) -> EngineConfig | None:
    """Return the first configuration that fits: most sequences, then the greatest length."""

    def at(max_num_seqs: int, max_model_len: int) -> Asked:
        limits = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
        return changed(asked, "engine", **limits)

    limit, counts = asked.max_model_len, [asked.config.engine.max_num_seqs]
    while "max_num_seqs" in names and counts[-1] > 1:
        counts.append(counts[-1] // 2)
    tried = (_with_least_offload(at(count, limit), names) for count in counts)
    found = next((config for config in tried if config is not None), None)
    if found is None and "max_model_len" in names:
        few = counts[-1]
        length = greatest(
            2, limit, lambda tokens: _with_least_offload(at(few, tokens), names) is not None
        )
        if length is not None:
            tried = (_with_least_offload(at(count, length), names) for count in counts)
            found = next((config for config in tried if config is not None), None)
    return found


def _with_least_offload(asked: Asked, names: set[str]) -> EngineConfig | None:
    """Return the configuration, with the least cpu_offload_gb where it is named, if it fits."""
    if "cpu_offload_gb" in names:
        return with_least_uva(asked)
    if asked.config.planner.choose and not asked.reference:
        return asked.config if Chooser(asked).can_fit else None
    placed = assign_as_set(asked)
    return asked.config if placed is not None and fits(asked, placed) else None


def fast_length(asked: Asked, plan: MemoryPlan) -> tuple[str, Asked] | None:
    """Return the longest length with all weights on the GPU, where a longer one was chosen.

    As it is typed, and the question with it. DEFAULT_TOKENS where no length leaves them there.
    """
    planner, size = asked.config.planner, asked.config.kv.block_size
    is_context = planner.choose and planner.objective == "context"
    if not (is_context or "max_model_len" in planner.auto_fields) or not off_gpu_bytes(plan):
        return None
    bare = changed(asked, "planner", objective="latency") if is_context else asked

    def at(tokens: int) -> Asked:
        return changed(bare, "engine", max_model_len=tokens)

    low, high = asked.config.request_tokens or 2, plan.max_model_len - 1
    count = greatest(-(-low // size), high // size, lambda n: Chooser(at(n * size)).resident_fits)
    tokens = DEFAULT_TOKENS if count is None else count * size
    words = "planner.objective=latency " if is_context else ""
    is_shorter = low <= tokens <= high
    return (f"{words}engine.max_model_len={tokens}", at(tokens)) if is_shorter else None


def plan_as_set(asked: Asked) -> MemoryPlan:
    """Return the plan of what is chosen or set, whether it fits or not."""
    if asked.config.planner.choose:
        chooser = Chooser(asked)
        found = chooser.best()
        return chooser.resident if found is None else found[0]
    return build_plan(asked, assign_as_set(asked) or assign_resident(asked.spec))


def roomy_card_gib(asked: Asked) -> float:
    """Return the least memory of a card, to 0.01 GiB, that holds everything."""
    bare = with_offload(asked, OffloadConfig())
    facts = replace(asked.facts, total_bytes=2**60, free_bytes=2**60)

    def holds(hundredths: int) -> bool:
        wanted = replace(changed(bare, "gpu", memory_gib=hundredths / 100), facts=facts)
        return build_plan(wanted, assign_resident(asked.spec)).holds_one

    most = 100 * MOST_MEMORY_GIB
    return (least(1, most, holds) or most) / 100


# What is asked with lossless weights, and what a plan is like.


LOSSLESS_WORDS: Final = "engine.weight_format=lossless"


def lossless_resident(asked: Asked) -> MemoryPlan | None:
    """Return the plan of everything on the GPU in codes; None: no room, no use, or ruled out."""
    coded = in_codes(with_offload(asked, OffloadConfig()))
    if coded is None:
        return None
    plan = build_plan(coded, assign_resident(coded.spec))
    return plan if plan_fits(plan) else None


def off_gpu_bytes(plan: MemoryPlan) -> int:
    """Bytes of weights that lie in host memory."""
    placed = plan.placed_bytes()
    return sum(placed.values()) - placed[RESIDENT.name]


def short_step_s(plan: MemoryPlan, asked: Asked) -> float:
    """Return the predicted seconds of a decode step of one short sequence."""
    shape = shape_of(plan, asked.spec, asked.rates)
    return decode_step_s(shape, 1, shape.context_tokens)


def with_offload(asked: Asked, offload: OffloadConfig) -> Asked:
    """Return the same question with other offload settings."""
    return replace(asked, config=replace(asked.config, offload=offload))


def gib(num_bytes: int) -> str:
    """Return bytes in GiB with two decimals, small ones in MiB or KiB."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20)):
        if abs(num_bytes) >= 0.1 * size or not num_bytes:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 2**10:.2f} KiB" if abs(num_bytes) >= 2**10 else f"{num_bytes} bytes"


# Settings that waste memory.


WORTH_SAYING: Final = 0.02
"""Share of the GPU budget below which nothing is said."""
SAME_TIME: Final = 0.01
"""Predicted times that differ by less count as equal."""


CAN_MOVE: Final = "GiB of weights that can be moved"
"""What a note says of a cpu_offload_gb beyond all weights."""


def room_beyond(plan: MemoryPlan, asked: Asked) -> str:
    """Say that cpu_offload_gb is more than all that can be moved; empty where it is not."""
    moved, room = off_gpu_bytes(plan), asked.config.offload.uva.cpu_offload_gb
    is_set = asked.config.offload.backend == "uva" and not asked.config.planner.choose
    if not is_set or moved >= room * GIB:
        return ""
    return f"offload.uva.cpu_offload_gb={room:g} is more than the {moved / GIB:.3f} {CAN_MOVE}"


def _offload_room(plan: MemoryPlan, asked: Asked) -> str:
    """cpu_offload_gb beyond all that can be moved."""
    beyond = room_beyond(plan, asked)
    return beyond and f"{beyond}, so the rest has no effect. Lower it."


def _slots(plan: MemoryPlan, asked: Asked) -> str:
    """Slots of prefetch beyond those that make a step shorter."""
    if not plan.units_of(PREFETCH) or plan.num_slots <= 2 or asked.config.planner.choose:
        return ""
    shape = shape_of(plan, asked.spec, asked.rates)
    most = [(1 + SAME_TIME) * seconds for seconds in _steps_s(shape)]
    enough = next(
        slots
        for slots in range(2, plan.num_slots + 1)
        if all(map(float.__le__, _steps_s(_with_slots(shape, slots)), most))
    )
    saved = (plan.num_slots - enough) * plan.slot_bytes
    if saved < WORTH_SAYING * plan.gpu_budget_bytes:
        return ""
    return (
        f"offload.prefetch.offload_prefetch_step={plan.lookahead} holds {plan.num_slots} slots; "
        f"{enough - 1} would leave {saved / GIB:.2f} GiB more for the KV cache, and a decode step "
        f"would take as long (predicted; {asked.rates.source})."
    )


def _with_slots(shape: Shape, count: int) -> Shape:
    return replace(shape, moved=tuple(replace(found, num_slots=count) for found in shape.moved))


def _steps_s(shape: Shape) -> list[float]:
    """A decode step of one sequence, and of as many as have room."""
    context = shape.context_tokens
    batches = (1, shape.plan.kv.concurrency(context))
    return [decode_step_s(shape, batch, context) for batch in batches]


def _sequences(plan: MemoryPlan) -> str:
    """More sequences than KV blocks: some never run."""
    most, blocks = plan.max_num_seqs, plan.num_gpu_blocks
    if blocks >= most or not blocks:
        return ""
    return (
        f"engine.max_num_seqs={most}: the KV cache has {blocks} blocks, so no more than {blocks} "
        "sequences run at once, while buffers are held for all. Lower it."
    )


def _budget(plan: MemoryPlan) -> str:
    """GPU memory that stays empty while weights are moved out of it."""
    left = plan.gpu_budget_bytes - plan.gpu_total_bytes
    tensors = (t for layer in plan.offloaded_layers for t in layer.offloaded_tensors)
    moved = list(map(plan.formats.num_bytes, tensors))
    useful = max(WORTH_SAYING * plan.gpu_budget_bytes, plan.block_bytes, min(moved, default=0))
    is_capped = plan.facts.emulated and plan.kv.pools[0] < plan.kv.useful[0]
    if not moved or left < useful or is_capped:
        return ""
    return (
        f"{left / GIB:.2f} GiB of the GPU budget stay unused: the KV cache holds all that "
        f"engine.max_num_seqs={plan.max_num_seqs} sequences of {plan.max_model_len} tokens can "
        "use. Offload less, or raise engine.max_num_seqs or engine.max_model_len."
    )


def _host_tier(plan: MemoryPlan, asked: Asked) -> str:
    """A host tier that all sequences together cannot fill; a prefix cache fills any."""
    count, use = plan.kv.host_blocks[0], max(0, plan.kv.useful[0] - plan.num_gpu_blocks)
    unused = (count - use) * sum(plan.kv.block_bytes)
    has_use = plan.host_kv is None or plan.prefix_caching
    if has_use or unused < WORTH_SAYING * plan.gpu_budget_bytes:
        return ""
    [name] = asked.config.kv.sizes
    return (
        f"kv.{name}: the host tier has {count} blocks, of which {use} can be used: "
        f"engine.max_num_seqs={plan.max_num_seqs} sequences of {plan.max_model_len} tokens take "
        f"{plan.kv.useful[0]}, and the GPU holds {plan.num_gpu_blocks}. {unused / GIB:.2f} GiB of "
        "host memory stay unused. Make it smaller, or set kv.enable_prefix_caching=true, which "
        "keeps prefixes in it."
    )


def _pin_limit(plan: MemoryPlan, asked: Asked) -> str:
    """A cap of pinned memory that caps nothing."""
    limit = asked.config.kv.pin_limit_gib
    if limit is None or not plan.pin or plan.kv.groups[0].num_pageable:
        return ""
    size = plan.kv.num_bytes(plan.kv.host_blocks)
    return f"kv.pin_limit_gib={limit:g} caps nothing: the host tier has {size / GIB:.2f} GiB."


def waste_notes(plan: MemoryPlan, asked: Asked) -> list[str]:
    """Return what takes memory that nothing uses: offload room, slots, sequences, budget."""
    checks = (
        _offload_room(plan, asked),
        _slots(plan, asked),
        _sequences(plan),
        _budget(plan),
        _host_tier(plan, asked),
        _pin_limit(plan, asked),
    )
    return [text for text in checks if text]
