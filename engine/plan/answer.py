"""Say whether what is asked fits, which settings make it fit or faster, and what each costs.

A refusal is made of these lines, and `mode=plan` prints the same. Every figure is that of a plan
that was made. Pure arithmetic, no torch.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Final

from engine.asked.config import MOST_MEMORY_GIB, EngineConfig, PlannerConfig
from engine.asked.offload import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from engine.errors import CapacityError
from engine.lines import LABEL, WIDTH, by_words, labelled, wrapped
from engine.plan.advise import (
    LOSSLESS_WORDS,
    auto_fits,
    changed,
    fast_length,
    gib,
    greatest,
    least,
    lossless_resident,
    no_offload,
    off_gpu_bytes,
    plan_as_set,
    roomy_card_gib,
    with_auto,
    with_fields,
    with_least_uva,
    with_offload,
    would_fit,
)
from engine.plan.choose import Chooser
from engine.plan.memory import (
    Asked,
    MemoryPlan,
    build_plan,
    fits,
    plan_fits,
    step_blocks,
    takes_swap_space,
)
from engine.plan.policy import assign, assign_resident
from engine.plan.queue import QUEUE_REQUESTS, queue_of, queue_s
from engine.plan.times import CONTEXT_TOKENS, decode_step_s, shape_of
from engine.plan.weight_format import in_codes
from engine.sealed import GIB, yaml_text

WORTH: Final = 1.02
"""How much faster other settings must be predicted to be to be shown."""
GROUP: Final = 8
"""Layers in a group of the prefetch settings that are tried, as in conf/offload."""
LOOKAHEADS: Final = (2, 1)
"""Groups ahead that are tried, that of conf/offload first."""

Planned = Callable[[EngineConfig], MemoryPlan | None]
"""Plans another configuration of the same model and machine; None: it does not fit."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """Settings with which it fits, and the plan that they make."""

    settings: tuple[str, ...]
    """Settings as they are typed, in the place of others of their groups."""
    asked: Asked
    """The question with them."""
    plan: MemoryPlan
    is_shorter: bool = False
    """Whether sequences are shorter than what was asked for."""

    def tokens_s(self, context: int | None = None) -> float:
        """Return what the objective counts, tokens/s: of a queue, else of one sequence."""
        shape = shape_of(self.plan, self.asked.spec, self.asked.rates)
        length = self.plan.max_model_len
        if self.asked.config.planner.objective == "throughput":
            prompt, output = queue_of(length)
            time_s = queue_s(shape, QUEUE_REQUESTS, prompt, output)
            return QUEUE_REQUESTS * output / time_s
        return 1 / decode_step_s(shape, 1, min(context or CONTEXT_TOKENS, length))

    @property
    def moved_bytes(self) -> int:
        """Bytes of weights that lie in host memory."""
        return off_gpu_bytes(self.plan)

    @property
    def is_lossless(self) -> bool:
        """Whether weights are in codes."""
        return self.plan.formats.has_codes

    @property
    def reads_kv_in_place(self) -> bool:
        """Whether a sequence of max_model_len reads keys and values in host memory each step."""
        return self.plan.num_gpu_blocks < self.plan.kv.blocks(self.plan.max_model_len)[0]

    def effect(self) -> str:
        """Return what it does to memory and tokens, in words."""
        size = self.moved_bytes
        parts = [f"{gib(size)} in host memory" if size else "no layer leaves the GPU"]
        if self.is_shorter:
            parts = [f"up to {self.plan.max_model_len:,} tokens", *parts[: bool(size)]]
        if self.reads_kv_in_place:
            far = self.plan.kv.blocks(self.plan.max_model_len)[0] - self.plan.num_gpu_blocks
            parts.append(f"{gib(far * self.plan.block_bytes)} of KV read from host memory")
        return ", ".join([*parts, *(["same tokens"] if self.is_lossless else [])])

    def to_dict(self, context: int | None) -> dict[str, Any]:
        """Return plain data for a record."""
        return {
            "settings": list(self.settings),
            "tokens_s": self.tokens_s(context),
            "host_weights_bytes": self.moved_bytes,
            "host_total_bytes": self.plan.host_total_bytes,
            "max_model_len": self.plan.max_model_len,
        }


Row = tuple[str, str, str, str]
"""Label, settings, rate and effect."""


def way_rows(ways: Sequence[Way], context: int | None, *, is_fix: bool) -> list[Row]:
    """Return the best of some ways, the next, the simplest and the shorter ones, each a row.

    `ways` that keep what was asked for come first, the fastest first.
    """
    keeping = [way for way in ways if not way.is_shorter] or list(ways)
    labels = ["Best fix", "Next"] if is_fix else ["Faster"]
    chosen = list(zip(labels, keeping, strict=False))
    by_size = "offload.uva", "offload.experts"
    simple = next((way for way in keeping if way.settings[0].startswith(by_size)), None)
    if is_fix and simple is not None and all(way is not simple for _, way in chosen):
        chosen.append(("Simplest", simple))
    chosen += [("Shorter", way) for way in ways if way.is_shorter and way is not keeping[0]]
    return [
        (label, " ".join(way.settings), f"{rate(way.tokens_s(context))} tok/s", way.effect())
        for label, way in chosen
    ]


def rate(tokens_s: float) -> str:
    """Return tokens/s with three significant digits."""
    return f"{tokens_s:,.0f}" if tokens_s >= 99.95 else f"{tokens_s:#.3g}"


_GAP: Final = 2
_LEAST_EFFECT: Final = 16


def row_lines(rows: Sequence[Row]) -> list[str]:
    """Return rows as lines of at most WIDTH characters, wrapped by words."""
    if not rows:
        return []
    longest = max(len(word) for _, settings, _, _ in rows for word in settings.split())
    widths = [LABEL, longest + _GAP, max(len(row[2]) for row in rows) + _GAP]
    widths.append(max(_LEAST_EFFECT, WIDTH - sum(widths)))
    lines = []
    for row in rows:
        sizes = (WIDTH, *(width - _GAP for width in widths[1:]))
        cells = [by_words(cell, size) for cell, size in zip(row, sizes, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            padded = (part.ljust(size) for part, size in zip(parts, widths, strict=True))
            lines.append("".join(padded).rstrip())
    return lines


# Refusals.


class ShortageError(CapacityError):
    """What is asked lacks memory; `explained` says what would fit, which takes longer."""

    def __init__(
        self, plan: MemoryPlan, asked: Asked, *, also: str = "", is_host: bool = False
    ) -> None:
        text = _host_shortage(plan, asked) if is_host else _shortage(plan, asked)
        super().__init__(text, plan.to_dict())
        self.short, self.asked, self.also, self.is_host = plan, asked, also, is_host


def explained(error: ShortageError, planned: Planned) -> CapacityError:
    """Return the error with what would fit.

    Its first line says what is short; then a row for each way, its setting and its price.
    """
    plan, asked = error.short, error.asked
    if error.is_host:
        return _host_explained(plan, asked, planned)
    keeping = by_price([*ways_to_place(asked, planned), *_more_host_kv(asked, plan, planned)])
    ways = [*keeping, *_shorter(asked, planned, has_others=bool(keeping))]
    ways = ways or _of_settings([*limits(asked), *host_settings(asked, plan)], asked, planned)
    if not (ways or asked.config.planner.choose or asked.reference):
        question = with_auto(asked)
        ways = _of_settings(limits(question), question, planned, auto_settings(asked))
    context = context_of(ways)
    rounded = rounded_rows(asked, planned, context)
    text = _shortage(plan, asked) + (_host_lack(asked, plan) if asked.config.planner.choose else "")
    last = "" if ways else _last_resort(asked, plan)
    last = " ".join(filter(None, (last, error.also)))
    return _error(text, asked, ways, plan, last, rounded)


def _host_explained(plan: MemoryPlan, asked: Asked, planned: Planned) -> CapacityError:
    ways = by_price(ways_to_place(asked, planned)) if plan.offloaded_layers else []
    ways = ways or _of_settings(host_settings(asked, plan), asked, planned)
    last = ""
    if not ways:
        options = ["lower the GPU budget (gpu.memory_gib)"] if plan.facts.emulated else []
        options += ["offload less"] if plan.offloaded_layers else []
        last = f"No single change makes it fit. {', or '.join(['Free memory', *options])}."
    return _error(_host_shortage(plan, asked), asked, ways, plan, last, ())


def _host_shortage(plan: MemoryPlan, asked: Asked) -> str:
    """Say what host memory was needed and what is there."""
    items = {name: size for name, size in plan.host_items.items() if size}
    size = asked.config.gpu.host_gib
    where = "" if size is None else f" of gpu.host_gib={size:g}"
    text = (
        f"{asked.config.model.name} does not fit: {gib(plan.host_total_bytes)} of host memory are "
        f"needed, {gib(plan.host_limit_bytes)}{where} are available after a reserve of "
        f"{asked.config.engine.host_reserve_gib:g} GiB ({_parts(items)})."
    )
    emulated = items.get("emulated_gpu", 0)
    if emulated and emulated == max(items.values()):
        text += f" Without a GPU, emulating {gib(emulated)} of GPU memory takes as much RAM."
    return text


def _error(
    text: str, asked: Asked, ways: Sequence[Way], plan: MemoryPlan, last: str, more: Sequence[Row]
) -> CapacityError:
    context = context_of(ways)
    rows = [*way_rows(ways, context, is_fix=True), *more]
    lines = [text, *row_lines(rows), *_context_lines(context)]
    if asked.config.offload.changed() and any("offload=auto" in row[1] for row in rows):
        lines += labelled("Note", "Leave out other offload settings beside offload=auto.")
    lines += wrapped(last)
    lines += labelled(
        "Budget", f"{gib(plan.gpu_budget_bytes)} of GPU memory: {_parts(_held(plan))}."
    )
    found = plan.to_dict() | {"ways": [way.to_dict(context) for way in ways]}
    return CapacityError("\n".join(lines), found)


def _held(plan: MemoryPlan) -> dict[str, int]:
    return {name: size for name, size in plan.gpu_items.items() if size and name != "kv_cache"}


def _parts(items: dict[str, int]) -> str:
    ordered = sorted(items.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {gib(size)}" for name, size in ordered)


def _shortage(plan: MemoryPlan, asked: Asked) -> str:
    """Say what was needed and what is there."""
    tokens = asked.config.planner.kv_tokens
    whole = "" if asked.own_length is None else f" of the model's {asked.own_length:,}"
    wanted, what = asked.max_model_len, f"{asked.max_model_len:,}{whole} tokens"
    if tokens is not None and tokens > wanted:
        wanted, what = tokens, f"planner.kv_tokens={tokens}"
    blocks = math.ceil(wanted / plan.block_size)
    if wanted <= plan.max_model_len:
        blocks = plan.kv.blocks(wanted)[0]
    left = plan.gpu_budget_bytes - sum(_held(plan).values())
    reach, elsewhere = min(plan.reach[0] - plan.num_gpu_blocks, blocks), ""
    if reach:
        elsewhere = f", of which up to {gib(reach * plan.block_bytes)} may be in host memory"
    on_gpu = max(blocks - reach, min(blocks, step_blocks(plan.kv)))
    return (
        f"{asked.config.model.name} does not fit {asked.facts.name}: "
        f"{gib(plan.kv.room(on_gpu, reach) - left)} short (needs {gib(plan.kv.room(blocks))} of KV "
        f"for {what}{elsewhere}, has {gib(left)})."
    )


def _host_lack(asked: Asked, plan: MemoryPlan) -> str:
    """Say so where a chosen placement lacks host memory alone."""
    found = chosen_anywhere(with_auto(asked))
    need = 0 if found is None else off_gpu_bytes(found)
    if need == 0:
        return ""
    limit = max(0, plan.host_limit_bytes - plan.host_total_bytes)
    return (
        f" It would fit with {gib(need)} of weights in host memory, where {gib(limit)} are "
        "available for them."
    )


def _last_resort(asked: Asked, plan: MemoryPlan) -> str:
    """Say what is short where no single change of a setting is enough."""
    roomy = replace(asked, facts=replace(asked.facts, host_available_bytes=2**60))
    if asked.config.planner.choose and would_fit(roomy):
        return (
            f"Host memory is short: {gib(plan.host_limit_bytes)} are available after a "
            f"reserve of {asked.config.engine.host_reserve_gib:g} GiB. Free host memory, or lower "
            "engine.host_reserve_gib."
        )
    if words := _if_host_had_room(roomy):
        return (
            f"It would fit with {words}, but not in the {gib(plan.host_limit_bytes)} of host "
            "memory that are available here. Free host memory, or take a machine with more."
        )
    return (
        "No single change makes it fit: lower several of engine.max_model_len, "
        "engine.max_num_batched_tokens and engine.max_num_seqs, or use a card of "
        f"{roomy_card_gib(asked):.2f} GiB, which needs no offload."
    )


def _if_host_had_room(asked: Asked) -> str:
    """Return offload settings that fit where host memory has no limit."""
    if asked.config.planner.choose or asked.reference:
        return ""
    words = [auto_settings(asked)] if auto_fits(asked) else []
    simple = least_uva(asked) or least_prefetch(asked)
    words += [simple.settings] if simple is not None else []
    return "; or ".join(map(" ".join, words))


# Ways to place the weights.


def ways_to_place(asked: Asked, planned: Planned) -> Iterator[Way]:
    """Yield what fits of the ways to place weights, other than the one that is set.

    Lossless on the GPU; plain on the GPU, and then no others; chosen placements; what is set,
    lossless; banks of experts that take what is left; the least uva; the least prefetch.
    """
    if asked.config.planner.choose or asked.reference:
        return  # placements are chosen already, or are not what is asked
    has_selectors = any(_selectors(asked.config.offload))
    if not has_selectors and (way := _lossless_way(asked)):
        yield way
    if asked.config.offload.backend != "none" and (way := _resident_way(asked)):
        yield way
        return
    yield from _chosen_ways(asked, planned)
    for way in (_set_in_codes(asked), _free_banks(asked)):
        yield from [way] if way else []
    if "cpu_offload_gb" in asked.config.planner.auto_fields:
        return  # it chooses the size itself
    for found in (least_uva(asked), least_prefetch(asked)):
        if found is not None and plan_fits(found.plan):
            yield found


def by_price(ways: Iterable[Way]) -> list[Way]:
    """Return the ways, the fastest first; of those that place the same, the first alone."""
    found: dict[tuple[object, ...], Way] = {}
    for way in ways:
        formats = tuple(sorted(way.plan.formats.others))
        key = (*map(str, way.plan.placements.values()), formats, way.plan.kv.host_blocks)
        found.setdefault(key, way)
    kept = list(found.values())
    context = context_of(kept)
    return sorted(kept, key=lambda way: -way.tokens_s(context))


def context_of(ways: Iterable[Way]) -> int | None:
    """Return the length at which ways are compared; None: a short one.

    It is max_model_len where a sequence of it reads keys and values in host memory in some.
    """
    return max((w.plan.max_model_len for w in ways if w.reads_kv_in_place), default=None)


def better_ways(asked: Asked, plan: MemoryPlan, planned: Planned) -> list[Way]:
    """Return ways that are predicted to be faster than a plan that fits, the fastest first."""
    now = Way(settings=(), asked=asked, plan=plan)
    found = list(ways_to_place(asked, planned))
    if asked.config.offload.backend != "none" or asked.config.planner.choose:
        found += filter(None, [_resident_way(asked)])
    if now.reads_kv_in_place:
        found += _without_host_kv(asked, planned)
    context = context_of([now, *found])
    least_s = WORTH * now.tokens_s(context)
    return [way for way in by_price(found) if way.tokens_s(context) >= least_s]


def rounded_rows(asked: Asked, planned: Planned, context: int | None) -> list[Row]:
    """Return everything on the GPU in 4 bits, where that fits and nothing rules it out.

    A row of its own, as its tokens are others: it is no fix, and never what is recommended.
    """
    config, spec = asked.config, asked.spec
    is_set = config.engine.weight_format in {"lossless", "auto"} or config.model.quantize
    if is_set or spec.quantization or asked.reference:
        return []
    model = replace(config.model, quantize="int4", keep_lossless=False)
    offload = () if config.offload.backend == "none" else no_offload(config.kv)
    rounded = replace(config, model=model, offload=OffloadConfig())
    plan = planned(rounded)
    if plan is None or off_gpu_bytes(plan):
        return []
    way = Way(settings=(), asked=replace(asked, config=rounded, tensor_formats={}), plan=plan)
    settings = " ".join((*offload, "model.quantize=int4"))
    effect = f"{way.effect()}, tokens differ from {plan.dtype}'s"
    return [("4-bit", settings, f"{rate(way.tokens_s(context))} tok/s", effect)]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is said of a plan that fits."""

    plan: MemoryPlan
    lines: tuple[str, ...]
    """The verdict, unwrapped, and a row for each way that is faster, and for the full length."""
    ways: tuple[dict[str, Any], ...]
    """Ways that are faster, the fastest first, as plain data."""


def answer_of(asked: Asked, plan: MemoryPlan, planned: Planned) -> Answer:
    """Return what is said of a plan that fits."""
    ways = better_ways(asked, plan, planned)
    context = context_of([Way(settings=(), asked=asked, plan=plan), *ways])
    rows = way_rows(ways, context, is_fix=False)
    if off_gpu_bytes(plan) or plan.formats.has_codes:  # plain weights do not fit the GPU
        rows += rounded_rows(asked, planned, context)
    rows += length_row(asked, plan, planned)
    lines = (_fit_text(asked, plan), *row_lines(rows), *_context_lines(context))
    return Answer(plan=plan, lines=lines, ways=tuple(way.to_dict(context) for way in ways))


def _context_lines(context: int | None) -> list[str]:
    """Say at which length ways were compared, where it is not a short one."""
    if context is None:
        return []
    text = f"Rates are for sequences of {context:,} tokens: some of the ways that were compared"
    return labelled("Note", f"{text} keep KV in host memory.")


def _fit_text(asked: Asked, plan: MemoryPlan) -> str:
    """Say how fast a plan is, and how many sequences its KV cache holds."""
    now, config = Way(settings=(), asked=asked, plan=plan), asked.config
    backend = "auto" if config.planner.choose else config.offload.backend
    how = "" if backend == "none" else f" with offload={backend}"
    if plan.swap_weights_bytes:
        how = f" with kv.swap_space={config.kv.swap_space:g}"
    at = f" at {plan.max_model_len:,} tokens" if now.reads_kv_in_place else ""
    if config.planner.objective == "throughput":
        at = f" for a queue of {QUEUE_REQUESTS} requests"
    per_s = rate(now.tokens_s(context_of([now])))
    count = f"{plan.max_concurrency:.1f}"
    held = "one sequence" if count == "1.0" else f"{count} sequences"
    own = asked.own_length
    whole = "" if own is None else f" (the model's own limit is {own:,})"
    model, card = asked.config.model.name, asked.facts.name
    return (
        f"{model} fits {card}{how}: {per_s} tok/s{at}, {now.effect()}. The KV cache "
        f"holds {held} of {plan.max_model_len:,} tokens{whole}."
    )


def length_row(asked: Asked, plan: MemoryPlan, planned: Planned) -> list[Row]:
    """Return what the model's own length costs, where the one in force was cut from it.

    Where a length was chosen at the price of speed: a shorter one that is fast.
    """
    if asked.own_length is None:
        shorter = fast_length(asked, plan)
        way = shorter and _way(*shorter, planned, is_shorter=True)
        if not way or way.tokens_s() < WORTH * replace(way, asked=asked, plan=plan).tokens_s():
            return []
        [row] = way_rows([way], None, is_fix=False)
        return [("Shorter", *row[1:])]
    question = with_auto(changed(asked, "engine", max_model_len=asked.own_length))
    length = f"engine.max_model_len={asked.own_length}"
    found = _chosen(question, (length, *auto_settings(asked)), planned)
    if found is None:
        return [("Length", length, "-", "the model's own length does not fit")]
    per_s = f"{rate(found.tokens_s(context_of([found])))} tok/s"
    return [("Length", " ".join(found.settings), per_s, f"the full length, {found.effect()}")]


def auto_settings(asked: Asked) -> tuple[str, ...]:
    """Return how to ask for chosen placements; fields and selectors contradict them."""
    planner = asked.config.planner
    selectors = ("offload.uva.cpu_offload_params=[]", "offload.prefetch.offload_params=[]")
    is_set = _selectors(asked.config.offload)
    undone = [words for words, given in zip(selectors, is_set, strict=True) if given]
    if "cpu_offload_gb" in planner.auto_fields:
        undone.insert(0, "planner.auto_fields=[]")
    return ("offload=auto", *undone, *objective_settings(planner))


def objective_settings(planner: PlannerConfig) -> tuple[str, ...]:
    """Return what is set of what placements are chosen for."""
    default = PlannerConfig()
    asked = {name: getattr(planner, name) for name in ("objective", "referee", "kv_tokens")}
    return tuple(
        f"planner.{name}={yaml_text(value)}"
        for name, value in asked.items()
        if value != getattr(default, name)
    )


def _selectors(offload: OffloadConfig) -> tuple[bool, bool]:
    return bool(offload.uva.cpu_offload_params), bool(offload.prefetch.offload_params)


def _resident_way(asked: Asked) -> Way | None:
    """Return everything on the GPU, in formats as set; None: no room."""
    bare = with_offload(asked, OffloadConfig())
    plan = build_plan(bare, assign_resident(asked.spec))
    settings = no_offload(asked.config.kv)
    return Way(settings=settings, asked=bare, plan=plan) if plan_fits(plan) else None


def _lossless_way(asked: Asked) -> Way | None:
    """Return everything on the GPU in codes; None: no room, no use, or ruled out."""
    plan = lossless_resident(asked)
    if plan is None:
        return None
    none = () if asked.config.offload.backend == "none" else no_offload(asked.config.kv)
    bare = with_offload(asked, OffloadConfig())
    coded = in_codes(bare)
    assert coded is not None
    config = replace(bare.config, engine=replace(bare.config.engine, weight_format="lossless"))
    return Way(settings=(*none, LOSSLESS_WORDS), asked=replace(coded, config=config), plan=plan)


def _chosen_ways(asked: Asked, planned: Planned) -> Iterator[Way]:
    """Yield the best chosen placement, and that of plain weights where it is not plain."""
    words, question = auto_settings(asked), with_auto(asked)
    way = _chosen(question, words, planned)
    if way is None:
        return
    yield way
    if way.is_lossless and asked.config.engine.weight_format is None and would_fit(question):
        plain = changed(question, "engine", weight_format="checkpoint")
        found = _chosen(plain, (*words, "engine.weight_format=checkpoint"), planned)
        yield from [found] if found else []


def _chosen(asked: Asked, settings: tuple[str, ...], planned: Planned) -> Way | None:
    """Return what the planner chooses, in whichever weight format is open; None: nothing fits."""
    plan = planned(asked.config) if auto_fits(asked) else None
    return None if plan is None else Way(settings=settings, asked=asked, plan=plan)


def _set_in_codes(asked: Asked) -> Way | None:
    """Return what is set with lossless weights, where something is set and that fits."""
    coded, planner = in_codes(asked), asked.config.planner
    is_set = asked.config.offload.backend != "none" or bool(planner.auto_fields)
    if coded is None or not (is_set or takes_swap_space(asked)) or not would_fit(coded):
        return None
    chosen = with_fields(coded, set(planner.auto_fields))
    found = replace(coded, config=chosen or coded.config)
    return Way(settings=(LOSSLESS_WORDS,), asked=found, plan=plan_as_set(found))


def _free_banks(asked: Asked) -> Way | None:
    """Return banks of as many slots as have room, where a number is set; None: there is no room."""
    node = asked.config.offload
    if node.backend != "experts" or not node.experts.is_set:
        return None
    free = with_offload(asked, OffloadConfig(offload_backend="experts"))
    if not would_fit(free):
        return None
    words = () if node.offload_backend == "experts" else ("offload=experts",)
    settings = ("offload.experts.expert_slots=null", *words)
    return Way(settings=settings, asked=free, plan=plan_as_set(free))


def least_uva(asked: Asked) -> Way | None:
    """Return the least cpu_offload_gb with which it fits, else None; none at all may be enough."""
    node = asked.config.offload
    bare = OffloadConfig(uva=UVAOffloadConfig(experts_first=node.uva.experts_first))
    found = with_least_uva(with_offload(asked, bare))
    if found is None:
        return None
    size = found.offload.uva.cpu_offload_gb
    words = [f"offload.uva.cpu_offload_gb={size:g}"] if size else []
    if size and node.backend not in {"none", "uva"}:
        words.insert(0, "offload=uva")
    if size and node.uva.cpu_offload_params:
        words.append("offload.uva.cpu_offload_params=[]")
    wanted = replace(asked, config=found)
    plan = build_plan(wanted, assign(asked.spec, found.offload, asked.formats))
    return Way(settings=tuple(words) or no_offload(asked.config.kv), asked=wanted, plan=plan)


def least_prefetch(asked: Asked) -> Way | None:
    """Return the fewest layers of each group with which prefetch fits; None: it does not."""
    group = min(GROUP, asked.spec.num_hidden_layers)
    for count in range(1, group + 1):
        for ahead in LOOKAHEADS:
            found = prefetch_way(asked, group, count, ahead)
            if would_fit(found.asked):
                return found
    return None


def prefetch_way(asked: Asked, group: int, count: int, ahead: int) -> Way:
    """Return prefetch of `count` of `group` layers, `ahead` groups ahead; it may not fit."""
    sizes: dict[str, Any] = {
        "offload_group_size": group,
        "offload_num_in_group": count,
        "offload_prefetch_step": ahead,
    }
    words = [f"offload.prefetch.{name}={value}" for name, value in sizes.items()]
    if asked.config.offload.prefetch.offload_params:
        words.append("offload.prefetch.offload_params=[]")
    offload = OffloadConfig(prefetch=PrefetchOffloadConfig(**sizes))
    wanted = with_offload(asked, offload)
    plan = build_plan(wanted, assign(asked.spec, offload, asked.formats))
    return Way(settings=("offload=prefetch", *words), asked=wanted, plan=plan)


def _without_host_kv(asked: Asked, planned: Planned) -> list[Way]:
    """Return the best chosen placement without a host tier of KV blocks."""
    bare = replace(asked.config, kv=asked.config.kv.without_host_tier())
    question = with_auto(replace(asked, config=bare))
    way = _chosen(question, ("kv=gpu", *auto_settings(asked)), planned)
    return [way] if way else []


# Other settings.


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

    def found(self, asked: Asked) -> tuple[str, Asked] | None:
        """Return the setting as it is typed, and the question with it; None: no value fits."""

        def at(count: int) -> Asked:
            return changed(asked, self.section, **{self.name: self.value(count)})

        find = least if self.is_least else greatest
        count = find(self.low, self.high, lambda each: self.test(at(each)))
        if count is None:
            return None
        return f"{self.section}.{self.name}={self.value(count):.12g}", at(count)


def _of_settings(
    settings: Iterable[Setting], asked: Asked, planned: Planned, beside: tuple[str, ...] = ()
) -> list[Way]:
    """Return a way for each of the settings of which a value fits, with words typed beside it."""
    found = ((" ".join((*beside, item[0])), item[1]) for s in settings if (item := s.found(asked)))
    return [way for words, question in found if (way := _way(words, question, planned))]


def _way(words: str, asked: Asked, planned: Planned, *, is_shorter: bool = False) -> Way | None:
    settings = tuple(words.split())
    if asked.config.planner.choose:
        way = _chosen(asked, settings, planned)
        return way and replace(way, is_shorter=is_shorter)
    fields = set(asked.config.planner.auto_fields)
    config = with_fields(asked, fields) if fields and not asked.reference else asked.config
    if config is None:
        return None
    found = replace(asked, config=config)
    return Way(settings=settings, asked=found, plan=plan_as_set(found), is_shorter=is_shorter)


TOKEN_STEP: Final = 16
"""Steps of one are not worth trying for tokens of a step."""


def _shorter(asked: Asked, planned: Planned, *, has_others: bool) -> list[Way]:
    """Return the greatest length that fits, no shorter than requests that are known need."""
    if asked.config.planner.choose:
        found = less_with_auto(asked).found(asked)
        way = found and _way(*found, planned, is_shorter=found[0].startswith("engine."))
        return [way] if way else []
    low = asked.config.request_tokens or 2
    found = Setting("engine", "max_model_len", low, asked.max_model_len - 1).found(asked)
    if found is None and not has_others:
        question = with_auto(asked)
        found = less_with_auto(asked).found(question)
        if found is not None:
            found = (" ".join((*auto_settings(asked), found[0])), found[1])
    way = found and _way(*found, planned, is_shorter=True)
    return [way] if way else []


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
        here = MOST_MEMORY_GIB if facts.emulated else facts.free_bytes / GIB / share
        low, high = math.floor(memory * 100) + 1, math.floor(here * 100)
        found.append(Setting("gpu", "memory_gib", low, high, parts=100, is_least=True))
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
    low, high = -(-(asked.config.request_tokens or 2) // size), (asked.max_model_len - 1) // size
    return Setting("engine", "max_model_len", low, high, size, test=auto_fits)


def chosen_anywhere(asked: Asked) -> MemoryPlan | None:
    """Return what is chosen where host memory has no limit; None: nothing fits the GPU."""
    facts = replace(asked.facts, host_available_bytes=2**60, pin_limit_bytes=None)
    latency = changed(asked, "planner", objective="latency")  # a queue would take more of the host
    found = Chooser(replace(latency, facts=facts)).best()
    return None if found is None else found[0]


def _more_host_kv(asked: Asked, plan: MemoryPlan, planned: Planned) -> list[Way]:
    """Return the smallest host tier with which a sequence that the GPU has no room for fits."""
    need = plan.kv.blocks(plan.max_model_len)[0]
    if asked.config.kv.swap_space or asked.reference:
        return []
    if asked.config.planner.choose:
        return _host_kv_with_auto(asked, plan, need, planned)
    placed = plan.assignment
    wide, _ = _with_host_kv(asked, plan, need)
    gpu_blocks = build_plan(wide, placed).num_gpu_blocks
    enough, words = _with_host_kv(asked, plan, max(1, need - gpu_blocks))
    if not gpu_blocks or not fits(enough, placed):
        return []
    return [Way(settings=(words,), asked=enough, plan=build_plan(enough, placed))]


def _host_kv_with_auto(asked: Asked, plan: MemoryPlan, need: int, planned: Planned) -> list[Way]:
    """Return a host tier with which a chosen placement fits, to a thirty-second of a sequence."""
    if plan.host_kv is not None or asked.config.planner.kv_tokens is not None:
        return []

    def at(parts: int) -> tuple[Asked, str]:
        return _with_host_kv(asked, plan, -(-need * parts // 32))

    parts = least(1, 32, lambda count: auto_fits(at(count)[0]))
    if parts is None:
        return []
    wanted, words = at(parts)
    way = _way(words, wanted, planned)
    return [way] if way else []


def _with_host_kv(asked: Asked, plan: MemoryPlan, num_blocks: int) -> tuple[Asked, str]:
    """Return the question with so many host blocks, and words for it in the setting's own unit."""
    if asked.config.kv.num_cpu_blocks:
        wider = changed(asked, "kv", num_cpu_blocks=num_blocks)
        return wider, f"kv.num_cpu_blocks={num_blocks}"
    size = math.ceil(num_blocks * sum(plan.kv.block_bytes) / GIB * 1000) / 1000
    return changed(asked, "kv", cpu_gib=size, num_cpu_blocks=None), f"kv.cpu_gib={size:.12g}"
