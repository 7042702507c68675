"""Figures of several points: a sweep, run or planned, ratios of runs and of two sides."""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from reports import facts
from reports.compare import Row, Run, comparable_metrics, records_of
from reports.figures import theme
from reports.figures.theme import THEMES, Drawing, Theme
from reports.record.judging import gain, gain_interval
from reports.record.metrics import METRICS, Metric, shared
from reports.record.record import RecordError, RunRecord, write_bytes_atomic
from reports.record.text import last_keys, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MAX_BARS: Final = 40
COLOUR_MAP: Final = "viridis"
OUTPUT: Final = METRICS["throughput/output_tok_s"]
TPOT: Final = METRICS["latency/tpot_ms"]
PEAK: Final = METRICS["memory/gpu_peak_gib"]
_LABEL_OFFSETS: Final = ((7, 4), (7, -12), (-13, 4), (-13, -12))
"""Points in turn get their number on another side, so that close ones can be told apart."""
MOST_RUNS: Final = 6
Mark = tuple[int, str, float, tuple[float, float] | None]
"""Row of a ratio from the top, run, ratio and its interval."""
TICKS: Final = (1, 2, 0.5, 10, 0.1, 5, 0.2, 100, 0.01, 20, 50, 0.02, 0.05, 1.25, 0.8, 1.1, 0.9)
"""Ratios that an axis may name; the first ones come first where there is no room for all."""
LEAST_GAP: Final = 0.12
"""Share of the axis' length between two that are named."""
LEAST_SPAN: Final = 0.05
"""The axis reaches at least this far from 1 to either side."""
WIDEST: Final = 100.0
"""An interval that is wider than this factor to either side is cut off at it."""
MOST_LINEAR: Final = 3.0
"""Ratio of the axis' ends from which on it is logarithmic."""
_ROW_IN: Final = 0.36


def comparison_figure(rows: Sequence[Row], colours: Theme) -> Drawing | None:
    """Draw output rate and TPOT of each point; a point without a figure shows its status."""
    shown = list(rows[:MAX_BARS])
    records = records_of(rows)
    tpot = shared(TPOT, [row.metrics for row in rows])
    panels = [
        metric for metric in (OUTPUT, tpot) if any(row.metrics.get(metric.name) for row in shown)
    ]
    if not panels:
        return None
    cut = f", first {MAX_BARS} of {len(rows)}" if len(rows) > MAX_BARS else ""
    height_in = 0.7 + (0.6 + 0.34 * len(shown)) * (len(panels) if colours.is_narrow else 1)
    figure = theme.new_figure(
        colours, height_in, f"Points compared{cut}", facts.figure_note(*records)
    )
    grid = theme.panels(figure, colours, len(panels), shares_y=True)
    for axes, metric in zip(grid, panels, strict=True):
        colour = colours.accent if metric is OUTPUT else colours.second
        _draw_bars(axes, colours, shown, metric, colour)
        word = "more" if metric.better == "higher" else "less"
        axes.set_xlabel(f"{metric.heading}, {word} is better")
    names = [f"{row.place}. {last_keys(row.label)}" for row in shown]
    labels = ["\n".join(wrap(theme.plain(name, 44), 22)) for name in names]
    for axes in grid if colours.is_narrow else grid[:1]:
        axes.set_yticks(range(len(shown)), labels)
        axes.set_ylim(len(shown) - 0.4, -0.6)
    return Drawing(figure)


def tradeoff_figure(rows: Sequence[Row], colours: Theme) -> Drawing | None:
    """Draw output rate over the rate of one request, and over GPU peak; points by number.

    The line joins the points that no other point beats in both.
    """
    records = records_of(rows)
    tpot = shared(TPOT, [row.metrics for row in rows])
    speed, memory = [], []
    for row in rows:
        output, gap_ms = row.metrics.get(OUTPUT.name), row.metrics.get(tpot.name)
        peak_gib = row.metrics.get(PEAK.name)
        if output is not None and gap_ms:
            speed.append((row.place, 1000 / gap_ms, output))
        if output is not None and peak_gib is not None:
            memory.append((row.place, peak_gib, output))
    panels = [(speed, "tokens/s of one request (1000 / TPOT)", 1), (memory, PEAK.heading, -1)]
    panels = [panel for panel in panels if len(panel[0]) >= 2]
    if not panels:
        return None
    height_in = 0.5 + 3.4 * (len(panels) if colours.is_narrow else 1)
    figure = theme.new_figure(
        colours, height_in, "Output rate against its cost", facts.figure_note(*records)
    )
    grid = theme.panels(figure, colours, len(panels))
    peaks_gib = {place: peak_gib for place, peak_gib, _ in memory}
    for axes, (points, label, sign) in zip(grid, panels, strict=True):
        is_coloured = points is speed and len(memory) >= 2
        _draw_scatter(axes, colours, points, sign, peaks_gib if is_coloured else {})
        axes.set_xlabel(label)
        if axes is grid[0] or colours.is_narrow:
            axes.set_ylabel(OUTPUT.heading)
    if len(memory) >= 2 and speed and panels[0][0] is speed:
        _draw_scale(figure, grid[0], colours, list(peaks_gib.values()))
    return Drawing(figure)


def frontier(
    points: Sequence[tuple[int, float, float]], sign: int
) -> list[tuple[int, float, float]]:
    """Return the (place, x, y) that no other beats in both, ordered by x.

    Args:
        points: (place, x, y), where more of y is better.
        sign: 1 where more of x is better, -1 where less is.
    """
    best: list[tuple[int, float, float]] = []
    for point in sorted(points, key=lambda item: (-sign * item[1], -item[2])):
        if not best or point[2] > best[-1][2]:
            best.append(point)
    return sorted(best, key=lambda item: item[1])


def _draw_bars(
    axes: "Axes", colours: Theme, rows: Sequence[Row], metric: Metric, colour: str
) -> None:
    theme.style_axes(axes, colours)
    values = [row.metrics.get(metric.name) for row in rows]
    longest = max(value for value in values if value is not None)
    axes.set_xlim(0, longest * 1.25 or 1)
    axes.locator_params(axis="x", nbins=5)
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        is_bad = value is None and row.status != "ok"
        text = row.status if is_bad else number(value)
        if value is not None:
            axes.barh(place, value, height=0.62, color=colour)
        ink = colours.alarm if is_bad else colours.ink
        theme.beside(axes, text, (value or 0, place), (4, 0), ink, va="center")


def _draw_scatter(
    axes: "Axes",
    colours: Theme,
    points: Sequence[tuple[int, float, float]],
    sign: int,
    peaks_gib: Mapping[int, float],
) -> None:
    """Draw points by number; those with a GPU peak in its colour, the best with a thick edge."""
    theme.style_axes(axes, colours, grid="both")
    best = frontier(points, sign)
    axes.plot([x for _, x, _ in best], [y for _, _, y in best], color=colours.muted, linewidth=1)
    best_places = {place for place, _, _ in best}
    for index, (place, x, y) in enumerate(points):
        is_best = place in best_places
        axes.plot(
            [x],
            [y],
            "o",
            markersize=8,
            color=_colour(peaks_gib, place, colours.accent if is_best else colours.background),
            markeredgecolor=colours.ink if peaks_gib and is_best else colours.accent,
            markeredgewidth=1.8 if is_best else 1.0,
        )
        offset = _LABEL_OFFSETS[index % len(_LABEL_OFFSETS)]
        theme.beside(axes, str(place), (x, y), offset, colours.ink, fontsize=9.5)
    axes.margins(0.14)
    _set_scale(axes, "x", [x for _, x, _ in points])
    _set_scale(axes, "y", [y for _, _, y in points])


def _colour(peaks_gib: Mapping[int, float], place: int, otherwise: str) -> Any:
    """Return the colour of a point's GPU peak between the least and the largest of all."""
    if place not in peaks_gib:
        return otherwise
    from matplotlib import colormaps

    low, high = min(peaks_gib.values()), max(peaks_gib.values())
    share = (peaks_gib[place] - low) / (high - low) if high > low else 0.5
    return colormaps[COLOUR_MAP](share)


def _draw_scale(figure: "Figure", axes: "Axes", colours: Theme, peaks_gib: list[float]) -> None:
    """Draw what the colours of the points mean."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    ends = (min(peaks_gib), max(peaks_gib))
    if ends[0] == ends[1]:
        ends = (ends[0] * 0.9, ends[1] * 1.1 or 1.0)
    scale = ScalarMappable(norm=Normalize(*ends), cmap=COLOUR_MAP)
    bar = figure.colorbar(scale, ax=axes, location="top", fraction=0.06, pad=0.03)
    bar.set_label(PEAK.heading, color=colours.muted, fontsize=8.5)
    bar.set_ticks(list(ends), labels=[number(end) for end in ends])
    bar.ax.tick_params(colors=colours.muted, labelsize=8)
    bar.outline.set_visible(False)


def _set_scale(axes: "Axes", axis: Literal["x", "y"], values: Sequence[float]) -> None:
    """Make an axis logarithmic where its values differ 10-fold, else let it start at 0."""
    low, high = min(values), max(values)
    if low > 0 and high / low > 10:
        theme.log_axis(axes, axis, low / 2, high * 2.5)
    else:
        set_limits = axes.set_xlim if axis == "x" else axes.set_ylim
        set_limits(0, high * 1.18 or 1)
        axes.locator_params(axis=axis, nbins=5)


def ratio_figure(rows: Sequence[Run], colours: Theme) -> Drawing | None:
    """Draw each figure's ratio to the first run: right of the line where it is better."""
    base, others = rows[0], rows[1 : 1 + MOST_RUNS]
    marks: list[Mark] = []
    labels: list[str] = []
    for metric in comparable_metrics(rows):
        values = [(row, gain(metric, base.metrics, row.metrics)) for row in others]
        if not any(value for _, value in values):
            continue
        for row, value in values:
            if value:
                ends = gain_interval(metric, base.metrics, row.metrics)
                marks.append((len(labels), row.label, value, ends))
        labels.append(metric.label)
    if not labels:
        return None
    note = facts.figure_note(base.record)
    title = f"Times as good as {rows[0].label}"
    figure = theme.new_figure(colours, 1.4 + 0.3 * len(labels), title, note)
    axes = figure.subplots()
    theme.style_axes(axes, colours)
    _draw_marks(axes, colours, marks, [row.label for row in others])
    axes.axvline(1, color=colours.ink, linewidth=1.1)
    axes.set_xscale("log")
    found = [1.0, *(value for _, _, value, _ in marks)]
    ratio_axis(axes, colours, min(found) / 1.25, max(found) * 1.25)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlabel("better to the right")
    theme.draw_legend(figure, [axes], colours, 2)
    return Drawing(figure)


def _draw_marks(axes: "Axes", colours: Theme, marks: Sequence[Mark], runs: Sequence[str]) -> None:
    palette = [colours.accent, colours.second, *theme.SPARE_COLOURS]
    named: set[str] = set()
    for place, label, value, ends in marks:
        order = runs.index(label)
        y = place + 0.16 * (order - (len(runs) - 1) / 2)
        if ends is not None:
            axes.plot(ends, [y, y], color=palette[order], linewidth=1.6)
        shown = None if label in named else theme.plain(label, 40)
        named.add(label)
        axes.plot([value], [y], "o", color=palette[order], ms=7, ls="", label=shown)


def ratio_axis(axes: "Axes", colours: Theme, low: float, high: float) -> None:
    """Set the ends of a logarithmic axis of ratios, and ticks at round ones."""
    axes.set_xlim(low, high)
    axes.minorticks_off()
    named = ratio_ticks(low, high, LEAST_GAP * (2.5 if colours.is_narrow else 1))
    axes.set_xticks(named, [f"{tick:g}x" for tick in named])


def ratio_ticks(low: float, high: float, least_gap: float = LEAST_GAP) -> list[float]:
    """Return the round ratios between two that have room beside each other on a logarithmic axis.

    Args:
        low: end of the axis.
        high: the other one.
        least_gap: share of the axis between two of them.
    """
    found: list[float] = []
    for tick in TICKS:
        gaps = (abs(math.log(tick / other)) / math.log(high / low) for other in found)
        if low <= tick <= high and all(gap >= least_gap for gap in gaps):
            found.append(tick)
    return sorted(found)


def ratio_rows(record: RunRecord) -> list[Mapping[str, Any]]:
    """Return the ratios of a comparison that have a value."""
    found = facts.dig(record.samples, "ab.rows")
    rows = found if isinstance(found, list) else []
    return [row for row in rows if isinstance(row, Mapping) and row.get("ratio") is not None]


def sides_figure(record: RunRecord, colours: Theme) -> Drawing | None:
    """Draw b / a of each quantity with its interval; grey: what a against itself could give."""
    rows = ratio_rows(record)
    if not rows:
        return None
    note = facts.figure_note(record)
    title = "Side b over side a, with 95 % intervals; grey: within this machine's noise"
    figure = theme.new_figure(colours, 1.4 + _ROW_IN * len(rows), title, note)
    axes = figure.subplots()
    theme.style_axes(axes, colours)
    axes.axvline(1, color=colours.muted, linewidth=1)
    for place, row in enumerate(rows):
        _draw_row(axes, colours, place, row)
    chars, room = (22, 0.35) if colours.is_narrow else (48, 0.12)
    labels = ["\n".join(wrap(theme.plain(str(row["label"]), 48), chars)) for row in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    low, high = _limits(rows)
    if high / low > MOST_LINEAR:
        axes.set_xscale("log")
        ratio_axis(axes, colours, low, high * (high / low) ** room)
    else:
        axes.set_xlim(low, high + room * (high - low))
    axes.set_xlabel("b / a (1: equal)")
    return Drawing(figure)


def _draw_row(axes: "Axes", colours: Theme, place: int, row: Mapping[str, Any]) -> None:
    ratio = float(row["ratio"])
    if row.get("resolution"):
        share = min(float(row["resolution"]), WIDEST - 1)
        left = 1 / (1 + share)
        axes.barh(place, 1 + share - left, left=left, height=0.7, color=colours.grid)
    colour = colours.accent if str(row["verdict"]).startswith("b is") else colours.muted
    if row.get("low") is not None and row.get("high") is not None:
        ends = [max(float(row["low"]), 1 / WIDEST), min(float(row["high"]), WIDEST)]
        axes.plot(ends, [place, place], color=colour, linewidth=2.5, solid_capstyle="butt")
    axes.plot([min(max(ratio, 1 / WIDEST), WIDEST)], [place], "o", color=colour, markersize=6)
    theme.beside(
        axes,
        f"{ratio:.3f}",
        (1.0, place),
        (-4, 0),
        colours.ink,
        xycoords=("axes fraction", "data"),
        ha="right",
        va="center",
    )


def _limits(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the ends of the axis: all intervals, cut off at WIDEST, and a little room."""
    values = [1 - LEAST_SPAN, 1 + LEAST_SPAN]
    for row in rows:
        share = float(row.get("resolution") or 0)
        values += [1 / (1 + share), 1 + share]
        values += [float(row[key]) for key in ("ratio", "low", "high") if row.get(key) is not None]
    low, high = max(min(values), 1 / WIDEST), min(max(values), WIDEST)
    room = (high / low) ** 0.05
    return low / room, high * room


SWEEP_FIGURES: Final[Mapping[str, Callable[[Sequence[Row], Theme], Drawing | None]]] = (
    MappingProxyType({"comparison": comparison_figure, "tradeoff": tradeoff_figure})
)
"""Name (also of the PNG file) -> figure of a sweep."""


PLAN_CSV: Final = "plan.csv"
PLAN_PNG: Final = "plan.png"
PLAN_PANELS: Final = (
    ("decode_tokens_s", "decode tokens/s,\nbatch 1"),
    ("queue_output_tokens_s", "output tokens/s,\na queue of 200"),
)
KINDS: Final = ("none", "lossless", "uva", "prefetch", "auto", "as set")
COLOURS: Final = ("#9498a0", "#3ca951", "#97b4f5", "#4269d0", "#e0a30c", "#a463f2")
MOST_POINTS: Final = 60
LOG_RATIO: Final = 30
"""Values that differ by more are drawn on a logarithmic axis."""
PlanRow = Mapping[str, str]


def write_plan_figure(folder: Path, out: Path | None = None) -> Path:
    """Draw the plan of a sweep's folder; return the file.

    Raises:
        RecordError: the folder's CSV has no points or lacks a column.
        ImportError: matplotlib is absent.
    """
    path = folder / PLAN_CSV
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = {"point", "offload", "fits", *(name for name, _ in PLAN_PANELS)}
    if not rows or not wanted <= set(rows[0]):
        raise RecordError(f"{path}: expected the points of a planned sweep, found none.")
    target = (out or folder) / PLAN_PNG
    target.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(target, plan_figure(rows).png())
    return target


def plan_figure(rows: Sequence[PlanRow]) -> Drawing:
    """Draw a bar for each way to place the weights of each point; a cross where it does not fit."""
    colours = THEMES["light"]
    every = list(dict.fromkeys(row["point"] for row in rows))
    points, left_out = every[:MOST_POINTS], len(every) - MOST_POINTS
    kinds = [kind for kind in KINDS if any(kind_of(row) == kind for row in rows)]
    note = "crosses do not fit; nothing was measured"
    if left_out > 0:
        note += f"; {left_out} more points are in {PLAN_CSV}"
    height_in = 1.5 + 0.16 * len(points) * len(kinds) + 0.12 * len(points)
    figure = theme.new_figure(colours, height_in, "Predicted rates of each point", note)
    panels = list(figure.subplots(1, len(PLAN_PANELS), sharey=True))
    for axes, (column, label) in zip(panels, PLAN_PANELS, strict=True):
        _draw_rates(axes, colours, rows, points, kinds, column)
        axes.set_xlabel(label)
    panels[0].set_yticks(range(len(points)), [theme.plain(short(point), 40) for point in points])
    panels[0].set_ylim(len(points) - 0.5, -0.5)
    theme.draw_legend(figure, panels[:1], colours, len(kinds))
    return Drawing(figure)


def short(point: str) -> str:
    """Return a point's values without their keys, of a path its end; one without any as it is."""
    values = (text.partition("=")[2] or text for text in point.split())
    return " ".join(value.rstrip("/").rpartition("/")[2] for value in values)


def kind_of(row: PlanRow) -> str:
    """Return which of KINDS a row is: the backend, or as set."""
    label = row["offload"]
    return "as set" if label.endswith("(as set)") else label.split(",")[0]


def _draw_rates(
    axes: "Axes",
    colours: Theme,
    rows: Sequence[PlanRow],
    points: Sequence[str],
    kinds: Sequence[str],
    column: str,
) -> None:
    theme.style_axes(axes, colours)
    found = {(row["point"], kind_of(row)): row[column] for row in rows}
    values = [float(text) for text in found.values() if text]
    least, most = min(values, default=1.0), max(values, default=1.0)
    is_log = most / least > LOG_RATIO
    if is_log:
        theme.log_axis(axes, "x", least / 3, most * 4)
    else:
        axes.set_xlim(0, most * 1.25)
    width = 0.8 / len(kinds)
    for index, kind in enumerate(kinds):
        shift = (index - (len(kinds) - 1) / 2) * width
        here = [(place, found.get((point, kind))) for place, point in enumerate(points)]
        bars = [(place + shift, float(text)) for place, text in here if text]
        axes.barh(
            [place for place, _ in bars],
            [value for _, value in bars],
            height=width * 0.92,
            color=COLOURS[KINDS.index(kind)],
            label=kind,
        )
        for place, value in bars:
            theme.beside(
                axes, number(value), (value, place), (3, 0), colours.ink, fontsize=6.5, va="center"
            )
        crosses = [place + shift for place, text in here if text == ""]
        left = axes.get_xlim()[0]
        start = left * 1.15 if is_log else 0.02 * most
        axes.plot(
            [start] * len(crosses), crosses, "x", color=COLOURS[KINDS.index(kind)], markersize=4
        )
