"""Counters of a two-tier KV cache as the engine tells them, flat and as differences."""

from collections.abc import Mapping
from typing import Any

Counts = dict[str, float]
"""Numbers by the path of their keys, such as `moved.loaded_bytes`."""


def counts(stats: Mapping[str, Any]) -> Counts:
    """Return the numbers below `kv` of an engine's stats; none where it tells nothing of KV.

    Args:
        stats: of `LLM.stats()`.
    """
    found: Counts = {}

    def walk(tree: Mapping[str, Any], path: str) -> None:
        for key, value in tree.items():
            if isinstance(value, Mapping):
                walk(value, f"{path}{key}.")
            elif isinstance(value, int | float) and not isinstance(value, bool):
                found[f"{path}{key}"] = value

    walk(stats.get("kv") or {}, "")
    return found


def since(after: Counts, before: Counts) -> Counts:
    """Return by how much each counter rose; what was not there before began at 0."""
    return {name: value - before.get(name, 0) for name, value in after.items()}
