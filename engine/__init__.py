"""PyTorch inference with weights or KV cache outside the GPU; usable alone."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.async_llm import AsyncLLM
    from engine.config import KVTransferConfig, OffloadConfig
    from engine.llm import LLM
    from engine.sampling_params import SamplingParams

__all__ = ["LLM", "AsyncLLM", "KVTransferConfig", "OffloadConfig", "SamplingParams"]

_HOMES = {
    "AsyncLLM": "engine.async_llm",
    "KVTransferConfig": "engine.kv_config",
    "LLM": "engine.llm",
    "OffloadConfig": "engine.offload_config",
    "SamplingParams": "engine.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that configuration needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    return getattr(import_module(_HOMES[name]), name)
