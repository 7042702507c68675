"""The rows of one span of time, and simple questions to them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from reports.record.telemetry import COSTLY_COLUMNS, SLOW_COLUMNS, Table

BUSY_PCT: Final = 50.0
"""From this utilisation on a GPU is busy: its clock and link are not those of a rest."""
IDLE_BIT: Final = 0x1
"""NVML says so itself: the clock is low because nothing runs."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """What was timed, seconds on the clock of the rows."""

    part: str
    """latency, throughput, serve, or load."""
    job: str
    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """How long it is."""
        return self.end_s - self.begin_s


class Window:
    """The rows of a span.

    Args:
        table: all rows of the run.
        span: rows of its job that were begun within it are in.
    """

    def __init__(self, table: Table, span: Span) -> None:
        self.span = span
        clock, jobs = table["clock_s"], table["job"]
        self._table = table
        self._places = [
            place
            for place, (clock_s, job) in enumerate(zip(clock, jobs, strict=True))
            if job == span.job and clock_s is not None and span.begin_s <= clock_s <= span.end_s
        ]
        self._busy = [place for place in self._places if self._is_busy(place)]

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_busy(self) -> int:
        """Rows with a busy GPU."""
        return len(self._busy)

    def values(self, column: str, *, busy: bool = False) -> list[Any]:
        """Return the values of a column that are there; `busy`: of rows with a busy GPU only."""
        cells = self._table[column]
        found = (cells[place] for place in (self._busy if busy else self._places))
        return [value for value in found if value is not None]

    def readings(self, column: str) -> list[Any]:
        """Return the values of one of COSTLY_COLUMNS that were read in the span, each once."""
        cells, clock = self._table[column], self._table["clock_s"]
        read = self._table["costly_clock_s"]
        fresh = (cells[place] for place in self._places if read[place] == clock[place])
        return [value for value in fresh if value is not None]

    def pairs(self, first: str, second: str) -> list[tuple[Any, Any]]:
        """Return two columns of the rows with a busy GPU that have both."""
        one, other = self._table[first], self._table[second]
        cells = ((one[place], other[place]) for place in self._busy)
        return [(a, b) for a, b in cells if a is not None and b is not None]

    def growth(self, column: str) -> float | None:
        """Return by how much a counter grew from the first row to the last; None if unknown.

        A counter that went back was started anew and says nothing; nor does one that was read
        only once.
        """
        found = self._ends(column)
        return None if found is None else found[0]

    def rate(self, column: str) -> float | None:
        """Return the growth of a counter per second."""
        found = self._ends(column)
        return None if found is None else found[0] / found[1]

    def _ends(self, column: str) -> tuple[float, float] | None:
        """Return growth and seconds between the first and the last reading within the span."""
        name = "slow_clock_s" if column in SLOW_COLUMNS else "clock_s"
        clock = self._table["costly_clock_s" if column in COSTLY_COLUMNS else name]
        cells = self._table[column]
        read = [
            (clock[place], cells[place])
            for place in self._places
            if cells[place] is not None
            and clock[place] is not None
            and clock[place] >= self.span.begin_s
        ]
        if not read or read[-1][0] <= read[0][0] or read[-1][1] < read[0][1]:
            return None
        return float(read[-1][1] - read[0][1]), float(read[-1][0] - read[0][0])

    def _is_busy(self, place: int) -> bool:
        """Whether the GPU worked, as far as the driver tells; without a GPU it never does."""
        busy_pct = self._table["gpu_busy_pct"][place]
        bits = self._table["gpu_throttle_bits"][place]
        if busy_pct is None:
            return bits is not None and not bits & IDLE_BIT
        return bool(busy_pct >= BUSY_PCT)


def share(flags: Iterable[bool]) -> float | None:
    """Return the share of true ones, None of nothing."""
    known = list(flags)
    return sum(known) / len(known) if known else None
