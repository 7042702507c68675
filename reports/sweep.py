"""Several records side by side: labels, differing settings, a page and a CSV text."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reports import facts
from reports.load import Point
from reports.page import Card, Kind, Page, Section, Table, Verdict
from reports.record.metrics import CONVENTIONS, Metric, found, metric_number
from reports.record.record import RunRecord
from reports.record.text import ABSENT, flatten, leaf, shorten
from reports.verdict import error_line, status_kind, validity
from reports.view import banners

ALT: Final = (
    ("comparison", "Bars of output rate and TPOT, one row for each point"),
    ("tradeoff", "Scatter of the output rate over the rate of one request and over GPU peak"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One point of a sweep with its number and its label."""

    place: int
    label: str
    point: Point

    @property
    def record(self) -> RunRecord | None:
        """The point's record, None where it could not be read."""
        return self.point.record

    @property
    def status(self) -> str:
        """The record's status, or `unreadable`."""
        return self.record.status if self.record else "unreadable"

    @property
    def title(self) -> str:
        """Number and label, cut to one short line."""
        return f"{self.place}. {shorten(self.label, 60)}"


def sweep_rows(points: Sequence[Point]) -> list[Row]:
    """Return one row for each point, labelled by the overrides that not all points share.

    A point's number is its folder's where all folders have one, else its place, from 0.
    """
    records = [point.record for point in points if point.record]
    shared = set.intersection(*(set(record.overrides) for record in records)) if records else set()
    names = [point.folder.name for point in points]
    is_numbered = all(map(str.isdecimal, names)) and len(set(map(int, names))) == len(names)
    places = [int(name) for name in names] if is_numbered else range(len(names))
    return [
        Row(place=place, label=_label(point, shared), point=point)
        for place, point in zip(places, points, strict=True)
    ]


def differing_keys(records: Sequence[RunRecord]) -> list[str]:
    """Return the dotted configuration keys whose values are not equal in all records."""
    flat = [{key: leaf(value) for key, value in flatten(record.config)} for record in records]
    keys = dict.fromkeys(key for config in flat for key in config)
    return [key for key in keys if len({config.get(key) for config in flat}) > 1]


def sweep_csv(rows: Sequence[Row], folder: Path) -> str:
    """Return the sweep as CSV: a header and a line for each point, absent values empty.

    Text that a spreadsheet would take for a formula gets a leading apostrophe.
    """
    records = [row.record for row in rows if row.record]
    keys = differing_keys(records)
    metrics = list(dict.fromkeys(name for record in records for name in record.metrics))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    head = ["point", "folder", "run_id", "name", "status", "valid", "error", "duration_s"]
    writer.writerow([_cell(name) for name in [*head, *(f"config.{key}" for key in keys), *metrics]])
    for row in rows:
        record = row.record
        where = row.point.folder.relative_to(folder).as_posix()
        if record is None:
            lead = [row.place, where, None, None, row.status, None, row.point.problem, None]
            writer.writerow([_cell(value) for value in [*lead, *[None] * len(keys + metrics)]])
            continue
        config = dict(flatten(record.config))
        lead = [row.place, where, record.run_id, record.name, record.status, record.valid]
        tail = [leaf(config[key]) if key in config else None for key in keys]
        values = [record.metrics.get(name) for name in metrics]
        line = [*lead, error_line(record) or None, record.duration_s, *tail, *values]
        writer.writerow([_cell(value) for value in line])
    return buffer.getvalue()


def sweep_page(title: str, rows: Sequence[Row], links: Mapping[int, str]) -> Page:
    """Return the page of a sweep.

    Args:
        title: the sweep's name.
        rows: the points.
        links: a row's place -> address of that point's own report.
    """
    records = [row.record for row in rows if row.record]
    num_ok = sum(row.status == "ok" for row in rows)
    metrics = found("sweep", [record.metrics for record in records])
    sections = (
        Section(
            title="Points", figures=("comparison",), tables=(_points_table(rows, metrics, links),)
        ),
        _problems(rows),
        Section(title="Trade-off", figures=("tradeoff",)),
        _differences(rows),
        _definitions(metrics),
    )
    num_valid = num_ok - sum(r.status == "ok" and r.valid is False for r in records)
    kind: Kind = "good" if num_valid == len(rows) else "warn" if num_ok else "bad"
    label = f"{num_ok} of {len(rows)} points ok"
    label += f", {num_ok - num_valid} of them not valid" if num_valid < num_ok else ""
    return Page(
        title=title,
        subtitle=", ".join(_shared_facts(records)),
        details=_span(records, len(rows)),
        banners=(*banners(records), *_mixed_cards(records)),
        cards=tuple(_best_cards(rows)),
        verdict=Verdict(kind=kind, label=label),
        sections=tuple(section for section in sections if section is not None),
        alt=dict(ALT),
    )


def _label(point: Point, shared: set[str]) -> str:
    if point.record is None:
        return point.folder.name
    own = [item.lstrip("+") for item in point.record.overrides if item not in shared]
    return " ".join(own) or point.record.name


def _cell(value: object) -> object:
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{value}"
    return "" if value is None else value


def _points_table(
    rows: Sequence[Row], metrics: Sequence[Metric], links: Mapping[int, str]
) -> Table:
    cells, kinds = [], {}
    for index, row in enumerate(rows):
        record = row.record
        values = record.metrics if record else {}
        texts = [metric_number(metric.name, values.get(metric.name)) for metric in metrics]
        state = row.status
        if record is not None and record.status == "ok":
            state = f"ok, {validity(record)}"
        cells.append((row.title, state, *texts))
        kinds[index] = status_kind(record) if record else "bad"
    return Table(
        columns=("point", "status", *(metric.heading for metric in metrics)),
        rows=cells,
        numeric=frozenset(range(2, 2 + len(metrics))),
        links={i: links[row.place] for i, row in enumerate(rows) if row.place in links},
        kinds=kinds,
    )


def _problems(rows: Sequence[Row]) -> Section | None:
    lines = []
    for row in rows:
        record = row.record
        text = row.point.problem or ""
        if record is not None:
            text = "; ".join(filter(None, [error_line(record), *record.reasons]))
        if text:
            lines.append((row.title, row.status, text))
    if not lines:
        return None
    table = Table(columns=("point", "status", "reason"), rows=lines, wide=frozenset({2}))
    return Section(title="Points that did not end ok or are not valid", tables=(table,))


def _differences(rows: Sequence[Row]) -> Section | None:
    keys = differing_keys([row.record for row in rows if row.record])
    if not keys:
        return None
    lines = []
    for row in rows:
        if row.record is not None:
            config = dict(flatten(row.record.config))
            texts = (shorten(leaf(config[key]), 40) if key in config else ABSENT for key in keys)
            lines.append((row.title, *texts))
    table = Table(columns=("point", *keys), rows=lines)
    return Section(title="Configuration that differs", tables=(table,))


def _definitions(metrics: Sequence[Metric]) -> Section:
    rows = [(metric.name, metric.label, metric.definition) for metric in metrics]
    table = Table(columns=("metric", "column", "definition"), rows=rows, wide=frozenset({2}))
    return Section(title="Definitions", text=CONVENTIONS, tables=(table,))


def _shared_facts(records: Sequence[RunRecord]) -> list[str]:
    """Return model and budget where all records have the same."""
    common = []
    for fact in (facts.model_name, facts.budget_title):
        values = {fact(record) for record in records}
        value = values.pop() if len(values) == 1 else None
        if value is not None:
            common.append(value)
    return common


def _span(records: Sequence[RunRecord], num_points: int) -> str:
    starts = sorted(record.started_at for record in records if record.started_at)
    text = f"{num_points} point{'s' if num_points != 1 else ''}"
    return f"{text}, first started {starts[0]}" if starts else text


def _mixed_cards(records: Sequence[RunRecord]) -> list[str]:
    cards = sorted({card for card in map(facts.gpu_name, records) if card})
    if len(cards) < 2:
        return []
    return [f"The points ran on different GPUs ({', '.join(cards)}): compare ratios, not figures"]


def _best_cards(rows: Sequence[Row]) -> list[Card]:
    """Return the best valid point for each metric that has one."""
    good = [
        (row, row.record.metrics)
        for row in rows
        if row.record is not None and row.record.status == "ok" and row.record.valid is not False
    ]
    cards = []
    for metric in found("best", [values for _, values in good]):
        having = [
            (row, value) for row, values in good if (value := values.get(metric.name)) is not None
        ]
        is_most = metric.better == "higher"
        row, value = (max if is_most else min)(having, key=lambda item: item[1])
        cards.append(
            Card(
                label=f"{'Highest' if is_most else 'Lowest'} {metric.label}",
                value=metric_number(metric.name, value),
                unit=metric.unit,
                note=f"point {row.title}",
            )
        )
    return cards
