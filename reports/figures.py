"""Figures of one run, each a function from a record to PNG bytes, or None without its data."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from reports import facts, theme
from reports.kv_figure import kv_figure
from reports.memory_figure import memory_figure
from reports.record.metrics import METRICS, of_samples
from reports.record.record import RunRecord, summarise
from reports.record.text import label_of, number
from reports.roofline import roofline_figure
from reports.theme import THEMES, Drawing, Theme, ThemeName
from reports.timeline_figure import timeline_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    "compile",
    "warm_up",
    "capture",
    "build",
    "first_token",
)


def latency_figure(record: RunRecord, theme_name: ThemeName = "light") -> Drawing | None:
    """Draw the share of requests within each latency (TTFT, TPOT, ITL, E2E)."""
    colours = THEMES[theme_name]
    columns = [
        (metric, facts.latency_values(record, metric.quantity)) for metric in of_samples("latency")
    ]
    panels = [(metric, values) for metric, values in columns if values]
    if not panels:
        return None
    num_rows = (len(panels) + 1) // 2
    count = len(facts.complete_rows(record))
    title = f"Latency of {count} requests: share at or below"
    figure = theme.new_figure(colours, 0.7 + 2.3 * num_rows, title, facts.figure_note(record))
    grid = figure.subplots(num_rows, min(2, len(panels)), squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (metric, values) in zip(grid.flat, panels, strict=False):
        bound_ms = facts.link_bound_ms(record) if metric.name == "latency/tpot_ms" else None
        _draw_distribution(axes, colours, values, metric.heading, bound_ms)
    return theme.to_png(figure)


def throughput_figure(record: RunRecord, theme_name: ThemeName = "light") -> Drawing | None:
    """Draw the token rates: bars, or points on a logarithmic axis where they differ 30-fold."""
    colours = THEMES[theme_name]
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
        axes.annotate(
            number(value),
            (value, place),
            xytext=(9 if is_log else 5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
            color=colours.ink,
        )
    return theme.to_png(figure)


def load_figure(record: RunRecord, theme_name: ThemeName = "light") -> Drawing | None:
    """Draw the critical-path phases of each start as one stacked bar."""
    colours = THEMES[theme_name]
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
    return theme.to_png(figure)


Draw = Callable[[RunRecord, ThemeName], Drawing | None]

FIGURES: Final[Mapping[str, Draw]] = MappingProxyType(
    {
        "memory": memory_figure,
        "latency": latency_figure,
        "throughput": throughput_figure,
        "load": load_figure,
        "kv": kv_figure,
        "timeline": timeline_figure,
        "roofline": roofline_figure,
    }
)
"""Name (also of the PNG file) -> figure of one run."""


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
    shares = [100 * (i + 1) / len(ordered) for i in range(len(ordered))]
    theme.style_axes(axes, colours, grid="both")
    xs, ys = [ordered[0], *ordered], [0.0, *shares]
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
    axes.annotate(
        text,
        (x, y),
        xytext=(4 if is_right else -4, 0),
        textcoords="offset points",
        ha="left" if is_right else "right",
        fontsize=9,
        color=colour,
        bbox={"facecolor": colours.background, "alpha": 0.75, "pad": 1.2, "linewidth": 0},
    )
