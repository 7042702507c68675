"""Settings with which a plan fits, to choose or to advise, and settings that waste memory.

Each is found by one search: the least or greatest value that fits. Pure arithmetic, no torch.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from engine.asked.config import EngineConfig
from engine.asked.offload import OffloadConfig, PrefetchOffloadConfig
from engine.errors import CapacityError, ConfigError
from engine.plan.choose import Chooser
from engine.plan.memory import (
    Asked,
    MemoryPlan,
    build_plan,
    fits,
    gpu_budget_bytes,
    has_kv_room,
    lay_out,
    plan_fits,
    resolve_max_model_len,
    takes_swap_space,
)
from engine.plan.policy import (
    Assignment,
    assign,
    assign_layers_on_demand,
    assign_resident,
    assign_spread,
)
from engine.plan.times import (
    CONTEXT_TOKENS,
    Rates,
    Shape,
    asked_rates,
    decode_step_s,
    shape_of,
)
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


def changed(asked: Asked, section: str, **values: Any) -> Asked:
    """Return the same question with other values in one section of the configuration."""
    node = replace(getattr(asked.config, section), **values)
    config: EngineConfig = replace(asked.config, **{section: node})
    return replace(asked, config=config, max_model_len=resolve_max_model_len(config, asked.spec))


def with_auto(asked: Asked) -> Asked:
    """Return the same question with every placement chosen."""
    planner = replace(asked.config.planner, choose=True, auto_fields=[])  # as offload=auto does
    config = replace(asked.config, planner=planner, offload=OffloadConfig())
    return replace(asked, config=config)


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
    found = _with_fields(asked, names) if names and not asked.reference else None
    if found is None:
        return config, []
    values = {
        "cpu_offload_gb": f"offload.uva.cpu_offload_gb={found.offload.uva.cpu_offload_gb:g}",
        "max_model_len": f"engine.max_model_len={found.engine.max_model_len}",
        "max_num_seqs": f"engine.max_num_seqs={found.engine.max_num_seqs}",
    }
    chosen = ", ".join(values[name] for name in sorted(names))
    return found, [f"planner.auto_fields: {chosen}."]


def _with_fields(asked: Asked, names: set[str]) -> EngineConfig | None:
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
        found = None if length is None else _with_least_offload(at(few, length), names)
    if found is None or "max_num_seqs" not in names:
        return found
    # No more sequences than the KV cache holds at full length.
    plan = _plan_as_set(changed(replace(asked, config=found), "engine"))
    count = min(found.engine.max_num_seqs, max(1, math.floor(plan.max_concurrency)))
    return replace(found, engine=replace(found.engine, max_num_seqs=count))


def _with_least_offload(asked: Asked, names: set[str]) -> EngineConfig | None:
    """Return the configuration, with the least cpu_offload_gb where it is named, if it fits."""
    if "cpu_offload_gb" in names:
        return with_least_uva(asked)
    if asked.config.planner.choose and not asked.reference:
        return asked.config if Chooser(asked).can_fit else None
    placed = assign_as_set(asked)
    return asked.config if placed is not None and fits(asked, placed) else None


def _plan_as_set(asked: Asked) -> MemoryPlan:
    """Return the plan of what is chosen or set, whether it fits or not."""
    if asked.config.planner.choose:
        chooser = Chooser(asked)
        found = chooser.best()
        return chooser.resident if found is None else found[0]
    return build_plan(asked, assign_as_set(asked) or assign_resident(asked.spec))


# Settings that are advised.


@dataclass(frozen=True)
class Setting:
    """A setting whose least or greatest value that fits is looked for."""

    section: str
    name: str
    low: int
    """What is tried, from here to `high`, counted in steps."""
    high: int
    step: int = 1
    parts: int = 1
    """Steps in one, where they are smaller than it."""
    is_least: bool = False
    """The least that fits is wanted, else the greatest."""
    test: Callable[[Asked], bool] = would_fit

    def value(self, count: int) -> float:
        """Return the value of so many steps."""
        return count * self.step if self.parts == 1 else count / self.parts

    def found(self, asked: Asked) -> str:
        """Return the setting as it is typed, with the value that fits; empty: none does."""

        def is_good(count: int) -> bool:
            return self.test(changed(asked, self.section, **{self.name: self.value(count)}))

        count = (least if self.is_least else greatest)(self.low, self.high, is_good)
        return "" if count is None else f"{self.section}.{self.name}={self.value(count):.12g}"


def found_of(settings: Iterable[Setting], asked: Asked) -> list[str]:
    """Return each of the settings that a value fits of, as it is typed."""
    return [words for setting in settings if (words := setting.found(asked))]


TOKEN_STEP: Final = 16
"""Steps of one are not worth trying for tokens of a step."""


def limits(asked: Asked) -> list[Setting]:
    """Return limits of steps, and the GPU budget, cheapest first."""
    engine, memory, facts = asked.config.engine, asked.config.gpu.memory_gib, asked.facts
    seqs, share = engine.max_num_seqs, engine.gpu_memory_utilization
    fewest, most = -(-seqs // TOKEN_STEP), (engine.max_num_batched_tokens - 1) // TOKEN_STEP
    more = math.floor(share * 100) + 1
    found = [
        Setting("engine", "max_num_seqs", 1, seqs - 1),
        Setting("engine", "max_num_batched_tokens", fewest, most, step=TOKEN_STEP),
        Setting("engine", "gpu_memory_utilization", more, 100, parts=100, is_least=True),
    ]
    if memory is not None:
        card = 2**20 if facts.emulated else math.floor(facts.free_bytes / GIB / share * 100)
        low = math.floor(memory * 100) + 1
        found.append(Setting("gpu", "memory_gib", low, card, parts=100, is_least=True))
    return found[1:] if "max_num_seqs" in asked.config.planner.auto_fields else found


def host_settings(asked: Asked, plan: MemoryPlan) -> list[Setting]:
    """Return what takes host memory beside weights: tier of KV blocks, reserve, emulated GPU."""
    config, found, over = asked.config, [], plan.host_total_bytes - plan.host_limit_bytes
    if plan.host_kv is not None:
        [(name, size)] = config.kv.sizes.items()
        parts = 1 if name == "num_cpu_blocks" else 100
        beside = chosen_anywhere(asked) if config.planner.choose else plan
        left = plan.host_limit_bytes - (beside or plan).host_total_bytes
        left += plan.kv.num_bytes(plan.kv.host_blocks)
        left += plan.swap_weights_bytes if name == "swap_space" else 0
        each = sum(plan.kv.block_bytes) if parts == 1 else GIB / parts
        most = min(math.floor(left / each), math.ceil(size * parts) - 1)
        # Only the largest that the host holds: a smaller one may hold too little of a sequence.
        found.append(Setting("kv", name, max(1, most), most, parts=parts))
    reserve = math.ceil(config.engine.host_reserve_gib * 100) - 1
    found.append(Setting("engine", "host_reserve_gib", 0, reserve, parts=100))
    if plan.facts.emulated and over > 0:
        share = config.engine.gpu_memory_utilization
        memory = config.gpu.memory_gib or plan.facts.total_bytes / GIB
        used = min(memory, plan.gpu_total_bytes / share / GIB)
        most = math.floor((used - over / GIB / share) * 100)
        found.append(Setting("gpu", "memory_gib", max(1, most), most, parts=100))
    return found


def less_with_auto(asked: Asked) -> Setting:
    """Return planner.kv_tokens, else the length, in blocks where every placement is chosen."""
    size, tokens = asked.config.kv.block_size, asked.config.planner.kv_tokens
    if tokens is not None:
        return Setting("planner", "kv_tokens", 1, (tokens - 1) // size, size, test=auto_fits)
    low, high = -(-2 // size), (asked.max_model_len - 1) // size
    return Setting("engine", "max_model_len", low, high, size, test=auto_fits)


FITS_WITH: Final = " Fits with: "


def chosen_anywhere(asked: Asked) -> MemoryPlan | None:
    """What is chosen where host memory has no limit; None: nothing fits the GPU."""
    facts = replace(asked.facts, host_available_bytes=2**60, pin_limit_bytes=None)
    latency = changed(asked, "planner", objective="latency")  # a queue would take more of the host
    found = Chooser(replace(latency, facts=facts)).best()
    return None if found is None else found[0]


def gib(num_bytes: int) -> str:
    """GiB with two decimals, more below 1, so that a small lack is seen."""
    value = num_bytes / GIB
    decimals = 2 if abs(value) >= 1 else 3 if abs(value) >= 0.05 else 6
    return f"{value:.{decimals}f}"


def refusal(plan: MemoryPlan, asked: Asked) -> str:
    """Say what was needed, what is there, and the cheapest settings that would fit."""
    items, planner = plan.gpu_items, asked.config.planner
    fixed = plan.gpu_total_bytes - items["kv_cache"]
    left = plan.gpu_budget_bytes - fixed
    wanted, who = asked.max_model_len, f"one sequence of max_model_len={asked.max_model_len}"
    if planner.kv_tokens is not None and planner.kv_tokens > wanted:
        wanted, who = planner.kv_tokens, f"planner.kv_tokens={planner.kv_tokens}"
    blocks = math.ceil(wanted / plan.block_size)
    if wanted <= plan.max_model_len:
        blocks = plan.kv.blocks(wanted)[0]
    need = plan.kv.room(blocks)
    reach = min(plan.reach[0] - plan.num_gpu_blocks, blocks)
    elsewhere = f", up to {gib(reach * plan.block_bytes)} of it in host memory" if reach else ""
    parts = ", ".join(f"{k} {gib(v)}" for k, v in items.items() if v and k != "kv_cache")
    text = (
        f"available KV cache memory: {gib(left)} GiB; {who} needs {gib(need)} GiB{elsewhere}. "
        f"GPU budget "
        f"{gib(plan.gpu_budget_bytes)} GiB, taken by {parts} (GiB); the largest is "
        f"{max(items, key=items.__getitem__)}."
    )
    found, gain = advice(asked)
    if planner.choose:
        text += _host_lack(asked, plan)
        found += found_of([less_with_auto(asked)], asked) + _host_kv_with_auto(asked, plan)
    else:
        length = Setting("engine", "max_model_len", 2, asked.max_model_len - 1)
        shorter = found_of([length], asked)
        if not shorter and not found:
            words = found_of([less_with_auto(asked)], asked)
            shorter = [f"{_auto_words(asked)} {word}" for word in words]
        found += shorter + _more_host_kv(asked, plan)
    found = found or found_of([*limits(asked), *host_settings(asked, plan)], asked)
    if not found:
        return f"{text} {_last_resort(asked, plan, fixed + need)}"
    return text + gain + FITS_WITH + "; or ".join(found) + "."


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
    emulated = items.get("emulated_gpu", 0)
    if emulated and emulated == max(items.values()):
        size = emulated / GIB
        text += f" Without a GPU, to emulate {size:.2f} GiB of one takes as much RAM."
    found, gain = advice(asked) if plan.offloaded_layers else ([], "")
    found += found_of(host_settings(asked, plan), asked)
    if found:
        return text + gain + FITS_WITH + "; or ".join(found) + "."
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
    gpu_blocks = build_plan(wide, placed).num_gpu_blocks
    enough, words = _with_host_kv(asked, plan, max(1, need - gpu_blocks))
    return [words] if gpu_blocks and fits(enough, placed) else []


def _host_kv_with_auto(asked: Asked, plan: MemoryPlan) -> list[str]:
    """A host tier with which a chosen placement fits, to a thirty-second of a sequence."""
    kv, need = asked.config.kv, plan.kv.blocks(plan.max_model_len)[0]
    if plan.host_kv is not None or kv.swap_space or asked.config.planner.kv_tokens is not None:
        return []

    def at(parts: int) -> tuple[Asked, str]:
        return _with_host_kv(asked, plan, -(-need * parts // 32))

    parts = least(1, 32, lambda count: auto_fits(at(count)[0]))
    return [] if parts is None else [at(parts)[1]]


def _with_host_kv(asked: Asked, plan: MemoryPlan, num_blocks: int) -> tuple[Asked, str]:
    """The same question with so many host blocks, and words for it in the setting's own unit."""
    if asked.config.kv.num_cpu_blocks:
        wider = changed(asked, "kv", num_cpu_blocks=num_blocks)
        return wider, f"kv.num_cpu_blocks={num_blocks}"
    size = math.ceil(num_blocks * sum(plan.kv.block_bytes) / GIB * 1000) / 1000
    return changed(asked, "kv", cpu_gib=size, num_cpu_blocks=None), f"kv.cpu_gib={size:.12g}"


def _auto_words(asked: Asked) -> str:
    """How to ask for chosen placements; a chosen cpu_offload_gb and selectors contradict them."""
    node = asked.config.offload
    undone = {
        " planner.auto_fields=[]": "cpu_offload_gb" in asked.config.planner.auto_fields,
        " offload.uva.cpu_offload_params=[]": bool(node.uva.cpu_offload_params),
        " offload.prefetch.offload_params=[]": bool(node.prefetch.offload_params),
    }
    return "offload=auto" + "".join(words for words, is_set in undone.items() if is_set)


def _host_lack(asked: Asked, plan: MemoryPlan) -> str:
    """Say so where a chosen placement lacks host memory alone."""
    found = chosen_anywhere(with_auto(asked))
    need = 0 if found is None else off_gpu_bytes(found)
    if need == 0:
        return ""
    limit = max(0, plan.host_limit_bytes - plan.host_total_bytes)
    return (
        f" It would fit with {gib(need)} GiB of weights in host memory, where {gib(limit)} GiB are "
        "available for them."
    )


def _last_resort(asked: Asked, plan: MemoryPlan, num_bytes: int) -> str:
    """What is short where no single change of a setting is enough."""
    roomy = replace(asked, facts=replace(asked.facts, host_available_bytes=2**60))
    if asked.config.planner.choose and would_fit(roomy):
        return (
            f"Host memory is what is short: {gib(plan.host_limit_bytes)} GiB are available after a "
            f"reserve of {asked.config.engine.host_reserve_gib:g} GiB. Free host memory, or lower "
            "engine.host_reserve_gib."
        )
    if found := advice(roomy)[0]:
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


def advice(asked: Asked) -> tuple[list[str], str]:
    """Return settings with which the plan fits, and what lossless weights are like if they do.

    Lossless weights, a chosen placement, then the least of a backend.
    """
    if asked.config.planner.choose or asked.reference:
        return [], ""  # placements are chosen already, or are not what is asked
    found, gain = _lossless(asked)
    auto = _auto_words(asked)
    if not any(words.startswith(auto) for words in found) and auto_fits(asked):
        found.append(auto)
    return found + _least_of_backends(asked), gain


def _least_of_backends(asked: Asked) -> list[str]:
    """Return the least uva and the least prefetch that fit with weights as they are."""
    if "cpu_offload_gb" in asked.config.planner.auto_fields:
        return []  # it chooses the size itself
    uva = with_least_uva(_with_offload(asked, OffloadConfig()))
    if uva is not None and not uva.offload.uva.cpu_offload_gb:
        return ["offload=none"]  # host memory alone is short
    node, found = asked.config.offload, []
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


LOSSLESS_WORDS: Final = "engine.weight_format=lossless"


def lossless_resident(asked: Asked) -> MemoryPlan | None:
    """Return the plan of everything on the GPU in codes; None: no room, no use, or ruled out."""
    coded = in_codes(_with_offload(asked, OffloadConfig()))
    if coded is None:
        return None
    plan = build_plan(coded, assign_resident(coded.spec))
    return plan if plan_fits(plan) else None


def _lossless(asked: Asked) -> tuple[list[str], str]:
    """Return how lossless weights fit with least off the GPU, and what they are like; or nothing.

    Everything on the GPU, else what is set, else a chosen placement that is faster than a plain
    one.
    """
    coded, offload = in_codes(asked), asked.config.offload
    if coded is None:
        return [], ""
    is_set = offload.backend != "none" or bool(asked.config.planner.auto_fields)
    has_selectors = bool(offload.uva.cpu_offload_params or offload.prefetch.offload_params)
    resident = None if has_selectors else lossless_resident(asked)
    if resident is not None:
        words = LOSSLESS_WORDS if offload.backend == "none" else f"offload=none {LOSSLESS_WORDS}"
        return [words], _lossless_gain(resident, asked)
    if (is_set or takes_swap_space(asked)) and would_fit(coded):
        chosen = _with_fields(coded, set(asked.config.planner.auto_fields))
        plan = _plan_as_set(replace(coded, config=chosen or coded.config))
        return [LOSSLESS_WORDS], _lossless_gain(plan, asked)
    best, plain = (Chooser(with_auto(each)).best() for each in (coded, asked))
    if best is None or (plain and step_s(plain[0], asked) <= step_s(best[0], asked)):
        return [], ""
    words = f"{_auto_words(asked)} {LOSSLESS_WORDS}"
    return [words], _lossless_gain(best[0], asked, plain[0] if plain else None)


def _lossless_gain(plan: MemoryPlan, asked: Asked, plain: MemoryPlan | None = None) -> str:
    """Say what a plan of lossless weights is like, beside one of plain weights if there is any."""
    moved, and_what = off_gpu_bytes(plan), ""
    if moved:
        and_what = f" and {gib(moved)} GiB of weights off the GPU"
        and_what += f" ({gib(off_gpu_bytes(plain))} GiB of plain ones)" if plain else ""
    stays = "" if moved else "no layer leaves the GPU, "
    return (
        f" It fits with {LOSSLESS_WORDS}{and_what}: {stays}the tokens are the same, about "
        f"{float(f'{step_s(plan, asked) * 1e3:.3g}'):g} ms a token (predicted; "
        f"{asked_rates(asked).source})."
    )


def off_gpu_bytes(plan: MemoryPlan) -> int:
    """Bytes of weights that lie in host memory."""
    placed = plan.placed_bytes()
    return sum(placed.values()) - placed[RESIDENT.name]


def step_s(plan: MemoryPlan, asked: Asked) -> float:
    """Return the predicted seconds of a decode step of one short sequence."""
    shape, context = shape_of(plan, asked.spec), min(CONTEXT_TOKENS, plan.max_model_len)
    return decode_step_s(shape, asked_rates(asked), 1, context)


def _with_offload(asked: Asked, offload: OffloadConfig) -> Asked:
    return replace(asked, config=replace(asked.config, offload=offload))


# Settings that waste memory.


WORTH_SAYING: Final = 0.02
"""Share of the GPU budget below which nothing is said."""
SAME_TIME: Final = 0.01
"""Predicted times that differ by less count as equal."""


def _offload_room(plan: MemoryPlan, asked: Asked) -> str:
    """cpu_offload_gb beyond all that can be moved."""
    moved, room = off_gpu_bytes(plan), asked.config.offload.uva.cpu_offload_gb
    is_set = asked.config.offload.backend == "uva" and not asked.config.planner.choose
    if not is_set or moved >= room * GIB:
        return ""
    return (
        f"offload.uva.cpu_offload_gb={room:g} is more than the {moved / GIB:.3f} GiB that can be "
        "moved, and the rest of it has no use."
    )


def _slots(plan: MemoryPlan, asked: Asked, rates: Rates) -> str:
    """Slots of prefetch beyond those that make a step shorter."""
    if not plan.units_of(PREFETCH) or plan.num_slots <= 2 or asked.config.planner.choose:
        return ""
    shape = shape_of(plan, asked.spec)
    most = [(1 + SAME_TIME) * seconds for seconds in _steps_s(shape, rates)]
    enough = next(
        slots
        for slots in range(2, plan.num_slots + 1)
        if all(map(float.__le__, _steps_s(_with_slots(shape, slots), rates), most))
    )
    saved = (plan.num_slots - enough) * plan.slot_bytes
    if saved < WORTH_SAYING * plan.gpu_budget_bytes:
        return ""
    return (
        f"offload.prefetch.offload_prefetch_step={plan.lookahead} holds {plan.num_slots} slots; "
        f"{enough - 1} would leave {saved / GIB:.2f} GiB more for the KV cache, and a decode step "
        f"would take as long (predicted; {rates.source})."
    )


def _with_slots(shape: Shape, count: int) -> Shape:
    return replace(shape, moved=tuple(replace(found, num_slots=count) for found in shape.moved))


def _steps_s(shape: Shape, rates: Rates) -> list[float]:
    """A decode step of one sequence, and of as many as have room."""
    context = min(CONTEXT_TOKENS, shape.plan.max_model_len)
    batches = (1, shape.concurrency(context))
    return [decode_step_s(shape, rates, batch, context) for batch in batches]


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
        f"kv.{name}: the host tier has {count} blocks, of which {use} have a use: "
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


def waste_notes(plan: MemoryPlan, asked: Asked, rates: Rates) -> list[str]:
    """Return what takes memory that nothing uses: offload room, slots, sequences, budget."""
    checks = (
        _offload_room(plan, asked),
        _slots(plan, asked, rates),
        _sequences(plan),
        _budget(plan),
        _host_tier(plan, asked),
        _pin_limit(plan, asked),
    )
    return [text for text in checks if text]
