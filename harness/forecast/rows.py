"""Plans of one configuration side by side: as set, none, uva, prefetch and auto; or by card."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from catalogue.cards import card_names, card_sheet
from catalogue.models import describe, state
from catalogue.terminal import columns
from engine.asked.config import EngineConfig, GPUConfig, PlannerConfig
from engine.asked.offload import OffloadConfig, UVAOffloadConfig
from engine.device.machine import cpu_facts, has_gpu, machine_of
from engine.errors import CapacityError
from engine.lines import labelled, wrapped
from engine.model.checkpoint import read_unpackable
from engine.model.spec import ModelSpec
from engine.plan.advise import (
    DEFAULT_TOKENS,
    LOSSLESS_WORDS,
    lossless_resident,
    no_offload,
    off_gpu_bytes,
)
from engine.plan.answer import (
    GROUP,
    LOOKAHEADS,
    WORTH,
    Answer,
    Way,
    least_prefetch,
    least_uva,
    objective_settings,
    prefetch_way,
    rate,
)
from engine.plan.cards import BFLOAT16_CAPABILITY, DeviceFacts
from engine.plan.memory import MemoryPlan
from engine.plan.planner import answer, asked_of, placed, plan_if_fits, plan_memory
from engine.plan.queue import queue_s
from engine.plan.rates import rates_for
from engine.plan.times import Shape, decode_step_s, load_s, prefill_s, shape_of
from engine.plan.weight_format import LOSSLESS, MIXED, NOTHING_KNOWN, PLAIN, in_codes
from engine.sealed import GIB
from harness.config.command import command_with
from harness.config.engine import engine_config
from harness.config.schema import LatencyScenario, QualityScenario, RunConfig, ScenarioConfig
from harness.config.serve import Lengths, ServeScenario
from harness.observe.machine_rates import Probed, read_rates


def machine_facts(config: RunConfig) -> tuple[DeviceFacts, Probed | None]:
    """Return what a plan must know of the machine, and what was probed on it."""
    found = machine_of(config.gpu)
    return found.facts, read_rates(found.gpu) if found.is_here else None


def lacks_card(config: RunConfig) -> bool:
    """Whether no GPU is here, no card is described, and the CPU was not asked for."""
    gpu = config.gpu
    return gpu.device != "cpu" and not gpu.is_described and not has_gpu()


def running_facts(config: RunConfig) -> DeviceFacts:
    """Return what a plan must know of the device that a run takes here.

    Without a GPU that is the CPU, whatever card is named: it stands in for that one.
    """
    return machine_facts(config)[0] if has_gpu() else cpu_facts()


UNKNOWN_TOKENS = 256
"""Length taken for prompts and outputs that come from a file or a trace."""


def run_s(shape: Shape, scenario: ScenarioConfig) -> float:
    """Return seconds of a point: starts of processes, warm-ups and timed requests."""
    starts = int(scenario.correctness.enabled) + int(scenario.is_timed)
    if scenario.load is not None:
        starts += scenario.load.cold_starts + scenario.load.warm_starts
    seconds = starts * load_s(shape)
    if scenario.latency is not None:
        seconds += scenario.latency.repeats * _latency_s(shape, scenario.latency)
    if (many := scenario.throughput) is not None:
        each = queue_s(shape, many.num_requests, many.prompt_tokens, many.output_tokens)
        seconds += many.repeats * each
    if scenario.serve is not None:
        seconds += scenario.serve.repeats * _serve_s(shape, scenario.serve)
    if scenario.quality is not None:
        seconds += _quality_s(shape, scenario.quality)
    return seconds


def _latency_s(shape: Shape, one: LatencyScenario) -> float:
    step = decode_step_s(shape, 1, one.prompt_tokens + one.output_tokens / 2)
    first = prefill_s(shape, one.prompt_tokens)
    count = one.num_requests + one.warmup_requests
    return count * (first + (one.output_tokens - 1) * step)


def _serve_s(shape: Shape, serve: ServeScenario) -> float:
    """The longer of arrivals and of the work they bring; a search tries every rate it may."""
    count = serve.num_requests or UNKNOWN_TOKENS
    work = queue_s(shape, count, _mean(serve.prompt), _mean(serve.output))
    search = serve.search
    if search is not None:
        return search.max_trials * max(search.duration_s, work)
    rate = serve.arrivals.rate_per_s
    return max(work, count / rate if rate else 0.0) + (serve.arrivals.ramp_up_s or 0.0)


def _quality_s(shape: Shape, quality: QualityScenario) -> float:
    """Windows and compared answers, computed once each; without the plain weights' own answers."""
    count, compared = quality.num_windows or UNKNOWN_TOKENS, quality.num_prompts
    answer = quality.prompt_tokens + quality.output_tokens
    seconds = count * prefill_s(shape, quality.window_tokens)
    return seconds + compared * prefill_s(shape, answer)


def _mean(lengths: Lengths | None) -> int:
    if lengths is None:
        return UNKNOWN_TOKENS
    if lengths.tokens is not None:
        return lengths.tokens
    return ((lengths.low or 1) + (lengths.high or 1)) // 2


PRESET_GB: Final = 8.0
PRESET_NUM: Final = 5
"""The choices of conf/offload, taken where the model fits without any."""


WITHOUT_HOST_KV: Final = "kv=gpu, auto"
"""The row without a host tier of KV blocks, where one sequence would read some in place."""
ROUNDED: Final = "4-bit, other tokens"
"""The row of weights that are rounded, where plain ones do not fit."""
FOR_QUEUE: Final = "auto (throughput)"
"""The row of what is best for a queue, where one is timed and another objective is set."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to place the weights."""

    label: str
    overrides: tuple[str, ...]
    """What chooses it on the command line."""
    plan: MemoryPlan | None
    """None: it does not fit."""
    bytes: dict[str, Any]
    """The plan as plain data; of one that does not fit as far as it went."""
    error: str = ""

    @property
    def fits(self) -> bool:
        """Whether it fits."""
        return self.plan is not None

    @property
    def weights(self) -> str:
        """What weights are kept in: checkpoint | lossless | mixed | int8 | int4; empty: no fit."""
        if self.plan is None:
            return ""
        if self.plan.quantize is not None:
            return self.plan.quantize.split()[0]
        return str((self.plan.weight_format or {"chosen": PLAIN})["chosen"])

    @property
    def is_lossless(self) -> bool:
        """Whether it fits with weights in codes, all or some."""
        return self.weights in {LOSSLESS, MIXED}

    @property
    def title(self) -> str:
        """The label, and whether weights are in codes."""
        says_it = self.label == LOSSLESS or not self.is_lossless
        return self.label if says_it else f"{self.label}, {self.weights}"

    @property
    def host_weights_bytes(self) -> int:
        """Bytes of weights in host memory, of one that fits."""
        return off_gpu_bytes(self.plan) if self.plan is not None else 0

    @property
    def queue_tokens_s(self) -> float:
        """Output tokens/s of the queue that throughput is predicted for; 0 without room."""
        return float(self.predicted["queue"]["output_tokens_s"]) if self.fits else 0.0

    @property
    def predicted(self) -> dict[str, Any]:
        """Predicted times; empty where it does not fit."""
        return dict(self.plan.predicted or {}) if self.plan is not None else {}


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One point: its configuration, what is said of it, and every way to place the weights."""

    config: RunConfig
    spec: ModelSpec
    facts: DeviceFacts
    probed: Probed | None
    """What was measured on the machine that the plan is for; None: nothing."""
    overrides: tuple[str, ...]
    """Overrides of the command line."""
    base: EngineConfig
    """What the engine would be asked."""
    config_dir: str | None = None
    """The user's folder of configurations."""
    notes: tuple[str, ...] = ()
    """What the folder's files say against its config.json, or beside it."""

    @property
    def memory_gib(self) -> float:
        """Memory of the card, as much of it as is asked for."""
        return self.config.gpu.memory_gib or self.facts.total_bytes / GIB

    @cached_property
    def answer(self) -> Answer | CapacityError:
        """What is said of the settings as they are; an error where they do not fit."""
        try:
            return answer(self.base, self.spec, self.facts, _unpackable(self.base))
        except CapacityError as error:
            return error

    @property
    def plan(self) -> MemoryPlan | None:
        """The plan of the settings as they are; None: it does not fit."""
        return self.answer.plan if isinstance(self.answer, Answer) else None

    @property
    def lines(self) -> list[str]:
        """The verdict, unwrapped, and a row for each way that fits, or is faster."""
        found = self.answer
        return list(found.lines) if isinstance(found, Answer) else str(found).split("\n")

    @property
    def best(self) -> dict[str, Any] | None:
        """The best of those ways: settings, tokens_s, host_weights_bytes; None: nothing better."""
        found: Any = self.answer
        ways = found.ways if isinstance(found, Answer) else (found.plan or {}).get("ways", ())
        return next(iter(ways), None)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Every way to place the weights, side by side, whether it fits or not."""
        return tuple(_rows(self))

    @cached_property
    def recommended(self) -> Row | None:
        """The row of the best way: as it is set where nothing is better; None: there is no row."""
        if self.best is None:
            return self.as_set if self.as_set.fits else None
        wanted = _bare(self.best["settings"])
        fitting = (row for row in self.rows if row.fits)
        return next((row for row in fitting if _bare(row.overrides) == wanted), None)

    @property
    def as_set(self) -> Row:
        """The row of the configuration as it is set."""
        if self.chosen is not None:
            return self.chosen
        label = "auto" if self.config.planner.choose else "none"
        return next(row for row in self.rows if row.label == label)

    @property
    def chosen(self) -> Row | None:
        """The row of the configuration as it is set; None: nothing is set about offload."""
        return next((row for row in self.rows if row.label.endswith("(as set)")), None)

    def command_with(self, settings: Sequence[str]) -> str:
        """Return the command that runs these settings in the place of those they replace."""
        return command_with(self.overrides, settings, self.config_dir)

    def minutes(self, plan: MemoryPlan | None) -> float:
        """Return how long a run of this point will take: its starts and its timed requests."""
        if plan is None:
            return 0.0
        probe = None if self.probed is None else self.probed.rates
        rates = rates_for(self.config.gpu, self.facts, probe)
        return run_s(shape_of(plan, self.spec, rates), self.config.scenario) / 60


def _bare(settings: Iterable[str]) -> set[str]:
    """Return settings without those that others imply."""
    return {*settings} - {"offload=none", "offload=uva"}


def forecast(
    config: RunConfig, overrides: tuple[str, ...], config_dir: str | None = None
) -> Forecast:
    """Return what is predicted of one point, which `overrides` composed; rows are planned later."""
    found, node = describe(config.model), config.model
    facts, probed = machine_facts(config)
    # Weights that are not here yet will be read from some folder.
    path = None if node.load_format == "dummy" else state(node).path or Path()
    rates = {} if probed is None else probed.rates
    return Forecast(
        config=config,
        spec=found.spec,
        facts=facts,
        probed=probed,
        overrides=overrides,
        config_dir=config_dir,
        base=replace(engine_config(config, path, found.spec), measured_rates=rates),
        notes=found.notes,
    )


def _rows(point: Forecast) -> Iterator[Row]:
    base, scenario = point.base, point.config.scenario
    keeps_length = base.planner.objective == "context" and base.planner.auto_fields
    auto = base.choosing(["max_model_len"] if keeps_length else []).planner
    kv = base.kv.for_blocks_alone()
    bare = replace(base, offload=OffloadConfig(), planner=PlannerConfig(), kv=kv)
    none = _row(point, "none", no_offload(base.kv), bare)
    if point.config.offload_name not in {"none", "auto"} or base.planner.auto_fields:
        yield _row(point, f"{point.config.offload_name} (as set)", (), base)
    yield none
    yield from _smaller_rows(point, bare, fits=none.fits)
    if base.offload.backend != "uva":
        yield _uva_row(point, bare, fits=none.fits)
    if base.offload.backend != "prefetch":
        yield _prefetch_row(point, bare, fits=none.fits)
    chosen = _row(point, "auto", _auto_overrides(auto), replace(bare, planner=auto))
    yield chosen
    if chosen.is_lossless and base.engine.weight_format is None and not none.fits:
        plain = replace(bare, planner=auto, engine=replace(bare.engine, weight_format=PLAIN))
        names = (*_auto_overrides(auto), f"engine.weight_format={PLAIN}")
        yield _row(point, "auto, plain", names, plain)
    has_queue = scenario.throughput is not None or scenario.serve is not None
    if has_queue and auto.objective != "throughput":
        planner = replace(auto, objective="throughput")
        other = replace(bare, planner=planner)
        queue = _row(point, FOR_QUEUE, _auto_overrides(planner), other)
        if queue.queue_tokens_s > chosen.queue_tokens_s:
            yield queue
    if none.plan is not None and (none.predicted["host_kv"] or {}).get("host_bytes"):
        # Keys and values that a long sequence reads over the link each step may cost more than
        # weights that leave them room.
        config = replace(bare, planner=auto, kv=base.kv.without_host_tier())
        names = ("kv=gpu", *_auto_overrides(auto))
        yield _row(point, WITHOUT_HOST_KV, names, config)


def _smaller_rows(point: Forecast, bare: EngineConfig, *, fits: bool) -> Iterator[Row]:
    """Yield rows of smaller weights without a backend, kv.swap_space as it is set."""
    base = point.base
    typed = no_offload(base.kv)
    if point.config.offload_name == "swap_space":
        bare, typed = replace(bare, kv=base.kv), ()
    if in_codes(asked_of(bare, point.spec, point.facts)) is not None:
        engine = replace(bare.engine, weight_format="lossless")
        overrides = (*typed, "engine.weight_format=lossless")
        yield _row(point, LOSSLESS, overrides, replace(bare, engine=engine))
    is_open = base.engine.weight_format is None and base.model.quantize is None
    if is_open and not (fits or point.spec.quantization):
        model = replace(base.model, quantize="int4")
        overrides = (*typed, "model.quantize=int4")
        yield _row(point, ROUNDED, overrides, replace(bare, model=model))


def _auto_overrides(planner: PlannerConfig) -> tuple[str, ...]:
    """What to type for a choice."""
    return ("offload=auto", *objective_settings(planner))


def _unpackable(config: EngineConfig) -> Mapping[str, str]:
    """Return which tensors loads found that codes cannot hold, and why."""
    if config.model.load_format == "dummy":
        return NOTHING_KNOWN
    return read_unpackable(config.facts_folder, config.model.path)


def _row(point: Forecast, label: str, overrides: tuple[str, ...], config: EngineConfig) -> Row:
    plan, error, unpackable = None, "", _unpackable(config)
    try:
        plan = plan_memory(config, point.spec, point.facts, unpackable=unpackable, explain=False)
        found: dict[str, Any] = plan.to_dict()
    except CapacityError as refusal:
        found, error = dict(refusal.plan or {}), str(refusal)
    return Row(label=label, overrides=overrides, plan=plan, bytes=found, error=error)


def _uva_row(point: Forecast, bare: EngineConfig, *, fits: bool) -> Row:
    """The least uva that fits, else all; where nothing is needed, that of conf/offload."""
    spec, asked = point.spec, asked_of(bare, point.spec, point.facts)
    way = None if fits else least_uva(asked)
    if way is not None:
        size = way.asked.config.offload.uva.cpu_offload_gb
    elif fits:
        size = min(PRESET_GB, round(spec.weight_bytes() / GIB, 2))
    else:
        size = math.ceil(100 * asked.formats.total_bytes(spec.tensors()) / GIB) / 100
    offload = OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=size))
    overrides = ("offload=uva", f"offload.uva.cpu_offload_gb={size:g}")
    return _row(point, f"uva, {size:g} GiB", overrides, replace(bare, offload=offload))


def _prefetch_row(point: Forecast, bare: EngineConfig, *, fits: bool) -> Row:
    """The fewest layers of each group that fit; where none need to, those of conf/offload."""
    asked = asked_of(bare, point.spec, point.facts)
    group = min(GROUP, point.spec.num_hidden_layers)
    way = None if fits else least_prefetch(asked)
    if way is None:
        way = prefetch_way(asked, group, min(PRESET_NUM, group) if fits else group, LOOKAHEADS[0])
    offload = way.asked.config.offload
    label = f"prefetch, {offload.prefetch.offload_num_in_group} of {group} layers"
    return _row(point, label, way.settings, replace(bare, offload=offload))


AUTO_WORDS: Final = "offload=auto"


# What a model needs on every card of conf/gpu, where no GPU is here and no card is chosen.


CARD_HEADER: Final = ("card", "GiB", "as set", "fastest", "tok/s", "GiB in host memory")
CARD_LEGEND: Final = (
    "as set: tok/s with the settings as given; no: the card is too small. fastest: as set, "
    f"lossless ({LOSSLESS_WORDS}, same tokens), or where neither fits auto (offload=auto)."
)
_SHORT: Final = {(): "as set", (LOSSLESS_WORDS,): "lossless", (AUTO_WORDS,): "auto"}


@dataclass(frozen=True)
class OnCard:
    """How a model fits a card."""

    gpu: GPUConfig
    as_set: Way | None
    """None: the settings as given do not fit."""
    best: Way | None
    """The fastest of those that are looked at; None: it does not fit."""


def card_lines(found: Forecast) -> list[str]:
    """Return what is said where no GPU is here and no card is chosen, as lines of text."""
    text = (
        "This machine has no GPU, and no card is chosen. gpu=NAME plans for a card of the list, in "
        "the dtype of the checkpoint; gpu=cpu plans for this CPU."
    )
    lines = ["", *wrapped(text), *labelled("Here", _cpu_line(found))]
    most = found.config.gpu.memory_gib
    if most is not None:
        part = f"gpu.memory_gib={most:g} limits the memory used of each card in the list. With"
        lines += labelled("Note", f"{part} gpu.link_gb_s as well, it describes a card of your own.")
    length = found.config.engine.max_model_len or found.spec.max_position_embeddings
    least = f"KV cache for at least {min(length, DEFAULT_TOKENS):,} tokens"
    on_cards = dict(ways_by_card(found))
    if all(each.best is None for each in on_cards.values()):
        part = "any card of conf/gpu" if most is None else f"{most:g} GiB of any card of conf/gpu"
        fewer = "A smaller engine.max_model_len needs less."
        return [*lines, *wrapped(f"It does not fit {part} with {least}. {fewer}")]
    lines += columns([CARD_HEADER, *map(_card_row, on_cards.items())], left={0, 3})
    end = f"tok/s of one sequence, with {least}; predicted from data sheets."
    return [*lines, *wrapped(f"{CARD_LEGEND} {end}")]


def _cpu_line(found: Forecast) -> str:
    """Say what a run of the same settings does here."""
    return f"a run emulates a GPU on the CPU: {found.lines[0]}"


def _card_row(item: tuple[str, OnCard]) -> Sequence[str]:
    name, found = item
    way, gib = found.best, f"{found.gpu.memory_gib or 0:.2f}"
    as_set = "no" if found.as_set is None else rate(found.as_set.tokens_s())
    if way is None:
        return (name, gib, as_set, "does not fit", "-", "-")
    moved = f"{way.moved_bytes / GIB:.2f}" if way.moved_bytes else "none"
    return (name, gib, as_set, _SHORT[tuple(way.settings)], rate(way.tokens_s()), moved)


def ways_by_card(found: Forecast) -> Iterator[tuple[str, OnCard]]:
    """Yield each card, smallest first, and how the model fits it: as set, lossless, or chosen.

    Cards of one size, to a GiB, share the placement that is chosen for the one with the least
    memory, and have their own rates.
    """
    chosen: dict[tuple[int | None, bool], MemoryPlan | None] = {}
    cards = {name: _gpu(found, name) for name in card_names()}
    for name, gpu in cards.items():
        base = replace(found.base, gpu=gpu, measured_rates={})
        as_set, coded = _whole(base, found)
        way = _faster(as_set, coded)
        if way is None:
            key = _size(gpu)
            if key not in chosen:
                alike = (each for each in cards.values() if _size(each) == key)
                least = min(alike, key=lambda each: each.memory_gib or 0)
                chosen[key] = _plan_on(replace(base, gpu=least).choosing(), found)
            plan = chosen[key]
            if plan is not None:
                asked = asked_of(base, found.spec, DeviceFacts.of_card(gpu))
                way = Way(settings=(AUTO_WORDS,), asked=asked, plan=plan)
        yield name, OnCard(gpu=gpu, as_set=as_set, best=way)


def _gpu(found: Forecast, name: str) -> GPUConfig:
    """Return a card, no more of it than gpu.memory_gib, beside gpu.host_gib."""
    asked, sheet = found.config.gpu, card_sheet(name)
    most = min(sheet["memory_gib"], asked.memory_gib or sheet["memory_gib"])
    return GPUConfig(**{**sheet, "memory_gib": most, "host_gib": asked.host_gib})


def _size(gpu: GPUConfig) -> tuple[int, bool]:
    version = gpu.compute_capability or 0.0
    return round(gpu.memory_gib or 0), version >= BFLOAT16_CAPABILITY[0]


def _plan_on(config: EngineConfig, found: Forecast) -> MemoryPlan | None:
    return plan_if_fits(config, found.spec, DeviceFacts.of_card(config.gpu))


def _whole(base: EngineConfig, found: Forecast) -> tuple[Way | None, Way | None]:
    """Return the settings as they are, and everything on the card in codes; None: no room."""
    asked = asked_of(base, found.spec, DeviceFacts.of_card(base.gpu))
    if base.planner.choose or base.weight_format == "auto":
        plan, coded = _plan_on(base, found), None
    else:
        plan, coded = placed(asked), lossless_resident(asked)
    return (
        None if plan is None else Way(settings=(), asked=asked, plan=plan),
        None if coded is None else Way(settings=(LOSSLESS_WORDS,), asked=asked, plan=coded),
    )


def _faster(as_set: Way | None, coded: Way | None) -> Way | None:
    """Return lossless weights where the settings as they are do not fit, or are slower."""
    if as_set is None or coded is None:
        return as_set or coded
    return coded if coded.tokens_s() > WORTH * as_set.tokens_s() else as_set
