"""A comparison, from its two compositions to its record."""

import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from catalogue.files import tightfit_home
from engine.errors import ConfigError
from harness.config.compose import Composer, Plan
from harness.config.peers import require_package
from harness.config.schema import SIDES, AbConfig, RunConfig, SweepContext
from harness.folders import plain, write_yaml
from harness.point.show import build_report
from harness.point.streams import interrupt_afterwards
from harness.studies.ab_ratios import Step, comparison, is_needed, result_lines, steps
from harness.tracking.base import SweepFacts
from harness.tracking.mlflow import open_tracker
from reports.record.record import RESULT_NAME, RunRecord

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
RunOne = Callable[[RunConfig, Path, Sequence[str], SweepContext], RunRecord]


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
    return _Comparison(config, config.ab, run_dir.resolve(), list(overrides), sides).run(run_one)


class _Comparison:
    def __init__(
        self,
        config: RunConfig,
        ab: AbConfig,
        run_dir: Path,
        overrides: list[str],
        sides: tuple[Side, Side],
    ) -> None:
        self._config, self._ab, self._run_dir = config, ab, run_dir
        self._overrides, self._sides = overrides, {side.name: side for side in sides}
        self._started = datetime.now(UTC).astimezone()
        self._begin_s = time.monotonic()
        suffix = secrets.token_hex(3)
        self._run_id = f"{self._started:%Y%m%d-%H%M%S}-{suffix}"
        name = re.sub(r"[^\w.-]", "_", run_dir.name, flags=re.ASCII)
        shared = set(sides[0].overrides) & set(sides[1].overrides)
        self._sweep = SweepContext(
            sweep_id=f"ab-{name}-{suffix}",
            folder=run_dir,
            index=0,
            total=len(list(steps(ab))),
            shared=tuple(item for item in sides[0].overrides if item in shared),
        )
        self._done: list[tuple[Step, RunRecord]] = []
        self._folders: list[str] = []

    def run(self, run_one: RunOne) -> RunRecord:
        """Run what can still say something, in order; see run_ab."""
        interrupt: KeyboardInterrupt | None = None
        self._run_dir.mkdir(parents=True, exist_ok=True)
        write_yaml(self._run_dir / "config.yaml", self._config.to_dict())
        write_yaml(self._run_dir / "overrides.yaml", self._overrides)
        try:
            for step in steps(self._ab):
                if is_needed(step, self._done):
                    self._run_step(step, run_one)
        except KeyboardInterrupt as error:
            interrupt = error
        with interrupt_afterwards(interrupt):
            record = self._finish(is_interrupted=interrupt is not None)
            sys.stdout.write("\n".join(result_lines(record, self._run_dir)) + "\n")
        return record

    def _run_step(self, step: Step, run_one: RunOne) -> None:
        number = len(self._done)
        folder = Path(RUNS, f"{number:02d}-{step.label}")
        side = self._sides[step.side]
        sys.stderr.write(f"ab: run {number + 1} of {self._sweep.total} at most: {step.label}\n")
        record = run_one(
            replace(side.config, rerun="all"),
            self._run_dir / folder,
            side.overrides,
            replace(self._sweep, index=number, label=step.label),
        )
        self._done.append((step, record))
        self._folders.append(str(folder))

    def _finish(self, *, is_interrupted: bool) -> RunRecord:
        """Write the record, then what is made from it; their troubles become warnings of it."""
        record = self._record(is_interrupted=is_interrupted)
        path = self._run_dir / RESULT_NAME
        record.write(path)
        warnings = [] if is_interrupted else build_report(self._run_dir)
        tracker = open_tracker(self._config.tracking, tightfit_home())
        tracker.finish_sweep(
            SweepFacts(
                context=self._sweep,
                status={"ok": "ok", "killed": "killed"}.get(record.status, "failed"),
                counts=dict(Counter(found.status for _, found in self._done)),
                metrics=record.metrics,
            )
        )
        warnings += tracker.warnings
        if warnings:
            told = [*record.effective["warnings"], *warnings]
            record = replace(record, effective=record.effective | {"warnings": told})
            record.write(path)
        return record

    def _record(self, *, is_interrupted: bool) -> RunRecord:
        found = comparison(self._ab, self._done, self._folders, is_interrupted=is_interrupted)
        first = self._done[0][1] if self._done else None
        environment: dict[str, Any] = dict(first.environment) if first is not None else {}
        return RunRecord(
            run_id=self._run_id,
            name=f"ab: {' '.join(self._ab.a) or 'as is'} against {' '.join(self._ab.b) or 'as is'}",
            status=found.status,
            error=found.error,
            valid=found.valid,
            reasons=found.reasons,
            started_at=self._started.isoformat(timespec="seconds"),
            duration_s=time.monotonic() - self._begin_s,
            config=plain(self._config.to_dict()),
            overrides=self._overrides,
            environment=environment,
            effective={"warnings": [], "notes": found.notes},
            metrics=plain(found.metrics),
            samples={"ab": plain(found.sample)},
        )
