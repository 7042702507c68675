"""One record as a page: which numbers, tables and figures it shows, in which order."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from reports import facts
from reports.figures.counters import ExpertsTrace, experts_trace, kv_trace
from reports.figures.run import WORDS, decode_points, lone_rows, phase_names, served_rows
from reports.pages.page import (
    Card,
    Kind,
    Link,
    Page,
    Section,
    Table,
    banners,
    commands,
    details,
    meaning,
    metric_table,
    named_table,
    run_again,
    statistics_table,
    tree_table,
    value_tables,
)
from reports.pages.verdict import verdict
from reports.record.judging import predicts_another_card
from reports.record.metrics import (
    CONVENTIONS,
    PREDICTED,
    STATISTIC_DEFINITIONS,
    Metric,
    base_name,
    found,
    interval,
    metric_parts,
    metric_text,
    of_samples,
)
from reports.record.record import SAMPLE_FLOORS, RunRecord
from reports.record.text import ABSENT, GIB, gib, label_of, leaf, number, seconds

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
    (
        "experts",
        "Experts found on the GPU over time and by layer, and bytes over the link for others",
    ),
)
MOST_ERRORS: Final = 10
FAR_PCT: Final = 15
"""Difference of a prediction from what was measured beyond which it is marked."""


def run_page(record: RunRecord, links: Sequence[Link] = ()) -> Page:
    """Return the page of one record; figures that have no data are named and simply not drawn."""
    sections = (
        failed_section(record),
        predicted_section(record),
        _latency(record),
        timeline_section(record),
        _metrics(record, "throughput", "Throughput"),
        _metrics(record, "quality", "Quality"),
        _serving(record),
        memory_section(record),
        time_section(record),
        kv_section(record),
        experts_section(record),
        _load(record),
        roofline_section(record),
        _others(record),
        asked_section(record),
        _configuration(record),
        _tree("What was used", record.effective, {"stats": "Counters of the engine"}),
        _tree("Environment", record.environment, {"packages": "Packages"}, is_printed=True),
        _definitions(record),
    )
    return Page(
        title=record.name,
        subtitle=_subtitle(record),
        details=details(record, "run"),
        banners=banners([record]),
        cards=tuple(_cards(record)),
        verdict=verdict(record),
        links=tuple(links),
        commands=commands(record, run_again(record)),
        sections=tuple(section for section in sections if section is not None),
        alt=dict(ALT),
    )


def _subtitle(record: RunRecord) -> str:
    model, offload = facts.model_name(record), facts.offload_name(record)
    system = facts.system_name(record)
    parts = [
        None if system == "native" else system,
        model,
        f"offload {offload}" if offload else None,
        _routed(record),
        facts.budget_title(record),
    ]
    return ", ".join(part for part in parts if part)


def _routed(record: RunRecord) -> str | None:
    """Return what chose the experts where the model's own router did not."""
    words = facts.routing_words(record)
    is_own = facts.dig(record.effective, "routing.kind") == "router"
    return None if words is None or is_own else f"experts {words}"


def _cards(record: RunRecord) -> list[Card]:
    cards = []
    for metric in found("card", [record.metrics]):
        value, value_unit = metric_parts(metric.name, record.metrics[metric.name])
        difference = _difference(record, base_name(metric.name))
        cards.append(
            Card(
                label=metric.title,
                value=value,
                unit=value_unit,
                note="; ".join(_context(record, metric)),
                tip=metric.definition,
                kind="warn" if difference is not None and is_far(difference) else "plain",
            )
        )
    return cards or _plan_cards(record)


def is_far(difference_pct: float) -> bool:
    """Return whether a prediction is marked as off."""
    return abs(difference_pct) > FAR_PCT


def _difference(record: RunRecord, base: str) -> float | None:
    """Return by how many percent the prediction of a metric is above what was measured.

    None where there is none, or where it is for another card.
    """
    if predicts_another_card(record):
        return None
    for quantity, other in PREDICTED.items():
        if other == base:
            return record.metrics.get(f"predicted/{quantity}_difference_pct")
    return None


def _context(record: RunRecord, metric: Metric) -> list[str]:
    """Return what a card's number is to be seen against."""
    base, values = base_name(metric.name), record.metrics
    notes = []
    ends = interval(values, base)
    if ends and not metric.name.endswith("/p50"):
        notes.append(f"95 %: {ends}")
    if metric.statistics or metric.name != base:
        p90 = values.get(f"{base}/p90")
        notes += [f"p90 {metric_text(base, p90)}"] if p90 is not None else []
    bound_ms = facts.link_bound_ms(record) if base == "latency/tpot_ms" else None
    if bound_ms is not None:
        share = 100 * bound_ms / (values[metric.name] or bound_ms)
        notes.append(f"the link allows {number(bound_ms)} ms ({share:.0f} % reached)")
    budget = facts.dig_number(record.plan, "gpu.budget_bytes")
    if base == "memory/gpu_peak_gib" and budget is not None:
        notes.append(f"of {gib(budget)} usable")
    for quantity, other in PREDICTED.items():
        predicted, difference = values.get(f"predicted/{quantity}"), _difference(record, base)
        if other == base and predicted is not None and difference is not None:
            notes.append(f"predicted {metric_text(base, predicted)}, {_off(difference)}")
        elif other == base and predicted is not None and predicts_another_card(record):
            notes.append(f"predicted for the card: {metric_text(base, predicted)}")
    return notes


def _off(difference_pct: float) -> str:
    """Return a difference of a prediction from what was measured, in words."""
    if abs(difference_pct) < 0.5:
        return "as measured"
    return f"{abs(difference_pct):.0f} % too {'high' if difference_pct > 0 else 'low'}"


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
    samples = f"{smallest} sample{'s are' if smallest != 1 else ' is'}"
    return (f"Not shown, because {samples} too few: {', '.join(short)}.",)


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
        caption="Seconds of the critical path by phase; busy times overlap",
        is_folded=True,
        columns=("phase", *labels),
        rows=rows,
        numeric=frozenset(range(1, len(starts) + 1)),
    )


def _others(record: RunRecord) -> Section | None:
    """Show every metric that no other section shows."""
    shown = {"latency", "throughput", "quality", "serve", "load", "memory", "predicted", "kv"}
    shown |= {"experts"}
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
    table = tree_table(record.config, "The composed configuration", is_printed=False)
    return Section(
        title="Configuration",
        text=(text,),
        tables=(table,) if table.rows else (),
        is_printed=False,
    )


def _tree(
    title: str, tree: Mapping[str, object], folded: Mapping[str, str], *, is_printed: bool = False
) -> Section | None:
    """Show a tree as rows; the branches named in `folded` (key -> caption) stand by themselves."""
    if not tree:
        return None
    main = {key: value for key, value in tree.items() if key not in folded}
    tables = [tree_table(main, "Every value")] if main else []
    for key, caption in folded.items():
        branch = tree.get(key)
        if isinstance(branch, Mapping) and branch:
            tables.append(tree_table(branch, caption, is_printed=False))
    return Section(title=title, tables=tuple(tables), is_printed=is_printed)


def _definitions(record: RunRecord) -> Section:
    """Say what the numbers mean: conventions, and on request every figure and statistic."""
    bases = dict.fromkeys(map(base_name, record.metrics))
    tables = [
        Table(
            columns=("statistic", "meaning"),
            rows=list(STATISTIC_DEFINITIONS.items()),
            caption="Statistics",
            wide=frozenset({1}),
            is_folded=True,
            is_printed=False,
        )
    ]
    if bases:
        tables.append(
            Table(
                columns=("metric", "definition"),
                rows=[(name, meaning(name)) for name in bases],
                caption="Figures of this page",
                wide=frozenset({1}),
                is_folded=True,
                is_printed=False,
            )
        )
    return Section(title="Definitions", text=CONVENTIONS, tables=tuple(tables))


def asked_section(record: RunRecord) -> Section | None:
    """Return the section, None for a record without a configuration."""
    if not record.config:
        return None
    rows = [
        (name, asked or "", used or "")
        for name, asked, used in (
            ("system", facts.system_name(record), _system_used(record)),
            ("model", facts.model_name(record), None),
            ("weights", _asked(record, "model.load_format"), _text(record, "load_format")),
            ("rounded", _asked(record, "model.quantize"), _text(record, "quantize")),
            ("experts", _asked(record, "model.routing"), facts.routing_words(record)),
            ("dtype", _asked(record, "engine.dtype"), _text(record, "dtype")),
            ("device", _asked(record, "gpu.name"), _text(record, "device")),
            ("GPU memory", *_memory(record)),
            ("offload", facts.offload_name(record), _placed(record)),
            ("longest sequence", _length_asked(record), _longest(record)),
            ("sequences at once", _asked(record, "engine.max_num_seqs"), _peak(record)),
            ("attention", None, _text(record, "attention")),
            ("tokens compared", _asked(record, "scenario.correctness.enabled"), _checked(record)),
        )
        if asked or used
    ]
    table = Table(columns=("", "asked", "used"), rows=rows)
    return Section(title="Asked and used", tables=(table,))


def failed_section(record: RunRecord) -> Section | None:
    """Return the errors of requests with their numbers, None where none failed."""
    rows = []
    for part in ("latency", "throughput", "serve"):
        rows_of = facts.rows(record, part)
        counts = Counter(str(row["error"]) for row in rows_of if row.get("error") is not None)
        total = len(rows_of)
        for text, num in counts.most_common(MOST_ERRORS):
            rows.append((part, f"{num} of {total}", text))
        hidden = len(counts) - MOST_ERRORS
        if hidden > 0:
            rows.append((part, "", f"and {hidden} other errors"))
    if not rows:
        return None
    table = Table(
        columns=("part", "requests", "error"),
        rows=rows,
        numeric=frozenset({1}),
        wide=frozenset({2}),
        kinds=dict.fromkeys(range(len(rows)), "bad"),
    )
    return Section(title="Failed requests", tables=(table,))


def _asked(record: RunRecord, path: str) -> str | None:
    value = facts.dig(record.config, path)
    return None if value is None else leaf(value)


def _text(record: RunRecord, key: str) -> str | None:
    value = record.effective.get(key)
    return None if value is None else leaf(value)


def _system_used(record: RunRecord) -> str | None:
    if facts.system_name(record) == "native":
        sha = facts.dig_text(record.environment, "git.sha")
        return f"this project at {sha[:12]}" if sha else "this project"
    parts = [_text(record, "system_version"), _text(record, "base_url")]
    return ", ".join(part for part in parts if part) or None


def _memory(record: RunRecord) -> tuple[str | None, str | None]:
    asked_gib = facts.dig_number(record.config, "gpu.memory_gib")
    share = facts.dig_number(record.config, "engine.gpu_memory_utilization")
    asked = "the whole card" if asked_gib is None else f"{number(asked_gib)} GiB"
    asked = f"{100 * share:g} % of {asked}" if share is not None else asked
    peak = record.metrics.get("memory/gpu_peak_gib")
    return asked, None if peak is None else f"peak {number(peak)} GiB"


def _placed(record: RunRecord) -> str | None:
    sizes = facts.numbers(record.effective.get("placement_bytes"))
    parts = [f"{gib(size)} {name.replace('_', ' ')}" for name, size in sizes.items() if size]
    host = facts.dig_number(record.effective, "host_pinned_bytes")
    if not parts and host:
        parts = [f"{gib(host)} in host memory"]
    return ", ".join(parts) or None


def _length_asked(record: RunRecord) -> str:
    found = facts.dig_number(record.config, "engine.max_model_len")
    return "the model's own limit" if found is None else f"{found:,.0f} tokens"


def _longest(record: RunRecord) -> str | None:
    found = facts.dig_number(record.effective, "max_model_len")
    return None if found is None else f"{found:,.0f} tokens"


def _peak(record: RunRecord) -> str | None:
    stats = record.effective.get("stats")
    for key in ("peak_running", "largest_batch"):
        found = facts.dig_number(stats, key)
        if found is not None:
            return f"{found:,.0f} at most"
    return None


def _checked(record: RunRecord) -> str | None:
    found = record.effective.get("correctness")
    if not isinstance(found, Mapping):
        return None
    if found.get("checked") is not True:
        return "not compared"
    share = record.metrics.get("correctness/equal_share")
    tokens = facts.dig_number(found, "num_tokens")
    count = "" if tokens is None else f"{tokens:,.0f} tokens: "
    return count + ("equal" if share in {None, 1.0} else f"{100 * (share or 0.0):.0f} % equal")


def memory_section(record: RunRecord) -> Section | None:
    """Return what was planned by part and what was measured, None without either."""
    tables = [_parts_table(record, side) for side in ("gpu", "host")]
    plan = record.plan or {}
    names = ("kv", "placements", "bytes_per_step")
    first: dict[str, object] = {name: plan[name] for name in names if name in plan}
    if first:
        tables.append(tree_table(first, "KV cache and placements"))
    tables.append(metric_table(record, ["memory"]))
    rest = {key: value for key, value in plan.items() if key not in {"gpu", "host", *first}}
    if rest:
        tables.append(tree_table(rest, "Other figures of the plan", is_printed=False))
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
    rows = [(label_of(name), gib(size), _share(size, limit)) for name, size in parts.items()]
    rows.append(("total", gib(total), _share(total, limit)))
    if limit is not None:
        rows.append(("usable" if side == "gpu" else "limit", gib(limit), "100.0 %"))
    is_over = total is not None and limit is not None and total > limit
    word = "GPU" if side == "gpu" else "Host"
    return Table(
        caption=f"{word} plan by part",
        is_folded=True,
        columns=("part", "planned", "of usable" if side == "gpu" else "of limit"),
        rows=rows,
        numeric=frozenset({1, 2}),
        kinds={len(parts): "bad"} if is_over else {},
    )


def _share(size: float | None, whole: float | None) -> str:
    return ABSENT if size is None or not whole else f"{100 * size / whole:.1f} %"


def predicted_section(record: RunRecord) -> Section | None:
    """Return the section; None where nothing was predicted."""
    rows: list[tuple[str, ...]] = []
    kinds: dict[int, Kind] = {}
    for quantity, base in PREDICTED.items():
        predicted = record.metrics.get(f"predicted/{quantity}")
        if predicted is None:
            continue
        share = record.metrics.get(f"predicted/{quantity}_difference_pct")
        measured = None if share is None else predicted / (1 + share / 100)
        difference = None if predicts_another_card(record) else share
        if difference is not None and is_far(difference):
            kinds[len(rows)] = "warn"
        rows.append(
            (
                base,
                number(predicted),
                ABSENT if measured is None else number(measured),
                ABSENT if difference is None else f"{difference:+.1f} %",
            )
        )
    if not rows:
        return None
    table = Table(
        columns=("", "predicted", "measured", "difference"),
        rows=rows,
        numeric=frozenset({1, 2, 3}),
        kinds=kinds,
    )
    source = facts.dig_text(record.plan, "predicted.rates.source")
    text = [] if source is None else [f"Rates: {leaf(source)}."]
    text += [f"Marked: off by more than {FAR_PCT} %."] if kinds else []
    if predicts_another_card(record):
        text.append("Predicted for the card and measured on the CPU, so not compared.")
    return Section(title="Predicted and measured", text=(" ".join(text),), tables=(table,))


def kv_section(record: RunRecord) -> Section | None:
    """Return the section, None where nothing of KV was counted."""
    names = [name for name in record.metrics if name.startswith("kv/")]
    if not names:
        return None
    trace = kv_trace(record)
    text: tuple[str, ...] = ()
    if trace is not None:
        sizes = ", ".join(
            f"{blocks:,.0f} blocks ({number(blocks * trace.block_bytes / GIB)} GiB) {where}"
            for where, blocks in (
                ("on the GPU", trace.blocks["gpu"]),
                ("in the host tier", trace.blocks["cpu"]),
            )
            if blocks
        )
        text = (f"{sizes}; counted during {trace.part}.",)
    tables = value_tables(record, names, folds_zero=True)
    return Section(title="KV cache", text=text, figures=("kv",), tables=tables)


def experts_section(record: RunRecord) -> Section | None:
    """Return the section, None where no expert is off the GPU."""
    names = [name for name in record.metrics if name.startswith("experts/")]
    if not names:
        return None
    words, trace = facts.routing_words(record), experts_trace(record)
    text = () if words is None else (f"Chosen by: {words}.",)
    tables = [*value_tables(record, names)]
    if trace is not None:
        tables.append(_layer_table(trace))
    return Section(title="Experts", text=text, figures=("experts",), tables=tuple(tables))


def _layer_table(trace: ExpertsTrace) -> Table:
    rows = [
        (str(layer), ABSENT if share is None else f"{100 * share:.1f} %", gib(size * GIB))
        for layer, share, size in trace.by_layer()
    ]
    return Table(
        caption=f"Experts by layer during {trace.part}, prompts included",
        is_folded=True,
        columns=("layer", "found on the GPU", "over the link"),
        rows=rows,
        numeric=frozenset({0, 1, 2}),
    )


def roofline_section(record: RunRecord) -> Section | None:
    """Return the section, None where decode was not measured on a GPU."""
    points = decode_points(record)
    if not points:
        return None
    rows = []
    for point in points:
        bounds = {roof: point.bound_tok_s(roof) for roof in WORDS}
        known = [value for value in bounds.values() if value is not None]
        least = min(known, default=None)
        share = None if least is None else 100 * point.measured_tok_s / least
        rows.append(
            (
                f"{point.label}, {number(point.batch)} a step",
                number(point.measured_tok_s),
                number(point.predicted_tok_s),
                number(bounds["link"]),
                number(bounds["hbm"]),
                ABSENT if share is None else f"{share:.0f} %",
                ", ".join(gib(size) for size in point.size_bytes.values()),
            )
        )
    columns = (
        "decode (tok/s)",
        "measured",
        "predicted",
        "link roof",
        "memory roof",
        "of the lower",
        "bytes a token: link, memory",
    )
    text = (
        "A roof is a probed rate over the bytes of weights that a token takes. Keys, values and"
        " launches come on top, so a point lies below.",
    )
    table = Table(columns=columns, rows=rows, numeric=frozenset({1, 2, 3, 4, 5, 6}))
    return Section(title="Roofline of decode", text=text, figures=("roofline",), tables=(table,))


def timeline_section(record: RunRecord) -> Section | None:
    """Return the section, None without requests."""
    if served_rows(record):
        text = (
            "Each line is a request at the time of its arrival: pale until its first token, full"
            " until its last. A cross is one that failed.",
        )
    elif lone_rows(record):
        text = (
            "Each line is a request from when it was sent: pale until its first token, then a mark"
            " for each token.",
        )
    else:
        return None
    return Section(title="Token timeline", text=text, figures=("timeline",))


def time_section(record: RunRecord) -> Section:
    """Return the section; what has no rows is not drawn."""
    gpu = (
        "GPU memory is that of all processes on the card; the link is the GPU's own counter, packet"
        " headers included. "
    )
    text = f"{'' if facts.is_emulated(record) else gpu}Shaded: what was timed."
    return Section(title="Over time", text=(text,), figures=("memory_time", "activity"))
