"""What a run does now, on the terminal: a bar where there is one, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

from catalogue.files import read_json
from engine.sealed import GIB
from harness.config.schema import SweepContext
from harness.observe.spool import LineTail, one_a_second
from harness.point.process import SAMPLES_NAME
from harness.point.show import capacity_lines, point_title
from harness.tracking.base import GuardedTracker
from reports.record.record import STATE_NAME
from reports.record.rows import TELEMETRY_SPOOL

LINE_INTERVAL_S: Final = 10.0
"""Seconds between plain lines of one phase."""
LEAST_SEEN_S: Final = 2.0
"""Seconds of a phase before its time left is told."""
LEAST_SHARE: Final = 0.02
"""Progress before it is told."""


def describe(state: Mapping[str, Any]) -> tuple[str, float | None, str]:
    """Return a state as a title, the share that is done (None: unknown) and details."""
    phase = str(state.get("phase", ""))
    job = str(state.get("job", ""))
    phase = "load" if phase == "load:load" else phase.replace("load:", "load: ")
    title = phase if job == "measure" else f"{job}: {phase}"
    progress = state.get("progress")
    if not isinstance(progress, Mapping):
        return title, None, ""
    if "total_bytes" in progress:
        done, total = progress["done_bytes"], progress["total_bytes"]
        if not total:  # of a peer, which does not say how much it is
            return title, None, ""
        return title, done / total, f"{done / GIB:.2f}/{total / GIB:.2f} GiB"
    done, total = progress["requests_done"], progress["requests_total"]
    details = f"{done}/{total} requests, {progress['output_tokens']} tokens"
    if progress.get("tokens_s") is not None:
        details += f", {progress['tokens_s']:.1f} tokens/s"
    if progress.get("expert_hit_share") is not None:
        details += f", {progress['expert_hit_share']:.0%} of experts found on the GPU"
    tokens = progress.get("output_tokens_total")
    # Of requests that run together none may end before all do.
    share = progress["output_tokens"] / tokens if tokens else done / total if total else None
    return title, share, details


def memory_text(state: Mapping[str, Any]) -> str:
    """Return GPU memory against the budget and host memory, as the newest telemetry has them."""
    now = state.get("now") or {}
    parts = []
    used, budget = now.get("gpu_used_bytes"), state.get("gpu_budget_bytes")
    if used is not None:
        bound = f"/{budget / GIB:.1f}" if budget else ""
        parts.append(f"GPU {used / GIB:.1f}{bound} GiB")
    held, free = now.get("rss_bytes"), now.get("host_available_bytes")
    if held is not None:
        rest = f" ({free / GIB:.0f} free)" if free is not None else ""
        parts.append(f"host {held / GIB:.1f} GiB{rest}")
    return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class SweepTitle:
    """Which point of a sweep runs, and how long the sweep will take."""

    text: str
    """Number of the point and what varies."""
    left_s: float | None
    """Seconds that the sweep would take from the point's beginning; None: not known."""
    began_s: float
    """When the point began, time.monotonic()."""

    def words(self) -> str:
        """Return it as a line, as of now."""
        if self.left_s is None:
            return self.text
        left_s = self.left_s - (time.monotonic() - self.began_s)
        return f"{self.text}, sweep {f'about {_span(left_s)} left' if left_s > 0 else 'ends soon'}"


def display_title(sweep: SweepContext | None, name: str) -> SweepTitle | None:
    """Return what the display says of the sweep; None for a point by itself."""
    if sweep is None:
        return None
    left_s = None if sweep.point_s is None else sweep.point_s * (sweep.total - sweep.index)
    return SweepTitle(text=point_title(sweep, name), left_s=left_s, began_s=time.monotonic())


class _Since:
    """How far a figure of a phase has come since it was first seen."""

    def __init__(self) -> None:
        self._first: tuple[str, float, float] | None = None

    def grown(self, phase: str, value: float | None, now_s: float) -> tuple[float, float]:
        """Return by how much it grew in how many seconds; 0 in 0 while it is new or not known."""
        if value is None:
            self._first = None
            return 0.0, 0.0
        if self._first is None or self._first[0] != phase or value < self._first[1]:
            self._first = (phase, value, now_s)
        return value - self._first[1], now_s - self._first[2]


def _span(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


class _Words:
    """What is said beside the title of a phase."""

    def __init__(self) -> None:
        self._bytes, self._share = _Since(), _Since()

    def of(self, state: Mapping[str, Any]) -> tuple[str, float | None, str, str]:
        """Return a state as a title, the share that is done (None: unknown), time left, details."""
        title, share, details = describe(state)
        now_s, progress = float(state.get("updated_at", 0.0)), state.get("progress")
        done = progress.get("done_bytes") if isinstance(progress, Mapping) else None
        phase = f"{state.get('job')}/{state.get('phase')}"
        grown, took_s = self._bytes.grown(phase, done, now_s)
        if took_s > 0:
            details += f", {grown / took_s / 1e9:.2f} GB/s"
        grown, took_s, left = *self._share.grown(title, share, now_s), ""
        if share is not None and share < 1 and took_s >= LEAST_SEEN_S and grown >= LEAST_SHARE:
            left = f"{_span(took_s * (1 - share) / grown)} left"
        parts = (details, memory_text(state))
        return title, share, left, ", ".join(part for part in parts if part)


class LineDisplay:
    """One line for each phase, and one every ten seconds of a long one."""

    def __init__(self, stream: TextIO, sweep: SweepTitle | None = None) -> None:
        self._stream = stream
        self._words = _Words()
        self._title = ""
        self._due_s = 0.0
        if sweep is not None:
            self.say(sweep.words())

    def say(self, text: str) -> None:
        """Write a line."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def update(self, state: Mapping[str, Any]) -> None:
        """Write a line when the phase is new or the last line is old."""
        title, _, left, details = self._words.of(state)
        now = time.monotonic()
        if title == self._title and now < self._due_s:
            return
        self._title, self._due_s = title, now + LINE_INTERVAL_S
        self.say(f"[{title}] {', '.join(part for part in (left, details) if part)}".rstrip())

    def close(self) -> None:
        """Nothing to leave."""


class RichDisplay:
    """A bar that changes its title, and a line below it; redrawn by the caller's ticks."""

    def __init__(self, stream: TextIO, sweep: SweepTitle | None = None) -> None:
        from rich.console import Console, RenderableType  # noqa: PLC0415  only on a terminal
        from rich.progress import (  # noqa: PLC0415
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
        )
        from rich.text import Text  # noqa: PLC0415

        class Bar(Progress):
            """The bar with its details on lines of their own, which a narrow terminal needs."""

            details = ""

            def get_renderables(self) -> Iterable[RenderableType]:
                if sweep is not None:
                    yield Text(sweep.words(), overflow="fold")
                yield self.make_tasks_table(self.tasks)
                yield Text(self.details, overflow="fold")

        self._words = _Words()
        self._title = ""
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=Console(file=stream),
            auto_refresh=False,
            transient=True,
        )
        self._task = self._bar.add_task("start", total=None, left="")
        self._bar.start()

    def say(self, text: str) -> None:
        """Write a line above the bar."""
        self._bar.console.print(text, markup=False, highlight=False)

    def update(self, state: Mapping[str, Any]) -> None:
        """Redraw the bar."""
        title, share, left, self._bar.details = self._words.of(state)
        if title != self._title:
            self._title = title
            self._bar.reset(self._task, description=title, total=None, left="")
        self._bar.update(
            self._task,
            total=None if share is None else 1.0,
            completed=0.0 if share is None else share,
            left=left,
        )
        self._bar.refresh()

    def close(self) -> None:
        """Remove the bar."""
        self._bar.stop()


Display = LineDisplay | RichDisplay
"""Shows one point."""


def open_display(stream: TextIO | None = None, *, sweep: SweepTitle | None = None) -> Display:
    """Return a display on `stream` (default: stderr): rich on a terminal, plain lines elsewhere.

    It says where the point stands in its `sweep`, if it is of one.
    """
    target = sys.stderr if stream is None else stream
    return (RichDisplay if target.isatty() else LineDisplay)(target, sweep)


UPLOAD_INTERVAL_S: Final = 5.0


class LiveView:
    """Called twice a second while a worker runs."""

    def __init__(self, run_dir: Path, display: Display, tracker: GuardedTracker) -> None:
        self._run_dir = run_dir
        self._display = display
        self._tracker = tracker
        self._samples = LineTail(run_dir / SAMPLES_NAME)
        self._telemetry = LineTail(run_dir / TELEMETRY_SPOOL)
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
