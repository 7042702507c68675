"""The table at the end of a sweep: one line a point."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from harness.columns import columns
from harness.schema import SweepContext
from reports.record.metrics import found, metric_number
from reports.record.record import RunRecord

__all__ = ["sweep_lines"]

_NAME_WIDTH: Final = 60


def _names(records: Sequence[RunRecord]) -> list[str]:
    """Return what sets the points apart: their overrides without those that all of them have."""
    common = set.intersection(*(set(record.overrides) for record in records))
    own = [[item for item in record.overrides if item not in common] for record in records]
    return [
        " ".join(items)[:_NAME_WIDTH] or record.name[:_NAME_WIDTH]
        for items, record in zip(own, records, strict=True)
    ]


def sweep_lines(
    records: Sequence[RunRecord], folders: Sequence[Path], sweep: SweepContext
) -> list[str]:
    """Return the table as lines of text.

    Args:
        records: Of the points that ended, in order.
        folders: Of the points that started, in order.
        sweep: Of any of its points.
    """
    lines = ["", f"sweep {sweep.sweep_id}: {len(records)} of {sweep.total} points"]
    if records:
        metrics = found("sweep", [record.metrics for record in records])
        titles = [f"{metric.label} {metric.unit}".rstrip() for metric in metrics]
        header = ["point", "choices", "status", *titles, "folder"]
        rows = [header]
        for index, (record, name) in enumerate(zip(records, _names(records), strict=True)):
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
