"""RunConfig: every setting of a run with its type, default and bounds. Imports no torch.

The classes are the schema of the YAML files in conf/: defaults live here (and in engine.asked),
the files state choices.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit

from catalogue.entry import Model
from engine.asked.config import EngineSettings, GPUConfig, PlannerConfig
from engine.asked.kv import KVConfig
from engine.asked.offload import OffloadConfig
from engine.errors import ConfigError
from engine.sealed import Sealed, choice, number
from harness.config.serve import (
    MOST_LENGTH,
    MOST_REQUESTS,
    REQUESTS,
    SECONDS,
    SHARE,
    TOKENS,
    ServeScenario,
    check_repeats,
    check_size,
)
from harness.config.study import (
    BareScenario,
    OverheadScenario,
    StepsScenario,
    StudyConfig,
    TiersScenario,
)

SIDES: Final = ("a", "b")
_MOST_PAIRS: Final = 1000
"""Each is two runs in fresh processes."""


@dataclass(kw_only=True)
class AbConfig(Sealed):
    """Two sides that do the same work: what each overrides, and how often both run."""

    section: ClassVar = "ab"
    a: list[str] = field(default_factory=list)
    """Overrides of side a, the denominator of the ratios, such as [offload=none]."""
    b: list[str] = field(default_factory=list)
    """Overrides of side b."""
    pairs: int = number(4, low=1, high=_MOST_PAIRS)
    """Runs of both sides, in the order A B, B A, A B, ..., each in fresh processes."""
    aa_pairs: int = number(3, low=0, high=_MOST_PAIRS)
    """Earlier runs of side a against itself, which show what this machine can resolve; 0: none."""

    def check(self) -> None:
        """Raise ConfigError when there is nothing to compare."""
        if self.aa_pairs == 1:
            raise ConfigError(
                "ab.aa_pairs: expected 0 or at least 2, got 1: one pair has no deviation."
            )
        if sorted(self.a) == sorted(self.b):
            raise ConfigError(
                f"ab.b: expected other overrides than ab.a, got {self.b} for both. Set them, such "
                "as ab.a=[offload=none] ab.b=[offload=uva]."
            )


CLOCKS: Final = ("scripted", "real")
FAILURES: Final = (
    "none",
    "no_fit",
    "oom",
    "host_oom",
    "error",
    "exit",
    "sigkill",
    "sigsegv",
    "hang",
)
_MOST: Final = 1e6
"""Most of every time in its unit, and of GiB: sums of them stay exact enough to compare."""
_AMOUNT: Final[Mapping[str, Any]] = {"low": 0, "high": _MOST}
_SIZE: Final[Mapping[str, Any]] = {"low": 0, "high": _MOST, "low_open": True}
PLACES: Final = ("plan", "build", "reference", "step")


@dataclass(kw_only=True)
class FakeScript(Sealed):
    """What the engine of model=fake pretends; nothing is computed.

    A step gives every waiting prompt its first token, or else every running sequence its next one.
    """

    section: ClassVar = "model.fake"
    clock: str = choice(CLOCKS, "scripted")
    """scripted: steps take no real time and figures are exact | real: steps are waited for."""
    load_s: float = number(0.5, **_AMOUNT)
    """Seconds of the load, as its phase read."""
    prefill_ms: list[float] = field(default_factory=lambda: [20.0], metadata={"bounds": _AMOUNT})
    """Times of steps with prompts: the first takes the first of them, then in turn."""
    prefill_ms_per_token: float = number(0.0, **_AMOUNT)
    """Added to such a step for each of its prompt tokens."""
    decode_ms: list[float] = field(default_factory=lambda: [5.0], metadata={"bounds": _AMOUNT})
    """Times of steps that give next tokens, in turn."""
    ms_per_offloaded_gib: float = number(0.0, **_AMOUNT)
    """Added to every step for each GiB of weights in host memory."""
    weights_gib: float = number(2.0, **_SIZE)
    """Weights; offload moves a part of them to the host."""
    kv_gib: float = number(1.0, **_AMOUNT)
    """KV cache, on the GPU."""
    gpu_gib: float = number(16.0, **_SIZE)
    """GPU memory of the fake card, GiB, if gpu.memory_gib is null."""
    gpu_peak_gib: float | None = number(None, **_AMOUNT)
    """Highest GPU memory in use; null: what was planned."""
    host_touched_gib: float = number(0.0, **_AMOUNT)
    """Host memory that the worker allocates while it builds, GiB."""
    fail: str = choice(FAILURES, "none")
    """none | no_fit | oom | host_oom | error | exit | sigkill | sigsegv | hang."""
    fail_at: str = choice(PLACES, "step")
    """plan | build | reference | step (of warm-ups and timed requests)."""
    fail_after_steps: int = number(0, low=0)
    """Steps of warm-ups and timed requests before a failure at step."""
    refuse_every: int | None = number(None, low=1)
    """Refuse every timed request whose number is a multiple of this; null: none."""
    break_every: int | None = number(None, low=1)
    """End every timed request whose number is a multiple of this with an error, in the step
    after its first token; null: none."""
    stop_after: int | None = number(None, low=1)
    """Tokens after which an answer stops by itself, if it is longer; null: at its full length."""
    wrong_token_at: int | None = number(None, low=0)
    """Output position at which the engine under test differs from the reference; null: none."""

    def check(self) -> None:
        """Raise ConfigError when a field has no effect, or there are no times."""
        for name in ("prefill_ms", "decode_ms"):
            if not getattr(self, name):
                raise ConfigError(f"model.fake.{name}: expected at least one time, got none.")
        if self.fail_after_steps and not self.fails_at("step"):
            raise ConfigError(
                f"model.fake.fail_after_steps: expected 0 with fail={self.fail} and "
                f"fail_at={self.fail_at}, got {self.fail_after_steps}. Set model.fake.fail, and "
                "fail_at=step."
            )

    def fails_at(self, place: str) -> bool:
        """Return whether a failure is scripted at one of PLACES."""
        return self.fail != "none" and self.fail_at == place


@dataclass(kw_only=True)
class ModelNode(Model):
    """The model: its sizes, where its weights are and how they are loaded."""

    fake: FakeScript | None = None
    """What an engine that computes nothing pretends (model=fake); null: a real engine."""

    def check(self) -> None:
        """Raise ConfigError when neither sizes nor a folder are known."""
        if self.fake is not None and (self.spec is None or self.load_format != "dummy"):
            raise ConfigError(
                "model.fake: expected null, or model.spec and model.load_format=dummy beside it. "
                "Choose model=fake, or remove it."
            )
        if self.fake is not None and self.quantize is not None:
            raise ConfigError(
                f"model.quantize: expected null with model=fake, which has no weights, got "
                f"{self.quantize}. Remove it."
            )
        if self.path is None and self.spec is None:
            raise ConfigError(
                "model.spec: expected the sizes of the model, or a folder in model.path to read "
                "them from, got neither. Set model.path=FOLDER."
            )
        super().check()


SYSTEMS: Final = ("native", "accelerate", "vllm", "http", "serve")
APIS: Final = ("completions", "chat")
PROMPT_FORMS: Final = ("token_ids", "text")


@dataclass(kw_only=True)
class SystemConfig(Sealed):
    """What answers the requests: this project's engine or a peer."""

    section: ClassVar = "system"
    kind: str = choice(SYSTEMS, "native")
    """native | serve (this project's server, started for the point) | accelerate | vllm | http."""
    base_url: str | None = None
    """The server, such as http://localhost:8000/v1 (http)."""
    served_model: str | None = None
    """The name that the server knows the model by; null: the first one that it lists (http)."""
    api_key_env: str | None = None
    """The environment variable that holds the key; null: no key is sent (http)."""
    api: str | None = choice(APIS, None)
    """With http completions (null) | chat: each prompt is the text of a user's turn, to which the
    server's template is added."""
    prompts: str | None = choice(PROMPT_FORMS, None)
    """With http token_ids (null) | text; text is decoded here and encoded again by the server."""
    extensions: bool | None = None
    """Send ignore_eos, return_token_ids and cache_salt (null: true), which some servers
    refuse."""
    request_timeout_s: float | None = number(None, low=0, low_open=True)
    """Longest wait for the next part of an answer (http; null: 300)."""

    def check(self) -> None:
        """Raise ConfigError when a field is out of bounds or belongs to another kind."""
        if self.kind != "http":
            for name, value in asdict(self).items():
                if name != "kind" and value is not None:
                    raise ConfigError(
                        f"system.{name}: expected null for system.kind={self.kind}, got {value!r}. "
                        "Remove it, or choose system=http."
                    )
            return
        if not self.base_url or urlsplit(self.base_url).scheme not in {"http", "https"}:
            raise ConfigError(
                "system.base_url: expected the address of a server, such as "
                f"http://localhost:8000/v1, got {self.base_url!r}."
            )
        if self.api == "chat" and self.prompts == "token_ids":
            raise ConfigError(
                "system.prompts: expected null or text with system.api=chat, got token_ids. A chat "
                "takes text; remove it."
            )


@dataclass(kw_only=True)
class LoadScenario(Sealed):
    """Starts of the engine in fresh processes, from nothing to the first token."""

    section: ClassVar = "scenario.load"
    cold_starts: int = number(0, low=0, high=MOST_REQUESTS)
    """Loads to time after the checkpoint was dropped from the page cache."""
    warm_starts: int = number(1, low=0, high=MOST_REQUESTS)
    """Loads to time with the checkpoint in the page cache."""

    def check(self) -> None:
        """Raise ConfigError when no start is asked for."""
        if self.cold_starts + self.warm_starts == 0:
            raise ConfigError(
                "scenario.load: expected at least one start, got cold_starts=0 and warm_starts=0. "
                "Raise one of them, or set scenario.load=null."
            )


@dataclass(kw_only=True)
class RequestSet(Sealed):
    """Requests of one scenario: synthetic prompts of a set length, or prompts from a file."""

    part: ClassVar[str] = "requests"
    section: ClassVar = "scenario.requests"
    num_requests: int = number(32, **REQUESTS)
    """Requests that are timed."""
    warmup_requests: int = number(2, low=0, high=MOST_REQUESTS)
    """Requests before the timed ones, with prompts of their own."""
    prompt_tokens: int = number(128, **TOKENS)
    """Tokens of each synthetic prompt; the prompts of prompts_file have their own lengths."""
    output_tokens: int = number(64, **TOKENS)
    """Tokens generated for each request; the end token does not stop it."""
    seed: int = number(0, low=0)
    """Seed of the synthetic prompts."""
    prompts_file: str | None = None
    """JSON lines, each with `prompt` (text) or `prompt_token_ids` (list); null: synthetic."""
    repeats: int = number(1, **REQUESTS)
    """Measurements, each with prompts of its own; above 1: means with 95 % intervals."""
    stop_share: float | None = number(None, **SHARE)
    """Stop repeating when the interval of output tokens/s (latency: of the mean request time) is at
    most this share of the mean to either side."""
    max_duration_s: float | None = number(None, **SECONDS)
    """Limit in seconds of the warm-up and of each measurement. Figures then cover what was done (at
    least one request; for throughput, one token) and are not valid. null: no limit."""

    def check(self) -> None:
        """Raise ConfigError when a field is out of bounds or has no effect."""
        check_repeats(self.section, self.repeats, self.stop_share)
        each = self.prompt_tokens if self.prompts_file is None else 0
        settings = "its num_requests, repeats or prompt_tokens"
        check_size(self.section, self.num_rows, self.num_rows * each, settings)
        if self.prompts_file is not None and not self.prompts_file.strip():
            raise ConfigError(
                f"{self.section}.prompts_file: expected a JSONL file or null, got ''."
            )

    @property
    def num_rows(self) -> int:
        """Rows of prompts_file that are read, those of all repeats."""
        return self.repeats * self.num_requests


@dataclass(kw_only=True)
class ThroughputScenario(RequestSet):
    """N requests offered at once."""

    part: ClassVar[str] = "throughput"
    section: ClassVar = "scenario.throughput"
    num_requests: int = number(64, **REQUESTS)
    """Requests that are timed."""
    output_tokens: int = number(128, **TOKENS)
    """Tokens generated for each request; the end token does not stop it."""


@dataclass(kw_only=True)
class LatencyScenario(RequestSet):
    """One request at a time; a median needs 11 of them, p90 64, p95 130, p99 662."""

    part: ClassVar[str] = "latency"
    section: ClassVar = "scenario.latency"


@dataclass(kw_only=True)
class QualityScenario(Sealed):
    """How close tokens are to those of plain weights: perplexity, agreement of greedy tokens."""

    section: ClassVar = "scenario.quality"
    text_file: str | None = None
    """UTF-8 text from which windows for perplexity and prompts are taken; null: Python's language
    reference, which Python ships (pydoc_data.topics)."""
    window_tokens: int = number(512, low=2, high=MOST_LENGTH)
    """Tokens of the text that are computed together; fewer than the model's context has."""
    stride_tokens: int = number(256, **TOKENS)
    """Tokens from the start of a window to the start of the next one; a token counts in the first
    window that contains it."""
    num_windows: int | None = number(32, **REQUESTS)
    """Windows, from the beginning of the text; null: all of it."""
    num_prompts: int = number(16, low=0, high=MOST_REQUESTS)
    """Prompts whose greedy tokens are compared; 0: none."""
    prompt_tokens: int = number(64, **TOKENS)
    """Tokens of each."""
    output_tokens: int = number(64, **TOKENS)
    """Greedy tokens of each that are compared."""
    reference: str | None = None
    """Model whose greedy tokens they are compared with: a name, a folder or OWNER/NAME with plain
    weights, or the folder of a run that had this part; null: the same model without
    model.quantize."""

    def check(self) -> None:
        """Raise ConfigError when a field is out of bounds or has no effect."""
        if self.stride_tokens >= self.window_tokens:
            raise ConfigError(
                f"{self.section}.stride_tokens: expected less than window_tokens="
                f"{self.window_tokens}, got {self.stride_tokens}: some tokens would not count. "
                "Lower it."
            )
        if self.reference is not None and not self.num_prompts:
            raise ConfigError(
                f"{self.section}.reference: expected null with num_prompts=0, got "
                f"{self.reference!r}: no tokens are compared. Remove it, or raise num_prompts."
            )
        for name in ("text_file", "reference"):
            if getattr(self, name) is not None and not getattr(self, name).strip():
                raise ConfigError(f"{self.section}.{name}: expected a path or null, got ''.")

    @property
    def longest_tokens(self) -> int:
        """Prompt and output tokens of the longest request."""
        compared = self.prompt_tokens + self.output_tokens if self.num_prompts else 0
        return max(self.window_tokens, compared) + 1  # a token is generated behind each


@dataclass(kw_only=True)
class CorrectnessConfig(Sealed):
    """Greedy tokens compared with the reference before anything is timed."""

    section: ClassVar = "scenario.correctness"
    enabled: bool = True
    """Compare tokens with the reference. false: they are not checked, and the record says so."""
    num_prompts: int = number(2, **REQUESTS)
    """Synthetic prompts to compare."""
    prompt_tokens: int = number(16, **TOKENS)
    """Tokens of each."""
    output_tokens: int = number(16, **TOKENS)
    """Tokens generated for each."""

    def check(self) -> None:
        """Raise ConfigError when a field is out of bounds."""
        num_tokens, settings = self.num_prompts * self.prompt_tokens, "num_prompts or prompt_tokens"
        check_size(self.section, self.num_prompts, num_tokens, f"its {settings}")


@dataclass(kw_only=True)
class ScenarioConfig(Sealed):
    """What is measured; a part that is null does not run."""

    section: ClassVar = "scenario"
    name: str
    """Name of the scenario in reports."""
    load: LoadScenario | None = None
    """Start times."""
    throughput: ThroughputScenario | None = None
    """Requests offered at once."""
    latency: LatencyScenario | None = None
    """One request at a time."""
    serve: ServeScenario | None = None
    """Requests that arrive by themselves."""
    steps: StepsScenario | None = None
    """Single steps of the engine."""
    tiers: TiersScenario | None = None
    """A KV cache over two tiers."""
    bare: BareScenario | None = None
    """Operations without an engine, before one is built."""
    overhead: OverheadScenario | None = None
    """The harness itself, with model=fake."""
    quality: QualityScenario | None = None
    """Perplexity and agreement with plain weights."""
    correctness: CorrectnessConfig = field(default_factory=CorrectnessConfig)
    """The comparison with the reference."""
    record_routing: bool = False
    """Write the experts of the last timed part's tokens to routing.parquet in the run's folder, for
    model.routing=trace:FILE."""

    def check(self) -> None:
        """Raise ConfigError when nothing would be measured."""
        if not (self.needs_engine or self.is_timed):
            raise ConfigError(
                "scenario: expected at least one of load, throughput, latency and serve, got null "
                "for each. Choose scenario=quick, or set one of them."
            )
        if self.correctness.enabled and not self.needs_engine:
            raise ConfigError(
                "scenario.correctness.enabled: expected false where no engine is built, got true."
            )
        if self.record_routing and not (self.latency or self.throughput or self.serve):
            raise ConfigError(
                "scenario.record_routing: expected latency, throughput or serve beside it, got "
                "none: there are no requests to record. Set one of them, or remove it."
            )

    @property
    def is_timed(self) -> bool:
        """Whether anything is timed in a worker beside its load."""
        return any(self._timed) or bool(self.bare and self.bare.parts)

    @property
    def needs_engine(self) -> bool:
        """Whether an engine is built."""
        return self.load is not None or any(self._timed)

    @property
    def _timed(self) -> tuple[object, ...]:
        """The parts that time an engine."""
        requests = (self.throughput, self.latency, self.serve)
        tiers = self.tiers and self.tiers.parts
        return (*requests, self.steps, tiers, self.overhead, self.quality)

    def part_names(self) -> list[str]:
        """Return the parts that are measured with an engine; the load runs last."""
        others = {"name", "correctness", "record_routing", "bare", "load"}
        names = [*(item.name for item in fields(self) if item.name not in others), "load"]
        found = [name for name in names if getattr(self, name) is not None]
        return [name for name in found if name != "tiers" or (self.tiers and self.tiers.parts)]

    def files(self) -> dict[str, str]:
        """Return the files that the parts read, by their setting."""
        parts = (self.throughput, self.latency, self.serve)
        found = {f"{part.part}.prompts_file": part.prompts_file for part in parts if part}
        trace = self.serve.trace if self.serve is not None else None
        found["serve.trace.path"] = trace.path if trace is not None else None
        found["quality.text_file"] = self.quality.text_file if self.quality else None
        return {name: path for name, path in found.items() if path is not None}

    def longest_tokens(self) -> dict[str, int]:
        """Return prompt plus output tokens of each part with prompts of a set length."""
        parts = {
            "throughput": self.throughput,
            "latency": self.latency,
            "correctness": self.correctness if self.correctness.enabled else None,
        }
        found = {
            name: part.prompt_tokens + part.output_tokens
            for name, part in parts.items()
            if part is not None and getattr(part, "prompts_file", None) is None
        }
        if self.quality is not None:
            found["quality"] = self.quality.longest_tokens
        served = self.serve.longest_tokens() if self.serve is not None else None
        return found if served is None else found | {"serve": served}


@dataclass(kw_only=True)
class TrackingConfig(Sealed):
    """Where runs are mirrored to; the files in the run's folder are written always."""

    section: ClassVar = "tracking"
    backend: str = choice(("mlflow", "none"), "mlflow")
    """mlflow | none."""
    uri: str | None = None
    """Tracking URI; null: the SQLite file in TIGHTFIT_HOME."""
    experiment: str = "tightfit"
    """Name of the MLflow experiment. MLflow compares the runs within one."""

    def check(self) -> None:
        """Raise ConfigError when a field has no effect or is empty."""
        if self.backend == "none" and self.uri is not None:
            raise ConfigError(
                f"tracking.uri: expected null with tracking.backend=none, got {self.uri!r}. "
                "Remove it, or choose tracking=mlflow."
            )
        if not self.experiment.strip():
            raise ConfigError("tracking.experiment: expected a name, got an empty text.")


@dataclass(kw_only=True)
class PlanConfig(Sealed):
    """What `mode=plan` says beside whether it fits, and which settings are best."""

    section: ClassVar = "plan"
    verbose: bool = False
    """Show every way to place the weights, memory by part, and where predicted rates are from."""
    reported_kv_gib: float | None = number(None, low=-_MOST, high=_MOST)
    """KV cache memory that another engine reported as available, GiB, such as -3.44: what that
    engine would have to offload is printed too. null: none."""

    def check_mode(self, mode: str) -> None:
        """Raise ConfigError where nothing is planned, so that this has no effect."""
        for name, value in asdict(self).items():
            if mode != "plan" and value is not None and value is not False:
                raise ConfigError(
                    f"plan.{name}: expected mode=plan beside it, got mode={mode}, where it has no "
                    "effect. Remove it, or set mode=plan."
                )


GROUPS: Final[Mapping[str, str]] = {
    "model": "what runs (none chosen: the demo model smollm2_135m)",
    "system": "what answers the requests: this project's engine or a peer",
    "gpu": "on which card's memory; a budget that is enforced on the hardware that is here",
    "offload": "which weights live in host memory",
    "kv": ("the KV cache; kv.cpu_gib, num_cpu_blocks or swap_space sizes its part in host memory"),
    "scenario": "what is measured",
    "tracking": "where runs are mirrored to",
    "experiment": "files that hold all choices of one question",
    "study": "points that are run one after another and held against limits",
}
"""Groups of files in conf/ and what they choose; each but experiment and study fills the node of
its name."""


@dataclass(kw_only=True)
class RunConfig(Sealed):
    """One run of the harness: what is asked, complete."""

    mode: str = choice(("run", "plan"), "run")
    """run | plan (print what fits, what it costs and what to choose; nothing runs)."""
    rerun: str | None = choice(("all", "invalid", "failed", "none"), None)
    """Which finished points run again, with the same settings, code, card and versions:
    all | invalid (what is not ok, or not valid) | failed (what is not ok) | none. null: failed in a
    sweep, all otherwise."""
    fail_fast: bool = False
    """Stop a sweep at the first point that is not ok; the others get status skipped."""
    monotone_stop: bool = True
    """Skip points of a sweep that cannot fit because a point that needs less did not fit."""
    timeout_s: float | None = number(None, low=0, low_open=True, hint="In seconds.")
    """Seconds that a point may take before it is stopped with status timeout; null: no limit."""
    silence_s: float | None = number(1800.0, low=0, low_open=True, hint="In seconds.")
    """Seconds without a sign of work after which a worker is stopped with status timeout; null: no
    limit."""
    model: ModelNode
    """What runs."""
    system: SystemConfig = field(default_factory=SystemConfig)
    """What answers the requests."""
    gpu: GPUConfig = field(default_factory=GPUConfig)
    """On which budget."""
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    """Which weights live in host memory."""
    kv: KVConfig = field(default_factory=KVConfig)
    """The KV cache."""
    scenario: ScenarioConfig
    """What is measured."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Where results are mirrored to."""
    engine: EngineSettings = field(default_factory=EngineSettings)
    """Limits and switches of the engine."""
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    """What is chosen by predicted times."""
    plan: PlanConfig = field(default_factory=PlanConfig)
    """What mode=plan prints."""
    ab: AbConfig | None = None
    """Two compositions to compare (scenario=ab); null: one run."""
    study: StudyConfig | None = None
    """Points to run and judge together (study=bench); null: one run."""

    def check(self) -> None:
        """Raise ConfigError for settings that contradict each other or are out of bounds."""
        self.plan.check_mode(self.mode)
        if self.model.fake is not None and self.mode == "plan":
            raise ConfigError(
                "mode: expected run with model=fake, whose memory is scripted, got plan. Choose a "
                "model that can be planned."
            )
        if self.model.fake is not None and self.system.kind != "native":
            raise ConfigError(
                f"system: expected native with model=fake, got {self.system.kind}. Remove one."
            )
        self._check_system()
        self.planner.check_against(self.offload)
        self.planner.check_length(self.engine)
        self._check_lengths()

    def _check_system(self) -> None:
        """Refuse parts that ask an engine for more than the one that answers can tell."""
        is_own = self.system.kind == "native" and self.model.fake is None
        for part in ("steps", "tiers"):
            if getattr(self.scenario, part) is not None and not is_own:
                raise ConfigError(
                    f"scenario.{part}: expected this project's engine, got "
                    f"{'model=fake' if self.model.fake else self.system.kind}. Choose "
                    f"system=native and another model, or set scenario.{part}=null."
                )
        self._check_quality()
        if self.scenario.record_routing and not is_own:
            raise ConfigError(
                "scenario.record_routing: expected false, got true: only this project's "
                "engine reports experts. Choose system=native and another model, or remove it."
            )
        fake = self.model.fake
        if self.scenario.overhead is not None and (fake is None or fake.clock != "real"):
            raise ConfigError(
                "scenario.overhead: expected model=fake with model.fake.clock=real, whose steps "
                "take a known time, got another engine. Choose study=overhead."
            )

    def _check_quality(self) -> None:
        """Refuse quality of weights that say nothing, or of a system that tells too little."""
        if self.scenario.quality is None:
            return
        if self.model.load_format == "dummy":
            raise ConfigError(
                "scenario.quality: expected weights of a checkpoint, got model.load_format=dummy, "
                "whose tokens mean nothing. Set scenario.quality=null, or load the checkpoint."
            )
        if self.system.api == "chat" or self.system.prompts == "text":
            raise ConfigError(
                "scenario.quality: expected prompts of token ids, which system.api=chat and "
                "system.prompts=text do not send. Set scenario.quality=null."
            )

    @property
    def offload_name(self) -> str:
        """What reports call the offload: what places weights, or auto where that is chosen.

        swap_space: kv.swap_space takes those that do not fit the GPU.
        """
        if self.planner.choose:
            return "auto"
        if "cpu_offload_gb" in self.planner.auto_fields:
            return "uva"
        backend = self.offload.backend
        return "swap_space" if backend == "none" and self.kv.swap_space else backend

    def length_limits(self) -> dict[str, int]:
        """Return the known bounds of prompt plus output in tokens, by what sets them."""
        limits = {}
        if self.engine.max_model_len is not None:
            limits["engine.max_model_len"] = self.engine.max_model_len
        if self.model.spec is not None:
            limits["the model's context"] = self.model.spec.max_position_embeddings
        return limits

    def _check_lengths(self) -> None:
        limits = self.length_limits()
        for name, tokens in self.scenario.longest_tokens().items():
            keys = ["prompt_tokens", "output_tokens"]
            if name == "quality":
                keys = ["window_tokens", *keys]
            lower = "the lengths of its prompts or outputs"
            if all(hasattr(getattr(self.scenario, name), key) for key in keys):
                *most, last = (f"scenario.{name}.{key}" for key in keys)
                lower = f"{', '.join(most)} or {last}"
            for source, limit in limits.items():
                if tokens > limit:
                    raise ConfigError(
                        f"scenario.{name}: expected prompt and output tokens of at most {limit} "
                        f"in all ({source}), got {tokens}. Lower {lower}."
                    )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for the record."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class SweepContext:
    """Where one point stands in its sweep; the same folder and id for every point of it."""

    sweep_id: str
    folder: Path
    index: int
    total: int
    number: int | None = None
    """Which of `total` it is, from 1; None: index + 1. Of a search, whose index also counts
    proposals that were not built."""
    shared: tuple[str, ...] = ()
    """Overrides that all points have; what a point has beside them is what varies."""
    title: str = ""
    """The question in few words, such as: smollm2_135m: offload x gpu, 6 points."""
    label: str = ""
    """What its name begins with; of a comparison's runs such as ab1-a."""
    began_s: float | None = None
    """When it began, seconds since 1970; points that ended later are never taken over by it."""
    point_s: float | None = None
    """Seconds that a point took so far, the mean of those that ran; None before the first."""
