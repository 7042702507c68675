"""The points of a sweep as a page and as CSV, with the trials of a search and peers."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from reports import facts
from reports.compare import Row, UnlikeError, check_alike, compared_metrics, differing_keys, ratio
from reports.pages.page import Card, Kind, Page, Section, Table, Verdict
from reports.pages.run import banners
from reports.pages.verdict import error_line, status_kind, validity
from reports.record.metrics import CONVENTIONS, Metric, found, metric_number, metric_text
from reports.record.record import RunRecord
from reports.record.text import ABSENT, flatten, leaf, shorten

ALT: Final = (
    ("comparison", "Bars of output rate and TPOT, one row for each point"),
    ("tradeoff", "Scatter of the output rate over the rate of one request and over GPU peak"),
)
SEARCH_NAME: Final = "search.json"
TRIALS_NAME: Final = "trials.csv"
_LEAD: Final = ("trial", "state", "status", "value", "not_kept", "reason", "folder")
"""Columns of the file before those of the settings."""
NATIVE = "native"


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


def peers_section(rows: Sequence[Row]) -> Section | None:
    """Return ratios of a native point to each peer's point, None without peers.

    The native point is of the same work, and of these the one whose settings differ least.
    """
    done = [row for row in rows if row.record and row.record.status == "ok"]
    natives = [row for row in done if row.record and facts.system_name(row.record) == NATIVE]
    pairs = [
        (native, row)
        for row in done
        if row.record
        and facts.system_name(row.record) != NATIVE
        and (native := _nearest(natives, row)) is not None
    ]
    if not pairs:
        return None
    records = [row.record for pair in pairs for row in pair if row.record]
    metrics = [
        metric
        for metric in compared_metrics(records)
        if any(_ratio(native, peer, metric.name) is not None for native, peer in pairs)
    ]
    lines: list[tuple[str, ...]] = []
    kinds: dict[int, Kind] = {}
    for native, peer in pairs:
        values = [_ratio(native, peer, metric.name) for metric in metrics]
        cells = ["" if value is None else f"{value:.2f}" for value in values]
        systems = [facts.system_name(row.record) for row in (native, peer) if row.record]
        bad = [
            system
            for system, row in zip(systems, (native, peer), strict=True)
            if row.record and row.record.valid is False
        ]
        state = f"{' and '.join(bad)} not valid" if bad else "valid"
        kinds[len(lines)] = "warn" if bad else "plain"
        lines.append((f"{native.title} / {peer.title}", systems[1], state, *cells))
    table = Table(
        columns=("native / peer", "peer", "figures", *(metric.label for metric in metrics)),
        rows=lines,
        numeric=frozenset(range(3, len(metrics) + 3)),
        kinds=kinds,
    )
    text = (
        "Above 1 is more of the figure in this project's engine: better for a rate, worse for a"
        " time or a size."
    )
    return Section(title="Native against peers", text=(text,), tables=(table,))


def _ratio(native: Row, peer: Row, metric: str) -> float | None:
    if native.record is None or peer.record is None:
        return None
    return ratio(peer.record, native.record, metric)


def _nearest(natives: Sequence[Row], peer: Row) -> Row | None:
    """Return the native row of the same work with the fewest settings that differ."""
    alike = [row for row in natives if _is_alike(row, peer)]
    return min(alike, key=lambda row: _distance(row.record, peer.record), default=None)


def _is_alike(native: Row, peer: Row) -> bool:
    try:
        check_alike([native, peer])
    except UnlikeError:
        return False
    return True


def _distance(first: RunRecord | None, second: RunRecord | None) -> int:
    flat = [
        {key: leaf(value) for key, value in flatten(record.config)} if record else {}
        for record in (first, second)
    ]
    return sum(flat[0].get(key) != flat[1].get(key) for key in flat[0] | flat[1])
