"""Check overrides against groups and keys, and bring them into the spelling that Hydra composes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from hydra.conf import HydraConf
from hydra.core.override_parser.types import Override

from catalogue.entry import is_hub_id
from catalogue.models import find
from harness.errors import ConfigError, did_you_mean
from harness.keys import GROUPS, is_free_key, is_known_key, key_types, unknown_key
from harness.launchers import check_launcher
from harness.schema import RunConfig

__all__ = ["APPENDED_GROUPS", "check_overrides", "is_group", "is_hydra", "normalise"]

APPENDED_GROUPS: Final = ("model", "experiment", "study")
"""Groups without an entry in the defaults list of conf/config.yaml: Hydra wants a + for them."""


def is_hydra(override: Override) -> bool:
    """Return whether an override is about Hydra itself (hydra.x=, hydra/x=)."""
    return override.key_or_group.split(".")[0].split("/")[0] == "hydra"


def is_group(override: Override) -> bool:
    """Return whether an override chooses a file of a group."""
    return override.key_or_group in GROUPS


def _values(override: Override) -> list[object]:
    if override.is_sweep_override() and override.is_discrete_sweep():
        return list(override.sweep_iterator())
    value = override.value()
    return list(value) if isinstance(value, list) else [value]


def _check_options(override: Override, options: Sequence[str]) -> None:
    group = override.key_or_group
    listed = ", ".join(options)
    values = _values(override)
    if not values:
        raise ConfigError(
            f"{override.input_line}: no option of {group} matches. There are: {listed}."
        )
    for value in values:
        if value not in options:
            is_elsewhere = group == "model" and "/" in str(value)
            hint = _elsewhere(str(value)) if is_elsewhere else did_you_mean(str(value), options)
            raise ConfigError(f"{group}: expected one of {listed}, got {value!r}.{hint}")


def _elsewhere(value: str) -> str:
    """Return what to write for a folder, or for OWNER/NAME of a model hub."""
    if not is_hub_id(value) or Path(value).exists():
        return f" A folder is +model=local model.path={value}."
    model = find(value)
    if model.spec is not None:
        return f" That is +model={model.name}."
    return (
        f" Another model of the hub: hf download {value} --local-dir FOLDER, then +model=local "
        "model.path=FOLDER."
    )


def _check_switch(override: Override) -> None:
    """Refuse a number for a switch: OmegaConf takes 0 as false and any other integer as true."""
    for value in _values(override):
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise ConfigError(
                f"{override.key_or_group}: expected true or false, got {value!r}. Write one of the "
                "two."
            )


def check_overrides(overrides: Sequence[Override], options: Callable[[str], list[str]]) -> None:
    """Check keys, groups and options of a command line before anything is composed.

    Args:
        overrides: As parsed.
        options: Returns the names of a group's files.

    Raises:
        ConfigError: an unknown key, group or option, or a form that is not supported.
    """
    known = dict(key_types(RunConfig))
    hydra_keys = dict(key_types(HydraConf, "hydra."))
    for override in overrides:
        _check_form(override)
        key = override.key_or_group
        if key == "hydra/launcher":
            check_launcher(override.value())
        elif is_hydra(override):
            _check_hydra_key(key, hydra_keys)
        elif key in GROUPS:
            _check_options(override, options(key))
        elif not is_known_key(key, known):
            raise unknown_key(key)
        elif known.get(key) is bool:
            _check_switch(override)


def _check_form(override: Override) -> None:
    line = override.input_line
    if not override.key_or_group:
        raise ConfigError(f"{line}: expected key=value or group=option.")
    if override.is_sweep_override() and not override.is_discrete_sweep():
        raise ConfigError(f"{line}: expected a list of values or range(start,stop,step).")
    if override.is_delete():
        raise ConfigError(
            f"{line}: keys cannot be removed. Set a value, or choose another option of the group "
            "(offload=none, tracking=none)."
        )
    if override.package is not None:
        raise ConfigError(f"{line}: expected a group without @package. Remove @{override.package}.")


def _check_hydra_key(key: str, known: dict[str, Any]) -> None:
    if key.startswith("hydra.sweeper.params"):
        raise ConfigError(f"{key}: give the values with -m key=a,b, or in an experiment.")
    if "/" not in key and not is_known_key(key, known):
        raise ConfigError(f"{key}: Hydra has no such key.{did_you_mean(key, known)}")


def _spell(override: Override, known: dict[str, Any]) -> str:
    line = override.input_line or ""
    key = override.key_or_group
    value = line.partition("=")[2]
    if is_hydra(override):
        return line
    if key in APPENDED_GROUPS:
        return f"+{key}={value}"
    if key not in GROUPS and is_free_key(key, known):
        return f"++{key}={value}"
    return f"{key}={value}"


def normalise(overrides: Sequence[Override]) -> list[str]:
    """Return the overrides in Hydra's spelling; of one key given twice, the later one.

    Appended groups get a +, other groups and known keys none. They stand first, model before
    experiment, so that an experiment's own values win over the model's file.
    """
    known = dict(key_types(RunConfig))
    latest = {override.key_or_group: _spell(override, known) for override in overrides}
    order = {name: place for place, name in enumerate(APPENDED_GROUPS)}
    return [latest[key] for key in sorted(latest, key=lambda key: order.get(key, len(order)))]
