"""The keys of RunConfig: their dotted paths and types, and messages about wrong ones."""

import typing
from collections.abc import Iterator
from typing import Any, Final

from engine.sealed import key_types, without_null
from harness.errors import ConfigError, closest
from harness.schema import RunConfig

__all__ = [
    "GROUPS",
    "check_known_keys",
    "is_known_key",
    "key_types",
    "unknown_key",
]

GROUPS: Final = (
    "model",
    "system",
    "gpu",
    "offload",
    "kv",
    "scenario",
    "tracking",
    "experiment",
    "study",
)
"""Groups of files in conf/; each but experiment and study fills the node of its name."""


def is_known_key(path: str, known: dict[str, Any]) -> bool:
    """Return whether a dotted path is a field, or lies in a free mapping such as rope_scaling."""
    return path in known or is_free_key(path, known)


def is_free_key(path: str, known: dict[str, Any]) -> bool:
    """Return whether a dotted path is a free mapping, or lies in one."""
    parts = path.split(".")
    above = (known.get(".".join(parts[:count])) for count in range(1, len(parts) + 1))
    return any(hint is Any or typing.get_origin(without_null(hint)) is dict for hint in above)


def unknown_key(path: str) -> ConfigError:
    """Return the error for a key that RunConfig does not have, with the closest one that it has."""
    if path == "experiment":  # is a group, and a key where a file lacks its first line
        return ConfigError(
            "experiment: expected a file that begins with the line # @package _global_, got one "
            "without it, whose settings would have no effect. Add the line."
        )
    known = [name for name, _ in key_types(RunConfig)]
    parent, _, last = path.rpartition(".")
    siblings = {name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == parent}
    # Of keys with the same last part the one nearest to the root, and in the same node if any.
    same = [name for name in known if name.rpartition(".")[2] == last]
    same.sort(key=lambda name: (not name.startswith(f"{parent}."), name.count(".")))
    if parent and siblings:
        inside = [name for name in same if name.startswith(f"{parent}.")]
        found = inside or closest(last, siblings)
        listed = f"Keys of {parent}: {', '.join(sorted(siblings))}."
        return ConfigError(f"{path}: there is no such key.{_hint(found)} {listed}")
    roots = list(dict.fromkeys([*GROUPS, *(name for name in known if "." not in name)]))
    ends = [name for name in known if name.endswith(f".{path}")]
    found = ends or closest(path, known) or same if parent else same or closest(path, roots)
    if not found and not parent:
        leaf = closest(path, (name.rpartition(".")[2] for name in known))
        found = [name for name in known if leaf and name.rpartition(".")[2] == leaf[0]]
    listed = f"There are: {', '.join(roots)}."
    return ConfigError(f"{path}: there is no such key or group.{_hint(found)} {listed}")


def _hint(found: list[str]) -> str:
    return f" Did you mean {found[0]}?" if found else ""


def check_known_keys(content: dict[str, Any]) -> None:
    """Check that a composed configuration (plain data) has only keys of RunConfig.

    OmegaConf lets `+key=value` pass a schema, hence this check.

    Raises:
        ConfigError: naming the first unknown key and the closest known one.
    """
    known = dict(key_types(RunConfig))
    for path in _paths(content):
        if not is_known_key(path, known):
            raise unknown_key(path)


def _paths(content: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in content.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{key}.")
