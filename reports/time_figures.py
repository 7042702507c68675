"""Figures over the time of one run, from its telemetry: memory, and the GPU with its link."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from reports import facts, theme
from reports.page import Section
from reports.record.record import RunRecord
from reports.record.telemetry import Table
from reports.record.text import GIB, number
from reports.theme import THEMES, Drawing, Theme, ThemeName

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAST_ROWS: Final = 3
MOST_POINTS: Final = 1500
"""Points of a line; beyond it the highest of each span is drawn."""
PARTS: Final = ("latency", "throughput", "serve")
HOST_LINES: Final = (("rss_bytes", "resident"), ("pinned_bytes", "pinned"))
Line = tuple[list[float], list[float]]
"""Seconds since the first row, and values."""


def memory_time_figure(
    record: RunRecord, table: Table, theme_name: ThemeName = "light"
) -> Drawing | None:
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
    colours = THEMES[theme_name]
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
    return theme.to_png(figure)


def activity_figure(
    record: RunRecord, table: Table, theme_name: ThemeName = "light"
) -> Drawing | None:
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
    colours = THEMES[theme_name]
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
    return theme.to_png(figure)


Draw = Callable[[RunRecord, Table, ThemeName], Drawing | None]

TIME_FIGURES: Final[Mapping[str, Draw]] = MappingProxyType(
    {"memory_time": memory_time_figure, "activity": activity_figure}
)
"""Name (also of the image's file) -> figure over the rows of telemetry."""


def time_section(record: RunRecord) -> Section:
    """Return the section; what has no rows is not drawn."""
    gpu = (
        "GPU memory is that of all processes on the card; the link is the GPU's own counter, packet"
        " headers included. "
    )
    text = f"{'' if facts.is_emulated(record) else gpu}Shaded: what was timed."
    return Section(title="Over time", text=(text,), figures=("memory_time", "activity"))


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
    axes.annotate(
        text,
        (line[0][-1], value),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        color=colours.alarm,
    )


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
            panels[0].annotate(
                name,
                ((begin_s + end_s) / 2, 1),
                xycoords=("data", "axes fraction"),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=8.5,
                color=colours.muted,
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
