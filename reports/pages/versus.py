"""Runs of the same work as a page: ratios to the first, figures, what differs."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Final

from reports import facts
from reports.compare import Row, compared_metrics, differing_settings, ratio, ratio_interval
from reports.pages.page import Card, Kind, Page, Section, Table, Verdict
from reports.pages.run import banners
from reports.pages.verdict import error_line, status_kind, validity
from reports.record.metrics import (
    CONVENTIONS,
    Metric,
    definition,
    metric_number,
    metric_text,
)
from reports.record.record import RunRecord
from reports.record.text import leaf, shorten

NO_RATIO: Final = "No figure is of the first run and of another one: there is nothing to divide."
MACHINE: Final = ("gpu.name", "driver", "torch", "cpu.name", "host", "git.sha")
ALT: Final = (
    ("ratios", "Ratio of each figure of the other runs to the first run"),
    ("comparison", "Bars of output rate and TPOT, one row for each run"),
)


def versus_page(rows: Sequence[Row], links: Mapping[int, str]) -> Page:
    """Return the page of a comparison; the first row is what the others are held against.

    Args:
        rows: records of the same work (check_alike).
        links: a row's place -> address of that run's own report.
    """
    records = [row.record for row in rows if row.record]
    metrics = compared_metrics(records)
    ratios = tuple(_ratio_tables(rows, metrics))
    sections = (
        Section(title=f"Ratios to {rows[0].label}", text=(NO_RATIO,))
        if not ratios
        else Section(
            title=f"Ratios to {rows[0].label}",
            text=(
                "Above 1 is more of the figure; green says that it is better, red worse. An"
                " interval holds every ratio of two means within their 95 % intervals over"
                " repeats.",
            ),
            figures=("ratios",),
            tables=ratios,
        ),
        Section(
            title="Figures",
            figures=("comparison",) if metrics else (),
            tables=(_runs(rows, links), *([_values(rows, metrics)] if metrics else [])),
        ),
        _settings(rows),
        _machines(rows),
        _definitions(metrics),
    )
    return Page(
        title=" against ".join(shorten(row.label, 60) for row in rows[:3]),
        subtitle=", ".join(filter(None, [facts.model_name(records[0]), _scenario(records[0])])),
        details=f"{len(rows)} runs of the same work; {rows[0].label} is the base",
        banners=(*banners(records), *_cards_banner(records)),
        cards=tuple(_cards(rows, metrics)),
        verdict=_verdict(rows),
        sections=tuple(section for section in sections if section is not None),
        alt=dict(ALT),
    )


def versus_csv(rows: Sequence[Row]) -> str:
    """Return every metric with the value of each run and its ratio to the first, as CSV."""
    records = [row.record for row in rows if row.record]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    others = [f"{row.label} / {rows[0].label}" for row in rows[1:]]
    writer.writerow(["metric", *(row.label for row in rows), *others, "definition"])
    for name in dict.fromkeys(name for record in records for name in record.metrics):
        values = [record.metrics.get(name) for record in records]
        ratios = [ratio(records[0], record, name) for record in records[1:]]
        cells = ["" if cell is None else cell for cell in (*values, *ratios)]
        writer.writerow([name, *cells, definition(name) or ""])
    return buffer.getvalue()


def _ratio_tables(rows: Sequence[Row], metrics: Sequence[Metric]) -> list[Table]:
    base, tables = rows[0].record, []
    for row in rows[1:]:
        lines: list[tuple[str, ...]] = []
        kinds: dict[int, Kind] = {}
        for metric in metrics:
            name = metric.name
            value = ratio(base, row.record, name) if base and row.record else None
            if value is None or base is None or row.record is None:
                continue
            ends = ratio_interval(base, row.record, name)
            is_settled = ends is None or not ends[0] <= 1 <= ends[1]
            if is_settled and abs(value - 1) >= 0.005:
                is_better = (value > 1) == (metric.better == "higher")
                kinds[len(lines)] = "better" if is_better else "worse"
            interval = "" if ends is None else f"{ends[0]:.3f} to {ends[1]:.3f}"
            pair = [metric_text(name, record.metrics[name]) for record in (base, row.record)]
            lines.append((metric.label, f"{value:.3f}", *pair, interval))
        if not lines:
            continue
        columns: tuple[str, ...] = ("figure", "ratio", rows[0].label, row.label, "interval")
        if not any(line[-1] for line in lines):
            columns, lines = columns[:-1], [line[:-1] for line in lines]
        tables.append(
            Table(
                caption=f"{row.label} / {rows[0].label}",
                columns=tuple(shorten(column, 32) for column in columns),
                rows=lines,
                numeric=frozenset({1, 2, 3, 4}),
                kinds=kinds,
            )
        )
    return tables


def _runs(rows: Sequence[Row], links: Mapping[int, str]) -> Table:
    lines, kinds = [], {}
    for index, row in enumerate(rows):
        record = row.record
        if record is not None:
            state = f"ok, {validity(record)}" if record.status == "ok" else record.status
            lines.append((row.label, facts.system_name(record), state))
            kinds[index] = status_kind(record)
    return Table(
        columns=("run", "system", "status"),
        rows=lines,
        links=dict(links),
        kinds={place: kind for place, kind in kinds.items() if kind != "good"},
    )


def _values(rows: Sequence[Row], metrics: Sequence[Metric]) -> Table:
    runs = [row.record.metrics for row in rows if row.record]
    lines = [
        (metric.heading, *(metric_number(metric.name, run.get(metric.name)) for run in runs))
        for metric in metrics
    ]
    return Table(
        columns=("figure", *(row.label for row in rows)),
        rows=lines,
        numeric=frozenset(range(1, len(rows) + 1)),
    )


def _settings(rows: Sequence[Row]) -> Section:
    lines = differing_settings(rows)
    if not lines:
        return Section(title="What differs", text=("No setting differs: these are repeats.",))
    table = Table(columns=("setting", *(row.label for row in rows)), rows=lines)
    return Section(title="What differs", tables=(table,))


def _machines(rows: Sequence[Row]) -> Section | None:
    records = [row.record for row in rows if row.record]
    trees = [{**record.environment, "effective": record.effective} for record in records]
    lines = []
    for path in (*MACHINE, "effective.dtype"):
        values = [facts.dig(tree, path) for tree in trees]
        if len({leaf(value) for value in values}) > 1:
            lines.append((path, *(shorten(leaf(value), 40) for value in values)))
    if not lines:
        return None
    table = Table(columns=("machine and code", *(row.label for row in rows)), rows=lines)
    return Section(title="Machines and code that differ", tables=(table,))


def _verdict(rows: Sequence[Row]) -> Verdict:
    bad = [row for row in rows if row.record and row.record.status != "ok"]
    unsure = [row for row in rows if row.record and row.record.valid is not True and row not in bad]
    lines = [f"{row.label}: {row.status}. {error_line(row.record)}" for row in bad if row.record]
    for row in unsure:
        if row.record:
            why = " ".join(row.record.reasons) or "its tokens were not compared with the reference."
            lines.append(f"{row.label}: {validity(row.record)}. {why}")
    if bad:
        return Verdict(
            kind="bad", label=f"{len(bad)} of {len(rows)} runs did not end ok", lines=tuple(lines)
        )
    if unsure:
        return Verdict(
            kind="warn", label="the same work, but not every run is valid", lines=tuple(lines)
        )
    return Verdict(kind="good", label="the same work, all runs ok and valid")


def _cards(rows: Sequence[Row], metrics: Sequence[Metric]) -> list[Card]:
    """Return the ratios of the second run to the first."""
    base, other = rows[0].record, rows[1].record
    cards = []
    for metric in metrics[:8]:
        name = metric.name
        value = ratio(base, other, name) if base and other else None
        if value is None or base is None or other is None:
            continue
        pair = [metric_text(name, record.metrics[name]) for record in (other, base)]
        note = f"{shorten(rows[1].label, 30)} {pair[0]}, {shorten(rows[0].label, 30)} {pair[1]}"
        cards.append(Card(label=metric.label, value=f"{value:.2f}", unit="x", note=note))
    return cards


def _cards_banner(records: Sequence[RunRecord]) -> list[str]:
    cards = sorted({card for card in map(facts.gpu_name, records) if card})
    if len(cards) < 2:
        return []
    return [f"The runs are of different GPUs ({', '.join(cards)}): their ratios are of both"]


def _scenario(record: RunRecord) -> str | None:
    name = facts.dig_text(record.config, "scenario.name")
    return f"scenario {name}" if name else None


def _definitions(metrics: Sequence[Metric]) -> Section:
    rows = [(metric.name, metric.label, metric.definition) for metric in metrics]
    table = Table(columns=("metric", "figure", "definition"), rows=rows, wide=frozenset({2}))
    return Section(title="Definitions", text=CONVENTIONS, tables=(table,) if rows else ())
