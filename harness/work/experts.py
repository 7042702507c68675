"""An engine's counters of experts while a part runs: over time, and by layer."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from harness.work.drive import Clock, Engine
from harness.work.watch import Watch

COUNTS: Final = ("hits", "misses", "bytes")
"""Counters of an engine's stats below `experts`, each a list with an entry for each layer."""


class ExpertWatch(Watch):
    """An engine that notes its counters of experts between steps.

    `on_look` gets the share of experts that lay on the GPU since the time before; None: none were
    needed.
    """

    def __init__(self, llm: Engine, clock: Clock, on_look: Callable[[float | None], None]) -> None:
        super().__init__(llm, clock)
        self._on_look = on_look
        self._before = self._counts()
        self._look(self._begin_s)

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
                "layers": {"layer": list(self._counts()["layers"]), **rose},
            }
