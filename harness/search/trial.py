"""One trial: planned, then run as one point of the harness, then judged."""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.composition import Composer
from harness.errors import ConfigError
from harness.full_disk import is_full, require_room
from harness.monotone import planned_shortage
from harness.schema import RunConfig, SweepContext, TrackingConfig
from harness.search.goal import Goal, check_measured
from harness.search.space import beside
from harness.systems.mapping import require_package
from reports.record.record import RESULT_NAME, RunRecord

__all__ = ["Outcome", "TrialRunner"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a trial ended."""

    status: str
    """The point's status; refused: the plan does not fit; invalid: contradicting settings."""
    reason: str | None = None
    """Why the trial failed; None where it has a value."""
    value: float | None = None
    excesses: tuple[float, ...] = ()
    """Over each constraint, at most 0 where it is kept."""
    broken: tuple[str, ...] = ()
    """Constraints that are not kept."""
    folder: Path | None = None
    """Of the run; None where nothing was built."""


class TrialRunner:
    """Runs the trials of one search in its folder."""

    def __init__(self, composer: Composer, base: Sequence[str], goal: Goal) -> None:
        self._composer, self._base, self._goal = composer, list(base), goal
        self.records: list[RunRecord] = []
        self.tracking: TrackingConfig | None = None
        """Where trials are mirrored to; None before the first."""

    def compose(self, overrides: Sequence[str]) -> tuple[RunConfig, list[str]]:
        """Return the configuration of a trial and its overrides in Hydra's spelling.

        Raises:
            ConfigError: settings that contradict each other, a sweep, or a package that is absent.
        """
        plan = self._composer.plan([*beside(self._base, overrides), *overrides])
        if plan.multirun:
            raise ConfigError(
                "search: the experiment sweeps by itself. Add hydra.mode=RUN, and give the values "
                "to search on the command line."
            )
        config = plan.points[0].config
        require_package(config.system.kind)
        return config, plan.overrides

    def run(self, overrides: Sequence[str], sweep: SweepContext) -> Outcome:
        """Run a trial; see Outcome.

        Raises:
            KeyboardInterrupt: Ctrl-C; the point has its record.
        """
        try:
            config, spelled = self.compose(overrides)
        except ConfigError as error:
            return Outcome(status="invalid", reason=str(error))
        shortage = planned_shortage(config)
        if shortage is not None:
            return Outcome(status="refused", reason=f"the plan does not fit: {shortage}")
        from harness.point import run_point  # noqa: PLC0415  not for requests that are wrong

        folder = sweep.folder / str(sweep.index)
        self.tracking = config.tracking
        require_room(sweep.folder)
        try:
            record = run_point(replace(config, rerun="failed"), folder, spelled, sweep)
        except KeyboardInterrupt:
            if (folder / RESULT_NAME).is_file():
                self.records.append(RunRecord.read(folder / RESULT_NAME))
            raise
        except Exception as error:
            if is_full(error):
                raise
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
            return Outcome(status="failed", reason=reason, folder=folder)
        self.records.append(record)
        return judge(record, self._goal, folder)

    def check_goal(self, overrides: Sequence[str]) -> None:
        """Check that the scenario of a trial measures what the goal is about.

        Raises:
            ConfigError: it does not.
        """
        config, _ = self.compose(overrides)
        check_measured(self._goal, config.scenario)


def judge(record: RunRecord, goal: Goal, folder: Path) -> Outcome:
    """Return what a record says of a goal."""
    missing = goal.missing(record.metrics)
    reason = None
    if record.status != "ok":
        reason = f"{record.status}: {(record.error or {}).get('message')}"
    elif record.valid is False:
        reason = f"not valid: {'; '.join(record.reasons)}"
    elif missing:
        reason = (
            f"no value of {', '.join(missing)}: it was not measured, or its statistic needs more "
            "requests."
        )
    if reason is not None:
        return Outcome(status=record.status, reason=reason, folder=folder)
    return Outcome(
        status=record.status,
        value=float(record.metrics[goal.metric] or 0.0),
        excesses=tuple(goal.excesses(record.metrics)),
        broken=tuple(goal.broken(record.metrics)),
        folder=folder,
    )
