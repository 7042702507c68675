"""The GPU's counter of bytes received over PCIe in rows of telemetry, brought to payload bytes."""

from harness.measure.pcie import Calibration, Reading, mean_rate
from reports.telemetry import Table


def readings(table: Table) -> list[Reading]:
    """Return the counter's readings of the rows that have one, with the span of each."""
    columns = (table[name] for name in ("clock_s", "took_s", "pcie_rx_gb_s"))
    return [
        Reading(clock_s, clock_s + took_s, gb_s)
        for clock_s, took_s, gb_s in zip(*columns, strict=True)
        if gb_s is not None
    ]


def payload_gb_s(
    table: Table, known: Calibration | None, begin_s: float, end_s: float
) -> float | None:
    """Return the payload that the GPU received in a span, GB/s.

    None without a calibration, with too few readings, or where the counter stood still during it.
    """
    found = readings(table)
    factor = None if known is None else known.factor(found)
    counted = mean_rate(found, begin_s, end_s)
    return None if factor is None or counted is None else counted * factor
