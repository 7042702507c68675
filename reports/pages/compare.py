"""Runs of the same work as a page: ratios to the first, figures, what differs."""

from collections.abc import Mapping, Sequence
from typing import Final

from reports import facts
from reports.compare import (
    Run,
    compared_metrics,
    differing_settings,
    is_idle,
    ratio,
    ratio_interval,
)
from reports.pages.page import (
    Card,
    Kind,
    Page,
    Section,
    Table,
    Verdict,
    banners,
    csv_text,
    definitions,
)
from reports.pages.verdict import error_line, state, status_kind, validity
from reports.record.metrics import Metric, definition, metric_number, metric_text
from reports.record.record import RunRecord
from reports.record.text import ABSENT, leaf, shorten

NO_RATIO: Final = "No figure is of the first run and of another one: there is nothing to divide."
MIXED: Final = "The runs are of different GPUs (CARDS): their ratios are of both"
MACHINE: Final = ("gpu.name", "driver", "torch", "cpu.name", "host", "git.sha", "effective.dtype")
ALT: Final = (
    ("ratios", "Ratio of each figure of the other runs to the first run"),
    ("comparison", "Bars of output rate and TPOT, one row for each run"),
)


def compare_page(runs: Sequence[Run], links: Mapping[int, str]) -> Page:
    """Return the page of a comparison; the first run is what the others are held against.

    Args:
        runs: of the same work (check_alike).
        links: a run's place -> address of its own report.
    """
    base, records = runs[0], [run.record for run in runs]
    metrics = compared_metrics([run.metrics for run in runs])
    ratios = tuple(table for run in runs[1:] if (table := _ratio_table(base, run, metrics)))
    text = (
        "Above 1 is more of the figure; green says that it is better, red worse. An interval holds"
        " every ratio of two means within their 95 % intervals over repeats."
    )
    sections = (
        Section(
            title=f"Ratios to {base.label}",
            text=(text if ratios else NO_RATIO,),
            figures=("ratios",) if ratios else (),
            tables=ratios,
        ),
        Section(
            title="Figures",
            figures=("comparison",) if metrics else (),
            tables=(_states(runs, links), *([_values(runs, metrics)] if metrics else [])),
        ),
        _settings(runs),
        _machines(runs),
        definitions(metrics),
    )
    return Page(
        title=" against ".join(shorten(run.label, 60) for run in runs[:3]),
        subtitle=", ".join(filter(None, [facts.model_name(records[0]), _scenario(records[0])])),
        details=f"{len(runs)} runs of the same work; {base.label} is the base",
        banners=banners(records, MIXED),
        cards=tuple(_cards(base, runs[1], metrics)),
        verdict=_verdict(runs),
        sections=tuple(section for section in sections if section is not None),
        alt=dict(ALT),
    )


def compare_csv(runs: Sequence[Run]) -> str:
    """Return every metric with the value of each run and its ratio to the first, as CSV."""
    base = runs[0]
    others = [f"{run.label} / {base.label}" for run in runs[1:]]
    rows: list[tuple[object, ...]] = [
        ("metric", *(run.label for run in runs), *others, "definition")
    ]
    for name in dict.fromkeys(name for run in runs for name in run.metrics):
        values = [run.metrics.get(name) for run in runs]
        ratios = [ratio(base.metrics, run.metrics, name) for run in runs[1:]]
        rows.append((name, *values, *ratios, definition(name)))
    return csv_text(rows)


def _ratio_table(base: Run, run: Run, metrics: Sequence[Metric]) -> Table | None:
    lines: list[tuple[str, ...]] = []
    kinds: dict[int, Kind] = {}
    for metric in metrics:
        name = metric.name
        value = ratio(base.metrics, run.metrics, name)
        if value is None:
            continue
        ends = ratio_interval(base.metrics, run.metrics, name)
        is_settled = ends is None or not ends[0] <= 1 <= ends[1]
        if is_settled and abs(value - 1) >= 0.005:
            is_better = (value > 1) == (metric.better == "higher")
            kinds[len(lines)] = "better" if is_better else "worse"
        interval = "" if ends is None else f"{ends[0]:.3f} to {ends[1]:.3f}"
        pair = [metric_text(name, one.metrics[name]) for one in (base, run)]
        lines.append((metric.label, f"{value:.3f}", *pair, interval))
    if not lines:
        return None
    columns: tuple[str, ...] = ("figure", "ratio", base.label, run.label, "interval")
    if not any(line[-1] for line in lines):
        columns, lines = columns[:-1], [line[:-1] for line in lines]
    return Table(
        caption=f"{run.label} / {base.label}",
        columns=tuple(shorten(column, 32) for column in columns),
        rows=lines,
        numeric=frozenset({1, 2, 3, 4}),
        kinds=kinds,
    )


def _states(runs: Sequence[Run], links: Mapping[int, str]) -> Table:
    kinds = {place: status_kind(run.record) for place, run in enumerate(runs)}
    return Table(
        columns=("run", "system", "status"),
        rows=[(run.label, facts.system_name(run.record), state(run.record)) for run in runs],
        links=dict(links),
        kinds={place: kind for place, kind in kinds.items() if kind != "good"},
    )


def _values(runs: Sequence[Run], metrics: Sequence[Metric]) -> Table:
    lines = [
        (
            metric.heading,
            *(metric_number(metric.name, run.metrics.get(metric.name)) for run in runs),
        )
        for metric in metrics
    ]
    return Table(
        columns=("figure", *(run.label for run in runs)),
        rows=lines,
        numeric=frozenset(range(1, len(runs) + 1)),
    )


def _settings(runs: Sequence[Run]) -> Section:
    lines = [
        (key, *(ABSENT if value is None else shorten(value, 40) for value in values))
        for key, values in differing_settings([run.record for run in runs]).items()
        if not is_idle(key)
    ]
    if not lines:
        return Section(title="What differs", text=("No setting differs: these are repeats.",))
    table = Table(columns=("setting", *(run.label for run in runs)), rows=lines)
    return Section(title="What differs", tables=(table,))


def _machines(runs: Sequence[Run]) -> Section | None:
    trees = [{**run.record.environment, "effective": run.record.effective} for run in runs]
    found = {path: [leaf(facts.dig(tree, path)) for tree in trees] for path in MACHINE}
    lines = [
        (path, *(shorten(value, 40) for value in values))
        for path, values in found.items()
        if len(set(values)) > 1
    ]
    if not lines:
        return None
    table = Table(columns=("machine and code", *(run.label for run in runs)), rows=lines)
    return Section(title="Machines and code that differ", tables=(table,))


def _verdict(runs: Sequence[Run]) -> Verdict:
    bad = [run for run in runs if run.status != "ok"]
    unsure = [run for run in runs if run.record.valid is not True and run not in bad]
    lines = [f"{run.label}: {run.status}. {error_line(run.record)}" for run in bad]
    for run in unsure:
        why = " ".join(run.record.reasons) or "its tokens were not compared with the reference."
        lines.append(f"{run.label}: {validity(run.record.valid)}. {why}")
    kind: Kind = "bad" if bad else "warn" if unsure else "good"
    label = {
        "bad": f"{len(bad)} of {len(runs)} runs did not end ok",
        "warn": "the same work, but not every run is valid",
        "good": "the same work, all runs ok and valid",
    }[kind]
    return Verdict(kind=kind, answer=label, lines=tuple(lines))


def _cards(base: Run, other: Run, metrics: Sequence[Metric]) -> list[Card]:
    """Return the ratios of the second run to the first."""
    cards = []
    for metric in metrics[:8]:
        value = ratio(base.metrics, other.metrics, metric.name)
        if value is not None:
            pair = [
                f"{shorten(run.label, 30)} {metric_text(metric.name, run.metrics[metric.name])}"
                for run in (other, base)
            ]
            note = ", ".join(pair)
            cards.append(Card(label=metric.label, value=f"{value:.2f}", unit="x", note=note))
    return cards


def _scenario(record: RunRecord) -> str | None:
    name = facts.dig_text(record.config, "scenario.name")
    return f"scenario {name}" if name else None
