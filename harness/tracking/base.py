"""What a tracker is, and the guard that keeps its troubles away from the run."""

import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from harness.config.schema import SweepContext
from reports.record.record import RunRecord

CALL_TIMEOUT_S: Final = 60.0
OPEN_TIMEOUT_S: Final = 300.0
"""The first start of eight processes creates the database, one after the other."""
_Call = tuple[str, Callable[[], None], threading.Event]
"""Name, what is called, and what is set when it returned."""


@dataclass(frozen=True, kw_only=True)
class PointFacts:
    """A point as a tracker shows it from its start on."""

    run_id: str
    name: str
    params: dict[str, Any]
    """Flat; what was chosen."""
    tags: dict[str, str]
    sweep: SweepContext | None = None


@dataclass(frozen=True, kw_only=True)
class SweepFacts:
    """How a sweep ended."""

    context: SweepContext
    status: str
    """ok: every point says what it costs, or that it does not fit; failed: some failed; killed:
    interrupted."""
    counts: dict[str, int] = field(default_factory=dict)
    """Status -> number of points."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Figures of the points together."""
    note: str = ""
    """Description in Markdown: a table, the best point, how to read it."""


class Tracker:
    """Mirrors points; this one nowhere. Calls come in order, from one thread, and may raise."""

    def open(self) -> None:
        """Get ready; the first call."""

    def start_sweep(self, sweep: SweepContext) -> None:
        """Show the sweep as running; without it its first point does so."""

    def start_point(self, point: PointFacts) -> None:
        """Show the point as running."""

    def log_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show live samples; each row has `time` (seconds since 1970)."""

    def finish_point(self, record: RunRecord, run_dir: Path) -> None:
        """Show the point as ended, with its figures and files."""

    def take_over_point(self, point: PointFacts, record: RunRecord, run_dir: Path) -> None:
        """Show a point that ran before as one of its sweep too; where it is not shown, show it."""
        self.start_point(point)
        self.finish_point(record, run_dir)

    def finish_sweep(self, sweep: SweepFacts) -> None:
        """Show the sweep as ended."""

    def view_command(self, sweep_id: str | None = None) -> str | None:
        """Return the command that shows the runs, or those of a sweep; None without any."""
        del sweep_id
        return None

    def experiment_id(self) -> str | None:
        """Return the number under which the tracker keeps the runs; None without one."""
        return None


class GuardedTracker:
    """Runs a tracker in a thread of its own; what fails or hangs becomes a warning.

    After a call that hung, no further call is made. The thread ends with this object.
    """

    def __init__(self, tracker: Tracker, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._tracker = tracker
        self._timeout_s = timeout_s
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._is_stuck = False
        self._is_broken = threading.Event()
        self.warnings: list[str] = []
        work = (self._calls, self.warnings, self._is_broken)
        threading.Thread(target=_work, args=work, name="tracking", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)
        self._call("open", tracker.open, wait_s=OPEN_TIMEOUT_S)

    def start_sweep(self, sweep: SweepContext) -> None:
        """See Tracker."""
        self._call("start_sweep", lambda: self._tracker.start_sweep(sweep))

    def start_point(self, point: PointFacts) -> None:
        """See Tracker."""
        self._call("start_point", lambda: self._tracker.start_point(point))

    def log_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """See Tracker; does not wait."""
        self._call("log_samples", lambda: self._tracker.log_samples(rows), wait_s=0)

    def settle(self) -> None:
        """Return when the samples handed over so far are logged, or what they met is a warning."""
        self._call("log_samples", lambda: None)

    def finish_point(self, record: RunRecord, run_dir: Path) -> None:
        """See Tracker."""
        self._call("finish_point", lambda: self._tracker.finish_point(record, run_dir))

    def take_over_point(self, point: PointFacts, record: RunRecord, run_dir: Path) -> None:
        """See Tracker."""
        self._call("take_over_point", lambda: self._tracker.take_over_point(point, record, run_dir))

    def finish_sweep(self, sweep: SweepFacts) -> None:
        """See Tracker."""
        self._call("finish_sweep", lambda: self._tracker.finish_sweep(sweep))

    def view_command(self, sweep_id: str | None = None) -> str | None:
        """See Tracker; None when the tracker does not work."""
        is_usable = not (self._is_broken.is_set() or self._is_stuck)
        return self._tracker.view_command(sweep_id) if is_usable else None

    def experiment_id(self) -> str | None:
        """See Tracker; None where it could not be opened."""
        return None if self._is_broken.is_set() else self._tracker.experiment_id()

    def _call(self, name: str, call: Callable[[], None], *, wait_s: float | None = None) -> None:
        if self._is_stuck or self._is_broken.is_set():
            return
        limit_s = self._timeout_s if wait_s is None else wait_s
        done = threading.Event()
        self._calls.put((name, call, done))
        if limit_s and not done.wait(limit_s):
            self._is_stuck = True
            self.warnings.append(
                f"tracking: {name} took longer than {limit_s:g} s and was given up. The "
                "files in the run's folder are complete; choose tracking=none if this repeats."
            )


def _work(
    calls: "queue.SimpleQueue[_Call | None]", warnings: list[str], is_broken: threading.Event
) -> None:
    """Make calls in order until None comes."""
    while (item := calls.get()) is not None:
        _make(item, warnings, is_broken)
        del item  # the call holds the tracker, with which this thread is to end


def _make(item: _Call, warnings: list[str], is_broken: threading.Event) -> None:
    name, call, done = item
    try:
        call()
    except Exception as error:  # noqa: BLE001  the edge: tracking never costs a run
        if name == "open":
            is_broken.set()
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        warnings.append(
            f"tracking: {name} failed: {reason}. The files in the run's folder are complete; "
            "choose tracking=none if this repeats."
        )
    finally:
        done.set()
