"""A comparison of two compositions as a page: ratios first, then sides, requests and runs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from reports import facts
from reports.figures.comparisons import ratio_rows
from reports.pages.page import (
    Card,
    Kind,
    Page,
    Section,
    Table,
    Verdict,
    banners,
    commands,
    details,
    run_again,
    tree_table,
)
from reports.pages.verdict import validity, verdict
from reports.record.judging import answer_of, is_resolved, main_metrics
from reports.record.metrics import metric_number, unit
from reports.record.record import RunRecord
from reports.record.text import ABSENT, number, shorten

CONVENTIONS: Final = (
    "Runs of the two sides alternate, in the order A B, B A, A B, ..., each in fresh processes, so"
    " that a slow drift of the machine affects both.",
    "b / a is the geometric mean of the ratios of the pairs; its interval is Student's t at 95 %"
    " over their logarithms.",
    "noise is how far the mean of as many pairs could be from 1 by chance, as runs of side a"
    " against itself show: their root mean square, times Student's t. Below it, or if the interval"
    " includes 1, no difference is resolved.",
    "total time is the load and all timed requests of one run, without checks and warm-ups; of"
    " repeated parts, the mean of the repeats counts.",
)
ENDS: Final = ("least", "median", "most")


def is_ab(record: RunRecord) -> bool:
    """Return whether a record is that of a comparison."""
    return isinstance(record.samples.get("ab"), Mapping)


def ab_page(record: RunRecord, links: Mapping[str, str]) -> Page:
    """Return the page of a comparison.

    Args:
        record: of the comparison.
        links: a run's folder -> address of its own report.
    """
    sample = record.samples["ab"]
    sections = (
        _ratios(sample),
        _sides(sample),
        _requests(sample),
        _runs(sample, links),
        Section(title="Configuration", tables=(tree_table(record.config, "Every setting"),)),
        Section(title="Environment", tables=(tree_table(record.environment, "Machine"),)),
        Section(title="Definitions", text=CONVENTIONS),
    )
    parts = (facts.model_name(record), facts.budget_title(record))
    return Page(
        title=record.name,
        subtitle=", ".join(part for part in parts if part),
        details=details(record, "comparison"),
        banners=banners([record]),
        cards=tuple(_cards(record)),
        verdict=_verdict(record),
        commands=commands(record, run_again(record)),
        sections=tuple(section for section in sections if section is not None),
        alt={"ratios": "Side b over side a of each quantity, with intervals and noise"},
    )


def _verdict(record: RunRecord) -> Verdict:
    """Return what the ratios say; green only where one of them differs."""
    found, rows = verdict(record), record.samples["ab"].get("rows") or []
    if not rows:
        return found
    settled = any(is_resolved(row) for row in rows if row.get("ratio") is not None)
    kind: Kind = "grey" if found.kind == "good" and not settled else found.kind
    return replace(found, kind=kind, answer=answer_of(rows))


def _cards(record: RunRecord) -> list[Card]:
    rows = {row["metric"]: row for row in ratio_rows(record)}
    found = ((metric, rows[metric.name]) for metric in main_metrics() if metric.name in rows)
    return [
        Card(
            label=metric.title,
            value=f"{row['ratio']:.3f}" if is_resolved(row) else _span(row),
            unit="b / a",
            note=f"{_pair(metric.name, row)}; {row['verdict']}",
            kind=_kind(row),
        )
        for metric, row in found
    ]


def _span(row: Mapping[str, Any]) -> str:
    """The interval of a ratio, what a ratio that is not resolved has to say."""
    return f"{row['ratio']:.3f}" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"


def _kind(row: Mapping[str, Any]) -> Kind:
    """Return whether side b is better or worse; grey where no difference is resolved."""
    better = row.get("better")
    if not is_resolved(row) or better not in {"higher", "lower"}:
        return "grey"
    return "better" if (row["ratio"] > 1) == (better == "higher") else "worse"


def _pair(metric: str, row: Mapping[str, Any]) -> str:
    first, second = (metric_number(metric, row[side]) for side in ("a", "b"))
    return f"{first} against {second} {unit(metric)}".rstrip()


def _ratios(sample: Mapping[str, Any]) -> Section | None:
    rows: Sequence[Mapping[str, Any]] = sample.get("rows") or []
    if not rows:
        return None
    cells = []
    for row in rows:
        metric = row["metric"]
        span = ABSENT if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"
        noise = ABSENT if row["resolution"] is None else f"{number(100 * row['resolution'])} %"
        label = f"{row['label']} ({unit(metric)})"
        values = (metric_number(metric, row["a"]), metric_number(metric, row["b"]))
        ratio = ABSENT if row["ratio"] is None else f"{row['ratio']:.3f}"
        cells.append((label, ratio, row["verdict"], *values, span, noise, str(row["num_pairs"])))
    kinds = {place: _kind(row) for place, row in enumerate(rows) if row["ratio"] is not None}
    # What a narrow screen shows without scrolling comes first.
    table = Table(
        columns=("quantity", "b / a", "says", "a", "b", "95 % interval", "noise", "pairs"),
        rows=cells,
        numeric=frozenset({1, 3, 4, 5, 6, 7}),
        wide=frozenset({0}),
        kinds=kinds,
    )
    return Section(title="Ratios", figures=("ratios",), tables=(table,))


def _sides(sample: Mapping[str, Any]) -> Section:
    rows = []
    for side in ("a", "b"):
        found = sample[side]
        error = found.get("error") or {}
        rows.append(
            (
                side,
                " ".join(found["overrides"]) or "as is",
                found["status"],
                str(found["num_runs"]),
                shorten(str(error.get("message", "")), 400) or ABSENT,
            )
        )
    table = Table(
        columns=("side", "overrides", "status", "runs", "error"), rows=rows, wide=frozenset({1, 4})
    )
    only = [side for side in ("a", "b") if not sample.get("rows") and sample[side]["first_run"]]
    tables = [table]
    for side in only:
        first = sample[side]["first_run"]
        tables.append(
            Table(
                columns=("quantity", "value", "unit"),
                rows=[(name, metric_number(name, first[name]), unit(name)) for name in first],
                caption=f"First run of side {side}",
                numeric=frozenset({1}),
            )
        )
    return Section(title="Sides", tables=tuple(tables))


def _requests(sample: Mapping[str, Any]) -> Section | None:
    tables = []
    spread = sample.get("per_request") or []
    if spread:
        tables.append(
            Table(
                columns=("b / a of the same request", "requests", "least", "median", "most"),
                rows=[
                    (row["quantity"], str(row["num"]), *(f"{row[key]:.3f}" for key in ENDS))
                    for row in spread
                ],
                numeric=frozenset({1, 2, 3, 4}),
            )
        )
    tokens = sample.get("tokens") or {}
    if tokens:
        tables.append(
            Table(
                columns=("part", "requests compared", "equal tokens", "first unequal"),
                rows=[
                    (
                        part,
                        str(found["num_compared"]),
                        str(found["num_equal"]),
                        found["first_unequal"] or ABSENT,
                    )
                    for part, found in tokens.items()
                ],
                numeric=frozenset({1, 2}),
            )
        )
    return Section(title="Requests, one by one", tables=tuple(tables)) if tables else None


def _runs(sample: Mapping[str, Any], links: Mapping[str, str]) -> Section:
    runs: Sequence[Mapping[str, Any]] = sample.get("runs") or []
    have = {name for run in runs for name, value in run["metrics"].items() if value is not None}
    metrics = [metric for metric in main_metrics() if metric.name in have]
    rows = []
    for run in runs:
        values = (metric_number(m.name, run["metrics"].get(m.name)) for m in metrics)
        rows.append((run["folder"], run["side"], run["status"], validity(run["valid"]), *values))
    table = Table(
        columns=("run", "side", "status", "figures", *(metric.heading for metric in metrics)),
        rows=rows,
        numeric=frozenset(range(4, 4 + len(metrics))),
        links={i: links[run["folder"]] for i, run in enumerate(runs) if run["folder"] in links},
        kinds={i: "bad" for i, run in enumerate(runs) if run["status"] != "ok"},
    )
    return Section(title="Runs", tables=(table,))
