"""Time spent by phase on the critical path, and busy times and bytes beside it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter


@dataclass(frozen=True)
class LoadReport:
    """Where the time of a load went."""

    total_s: float
    phases: dict[str, float]
    """Seconds on the critical path by phase; they do not overlap and sum to total_s."""
    busy: dict[str, float]
    """Seconds of work in other threads by kind, summed over threads."""
    moved: dict[str, int] = field(default_factory=dict)
    """Bytes that a phase brought into place; phases without bytes are absent."""


class PhaseClock:
    """Attributes every moment since construction to one phase; `other` where none is open.

    Phases are opened by one thread and may nest: an inner phase interrupts the outer one.
    """

    def __init__(self) -> None:
        self._start = self._mark = perf_counter()
        self._stack = ["other"]
        self._phases: dict[str, float] = {}
        self._busy: dict[str, float] = {}
        self._moved: dict[str, int] = {}
        self._lock = threading.Lock()

    def _settle(self) -> None:
        now = perf_counter()
        self._add(self._stack[-1], now - self._mark)
        self._mark = now

    def _add(self, name: str, seconds: float) -> None:
        self._phases[name] = self._phases.get(name, 0.0) + seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute the time inside to a phase."""
        self._settle()
        self._stack.append(name)
        try:
            yield
        finally:
            self._settle()
            self._stack.pop()

    def part(self, name: str, seconds: float) -> None:
        """Attribute seconds that the open phase has had, measured by what ran in it, to another."""
        self._settle()
        taken = min(seconds, self._phases[self._stack[-1]])
        self._add(self._stack[-1], -taken)
        self._add(name, taken)

    def add_busy(self, name: str, seconds: float) -> None:
        """Add work done in any thread."""
        with self._lock:
            self._busy[name] = self._busy.get(name, 0.0) + seconds

    def add_bytes(self, name: str, num_bytes: int) -> None:
        """Add bytes that a phase brought into place."""
        self._moved[name] = self._moved.get(name, 0) + num_bytes

    def report(self) -> LoadReport:
        """Close the account."""
        self._settle()
        return LoadReport(
            self._mark - self._start, dict(self._phases), dict(self._busy), dict(self._moved)
        )
