"""The figure of a comparison: ratios to the first run on a logarithmic axis."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from reports import facts, theme
from reports.sweep import Row
from reports.theme import THEMES, Drawing, Theme, ThemeName
from reports.versus import compared_metrics, ratio, ratio_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_RUNS: Final = 6
Mark = tuple[int, str, float, tuple[float, float] | None]
"""Row of a ratio from the top, run, ratio and its interval."""

TICKS: Final = (1, 2, 0.5, 10, 0.1, 5, 0.2, 100, 0.01, 20, 50, 0.02, 0.05, 1.25, 0.8, 1.1, 0.9)
"""What an axis of ratios may name; the first ones come first where there is no room for all."""
LEAST_GAP: Final = 0.12
"""Of the axis' length, between two that are named."""


def ratio_figure(rows: Sequence[Row], theme_name: ThemeName = "light") -> Drawing | None:
    """Draw each figure's ratio to the first run: right of the line where it is better."""
    records = [row.record for row in rows if row.record]
    base, others = records[0], [row for row in rows[1:] if row.record][:MOST_RUNS]
    marks: list[Mark] = []
    labels: list[str] = []
    for metric in compared_metrics(records):
        is_more = metric.better == "higher"
        values = [(row, ratio(base, row.record, metric.name)) for row in others if row.record]
        if not any(value for _, value in values):
            continue
        for row, value in values:
            if value and row.record:
                ends = ratio_interval(base, row.record, metric.name)
                mark = value if is_more else 1 / value
                if ends is not None and not is_more:
                    ends = (1 / ends[1], 1 / ends[0])
                marks.append((len(labels), row.label, mark, ends))
        labels.append(metric.label if is_more else f"{metric.label} (inverse)")
    if not labels:
        return None
    colours = THEMES[theme_name]
    note = facts.figure_note(base)
    title = f"Times as good as {rows[0].label}"
    figure = theme.new_figure(colours, 1.4 + 0.3 * len(labels), title, note)
    axes = figure.subplots()
    theme.style_axes(axes, colours)
    _draw_marks(axes, colours, marks, [row.label for row in others])
    axes.axvline(1, color=colours.ink, linewidth=1.1)
    axes.set_xscale("log")
    found = [1.0, *(value for _, _, value, _ in marks)]
    ratio_axis(axes, min(found) / 1.25, max(found) * 1.25)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlabel("better to the right")
    theme.draw_legend(figure, [axes], colours, 2)
    return theme.to_png(figure)


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


def ratio_axis(axes: "Axes", low: float, high: float) -> None:
    """Set the ends of a logarithmic axis of ratios, and ticks at round ones."""
    axes.set_xlim(low, high)
    axes.minorticks_off()
    named = ratio_ticks(low, high)
    axes.set_xticks(named, [f"{tick:g}x" for tick in named])


def ratio_ticks(low: float, high: float) -> list[float]:
    """Return the round ratios between two that have room beside each other on a logarithmic axis.

    Args:
        low: end of the axis.
        high: the other one.
    """
    found: list[float] = []
    for tick in TICKS:
        gaps = (abs(math.log(tick / other)) / math.log(high / low) for other in found)
        if low <= tick <= high and all(gap >= LEAST_GAP for gap in gaps):
            found.append(tick)
    return sorted(found)
