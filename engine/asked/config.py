"""What is asked of the engine: model source, GPU budget, offload, KV cache and limits."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Final

from engine.asked.kv import KVConfig
from engine.asked.offload import OffloadConfig
from engine.errors import ConfigError
from engine.model.loading import LoadConfig
from engine.model.spec import DTYPES, ModelSpec
from engine.sealed import Sealed, check_choice, choice, number

OBJECTIVES = ("latency", "throughput", "context")
WEIGHT_FORMATS = ("checkpoint", "lossless", "auto")
AUTO_FIELDS = ("cpu_offload_gb", "max_model_len", "max_num_seqs")

ANY_CARD: Final = "auto"
"""Name of whatever card is here."""
MOST_MEMORY_GIB: Final = 4000
"""More than any card has; sizes in MiB are refused by it, from that of a 4 GB card on."""


@dataclass(kw_only=True)
class GPUConfig(Sealed):
    """The device and its budget; the rates are for prediction only."""

    section: ClassVar = "gpu"
    name: str = field(default=ANY_CARD, metadata={"keyword": "gpu_name"})
    """Name of the card in reports."""
    device: str = choice(("auto", "cuda", "cpu"), "auto")
    """auto (CUDA if there is one, else the CPU) | cuda | cpu."""
    memory_gib: float | None = number(
        None,
        keyword="gpu_memory_gib",
        low=0,
        high=MOST_MEMORY_GIB,
        low_open=True,
        hint="It is a size in GiB; divide MiB by 1024.",
    )
    """Memory of the card as nvidia-smi shows it, GiB; the budget is this times
    gpu_memory_utilization. null: the memory of this card (CPU: half of the free host memory)."""
    host_gib: float | None = number(None, low=0, low_open=True)
    """Memory of the card's host, GiB; the plan uses at most this. null: the free memory of this
    host, or no limit when planning for a card that is not in this machine."""
    link_gb_s: float | None = number(None, low=0, low_open=True)
    """Host link, one direction, GB/s (10^9)."""
    hbm_gb_s: float | None = number(None, low=0, low_open=True)
    """GPU memory bandwidth, GB/s."""
    bf16_tflops: float | None = number(None, low=0, low_open=True)
    """Dense bf16 matrix rate, TFLOP/s; for a card without bf16, that of float16."""
    compute_capability: float | None = number(None, low=1)
    """Compute capability of a planned card that is not in this machine; below 8.0, weights are
    planned in float16. null: 8.0 or more."""

    def on_card(self, sheet: Mapping[str, Any]) -> "GPUConfig":
        """Return the card of a sheet, with what is set here in the place of its values.

        Args:
            sheet: Fields of this class.
        """
        default = GPUConfig()
        typed = {
            key: value for key, value in vars(self).items() if value != getattr(default, key, value)
        }
        return GPUConfig(**{**sheet, **typed})

    @property
    def is_described(self) -> bool:
        """Whether the settings describe a card, by more than a part of whatever is here."""
        rates = (self.link_gb_s, self.hbm_gb_s, self.bf16_tflops, self.compute_capability)
        is_named = self.name != ANY_CARD or self.device == "cuda"
        return self.device != "cpu" and (is_named or any(rates))


@dataclass(kw_only=True)
class EngineSettings(Sealed):
    """Limits and switches of the engine."""

    section: ClassVar = "engine"
    gpu_memory_utilization: float = number(
        0.9, low=0, high=1, low_open=True, hint="It is a share of the GPU's memory."
    )
    """Share of the GPU's memory that the engine may use, (0, 1]."""
    max_model_len: int | None = number(None, low=1)
    """Longest prompt plus output, tokens; null: the model's own limit, cut to what fits
    but to no less than 8192."""
    max_num_seqs: int = number(64, low=1)
    """Sequences that run at once."""
    max_num_batched_tokens: int = number(2048, low=1)
    """Tokens of one step."""
    enforce_eager: bool = False
    """Run decode without CUDA graphs."""
    dtype: str = choice(("auto", *DTYPES), "auto")
    """auto (the checkpoint's on a GPU, float32 on a CPU) | bfloat16 | float16 | float32."""
    weight_format: str | None = choice(WEIGHT_FORMATS, None)
    """checkpoint (weights as they are stored) | lossless (every bfloat16 matrix that takes less in
    12-bit codes, restored to the bit) | auto (whichever is predicted to be better, or some of
    both). null: checkpoint, or auto where the planner chooses placements (offload=auto) of weights
    that are not rounded (model.quantize)."""
    seed: int = number(0, low=0, high=2**63 - 1)
    """Seed of dummy weights and of requests without a seed."""
    host_reserve_gib: float = number(1.0, low=0)
    """Host memory that must stay free after the load, GiB."""
    uva_stage_tokens: int | None = number(None, low=1)
    """From this many tokens in a step on, uva weights are staged through GPU slots first. null:
    where reading in place takes 15 % longer than copying, by the rates of the card and of formats.

    That is 65 for 16-bit weights on an H200, and 1 for weights of 4 bits, which products read
    slower in place (docs/quantised.md). 1 stages every step, so nothing is read in place, as with
    offload_backend=prefetch.
    """

    def check(self) -> None:
        """Raise ConfigError when a field is out of bounds."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"engine.max_num_batched_tokens: expected at least max_num_seqs="
                f"{self.max_num_seqs}, got {self.max_num_batched_tokens}. Raise it, or lower "
                "engine.max_num_seqs."
            )


@dataclass(kw_only=True)
class PlannerConfig(Sealed):
    """What is chosen by predicted times where the weights do not fit the GPU budget."""

    section: ClassVar = "planner"
    choose: bool = False
    """Choose the placement of every tensor by predicted times."""
    objective: str = choice(OBJECTIVES, "latency")
    """latency (one sequence) | throughput (a queue of 200 requests) | context (the longest
    sequence)."""
    kv_tokens: int | None = number(None, low=1)
    """KV tokens that the chosen placement must leave memory for; null: one sequence of
    max_model_len."""
    auto_fields: list[str] = field(default_factory=list)
    """Settings to choose: cpu_offload_gb (the least that fits), max_model_len and max_num_seqs (the
    largest that fit, at most the value set)."""
    referee: bool = False
    """Build the two best candidates, time a few steps of each and keep the faster one."""

    def check(self) -> None:
        """Raise ConfigError for an unknown field, or for what has no effect."""
        names: object = self.auto_fields
        if not isinstance(names, (list, tuple)):
            raise ConfigError(
                f"planner.auto_fields: expected a list of {', '.join(AUTO_FIELDS)}, got "
                f"{names!r}. Put the name into a list."
            )
        for name in self.auto_fields:
            check_choice("planner.auto_fields", name, AUTO_FIELDS)
        if len(set(self.auto_fields)) != len(self.auto_fields):
            raise ConfigError(
                f"planner.auto_fields: expected each name once, got {list(self.auto_fields)!r}."
            )
        for name, is_set in (
            ("objective", self.objective != "latency"),
            ("kv_tokens", self.kv_tokens is not None),
            ("referee", self.referee),
        ):
            if is_set and not self.choose:
                raise ConfigError(
                    f"planner.{name}: expected planner.choose=true beside it, got choose=false: "
                    f"{getattr(self, name)} would have no effect. Set offload=auto (in Python "
                    "choose=True), or remove it."
                )

    def check_length(self, settings: EngineSettings) -> None:
        """Raise ConfigError where a length is set that the objective context is to choose."""
        length, is_bound = settings.max_model_len, "max_model_len" in self.auto_fields
        if self.choose and self.objective == "context" and length is not None and not is_bound:
            raise ConfigError(
                "planner.objective=context: expected no engine.max_model_len, which it chooses, "
                f"got {length}. Remove one of them, or set planner.auto_fields=[max_model_len] to "
                "have it as the most."
            )

    def check_against(self, offload: OffloadConfig) -> None:
        """Raise ConfigError where the offload settings fix what is to be chosen."""
        changed = ", ".join(f"{name}={value}" for name, value in offload.changed().items())
        if self.choose and changed:
            raise ConfigError(
                f"planner.choose (offload=auto): expected no offload settings beside it, got "
                f"{changed}: they fix what is to be chosen, and are not overridden. Remove them, "
                "or choose another offload."
            )
        if "cpu_offload_gb" not in self.auto_fields:
            return
        if self.choose:
            raise ConfigError(
                "planner.auto_fields: expected no cpu_offload_gb with planner.choose=true, which "
                "chooses every placement. Remove one of the two."
            )
        if offload.offload_backend == "prefetch" or offload.prefetch.is_set:
            raise ConfigError(
                "planner.auto_fields: expected the uva backend for cpu_offload_gb, got prefetch "
                "settings. Remove them, or cpu_offload_gb."
            )


@dataclass(kw_only=True)
class ModelConfig(LoadConfig):
    """Where a model's weights come from and, where known beforehand, its sizes."""

    name: str = field(metadata={"keyword": "model_name"})
    """Short name."""
    path: str | None = field(default=None, metadata={"keyword": "model"})
    """Local folder with config.json (and weights unless load_format is dummy), or a .gguf file."""
    spec: ModelSpec | None = None
    """Sizes; null: read from config.json in `path`."""

    @classmethod
    def of_sizes(
        cls, name: str, spec: ModelSpec, path: str | None = None, **loading: Any
    ) -> "ModelConfig":
        """Return a model for a plan, which needs its sizes and no files.

        Args:
            name: short name.
            spec: its sizes.
            path: where its files are; None: not known, or not here yet.
            loading: fields of LoadConfig.
        """
        # Where files will be read from is of no account, but that they will be.
        is_dummy = loading.get("load_format") == "dummy"
        return cls(name=name, spec=spec, path=path or (None if is_dummy else "."), **loading)

    def check(self) -> None:
        """Raise ConfigError when a field is out of bounds, or no sizes or weights are known."""
        super().check()
        if self.path is None and self.spec is None:
            raise ConfigError(
                f"model {self.name!r}: expected a folder (path) or its sizes (spec), got neither."
            )
        if self.path is None and self.load_format != "dummy":
            raise ConfigError(
                f"model {self.name!r}: expected a folder (path) for load_format="
                f"{self.load_format}, got none. Set model.path, or load_format=dummy."
            )


@dataclass(kw_only=True)
class EngineConfig(Sealed):
    """Everything that the engine is built from."""

    model: ModelConfig
    gpu: GPUConfig = field(default_factory=GPUConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    kv: KVConfig = field(default_factory=KVConfig)
    engine: EngineSettings = field(default_factory=EngineSettings)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    request_tokens: int | None = number(None, low=1, hint="In tokens.")
    """Prompt and output tokens of the longest request that is known beforehand: no length that is
    advised, or taken where none is set, is shorter. null: none is known."""
    measured_rates: dict[str, float | None] = field(default_factory=dict)
    """Rates that a probe found on this machine, for predicted times; empty: unknown."""
    emulated_kv_tokens: int | None = number(None, low=1, hint="In tokens.")
    """Most tokens of KV on an emulated GPU, whose memory is RAM; null: what the budget leaves."""
    facts_folder: str | None = None
    """Folder in which a load notes which tensors of a checkpoint codes cannot hold, so that the
    next plan knows; null: nothing is noted."""
    record_routing: bool = False
    """Keep the experts of every token that runs, in host memory (2 bytes a layer and expert), for
    LLM.routing_trace."""
    kept_folder: str | None = None
    """Folder of weights that were packed before (model.keep_lossless); null: none are kept or read.
    """

    def check(self) -> None:
        """Raise ConfigError when parts contradict each other."""
        self.planner.check_against(self.offload)
        if self.model.quantize is not None and self.engine.weight_format in {"lossless", "auto"}:
            raise ConfigError(
                "engine.weight_format: expected null or checkpoint with model.quantize="
                f"{self.model.quantize}, got {self.engine.weight_format}: rounded weights have no "
                "bits to restore. Remove one of them."
            )
        if self.model.keep_lossless and self.weight_format == "checkpoint":
            raise ConfigError(
                "model.keep_lossless: expected engine.weight_format=lossless or auto beside it, "
                "got checkpoint: nothing is packed that could be kept. Set it, or remove "
                "model.keep_lossless."
            )
        if self.model.keep_lossless and self.kept_folder is None:
            raise ConfigError(
                "model.keep_lossless: expected a folder to keep weights in, got none. Set "
                "kept_folder, or use tightfit.LLM, which has one in TIGHTFIT_HOME."
            )

    @property
    def weight_format(self) -> str:
        """The weight format in force: checkpoint | lossless | auto."""
        is_open = self.planner.choose and self.model.quantize is None
        default = "auto" if is_open else "checkpoint"
        return self.engine.weight_format or default

    def choosing(self, auto_fields: Sequence[str] = ()) -> "EngineConfig":
        """Return the same with every placement chosen, as offload=auto asks for it."""
        planner = replace(self.planner, choose=True, auto_fields=list(auto_fields))
        return replace(self, planner=planner, offload=OffloadConfig())

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a record."""
        return asdict(self)
