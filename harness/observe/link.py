"""The GPU's counter of bytes received over PCIe in rows of telemetry, brought to payload bytes."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self, TypeVar

from reports.record.rows import Table

T = TypeVar("T")
Stream = Callable[[float], tuple[int, float, float]]
"""Moves host memory to the device for so many seconds; returns bytes, and begin and end on the
clock."""
CALIBRATION_S: Final = 0.6
"""Seconds of traffic for a calibration: about 30 windows."""
LEAST_READINGS: Final = 5
"""Readings within a span below which nothing is said of it."""


@dataclass(frozen=True)
class Reading:
    """One value of the counter and the span of the query that brought it."""

    begin_s: float
    end_s: float
    gb_s: float


@dataclass(frozen=True, kw_only=True)
class LinkFactors:
    """Payload bytes per byte that the counter tells, by what moves them; None where not known.

    They differ: packets of copies carry more payload than those that kernels ask for
    (docs/method.md).
    """

    copied: float | None = None
    in_place: float | None = None

    def of(self, copied_bytes: int, in_place_bytes: int) -> float | None:
        """Return the factor of traffic of both kinds; of copies alone where nothing moved."""
        if not in_place_bytes:
            return self.copied
        if not copied_bytes:
            return self.in_place
        if self.copied is None or self.in_place is None:
            return None
        counted = copied_bytes / self.copied + in_place_bytes / self.in_place
        return (copied_bytes + in_place_bytes) / counted


class CounterReader:
    """Reads a counter again and again in a thread of its own, while it is entered.

    `read` returns GB/s over about 20 ms, or None where there is no such counter; then reading ends.
    """

    def __init__(
        self, read: Callable[[], float | None], *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._read, self._clock = read, clock
        self.readings: list[Reading] = []
        """In order of time."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pcie-counter", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            begin_s = self._clock()
            value = self._read()
            if value is None:
                return
            self.readings.append(Reading(begin_s, self._clock(), value))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def mean_gb_s(readings: list[Reading], begin_s: float, end_s: float) -> float | None:
    """Return the mean GB/s of the readings that lie within a span.

    None where there are fewer than LEAST_READINGS.
    """
    inside = [x.gb_s for x in readings if x.begin_s >= begin_s and x.end_s <= end_s]
    return sum(inside) / len(inside) if len(inside) >= LEAST_READINGS else None


def calibrate(
    read: Callable[[], float | None],
    stream: Stream,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> float | None:
    """Return payload bytes per counted byte, from traffic of known size.

    None where the counter gives nothing or too little, or stands still meanwhile. `stream` lasts
    CALIBRATION_S; its times are on `clock`.
    """
    if read() is None:
        return None
    with CounterReader(read, clock=clock) as reader:
        num_bytes, begin_s, end_s = stream(CALIBRATION_S)
    counted = mean_gb_s(reader.readings, begin_s, end_s)
    return num_bytes / 1e9 / (end_s - begin_s) / counted if counted else None


class LinkCounter:
    """The counter with its calibration, for the span of some work.

    Without a factor (of `calibrate`) nothing is read.
    """

    def __init__(
        self,
        read: Callable[[], float | None],
        factors: LinkFactors,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._read, self.factors, self._clock = read, factors, clock

    def measured(self, work: Callable[[], T]) -> tuple[T, float | None]:
        """Do the work; return its result and what the counter told meanwhile, GB/s."""
        if self.factors == LinkFactors():
            return work(), None
        with CounterReader(self._read, clock=self._clock) as reader:
            begin_s = self._clock()
            result = work()
            end_s = self._clock()
        return result, mean_gb_s(reader.readings, begin_s, end_s)


def readings(table: Table) -> list[Reading]:
    """Return the counter's readings with the span of each; rows that repeat one have none."""
    names = ("clock_s", "took_s", "costly_clock_s", "pcie_rx_gb_s")
    return [
        Reading(clock_s, clock_s + took_s, gb_s)
        for clock_s, took_s, read_s, gb_s in zip(*(table[name] for name in names), strict=True)
        if gb_s is not None and read_s == clock_s
    ]


def payload_gb_s(table: Table, factor: float | None, begin_s: float, end_s: float) -> float | None:
    """Return the payload that the GPU received in a span, GB/s.

    None without a calibration, or with too few readings.
    """
    counted = mean_gb_s(readings(table), begin_s, end_s)
    return None if factor is None or counted is None else counted * factor
