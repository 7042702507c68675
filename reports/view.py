"""One record as a page: which numbers, tables and figures it shows, in which order."""

from collections.abc import Iterable, Mapping
from typing import Final

from reports import facts
from reports.asked import asked_section, failed_section
from reports.figures import phase_names
from reports.kv_figure import kv_section
from reports.memory_view import memory_section
from reports.page import Card, Page, Section, Table
from reports.predicted import predicted_section
from reports.record.metrics import (
    CONVENTIONS,
    STATISTIC_DEFINITIONS,
    Metric,
    base_name,
    found,
    metric_parts,
    of_samples,
)
from reports.record.record import SAMPLE_FLOORS, RunRecord
from reports.record.text import GIB, duration, gib, label_of, leaf, number, seconds
from reports.roofline import roofline_section
from reports.tables import metric_table, named_table, statistics_table, tree_table, value_tables
from reports.time_figures import time_section
from reports.timeline_figure import timeline_section
from reports.verdict import verdict

ALT: Final = (
    ("memory", "Stacked bars of the planned GPU and host memory against their limits"),
    ("latency", "Cumulative distribution of each latency"),
    ("throughput", "Token rates of prefill, decode and output"),
    ("load", "Stacked bar of the load phases for each start"),
    ("memory_time", "GPU and host memory over the time of the run, with the budget as a line"),
    ("activity", "Use of the GPU, of its link and of power over the time of the run"),
    ("timeline", "One line for each request: waiting, first token and further tokens"),
    ("roofline", "Decode rate over bytes a token below the roofs of link and GPU memory"),
    ("kv", "What each tier of the KV cache held over time, and what crossed the link"),
)


def run_page(record: RunRecord) -> Page:
    """Return the page of one record; figures that have no data are named and simply not drawn."""
    sections = (
        asked_section(record),
        failed_section(record),
        memory_section(record),
        time_section(record),
        _latency(record),
        timeline_section(record),
        _metrics(record, "throughput", "Throughput"),
        _serving(record),
        kv_section(record),
        _load(record),
        roofline_section(record),
        predicted_section(record),
        _others(record),
        _configuration(record),
        _tree("What was used", record.effective, {"stats": "Counters of the engine"}),
        _tree("Environment", record.environment, {"packages": "Packages"}),
        _definitions(),
    )
    return Page(
        title=record.name,
        subtitle=_subtitle(record),
        details=_details(record),
        banners=banners([record]),
        cards=tuple(_cards(record)),
        verdict=verdict(record),
        sections=tuple(section for section in sections if section is not None),
        alt=dict(ALT),
    )


def banners(records: Iterable[RunRecord]) -> tuple[str, ...]:
    """Return the notices that stand above everything else."""
    note = facts.figure_note(*records)
    return (note,) if note else ()


def _subtitle(record: RunRecord) -> str:
    model, offload = facts.model_name(record), facts.offload_name(record)
    system = facts.system_name(record)
    parts = [
        None if system == "native" else system,
        model,
        f"offload {offload}" if offload else None,
        facts.budget_title(record),
    ]
    return ", ".join(part for part in parts if part)


def _details(record: RunRecord) -> str:
    parts = [f"run {record.run_id}"]
    if record.started_at:
        parts.append(f"started {record.started_at}")
    if record.duration_s is not None:
        parts.append(f"took {duration(record.duration_s)}")
    return ", ".join(parts)


def _cards(record: RunRecord) -> list[Card]:
    cards = []
    for metric in found("card", [record.metrics]):
        value, value_unit = metric_parts(metric.name, record.metrics[metric.name])
        label, note = metric.label[0].upper() + metric.label[1:], _card_note(record, metric)
        cards.append(Card(label=label, value=value, unit=value_unit, note=note))
    return cards or _plan_cards(record)


def _card_note(record: RunRecord, metric: Metric) -> str:
    budget = facts.dig_number(record.plan, "gpu.budget_bytes")
    if metric.name == "memory/gpu_peak_gib" and budget is not None:
        return f"of {gib(budget)} usable; {metric.definition}"
    return metric.definition


def _plan_cards(record: RunRecord) -> list[Card]:
    """Return what was planned, for a run that measured nothing."""
    total = facts.total_bytes(record.plan, "gpu")
    if total is None:
        return []
    cards = [
        Card(label="GPU needed", value=number(total / GIB), unit="GiB", note="sum of the plan")
    ]
    budget = facts.dig_number(record.plan, "gpu.budget_bytes")
    if budget is not None:
        note = "device memory the plan may use"
        cards.append(Card(label="GPU usable", value=number(budget / GIB), unit="GiB", note=note))
    over = facts.over_budget_bytes(record.plan)
    if over > 0:
        note = "needed - usable"
        cards.append(Card(label="Over budget", value=number(over / GIB), unit="GiB", note=note))
    return cards


def _latency(record: RunRecord) -> Section | None:
    counts = {
        metric.name: len(facts.latency_values(record, metric.quantity))
        for metric in of_samples("latency")
    }
    table = statistics_table(record, "latency", counts)
    if table is None:
        return None
    text = _floor_text(counts.values())
    return Section(title="Latency", text=text, figures=("latency",), tables=(table,))


def _floor_text(counts: Iterable[int]) -> tuple[str, ...]:
    """Say which percentiles are left out for lack of samples."""
    smallest = min((count for count in counts if count), default=0)
    short = [f"p{q} (needs {floor})" for q, floor in SAMPLE_FLOORS.items() if smallest < floor]
    if not smallest or not short:
        return ()
    plural = "s" if smallest != 1 else ""
    return (
        f"Left out below their sample floor, with {smallest} sample{plural}: {', '.join(short)}.",
    )


def _metrics(record: RunRecord, area: str, title: str) -> Section | None:
    table = metric_table(record, [area])
    return None if table is None else Section(title=title, figures=(area,), tables=(table,))


def _serving(record: RunRecord) -> Section | None:
    """Show what came of the planned requests, the rates of a search, and the metrics."""
    of_requests = {metric.name for metric in of_samples("serve")}
    names = [name for name in record.metrics if name.startswith("serve/")]
    if not names:
        return None
    single = [name for name in names if base_name(name) not in of_requests]
    found_tables = (
        statistics_table(record, "serve"),
        named_table(record, single) if single else None,
    )
    of_part = record.samples.get("serve")
    samples = of_part if isinstance(of_part, Mapping) else {}
    counts = [
        f"{leaf(samples[f'num_{name}'])} {name}"
        for name in ("planned", "completed", "failed", "cancelled")
        if f"num_{name}" in samples
    ]
    text = (f"Requests: {', '.join(counts)}.",) if counts else ()
    trials = samples.get("trials")
    tables = [_trial_table(trials)] if isinstance(trials, list) and trials else []
    tables += [table for table in found_tables if table is not None]
    return Section(title="Serving", text=text, tables=tuple(tables))


def _trial_table(trials: list[Mapping[str, object]]) -> Table:
    rows = [
        (
            leaf(trial.get("rate_per_s")),
            leaf(trial.get("good_share")),
            "yes" if trial.get("has_passed") else "no",
        )
        for trial in trials
    ]
    return Table(
        caption="Rates that the search tried, in order",
        columns=("requests/s", "good share", "passed"),
        rows=rows,
        numeric=frozenset({0, 1}),
    )


def _load(record: RunRecord) -> Section | None:
    tables = [table for table in (_phase_table(record), metric_table(record, ["load"])) if table]
    if not tables:
        return None
    return Section(title="Load", figures=("load",), tables=tuple(tables))


def _phase_table(record: RunRecord) -> Table | None:
    starts = facts.rows(record, "load")
    phases = [facts.numbers(row.get("phases")) for row in starts]
    busy = [facts.numbers(row.get("busy")) for row in starts]
    moved = [facts.numbers(row.get("moved_bytes")) for row in starts]
    names = phase_names([*phases, *busy])
    if not names:
        return None
    rows = []
    for name in names:
        cells = []
        for waited, active, sizes in zip(phases, busy, moved, strict=True):
            notes = [f"busy {seconds(active[name])}"] if name in active else []
            notes += [gib(sizes[name])] if sizes.get(name) else []
            text = seconds(waited.get(name))
            cells.append(f"{text} ({', '.join(notes)})" if notes else text)
        rows.append((label_of(name), *cells))
    totals = [seconds(facts.dig_number(row, "total_s")) for row in starts]
    rows.append(("total", *totals))
    labels = tuple(f"{leaf(row.get('start', 'start'))} (s)" for row in starts)
    return Table(
        caption="Seconds of the critical path; busy times overlap",
        columns=("phase", *labels),
        rows=rows,
        numeric=frozenset(range(1, len(starts) + 1)),
    )


def _others(record: RunRecord) -> Section | None:
    """Show every metric that no other section shows."""
    shown = {"latency", "throughput", "serve", "load", "memory", "predicted", "kv"}
    bases = {metric.name for metric in of_samples("latency")}
    names = [
        name
        for name in record.metrics
        if name.split("/")[0] not in shown
        or (name.startswith("latency/") and base_name(name) not in bases)
    ]
    if not names:
        return None
    return Section(title="Link, offload and other metrics", tables=value_tables(record, names))


def _configuration(record: RunRecord) -> Section | None:
    if not record.config and not record.overrides:
        return None
    text = f"Overrides: {' '.join(record.overrides)}" if record.overrides else "No overrides."
    table = tree_table(record.config, caption="The composed configuration", is_folded=True)
    return Section(title="Configuration", text=(text,), tables=(table,) if table.rows else ())


def _tree(title: str, tree: Mapping[str, object], folded: Mapping[str, str]) -> Section | None:
    """Show a tree as rows; the branches named in `folded` (key -> caption) open on request."""
    if not tree:
        return None
    main = {key: value for key, value in tree.items() if key not in folded}
    tables = [tree_table(main)] if main else []
    for key, caption in folded.items():
        branch = tree.get(key)
        if isinstance(branch, Mapping) and branch:
            tables.append(tree_table(branch, caption=caption, is_folded=True))
    return Section(title=title, tables=tuple(tables))


def _definitions() -> Section:
    rows = list(STATISTIC_DEFINITIONS.items())
    table = Table(columns=("statistic", "meaning"), rows=rows, wide=frozenset({1}))
    return Section(title="Definitions", text=CONVENTIONS, tables=(table,))
