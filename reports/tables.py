"""Tables that several sections of a page share: metrics with definitions, trees of settings."""

import csv
import io
from collections.abc import Collection, Mapping
from typing import Any

from reports.definitions import STATISTIC_DEFINITIONS, definition
from reports.page import Table
from reports.record import RunRecord
from reports.text import base_name, flatten, gib, leaf, metric_number, metric_text


def metric_table(record: RunRecord, areas: list[str]) -> Table | None:
    """Return the metrics of some areas beside their definitions, None without any."""
    names = [name for name in record.metrics if name.split("/")[0] in areas]
    return named_table(record, names) if names else None


def named_table(record: RunRecord, names: list[str]) -> Table:
    """Return the named metrics beside their definitions."""
    rows = [
        (name, metric_text(name, record.metrics[name]) + _interval(record, name), _meaning(name))
        for name in names
        if not _is_of_another(name, names)
    ]
    return Table(
        columns=("metric", "value", "definition"),
        rows=rows,
        numeric=frozenset({1}),
        wide=frozenset({2}),
    )


def metrics_csv(record: RunRecord) -> str:
    """Return every metric with its unit and definition as CSV; absent values are empty."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["metric", "value", "definition"])
    for name, value in record.metrics.items():
        writer.writerow([name, "" if value is None else value, _meaning(name)])
    return buffer.getvalue()


def _meaning(name: str) -> str:
    text = definition(name) or "no definition is recorded for this name"
    statistic = STATISTIC_DEFINITIONS.get(name.removeprefix(base_name(name)).lstrip("/"))
    return f"{statistic} of: {text}" if statistic else text


def _is_of_another(name: str, names: Collection[str]) -> bool:
    """Return whether an end of an interval is shown beside its mean."""
    mean, _, last = name.rpartition("/")
    return last in {"ci95_low", "ci95_high"} and mean in names


def _interval(record: RunRecord, name: str) -> str:
    """Return the 95 % interval of a mean over repeats as text, empty without one."""
    ends = [record.metrics.get(f"{name}/{end}") for end in ("ci95_low", "ci95_high")]
    if None in ends:
        return ""
    return f" ({' to '.join(metric_number(name, end) for end in ends)})"


def tree_table(tree: Mapping[str, object], caption: str = "", *, is_folded: bool = False) -> Table:
    """Return nested settings as rows of dotted key and value; bytes are shown in GiB or MiB."""
    rows = [(key, _value(key, value)) for key, value in flatten(_numbered(tree))]
    return Table(columns=("key", "value"), rows=rows, caption=caption, is_folded=is_folded)


def _numbered(value: object) -> Any:
    """Return a tree with lists of settings as settings by number, so that each has a row."""
    if isinstance(value, Mapping):
        return {key: _numbered(item) for key, item in value.items()}
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return {str(index): _numbered(item) for index, item in enumerate(value)}
    return value


def _value(key: str, value: object) -> str:
    if isinstance(value, float) and value != round(value, 4):
        value = float(f"{value:.5g}")
    is_bytes = "bytes" in key or key.startswith("placements.")
    if is_bytes and isinstance(value, int | float) and not isinstance(value, bool):
        return gib(value) + ("/s" if key.endswith("bytes_s") else "")
    return leaf(value)
