"""From the keywords that users know to an EngineConfig."""

import difflib
from dataclasses import fields
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
    PlannerConfig,
    PrefetchOffloadConfig,
    UVAOffloadConfig,
)
from engine.errors import ConfigError
from engine.sealed import Sealed

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
_KV = (
    "block_size",
    "cpu_gib",
    "disable_sliding_window",
    "enable_prefix_caching",
    "num_cpu_blocks",
    "pin_limit_gib",
    "swap_space",
)
_KV_SIZES = ("num_cpu_blocks", "cpu_gib", "swap_space")
_UVA = ("cpu_offload_gb", "cpu_offload_params")
_PREFETCH = (
    "offload_group_size",
    "offload_num_in_group",
    "offload_prefetch_step",
    "offload_params",
)
_PLANNER = ("choose", "objective", "kv_tokens", "auto_fields", "referee")
_OTHER = (
    "device",
    "gpu_memory_gib",
    "kv_transfer_config",
    "load_format",
    "offload_backend",
    "offload_config",
    "tensor_parallel_size",
)
KEYWORDS = frozenset((*_ENGINE, *_KV, *_UVA, *_PREFETCH, *_PLANNER, *_OTHER))


def config_from_keywords(model: str | ModelConfig, keywords: dict[str, Any]) -> EngineConfig:
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
    if not isinstance(model, ModelConfig):
        load_format = keywords.get("load_format", "auto")
        model = ModelConfig(name=Path(model).name, path=str(model), load_format=load_format)
    elif keywords.get("load_format", model.load_format) != model.load_format:
        raise ConfigError(
            f"load_format: expected {model.load_format}, as the ModelConfig says, got "
            f"{keywords['load_format']!r}. Remove it."
        )
    return EngineConfig(
        model=model,
        gpu=GPUConfig(
            device=keywords.get("device", "auto"), memory_gib=keywords.get("gpu_memory_gib")
        ),
        offload=_offload(keywords),
        kv=_kv(keywords),
        engine=EngineSettings(**_pick(keywords, _ENGINE)),
        planner=PlannerConfig(**_pick(keywords, _PLANNER)),
    )


def _pick(keywords: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: keywords[name] for name in names if name in keywords}


def _refuse(keywords: dict[str, Any]) -> None:
    size = keywords.get("tensor_parallel_size", 1)
    if size != 1:
        raise ConfigError(
            f"tensor_parallel_size: expected 1 (several GPUs are not available yet), got {size!r}."
        )


def _kv(keywords: dict[str, Any]) -> KVConfig:
    fields_given = _pick(keywords, _KV)
    transfer = keywords.get("kv_transfer_config")
    if transfer is None:
        return KVConfig(**fields_given)
    if isinstance(transfer, dict):
        _check_fields("kv_transfer_config", transfer, KVTransferConfig)
        transfer = KVTransferConfig(**transfer)
    if not isinstance(transfer, KVTransferConfig):
        raise ConfigError(
            f"kv_transfer_config: expected a KVTransferConfig or a dict of its fields, got "
            f"{transfer!r}."
        )
    sizes = [name for name in _KV_SIZES if fields_given.get(name) is not None]
    sizes = [name for name in sizes if fields_given[name] != 0]
    if sizes:
        raise ConfigError(
            f"kv_transfer_config: expected no other size of the host tier beside it, got "
            f"{', '.join(f'{name}={fields_given[name]!r}' for name in sizes)}. Remove one of them."
        )
    if not fields_given.setdefault("enable_prefix_caching", True):
        raise ConfigError(
            "enable_prefix_caching: expected true with kv_transfer_config, whose connector finds "
            "prefixes in host memory, got False. Remove it, or ask for a host tier with cpu_gib."
        )
    block_size = KVConfig(**_pick(fields_given, ("block_size",))).block_size
    return KVConfig(**(fields_given | transfer.to_kv(block_size)))


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
        if not isinstance(config, dict):
            raise ConfigError(
                f"offload_config: expected an OffloadConfig or a dict of its fields, got "
                f"{config!r}."
            )
        _check_fields("offload_config", config, OffloadConfig)
        given = dict(config)
        for name, kind in (("uva", UVAOffloadConfig), ("prefetch", PrefetchOffloadConfig)):
            node = given.get(name, {})
            if isinstance(node, dict):
                _check_fields(f"offload_config.{name}", node, kind)
                given[name] = kind(**node)
            elif not isinstance(node, kind):
                raise ConfigError(f"offload_config.{name}: expected a dict, got {node!r}.")
        return OffloadConfig(**given)
    return OffloadConfig(
        offload_backend=keywords.get("offload_backend", "auto"),
        uva=UVAOffloadConfig(**_pick(keywords, _UVA)),
        prefetch=PrefetchOffloadConfig(**_pick(keywords, _PREFETCH)),
    )


def _check_fields(name: str, given: dict[str, Any], kind: type[Sealed]) -> None:
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(f"{name}: expected {', '.join(known)}, got {', '.join(unknown)}.")
