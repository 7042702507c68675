"""Plans of one configuration side by side: as set, none, uva, prefetch and auto."""

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from catalogue.models import describe, state
from engine.asked.config import EngineConfig, GPUConfig, ModelConfig, PlannerConfig
from engine.asked.offload import (
    OffloadConfig,
    OffloadWarning,
    PrefetchOffloadConfig,
    UVAOffloadConfig,
)
from engine.device.facts import available_bytes, gpu_holders, num_threads
from engine.errors import CapacityError
from engine.model.facts import read_unpackable
from engine.model.spec import ModelSpec
from engine.plan.advise import off_gpu_bytes, with_least_uva
from engine.plan.cards import CARDS
from engine.plan.memory import DeviceFacts, MemoryPlan
from engine.plan.memory import fits as has_room
from engine.plan.planner import asked_of, plan_memory
from engine.plan.policy import assign_prefetch
from engine.plan.queue import queue_s
from engine.plan.times import (
    Rates,
    Shape,
    decode_step_s,
    load_s,
    prefill_s,
    rates_for,
    shape_of,
)
from engine.plan.weight_format import LOSSLESS, MIXED, NOTHING_KNOWN, PLAIN, in_codes
from engine.sealed import yaml_text
from harness.config.engine import with_model, without_host_tier
from harness.config.schema import LatencyScenario, RunConfig, ScenarioConfig
from harness.config.serve import Lengths, ServeScenario
from harness.observe.gpu import Gpu, open_gpu
from harness.observe.machine_rates import Probed, read_rates

ANY_CARD = "auto"
"""Name in conf/gpu of whatever card is here."""


def machine_facts(config: RunConfig) -> tuple[DeviceFacts, Probed | None]:
    """Return what a plan must know of the machine, and what was probed on it.

    gpu.device=cpu, or auto where no GPU is here and no card is named: the CPU. A card with
    memory_gib that is not here: that card, free of others' memory, in a machine with any host
    memory. Else the GPU that is here, of which gpu.memory_gib is the part that is used. Nothing is
    allocated, and nothing probed now.
    """
    gpu = config.gpu
    here = open_gpu() if gpu.device != "cpu" else None
    if here is not None and (gpu.memory_gib is None or _is_here(gpu, here)):
        found = _facts_here(here)
        if found is not None:
            return found, read_rates(here)
    if gpu.device != "cpu" and gpu.memory_gib is not None:
        return DeviceFacts.of_card(gpu), None
    return _cpu_facts(), read_rates(None)


def running_facts(config: RunConfig) -> DeviceFacts:
    """Return what a plan must know of the device that a run takes here.

    Without a GPU that is the CPU, whatever card is named: it stands in for that one.
    """
    return _cpu_facts() if open_gpu() is None else machine_facts(config)[0]


def _cpu_facts() -> DeviceFacts:
    host = available_bytes()
    return DeviceFacts(
        kind="cpu",
        name="CPU",
        total_bytes=host // 2,
        free_bytes=host,
        host_available_bytes=host,
        num_threads=num_threads(),
    )


def _is_here(gpu: GPUConfig, here: Gpu) -> bool:
    """Whether the card that is asked for is the one in this machine, by name or by its sheet."""
    sheet = CARDS.get(str(here.facts().get("name")))
    asked = (gpu.link_gb_s, gpu.hbm_gb_s, gpu.bf16_tflops)
    if gpu.name == ANY_CARD and not any(asked):
        return True
    return sheet is not None and asked == (sheet.link_gb_s, sheet.hbm_gb_s, sheet.bf16_tflops)


def _facts_here(here: Gpu) -> DeviceFacts | None:
    """Return the facts of the GPU in this machine; None where its driver does not tell."""
    facts = here.facts()
    memory = facts.get("memory_bytes")
    if not memory:
        return None
    used = here.sample()["gpu_used_bytes"] or 0
    return DeviceFacts(
        kind="cuda",
        name=str(facts["name"]),
        total_bytes=int(memory),
        free_bytes=int(memory) - int(used),
        host_available_bytes=available_bytes(),
        compute_capability=here.compute_capability(),
        num_threads=num_threads(),
        holders=gpu_holders(here.uuid),
    )


UNKNOWN_TOKENS = 256
"""Length taken for prompts and outputs that come from a file or a trace."""


def run_s(shape: Shape, rates: Rates, scenario: ScenarioConfig) -> float:
    """Return seconds of a point: starts of processes, warm-ups and timed requests."""
    starts = int(scenario.correctness.enabled) + int(scenario.is_timed)
    if scenario.load is not None:
        starts += scenario.load.cold_starts + scenario.load.warm_starts
    seconds = starts * load_s(shape, rates)
    if scenario.latency is not None:
        seconds += scenario.latency.repeats * _latency_s(shape, rates, scenario.latency)
    if (many := scenario.throughput) is not None:
        each = queue_s(shape, rates, many.num_requests, many.prompt_tokens, many.output_tokens)
        seconds += many.repeats * each
    if scenario.serve is not None:
        seconds += scenario.serve.repeats * _serve_s(shape, rates, scenario.serve)
    return seconds


def _latency_s(shape: Shape, rates: Rates, one: LatencyScenario) -> float:
    step = decode_step_s(shape, rates, 1, one.prompt_tokens + one.output_tokens / 2)
    first = prefill_s(shape, rates, one.prompt_tokens)
    count = one.num_requests + one.warmup_requests
    return count * (first + (one.output_tokens - 1) * step)


def _serve_s(shape: Shape, rates: Rates, serve: ServeScenario) -> float:
    """The longer of arrivals and of the work they bring; a search tries every rate it may."""
    count = serve.num_requests or UNKNOWN_TOKENS
    work = queue_s(shape, rates, count, _mean(serve.prompt), _mean(serve.output))
    search = serve.search
    if search is not None:
        return search.max_trials * max(search.duration_s, work)
    rate = serve.arrivals.rate_per_s
    return max(work, count / rate if rate else 0.0) + (serve.arrivals.ramp_up_s or 0.0)


def _mean(lengths: Lengths | None) -> int:
    if lengths is None:
        return UNKNOWN_TOKENS
    if lengths.tokens is not None:
        return lengths.tokens
    return ((lengths.low or 1) + (lengths.high or 1)) // 2


NUM_GROUP: Final = 8
"""Layers in a group of the prefetch settings that are tried."""
PRESET_GB: Final = 8.0
PRESET_NUM: Final = 5
PRESET_STEP: Final = 2
"""The choices of conf/offload, taken where the model fits without any."""


WITHOUT_HOST_KV: Final = "kv=gpu, auto"
"""The row without a host tier of KV blocks, where one sequence would read some in place."""
"""The row of everything on the GPU in codes, where no weight format is set."""
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
    def moves_something(self) -> bool:
        """Whether it fits with weights in host memory."""
        plan = self.plan
        return plan is not None and bool(plan.offloaded_layers or plan.outer_offloaded.num_bytes)

    @property
    def weights(self) -> str:
        """What weights are kept in: checkpoint | lossless | mixed; empty where it does not fit."""
        if self.plan is None:
            return ""
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
    """One point: its configuration and the rows."""

    config: RunConfig
    spec: ModelSpec
    facts: DeviceFacts
    probed: Probed | None
    """What was measured on the machine that the plan is for; None: nothing."""
    overrides: tuple[str, ...]
    """Overrides of the command line."""
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    """What the folder's files say against its config.json, or beside it."""

    @property
    def memory_gib(self) -> float:
        """Memory of the card, as much of it as is asked for."""
        return self.config.gpu.memory_gib or self.facts.total_bytes / 2**30

    @cached_property
    def recommended(self) -> Row | None:
        """The row that moves nothing where it fits; else what is chosen; else the fastest.

        Where more room for KV is asked for, or serves a queue, what is chosen to make it; lossless
        weights where they are chosen.
        """
        fitting = {row.label: row for row in self.rows if row.plan is not None}
        none, auto = fitting.get("none"), fitting.get("auto")
        planner = self.config.planner
        wants_room = planner.objective == "throughput" or planner.kv_tokens is not None
        if auto is not None and ((wants_room and auto.moves_something) or auto.weights == MIXED):
            return auto
        coded = fitting.get(LOSSLESS)
        if coded is not None and auto is not None and auto.is_lossless and not auto.moves_something:
            return coded
        if none is not None and none.plan is not None and not none.plan.offloaded_layers:
            return none
        if auto is not None:
            return auto
        rows = fitting.values()
        return min(rows, key=lambda row: row.predicted["decode_step_ms"], default=None)

    @property
    def chosen(self) -> Row | None:
        """The row of the configuration as it is set; None: nothing is set about offload."""
        return next((row for row in self.rows if row.label.endswith("(as set)")), None)

    def minutes(self, row: Row) -> float:
        """Return how long a run of this point will take: its starts and its timed requests."""
        if row.plan is None:
            return 0.0
        probe = None if self.probed is None else self.probed.rates
        rates = rates_for(self.config.gpu, self.facts, probe)
        return run_s(shape_of(row.plan, self.spec), rates, self.config.scenario) / 60


def forecast(config: RunConfig, overrides: tuple[str, ...]) -> Forecast:
    """Plan every way to place the weights of one point, which `overrides` composed."""
    found = describe(config.model)
    spec, node, scenario = found.spec, config.model, config.scenario
    facts, probed = machine_facts(config)
    # Weights that are not here yet will be read from some folder.
    path = None if node.load_format == "dummy" else str(state(node).path or ".")
    model = ModelConfig(name=node.name, path=path, load_format=node.load_format, spec=spec)
    rates = {} if probed is None else probed.rates
    base = replace(with_model(config, model), measured_rates=rates)
    has_queue = scenario.throughput is not None or scenario.serve is not None
    rows = tuple(_rows(base, spec, facts, has_queue=has_queue))
    return Forecast(
        config=config,
        spec=spec,
        facts=facts,
        probed=probed,
        overrides=overrides,
        rows=rows,
        notes=found.notes,
    )


def _rows(
    base: EngineConfig, spec: ModelSpec, facts: DeviceFacts, *, has_queue: bool
) -> Iterator[Row]:
    auto = replace(base.planner, choose=True, auto_fields=[])
    bare = replace(base, offload=OffloadConfig(), planner=PlannerConfig())
    none = _row("none", ("offload=none",), bare, spec, facts)
    is_set = base.offload.backend != "none" or bool(base.planner.auto_fields)
    if is_set:
        is_sized = "cpu_offload_gb" in base.planner.auto_fields
        backend = "uva" if is_sized else base.offload.backend
        yield _row(f"{backend} (as set)", (), base, spec, facts)
    yield none
    if in_codes(asked_of(bare, spec, facts)) is not None:
        overrides = ("offload=none", "engine.weight_format=lossless")
        engine = replace(bare.engine, weight_format="lossless")
        yield _row(LOSSLESS, overrides, replace(bare, engine=engine), spec, facts)
    if base.offload.backend != "uva":
        yield _uva_row(bare, spec, facts, fits=none.fits)
    if base.offload.backend != "prefetch":
        yield _prefetch_row(bare, spec, facts, fits=none.fits)
    chosen = _row("auto", _auto_overrides(auto), replace(bare, planner=auto), spec, facts)
    yield chosen
    if has_queue and auto.objective != "throughput":
        planner = replace(auto, objective="throughput")
        other = replace(bare, planner=planner)
        queue = _row(FOR_QUEUE, _auto_overrides(planner), other, spec, facts)
        if queue.queue_tokens_s > chosen.queue_tokens_s:
            yield queue
    if none.plan is not None and (none.predicted["host_kv"] or {}).get("in_place_bytes"):
        # Keys and values that a long sequence reads over the link each step may cost more than
        # weights that leave them room.
        config = replace(bare, planner=auto, kv=without_host_tier(base.kv))
        names = ("kv=gpu", *_auto_overrides(auto))
        yield _row(WITHOUT_HOST_KV, names, config, spec, facts)


def _auto_overrides(planner: PlannerConfig) -> tuple[str, ...]:
    """What to type for a choice."""
    default = PlannerConfig()
    asked = {name: getattr(planner, name) for name in ("objective", "referee", "kv_tokens")}
    chosen = {name: value for name, value in asked.items() if value != getattr(default, name)}
    return ("offload=auto", *(f"planner.{name}={yaml_text(chosen[name])}" for name in chosen))


def _row(
    label: str,
    overrides: tuple[str, ...],
    config: EngineConfig,
    spec: ModelSpec,
    facts: DeviceFacts,
) -> Row:
    plan, error = None, ""
    try:
        known: Mapping[str, str] = NOTHING_KNOWN
        if config.model.load_format != "dummy":
            known = read_unpackable(config.facts_folder, config.model.path)
        plan = plan_memory(config, spec, facts, unpackable=known)
        found: dict[str, Any] = plan.to_dict()
    except CapacityError as refusal:
        found, error = dict(refusal.plan or {}), str(refusal)
    return Row(label=label, overrides=overrides, plan=plan, bytes=found, error=error)


def _uva_row(bare: EngineConfig, spec: ModelSpec, facts: DeviceFacts, *, fits: bool) -> Row:
    """The least uva that fits, else all; where nothing is needed, that of conf/offload."""

    def at(hundredths: int) -> Row:
        size = hundredths / 100
        overrides = ("offload=uva", f"offload.uva.cpu_offload_gb={size:g}")
        offload = OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=size))
        label = f"uva, {size:g} GiB"
        return _row(label, overrides, replace(bare, offload=offload), spec, facts)

    if fits:
        return at(round(100 * min(PRESET_GB, spec.weight_bytes() / 2**30)))
    asked = asked_of(bare, spec, facts)
    found = with_least_uva(asked)
    every = math.ceil(100 * asked.formats.total_bytes(spec.tensors()) / 2**30)
    return at(every if found is None else round(100 * found.offload.uva.cpu_offload_gb))


def _prefetch_row(bare: EngineConfig, spec: ModelSpec, facts: DeviceFacts, *, fits: bool) -> Row:
    """The fewest layers of each group that fit; where none need to, those of conf/offload."""
    group = min(NUM_GROUP, spec.num_hidden_layers)

    def settings(num: int) -> dict[str, Any]:
        sizes = {"offload_group_size": group, "offload_num_in_group": num}
        return sizes | {"offload_prefetch_step": PRESET_STEP}

    def offload(num: int) -> OffloadConfig:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OffloadWarning)
            return OffloadConfig(prefetch=PrefetchOffloadConfig(**settings(num)))

    asked = asked_of(bare, spec, facts)
    found = (n for n in range(1, group) if has_room(asked, assign_prefetch(spec, offload(n))))
    num = min(PRESET_NUM, group) if fits else next(found, group)
    sizes = (f"offload.prefetch.{name}={value}" for name, value in settings(num).items())
    overrides = ("offload=prefetch", *sizes)
    label = f"prefetch, {num} of {group} layers"
    return _row(label, overrides, replace(bare, offload=offload(num)), spec, facts)
