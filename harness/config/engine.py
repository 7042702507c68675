"""Turn a RunConfig into what an engine is built from, or refuse it; no torch."""

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from catalogue.files import expanded, facts_folder, kept_folder
from engine.asked.config import EngineConfig, ModelConfig, PlannerConfig
from engine.asked.offload import OffloadConfig
from engine.errors import ConfigError
from engine.model.formats import plain
from engine.model.loading import weight_formats
from engine.model.routing import check_experts, check_trace
from engine.model.spec import ModelSpec
from engine.plan.cards import resolve_dtype, resolve_max_model_len
from engine.plan.policy import assign
from harness.config.schema import RunConfig
from harness.config.serve import MOST_REQUESTS
from harness.folders import install_extra

Settings = Mapping[str, Collection[str]]

_ENGINE: Final = (
    "gpu_memory_utilization",
    "max_model_len",
    "max_num_seqs",
    "enforce_eager",
    "dtype",
)
_PREFETCH: Final = ("offload_group_size", "offload_num_in_group", "offload_prefetch_step")
TAKEN: Final[Mapping[str, Settings]] = {
    "accelerate": {
        "offload": ("offload_backend", "uva"),
        "offload.uva": ("cpu_offload_gb",),
        "planner": ("choose", "kv_tokens"),
        "engine": (*_ENGINE, "seed"),
    },
    "vllm": {
        "offload": ("offload_backend", "uva", "prefetch"),
        "offload.uva": ("cpu_offload_gb", "cpu_offload_params"),
        "offload.prefetch": (*_PREFETCH, "offload_params"),
        "kv": ("block_size", "enable_prefix_caching", "cpu_gib", "disable_sliding_window"),
        "engine": (*_ENGINE, "seed", "max_num_batched_tokens"),
    },
    "http": {"engine": ("max_model_len",)},
}
"""System -> node of the configuration -> settings that it follows."""
NODES: Final = (
    "offload",
    "offload.uva",
    "offload.prefetch",
    "offload.experts",
    "kv",
    "planner",
    "engine",
)
PACKAGES: Final[Mapping[str, tuple[str, str]]] = {
    "accelerate": ("accelerate", f"Run: {install_extra('accelerate')}"),
    "vllm": ("vllm", "Install vLLM in this environment"),
    "http": ("aiohttp", "Run: `pip install aiohttp`"),
}
"""System -> what it imports, and what to do where that is absent."""
WHY: Final[Mapping[str, str]] = {
    "accelerate": (
        "accelerate copies whole modules when they run and has no counterpart. Choose "
        "offload=uva with cpu_offload_gb for as many bytes in host memory, or offload=auto to "
        "fill the GPU first"
    ),
    "vllm": "vLLM has no counterpart",
    "http": "the server was started with settings of its own",
}


def missing_package(kind: str) -> str | None:
    """Return what to install for a system; None where it is installed."""
    package, remedy = PACKAGES.get(kind, ("", ""))
    if not package or find_spec(package) is not None:
        return None
    return (
        f"system={kind}: expected the package {package}, found none. {remedy}, or choose "
        "system=native."
    )


def require_package(kind: str) -> None:
    """Raise ConfigError unless what a system runs on is installed."""
    if (message := missing_package(kind)) is not None:
        raise ConfigError(message)


def check_system(config: RunConfig) -> None:
    """Raise ConfigError where the system does not follow a setting that has not its default."""
    kind = config.system.kind
    if kind == "native":
        return
    if kind == "serve":
        _check_no_load(config, "its start is no load of the engine alone")
        return
    if config.gpu.host_gib is not None and config.mode != "plan":
        raise ConfigError(
            f"gpu.host_gib: expected null with system={kind}, got {config.gpu.host_gib:g}: it "
            "limits plans, and this system makes none. Remove it."
        )
    for name, default in (("keep_lossless", "false"), ("quantize", "null"), ("routing", "null")):
        if value := getattr(config.model, name):
            got = "true" if value is True else value
            raise ConfigError(
                f"model.{name}: expected {default} with system={kind}, got {got}: {WHY[kind]}. "
                "Remove it, or choose system=native."
            )
    for node in NODES:
        _check_node(kind, node, attrgetter(node)(config))
    if kind == "http":
        _check_http(config)


def _check_node(kind: str, path: str, node: Any) -> None:
    defaults, taken = type(node)(), TAKEN[kind].get(path, ())
    for item in fields(node):
        name = f"{path}.{item.name}"
        value, default = getattr(node, item.name), getattr(defaults, item.name)
        if value == default or item.name in taken or name in NODES:
            continue
        raise ConfigError(
            f"{name}: expected {default!r} with system={kind}, got {value!r}: {WHY[kind]}. "
            f"Remove it, or choose system=native."
        )


def _check_http(config: RunConfig) -> None:
    _check_no_load(config, "the server runs already")
    if config.model.load_format == "dummy" and config.scenario.correctness.enabled:
        raise ConfigError(
            "scenario.correctness.enabled: expected false with system=http and dummy weights, got "
            "true: the server has other weights. Set it to false."
        )


def _check_no_load(config: RunConfig, why: str) -> None:
    if config.scenario.load is not None:
        raise ConfigError(
            f"scenario.load: expected null with system={config.system.kind}, got load starts: "
            f"{why}. Set scenario.load=null."
        )


def _with_model(config: RunConfig, model: ModelConfig) -> EngineConfig:
    """Return the configuration of an engine of this model under a run's settings."""
    nodes = ("gpu", "offload", "kv", "engine", "planner")
    parts: dict[str, Any] = {node: getattr(config, node) for node in nodes}
    parts |= {"facts_folder": str(facts_folder()), "kept_folder": str(kept_folder())}
    parts["request_tokens"] = max(config.scenario.longest_tokens().values(), default=None)
    parts["record_routing"] = config.scenario.record_routing
    return EngineConfig(model=model, emulated_kv_tokens=kv_tokens_in_use(config), **parts)


def kv_tokens_in_use(config: RunConfig) -> int | None:
    """Return the most tokens of KV that the scenario's requests can use; None: unknown.

    Those of requests that run at once, or where prefixes are kept those of all. Unknown too of
    single steps, and where prefixes are kept of requests that arrive or are scored.
    """
    scenario, limits = config.scenario, config.length_limits().values()
    if scenario.steps or scenario.tiers or not limits:
        return None
    known, longest = scenario.longest_tokens(), min(limits)
    at_once = {"load": 1, "correctness": 1} | ({"latency": 1} if scenario.latency else {})
    known |= {"load": 1, "correctness": known.get("correctness", 1)}
    if config.kv.enable_prefix_caching:
        return _kept_tokens(config, known, longest)
    if scenario.quality is not None:
        at_once["quality"] = 1
    if scenario.throughput is not None:
        at_once["throughput"] = scenario.throughput.num_requests
    if scenario.serve is not None:
        serve = scenario.serve
        at_once["serve"] = serve.max_concurrency or serve.num_requests or MOST_REQUESTS
    most = config.engine.max_num_seqs
    used = [
        min(count, most) * (known.get(part, longest) + config.kv.block_size)
        for part, count in at_once.items()
    ]
    return max(*used, config.planner.kv_tokens or 0)


def _kept_tokens(config: RunConfig, known: Mapping[str, int], longest: int) -> int | None:
    """Return the tokens of all requests of a worker, which a prefix cache can keep; None: unknown.

    `known` are the lengths of the requests of parts, `longest` is that of any.
    """
    scenario, check = config.scenario, config.scenario.correctness
    if scenario.serve is not None or scenario.quality is not None:
        return None
    counts = {"load": 1, "correctness": check.num_prompts if check.enabled else 0} | {
        name: (part.num_requests + part.warmup_requests) * part.repeats
        for name, part in (("latency", scenario.latency), ("throughput", scenario.throughput))
        if part is not None
    }
    block = config.kv.block_size
    kept = sum(count * (known.get(part, longest) + block) for part, count in counts.items())
    return max(kept, config.planner.kv_tokens or 0)


def engine_config(
    config: RunConfig, model_path: Path | None, spec: ModelSpec | None = None
) -> EngineConfig:
    """Return the configuration of the engine under test; without a folder of random weights.

    `spec` are the model's sizes where the configuration does not state them.
    """
    model = ModelConfig(
        name=config.model.name,
        path=None if model_path is None else str(model_path),
        spec=spec or config.model.spec,
        **config.model.loading(),
    )
    return _with_model(config, model)


def sizes_config(config: RunConfig, spec: ModelSpec | None) -> EngineConfig:
    """Return the configuration of an engine of a model's sizes, of which no weights are read."""
    node = config.model
    model = ModelConfig(
        name=node.name,
        load_format="dummy",
        quantize=node.quantize,
        routing=node.routing,
        spec=spec,
    )
    return _with_model(config, model)


def reference_config(config: RunConfig, model_path: Path | None) -> EngineConfig:
    """Return the configuration whose tokens are the yardstick; the same for every placement.

    It has no host tier of KV blocks; where there is one, only room for the prompts that are
    compared, so that it fits where the engine under test does.
    """
    longest, check = config.engine.max_model_len, config.scenario.correctness
    if config.kv.has_host_tier:
        longest = check.prompt_tokens + check.output_tokens
    asked = engine_config(config, model_path)
    return replace(
        asked,
        model=replace(asked.model, keep_lossless=False),
        emulated_kv_tokens=check.num_prompts * (check.prompt_tokens + check.output_tokens),
        record_routing=False,
        facts_folder=None,
        kept_folder=None,
        offload=OffloadConfig(),
        planner=PlannerConfig(),
        kv=replace(config.kv.without_host_tier(), enable_prefix_caching=False),
        engine=replace(
            config.engine, enforce_eager=True, max_model_len=longest, weight_format=None
        ),
    )


def yardstick_config(config: RunConfig, model: ModelConfig) -> EngineConfig:
    """Return the configuration of the plain weights whose greedy tokens quality is held against."""
    quality = config.scenario.quality
    assert quality is not None
    longest = quality.prompt_tokens + quality.output_tokens
    found = reference_config(config, None if model.path is None else Path(model.path))
    engine = replace(found.engine, max_model_len=longest)
    return replace(
        found, model=model, emulated_kv_tokens=longest, request_tokens=longest, engine=engine
    )


def check_yardstick(config: RunConfig, spec: ModelSpec) -> None:
    """Raise ConfigError where quality is of a quantised checkpoint, and held against nothing."""
    quality = config.scenario.quality
    if quality is None or not quality.num_prompts or quality.reference is not None:
        return
    if spec.quantization:
        raise ConfigError(
            "scenario.quality.reference: expected the model that this one was made of (a name, a "
            "folder, or OWNER/NAME), or the folder of a run that had this part, got null: the "
            f"checkpoint is quantised ({spec.quantization['method']}). Set it, or set "
            "num_prompts=0."
        )


def check_settings(config: RunConfig) -> None:
    """Check what depends on the model's sizes but on no machine and no weights.

    Raises ConfigError where a selector matches nothing, an offload moves nothing, a window or a
    length is refused, a model's folder, a file of prompts or a trace is absent, or a trace is of
    another model.
    """
    for name, file in config.scenario.files().items():
        path = expanded(file)
        if not path.is_file():
            raise ConfigError(f"scenario.{name}: expected a file, found none at {path.absolute()}.")
    model = config.model
    is_read = model.load_format != "dummy" and config.system.kind != "http"
    if model.path is not None and is_read and not expanded(model.path).exists():
        raise ConfigError(
            f"model.path: expected a folder or a .gguf file, found none at {model.path}. Give the "
            "folder of a checkpoint, or take random weights (model.load_format=dummy)."
        )
    check_trace(config.model.routing, config.model.spec)
    serve = config.scenario.serve
    if serve is not None and serve.trace is not None:
        serve.trace.check_ending()
    check_system(config)
    if config.model.keep_lossless or config.model.quantize:
        engine_config(config, expanded(config.model.path or "."))  # refuses what has no effect
    spec = config.model.spec
    if spec is None:
        return
    check_experts(spec, config.model.routing, is_recorded=config.scenario.record_routing)
    asked = sizes_config(config, spec)
    weight_formats(config.model.quantize, spec, spec.dtype)  # refuses what is quantised already
    check_yardstick(config, spec)
    resolve_max_model_len(asked, spec)
    # Only whether anything moves matters here, and that is the same in every dtype.
    assign(spec, config.offload, plain(resolve_dtype(asked, spec, "cuda")))
