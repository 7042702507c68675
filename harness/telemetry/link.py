"""The GPU's counter of bytes received over PCIe, brought to payload by copies of known size.

NVML counts what crosses the link, packet headers included. What copies of known size read on it
is the calibration; its quotient brings other readings to payload bytes.
"""

from dataclasses import dataclass
from typing import Final

from reports.telemetry import Table

LEAST_READINGS: Final = 5
"""Readings within a span below which nothing is said of it."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Copies from host to device, and when they ran on the clock of the rows."""

    num_bytes: int
    begin_s: float
    end_s: float


def mean_rate(table: Table, begin_s: float, end_s: float) -> float | None:
    """Return the mean of the counter over the rows that were begun and read within a span, GB/s.

    None where there are fewer than LEAST_READINGS.
    """
    columns = (table[name] for name in ("clock_s", "took_s", "pcie_rx_gb_s"))
    inside = [
        gb_s
        for clock_s, took_s, gb_s in zip(*columns, strict=True)
        if gb_s is not None and clock_s >= begin_s and clock_s + took_s <= end_s
    ]
    return sum(inside) / len(inside) if len(inside) >= LEAST_READINGS else None


def payload_gb_s(
    table: Table, known: Calibration | None, begin_s: float, end_s: float
) -> float | None:
    """Return the payload that the GPU received in a span, GB/s.

    None without a calibration, with too few readings, or where the counter stood still during it.
    """
    if known is None:
        return None
    counted = mean_rate(table, known.begin_s, known.end_s)
    found = mean_rate(table, begin_s, end_s)
    if not counted or found is None:
        return None
    copied_gb_s = known.num_bytes / 1e9 / (known.end_s - known.begin_s)
    return found * copied_gb_s / counted
