"""Records of the same work side by side: what differs, and ratios to the first of them."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from reports import facts
from reports.load import Point
from reports.page import Card, Kind, Page, Section, Table, Verdict
from reports.record.metrics import (
    CONVENTIONS,
    Metric,
    definition,
    found,
    metric_number,
    metric_text,
)
from reports.record.record import RecordError, RunRecord
from reports.record.text import ABSENT, flatten, leaf, shorten
from reports.sweep import Row
from reports.verdict import error_line, status_kind, validity
from reports.view import banners

WORK: Final = ("scenario.", "model.")
"""Settings that say what was to be done."""
NOT_WORK: Final = (
    "scenario.name",
    "scenario.correctness.",
    "model.source.",
    "model.path",
    "model.name",
)
"""Of these, settings that change nothing that is timed; the sizes say which model it was."""
LABEL_CHARS: Final = 48
NO_RATIO: Final = "No figure is of the first run and of another one: there is nothing to divide."
IDLE: Final = ("tracking.", "scenario.correctness.")
IDLE_ROOTS: Final = frozenset(
    {"timeout_s", "silence_s", "fail_fast", "monotone_stop", "rerun", "mode"}
)
"""Settings that no comparison needs to name."""
MACHINE: Final = ("gpu.name", "driver", "torch", "cpu.name", "host", "git.sha")
ALT: Final = (
    ("ratios", "Ratio of each figure of the other runs to the first run"),
    ("comparison", "Bars of output rate and TPOT, one row for each run"),
)


class UnlikeError(RecordError):
    """Records that did not do the same work; the message says what differs."""


def versus_rows(points: Sequence[Point]) -> list[Row]:
    """Return a row for each run, labelled by its name, and by its run's id where labels repeat.

    Of names that list settings, those that all runs have are left out; long ones are shortened.
    """
    names = [point.record.name if point.record else point.folder.name for point in points]
    names = [shorten(name, LABEL_CHARS) for name in _distinct_parts(names)]
    rows = []
    for place, (point, name) in enumerate(zip(points, names, strict=True)):
        run_id = point.record.run_id if point.record else point.folder.name
        label = name if names.count(name) == 1 else f"{name} {run_id}"
        rows.append(Row(place=place, label=label, point=point))
    return rows


def _distinct_parts(names: Sequence[str]) -> list[str]:
    """Return names such as a=1,b=2 without the settings that all have, where something is left."""
    parts = [name.split(",") for name in names]
    shared = set(parts[0]).intersection(*parts[1:])
    if not all("=" in part for part in shared):  # a comma within a value
        return list(names)
    left = [[part for part in own if part not in shared] for own in parts]
    return [",".join(own) for own in left] if all(left) else list(names)


def check_distinct(rows: Sequence[Row]) -> None:
    """Check that no run is there twice; a sweep that took one over has the same run.

    Raises:
        UnlikeError: naming the folders.
    """
    seen: dict[str, Path] = {}
    for row in rows:
        run_id = row.record.run_id if row.record else ""
        if run_id in seen:
            raise UnlikeError(
                f"expected runs that differ, got run {run_id} twice: {seen[run_id]} and "
                f"{row.point.folder}. Give other runs; rerun=all measures a point again."
            )
        seen[run_id] = row.point.folder


def check_alike(rows: Sequence[Row]) -> None:
    """Check that all records did the same work.

    Raises:
        UnlikeError: naming what differs, with the values.
    """
    records = [row.record for row in rows if row.record]
    differing = []
    first = _work(records[0])
    for row, record in zip(rows[1:], records[1:], strict=True):
        other = _work(record)
        for key in dict.fromkeys([*first, *other]):
            if first.get(key) != other.get(key):
                was, now = (shorten(leaf(work.get(key)), 60) for work in (first, other))
                differing.append(f"{key}: {was} in {rows[0].label}, {now} in {row.label}")
    if len({facts.is_emulated(record) for record in records}) > 1:
        differing.append("a GPU and its emulation on a CPU")
    if differing:
        shown = "; ".join(differing[:8])
        more = f"; and {len(differing) - 8} more" if len(differing) > 8 else ""
        raise UnlikeError(
            f"expected runs of the same work, got runs that differ in {shown}{more}. Run them with "
            "equal scenarios and models, or look at each report by itself."
        )


def _work(record: RunRecord) -> dict[str, object]:
    flat = dict(flatten(record.config))
    work = {
        key: value
        for key, value in flat.items()
        if key.startswith(WORK) and not key.startswith(NOT_WORK)
    }
    if not any(key.startswith("model.spec.") for key in work):
        work["model.name"] = flat.get("model.name")
    # A file is what it holds: another one may lie at the same path, and the same one elsewhere.
    for name, digest in (record.effective.get("inputs") or {}).items():
        work[f"scenario.{name}"] = f"content {digest}"[:20]
    return work


def ratio(base: RunRecord, other: RunRecord, metric: str) -> float | None:
    """Return a metric of `other` over that of `base`, None where one is absent or below 0."""
    below, above = base.metrics.get(metric), other.metrics.get(metric)
    if below is None or above is None:
        return None
    return above / below if below > 0 <= above else None


def ratio_interval(base: RunRecord, other: RunRecord, metric: str) -> tuple[float, float] | None:
    """Return the least and the largest ratio of two means within their 95 % intervals.

    It is wider than the 95 % interval of the ratio. None where a run has no repeats.
    """
    ends = [
        record.metrics.get(f"{metric.removesuffix('/mean')}/{end}")
        for record in (base, other)
        for end in ("ci95_low", "ci95_high")
    ]
    known = [end for end in ends if end is not None and end > 0]
    if len(known) < len(ends):
        return None
    base_low, base_high, low, high = known
    return low / base_high, high / base_low


def compared_metrics(records: Sequence[RunRecord]) -> list[Metric]:
    """Return the metrics that at least two records have, of samples their median or mean."""
    runs = [record.metrics for record in records]
    least = min(2, len(runs))
    metrics = found("compare", runs)
    return [m for m in metrics if sum(run.get(m.name) is not None for run in runs) >= least]


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


def differing_settings(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return a line for each setting that differs and matters: its key and its value in each."""
    flat = [dict(flatten(row.record.config)) for row in rows if row.record]
    keys = [
        key
        for key in dict.fromkeys(key for config in flat for key in config)
        if not key.startswith(IDLE) and key not in IDLE_ROOTS
    ]
    return [
        (key, *(shorten(leaf(config[key]), 40) if key in config else ABSENT for config in flat))
        for key in keys
        if len({leaf(config.get(key)) for config in flat}) > 1
    ]


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
