"""The token timeline of one run: when each request waited, began and gave its tokens."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from reports import facts, theme
from reports.page import Section
from reports.record.record import RunRecord
from reports.theme import THEMES, Drawing, Theme, ThemeName

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_REQUESTS: Final = 48
MOST_MARKS: Final = 4000
"""Tokens beyond which gaps are not marked one by one."""
Row = Mapping[str, object]


def timeline_section(record: RunRecord) -> Section | None:
    """Return the section, None without requests."""
    if _serve_rows(record):
        text = (
            "Each line is a request at the time of its arrival: pale until its first token, full"
            " until its last. A cross is one that failed.",
        )
    elif _latency_rows(record):
        text = (
            "Each line is a request from when it was sent: pale until its first token, then a mark"
            " for each token.",
        )
    else:
        return None
    return Section(title="Token timeline", text=text, figures=("timeline",))


def timeline_figure(record: RunRecord, theme_name: ThemeName = "light") -> Drawing | None:
    """Draw the requests of serve, else those of latency, one line each."""
    served, alone = _serve_rows(record), _latency_rows(record)
    rows = served or alone
    if not rows:
        return None
    shown = rows[:MOST_REQUESTS]
    colours = THEMES[theme_name]
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
    return theme.to_png(figure)


def _serve_rows(record: RunRecord) -> list[Row]:
    found = facts.dig(record.samples.get("serve"), "requests")
    rows = [row for row in found if isinstance(row, Mapping)] if isinstance(found, list) else []
    known = [row for row in rows if facts.dig_number(row, "scheduled_s") is not None]
    return sorted(known, key=lambda row: facts.dig_number(row, "scheduled_s") or 0.0)


def _latency_rows(record: RunRecord) -> list[Row]:
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
            axes.plot(times, [place] * len(times), "|", color=colours.accent, markersize=4.5)
        else:
            axes.plot([times[0], times[-1]], [place, place], color=colours.accent, lw=2.6)
        if row.get("error") is not None:
            axes.plot([times[-1]], [place], "x", color=colours.alarm, markersize=5)


def _gaps(row: Row) -> list[float]:
    found = row.get("itl_ms")
    cells = found if isinstance(found, list) else []
    return [float(cell) for cell in cells if isinstance(cell, int | float)]
