"""Tables that several sections of a page share: metrics with definitions, trees of settings."""

from collections.abc import Mapping

from reports.definitions import STATISTIC_DEFINITIONS, definition
from reports.page import Table
from reports.record import RunRecord
from reports.text import base_name, flatten, gib, leaf, metric_text


def metric_table(record: RunRecord, areas: list[str]) -> Table | None:
    """Return the metrics of some areas beside their definitions, None without any."""
    names = [name for name in record.metrics if name.split("/")[0] in areas]
    return named_table(record, names) if names else None


def named_table(record: RunRecord, names: list[str]) -> Table:
    """Return the named metrics beside their definitions."""
    rows = []
    for name in names:
        text = definition(name) or "no definition is recorded for this name"
        statistic = STATISTIC_DEFINITIONS.get(name.removeprefix(base_name(name)).lstrip("/"))
        text = f"{statistic} of: {text}" if statistic else text
        rows.append((name, metric_text(name, record.metrics[name]), text))
    return Table(
        columns=("metric", "value", "definition"),
        rows=rows,
        numeric=frozenset({1}),
        wide=frozenset({2}),
    )


def tree_table(tree: Mapping[str, object], caption: str = "", *, is_folded: bool = False) -> Table:
    """Return nested settings as rows of dotted key and value; bytes are shown in GiB or MiB."""
    rows = [(key, _value(key, value)) for key, value in flatten(tree)]
    return Table(columns=("key", "value"), rows=rows, caption=caption, is_folded=is_folded)


def _value(key: str, value: object) -> str:
    is_bytes = "bytes" in key or key.startswith("placements.")
    if is_bytes and isinstance(value, int | float) and not isinstance(value, bool):
        return gib(value)
    return leaf(value)
