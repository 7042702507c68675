"""Settings that are resolved before a plan: dtype, length, and what to say of card and windows."""

from engine.asked.config import EngineConfig
from engine.errors import ConfigError
from engine.model.spec import ModelSpec

BFLOAT16_CAPABILITY = (8, 0)
"""Compute capability from which on cards compute with bfloat16."""
TORCH_CAPABILITY = (7, 5)
"""The least that torch's builds for CUDA 13 have kernels for."""


def resolve_dtype(
    config: EngineConfig, spec: ModelSpec, kind: str, capability: tuple[int, int] | None = None
) -> str:
    """Return the dtype in force.

    auto is the checkpoint's on a GPU, float16 for bfloat16 on one without it, float32 on a CPU.
    """
    if config.engine.dtype != "auto":
        return config.engine.dtype
    if kind == "cpu":
        return "float32"
    lacks = capability is not None and capability < BFLOAT16_CAPABILITY
    return "float16" if lacks and spec.dtype == "bfloat16" else spec.dtype


def resolve_max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    """Return the length limit in force.

    Raises:
        ConfigError: The limit exceeds the model's.
    """
    limit = spec.max_position_embeddings
    asked = limit if config.engine.max_model_len is None else config.engine.max_model_len
    if not 2 <= asked <= limit:
        raise ConfigError(
            "engine.max_model_len: expected at least 2 (one token of prompt, one of output) and at "
            f"most the model's {limit} positions, got {asked}. Change it."
        )
    return asked


def capability_notes(
    config: EngineConfig, spec: ModelSpec, dtype: str, name: str, capability: tuple[int, int] | None
) -> list[str]:
    """Say what an old card makes of the weights, and that it may not run at all.

    Args:
        config: What was asked.
        spec: Sizes of the model.
        dtype: The dtype in force.
        name: Name of the card.
        capability: Its compute capability; None: not known, or no card.
    """
    notes: list[str] = []
    if capability is None:
        return notes
    name = f"compute capability {'.'.join(map(str, capability))} ({name})"
    if dtype != spec.dtype and config.engine.dtype == "auto":
        notes.append(f"fallback: {name} has no bfloat16, so weights are {dtype}.")
    if capability < TORCH_CAPABILITY:
        notes.append(
            f"torch's builds for CUDA 13 have no kernels for {name}: with those it can be planned, "
            "not run."
        )
    return notes


def window_notes(config: EngineConfig, spec: ModelSpec, max_model_len: int) -> list[str]:
    """Say what it means that windows are disabled."""
    if not config.kv.disable_sliding_window:
        return []
    windows = [window for window in spec.windows if window is not None]
    if not windows:
        return ["kv.disable_sliding_window: this model has no window, so nothing changes."]
    windows = [window for window in windows if window < max_model_len]
    if not windows:
        return []
    tokens = " or ".join(map(str, sorted(set(windows))))
    return [
        f"kv.disable_sliding_window: {len(windows)} of {spec.num_hidden_layers} layers "
        f"attend to the whole context instead of {tokens} tokens, which the model was not made for."
    ]
