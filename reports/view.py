"""One record as a page: which numbers, tables and figures it shows, in which order."""

from collections.abc import Iterable, Mapping
from typing import Final

from reports import facts
from reports.definitions import CONVENTIONS, STATISTIC_DEFINITIONS, definition
from reports.figures import LATENCY_PANELS, phase_label, phase_names
from reports.page import Card, Page, Section, Table
from reports.record import SAMPLE_FLOORS, RunRecord
from reports.text import (
    ABSENT,
    GIB,
    base_name,
    duration,
    flatten,
    gib,
    leaf,
    metric_number,
    metric_text,
    number,
    unit,
)
from reports.verdict import verdict

STATISTICS: Final = ("mean", "p50", "p90", "p95", "p99", "min", "max", "std")
HEADLINES: Final = (
    ("throughput/output_tok_s", "Output"),
    ("latency/tpot_ms", "TPOT"),
    ("latency/ttft_ms", "TTFT"),
    ("load/total_s", "Load"),
    ("load/cold_total_s", "Load, cold"),
    ("memory/gpu_peak_gib", "GPU peak"),
    ("memory/host_pinned_gib", "Host pinned"),
    ("link/share", "Share of the link"),
    ("energy/j_per_token", "Energy"),
)
ALT: Final = (
    ("memory", "Stacked bars of the planned GPU and host memory against their limits"),
    ("latency", "Cumulative distribution of each latency"),
    ("throughput", "Token rates of prefill, decode and output"),
    ("load", "Stacked bar of the load phases for each start"),
)


def run_page(record: RunRecord) -> Page:
    """Return the page of one record; figures that have no data are named and simply not drawn."""
    sections = (
        _memory(record),
        _latency(record),
        _metrics(record, "throughput", "Throughput"),
        _load(record),
        _others(record),
        _configuration(record),
        _tree("What was used", record.effective),
        _tree("Environment", record.environment),
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


def headline(record: RunRecord, base: str) -> tuple[str, float] | None:
    """Return (metric name, value) of a base metric: itself, its p50, else its mean."""
    for name in (base, f"{base}/p50", f"{base}/mean"):
        value = record.metrics.get(name)
        if value is not None:
            return name, value
    return None


def banners(records: Iterable[RunRecord]) -> tuple[str, ...]:
    """Return the notices that stand above everything else."""
    return (facts.EMULATED,) if any(facts.is_emulated(record) for record in records) else ()


def _subtitle(record: RunRecord) -> str:
    model, offload = facts.model_name(record), facts.offload_name(record)
    parts = [model, f"offload {offload}" if offload else None, facts.budget_title(record)]
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
    for base, label in HEADLINES:
        found = headline(record, base)
        if found is None:
            continue
        name, value = found
        statistic = name.removeprefix(base).lstrip("/")
        cards.append(
            Card(
                label=f"{label}, {statistic}" if statistic else label,
                value=metric_number(name, value),
                unit=unit(name),
                note=_card_note(record, base),
            )
        )
    return cards or _plan_cards(record)


def _card_note(record: RunRecord, base: str) -> str:
    note = definition(base) or ""
    budget = facts.dig_number(record.plan, "gpu.budget_bytes")
    if base == "memory/gpu_peak_gib" and budget is not None:
        return f"of {gib(budget)} usable; {note}"
    return note


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


def _memory(record: RunRecord) -> Section | None:
    tables = [_parts_table(record, side) for side in ("gpu", "host")]
    plan = record.plan or {}
    rest = {key: value for key, value in plan.items() if key not in {"gpu", "host"}}
    if rest:
        tables.append(_plan_table(rest))
    tables.append(_metric_table(record, ["memory"]))
    kept = tuple(table for table in tables if table is not None)
    if not kept:
        return None
    budget = facts.budget_title(record)
    title = f"Memory: {budget}" if budget else "Memory"
    return Section(title=title, figures=("memory",), tables=kept)


def _parts_table(record: RunRecord, side: str) -> Table | None:
    parts = facts.items(record.plan, side)
    if not parts:
        return None
    key = "budget_bytes" if side == "gpu" else "limit_bytes"
    limit = facts.dig_number(record.plan, f"{side}.{key}")
    total = facts.total_bytes(record.plan, side)
    rows = [(phase_label(name), gib(size), _share(size, limit)) for name, size in parts.items()]
    rows.append(("total", gib(total), _share(total, limit)))
    if limit is not None:
        rows.append(("usable" if side == "gpu" else "limit", gib(limit), "100.0 %"))
    is_over = total is not None and limit is not None and total > limit
    word = "GPU" if side == "gpu" else "Host"
    return Table(
        caption=f"{word} plan by part",
        columns=("part", "planned", "of usable" if side == "gpu" else "of limit"),
        rows=rows,
        numeric=frozenset({1, 2}),
        kinds={len(parts): "bad"} if is_over else {},
    )


def _plan_table(rest: Mapping[str, object]) -> Table:
    rows = []
    for key, value in flatten(rest):
        is_bytes = key.startswith("placements.") or "bytes" in key
        is_size = is_bytes and isinstance(value, int | float) and not isinstance(value, bool)
        rows.append((key, gib(float(value)) if is_size else leaf(value)))  # type: ignore[arg-type]
    return Table(
        caption="KV cache and placements",
        columns=("key", "planned"),
        rows=rows,
        numeric=frozenset({1}),
    )


def _share(size: float | None, whole: float | None) -> str:
    return ABSENT if size is None or not whole else f"{100 * size / whole:.1f} %"


def _latency(record: RunRecord) -> Section | None:
    rows, counts = [], []
    for key, label in LATENCY_PANELS:
        base = f"latency/{key}"
        cells = [record.metrics.get(f"{base}/{statistic}") for statistic in STATISTICS]
        count = len(facts.latency_values(record, key))
        if not count and all(cell is None for cell in cells):
            continue
        texts = [metric_number(base, cell) for cell in cells]
        shown = str(count) if count else ABSENT
        rows.append((label, *texts, shown, definition(base) or ""))
        counts.append((label, count))
    if not rows:
        return None
    table = Table(
        columns=("", *STATISTICS, "samples", "definition"),
        rows=rows,
        numeric=frozenset(range(1, len(STATISTICS) + 2)),
        wide=frozenset({len(STATISTICS) + 2}),
    )
    return Section(title="Latency", text=_floor_text(counts), figures=("latency",), tables=(table,))


def _floor_text(counts: list[tuple[str, int]]) -> tuple[str, ...]:
    """Say which percentiles are left out for lack of samples."""
    smallest = min((count for _, count in counts if count), default=0)
    short = [f"p{q} (needs {floor})" for q, floor in SAMPLE_FLOORS.items() if smallest < floor]
    if not smallest or not short:
        return ()
    plural = "s" if smallest != 1 else ""
    return (
        f"Left out below their sample floor, with {smallest} sample{plural}: {', '.join(short)}.",
    )


def _metrics(record: RunRecord, area: str, title: str) -> Section | None:
    table = _metric_table(record, [area])
    return None if table is None else Section(title=title, figures=(area,), tables=(table,))


def _metric_table(record: RunRecord, areas: list[str]) -> Table | None:
    names = [name for name in record.metrics if name.split("/")[0] in areas]
    return _named_table(record, names) if names else None


def _named_table(record: RunRecord, names: list[str]) -> Table:
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


def _load(record: RunRecord) -> Section | None:
    tables = [table for table in (_phase_table(record), _metric_table(record, ["load"])) if table]
    if not tables:
        return None
    return Section(title="Load", figures=("load",), tables=tuple(tables))


def _phase_table(record: RunRecord) -> Table | None:
    starts = facts.rows(record, "load")
    phases = [_numbers(row.get("phases")) for row in starts]
    busy = [_numbers(row.get("busy")) for row in starts]
    names = phase_names([*phases, *busy])
    if not names:
        return None
    rows = []
    for name in names:
        cells = []
        for waited, active in zip(phases, busy, strict=True):
            text = number(waited.get(name))
            cells.append(f"{text} (busy {number(active[name])})" if name in active else text)
        rows.append((phase_label(name), *cells))
    totals = [number(facts.dig_number(row, "total_s")) for row in starts]
    rows.append(("total", *totals))
    labels = tuple(f"{leaf(row.get('start', 'start'))} (s)" for row in starts)
    return Table(
        caption="Seconds of the critical path; busy times overlap",
        columns=("phase", *labels),
        rows=rows,
        numeric=frozenset(range(1, len(starts) + 1)),
    )


def _numbers(found: object) -> dict[str, float]:
    if not isinstance(found, Mapping):
        return {}
    return {str(key): float(value) for key, value in found.items() if value is not None}


def _others(record: RunRecord) -> Section | None:
    """Show every metric that no other section shows."""
    shown = {"latency", "throughput", "load", "memory"}
    bases = {f"latency/{key}" for key, _ in LATENCY_PANELS}
    names = [
        name
        for name in record.metrics
        if name.split("/")[0] not in shown
        or (name.startswith("latency/") and base_name(name) not in bases)
    ]
    if not names:
        return None
    return Section(title="Link, offload and other metrics", tables=(_named_table(record, names),))


def _configuration(record: RunRecord) -> Section | None:
    if not record.config and not record.overrides:
        return None
    text = f"Overrides: {' '.join(record.overrides)}" if record.overrides else "No overrides."
    table = Table(
        caption="The composed configuration",
        columns=("key", "value"),
        rows=[(key, leaf(value)) for key, value in flatten(record.config)],
        is_folded=True,
    )
    return Section(title="Configuration", text=(text,), tables=(table,) if table.rows else ())


def _tree(title: str, tree: Mapping[str, object]) -> Section | None:
    if not tree:
        return None
    rows = []
    for key, value in flatten(tree):
        is_bytes = key.rsplit(".", 1)[-1].endswith("bytes") or "_bytes." in key
        is_size = is_bytes and isinstance(value, int) and not isinstance(value, bool)
        rows.append((key, gib(float(value)) if is_size else leaf(value)))  # type: ignore[arg-type]
    table = Table(columns=("key", "value"), rows=rows)
    return Section(title=title, tables=(table,))


def _definitions() -> Section:
    rows = list(STATISTIC_DEFINITIONS.items())
    table = Table(columns=("statistic", "meaning"), rows=rows, wide=frozenset({1}))
    return Section(title="Definitions", text=CONVENTIONS, tables=(table,))
