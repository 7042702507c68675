"""A comparison, from its two compositions to its record."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from engine.errors import ConfigError
from harness.config.compose import Composer, Plan
from harness.config.engine import require_package
from harness.config.schema import SIDES, AbConfig, RunConfig
from harness.point.show import build_report
from harness.studies.ab_ratios import Step, comparison, is_needed, result_lines, steps
from harness.studies.series import RunOne, Series, Verdict
from reports.record.record import RunRecord

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


RUNS: Final = "runs"
"""Folder of the runs of both sides, below the comparison's own."""


def run_ab(
    config: RunConfig,
    run_dir: Path,
    overrides: Sequence[str],
    *,
    run_one: RunOne,
    config_dir: Path | None = None,
) -> RunRecord:
    """Run both sides in pairs and return the comparison's record, which is also in `run_dir`.

    Args:
        config: with `ab`.
        run_dir: a folder of this comparison's own.
        overrides: as the user wrote them.
        run_one: runs one point; `harness.point.point.run_point`.
        config_dir: a folder of the user's.

    Raises:
        ConfigError: the sides do unlike work, or cannot be composed.
        KeyboardInterrupt: Ctrl-C; the record of what ran until then is written.
    """
    if config.ab is None:
        raise ValueError("run_ab: expected a configuration with ab, got none.")
    sides = compose_sides(config.ab, overrides, config_dir)
    return _Comparison(config, config.ab, run_dir, overrides, sides).run(run_one)


class _Comparison(Series):
    def __init__(
        self,
        config: RunConfig,
        ab: AbConfig,
        run_dir: Path,
        overrides: Sequence[str],
        sides: tuple[Side, Side],
    ) -> None:
        self._steps = list(steps(ab))
        super().__init__(config, run_dir, overrides, kind="ab", total=len(self._steps))
        self._ab, self._sides = ab, {side.name: side for side in sides}
        shared = set(sides[0].overrides) & set(sides[1].overrides)
        self._shared = [item for item in sides[0].overrides if item in shared]
        self._done: list[tuple[Step, RunRecord]] = []
        self._folders: list[str] = []

    def run_points(self, run_one: RunOne) -> None:
        """Run what can still say something, in order."""
        for step in self._steps:
            if not is_needed(step, self._done):
                continue
            folder, side = Path(RUNS, f"{len(self._done):02d}-{step.label}"), self._sides[step.side]
            sys.stderr.write(
                f"ab: run {len(self._done) + 1} of {len(self._steps)} at most: {step.label}\n"
            )
            record = self.run_point(
                run_one,
                replace(side.config, rerun="all"),
                folder,
                side.overrides,
                label=step.label,
                shared=self._shared,
            )
            self._done.append((step, record))
            self._folders.append(str(folder))

    def judge(self, *, is_interrupted: bool) -> Verdict:
        """Return status, ratios and what speaks against them."""
        found = comparison(self._ab, self._done, self._folders, is_interrupted=is_interrupted)
        sides = (" ".join(own) or "as is" for own in (self._ab.a, self._ab.b))
        return Verdict(
            name=f"ab: {' against '.join(sides)}",
            status=found.status,
            error=found.error,
            valid=found.valid,
            reasons=found.reasons,
            notes=found.notes,
            metrics=found.metrics,
            samples={"ab": found.sample},
        )

    def publish(self) -> list[str]:
        """Make the page."""
        return build_report(self.run_dir)

    def lines(self, record: RunRecord) -> list[str]:
        """Return the ratios as lines of text."""
        return result_lines(record, self.run_dir)
