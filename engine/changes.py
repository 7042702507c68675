"""Single changes of settings with which it fits, each checked by planning again. No torch."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

from engine.accounting import (
    GIB,
    Asked,
    fits,
    gpu_budget_bytes,
    resolve_max_model_len,
)
from engine.auto_fields import fields_fit
from engine.choose import Chooser, largest
from engine.config import EngineConfig
from engine.errors import CapacityError, ConfigError
from engine.placement import assign_layers_on_demand
from engine.plan import MemoryPlan
from engine.rates import rates_for
from engine.swap_space import assign_as_set

TOKEN_STEP: Final = 16
"""Steps of one are not worth trying for tokens of a step."""


def would_fit(asked: Asked) -> bool:
    """Whether planning what is asked would succeed."""
    config = asked.config
    try:
        gpu_budget_bytes(config, asked.facts)
        if config.planner.auto_fields and not asked.reference:
            return fields_fit(config, asked.spec, asked.facts)
        if config.planner.choose and not asked.reference:
            rates = rates_for(config.gpu, asked.facts, config.measured_rates)
            return Chooser(asked, rates).can_fit
        on_demand = assign_layers_on_demand(asked.spec) if asked.reference else None
        placed = on_demand or assign_as_set(asked)
        return placed is not None and fits(asked, placed)
    except (CapacityError, ConfigError):
        return False


def changed(asked: Asked, section: str, **values: Any) -> Asked:
    """Return the same question with other values in one section of the configuration."""
    node = replace(getattr(asked.config, section), **values)
    config: EngineConfig = replace(asked.config, **{section: node})
    return replace(asked, config=config, max_model_len=resolve_max_model_len(config, asked.spec))


def limit_changes(asked: Asked) -> list[str]:
    """Return changes of limits of steps, and of the budget, with which it fits, cheapest first."""
    settings, names = asked.config.engine, asked.config.planner.auto_fields
    found: list[str | None] = []
    if "max_num_seqs" not in names:
        found.append(_lower(asked, "max_num_seqs", 1, settings.max_num_seqs - 1, 1))
    least = -(-settings.max_num_seqs // TOKEN_STEP)
    most = (settings.max_num_batched_tokens - 1) // TOKEN_STEP
    found.append(_lower(asked, "max_num_batched_tokens", least, most, TOKEN_STEP))
    return [*filter(None, found), *budget_changes(asked)]


def _lower(asked: Asked, name: str, least: int, most: int, unit: int) -> str | None:
    """The largest value of a limit with which it fits."""

    def is_good(count: int) -> bool:
        return would_fit(changed(asked, "engine", **{name: count * unit}))

    count = largest(least, most, is_good)
    return None if count is None else f"engine.{name}={count * unit}"


def budget_changes(asked: Asked) -> Iterator[str]:
    """Yield the least share of the card, and the least memory of it, with which it fits."""
    share = asked.config.engine.gpu_memory_utilization
    found = _raise(
        math.floor(share * 100) + 1,
        100,
        lambda n: changed(asked, "engine", gpu_memory_utilization=n / 100),
    )
    if found is not None:
        yield f"engine.gpu_memory_utilization={found / 100:g}"
    memory = asked.config.gpu.memory_gib
    if memory is None:
        return
    most = 2**20 if asked.facts.emulated else math.floor(asked.facts.free_bytes / GIB / share * 100)
    found = _raise(
        math.floor(memory * 100) + 1, most, lambda n: changed(asked, "gpu", memory_gib=n / 100)
    )
    if found is not None:
        yield f"gpu.memory_gib={found / 100:g}"


def _raise(least: int, most: int, at: Callable[[int], Asked]) -> int | None:
    """The least number from `least` to `most` with which it fits; None: there is none."""
    if most < least or not would_fit(at(most)):
        return None
    short = largest(least, most, lambda n: not would_fit(at(n)))
    return least if short is None else short + 1


def host_changes(asked: Asked, plan: MemoryPlan) -> list[str]:
    """Return changes with which it fits where host memory is short: a smaller tier, no reserve."""
    found = [_smaller_tier(asked, plan), _less_reserve(asked)]
    if plan.facts.emulated:
        found.append(_smaller_budget(asked, plan))
    return list(filter(None, found))


def _smaller_tier(asked: Asked, plan: MemoryPlan) -> str | None:
    """The largest host tier that there is room for, by the setting that sizes it."""
    if plan.host_kv is None:
        return None
    [name] = asked.config.kv.sizes
    value = getattr(asked.config.kv, name)
    unit = 1 if name == "num_cpu_blocks" else 100

    def is_good(count: int) -> bool:
        size = count if unit == 1 else count / unit
        return would_fit(changed(asked, "kv", **{name: size}))

    # A smaller tier may hold too little of a sequence; the largest that the host holds is tried.
    beside = chosen_anywhere(asked) if asked.config.planner.choose else plan
    left = plan.host_limit_bytes - (beside or plan).host_total_bytes
    left += plan.kv.num_bytes(plan.kv.host_blocks)
    each = sum(plan.kv.block_bytes) if unit == 1 else GIB / unit
    if name == "swap_space":
        left += plan.swap_weights_bytes
    count = min(math.floor(left / each), math.ceil(value * unit) - 1)
    return f"kv.{name}={count / unit:.12g}" if count > 0 and is_good(count) else None


def chosen_anywhere(asked: Asked) -> MemoryPlan | None:
    """What is chosen where host memory has no limit; None: nothing fits the GPU."""
    facts = replace(asked.facts, host_available_bytes=2**60, pin_limit_bytes=None)
    rates = rates_for(asked.config.gpu, facts, asked.config.measured_rates)
    least = changed(asked, "planner", objective="latency")  # a queue would take more of the host
    found = Chooser(replace(least, facts=facts), rates).best()
    return None if found is None else found[0]


def _less_reserve(asked: Asked) -> str | None:
    """The largest reserve with which it fits."""
    reserve = asked.config.engine.host_reserve_gib

    def is_good(hundredths: int) -> bool:
        return would_fit(changed(asked, "engine", host_reserve_gib=hundredths / 100))

    found = largest(0, math.ceil(reserve * 100) - 1, is_good)
    return None if found is None else f"engine.host_reserve_gib={found / 100:g}"


def _smaller_budget(asked: Asked, plan: MemoryPlan) -> str | None:
    """The largest emulated GPU that the host holds and that still holds one sequence."""
    memory = asked.config.gpu.memory_gib or plan.facts.total_bytes / GIB
    share = asked.config.engine.gpu_memory_utilization
    over = (plan.host_total_bytes - plan.host_limit_bytes) / GIB
    if over <= 0:
        return None
    size = math.floor((min(memory, plan.gpu_total_bytes / share / GIB) - over / share) * 100) / 100
    if size <= 0 or not would_fit(changed(asked, "gpu", memory_gib=size)):
        return None
    return f"gpu.memory_gib={size:g}"
