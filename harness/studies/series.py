"""Points that are run one after another for one record: their folder, interrupts, tracker."""

import re
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from catalogue.files import tightfit_home
from harness.config.schema import RunConfig, SweepContext
from harness.folders import plain, write_yaml
from harness.point.streams import interrupt_afterwards
from harness.tracking.base import SweepFacts
from harness.tracking.mlflow import open_tracker
from reports.record.record import RESULT_NAME, RunRecord

RunOne = Callable[[RunConfig, Path, Sequence[str], SweepContext], RunRecord]
"""Runs one point; `harness.point.point.run_point`."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the points say together, as fields of the record."""

    name: str
    status: str
    error: dict[str, Any] | None
    valid: bool | None
    reasons: list[str]
    samples: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    metrics: dict[str, float | None] = field(default_factory=dict)


class Series(ABC):
    """Runs points below a folder of its own and writes one record of them all.

    Args:
        config: what is asked of all.
        run_dir: the folder.
        overrides: as the user wrote them.
        kind: begins the id under which a tracker shows the points.
        total: number of points, at most.
    """

    def __init__(
        self, config: RunConfig, run_dir: Path, overrides: Sequence[str], *, kind: str, total: int
    ) -> None:
        self.config, self.run_dir, self.overrides = config, run_dir.resolve(), list(overrides)
        self.started = datetime.now(UTC).astimezone()
        self.records: list[RunRecord] = []
        """Records of the points that ran, in order."""
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
        )

    @abstractmethod
    def run_points(self, run_one: RunOne) -> None:
        """Run the points in order through `run_point`."""

    @abstractmethod
    def judge(self, *, is_interrupted: bool) -> Verdict:
        """Return what the points that ran say."""

    @abstractmethod
    def lines(self, record: RunRecord) -> list[str]:
        """Return what the user reads at the end."""

    def publish(self) -> list[str]:
        """Make what follows from the record, unless it was interrupted; return warnings."""
        return []

    def run_point(
        self,
        run_one: RunOne,
        config: RunConfig,
        folder: Path,
        overrides: Sequence[str],
        *,
        label: str,
        shared: Sequence[str],
    ) -> RunRecord:
        """Run one point and note its record.

        Args:
            run_one: runs it.
            config: of the point.
            folder: below the series' own.
            overrides: of the point.
            label: what its name begins with.
            shared: overrides that are no part of its name.
        """
        sweep = replace(self._sweep, index=len(self.records), label=label, shared=tuple(shared))
        record = run_one(config, self.run_dir / folder, overrides, sweep)
        self.records.append(record)
        return record

    def run(self, run_one: RunOne) -> RunRecord:
        """Run all points and return the record, which is also in the folder.

        Raises:
            KeyboardInterrupt: Ctrl-C; the record of what ran until then is written.
        """
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
        record = self._record(self.judge(is_interrupted=is_interrupted))
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
            )
        )
        warnings += tracker.warnings
        if warnings:
            told = [*record.effective["warnings"], *warnings]
            record = replace(record, effective=record.effective | {"warnings": told})
            record.write(path)
        return record

    def _record(self, verdict: Verdict) -> RunRecord:
        return RunRecord(
            run_id=self._run_id,
            name=verdict.name,
            status=verdict.status,
            error=verdict.error,
            valid=verdict.valid,
            reasons=verdict.reasons,
            started_at=self.started.isoformat(timespec="seconds"),
            duration_s=time.monotonic() - self._begin_s,
            config=plain(self.config.to_dict()),
            overrides=self.overrides,
            environment=dict(self.records[0].environment) if self.records else {},
            effective={"warnings": [], "notes": verdict.notes},
            metrics=plain(verdict.metrics),
            samples=plain(verdict.samples),
        )
