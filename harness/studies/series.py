"""Points that are run one after another for one record: their folder, interrupts, tracker."""

import re
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from catalogue.files import tightfit_home
from harness.config.compose import Point
from harness.config.schema import RunConfig, SweepContext
from harness.folders import plain, write_yaml
from harness.point.streams import interrupt_afterwards
from harness.tracking.base import SweepFacts
from harness.tracking.mlflow import open_tracker
from reports.record.record import RESULT_NAME, RunRecord

RunOne = Callable[[RunConfig, Path, Sequence[str], SweepContext], RunRecord]
"""Runs one point; `harness.point.point.run_point`."""


class Series(ABC):
    """Runs points below a folder of its own and writes one record of them all.

    `kind` begins the id under which a tracker shows the points, of which there are at most
    `total`.
    """

    def __init__(self, point: Point, run_dir: Path, *, kind: str, total: int) -> None:
        self.config, self.overrides, self.run_dir = point.config, point.overrides, run_dir.resolve()
        self._own = {} if point.config_dir is None else {"config_dir": point.config_dir}
        self.started = datetime.now(UTC).astimezone()
        self.by_folder: dict[Path, RunRecord] = {}
        """Records of the points that ran, in order, by their folder below the series' own."""
        self._begin_s = time.monotonic()
        suffix = secrets.token_hex(3)
        self._run_id = f"{self.started:%Y%m%d-%H%M%S}-{suffix}"
        name = re.sub(r"[^\w.-]", "_", self.run_dir.name, flags=re.ASCII)
        self._sweep = SweepContext(
            sweep_id=f"{kind}-{name}-{suffix}",
            folder=self.run_dir,
            index=0,
            total=total,
            began_s=time.time(),
            title=f"{self.config.model.name}: {self.question}",
        )

    @property
    @abstractmethod
    def question(self) -> str:
        """What is asked, in few words."""

    @abstractmethod
    def run_points(self, run_one: RunOne) -> None:
        """Run the points in order through `run_point`."""

    @abstractmethod
    def judge(self, *, is_interrupted: bool) -> RunRecord:
        """Return what the points that ran say; the series adds who asked for what, and when."""

    @abstractmethod
    def lines(self, record: RunRecord) -> list[str]:
        """Return what the user reads at the end."""

    def publish(self) -> list[str]:
        """Make what follows from the record, unless it was interrupted; return warnings."""
        return []

    def run_point(
        self,
        run_one: RunOne,
        point: Point,
        folder: Path,
        *,
        rerun: str,
        label: str,
        shared: Sequence[str],
    ) -> RunRecord:
        """Run one point in a folder below the series' own and note its record.

        Its name begins with `label` and leaves out the `shared` overrides. The record of a point
        that is interrupted is noted too.
        """
        sweep = replace(self._sweep, index=len(self.by_folder), label=label, shared=tuple(shared))
        config = replace(point.config, rerun=rerun)
        path = self.run_dir / folder / RESULT_NAME
        try:
            record = run_one(config, path.parent, point.overrides, sweep)
        except KeyboardInterrupt:
            if path.is_file():
                self.by_folder[folder] = RunRecord.read(path)
            raise
        self.by_folder[folder] = record
        return record

    @property
    def records(self) -> list[RunRecord]:
        """Records of the points that ran, in order."""
        return list(self.by_folder.values())

    def run(self, run_one: RunOne) -> RunRecord:
        """Run all points and return the record, which is also in the folder, after Ctrl-C too."""
        interrupt: KeyboardInterrupt | None = None
        self.run_dir.mkdir(parents=True, exist_ok=True)
        write_yaml(self.run_dir / "config.yaml", self.config.to_dict())
        write_yaml(self.run_dir / "overrides.yaml", self.overrides)
        try:
            self.run_points(run_one)
        except KeyboardInterrupt as error:
            interrupt = error
        with interrupt_afterwards(interrupt):
            record = self._finish(is_interrupted=interrupt is not None)
            sys.stdout.write("\n".join(self.lines(record)) + "\n")
        return record

    def _finish(self, *, is_interrupted: bool) -> RunRecord:
        """Write the record, then what is made from it; their troubles become warnings of it."""
        record = self._complete(self.judge(is_interrupted=is_interrupted))
        path = self.run_dir / RESULT_NAME
        record.write(path)
        warnings = [] if is_interrupted else self.publish()
        tracker = open_tracker(self.config.tracking, tightfit_home())
        tracker.finish_sweep(
            SweepFacts(
                context=self._sweep,
                status={"ok": "ok", "killed": "killed"}.get(record.status, "failed"),
                counts=dict(Counter(found.status for found in self.records)),
                metrics=record.metrics,
                note="\n".join(["```", *self.lines(record), "```"]),
            )
        )
        warnings += tracker.warnings
        if warnings:
            told = [*record.effective["warnings"], *warnings]
            record = replace(record, effective=record.effective | {"warnings": told})
            record.write(path)
        return record

    def _complete(self, found: RunRecord) -> RunRecord:
        return replace(
            found,
            run_id=self._run_id,
            started_at=self.started.isoformat(timespec="seconds"),
            duration_s=time.monotonic() - self._begin_s,
            config=plain(self.config.to_dict()),
            overrides=self.overrides,
            environment=dict(self.records[0].environment) if self.records else {},
            effective={"warnings": [], "notes": []} | self._own | found.effective,
            metrics=plain(found.metrics),
            samples=plain(found.samples),
        )
