"""Figures of a sweep: one bar a point, and output rate against what it costs."""

from collections.abc import Callable, Mapping, Sequence
from textwrap import wrap
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from reports import facts, theme
from reports.record.metrics import METRICS, Metric, shared
from reports.record.text import last_keys, number
from reports.sweep import Row
from reports.theme import THEMES, Drawing, Theme, ThemeName

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


def comparison_figure(rows: Sequence[Row], theme_name: ThemeName = "light") -> Drawing | None:
    """Draw output rate and TPOT of each point; a point without a figure shows its status."""
    colours = THEMES[theme_name]
    shown = list(rows[:MAX_BARS])
    records = [row.record for row in rows if row.record]
    tpot = shared(TPOT, [record.metrics for record in records])
    panels = [metric for metric in (OUTPUT, tpot) if any(_value(row, metric) for row in shown)]
    if not panels:
        return None
    cut = f", first {MAX_BARS} of {len(rows)}" if len(rows) > MAX_BARS else ""
    height_in = 1.3 + 0.34 * len(shown)
    figure = theme.new_figure(
        colours, height_in, f"Points compared{cut}", facts.figure_note(*records)
    )
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for axes, metric in zip(grid.flat, panels, strict=True):
        colour = colours.accent if metric is OUTPUT else colours.second
        _draw_bars(axes, colours, shown, metric, colour)
        word = "more" if metric.better == "higher" else "less"
        axes.set_xlabel(f"{metric.heading}, {word} is better")
    names = [f"{row.place}. {last_keys(row.label)}" for row in shown]
    labels = ["\n".join(wrap(theme.plain(name, 44), 22)) for name in names]
    grid[0, 0].set_yticks(range(len(shown)), labels)
    grid[0, 0].set_ylim(len(shown) - 0.4, -0.6)
    return theme.to_png(figure)


def tradeoff_figure(rows: Sequence[Row], theme_name: ThemeName = "light") -> Drawing | None:
    """Draw output rate over the rate of one request, and over GPU peak; points by number.

    The line joins the points that no other point beats in both.
    """
    colours = THEMES[theme_name]
    records = [row.record for row in rows if row.record]
    tpot = shared(TPOT, [record.metrics for record in records])
    speed, memory = [], []
    for row in rows:
        output, gap_ms = _value(row, OUTPUT), _value(row, tpot)
        peak_gib = _value(row, PEAK)
        if output is not None and gap_ms:
            speed.append((row.place, 1000 / gap_ms, output))
        if output is not None and peak_gib is not None:
            memory.append((row.place, peak_gib, output))
    panels = [
        (speed, "tokens/s of one request (1000 / TPOT)", 1),
        (memory, PEAK.heading, -1),
    ]
    panels = [panel for panel in panels if len(panel[0]) >= 2]
    if not panels:
        return None
    figure = theme.new_figure(
        colours, 3.9, "Output rate against its cost", facts.figure_note(*records)
    )
    grid = figure.subplots(1, len(panels), squeeze=False)
    for axes, (points, label, sign) in zip(grid.flat, panels, strict=True):
        is_coloured = points is speed and len(memory) >= 2
        _draw_scatter(axes, colours, points, sign, dict(_peaks(memory)) if is_coloured else {})
        axes.set_xlabel(label)
    if len(memory) >= 2 and speed and panels[0][0] is speed:
        _draw_scale(figure, grid[0, 0], colours, [peak for _, peak in _peaks(memory)])
    grid[0, 0].set_ylabel(OUTPUT.heading)
    return theme.to_png(figure)


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


Draw = Callable[[Sequence[Row], ThemeName], Drawing | None]

SWEEP_FIGURES: Final[Mapping[str, Draw]] = MappingProxyType(
    {
        "comparison": comparison_figure,
        "tradeoff": tradeoff_figure,
    }
)
"""Name (also of the PNG file) -> figure of a sweep."""


def _value(row: Row, metric: Metric) -> float | None:
    return row.record.metrics.get(metric.name) if row.record else None


def _draw_bars(
    axes: "Axes", colours: Theme, rows: Sequence[Row], metric: Metric, colour: str
) -> None:
    theme.style_axes(axes, colours)
    values = [_value(row, metric) for row in rows]
    longest = max(value for value in values if value is not None)
    axes.set_xlim(0, longest * 1.25 or 1)
    axes.locator_params(axis="x", nbins=5)
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        is_bad = value is None and row.status != "ok"
        text = row.status if is_bad else number(value)
        if value is not None:
            axes.barh(place, value, height=0.62, color=colour)
        axes.annotate(
            text,
            (value or 0, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=colours.alarm if is_bad else colours.ink,
        )


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
        axes.annotate(
            str(place),
            (x, y),
            xytext=_LABEL_OFFSETS[index % len(_LABEL_OFFSETS)],
            textcoords="offset points",
            fontsize=9.5,
            color=colours.ink,
        )
    axes.margins(0.14)
    _set_scale(axes, "x", [x for _, x, _ in points])
    _set_scale(axes, "y", [y for _, _, y in points])


def _peaks(memory: Sequence[tuple[int, float, float]]) -> list[tuple[int, float]]:
    return [(place, peak_gib) for place, peak_gib, _ in memory]


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
