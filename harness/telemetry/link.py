"""The GPU's counter of bytes received over PCIe in rows of telemetry, brought to payload bytes."""

from harness.measure.pcie import Reading, mean_rate
from reports.record.telemetry import Table


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

    Args:
        table: all rows of the run.
        factor: payload bytes per counted byte.
        begin_s: of the span, on the clock of the rows.
        end_s: likewise.
    """
    counted = mean_rate(readings(table), begin_s, end_s)
    return None if factor is None or counted is None else counted * factor
