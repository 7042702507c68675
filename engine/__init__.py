"""PyTorch inference with weights or KV cache outside the GPU; usable alone."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.asked.kv import KVTransferConfig
    from engine.asked.offload import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
    from engine.asked.sampling import SamplingParams, StructuredOutput
    from engine.async_llm import AsyncLLM
    from engine.llm import LLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "KVTransferConfig",
    "OffloadConfig",
    "PrefetchOffloadConfig",
    "SamplingParams",
    "StructuredOutput",
    "UVAOffloadConfig",
]

_HOMES = {
    "AsyncLLM": "async_llm",
    "KVTransferConfig": "asked.kv",
    "LLM": "llm",
    "OffloadConfig": "asked.offload",
    "PrefetchOffloadConfig": "asked.offload",
    "SamplingParams": "asked.sampling",
    "StructuredOutput": "asked.sampling",
    "UVAOffloadConfig": "asked.offload",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that configuration needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
