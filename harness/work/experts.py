"""An engine's counters of experts while a part runs: over time, and by layer."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from harness.work.drive import Clock, Engine
from harness.work.times import has_passed

PERIOD_S: Final = 0.25
"""Seconds between rows."""
MOST_ROWS: Final = 2000
"""Beyond so many rows every second one is dropped and the period doubled."""
COUNTS: Final = ("hits", "misses", "bytes")
"""Counters of an engine's stats below `experts`, each a list with an entry for each layer."""


class ExpertWatch:
    """An engine that notes its counters of experts between steps, a few times a second.

    Everything but `step` is the engine's own. `on_look` gets the share of experts that lay on the
    GPU since the time before; None: none were needed.
    """

    def __init__(self, llm: Engine, clock: Clock, on_look: Callable[[float | None], None]) -> None:
        self._llm, self._clock, self._on_look = llm, clock, on_look
        self._begin_s = self._next_s = clock()
        self._period_s = PERIOD_S
        self._before = self._counts()
        self._rows: list[list[float]] = []
        self._look(self._begin_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def step(self) -> list[Any]:
        """Run one step of the engine."""
        events: list[Any] = self._llm.step()
        now_s = self._clock()
        if has_passed(now_s, self._next_s):
            self._look(now_s)
        return events

    def _counts(self) -> Mapping[str, list[int]]:
        return self._llm.stats().get("experts") or {}

    def _rose(self) -> dict[str, list[int]]:
        """Return by how much each counter rose, by layer; empty where nothing is counted."""
        now = self._counts()
        return {
            name: [
                after - before for after, before in zip(now[name], self._before[name], strict=True)
            ]
            for name in (COUNTS if now else ())
        }

    def _look(self, now_s: float) -> None:
        self._next_s = now_s + self._period_s
        rose = self._rose()
        if not rose:
            return
        row = [now_s - self._begin_s, *(sum(rose[name]) for name in COUNTS)]
        before = self._rows[-1] if self._rows else [0.0] * len(row)
        hits, misses = row[1] - before[1], row[2] - before[2]
        self._on_look(hits / (hits + misses) if hits + misses else None)
        self._rows.append(row)
        if len(self._rows) > MOST_ROWS:
            self._rows = self._rows[::2]
            self._period_s *= 2

    def note(self, part: str, result: dict[str, Any]) -> None:
        """Add rows and sums by layer to a job's result; those of the last part stay."""
        self._look(self._clock())
        rose = self._rose()
        if rose:
            result["samples"]["experts"] = {
                "part": part,
                "columns": ["time_s", *COUNTS],
                "rows": self._rows,
                "layers": {"layer": list(self._counts()["layers"]), **rose},
            }
