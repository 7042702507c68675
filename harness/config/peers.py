"""What our settings mean for a peer. What it has no counterpart of is refused by name; no torch."""

from collections.abc import Collection, Mapping
from dataclasses import fields
from importlib.util import find_spec
from typing import Any, Final

from engine.errors import ConfigError
from harness.config.schema import RunConfig

Settings = Mapping[str, Collection[str]]

TAKEN: Final[Mapping[str, Settings]] = {
    "accelerate": {
        "offload": ("offload_backend", "uva"),
        "offload.uva": ("cpu_offload_gb",),
        "planner": ("choose", "kv_tokens"),
        "engine": (
            "gpu_memory_utilization",
            "max_model_len",
            "max_num_seqs",
            "enforce_eager",
            "dtype",
            "seed",
        ),
    },
    "vllm": {
        "offload": ("offload_backend", "uva", "prefetch"),
        "offload.uva": ("cpu_offload_gb", "cpu_offload_params"),
        "offload.prefetch": (
            "offload_group_size",
            "offload_num_in_group",
            "offload_prefetch_step",
            "offload_params",
        ),
        "kv": ("block_size", "enable_prefix_caching", "cpu_gib", "disable_sliding_window"),
        "engine": (
            "gpu_memory_utilization",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "enforce_eager",
            "dtype",
            "seed",
        ),
    },
    "http": {"engine": ("max_model_len",)},
}
"""System -> node of the configuration -> settings that it follows."""
NODES: Final = ("offload", "offload.uva", "offload.prefetch", "kv", "planner", "engine")
PACKAGES: Final[Mapping[str, tuple[str, str]]] = {
    "accelerate": ("accelerate", "Run: pip install 'tightfit[accelerate]'"),
    "vllm": ("vllm", "Install vLLM in this environment"),
    "http": ("httpx_sse", "Run: pip install httpx-sse"),
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


def require_package(kind: str) -> None:
    """Check that what a system runs on is installed, before anything is made for it.

    Raises:
        ConfigError: it is not; the message says what to install.
    """
    package, remedy = PACKAGES.get(kind, ("", ""))
    if package and find_spec(package) is None:
        raise ConfigError(
            f"system={kind}: expected the package {package}, found none. {remedy}, or choose "
            "system=native."
        )


def check_system(config: RunConfig) -> None:
    """Check that the system follows every setting that differs from its default.

    Raises:
        ConfigError: naming the first setting that it does not follow.
    """
    kind = config.system.kind
    if kind == "native":
        return
    if config.gpu.host_gib is not None and config.mode != "plan":
        raise ConfigError(
            f"gpu.host_gib: expected null with system={kind}, got {config.gpu.host_gib:g}: it is "
            "what plans are held against, and there are none. Remove it."
        )
    for node in NODES:
        _check_node(kind, node, _node(config, node))
    if kind == "http":
        _check_http(config)


def _node(config: RunConfig, path: str) -> Any:
    node: Any = config
    for name in path.split("."):
        node = getattr(node, name)
    return node


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
    if config.scenario.load is not None:
        raise ConfigError(
            "scenario.load: expected null with system=http, got load starts: the server runs "
            "already. Set scenario.load=null."
        )
    if config.model.load_format == "dummy" and config.scenario.correctness.enabled:
        raise ConfigError(
            "scenario.correctness.enabled: expected false with system=http and dummy weights, got "
            "true: the server has other weights. Set it to false."
        )
