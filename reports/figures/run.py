"""Figures of one run, each a function from a record to PNG bytes, or None without its data."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from reports import facts
from reports.figures import theme
from reports.figures.counters import experts_figure, kv_figure
from reports.figures.theme import Drawing, Theme
from reports.record.metrics import METRICS, of_samples
from reports.record.record import RunRecord, summarise
from reports.record.rows import Table
from reports.record.text import GIB, gib, label_of, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MAX_LIMIT_SHARE: Final = 4
"""A limit this many times the bytes is named, not drawn, so that the parts stay visible."""
PHASE_ORDER: Final = (
    "import",
    "plan",
    "tokenizer",
    "allocate",
    "touch",
    "pin",
    "read",
    "convert",
    "copy",
    "keep",
    "compile",
    "warm_up",
    "capture",
    "build",
    "first_token",
)
MOST_REQUESTS: Final = 48
MOST_MARKS: Final = 4000
"""Tokens beyond which gaps are not marked one by one."""
Row = Mapping[str, object]
LEAST_ROWS: Final = 3
MOST_POINTS: Final = 1500
"""Points of a line; beyond it the highest of each span is drawn."""
MOST_STEPS: Final = 400
"""Steps of a distribution; of more samples every second, third... has one, and the largest."""
PARTS: Final = ("latency", "throughput", "serve")
HOST_LINES: Final = (("rss_bytes", "resident"), ("pinned_bytes", "pinned"))
Line = tuple[list[float], list[float]]
"""Seconds since the first row, and values."""


@dataclass(frozen=True, kw_only=True)
class _Side:
    """One bar: its parts in bytes, its limit, and what was measured."""

    label: str
    parts: Mapping[str, float]
    limit_bytes: float | None
    word: str
    """Name of the limit."""
    peak_bytes: float | None = None

    @property
    def used_bytes(self) -> float:
        """Bytes that the bar or the measured peak reaches."""
        return max(sum(self.parts.values()), self.peak_bytes or 0)

    @property
    def is_limit_drawn(self) -> bool:
        """Whether the limit is near enough to be on the axis."""
        return self.limit_bytes is not None and self.limit_bytes <= MAX_LIMIT_SHARE * max(
            self.used_bytes, 1
        )

    @property
    def end_bytes(self) -> float:
        """End of the axis."""
        limit = self.limit_bytes if self.is_limit_drawn and self.limit_bytes else 0
        return max(self.used_bytes, limit)


def memory_figure(record: RunRecord, colours: Theme) -> Drawing | None:
    """Draw the planned GPU bytes by part against the budget, with the host's bytes below.

    Both bars share a scale unless one is more than MAX_LIMIT_SHARE times the other.
    """
    sides = [side for side in (_gpu(record), _host(record)) if side.end_bytes > 0]
    if not sides or not any(side.parts for side in sides):
        return None
    budget = facts.budget_title(record)
    note = facts.figure_note(record)
    if note and budget:  # said once
        budget = budget.removesuffix(", emulated on the CPU")
    title = "Planned memory by part" + (f", {budget}" if budget else "")
    figure = theme.new_figure(colours, 1.15 + 1.3 * len(sides), title, note)
    panels = list(figure.subplots(len(sides), 1, squeeze=False).flat)
    ends = [side.end_bytes for side in sides]
    is_shared = max(ends) <= MAX_LIMIT_SHARE * min(ends)
    for axes, side in zip(panels, sides, strict=True):
        _draw_side(axes, colours, side, max(ends) if is_shared else side.end_bytes)
    theme.draw_legend(figure, panels, colours, 5)
    return Drawing(figure)


def _gpu(record: RunRecord) -> _Side:
    budget = facts.dig_number(record.plan, "gpu.budget_bytes")
    asked_gib = facts.dig_number(record.config, "gpu.memory_gib")
    is_whole = budget is not None and asked_gib is not None and budget == asked_gib * GIB
    peak_gib = record.metrics.get("memory/gpu_peak_gib")
    return _Side(
        label="GPU",
        parts=facts.items(record.plan, "gpu"),
        limit_bytes=budget,
        word="budget" if is_whole else "usable",
        peak_bytes=None if peak_gib is None else peak_gib * GIB,
    )


def _host(record: RunRecord) -> _Side:
    limit = facts.dig_number(record.plan, "host.limit_bytes")
    parts = facts.items(record.plan, "host")
    return _Side(label="host", parts=parts, limit_bytes=limit, word="limit")


def _draw_side(axes: "Axes", colours: Theme, side: _Side, end_bytes: float) -> None:
    unit, unit_bytes = ("GiB", GIB) if end_bytes >= GIB else ("MiB", 2**20)
    end = end_bytes / unit_bytes * 1.12
    theme.style_axes(axes, colours)
    axes.set_xlim(0, end)
    axes.set_ylim(-0.95, 0.8)
    axes.set_yticks([0], [side.label])
    axes.set_xlabel(unit)
    _draw_parts(axes, colours, side, unit_bytes)
    _draw_limit(axes, colours, side, unit_bytes)
    if side.peak_bytes is not None:
        peak = side.peak_bytes / unit_bytes
        ground, ink = colours.background, colours.ink
        axes.plot([peak], [0], "D", color=ground, markeredgecolor=ink, clip_on=False, zorder=5)
        is_left = peak > end / 2
        theme.beside(
            axes,
            f"measured peak {gib(side.peak_bytes)}",
            (peak, -0.52),
            (4 if is_left else -4, 0),
            ink,
            ha="right" if is_left else "left",
        )


def _draw_parts(axes: "Axes", colours: Theme, side: _Side, unit_bytes: int) -> None:
    """Stack the bar; what lies beyond the limit is hatched in the alarm colour."""
    palette = theme.part_colours(tuple(side.parts))
    prefix = "" if side.label == "GPU" else f"{side.label} "
    left = 0.0
    for name, size in side.parts.items():
        width = size / unit_bytes
        if width > 0:
            axes.barh(
                0,
                width,
                left=left,
                height=0.6,
                color=palette[name],
                edgecolor=colours.background,
                linewidth=0.6,
                label=theme.plain(f"{prefix}{label_of(name)} {gib(size)}"),
            )
            if width > axes.get_xlim()[1] * 0.06:
                theme.inside_text(axes, left + width / 2, 0, number(width), palette[name])
        left += width
    limit = None if side.limit_bytes is None else side.limit_bytes / unit_bytes
    if limit is not None and left > limit:
        word = "budget" if side.label == "GPU" else side.word
        axes.barh(
            0,
            left - limit,
            left=limit,
            height=0.6,
            color=colours.alarm,
            edgecolor=colours.background,
            hatch="////",
            linewidth=0,
            label=f"over {word} {gib((left - limit) * unit_bytes)}",
        )


def _draw_limit(axes: "Axes", colours: Theme, side: _Side, unit_bytes: int) -> None:
    if side.limit_bytes is None:
        return
    end = axes.get_xlim()[1]
    limit = side.limit_bytes / unit_bytes
    text = f"{side.word} {gib(side.limit_bytes)}"
    if limit > end:
        note = f"{text}, beyond the axis"
        axes.text(end, 0.46, note, ha="right", fontsize=9, color=colours.muted)
        return
    axes.plot([limit] * 2, [-0.4, 0.4], color=colours.ink, linewidth=2)
    place = "right" if limit > end * 0.8 else "center"
    axes.text(limit, 0.48, text, ha=place, fontsize=9, color=colours.ink)


def latency_figure(record: RunRecord, colours: Theme) -> Drawing | None:
    """Draw the share of requests within each latency (TTFT, TPOT, ITL, E2E)."""
    columns = [
        (metric, facts.latency_values(record, metric.quantity)) for metric in of_samples("latency")
    ]
    panels = [(metric, values) for metric, values in columns if values]
    if not panels:
        return None
    num_rows = len(panels) if colours.is_narrow else 1
    count = len(facts.complete_rows(record))
    title = f"Latency of {count} requests: share at or below"
    height_in = 0.7 + (1.75 if colours.is_narrow else 2.3) * num_rows
    figure = theme.new_figure(colours, height_in, title, facts.figure_note(record))
    grid = theme.panels(figure, colours, len(panels))
    for axes, (metric, values) in zip(grid, panels, strict=True):
        bound_ms = facts.link_bound_ms(record) if metric.name == "latency/tpot_ms" else None
        _draw_distribution(axes, colours, values, metric.heading, bound_ms)
    return Drawing(figure)


def throughput_figure(record: RunRecord, colours: Theme) -> Drawing | None:
    """Draw the token rates: bars, or points on a logarithmic axis where they differ 30-fold."""
    rates_of = [
        m for m in METRICS.values() if m.name.startswith("throughput/") and m.unit == "tok/s"
    ]
    found = [(metric.label, record.metrics.get(metric.name)) for metric in rates_of]
    rates = [(label, value) for label, value in found if value is not None and value > 0]
    if not rates:
        return None
    values = [value for _, value in rates]
    is_log = max(values) / min(values) > 30
    title = "Tokens per second" + (" (logarithmic axis)" if is_log else "")
    figure = theme.new_figure(colours, 1.1 + 0.42 * len(rates), title, facts.figure_note(record))
    axes = figure.subplots()
    theme.style_axes(axes, colours)
    places = list(range(len(rates)))
    if is_log:
        theme.log_axis(axes, "x", min(values) / 3, max(values) * 4)
        axes.hlines(places, min(values) / 3, values, color=colours.grid, linewidth=2)
        axes.plot(values, places, "o", color=colours.accent, markersize=9)
    else:
        axes.barh(places, values, height=0.58, color=colours.accent)
        axes.set_xlim(0, max(values) * 1.16)
    axes.set_yticks(places, [label for label, _ in rates])
    axes.set_ylim(len(rates) - 0.4, -0.6)
    for place, value in zip(places, values, strict=True):
        theme.beside(
            axes,
            number(value),
            (value, place),
            (9 if is_log else 5, 0),
            colours.ink,
            fontsize=9.5,
            va="center",
        )
    return Drawing(figure)


def load_figure(record: RunRecord, colours: Theme) -> Drawing | None:
    """Draw the critical-path phases of each start as one stacked bar."""
    starts = [(str(row.get("start", "start")), _phases(row)) for row in facts.rows(record, "load")]
    starts = [(label, phases) for label, phases in starts if phases]
    if not starts:
        return None
    names = phase_names([phases for _, phases in starts])
    title = "Load: phases of the critical path"
    figure = theme.new_figure(colours, 1.55 + 0.45 * len(starts), title, facts.figure_note(record))
    axes = figure.subplots()
    theme.style_axes(axes, colours)
    end = max(sum(phases.values()) for _, phases in starts)
    palette = theme.part_colours(names)
    left = [0.0] * len(starts)
    for name in names:
        widths = [phases.get(name, 0.0) for _, phases in starts]
        axes.barh(
            range(len(starts)),
            widths,
            left=left,
            height=0.58,
            color=palette[name],
            label=theme.plain(label_of(name)),
        )
        for place, width in enumerate(widths):
            if width > end * 0.07:
                theme.inside_text(
                    axes, left[place] + width / 2, place, number(width), palette[name]
                )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, total in enumerate(left):
        axes.text(
            total + end * 0.012,
            place,
            f"{number(total)} s",
            va="center",
            color=colours.ink,
            fontsize=9.5,
        )
    axes.set_xlim(0, end * 1.14 or 1)
    axes.set_ylim(len(starts) - 0.5, -0.5)
    axes.set_yticks(range(len(starts)), [theme.plain(label, 18) for label, _ in starts])
    axes.set_xlabel("seconds since the process started")
    theme.draw_legend(figure, [axes], colours, min(6, len(names)))
    return Drawing(figure)


def phase_names(starts: list[dict[str, float]]) -> list[str]:
    """Return the phases of several starts, known ones in the order in which they happen."""
    found = list(dict.fromkeys(name for phases in starts for name in phases))
    return sorted(
        found,
        key=lambda name: (
            PHASE_ORDER.index(name.removesuffix("_s"))
            if name.removesuffix("_s") in PHASE_ORDER
            else len(PHASE_ORDER)
        ),
    )


def _phases(row: Mapping[str, object]) -> dict[str, float]:
    return {name: value for name, value in facts.numbers(row.get("phases")).items() if value > 0}


def _draw_distribution(
    axes: "Axes", colours: Theme, values: list[float], label: str, bound_ms: float | None
) -> None:
    ordered = sorted(values)
    stride = -(-len(ordered) // MOST_STEPS)
    shares = [100 * (i + 1) / len(ordered) for i in range(len(ordered))]
    ordered, shares = (found[::-stride][::-1] for found in (ordered, shares))
    theme.style_axes(axes, colours, grid="both")
    xs, ys = [min(values), *ordered], [0.0, *shares]
    axes.step(xs, ys, where="post", color=colours.accent, linewidth=2)
    axes.fill_between(xs, ys, step="post", color=colours.accent, alpha=0.13, linewidth=0)
    if len(ordered) <= 100:
        axes.plot(ordered, shares, "o", color=colours.accent, markersize=3.2)
    axes.set_ylim(0, 104)
    axes.set_yticks([0, 50, 90, 100], ["0 %", "50 %", "90 %", "100 %"])
    axes.set_xlabel(label)
    axes.margins(x=0.08)
    axes.locator_params(axis="x", nbins=5)
    median = summarise(values)["p50"]
    if median is not None:
        axes.axvline(median, color=colours.muted, linewidth=1, linestyle=":")
        _side_text(axes, median, 6, f"p50 {number(median)}", colours.ink, colours)
    if bound_ms is not None:
        axes.axvline(bound_ms, color=colours.second, linewidth=1.6, linestyle="--")
        _side_text(axes, bound_ms, 18, f"link bound {number(bound_ms)}", colours.second, colours)


def _side_text(axes: "Axes", x: float, y: float, text: str, colour: str, colours: Theme) -> None:
    """Write beside a vertical line, on the side that has more room."""
    low, high = axes.get_xlim()
    is_right = x < (low + high) / 2
    theme.beside(
        axes,
        text,
        (x, y),
        (4 if is_right else -4, 0),
        colour,
        ha="left" if is_right else "right",
        bbox={"facecolor": colours.background, "alpha": 0.75, "pad": 1.2, "linewidth": 0},
    )


def timeline_figure(record: RunRecord, colours: Theme) -> Drawing | None:
    """Draw the requests of serve, else those of latency, one line each."""
    served, alone = served_rows(record), lone_rows(record)
    rows = served or alone
    if not rows:
        return None
    shown = rows[:MOST_REQUESTS]
    part = "serve" if served else "latency"
    cut = f", first {len(shown)} of {len(rows)}" if len(rows) > len(shown) else ""
    note = facts.figure_note(record)
    height_in = 1.1 + max(1.0, 0.105 * len(shown))
    figure = theme.new_figure(colours, height_in, f"Tokens of {part}, by request{cut}", note)
    axes = figure.subplots()
    theme.style_axes(axes, colours)
    if served:
        _draw_served(axes, colours, shown)
        axes.set_xlabel("seconds since the first arrival")
    else:
        _draw_alone(axes, colours, shown)
        axes.set_xlabel("milliseconds since the request was sent")
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_yticks([0, len(shown) - 1] if len(shown) > 1 else [0])
    axes.set_yticklabels([f"request {place}" for place in axes.get_yticks().astype(int)])
    axes.set_xlim(left=0)
    return Drawing(figure)


def served_rows(record: RunRecord) -> list[Row]:
    """Return the requests of serve in order of their arrivals."""
    rows = facts.rows(record, "serve")
    known = [row for row in rows if facts.dig_number(row, "scheduled_s") is not None]
    return sorted(known, key=lambda row: facts.dig_number(row, "scheduled_s") or 0.0)


def lone_rows(record: RunRecord) -> list[Row]:
    """Return the requests of latency that had a token."""
    rows = facts.rows(record, "latency")
    return [row for row in rows if facts.dig_number(row, "ttft_ms") is not None]


def _draw_served(axes: "Axes", colours: Theme, rows: Sequence[Row]) -> None:
    for place, row in enumerate(rows):
        begin_s = facts.dig_number(row, "scheduled_s") or 0.0
        ttft, e2e = facts.dig_number(row, "ttft_ms"), facts.dig_number(row, "e2e_ms")
        if ttft is not None and e2e is not None:
            first, last = begin_s + ttft / 1e3, begin_s + e2e / 1e3
            axes.plot([begin_s, first], [place, place], color=colours.muted, lw=2.2, alpha=0.45)
            axes.plot([first, last], [place, place], color=colours.accent, lw=2.6)
        if row.get("error") is not None:
            axes.plot([begin_s], [place], "x", color=colours.alarm, markersize=5)


def _draw_alone(axes: "Axes", colours: Theme, rows: Sequence[Row]) -> None:
    gaps = [list(_gaps(row)) for row in rows]
    is_marked = sum(map(len, gaps)) <= MOST_MARKS
    for place, (row, steps) in enumerate(zip(rows, gaps, strict=True)):
        first = facts.dig_number(row, "ttft_ms") or 0.0
        axes.plot([0, first], [place, place], color=colours.muted, lw=2.2, alpha=0.45)
        times = list(accumulate(steps, initial=first))
        if is_marked:
            # One broken line: a marker of its own for each would be as many elements of an SVG.
            xs = [x for time in times for x in (time, time, math.nan)]
            ys = [place - 0.35, place + 0.35, math.nan] * len(times)
            axes.plot(xs, ys, color=colours.accent, lw=1.0)
        else:
            axes.plot([times[0], times[-1]], [place, place], color=colours.accent, lw=2.6)
        if row.get("error") is not None:
            axes.plot([times[-1]], [place], "x", color=colours.alarm, markersize=5)


def _gaps(row: Row) -> list[float]:
    found = row.get("itl_ms")
    cells = found if isinstance(found, list) else []
    return [float(cell) for cell in cells if isinstance(cell, int | float)]


def memory_time_figure(record: RunRecord, table: Table, colours: Theme) -> Drawing | None:
    """Draw GPU memory below the budget's line, and host memory of the worker below it."""
    gpu = _line(table, "gpu_used_bytes", 1 / GIB) if not facts.is_emulated(record) else None
    host = [
        (label, line)
        for name, label in HOST_LINES
        if (line := _line(table, name, 1 / GIB)) is not None and max(line[1]) > 0
    ]
    num_panels = (gpu is not None) + bool(host)
    if not num_panels:
        return None
    figure = theme.new_figure(
        colours, 1.0 + 1.75 * num_panels, "Memory over time", facts.figure_note(record)
    )
    panels = list(figure.subplots(num_panels, 1, sharex=True, squeeze=False).flat)
    if gpu is not None:
        _draw_gpu(panels[0], colours, record, gpu)
    if host:
        axes = panels[-1]
        theme.style_axes(axes, colours, grid="y")
        for (label, line), colour in zip(host, (colours.accent, colours.second), strict=False):
            axes.plot(*line, color=colour, linewidth=1.6, label=f"host, {label}")
        axes.set_ylim(0, max(max(line[1]) for _, line in host) * 1.18)
        axes.set_ylabel("host (GiB)")
    _finish(panels, colours, table)
    theme.draw_legend(figure, panels, colours)
    return Drawing(figure)


def activity_figure(record: RunRecord, table: Table, colours: Theme) -> Drawing | None:
    """Draw how busy the GPU was, what the link carried beside its probed rate, and the power."""
    link_gb_s = record.metrics.get("link/h2d_gb_s")
    asked = (
        ("gpu_busy_pct", "GPU busy (%)", None),
        ("pcie_rx_gb_s", "link to GPU (GB/s)", link_gb_s),
        ("gpu_power_w", "power (W)", facts.dig_number(record.environment, "gpu.power_limit_w")),
    )
    found = [
        (label, line, bound)
        for name, label, bound in asked
        if (line := _line(table, name, 1.0)) is not None
    ]
    if not found:
        return None
    title = "The GPU and its link over time"
    figure = theme.new_figure(colours, 0.9 + 1.35 * len(found), title, facts.figure_note(record))
    panels = list(figure.subplots(len(found), 1, sharex=True, squeeze=False).flat)
    for axes, (label, line, bound) in zip(panels, found, strict=True):
        theme.style_axes(axes, colours, grid="y")
        axes.plot(*line, color=colours.accent, linewidth=1.2)
        axes.set_ylabel(label)
        top = max([*line[1], bound or 0.0, 1e-9])
        axes.set_ylim(0, top * 1.22)
        if bound is not None:
            word = "probed" if "link" in label else "limit"
            _bound(axes, colours, bound, f"{word} {number(bound)}", line)
    _finish(panels, colours, table)
    return Drawing(figure)


def _draw_gpu(axes: "Axes", colours: Theme, record: RunRecord, line: Line) -> None:
    theme.style_axes(axes, colours, grid="y")
    axes.plot(*line, color=colours.accent, linewidth=1.6, label="GPU, all processes")
    budget = record.metrics.get("memory/gpu_budget_gib")
    axes.set_ylim(0, max([*line[1], budget or 0.0]) * 1.18 or 1)
    axes.set_ylabel("GPU (GiB)")
    if budget is not None:
        _bound(axes, colours, budget, f"budget {number(budget)} GiB", line)


def _bound(axes: "Axes", colours: Theme, value: float, text: str, line: Line) -> None:
    axes.axhline(value, color=colours.alarm, linewidth=1.3, linestyle="--")
    theme.beside(axes, text, (line[0][-1], value), (0, 3), colours.alarm, ha="right")


def _finish(panels: Sequence["Axes"], colours: Theme, table: Table) -> None:
    """Shade what was timed and name it above the first panel."""
    times = _times(table)
    for axes in panels:
        axes.set_xlim(times[0], max(times[-1], times[0] + 1e-9))
        for begin_s, end_s, _ in _spans(table, times):
            axes.axvspan(begin_s, end_s, color=colours.muted, alpha=0.13, linewidth=0)
    width = times[-1] - times[0]
    for begin_s, end_s, name in _spans(table, times):
        if end_s - begin_s > 0.06 * width:
            theme.beside(
                panels[0],
                name,
                ((begin_s + end_s) / 2, 1),
                (0, 2),
                colours.muted,
                fontsize=8.5,
                xycoords=("data", "axes fraction"),
                ha="center",
            )
    panels[-1].set_xlabel("seconds since the run began")


def _spans(table: Table, times: Sequence[float]) -> list[tuple[float, float, str]]:
    """Return begin, end and name of each stretch in which a part was timed."""
    found: list[tuple[float, float, str]] = []
    before = None
    for time_s, phase in zip(times, table["phase"], strict=True):
        name = str(phase) if phase in PARTS else None
        if name is not None and name == before:
            found[-1] = (found[-1][0], time_s, name)
        elif name is not None:
            found.append((time_s, time_s, name))
        before = name
    return found


def _times(table: Table) -> list[float]:
    clocks = [value or 0.0 for value in table["clock_s"]]
    return [value - clocks[0] for value in clocks]


def _line(table: Table, column: str, factor: float) -> Line | None:
    """Return a column's line, None where it has too few values."""
    times, values = _times(table), table.get(column, [])
    pairs = [
        (time_s, value * factor)
        for time_s, value in zip(times, values, strict=True)
        if value is not None
    ]
    if len(pairs) < LEAST_ROWS:
        return None
    size = -(-len(pairs) // MOST_POINTS)
    groups = [pairs[start : start + size] for start in range(0, len(pairs), size)]
    kept: list[Any] = [max(group, key=lambda pair: pair[1]) for group in groups]
    return [time_s for time_s, _ in kept], [value for _, value in kept]


Roof = Literal["link", "hbm"]
WORDS: Final[dict[Roof, str]] = {"link": "host to GPU", "hbm": "GPU memory"}


@dataclass(frozen=True, kw_only=True)
class DecodePoint:
    """One way in which a run decoded."""

    label: str
    batch: float
    """Mean tokens of a step."""
    measured_tok_s: float
    predicted_tok_s: float | None
    size_bytes: Mapping[Roof, float]
    """Bytes for each token over the link, and of weights in GPU memory; keys and values on top."""
    rate_gb_s: Mapping[Roof, float | None]
    """Rates that the probes measured."""

    def bound_tok_s(self, roof: Roof) -> float | None:
        """Return the tokens a second that the roof allows, None where it does not bind."""
        rate, size = self.rate_gb_s[roof], self.size_bytes[roof]
        return rate * 1e9 / size if rate and size else None


def decode_points(record: RunRecord) -> list[DecodePoint]:
    """Return a point for latency (one sequence) and one for throughput, as far as measured."""
    placed = facts.numbers(facts.dig(record.plan, "placements"))
    total, in_place = sum(placed.values()), placed.get("uva", 0.0)
    step = facts.dig_number(record.plan, "bytes_per_step") or 0.0
    if not total or facts.is_emulated(record):
        return []
    metrics, found = record.metrics, []
    rates: dict[Roof, float | None] = {
        "link": metrics.get("link/h2d_gb_s"),
        "hbm": metrics.get("link/hbm_copy_gb_s"),
    }
    tpot = metrics.get("latency/tpot_ms/p50") or metrics.get("latency/tpot_ms/mean")
    steps = facts.dig_number(record.samples.get("throughput"), "num_decode_steps")
    tokens = facts.dig_number(record.samples.get("throughput"), "num_decode_tokens")
    batch = tokens / steps if tokens and steps else None
    for label, size, measured, predicted in (
        ("one sequence", 1.0, _per_s(tpot), _per_s(metrics.get("predicted/tpot_ms"))),
        ("throughput", batch, metrics.get("throughput/decode_tok_s"), None),
    ):
        if size and measured:
            found.append(
                DecodePoint(
                    label=label,
                    batch=size,
                    measured_tok_s=measured,
                    predicted_tok_s=predicted,
                    size_bytes={"link": step / size, "hbm": (total - in_place) / size},
                    rate_gb_s=rates,
                )
            )
    return found


def roofline_figure(record: RunRecord, colours: Theme) -> Drawing | None:
    """Draw tokens a second over bytes a token: roofs as lines, measured full, predicted hollow."""
    points = decode_points(record)
    roofs = [roof for roof in WORDS if any(point.bound_tok_s(roof) for point in points)]
    if not roofs:
        return None
    title = "Decode against what link and GPU memory carry"
    figure = theme.new_figure(colours, 0.6 + 3.3 * (len(roofs) if colours.is_narrow else 1), title)
    panels = theme.panels(figure, colours, len(roofs), shares_y=True)
    for axes, roof in zip(panels, roofs, strict=True):
        _draw_roof(axes, colours, points, roof)
        if axes is panels[0] or colours.is_narrow:
            axes.set_ylabel("decode (tok/s)")
    theme.draw_legend(figure, panels[:1], colours)
    return Drawing(figure)


def _draw_roof(axes: "Axes", colours: Theme, points: Sequence[DecodePoint], roof: Roof) -> None:
    theme.style_axes(axes, colours, grid="both")
    shown = [point for point in points if point.bound_tok_s(roof)]
    sizes = [point.size_bytes[roof] / 1e9 for point in shown]
    ends = (min(sizes) / 3, max(sizes) * 3)
    rate = shown[0].rate_gb_s[roof] or 0.0
    axes.plot(ends, [rate / end for end in ends], color=colours.alarm, linewidth=1.6)
    theme.beside(axes, f"{number(rate)} GB/s", (ends[0], rate / ends[0]), (6, 2), colours.alarm)
    measured = [point.measured_tok_s for point in shown]
    predicted = [point.predicted_tok_s for point in shown]
    accent = colours.accent
    for values, face, word, size_pt in (
        (predicted, "none", "predicted", 13),
        (measured, accent, "measured", 7),
    ):
        dots = [(size, value) for size, value in zip(sizes, values, strict=True) if value]
        if dots:
            xs, ys = zip(*dots, strict=True)
            axes.plot(xs, ys, "o", ms=size_pt, mfc=face, mec=accent, label=word)
    for point, at in zip(shown, zip(sizes, measured, strict=True), strict=True):
        theme.beside(axes, point.label, at, (0, -15), colours.ink, ha="center")
    theme.log_axis(axes, "x", *ends)
    rates = [value for value in (*measured, *predicted) if value]
    lowest, highest = min([*rates, rate / ends[1]]), max([*rates, rate / ends[0]])
    theme.log_axis(axes, "y", lowest / 4, highest * 1.6)
    axes.set_xlabel(f"GB a token, {WORDS[roof]}")


def _per_s(time_ms: float | None) -> float | None:
    return 1000 / time_ms if time_ms else None


FIGURES: Final[Mapping[str, Callable[[RunRecord, Theme], Drawing | None]]] = MappingProxyType(
    {
        "memory": memory_figure,
        "latency": latency_figure,
        "throughput": throughput_figure,
        "load": load_figure,
        "kv": kv_figure,
        "experts": experts_figure,
        "timeline": timeline_figure,
        "roofline": roofline_figure,
    }
)
"""Name (also of the PNG file) -> figure of one run."""
TIME_FIGURES: Final[Mapping[str, Callable[[RunRecord, Table, Theme], Drawing | None]]] = (
    MappingProxyType({"memory_time": memory_time_figure, "activity": activity_figure})
)
"""Name (also of the PNG file) -> figure over the rows of telemetry."""
