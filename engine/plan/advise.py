"""Settings that take memory for nothing, in words with figures. Pure arithmetic, no torch."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from engine.asked.config import EngineConfig
from engine.asked.offload import OffloadConfig, PrefetchOffloadConfig
from engine.errors import CapacityError, ConfigError
from engine.model.formats import NO_FORMATS, Format
from engine.model.spec import ModelSpec
from engine.plan.choose import Chooser, largest
from engine.plan.memory import (
    Asked,
    DeviceFacts,
    MemoryPlan,
    asked_kv_sizes,
    build_plan,
    fits,
    gpu_budget_bytes,
    has_kv_room,
    lay_out,
    resolve_dtype,
    resolve_max_model_len,
    served,
    takes_swap_space,
)
from engine.plan.policy import (
    Assignment,
    assign,
    assign_layers_on_demand,
    assign_resident,
    assign_spread,
)
from engine.plan.times import CONTEXT_TOKENS, Rates, Shape, decode_step_s, rates_for, shape_of
from engine.plan.units import PREFETCH, RESIDENT
from engine.sealed import GIB


def with_swap_space(asked: Asked, size_gib: float) -> Asked:
    """The same question with another kv.swap_space."""
    kv = replace(asked.config.kv, swap_space=size_gib)
    return replace(asked, config=replace(asked.config, kv=kv))


def least_swap_space(asked: Asked) -> float | None:
    """Return the least swap_space with which there is room, to 0.01 GiB; None: there is none."""

    def is_short(hundredths: int) -> bool:
        size = hundredths / 100
        return spread_that_fits(with_swap_space(asked, size), int(size * GIB)) is None

    kv_bytes = asked_kv_sizes(asked).sequence_bytes(asked.max_model_len)
    weights = asked.formats.total_bytes(asked.spec.tensors())
    most = math.ceil(100 * (weights + kv_bytes) / GIB)
    short = largest(1, most, is_short)
    return None if short == most else ((short or 0) + 1) / 100


def assign_as_set(asked: Asked) -> Assignment | None:
    """Return what the offload settings place; None: kv.swap_space is to take more than it holds."""
    if not takes_swap_space(asked):
        return assign(asked.spec, asked.config.offload, asked.formats)
    count = spread_that_fits(asked, int(asked.config.kv.swap_space * GIB))
    return None if count is None else assign_spread(asked.spec, count)


def spread_that_fits(asked: Asked, room: int) -> int | None:
    """Return the fewest layers, spread evenly over the host, with which there is room for KV.

    Args:
        asked: What is asked.
        room: Of weights in host memory, bytes.
    """
    layer_bytes = spread_bytes(asked, 1)
    for count in range(asked.spec.num_hidden_layers + 1):
        if count * layer_bytes > room:
            return None
        plan = build_plan(asked, served(asked, assign_spread(asked.spec, count)))
        if has_kv_room(plan):
            return count
    return None


def spread_bytes(asked: Asked, count: int) -> int:
    """Return the bytes of so many whole layers in host memory."""
    one = lay_out(asked.spec, assign_spread(asked.spec, 1), asked.formats)
    return count * one.offloaded_bytes


def choose_fields(
    config: EngineConfig,
    spec: ModelSpec,
    facts: DeviceFacts,
    tensor_formats: Mapping[str, Format] = NO_FORMATS,
) -> tuple[EngineConfig, list[str]]:
    """Return the configuration with planner.auto_fields chosen, and a note for each.

    max_num_seqs is halved, and then max_model_len lowered, only where no offload is enough;
    cpu_offload_gb is the least with which it fits. Where nothing fits the configuration is returned
    as it is, and planning it refuses with the figures. The objective context chooses max_model_len
    too where none is set.
    """
    planner = config.planner
    names = set(planner.auto_fields)
    if planner.choose and planner.objective == "context" and config.engine.max_model_len is None:
        names.add("max_model_len")
    if not names:
        return config, []
    search = _Search(config, spec, facts, names, tensor_formats)
    found = search.run()
    return config if found is None else found, search.notes(found)


def fields_fit(asked: Asked, config: EngineConfig) -> bool:
    """Whether planner.auto_fields can be chosen so that this configuration of it fits."""
    names = set(config.planner.auto_fields)
    return _Search(config, asked.spec, asked.facts, names, asked.tensor_formats).can_fit


def with_least_uva(asked: Asked) -> EngineConfig | None:
    """Return the configuration with the least cpu_offload_gb that fits, to 0.01; None: none does.

    Args:
        asked: Its uva selectors stay; of 0 GiB, which everything fits with, they are removed.
    """
    config, node = asked.config, asked.config.offload.uva

    def moved(hundredths: int) -> Asked:
        # The backend stays as asked: uva with 0 GiB moves nothing and would be refused.
        backend = config.offload.offload_backend if hundredths else "auto"
        selectors = node.cpu_offload_params if hundredths else []
        uva = replace(node, cpu_offload_gb=hundredths / 100, cpu_offload_params=selectors)
        offload = replace(config.offload, offload_backend=backend, uva=uva)
        return replace(asked, config=replace(config, offload=offload))

    def placed(wanted: Asked) -> Assignment:
        return served(wanted, assign(wanted.spec, wanted.config.offload, wanted.formats))

    def is_short(hundredths: int) -> bool:
        wanted = moved(hundredths)
        return not has_kv_room(build_plan(wanted, placed(wanted)))

    most = math.ceil(asked.formats.total_bytes(asked.spec.tensors()) / GIB * 100)
    short = largest(0, most, is_short)
    if short == most:
        return None
    found = moved(0 if short is None else short + 1)
    return found.config if fits(found, placed(found)) else None  # it may lack host memory


class _Search:
    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        facts: DeviceFacts,
        names: set[str],
        tensor_formats: Mapping[str, Format],
    ) -> None:
        self._config, self._spec, self._facts, self._names = config, spec, facts, names
        self._tensor_formats = tensor_formats
        self._limit = resolve_max_model_len(config, spec)

    def run(self) -> EngineConfig | None:
        """Return the first configuration that fits."""
        most = self._config.engine.max_num_seqs
        counts = [most]
        while "max_num_seqs" in self._names and counts[-1] > 1:
            counts.append(counts[-1] // 2)
        for count in counts:
            found = self._offloaded(self._with(count, self._limit))
            if found is not None:
                return self._with_kept_seqs(found)
        if "max_model_len" not in self._names:
            return None
        length = largest(2, self._limit, lambda n: self._offloaded(self._least(n)) is not None)
        if length is None:
            return None
        found = self._offloaded(self._least(length))
        return None if found is None else self._with_kept_seqs(found)

    @property
    def can_fit(self) -> bool:
        """Whether the least that may be chosen fits."""
        length = 2 if "max_model_len" in self._names else self._limit
        return self._offloaded(self._least(length)) is not None

    def notes(self, found: EngineConfig | None) -> list[str]:
        """Return what was chosen in words."""
        if found is None:
            return []
        values = {
            "cpu_offload_gb": f"offload.uva.cpu_offload_gb={found.offload.uva.cpu_offload_gb:g}",
            "max_model_len": f"engine.max_model_len={found.engine.max_model_len}",
            "max_num_seqs": f"engine.max_num_seqs={found.engine.max_num_seqs}",
        }
        chosen = ", ".join(values[name] for name in sorted(self._names))
        return [f"planner.auto_fields: {chosen}."]

    def _with(self, max_num_seqs: int, max_model_len: int) -> EngineConfig:
        engine = replace(
            self._config.engine, max_num_seqs=max_num_seqs, max_model_len=max_model_len
        )
        return replace(self._config, engine=engine)

    def _least(self, length: int) -> EngineConfig:
        """The fewest sequences that may be chosen, of that length."""
        few = 1 if "max_num_seqs" in self._names else self._config.engine.max_num_seqs
        return self._with(few, length)

    def _asked(self, config: EngineConfig) -> Asked:
        dtype = resolve_dtype(config, self._spec, self._facts.kind)
        length = config.engine.max_model_len or self._limit
        formats = self._tensor_formats
        return Asked(
            config,
            self._spec,
            self._facts,
            dtype,
            length,
            reference=False,
            tensor_formats=formats,
        )

    def _offloaded(self, config: EngineConfig) -> EngineConfig | None:
        """Return the configuration with the least offload that fits, or None."""
        asked = self._asked(config)
        if "cpu_offload_gb" in self._names:
            return with_least_uva(asked)
        if config.planner.choose:
            rates = rates_for(config.gpu, self._facts, config.measured_rates)
            chooser = Chooser(asked, rates)
            return config if chooser.can_fit else None
        placed = assign_as_set(asked)
        return config if placed is not None and fits(asked, placed) else None

    def _with_kept_seqs(self, config: EngineConfig) -> EngineConfig:
        """Lower max_num_seqs to what the KV cache holds at full length, where it is chosen."""
        if "max_num_seqs" not in self._names:
            return config
        asked = self._asked(config)
        if config.planner.choose:
            rates = rates_for(config.gpu, self._facts, config.measured_rates)
            chooser = Chooser(asked, rates)
            found = None if chooser.moves_nothing else chooser.best()
            plan = chooser.resident if found is None else found[0]
        else:
            placed = assign_as_set(asked) or assign_resident(self._spec)
            plan = build_plan(asked, served(asked, placed))
        held = max(1, math.floor(plan.max_concurrency))
        count = min(held, config.engine.max_num_seqs)
        return replace(config, engine=replace(config.engine, max_num_seqs=count))


TOKEN_STEP: Final = 16
"""Steps of one are not worth trying for tokens of a step."""


def would_fit(asked: Asked) -> bool:
    """Whether planning what is asked would succeed."""
    config = asked.config
    try:
        gpu_budget_bytes(config, asked.facts)
        if config.planner.auto_fields and not asked.reference:
            return fields_fit(asked, config)
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
    moved = sum(placed.values()) - placed[RESIDENT.name]
    room = asked.config.offload.uva.cpu_offload_gb
    if moved >= room * GIB:
        return []
    return [
        f"offload.uva.cpu_offload_gb={room:g} is more than the {moved / GIB:.3f} GiB that can be "
        "moved, and the rest of it has no use."
    ]


def _slots(plan: MemoryPlan, asked: Asked, rates: Rates) -> list[str]:
    """Slots of prefetch beyond those that make a step shorter."""
    if not plan.units_of(PREFETCH) or plan.num_slots <= 2 or asked.config.planner.choose:
        return []
    shape = shape_of(plan, asked.spec)
    now = _steps_s(shape, rates)
    enough = next(
        slots
        for slots in range(2, plan.num_slots + 1)
        if _is_near(_steps_s(_with_slots(shape, slots), rates), now)
    )
    saved = (plan.num_slots - enough) * plan.slot_bytes
    if saved < WORTH_SAYING * plan.gpu_budget_bytes:
        return []
    return [
        f"offload.prefetch.offload_prefetch_step={plan.lookahead} holds {plan.num_slots} slots; "
        f"{enough - 1} would leave {saved / GIB:.2f} GiB more for the KV cache, and a decode step "
        f"would take as long (predicted; {rates.source})."
    ]


def _with_slots(shape: Shape, count: int) -> Shape:
    return replace(shape, moved=tuple(replace(found, num_slots=count) for found in shape.moved))


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
        plan.formats.num_bytes(tensor)
        for layer in plan.offloaded_layers
        for tensor in layer.offloaded_tensors
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
