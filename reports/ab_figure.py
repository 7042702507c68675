"""The figure of a comparison: each ratio with its interval, and what side a shows of itself."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from reports import facts, theme
from reports.ratio_figure import ratio_axis
from reports.record.record import RunRecord
from reports.theme import THEMES, Drawing, Theme, ThemeName

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAST_SPAN: Final = 0.05
"""The axis reaches at least this far from 1 to either side."""
WIDEST: Final = 100.0
"""An interval that is wider than this factor to either side is cut off at it."""
MOST_LINEAR: Final = 3.0
"""Ratio of the axis' ends from which on it is logarithmic."""
_ROW_IN: Final = 0.36


def ratio_rows(record: RunRecord) -> list[Mapping[str, Any]]:
    """Return the ratios of a comparison that have a value."""
    found = facts.dig(record.samples, "ab.rows")
    rows = found if isinstance(found, list) else []
    return [row for row in rows if isinstance(row, Mapping) and row.get("ratio") is not None]


def ratio_figure(record: RunRecord, theme_name: ThemeName = "light") -> Drawing | None:
    """Draw b / a of each quantity with its interval; grey: what a against itself could give."""
    rows = ratio_rows(record)
    if not rows:
        return None
    colours = THEMES[theme_name]
    note = facts.figure_note(record)
    title = "Side b over side a, with 95 % intervals; grey: within this machine's noise"
    figure = theme.new_figure(colours, 1.4 + _ROW_IN * len(rows), title, note)
    axes = figure.subplots()
    theme.style_axes(axes, colours)
    axes.axvline(1, color=colours.muted, linewidth=1)
    for place, row in enumerate(rows):
        _draw_row(axes, colours, place, row)
    axes.set_yticks(range(len(rows)), [theme.plain(str(row["label"]), 48) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    low, high = _limits(rows)
    if high / low > MOST_LINEAR:
        axes.set_xscale("log")
        ratio_axis(axes, low, high * (high / low) ** 0.12)
    else:
        axes.set_xlim(low, high + 0.12 * (high - low))
    axes.set_xlabel("b / a (1: equal)")
    return theme.to_png(figure)


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
    axes.annotate(
        f"{ratio:.3f}",
        (1.0, place),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=9,
        color=colours.ink,
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
