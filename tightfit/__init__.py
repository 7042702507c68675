"""The public package: models by name, folder or hub id, in a GPU budget; imports no torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.asked.kv import KVTransferConfig
    from engine.asked.offload import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
    from engine.asked.sampling import SamplingParams, StructuredOutput
    from engine.async_llm import AsyncLLM
    from engine.errors import CapacityError, ConfigError, EngineError, RequestError
    from tightfit.doors import LLM, plan, read_run

__all__ = [
    "LLM",
    "AsyncLLM",
    "CapacityError",
    "ConfigError",
    "EngineError",
    "KVTransferConfig",
    "OffloadConfig",
    "PrefetchOffloadConfig",
    "RequestError",
    "SamplingParams",
    "StructuredOutput",
    "UVAOffloadConfig",
    "plan",
    "read_run",
]


def __dir__() -> list[str]:
    """Return the public names, which completion shows although they are not imported yet."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'tightfit' has no attribute {name!r}")
    from harness.needs import shadowed  # noqa: PLC0415

    line = shadowed()
    if line:
        raise ImportError(line)
    if name in {"LLM", "plan", "read_run"}:
        from tightfit import doors  # noqa: PLC0415  loads torch

        return getattr(doors, name)
    if name.endswith("Error"):
        from engine import errors  # noqa: PLC0415

        return getattr(errors, name)
    import engine  # noqa: PLC0415

    return getattr(engine, name)
