"""Runs of the same work as a page: the best, how all stand against the first, what differs."""

from collections.abc import Mapping, Sequence
from typing import Final

from reports import facts
from reports.compare import (
    Run,
    comparable_metrics,
    differing_settings,
    is_idle,
    parts_of,
    unequal_tokens,
    unshared_parts,
    weights_hash,
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
from reports.pages.verdict import error_line, judged, reasons, state, status_kind, validity
from reports.record.judging import best_of, gain, gain_interval, ratio
from reports.record.metrics import Metric, definition, metric_number, metric_parts, metric_text
from reports.record.record import MEASURED, RunRecord
from reports.record.text import ABSENT, leaf, shorten

GAINS: Final = (
    "Above 1 is better in every row. Rates are divided by the base's; for times and sizes, the"
    " base's is divided by the run's. An interval covers every ratio of two means within their 95 %"
    " intervals over repeats. Green is better, red is worse. A grey ratio is not conclusive: it"
    " has no interval because a run was not repeated, its interval includes 1, or it is within"
    " 0.5 % of 1."
)
LEAST: Final = 0.005
"""Share by which a figure has to differ to be green or red."""
MOST_FIGURES: Final = 5
"""Figures on a card."""
NO_RATIO: Final = "No figure is of the first run and of another one: there is nothing to divide."
MIXED: Final = "The runs are of different GPUs (CARDS): their ratios are of both"
COMMITS: Final = "The runs are of different commits ({}), which may measure a figure in other ways."
MACHINE: Final = ("gpu.name", "driver", "torch", "cpu.name", "host", "git.sha", "effective.dtype")
ALT: Final = (
    ("ratios", "How many times as good as the first run the others are, by figure"),
    ("comparison", "Bars of output rate and TPOT, one row for each run"),
)


def compare_page(runs: Sequence[Run], links: Mapping[int, str]) -> Page:
    """Return the page of a comparison; the first run is what the others are held against.

    Args:
        runs: of the same work (check_alike).
        links: a run's place -> address of its own report.
    """
    base, records = runs[0], [run.record for run in runs]
    metrics = comparable_metrics(runs)
    tables = tuple(table for run in runs[1:] if (table := _gain_table(base, run, metrics)))
    sections = (
        Section(
            title=f"Times as good as {base.label}",
            text=(GAINS if tables else NO_RATIO,),
            figures=("ratios",) if tables else (),
            tables=tables,
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
        title=" against ".join(shorten(run.label, 60) for run in runs),
        subtitle=", ".join(filter(None, [facts.model_name(records[0]), _scenario(records[0])])),
        details=f"{len(runs)} runs of the same work; {base.label} is the base",
        banners=(*banners(records, MIXED), *_commits(records)),
        cards=tuple(_card(base, run, metrics) for run in runs) if metrics else (),
        verdict=_verdict(runs, metrics),
        sections=tuple(section for section in sections if section is not None),
        alt=dict(ALT),
    )


def _commits(records: Sequence[RunRecord]) -> list[str]:
    """Say so where not all runs are of one commit."""
    shas = dict.fromkeys(facts.dig_text(each.environment, "git.sha") for each in records)
    names = ["unknown" if sha is None else sha[:10] for sha in shas]
    return [COMMITS.format(", ".join(names))] if len(names) > 1 else []


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


def _gain_table(base: Run, run: Run, metrics: Sequence[Metric]) -> Table | None:
    lines: list[tuple[str, ...]] = []
    kinds: dict[int, Kind] = {}
    for metric in metrics:
        value = gain(metric, base.metrics, run.metrics)
        if value is None:
            continue
        kind = _kind(metric, base, run)
        if kind != "plain":
            kinds[len(lines)] = kind
        ends = gain_interval(metric, base.metrics, run.metrics)
        pair = [metric_text(metric.name, one.metrics[metric.name]) for one in (base, run)]
        lines.append((metric.label, f"{value:.3f}", *pair, _span(ends)))
    if not lines:
        return None
    columns: tuple[str, ...] = ("figure", "times as good", base.label, run.label, "interval")
    if not any(line[-1] for line in lines):
        columns, lines = columns[:-1], [line[:-1] for line in lines]
    return Table(
        caption=f"{run.label}, compared with {base.label}",
        columns=tuple(shorten(column, 32) for column in columns),
        rows=lines,
        numeric=frozenset({1, 2, 3, 4}),
        kinds=kinds,
    )


def _kind(metric: Metric, base: Run, run: Run) -> Kind:
    """Return whether a run is better or worse than the base; grey where that is not settled."""
    value = gain(metric, base.metrics, run.metrics)
    ends = gain_interval(metric, base.metrics, run.metrics)
    if value is None:
        return "plain"
    if ends is None or ends[0] <= 1 <= ends[1] or abs(value - 1) < LEAST:
        return "grey"
    return "better" if value > 1 else "worse"


def _span(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else f"{ends[0]:.3f} to {ends[1]:.3f}"


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
        (key, *(ABSENT if value is None else value for value in values))
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


def _verdict(runs: Sequence[Run], metrics: Sequence[Metric]) -> Verdict:
    bad = [run for run in runs if run.status != "ok"]
    unsure = [run for run in runs if judged(run.record) is not True and run not in bad]
    lines = [f"{run.label}: {run.status}. {error_line(run.record)}" for run in bad]
    for run in unsure:
        why = " ".join(reasons(run.record)) or "its tokens were not compared with the reference."
        lines.append(f"{run.label}: {validity(judged(run.record))}. {why}")
    unlike = _unlike(runs)
    kind: Kind = "bad" if bad else "warn" if unsure or unlike else "good"
    label = "the same work, all runs ok and valid"
    if bad:
        label = f"{len(bad)} of {len(runs)} runs did not end ok"
    elif unsure:
        label = "the same work, but not every run is valid"
    elif unlike:
        label = "the same requests, but not the same answers or weights"
    found = winner(runs, metrics)
    return Verdict(
        kind="grey" if kind == "good" and found.startswith("No winner") else kind,
        answer=found,
        label=label,
        lines=(*lines, *unlike, *_left_out(runs)),
    )


def winner(runs: Sequence[Run], metrics: Sequence[Metric]) -> str:
    """Return which run is best in the first metric of those that count, or that none is.

    A run is best where the interval of its ratio to the next one lies above 1; without repeats
    there is no interval, and so no winner.
    """
    counted = [run for run in runs if run.status in MEASURED and judged(run.record) is not False]
    for metric in metrics:
        having = [run for run in counted if (run.metrics.get(metric.name) or 0) > 0]
        if len(having) >= 2:
            break
    else:
        return "No winner: no two runs have a figure in common that counts"
    best = best_of([(run.label, run.metrics) for run in having], metric)
    if best is None:
        return "No winner: no two runs have a figure in common that counts"
    what = f"{best.metric.label} {best.text}"
    if best.is_settled:
        return f"{best.label} is best: {what}, {best.against}"
    why = "No winner without repeats" if best.interval is None else "No winner"
    return f"{why}: {best.label} has the best {what}, {best.against}"


def _unlike(runs: Sequence[Run]) -> list[str]:
    """Return whose tokens or weights differ from those of the first run."""
    base, lines = runs[0], []
    for run in runs[1:]:
        for part, (unequal, total) in unequal_tokens(base.record, run.record).items():
            lines.append(
                f"{run.label}: other tokens than {base.label} in {unequal} of {total} requests of "
                f"{part} (tokens_hash)."
            )
        was, now = weights_hash(base.record), weights_hash(run.record)
        if was is not None and now is not None and was != now:
            lines.append(
                f"{run.label}: other weights than {base.label} (SHA-256 {now[:12]}..., "
                f"not {was[:12]}...)."
            )
    return lines


def _left_out(runs: Sequence[Run]) -> list[str]:
    """Say which parts are not compared, because some of the runs were not to measure them."""
    return [
        f"Not compared: {part}, which only "
        f"{', '.join(run.label for run in runs if part in parts_of(run.record))} measured."
        for part in unshared_parts([run.record for run in runs])
    ]


def _card(base: Run, run: Run, metrics: Sequence[Metric]) -> Card:
    """Return a run's first figure, and how it stands against the base in the others."""
    first, *others = metrics[:MOST_FIGURES]
    value, unit = metric_parts(first.name, run.metrics.get(first.name))
    notes = [] if run is not base else ["the base"]
    if run is not base:
        times = gain(first, base.metrics, run.metrics)
        span = _span(gain_interval(first, base.metrics, run.metrics))
        notes += [f"{times:.2f} times as good" + (f" ({span})" if span else "")] if times else []
    for metric in others:
        times = gain(metric, base.metrics, run.metrics)
        if run is base or times is None:
            notes.append(f"{metric.label} {metric_text(metric.name, run.metrics.get(metric.name))}")
        else:
            notes.append(f"{metric.label} {times:.2f} times")
    return Card(
        label=f"{shorten(run.label, 60)}: {first.label}",
        value=value,
        unit=unit,
        note="; ".join(notes),
        tip=first.definition,
        kind="plain" if run is base else _kind(first, base, run),
    )


def _scenario(record: RunRecord) -> str | None:
    name = facts.dig_text(record.config, "scenario.name")
    return f"scenario {name}" if name else None
