"""The two sides of a comparison: composed, and held to the same work."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from harness.ab_config import SIDES, AbConfig
from harness.composition import Composer, Plan
from harness.errors import ConfigError
from harness.schema import RunConfig
from harness.systems.mapping import require_package

SAME_WORK: Final = ("scenario", "model", "tracking")
"""Nodes that both sides must have the same; what answers, and with which memory, may differ."""
HINT: Final = (
    "Sides may differ in system, offload, kv, engine, planner and gpu; put everything else beside "
    "ab.a and ab.b."
)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side, ready to run."""

    name: str
    """a or b."""
    own: list[str]
    """What it overrides."""
    overrides: list[str]
    """Everything that was asked of it."""
    config: RunConfig


def compose_sides(
    ab: AbConfig,
    overrides: Sequence[str],
    config_dir: Path | None = None,
    *,
    mode: str = "run",
) -> tuple[Side, Side]:
    """Compose both sides and check that they do the same work.

    Args:
        ab: what each overrides.
        overrides: of the command line, for both.
        config_dir: a folder of the user's.
        mode: of the command line.

    Raises:
        ConfigError: a side cannot be composed, does other work than the other, or equals it.
    """
    base = [item for item in overrides if not item.lstrip("+").startswith("ab.")]
    a, b = (_compose(name, ab.overrides(name), base, config_dir, mode) for name in SIDES)
    _check_same_work(a.config, b.config)
    if a.config == b.config:
        raise ConfigError(
            "ab: expected two sides that differ, got equal configurations. Change ab.a or ab.b."
        )
    return a, b


def check_comparisons(plan: Plan, config_dir: Path | None = None) -> None:
    """Check the sides of every comparison that a command line asks for, before anything runs.

    Raises:
        ConfigError: a side cannot be composed, does unlike work, or a sweep holds a comparison.
    """
    for point in plan.points:
        if point.config.ab is None:
            continue
        if plan.multirun:
            raise ConfigError(
                "scenario=ab: expected one comparison, got a sweep. Remove -m and values with "
                "commas, or run the comparisons one after another."
            )
        compose_sides(point.config.ab, point.overrides, config_dir, mode=point.config.mode)


def _compose(
    name: str, own: list[str], base: list[str], config_dir: Path | None, mode: str
) -> Side:
    keys = {_key(item) for item in own}
    kept = [item for item in base if _key(item) not in keys]
    try:
        plan = Composer(config_dir).plan([*kept, *own])
        (point,) = plan.points
        if mode == "run":
            require_package(point.config.system.kind)
    except ConfigError as error:
        raise ConfigError(f"ab.{name}: {error}") from error
    if point.config.mode != mode:
        raise ConfigError(f"ab.{name}: expected mode={mode}, got mode={point.config.mode}.")
    config = replace(point.config, ab=None)
    return Side(name=name, own=own, overrides=[*kept, *own], config=config)


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


def _check_same_work(a: RunConfig, b: RunConfig) -> None:
    for node in SAME_WORK:
        ours, theirs = _work(a, node), _work(b, node)
        for key in {**ours, **theirs}:
            one, other = ours.get(key), theirs.get(key)
            if one != other:
                raise ConfigError(
                    f"ab: expected the same {node} on both sides, but {key} is {one!r} in a and "
                    f"{other!r} in b: figures of unlike work say nothing. {HINT}"
                )


def _work(config: RunConfig, node: str) -> dict[str, Any]:
    found = dict(config.to_dict()[node])
    found.pop("fake", None)  # what a scripted engine pretends is no work
    return dict(_leaves(node, found))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield path, value
        return
    for key, item in value.items():
        yield from _leaves(f"{path}.{key}", item)
