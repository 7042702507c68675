"""The keywords of LLM: every field of EngineConfig's classes, and three that stand for several."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from engine.asked.config import EngineConfig, ModelConfig
from engine.asked.kv import KVConfig, KVTransferConfig
from engine.asked.offload import OffloadConfig
from engine.errors import ConfigError, did_you_mean
from engine.model.spec import ModelSpec
from engine.sealed import Setting, describe_type, from_plain, settings

COMBINED = {
    "offload_config": "An OffloadConfig or a dict of its fields, in the place of single ones.",
    "kv_transfer_config": "A KVTransferConfig or a dict of its fields, which sizes the host tier "
    "of KV blocks in the place of num_cpu_blocks, cpu_gib and swap_space.",
    "tensor_parallel_size": "1: several GPUs are not available yet.",
}
"""Keywords that are no field of their own."""


def keywords_of(config: type = EngineConfig) -> dict[str, Setting]:
    """Return the keyword of every single setting below a configuration class."""
    found = settings(config, whole=(ModelSpec,))
    return {
        setting.keyword: setting
        for setting in found
        if setting.node is None or setting.node is ModelSpec
    }


def describe_keywords() -> str:
    """Return a line for each keyword: its name, default, type and meaning."""
    lines = []
    for name, setting in sorted(keywords_of().items()):
        default = "" if setting.default is MISSING else f"={setting.default!r}"
        lines.append(f"{name}{default}: {describe_type(setting.hint)}. {setting.help}")
    return "\n".join([*lines, *(f"{name}: {text}" for name, text in COMBINED.items())])


def config_from_keywords(
    model: str | ModelConfig,
    keywords: Mapping[str, Any],
    config: type[EngineConfig] = EngineConfig,
) -> EngineConfig:
    """Return the configuration that the keywords ask for; absent ones keep their defaults.

    `model` is a folder, or a model whose fields keywords replace.

    Raises:
        ConfigError: A keyword is unknown, contradicts another, or is not available yet.
    """
    known = keywords_of(config)
    for name in keywords:
        if name not in known and name not in COMBINED:
            every = sorted([*known, *COMBINED])
            hint = did_you_mean(name, every) or f" Known: {', '.join(every)}."
            raise ConfigError(f"LLM: unknown keyword {name!r}.{hint}")
    size = keywords.get("tensor_parallel_size", 1)
    if size != 1:
        raise ConfigError(
            f"tensor_parallel_size: expected 1 (several GPUs are not available yet), got {size!r}."
        )
    if isinstance(model, ModelConfig):
        found = {item.name: getattr(model, item.name) for item in fields(model)}
    else:
        found = {"name": Path(model).name, "path": str(model)}
    plain: dict[str, Any] = {"model": found}
    for name, value in keywords.items():
        if name in known:
            *nodes, last = known[name].path.split(".")
            into = plain
            for node in nodes:
                into = into.setdefault(node, {})
            into[last] = value
    plain |= _offload(keywords, plain.get("offload", {}), known)
    plain |= _kv(keywords, plain.get("kv", {}))
    asked: EngineConfig = from_plain(config, plain)
    return asked


def _offload(
    keywords: Mapping[str, Any], single: dict[str, Any], known: Mapping[str, Setting]
) -> dict[str, Any]:
    """Return the node `offload` where offload_config gives it."""
    whole = keywords.get("offload_config")
    if whole is None:
        return {}
    if single:
        given = [
            name for name in keywords if name in known and known[name].path.startswith("offload.")
        ]
        raise ConfigError(
            f"offload_config: expected either offload_config or single fields, got both "
            f"({', '.join(given)}). Remove one of them."
        )
    return {"offload": _object("offload_config", whole, OffloadConfig)}


def _kv(keywords: Mapping[str, Any], single: dict[str, Any]) -> dict[str, Any]:
    """Return the node `kv` where kv_transfer_config sizes its host tier."""
    whole = keywords.get("kv_transfer_config")
    if whole is None:
        return {}
    transfer = _object("kv_transfer_config", whole, KVTransferConfig)
    sizes = [f"{name}={single[name]!r}" for name in KVConfig.SIZES if single.get(name)]
    if sizes:
        raise ConfigError(
            f"kv_transfer_config: expected no other size of the host tier beside it, got "
            f"{', '.join(sizes)}. Remove one of them."
        )
    if not single.get("enable_prefix_caching", True):
        raise ConfigError(
            "enable_prefix_caching: expected true with kv_transfer_config, whose connector finds "
            "prefixes in host memory, got False. Remove it, or ask for a host tier with cpu_gib."
        )
    own = {name: value for name, value in single.items() if name == "block_size"}
    block_size: int = from_plain(KVConfig, own, "kv").block_size
    return {"kv": single | {"enable_prefix_caching": True} | transfer.to_kv(block_size)}


def _object(name: str, given: Any, kind: type) -> Any:
    """Return an object of a class, given as one or as a dict of its fields."""
    if isinstance(given, kind):
        return given
    if isinstance(given, dict):
        return from_plain(kind, given, name)
    raise ConfigError(
        f"{name}: expected an object of {kind.__name__} or a dict of its fields, got {given!r}."
    )
