"""The end of a sweep: its report, and its run in the tracker."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from catalogue.files import tightfit_home
from harness.config.schema import SweepContext, TrackingConfig
from harness.console import columns
from harness.point.describe import what_varies
from harness.point.show import build_report
from harness.tracking.base import SweepFacts
from harness.tracking.mlflow import open_tracker
from reports.record.metrics import found, metric_number
from reports.record.record import RunRecord, write_text_atomic

_NAME_WIDTH: Final = 60


def sweep_lines(
    records: Sequence[RunRecord], folders: Sequence[Path], sweep: SweepContext
) -> list[str]:
    """Return the table of the points that ended as lines of text; folders are of all that began."""
    lines = ["", f"sweep {sweep.sweep_id}: {len(records)} of {sweep.total} points"]
    if records:
        metrics = found("sweep", [record.metrics for record in records])
        titles = [f"{metric.label} {metric.unit}".rstrip() for metric in metrics]
        header = ["point", "choices", "status", *titles, "folder"]
        rows = [header]
        varying = what_varies([record.overrides for record in records])
        for index, (record, own) in enumerate(zip(records, varying, strict=True)):
            name = (" ".join(own) or record.name)[:_NAME_WIDTH]
            values = [(metric.name, record.metrics.get(metric.name)) for metric in metrics]
            cells = ["-" if value is None else metric_number(key, value) for key, value in values]
            is_bad = record.status == "ok" and record.valid is False
            status = "ok, not valid" if is_bad else record.status
            rows.append([str(index), name, status, *cells, folders[index].name])
        lines += columns(rows, left={1, 2, len(header) - 1})
    lines.append(f"  sweep folder  {sweep.folder}")
    report = sweep.folder / "sweep.html"
    if report.is_file():
        lines.append(f"  report        {report}")
    return lines


FAILURES_NAME: Final = "failures.md"


def begin_sweep(tracking: TrackingConfig, sweep: SweepContext) -> list[str]:
    """Open the sweep's run in the tracker as this process's own; return warnings.

    For points that run in other processes: the run would belong to the first of them, and to nobody
    when that ends.
    """
    tracker = open_tracker(tracking, tightfit_home())
    tracker.start_sweep(sweep)
    return tracker.warnings


def finish_sweep(
    tracking: TrackingConfig,
    sweep: SweepContext,
    records: Sequence[RunRecord],
    *,
    interrupted: bool = False,
    is_ok: bool | None = None,
) -> list[str]:
    """Make the sweep's report and end its run in the tracker; return warnings.

    `is_ok` says whether it found what it was for; None: every point must be ok.
    """
    counts = Counter(record.status for record in records)
    status = "ok" if (set(counts) <= {"ok"} if is_ok is None else is_ok) else "failed"
    if interrupted:
        status = "killed"
    warnings = build_report(sweep.folder) if records else []
    try:
        _write_failures(sweep, records)
    except OSError as error:
        warnings.append(f"{FAILURES_NAME}: not written: {error}.")
    tracker = open_tracker(tracking, tightfit_home())
    tracker.finish_sweep(SweepFacts(context=sweep, status=status, counts=dict(counts)))
    return warnings + tracker.warnings


def _write_failures(sweep: SweepContext, records: Sequence[RunRecord]) -> None:
    """List the points that are not ok, and those that did not run, in failures.md."""
    bad = [record for record in records if record.status != "ok"]
    lines = [f"# {len(bad)} of {len(records)} points are not ok", ""]
    for record in bad:
        error = record.error or {}
        phase = f" in phase {error['phase']}" if error.get("phase") else ""
        lines += [f"- **{record.name}**: {record.status}{phase}: {error.get('type')}", ""]
        lines += [f"      {line}" for line in str(error.get("message", "")).splitlines()]
        lines.append("")
    left = sweep.total - len(records)
    if left:
        lines.append(f"{left} of {sweep.total} points did not run.")
    sweep.folder.mkdir(parents=True, exist_ok=True)
    write_text_atomic(sweep.folder / FAILURES_NAME, "\n".join(lines).rstrip() + "\n")
