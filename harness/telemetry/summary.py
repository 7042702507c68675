"""The figures of a run's telemetry: peaks of its workers, and the last timed part."""

from collections.abc import Sequence
from typing import Any, Final

from harness.telemetry.verdict import power_capped_share, throttled_share
from harness.telemetry.window import Span, Window
from reports.record.record import percentile
from reports.record.telemetry import COLUMNS, Table

GIB: Final = 2**30
MEASURE_JOB: Final = "measure"
LARGEST_SHARE: Final = 0.01
"""CPU time over time that the sampler may take."""
LEAST_SECONDS: Final = 5.0
"""Of rows, below which the cost of the sampler is not judged."""
_PEAKS: Final = {
    "memory/gpu_peak_global_gib": "gpu_used_bytes",
    "memory/host_rss_peak_gib": "rss_peak_bytes",
    "memory/host_tree_peak_gib": "rss_bytes",
    "memory/host_anon_gib": "anon_bytes",
    "memory/host_shmem_gib": "shmem_bytes",
}
"""Metric -> column whose highest value it is."""
Metrics = dict[str, float | None]


def peak_metrics(table: Table) -> Metrics:
    """Return the peaks of the worker that measures, of all workers where none does.

    What was never read is left out.
    """
    jobs = table["job"]
    wanted = {MEASURE_JOB} if MEASURE_JOB in jobs else {job for job in jobs if job is not None}
    found: Metrics = {}
    for metric, column in _PEAKS.items():
        cells = zip(jobs, table[column], strict=True)
        values = [value for job, value in cells if job in wanted and value is not None]
        if values:
            found[metric] = max(values) / GIB
    before = zip(jobs, table["gpu_used_bytes"], strict=True)
    baseline = next((value for job, value in before if job is None and value is not None), None)
    if baseline is not None and jobs[0] is None:
        found["memory/gpu_baseline_gib"] = baseline / GIB
    return found


def window_metrics(window: Window) -> Metrics:
    """Return the figures of a timed part; None where the machine does not tell."""
    clocks = window.values("gpu_sm_clock_mhz")
    swapped = [window.growth(name) for name in ("host_swap_in_bytes", "host_swap_out_bytes")]
    clock = window.values("clock_s")
    return {
        "gpu/sm_clock_mhz/min": min(clocks, default=None),
        "gpu/sm_clock_mhz/p50": percentile(clocks, 50),
        "gpu/sm_clock_mhz/max": max(clocks, default=None),
        "gpu/memory_clock_mhz": percentile(window.values("gpu_memory_clock_mhz"), 50),
        "gpu/temperature_c": max(window.values("gpu_temperature_c"), default=None),
        "gpu/power_w": _mean(window.values("gpu_power_w")),
        "gpu/busy_pct": _mean(window.values("gpu_busy_pct")),
        "gpu/throttled_share": throttled_share(window),
        "gpu/power_capped_share": power_capped_share(window),
        "link/pcie_rx_gb_s": _mean(window.readings("pcie_rx_gb_s")),
        "link/pcie_tx_gb_s": _mean(window.readings("pcie_tx_gb_s")),
        "host/cpu_cores": window.rate("cpu_s"),
        "host/busy_cores": window.rate("host_cpu_s"),
        "host/major_faults": window.growth("major_faults"),
        "host/read_gib": _gib(window.growth("read_bytes")),
        "host/disk_read_gib": _gib(window.growth("host_disk_read_bytes")),
        "host/swapped_gib": None if None in swapped else _gib(sum(filter(None, swapped))),
        "telemetry/rows_hz": (len(clock) - 1) / (clock[-1] - clock[0]) if len(clock) > 1 else None,
    }


def facts(table: Table, spans: Sequence[Span], file: str) -> dict[str, Any]:
    """Return what a record says of its telemetry: rows, timed parts and null columns.

    Args:
        table: all rows.
        spans: what was timed, on the clock of the rows.
        file: where the rows are, in the run's folder.
    """
    used = cpu_share(table)
    return {
        "file": file,
        "rows": len(table["clock_s"]),
        "cpu_pct": None if used is None else 100 * used,
        "windows": [
            {"part": s.part, "job": s.job, "begin_s": s.begin_s, "end_s": s.end_s} for s in spans
        ],
        "null_columns": null_columns(table),
    }


def null_columns(table: Table) -> list[str]:
    """Return the columns without a single value."""
    return [name for name in COLUMNS if all(value is None for value in table[name])]


def cpu_share(table: Table) -> float | None:
    """Return the sampler's CPU time over time, from its first row to its last."""
    clock, cpu = table["clock_s"], table["sampler_cpu_s"]
    if len(clock) < 2 or clock[-1] <= clock[0] or None in {cpu[0], cpu[-1]}:
        return None
    used: float = cpu[-1] - cpu[0]
    return used / float(clock[-1] - clock[0])


def cost_warning(table: Table) -> str | None:
    """Return a warning where the sampler took more of a core than it may."""
    found = cpu_share(table)
    clock = table["clock_s"]
    if found is None or found <= LARGEST_SHARE or clock[-1] - clock[0] < LEAST_SECONDS:
        return None
    return (
        f"telemetry: the sampler took {found:.1%} of a core, more than {LARGEST_SHARE:.0%}. "
        "python -m harness.telemetry --self-test shows it; report this."
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _gib(amount: float | None) -> float | None:
    return None if amount is None else amount / GIB
