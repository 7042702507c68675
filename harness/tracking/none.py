"""No tracking: the run folder is all there is."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.schema import SweepContext
from harness.tracking.base import PointFacts, SweepFacts
from reports.record.record import RunRecord


class NoTracker:
    """A tracker that does nothing."""

    def open(self) -> None:
        """Do nothing."""

    def start_sweep(self, sweep: SweepContext) -> None:
        """Do nothing."""

    def start_point(self, point: PointFacts) -> None:
        """Do nothing."""

    def log_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing."""

    def finish_point(self, record: RunRecord, run_dir: Path) -> None:
        """Do nothing."""

    def finish_sweep(self, sweep: SweepFacts) -> None:
        """Do nothing."""

    def view_command(self) -> str | None:
        """Return None: there is nothing to view."""
        return None
