"""The figure of a planned sweep: predicted rates of every point, from the CSV of mode=plan."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from reports.figures import theme
from reports.figures.theme import THEMES, Drawing, Theme
from reports.record.record import RecordError, write_bytes_atomic
from reports.record.text import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLAN_CSV: Final = "plan.csv"
PLAN_PNG: Final = "plan.png"
PANELS: Final = (
    ("decode_tokens_s", "decode tokens/s,\nbatch 1"),
    ("queue_output_tokens_s", "output tokens/s,\na queue of 200"),
)
KINDS: Final = ("none", "lossless", "uva", "prefetch", "auto", "as set")
COLOURS: Final = ("#9498a0", "#3ca951", "#97b4f5", "#4269d0", "#e0a30c", "#a463f2")
MOST_POINTS: Final = 60
LOG_RATIO: Final = 30
"""Values that differ by more are drawn on a logarithmic axis."""
Row = Mapping[str, str]


def write_plan_figure(folder: Path, out: Path | None = None) -> Path:
    """Draw the plan of a sweep's folder; return the file.

    Raises:
        RecordError: the folder's CSV has no points or lacks a column.
        ImportError: matplotlib is absent.
    """
    path = folder / PLAN_CSV
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = {"point", "offload", "fits", *(name for name, _ in PANELS)}
    if not rows or not wanted <= set(rows[0]):
        raise RecordError(f"{path}: expected the points of a planned sweep, found none.")
    target = (out or folder) / PLAN_PNG
    target.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(target, plan_figure(rows).png())
    return target


def plan_figure(rows: Sequence[Row]) -> Drawing:
    """Draw a bar for each way to place the weights of each point; a cross where it does not fit.

    Args:
        rows: lines of the CSV.
    """
    colours = THEMES["light"]
    every = list(dict.fromkeys(row["point"] for row in rows))
    points, left_out = every[:MOST_POINTS], len(every) - MOST_POINTS
    kinds = [kind for kind in KINDS if any(kind_of(row) == kind for row in rows)]
    note = "crosses do not fit; nothing was measured"
    if left_out > 0:
        note += f"; {left_out} more points are in {PLAN_CSV}"
    height_in = 1.5 + 0.16 * len(points) * len(kinds) + 0.12 * len(points)
    figure = theme.new_figure(colours, height_in, "Predicted rates of each point", note)
    panels = list(figure.subplots(1, len(PANELS), sharey=True))
    for axes, (column, label) in zip(panels, PANELS, strict=True):
        _draw(axes, colours, rows, points, kinds, column)
        axes.set_xlabel(label)
    panels[0].set_yticks(range(len(points)), [theme.plain(short(point), 40) for point in points])
    panels[0].set_ylim(len(points) - 0.5, -0.5)
    theme.draw_legend(figure, panels[:1], colours, len(kinds))
    return Drawing(figure)


def short(point: str) -> str:
    """Return a point's values without their keys, of a path its end; one without any as it is."""
    values = (text.partition("=")[2] or text for text in point.split())
    return " ".join(value.rstrip("/").rpartition("/")[2] for value in values)


def kind_of(row: Row) -> str:
    """Return which of KINDS a row is: the backend, or as set."""
    label = row["offload"]
    return "as set" if label.endswith("(as set)") else label.split(",")[0]


def _draw(
    axes: "Axes",
    colours: Theme,
    rows: Sequence[Row],
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
