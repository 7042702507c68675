"""Options chosen by name, held against the settings beside them."""

from collections.abc import Sequence
from typing import Final

from harness.errors import ConfigError
from harness.schema import RunConfig

__all__ = ["check_chosen"]

NAMED: Final = {
    "offload": ("none", "uva", "prefetch"),
    "kv": ("gpu",),
    "system": ("native", "accelerate", "vllm", "http"),
    "tracking": ("mlflow", "none"),
}
"""Options whose name says what a run is. kv=cpu is none: a size of 0 is a point of its sweeps."""


def check_chosen(config: RunConfig, overrides: Sequence[str]) -> None:
    """Check that a point is what the options typed for it say.

    Where no option was typed nothing is contradicted: offload.uva.cpu_offload_gb alone means uva,
    kv.cpu_gib alone a host tier.

    Args:
        config: the point as composed.
        overrides: of the point, in Hydra's spelling.

    Raises:
        ConfigError: settings make of an option what another one is.
    """
    is_now = {
        "offload": config.offload_name,
        "kv": "cpu" if config.kv.has_host_tier else "gpu",
        "system": config.system.kind,
        "tracking": config.tracking.backend,
    }
    for item in overrides:
        group, _, name = item.lstrip("+").partition("=")
        if name not in NAMED.get(group, ()) or is_now[group] == name:
            continue
        settings = _settings(config, group, name)
        given = " and ".join(f"{key}={value}" for key, (value, _) in settings.items())
        undone = " ".join(f"{key}={value}" for key, (_, value) in settings.items())
        key, (value, other) = next(reversed(settings.items()))
        raise ConfigError(
            f"{group}={name}: expected settings that leave it what it is, got {given}, which is "
            f"{group}={is_now[group]}. Choose {group}={is_now[group]}, or remove {group}={name} "
            f"(in a sweep: {key}={other},{value}), or set {undone}."
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
    found = {
        "offload.offload_backend": (asked.offload_backend, "auto"),
        "offload.prefetch.offload_group_size": (str(size), "0"),
        "offload.uva.cpu_offload_gb": (f"{room:g}", "0"),
    }
    return {key: (value, undone) for key, (value, undone) in found.items() if value != undone}
