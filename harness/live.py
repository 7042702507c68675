"""The parent's view of a running worker: its state on the display, its samples to the tracker."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from harness.job import SAMPLES_NAME
from harness.measure.resources import ResourceSampler
from harness.plain import read_json
from harness.progress import Display
from harness.tracking.base import GuardedTracker
from reports.record import STATE_NAME

UPLOAD_INTERVAL_S: Final = 5.0


class LiveView:
    """Called twice a second while a worker runs."""

    def __init__(
        self, run_dir: Path, display: Display, tracker: GuardedTracker, sampler: ResourceSampler
    ) -> None:
        self._run_dir = run_dir
        self._display = display
        self._tracker = tracker
        self._sampler = sampler
        self._offset = 0
        self._rows: list[Mapping[str, Any]] = []
        self._due_s = time.monotonic() + UPLOAD_INTERVAL_S

    def tick(self, pid: int) -> None:
        """Look at the worker `pid` once."""
        state = read_json(self._run_dir / STATE_NAME)
        if state:
            self._display.update(state)
        self._rows += self._new_samples()
        resources = self._sampler.sample(pid)
        if resources is not None:
            self._rows.append(resources)
        if time.monotonic() >= self._due_s:
            self.flush()

    def flush(self) -> None:
        """Hand the samples gathered so far to the tracker."""
        self._rows += self._new_samples()
        if self._rows:
            self._tracker.log_samples(self._rows)
        self._rows = []
        self._due_s = time.monotonic() + UPLOAD_INTERVAL_S

    def _new_samples(self) -> list[dict[str, Any]]:
        """Return the whole lines that samples.jsonl has grown by."""
        try:
            with (self._run_dir / SAMPLES_NAME).open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
