"""From the keywords that users know to an EngineConfig."""

import difflib
from pathlib import Path
from typing import Any

from engine.config import (
    EngineConfig,
    EngineSettings,
    GPUConfig,
    KVConfig,
    KVTransferConfig,
    ModelConfig,
    OffloadConfig,
    PrefetchOffloadConfig,
    UVAOffloadConfig,
)
from engine.errors import ConfigError

_ENGINE = (
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "enforce_eager",
    "seed",
    "host_reserve_gib",
)
_KV = ("block_size", "enable_prefix_caching", "swap_space", "disable_sliding_window")
_UVA = ("cpu_offload_gb", "cpu_offload_params")
_PREFETCH = (
    "offload_group_size",
    "offload_num_in_group",
    "offload_prefetch_step",
    "offload_params",
)
_OTHER = (
    "device",
    "gpu_memory_gib",
    "kv_transfer_config",
    "load_format",
    "offload_backend",
    "offload_config",
    "tensor_parallel_size",
)
KEYWORDS = frozenset((*_ENGINE, *_KV, *_UVA, *_PREFETCH, *_OTHER))


def config_from_keywords(model: str, keywords: dict[str, Any]) -> EngineConfig:
    """Return the configuration that the keywords ask for; absent ones keep their defaults.

    Raises:
        ConfigError: A keyword is unknown, contradicts another, or is not available yet.
    """
    for name in keywords:
        if name not in KEYWORDS:
            near = difflib.get_close_matches(name, KEYWORDS, n=1)
            hint = (
                f" Did you mean {near[0]}?" if near else f" Known: {', '.join(sorted(KEYWORDS))}."
            )
            raise ConfigError(f"LLM: unknown keyword {name!r}.{hint}")
    _refuse(keywords)
    return EngineConfig(
        model=ModelConfig(
            name=Path(model).name, path=str(model), load_format=keywords.get("load_format", "auto")
        ),
        gpu=GPUConfig(
            device=keywords.get("device", "auto"), memory_gib=keywords.get("gpu_memory_gib")
        ),
        offload=_offload(keywords),
        kv=KVConfig(**_pick(keywords, _KV)),
        engine=EngineSettings(**_pick(keywords, _ENGINE)),
    )


def _pick(keywords: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: keywords[name] for name in names if name in keywords}


def _refuse(keywords: dict[str, Any]) -> None:
    size = keywords.get("tensor_parallel_size", 1)
    if size != 1:
        raise ConfigError(
            f"tensor_parallel_size: expected 1 (several GPUs are not available yet), got {size!r}."
        )
    transfer = keywords.get("kv_transfer_config")
    if transfer is not None:
        name = (
            transfer.kv_connector
            if isinstance(transfer, KVTransferConfig)
            else dict(transfer).get("kv_connector")
        )
        raise ConfigError(
            f"kv_transfer_config: expected None (KV blocks in host memory are not available yet), "
            f"got kv_connector={name!r}. Remove it."
        )


def _offload(keywords: dict[str, Any]) -> OffloadConfig:
    config = keywords.get("offload_config")
    single = [n for n in ("offload_backend", *_UVA, *_PREFETCH) if n in keywords]
    if config is not None and single:
        raise ConfigError(
            f"offload_config: expected either offload_config or single fields, got both "
            f"({', '.join(single)}). Remove one of them."
        )
    if isinstance(config, OffloadConfig):
        return config
    if config is not None:
        given = dict(config)
        uva, prefetch = given.pop("uva", {}), given.pop("prefetch", {})
        unknown = set(given) - {"offload_backend"}
        if unknown:
            raise ConfigError(
                f"offload_config: expected offload_backend, uva, prefetch, got {sorted(unknown)}."
            )
        return OffloadConfig(
            uva=UVAOffloadConfig(**uva), prefetch=PrefetchOffloadConfig(**prefetch), **given
        )
    return OffloadConfig(
        offload_backend=keywords.get("offload_backend", "auto"),
        uva=UVAOffloadConfig(**_pick(keywords, _UVA)),
        prefetch=PrefetchOffloadConfig(**_pick(keywords, _PREFETCH)),
    )
