"""Our settings as arguments of vLLM's EngineArgs; no torch."""

from collections.abc import Collection
from typing import Any, Final

from engine.config import EngineConfig
from engine.errors import ConfigError

MODULE: Final = "vllm"


def vllm_arguments(config: EngineConfig, folder: str, share: float) -> dict[str, Any]:
    """Return the arguments that say what a configuration asks.

    Settings that are left at what means "as vLLM does" are left out.

    Args:
        config: what is asked; harness.systems.mapping has refused what has no counterpart.
        folder: with config.json, and weights unless they are random.
        share: of the card's memory that the budget is.
    """
    engine, kv = config.engine, config.kv
    found: dict[str, Any] = {
        "model": folder,
        "skip_tokenizer_init": True,
        "load_format": config.model.load_format,
        "dtype": engine.dtype,
        "seed": engine.seed,
        "gpu_memory_utilization": share,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "enforce_eager": engine.enforce_eager,
        "block_size": kv.block_size,
        "enable_prefix_caching": kv.enable_prefix_caching,
    }
    if engine.max_model_len is not None:
        found["max_model_len"] = engine.max_model_len
    if kv.disable_sliding_window:
        found["disable_sliding_window"] = True
    if kv.cpu_gib:  # 0: no host tier
        found |= {"kv_offloading_size": kv.cpu_gib, "kv_offloading_backend": "native"}
    return found | _offload_arguments(config)


def _offload_arguments(config: EngineConfig) -> dict[str, Any]:
    offload = config.offload
    if offload.backend == "none":
        return {}
    if offload.backend == "uva":
        uva = offload.uva
        return {
            "offload_backend": "uva",
            "cpu_offload_gb": uva.cpu_offload_gb,
            "cpu_offload_params": set(uva.cpu_offload_params),
        }
    ahead = offload.prefetch
    return {
        "offload_backend": "prefetch",
        "offload_group_size": ahead.offload_group_size,
        "offload_num_in_group": ahead.offload_num_in_group,
        "offload_prefetch_step": ahead.offload_prefetch_step,
        "offload_params": set(ahead.offload_params),
    }


def check_arguments(arguments: Collection[str], known: Collection[str], version: str) -> None:
    """Check that the installed vLLM has every argument.

    Raises:
        ConfigError: naming those that it lacks.
    """
    lacking = sorted(set(arguments) - set(known))
    if lacking:
        raise ConfigError(
            f"system=vllm: expected {', '.join(lacking)} among the settings of vLLM {version}, "
            "found none. Install a newer vLLM, or remove what asks for them."
        )
