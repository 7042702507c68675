"""An engine whose state is noted between steps."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

from harness.work.drive import Clock, Engine
from harness.work.times import has_passed

PERIOD_S: Final = 0.25
"""Seconds between rows."""
MOST_ROWS: Final = 2000
"""Beyond so many rows every second one is dropped and the period doubled."""


class Watch(ABC):
    """An engine that notes a row of figures between steps, a few times a second.

    Everything but `step` is the engine's own. A subclass says what a row has, and notes the first.
    """

    def __init__(self, llm: Engine, clock: Clock) -> None:
        self._llm, self._clock = llm, clock
        self._begin_s = self._next_s = clock()
        self._period_s = PERIOD_S
        self._rows: list[list[float]] = []
        """Each begins with the seconds since the watch was made."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def step(self) -> list[Any]:
        """Run one step of the engine."""
        events: list[Any] = self._llm.step()
        now_s = self._clock()
        if has_passed(now_s, self._next_s):
            self._look(now_s)
        return events

    @abstractmethod
    def _row(self) -> Sequence[float] | None:
        """Return the figures of this moment; None where the engine tells none."""

    def _look(self, now_s: float) -> None:
        self._next_s = now_s + self._period_s
        row = self._row()
        if row is None:
            return
        self._rows.append([now_s - self._begin_s, *row])
        if len(self._rows) > MOST_ROWS:
            self._rows = self._rows[::2]
            self._period_s *= 2
