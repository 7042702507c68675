"""A test as a file: JSON with all there is, CSV with its figures."""

import csv
import io
import json
from collections.abc import Iterator
from typing import Any, Final

from sqlalchemy import select

from console.registry.database import Database
from console.registry.results import Results
from console.registry.tables import Comparison, Model, Performance, Profile, TestRun
from reports.record.metrics import unit

COLUMNS: Final = ("model", "test", "profile", "card", "part", "metric", "unit", "value")
AB_COLUMNS: Final = (
    *("model", "test", "profile_a", "profile_b", "metric", "unit"),
    *("a", "b", "ratio", "low", "high", "verdict"),
)


def document_of(database: Database, test_id: int) -> dict[str, Any]:
    """Return a test with the model's name, what it measured and its comparison.

    Raises:
        FieldError: There is no such test.
    """
    test = Results(database).get(test_id)
    with database.read() as session:
        model = session.get(Model, test.model_id)
        rows = session.scalars(
            select(Performance).where(Performance.test_run_id == test_id).order_by(Performance.id)
        ).all()
        comparison = session.scalar(select(Comparison).where(Comparison.test_run_id == test_id))
        chosen = select(Profile).where(Profile.model_id == test.model_id)
        names = {profile.id: profile.name for profile in session.scalars(chosen)}
    ids: dict[str, int] = test.settings.get("profile_ids") or {}
    names |= {number: name for name, number in ids.items()}  # as they were
    return {
        "model": None if model is None else model.name,
        "test": _without(test, "pid", "pid_started_s"),
        "performance": [
            {**row.to_dict(), "profile": names.get(row.profile_id or 0)} for row in rows
        ],
        "comparison": comparison
        and {
            **comparison.to_dict(),
            "profile_a": names.get(comparison.profile_a_id or 0),
            "profile_b": names.get(comparison.profile_b_id or 0),
        },
    }


def as_json(database: Database, test_id: int) -> str:
    """Return a test as one JSON document."""
    return json.dumps(document_of(database, test_id), indent=2, allow_nan=False) + "\n"


def as_csv(database: Database, test_id: int) -> str:
    """Return the figures of a test: a line for each metric; of an A/B with both sides.

    An unknown figure is an empty cell.
    """
    found = document_of(database, test_id)
    columns, rows = (
        (COLUMNS, _figures(found)) if found["comparison"] is None else (AB_COLUMNS, _ratios(found))
    )
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _figures(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for row in found["performance"]:
        for metric, value in row["metrics"].items():
            yield {
                "model": found["model"],
                "test": found["test"]["id"],
                "profile": row["profile"],
                "card": row["card"],
                "part": row["part"],
                "metric": metric,
                "unit": unit(metric),
                "value": value,
            }


def _ratios(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    comparison = found["comparison"]
    names = {name: comparison[name] for name in ("profile_a", "profile_b")}
    for row in comparison["rows"]:
        yield {"model": found["model"], "test": found["test"]["id"], **names, **row}


def _without(test: TestRun, *names: str) -> dict[str, Any]:
    return {name: value for name, value in test.to_dict().items() if name not in names}
