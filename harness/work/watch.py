"""Engines whose state is noted between steps: any, and its counters of experts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
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


COUNTS: Final = ("hits", "misses", "bytes")
"""Counters of an engine's stats below `experts`, each a list with an entry for each layer."""


def expert_counts(llm: Any) -> Mapping[str, list[int]]:
    """Return these counters; none where an engine counts no experts."""
    return llm.stats().get("experts") or {}


class ExpertWatch(Watch):
    """An engine that notes its counters of experts between steps.

    `on_look` gets the share of experts that lay on the GPU since the time before; None: none were
    needed.
    """

    def __init__(self, llm: Engine, clock: Clock, on_look: Callable[[float | None], None]) -> None:
        super().__init__(llm, clock)
        self._on_look = on_look
        self._before = expert_counts(self._llm)
        self._look(self._begin_s)

    def _rose(self) -> dict[str, list[int]]:
        """Return by how much each counter rose, by layer; empty where nothing is counted."""
        now = expert_counts(self._llm)
        return {
            name: [
                after - before for after, before in zip(now[name], self._before[name], strict=True)
            ]
            for name in (COUNTS if now else ())
        }

    def _row(self) -> list[float] | None:
        rose = self._rose()
        if not rose:
            return None
        row: list[float] = [sum(rose[name]) for name in COUNTS]
        before = self._rows[-1][1:] if self._rows else [0.0] * len(row)
        hits, misses = row[0] - before[0], row[1] - before[1]
        self._on_look(hits / (hits + misses) if hits + misses else None)
        return row

    def note(self, part: str, result: dict[str, Any]) -> None:
        """Add rows and sums by layer to a job's result; those of the last part stay."""
        self._look(self._clock())
        rose = self._rose()
        if rose:
            result["samples"]["experts"] = {
                "part": part,
                "columns": ["time_s", *COUNTS],
                "rows": self._rows,
                "layers": {"layer": list(expert_counts(self._llm)["layers"]), **rose},
            }
