"""The points of a sweep as a page and as CSV, with the trials of a search and peers."""

import csv
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, Final

from reports import facts
from reports.compare import (
    Row,
    Run,
    UnlikeError,
    check_alike,
    compared_metrics,
    differing_settings,
    records_of,
    runs_of,
)
from reports.pages.page import (
    Card,
    Command,
    Kind,
    Page,
    Section,
    Table,
    Verdict,
    banners,
    csv_text,
    definitions,
)
from reports.pages.verdict import error_line, judged, noted_state, reasons, status_kind
from reports.record.judging import ONE_RUN_EACH, best_by_model, gain
from reports.record.metrics import Metric, found, metric_number, metric_text
from reports.record.record import RunRecord
from reports.record.text import ABSENT

ALT: Final = (
    ("comparison", "Bars of output rate and TPOT, one row for each point"),
    ("tradeoff", "Scatter of the output rate over the rate of one request and over GPU peak"),
)
SEARCH_NAME: Final = "search.json"
TRIALS_NAME: Final = "trials.csv"
_LEAD: Final = ("trial", "state", "status", "value", "not_kept", "reason", "folder")
"""Columns of the file before those of the settings."""
NATIVE: Final = "native"
MIXED: Final = "The points ran on different GPUs (CARDS): compare ratios, not figures"


def sweep_csv(rows: Sequence[Row], folder: Path) -> str:
    """Return the sweep as CSV: a header and a line for each point, absent values empty."""
    records = records_of(rows)
    settings = differing_settings(records)
    metrics = list(dict.fromkeys(name for record in records for name in record.metrics))
    head = ["point", "folder", "run_id", "name", "status", "valid", "error", "duration_s"]
    lines: list[list[object]] = [[*head, *(f"config.{key}" for key in settings), *metrics]]
    columns = iter(zip(*settings.values(), strict=True)) if settings else repeat(())
    for row in rows:
        lead = [row.place, row.folder.relative_to(folder).as_posix()]
        if not isinstance(row, Run):
            rest = [None] * (1 + len(settings) + len(metrics))
            lines.append([*lead, None, None, row.status, None, row.problem, *rest])
            continue
        record = row.record
        lead += [record.run_id, record.name, record.status]
        found = [judged(record), error_line(record) or None, record.duration_s]
        values = [record.metrics.get(name) for name in metrics]
        lines.append([*lead, *found, *next(columns), *values])
    return csv_text(lines)


def sweep_page(
    title: str,
    rows: Sequence[Row],
    links: Mapping[int, str],
    lines: Sequence[str] = (),
    num_planned: int | None = None,
) -> Page:
    """Return the page of a sweep.

    Args:
        title: the sweep's name.
        rows: the points.
        links: a row's place -> address of that point's own report.
        lines: what a search found.
        num_planned: points of the sweep, also those that never began; None: those of the rows.
    """
    runs, records = runs_of(rows), records_of(rows)
    num_ok = sum(row.status == "ok" for row in rows)
    total = max(num_planned or 0, len(rows))
    metrics = found("sweep", [run.metrics for run in runs])
    sections = (
        Section(
            title="Points", figures=("comparison",), tables=(_points_table(rows, metrics, links),)
        ),
        _problems(rows),
        Section(title="Trade-off", figures=("tradeoff",)),
        _differences(runs),
        definitions(metrics),
    )
    num_valid = num_ok - sum(r.status == "ok" and judged(r) is False for r in records)
    num_partial = sum(row.status == "partial" for row in rows)
    others = Counter(row.status for row in rows if row.status not in {"ok", "partial"})
    kind: Kind = "good" if num_valid == total else "warn" if num_ok or num_partial else "bad"
    label = f"{num_ok} of {total} point{'s'[: total != 1]} ok"
    label += f", {num_ok - num_valid} of them not valid" if num_valid < num_ok else ""
    label += f", {num_partial} partial" if num_partial else ""
    label += "".join(f", {count} {status}" for status, count in others.items())
    label += f", {total - len(rows)} not begun" if total > len(rows) else ""
    return Page(
        title=title,
        subtitle=", ".join(_shared_facts(records)),
        details=_span(records, total),
        banners=banners(records, MIXED),
        cards=tuple(_best_cards(runs)),
        verdict=Verdict(kind=kind, answer=label, lines=tuple(lines)),
        sections=tuple(section for section in sections if section is not None),
        alt=dict(ALT),
    )


def _points_table(
    rows: Sequence[Row], metrics: Sequence[Metric], links: Mapping[int, str]
) -> Table:
    cells, kinds = [], dict[int, Kind]()
    for index, row in enumerate(rows):
        texts = [metric_number(metric.name, row.metrics.get(metric.name)) for metric in metrics]
        record = row.record if isinstance(row, Run) else None
        cells.append((row.whole_title, noted_state(record) if record else row.status, *texts))
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
        text = row.problem
        if isinstance(row, Run):
            text = "; ".join(filter(None, [error_line(row.record), *reasons(row.record)]))
        if text:
            lines.append((row.whole_title, row.status, text))
    if not lines:
        return None
    table = Table(columns=("point", "status", "reason"), rows=lines, wide=frozenset({2}))
    return Section(title="Points with problems", tables=(table,))


def _differences(runs: Sequence[Run]) -> Section | None:
    settings = differing_settings([run.record for run in runs])
    if not settings:
        return None
    columns = [
        [ABSENT if value is None else value for value in values] for values in settings.values()
    ]
    titles = [run.whole_title for run in runs]
    table = Table(columns=("point", *settings), rows=list(zip(titles, *columns, strict=True)))
    return Section(title="Settings that differ", tables=(table,))


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


def _best_cards(runs: Sequence[Run]) -> list[Card]:
    """Return the best point for each metric that has one, a winner only where repeats say so."""
    return [
        Card(
            label=best.title,
            value=metric_number(best.metric.name, best.value),
            unit=best.metric.unit,
            note=f"point {best.label}; {best.against}",
        )
        for best in best_by_model([(run.whole_title, run.record) for run in runs])
    ]


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
    found = (
        "No trial keeps that." if best is None else f"Best measured: trial {best} ({ONE_RUN_EACH})."
    )
    text = f"Looked for: {word} {metric}{kept}. {found}"
    return Section(title="Trials", text=(text,), tables=(_table(trials, metric, best),))


def best_command(folder: Path) -> tuple[Command, ...]:
    """Return the command that runs the best trial of a search's folder; none without one."""
    conf = folder.resolve() / "conf"
    if not (conf / "experiment" / "best.yaml").is_file():
        return ()
    words = ["tightfit", "run", "--config-dir", str(conf), "+experiment=best"]
    return (Command(label="Run the best measured", text=shlex.join(words)),)


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
        why = "best measured" if row["trial"] == best else why
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
    systems: dict[bool, list[Run]] = {True: [], False: []}
    for run in runs_of(rows):
        if run.status == "ok":
            systems[facts.system_name(run.record) == NATIVE].append(run)
    pairs = [
        (native, peer)
        for peer in systems[False]
        if (native := _nearest(systems[True], peer)) is not None
    ]
    if not pairs:
        return None
    metrics = [
        metric
        for metric in compared_metrics([run.metrics for pair in pairs for run in pair])
        if any(gain(metric, peer.metrics, native.metrics) for native, peer in pairs)
    ]
    lines: list[tuple[str, ...]] = []
    kinds: dict[int, Kind] = {}
    for native, peer in pairs:
        ratios = [gain(metric, peer.metrics, native.metrics) for metric in metrics]
        cells = ["" if value is None else f"{value:.2f}" for value in ratios]
        bad = [facts.system_name(r.record) for r in (native, peer) if judged(r.record) is False]
        kinds[len(lines)] = "warn" if bad else "plain"
        validities = f"{' and '.join(bad)} not valid" if bad else "valid"
        names = (f"{native.title} / {peer.title}", facts.system_name(peer.record))
        lines.append((*names, validities, *cells))
    table = Table(
        columns=("native / peer", "peer", "figures", *(metric.label for metric in metrics)),
        rows=lines,
        numeric=frozenset(range(3, len(metrics) + 3)),
        kinds=kinds,
    )
    text = "How many times as good this project's engine is: above 1 is better in every column."
    return Section(title="Native against peers", text=(text,), tables=(table,))


def _nearest(natives: Sequence[Run], peer: Run) -> Run | None:
    """Return the native run of the same work with the fewest settings that differ."""
    alike = [run for run in natives if _is_alike(run, peer)]
    return min(
        alike, key=lambda run: len(differing_settings([run.record, peer.record])), default=None
    )


def _is_alike(native: Run, peer: Run) -> bool:
    try:
        check_alike([native, peer])
    except UnlikeError:
        return False
    return True
