"""What a refusal says: what was needed, what is there, and the cheapest settings that would fit."""

import math
from dataclasses import replace
from functools import partial
from typing import Final

from engine.accounting import GIB, Asked, build_plan, fits, served
from engine.auto_fields import with_least_uva
from engine.changes import changed, chosen_anywhere, host_changes, limit_changes, would_fit
from engine.choose import Chooser, largest
from engine.offload_config import OffloadConfig, PrefetchOffloadConfig
from engine.placement import Assignment
from engine.plan import MemoryPlan
from engine.rates import rates_for

FITS_WITH: Final = " Fits with: "


def gib(num_bytes: int) -> str:
    """GiB with two decimals, more below 1, so that a small lack is seen."""
    value = num_bytes / GIB
    decimals = 2 if abs(value) >= 1 else 3 if abs(value) >= 0.05 else 6
    return f"{value:.{decimals}f}"


def _first_blocks(plan: MemoryPlan, num_tokens: int) -> int:
    """Blocks of the first group of layers that so many tokens take."""
    if num_tokens <= plan.max_model_len:
        return plan.kv.blocks(num_tokens)[0]
    return math.ceil(num_tokens / plan.block_size)


def refusal(plan: MemoryPlan, asked: Asked) -> str:
    """Say what was needed, what is there, and the cheapest settings that would fit."""
    items = plan.gpu_items
    fixed = plan.gpu_total_bytes - items["kv_cache"]
    left = plan.gpu_budget_bytes - fixed
    wanted, who = asked.max_model_len, f"one sequence of max_model_len={asked.max_model_len}"
    more = asked.config.planner.kv_tokens
    if more is not None and more > wanted:
        wanted, who = more, f"planner.kv_tokens={more}"
    need = plan.kv.room(_first_blocks(plan, wanted))
    reach = min(plan.reach[0] - plan.num_gpu_blocks, _first_blocks(plan, wanted))
    elsewhere = f", up to {gib(reach * plan.block_bytes)} of it in host memory" if reach else ""
    parts = ", ".join(f"{k} {gib(v)}" for k, v in items.items() if v and k != "kv_cache")
    text = (
        f"available KV cache memory: {gib(left)} GiB; {who} needs {gib(need)} GiB{elsewhere}. "
        f"GPU budget "
        f"{gib(plan.gpu_budget_bytes)} GiB, taken by {parts} (GiB); the largest is "
        f"{max(items, key=items.__getitem__)}."
    )
    found = advice(asked)
    if asked.config.planner.choose:
        text += _host_lack(asked, plan)
        found += _less_kv(asked) if more is not None else _shorter_with_auto(asked, "")
        found += _host_kv_with_auto(asked, plan)
    elif length := largest(2, asked.max_model_len - 1, partial(_is_short_enough, asked)):
        found.append(f"engine.max_model_len={length}")
    elif not found:
        found += _shorter_with_auto(asked, f"{_auto_words(asked)} ")
    if not asked.config.planner.choose:
        found += _more_host_kv(asked, plan)
    if not found:
        found = limit_changes(asked) + host_changes(asked, plan)
    if not found:
        return f"{text} {_last_resort(asked, plan, fixed + need)}"
    return text + FITS_WITH + "; or ".join(found) + "."


def _is_short_enough(asked: Asked, length: int) -> bool:
    return would_fit(changed(asked, "engine", max_model_len=length))


def host_refusal(plan: MemoryPlan, asked: Asked) -> str:
    """Say what host memory was needed, what is there, and the settings that would fit."""
    items = plan.host_items
    parts = ", ".join(f"{k} {v / GIB:.2f}" for k, v in items.items() if v)
    size = asked.config.gpu.host_gib
    where = "" if size is None else f" of gpu.host_gib={size:g}"
    text = (
        f"host memory: {plan.host_total_bytes / GIB:.2f} GiB are needed ({parts}; the largest is "
        f"{max(items, key=items.__getitem__)}), but {plan.host_limit_bytes / GIB:.2f} "
        f"GiB{where} are available after a reserve of {asked.config.engine.host_reserve_gib:g} GiB."
    )
    found = [] if asked.reference or not plan.offloaded_layers else advice(asked)
    found += host_changes(asked, plan)
    if found:
        return text + FITS_WITH + "; or ".join(found) + "."
    ways = ["lower the GPU budget (gpu.memory_gib)"] if plan.facts.emulated else []
    ways += ["offload less"] if plan.offloaded_layers else []
    return f"{text} No single change makes it fit. {', '.join(['Free memory', *ways])}."


def _more_host_kv(asked: Asked, plan: MemoryPlan) -> list[str]:
    """The smallest host tier with which a sequence that the GPU has no room for fits."""
    need = plan.kv.blocks(plan.max_model_len)[0]
    if asked.config.kv.swap_space or asked.reference:
        return []
    placed = Assignment(plan.placements, plan.lookahead)
    wide, _ = _with_host_kv(asked, plan, need)
    gpu_blocks = build_plan(wide, served(asked, placed)).num_gpu_blocks
    enough, words = _with_host_kv(asked, plan, max(1, need - gpu_blocks))
    return [words] if gpu_blocks and fits(enough, placed) else []


def _host_kv_with_auto(asked: Asked, plan: MemoryPlan) -> list[str]:
    """A host tier with which a chosen placement fits, to a thirty-second of a sequence."""
    need = plan.kv.blocks(plan.max_model_len)[0]
    kv = asked.config.kv
    if plan.host_kv is not None or kv.swap_space or asked.config.planner.kv_tokens is not None:
        return []

    def is_short(parts: int) -> bool:
        return not _auto_fits(_with_host_kv(asked, plan, -(-need * parts // 32))[0])

    short = largest(1, 32, is_short)
    if short == 32:
        return []
    return [_with_host_kv(asked, plan, -(-need * ((short or 0) + 1) // 32))[1]]


def _with_host_kv(asked: Asked, plan: MemoryPlan, num_blocks: int) -> tuple[Asked, str]:
    """The same question with so many host blocks, and words for it in the setting's own unit."""
    kv = asked.config.kv
    if kv.num_cpu_blocks:
        wider, words = replace(kv, num_cpu_blocks=num_blocks), f"kv.num_cpu_blocks={num_blocks}"
    else:
        size = math.ceil(num_blocks * sum(plan.kv.block_bytes) / GIB * 1000) / 1000
        wider = replace(kv, cpu_gib=size, num_cpu_blocks=None)
        words = f"kv.cpu_gib={size:.12g}"
    return replace(asked, config=replace(asked.config, kv=wider)), words


def _auto_words(asked: Asked) -> str:
    """How to ask for chosen placements; a chosen cpu_offload_gb and selectors contradict them."""
    node = asked.config.offload
    undone = {
        " planner.auto_fields=[]": "cpu_offload_gb" in asked.config.planner.auto_fields,
        " offload.uva.cpu_offload_params=[]": bool(node.uva.cpu_offload_params),
        " offload.prefetch.offload_params=[]": bool(node.prefetch.offload_params),
    }
    return "offload=auto" + "".join(words for words, is_set in undone.items() if is_set)


def _with_auto(asked: Asked) -> Asked:
    """The same question with every placement chosen."""
    planner = replace(asked.config.planner, choose=True, auto_fields=[])  # as offload=auto does
    config = replace(asked.config, planner=planner, offload=OffloadConfig())
    return replace(asked, config=config)


def _host_lack(asked: Asked, plan: MemoryPlan) -> str:
    """Say so where a chosen placement lacks host memory alone."""
    found = chosen_anywhere(_with_auto(asked))
    if found is None:
        return ""
    need = sum(found.placed_bytes().values()) - found.placed_bytes()["resident"]
    if need == 0:
        return ""
    limit = max(0, plan.host_limit_bytes - plan.host_total_bytes)
    return (
        f" It would fit with {gib(need)} GiB of weights in host memory, where {gib(limit)} GiB are "
        "available for them."
    )


def _chooser(asked: Asked) -> Chooser:
    rates = rates_for(asked.config.gpu, asked.facts, asked.config.measured_rates)
    return Chooser(_with_auto(asked), rates)


def _auto_fits(asked: Asked) -> bool:
    return _chooser(asked).can_fit


def _less_kv(asked: Asked) -> list[str]:
    """The most KV, in blocks, that a chosen placement leaves room for."""
    size, planner = asked.config.kv.block_size, asked.config.planner

    def is_good(blocks: int) -> bool:
        config = replace(asked.config, planner=replace(planner, kv_tokens=blocks * size))
        return _auto_fits(replace(asked, config=config))

    blocks = largest(1, ((planner.kv_tokens or 1) - 1) // size, is_good)
    return [] if blocks is None else [f"planner.kv_tokens={blocks * size}"]


def _shorter_with_auto(asked: Asked, prefix: str) -> list[str]:
    """The largest length, in blocks, for which a chosen placement fits."""
    size = asked.config.kv.block_size

    def is_good(blocks: int) -> bool:
        return _auto_fits(replace(asked, max_model_len=blocks * size))

    blocks = largest(1, (asked.max_model_len - 1) // size, is_good)
    return [] if blocks is None else [f"{prefix}engine.max_model_len={blocks * size}"]


def _last_resort(asked: Asked, plan: MemoryPlan, num_bytes: int) -> str:
    """What is short where no single change of a setting is enough."""
    roomy = replace(asked, facts=replace(asked.facts, host_available_bytes=2**60))
    if asked.config.planner.choose:
        found = ["it is"] if would_fit(roomy) else []
    else:
        found = advice(roomy)
    if found and asked.config.planner.choose:
        return (
            f"Host memory is what is short: {gib(plan.host_limit_bytes)} GiB are available after a "
            f"reserve of {asked.config.engine.host_reserve_gib:g} GiB. Free host memory, or lower "
            "engine.host_reserve_gib."
        )
    if found:
        return (
            f"It would fit with {'; or '.join(found)}, but not in the "
            f"{gib(plan.host_limit_bytes)} GiB of host memory that are available here. Free host "
            "memory, or take a machine with more."
        )
    share = asked.config.engine.gpu_memory_utilization
    memory = math.ceil(num_bytes / share / GIB * 100 + 1e-6) / 100
    return (
        "No single change makes it fit: lower several of engine.max_model_len, "
        "engine.max_num_batched_tokens and engine.max_num_seqs, or use a card of "
        f"{memory:.2f} GiB, which needs no offload."
    )


def advice(asked: Asked) -> list[str]:
    """Return settings with which the plan fits: a chosen placement, then the least of a backend."""
    if asked.config.planner.choose:
        return []
    found = [_auto_words(asked)] if _auto_fits(asked) else []
    if "cpu_offload_gb" in asked.config.planner.auto_fields:
        return found  # it chooses the size itself
    uva = with_least_uva(_with_offload(asked, OffloadConfig()))
    if uva is not None and not uva.offload.uva.cpu_offload_gb:
        return [*found, "offload=none"]  # host memory alone is short
    node = asked.config.offload
    if uva is not None:
        found.append(
            f"offload=uva offload.uva.cpu_offload_gb={uva.offload.uva.cpu_offload_gb:g}"
            + (" offload.uva.cpu_offload_params=[]" if node.uva.cpu_offload_params else "")
        )
    group = min(8, asked.spec.num_hidden_layers)
    for count in range(1, group + 1):
        tried = PrefetchOffloadConfig(offload_group_size=group, offload_num_in_group=count)
        if would_fit(_with_offload(asked, OffloadConfig(prefetch=tried))):
            found.append(
                f"offload=prefetch offload.prefetch.offload_group_size={group} "
                f"offload.prefetch.offload_num_in_group={count} "
                "offload.prefetch.offload_prefetch_step=1"
                + (" offload.prefetch.offload_params=[]" if node.prefetch.offload_params else "")
            )
            break
    return found


def _with_offload(asked: Asked, offload: OffloadConfig) -> Asked:
    return replace(asked, config=replace(asked.config, offload=offload))
