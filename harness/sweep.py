"""The end of a sweep: its report, and its run in the tracker."""

from collections import Counter
from collections.abc import Sequence

from harness.models.home import tightfit_home
from harness.report import build_report
from harness.schema import SweepContext, TrackingConfig
from harness.tracking.base import SweepFacts
from harness.tracking.choose import open_tracker
from reports.record import RunRecord


def finish_sweep(
    tracking: TrackingConfig,
    sweep: SweepContext,
    records: Sequence[RunRecord],
    *,
    interrupted: bool = False,
) -> list[str]:
    """Make the sweep's report and end its run in the tracker; return warnings.

    Args:
        tracking: where the points were mirrored to.
        sweep: of any of its points.
        records: of the points that ended.
        interrupted: Ctrl-C ended the sweep.
    """
    counts = Counter(record.status for record in records)
    status = "ok" if set(counts) <= {"ok"} else "failed"
    if interrupted:
        status = "killed"
    warnings = build_report(sweep.folder) if records and not interrupted else []
    tracker = open_tracker(tracking, tightfit_home())
    tracker.finish_sweep(SweepFacts(context=sweep, status=status, counts=dict(counts)))
    return warnings + tracker.warnings
