"""One point as Hydra's launchers run it: in this process, or in one that a launcher started."""

import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from harness.config.compose import Point
from harness.config.schema import RunConfig, SweepContext
from harness.point.describe import point_name
from harness.point.full_disk import full_disk_ends, is_full, require_room
from harness.point.streams import sigterm_as_interrupt
from harness.sweep.begun import BegunPoints
from harness.sweep.launch import ComposedPoints
from reports.record.record import RESULT_NAME, RunRecord


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """What all points of a sweep share."""

    sweep_id: str
    folder: Path
    total: int
    shared: tuple[str, ...]
    """Overrides that all points have."""
    began_s: float
    """Seconds since 1970."""

    def context(self, index: int) -> SweepContext:
        """Return where one point stands."""
        return SweepContext(
            sweep_id=self.sweep_id,
            folder=self.folder,
            index=index,
            total=self.total,
            shared=self.shared,
            began_s=self.began_s,
        )


@dataclass(kw_only=True)
class PointTask:
    """Runs one composed configuration; a point ends with a record whatever happens."""

    points: ComposedPoints
    """All of the command."""
    sweep: SweepPlan | None
    """None: a single point."""
    config_dir: Path | None = None
    """A folder of the user's, for the sides of a comparison."""
    folders: list[Path] = field(default_factory=list)
    """Of the points that began in this process, in order."""
    records: list[RunRecord] = field(default_factory=list)
    """Of the points that ended in this process, in order."""

    def __call__(self, _: DictConfig) -> None:
        """Run the point whose number Hydra's job has.

        Raises:
            DiskFullError: there is no room for its record, or none for what comes after it.
        """
        job = HydraConfig.get()
        with sigterm_as_interrupt(), full_disk_ends():
            require_room(Path(job.runtime.output_dir))
            self._begin(job)
            if self.sweep is not None and int(job.job.num) + 1 < self.sweep.total:
                require_room(self.sweep.folder)  # Hydra writes before the next one is asked

    def _begin(self, job: HydraConf) -> None:
        folder = Path(job.runtime.output_dir)
        self.folders.append(folder)
        if self.sweep is None:
            self.records.append(self._run(self.points[0], folder, None, None))
            return
        index = int(job.job.num)
        point = self.points[index]
        config = point.config
        begun = BegunPoints(self.sweep.folder)
        if begun.is_stopped:
            return
        begun.begin(index, folder)
        config = config if config.rerun else replace(config, rerun="failed")
        reason = self._reason_to_skip(config, begun)
        with begun.ends_with_session():
            point = replace(point, config=config)
            record = self._run(point, folder, self.sweep.context(index), reason)
        self.records.append(record)

    def _reason_to_skip(self, config: RunConfig, begun: BegunPoints) -> str | None:
        """Return why this point does not run, from how the others ended; None where it does."""
        if self.sweep is None:
            return None
        ended = self.records or list(begun.records(self.sweep.total).values())
        failed = [record.name for record in ended if record.status != "ok"]
        if config.fail_fast and failed:
            return f"fail_fast=true, and {failed[0]} is not ok."
        if not config.monotone_stop or not ended:
            return None
        from harness.forecast.skip import certain_not_to_fit  # noqa: PLC0415  not for --cfg and errors

        return certain_not_to_fit(config, ended)

    def _run(
        self,
        point: Point,
        folder: Path,
        sweep: SweepContext | None,
        reason: str | None,
    ) -> RunRecord:
        from harness.point.point import run_point, skip_point  # noqa: PLC0415  not for --cfg and errors

        config, overrides = point.config, point.overrides
        try:
            if reason is not None:
                return skip_point(config, folder, overrides, sweep, reason=reason)
            if config.ab is not None:
                from harness.studies.ab import run_ab  # noqa: PLC0415  likewise

                return run_ab(
                    config, folder, overrides, run_one=run_point, config_dir=self.config_dir
                )
            if config.study is not None:
                from harness.studies.run import run_study  # noqa: PLC0415  likewise

                return run_study(
                    config, folder, overrides, run_one=run_point, config_dir=self.config_dir
                )
            return run_point(config, folder, overrides, sweep)
        except Exception as error:
            if is_full(error):
                raise
            traceback.print_exc()
            facts = {
                "type": type(error).__name__,
                "message": str(error),
                "phase": "harness",
                "traceback": traceback.format_exc(),
            }
            name = point_name(config, overrides, sweep)
            return failure_record(
                config, folder, overrides, status="failed", error=facts, name=name
            )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what ran here: a process that a launcher starts has seen nothing."""
        return {
            "points": self.points,
            "sweep": self.sweep,
            "config_dir": self.config_dir,
            "folders": [],
            "records": [],
        }


def failure_record(
    config: RunConfig,
    folder: Path,
    overrides: list[str],
    *,
    status: str,
    error: dict[str, Any],
    name: str,
) -> RunRecord:
    """Return the record of a point that could not write one, written if there is none yet."""
    record = RunRecord(
        run_id=folder.name,
        name=name,
        status=status,
        error=error,
        config=config.to_dict(),
        overrides=overrides,
    )
    if not (folder / RESULT_NAME).exists():  # never over the record of another point
        folder.mkdir(parents=True, exist_ok=True)
        record.write(folder / RESULT_NAME)
    return record
