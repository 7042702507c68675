"""The trials of a search: what it looked for, what came of each, and which is the best."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from reports.page import Kind, Section, Table
from reports.record.metrics import metric_text
from reports.record.text import ABSENT

SEARCH_NAME: Final = "search.json"
TRIALS_NAME: Final = "trials.csv"
_LEAD: Final = ("trial", "state", "status", "value", "not_kept", "reason", "folder")
"""Columns of the file before those of the settings."""


def search_section(folder: Path) -> Section | None:
    """Return the section of a search's folder; None for that of a sweep, or one without trials."""
    try:
        asked = json.loads((folder / SEARCH_NAME).read_text(encoding="utf-8"))
        with (folder / TRIALS_NAME).open(encoding="utf-8", newline="") as file:
            trials = list(csv.DictReader(file))
        word, metric = str(asked["objective"]).split(" ", 1)
        limits = [str(item) for item in asked["subject_to"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not trials:
        return None
    best = _best(trials, is_maximum=word == "maximize")
    kept = f", subject to {' and '.join(limits)}" if limits else ""
    found = "No trial keeps that." if best is None else f"The best is trial {best}."
    text = f"Looked for: {word} {metric}{kept}. {found}"
    return Section(title="Trials", text=(text,), tables=(_table(trials, metric, best),))


def _best(trials: Sequence[Mapping[str, Any]], *, is_maximum: bool) -> str | None:
    kept = [row for row in trials if row["value"] and not row["not_kept"]]
    order = sorted(kept, key=lambda row: float(row["value"]), reverse=is_maximum)
    return order[0]["trial"] if order else None


def _table(trials: Sequence[Mapping[str, Any]], metric: str, best: str | None) -> Table:
    settings = [name for name in trials[0] if name not in _LEAD]
    rows, kinds = [], dict[int, Kind]()
    for place, row in enumerate(trials):
        value = metric_text(metric, float(row["value"])) if row["value"] else ABSENT
        why = row["reason"] or (f"does not keep {row['not_kept']}" if row["not_kept"] else "")
        why = "the best" if row["trial"] == best else why
        rows.append(
            (row["trial"], *(row[name] or "" for name in settings), row["status"], value, why)
        )
        if not row["value"]:
            kinds[place] = "bad"
        elif row["not_kept"]:
            kinds[place] = "warn"
    columns = ("trial", *(name.rpartition(".")[2] for name in settings), "status", metric, "note")
    return Table(
        columns=columns,
        rows=rows,
        numeric=frozenset({len(columns) - 2}),
        wide=frozenset({len(columns) - 1}),
        kinds=kinds,
    )
