"""The parent's view of a running worker: its state on the display, its samples to the tracker."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from harness.capacity import capacity_lines
from harness.job import SAMPLES_NAME
from harness.plain import read_json
from harness.progress import Display
from harness.telemetry.spool import LineTail, one_a_second
from harness.tracking.base import GuardedTracker
from reports.record.record import STATE_NAME
from reports.record.telemetry import SPOOL_NAME

UPLOAD_INTERVAL_S: Final = 5.0


class LiveView:
    """Called twice a second while a worker runs."""

    def __init__(self, run_dir: Path, display: Display, tracker: GuardedTracker) -> None:
        self._run_dir = run_dir
        self._display = display
        self._tracker = tracker
        self._samples = LineTail(run_dir / SAMPLES_NAME)
        self._telemetry = LineTail(run_dir / SPOOL_NAME)
        self._telemetry_s = 0.0
        self._latest: Mapping[str, Any] = {}
        """The newest row of telemetry."""
        self._has_capacity = False
        self._rows: list[Mapping[str, Any]] = []
        self._due_s = time.monotonic() + UPLOAD_INTERVAL_S

    def tick(self) -> None:
        """Look at the worker once."""
        self._gather()
        state = read_json(self._run_dir / STATE_NAME)
        if state:
            self._show_capacity(state.get("kv"))
            self._display.update({**state, "now": self._latest})
        if time.monotonic() >= self._due_s:
            self.flush()

    def flush(self) -> None:
        """Hand the samples gathered so far to the tracker."""
        self._gather()
        if self._rows:
            self._tracker.log_samples(self._rows)
        self._rows = []
        self._due_s = time.monotonic() + UPLOAD_INTERVAL_S

    def _show_capacity(self, kv: Mapping[str, Any] | None) -> None:
        """Show what the KV cache holds once an engine has started."""
        if self._has_capacity or not kv or "longest_tokens" not in kv:
            return
        self._has_capacity = True
        for line in capacity_lines(kv):
            self._display.say(line)

    def _gather(self) -> None:
        """Take over what both files have grown by; of the telemetry one row a second."""
        self._rows += self._samples.rows()
        grown = list(self._telemetry.rows())
        self._latest = grown[-1] if grown else self._latest
        kept = one_a_second(grown, self._telemetry_s)
        if kept:
            self._telemetry_s = kept[-1]["time"]
        self._rows += kept
