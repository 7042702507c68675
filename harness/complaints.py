"""Turn what Hydra and OmegaConf raise into one ConfigError that says what to change."""

import re

from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import YAMLError

from engine.sealed import describe_type
from harness.errors import ConfigError, did_you_mean
from harness.keys import GROUPS, key_types, unknown_key
from harness.schema import RunConfig

__all__ = ["explain"]


def _causes(error: BaseException) -> list[BaseException]:
    chain = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def _of_omegaconf(error: OmegaConfBaseException) -> ConfigError:
    key = getattr(error, "full_key", None) or ""
    hint = dict(key_types(RunConfig)).get(key)
    if isinstance(error, ConfigKeyError | ConfigAttributeError) and key and hint is None:
        if key.split(".")[0] == "hydra":
            return ConfigError(f"{key}: Hydra has no such key.")
        return unknown_key(key)
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(f"{key}: expected a value, got none. Set {key}=...")
    text = _first_line(error)
    if isinstance(error, ValidationError) and hint is not None:
        return ConfigError(f"{key}: expected {describe_type(hint)}. {text}.")
    return ConfigError(f"{key}: {text}." if key else f"{text}.")


def _of_missing_option(text: str) -> str | None:
    match = re.search(r"Could not find '([^']+)/([^'/]+)'", text)
    listed = re.search(r"Available options in '[^']+':\n((?:\s+\S+\n?)+)", text)
    if match is None or listed is None:
        return None
    options = listed[1].split()
    hint = did_you_mean(match[2], options)
    return f"{match[1]}: expected one of {', '.join(options)}, got {match[2]!r}.{hint}"


def _of_no_default(text: str) -> str | None:
    """Say what a file's choice of a group should be where the defaults list has none."""
    match = re.search(r"(?:In '([^']+)': )?Could not override '([^']+)'", text)
    if match is None:
        return None
    where = f"{match[1]}: " if match[1] else ""
    group = match[2].removeprefix("/")
    if group not in GROUPS:
        return (
            f"{where}{group}: there is no such group.{did_you_mean(group, GROUPS)} There are: "
            f"{', '.join(GROUPS)}."
        )
    return (
        f"{where}{group}: expected a choice to replace, got none, because conf/config.yaml makes "
        f"none. Write /{group} without override in a defaults list, +{group} in a sweep."
    )


def explain(error: Exception) -> ConfigError:
    """Return one message for an error of composing, without Hydra's own vocabulary.

    Args:
        error: What Hydra, OmegaConf or the YAML reader raised.
    """
    chain = _causes(error)
    for item in chain:
        if isinstance(item, ConfigError):
            return item
    for item in chain:
        if isinstance(item, OmegaConfBaseException):
            return _of_omegaconf(item)
    for item in chain:
        if isinstance(item, YAMLError):
            return ConfigError("YAML: " + " ".join(str(item).split()))
        if isinstance(item, UnicodeDecodeError):
            return ConfigError(
                f"YAML: expected files in UTF-8, got the byte {item.object[item.start]:#x} at "
                f"position {item.start} of one. Save it as UTF-8."
            )
    text = str(error)
    found = _of_missing_option(text) or _of_no_default(text)
    return ConfigError(found or " ".join(text.split()))
