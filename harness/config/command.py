"""Overrides as they are typed: their keys, the command that runs them, what they contradict."""

import shlex
from collections.abc import Sequence
from typing import Final

from engine.asked.kv import KVConfig
from engine.errors import ConfigError
from engine.sealed import yaml_text
from harness.config.schema import RunConfig


def key_of(override: str) -> str:
    """Return the key or group that an override sets."""
    return override.partition("=")[0].lstrip("+")


def command_with(
    typed: Sequence[str], settings: Sequence[str], config_dir: str | None = None
) -> str:
    """Return the command that runs `settings`: what was typed, less what they replace."""
    keys = [key_of(text) for text in settings]
    gone = [f"{key}=" for key in keys]
    if any(key.split(".")[0] == "offload" for key in keys):
        gone += ["offload", "planner."]
    if "kv=gpu" in settings:
        gone += [f"kv.{name}=" for name in (*KVConfig.SIZES, "pin_limit_gib")]
    kept = [item for item in typed if not item.lstrip("+").startswith((*gone, "plan."))]
    return command_line([*kept, *settings], config_dir)


def command_line(overrides: Sequence[str], config_dir: str | None = None) -> str:
    """Return the command that runs these overrides, with the user's folder of configurations."""

    def quoted(item: str) -> str:
        if "'" in item and not {*item} & {*'"$`\\!'}:
            return f'"{item}"'
        return shlex.quote(item)

    kept = (quoted(item) for item in overrides if not item.startswith("mode="))
    folder = [] if config_dir is None else ["--config-dir", shlex.quote(config_dir)]
    return " ".join(["tightfit run", *folder, *kept])


NAMED: Final = {
    "offload": ("none", "uva", "prefetch", "experts"),
    "kv": ("gpu",),
    "system": ("native", "accelerate", "vllm", "http", "serve"),
    "tracking": ("mlflow", "none"),
}
"""Options whose name says what a run is. kv=cpu is none: a size of 0 is a point of its sweeps."""


def check_chosen(config: RunConfig, overrides: Sequence[str], *, in_sweep: bool = False) -> None:
    """Raise ConfigError where settings make of an option that was typed what another one is.

    Where no option was typed nothing is contradicted: offload.uva.cpu_offload_gb alone means
    uva, kv.cpu_gib alone a host tier.
    """
    is_now = {
        "offload": config.offload_name,
        "kv": "cpu" if config.kv.has_host_tier else "gpu",
        "system": config.system.kind,
        "tracking": config.tracking.backend,
    }
    if not in_sweep:
        _check_used(config, overrides)
    for item in overrides:
        group, _, name = item.lstrip("+").partition("=")
        if name not in NAMED.get(group, ()) or is_now[group] == name:
            continue
        settings = _settings(config, group, name)
        given = " and ".join(f"{key}={value}" for key, (value, _) in settings.items())
        undone = " ".join(f"{key}={value}" for key, (_, value) in settings.items())
        typed = {key_of(text) for text in overrides}
        is_typed = settings.keys() <= typed
        other = "drop one" if is_typed else f"set {undone}"  # an experiment set it
        if in_sweep and is_typed:
            key, (value, off) = next(reversed(settings.items()))
            other += f", or sweep {key}={off},{value} instead of {group}"
        use = f"{group}={is_now[group]}"
        if is_now[group] == "swap_space":
            use = f"kv.cpu_gib={config.kv.swap_space:g}, which holds KV blocks and no weights"
        raise ConfigError(f"{group}={name} conflicts with {given}. Use {use}, or {other}.")


def _check_used(config: RunConfig, overrides: Sequence[str]) -> None:
    """Raise ConfigError for settings of a backend other than the one that was typed.

    A sweep may hold those of each of its backends.
    """
    name, asked = config.offload_name, config.offload
    is_set = {
        "uva": asked.uva.is_set,
        "prefetch": asked.prefetch.is_set,
        "experts": asked.experts.is_set,
    }
    others = [key for key, given in is_set.items() if given and key != name]
    typed = [item.lstrip("+") for item in overrides]
    unused = [item for item in typed if item.startswith(tuple(f"offload.{key}." for key in others))]
    if unused and f"offload={name}" in typed:
        other = unused[0].split(".")[1]
        raise ConfigError(
            f"offload={name} does not use {' '.join(unused)}. Use offload={other}, or drop one."
        )


def _settings(config: RunConfig, group: str, name: str) -> dict[str, tuple[str, str]]:
    """Return what makes a group what it is: setting -> its value, and the one that undoes it."""
    if group == "system":
        return {"system.kind": (config.system.kind, name)}
    if group == "tracking":
        return {"tracking.backend": (config.tracking.backend, name)}
    if group == "kv":
        return {f"kv.{key}": (f"{size:g}", "0") for key, size in config.kv.sizes.items()}
    if config.planner.choose:
        return {"planner.choose": ("true", "false")}
    asked = config.offload
    if name != "none":
        return {"offload.offload_backend": (asked.offload_backend, name)}
    size, room = asked.prefetch.offload_group_size, asked.uva.cpu_offload_gb
    slots = asked.experts.expert_slots
    found = {
        "offload.offload_backend": (asked.offload_backend, "auto"),
        "offload.prefetch.offload_group_size": (str(size), "0"),
        "offload.uva.cpu_offload_gb": (f"{room:g}", "0"),
        "offload.experts.expert_slots": ("null" if slots is None else str(slots), "null"),
    }
    if config.planner.auto_fields:
        found["planner.auto_fields"] = (yaml_text(list(config.planner.auto_fields)), "[]")
    if config.offload_name == "swap_space":
        found["kv.swap_space"] = (f"{config.kv.swap_space:g}", "0")
    return {key: (value, undone) for key, (value, undone) in found.items() if value != undone}
