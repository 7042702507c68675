"""`--json`: what a command found as one JSON document on stdout; what is said goes to stderr."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.config.compose import Plan
from harness.folders import plain
from reports.record.record import RunRecord

Document = dict[str, Any]


def print_document(document: Document) -> None:
    """Write a document to stdout."""
    sys.stdout.write(json.dumps(plain(document), indent=2) + "\n")
    sys.stdout.flush()


def of_runs(ended: Sequence[tuple[Path, RunRecord]], sweep: Path | None) -> Document:
    """Return the document of a run, or of a sweep's points, by their folders and records."""
    points = [
        {"folder": str(folder), "record": json.loads(record.to_json())} for folder, record in ended
    ]
    if sweep is None:
        return {"kind": "run", **(points[0] if points else {})}
    return {"kind": "sweep", "folder": str(sweep), "points": points}


def of_plans(plan: Plan) -> Document:
    """Return the document of plans: for each point every way to place the weights, as plan.csv."""
    from harness.forecast.rows import forecast  # noqa: PLC0415  not for runs
    from harness.sweep.plan import csv_row  # noqa: PLC0415

    points = []
    for point in plan.points:
        name = " ".join(point.overrides)
        found = forecast(point.config, tuple(point.overrides))
        rows = [csv_row(found, row, name) for row in found.rows]
        best = found.recommended
        points.append(
            {
                "overrides": point.overrides,
                "fits": found.plan is not None,
                "says": found.lines[0],
                "best": found.best,
                "recommended": best and best.label,
                "ways": rows,
            }
        )
    return {"kind": "plan", "points": points}
