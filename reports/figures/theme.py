"""Colours, widths and the surface that all figures share; matplotlib is imported when drawing."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import cycle
from textwrap import wrap
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from reports.record.text import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE_IN: Final = 10.25
"""Width of the column of a page at 96 pixels an inch: text is as large as it says."""
NARROW_IN: Final = 3.75
"""The same on a phone, and half of a printed page."""
DPI: Final = 144
_TITLE_CHARS_IN: Final = 10
"""Characters of a title that an inch has room for."""
_LABEL_IN: Final = 0.075
"""Width of a character of a legend."""
_KEY_IN: Final = 0.42
"""Width of a legend's key and the gaps around it."""
_TITLE_IN: Final = 0.2
"""Height of a line of a title; figures have room for two."""
_ROW_IN: Final = 0.19
"""Height of a row of a legend."""
LOG_STEPS: Final = ((1.3, (1, 2, 5)), (2.3, (1, 3)))
"""Decades of a logarithmic axis up to which these numbers of each have a tick; else its first."""
MOST_DECADES: Final = 5


@dataclass(frozen=True, kw_only=True)
class Theme:
    """Colours of a page and of the figures on it, as #rrggbb."""

    background: str
    ink: str
    muted: str
    grid: str
    accent: str
    second: str
    alarm: str
    good: str
    width_in: float = WIDE_IN
    """Width of a figure."""

    @property
    def is_narrow(self) -> bool:
        """Whether panels stand below each other, for want of width."""
        return self.width_in < WIDE_IN / 2

    @property
    def narrow(self) -> "Theme":
        """The same colours on a narrow figure."""
        return replace(self, width_in=NARROW_IN)


THEMES: Final[Mapping[str, Theme]] = MappingProxyType(
    {
        "light": Theme(
            background="#ffffff",
            ink="#1c2024",
            muted="#60646c",
            grid="#e0e3e8",
            accent="#2f62c9",
            second="#c2790b",
            alarm="#d0342c",
            good="#1f7a3f",
        ),
        "dark": Theme(
            background="#16191d",
            ink="#e8eaed",
            muted="#a0a6ae",
            grid="#30353c",
            accent="#7aa2f7",
            second="#e8ab4c",
            alarm="#ff6b63",
            good="#5fc98a",
        ),
    }
)

PART_COLOURS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "weights": "#4269d0",
        "prefetch_slots": "#3ca951",
        "staging_slots": "#8fd19e",
        "kv_cache": "#e0a30c",
        "activations": "#a463f2",
        "logits": "#e377b5",
        "graphs": "#9c6b4e",
        "runtime": "#9498a0",
        "pinned_weights": "#4269d0",
        "pageable_weights": "#97b4f5",
        "kv_blocks": "#e0a30c",
        "read": "#4269d0",
        "convert": "#97b4f5",
        "pin": "#a463f2",
        "copy": "#3ca951",
        "keep": "#8fd19e",
        "warm_up": "#e0a30c",
        "first_token": "#e377b5",
        "import": "#9498a0",
        "plan": "#c2c6cd",
        "tokenizer": "#c8a2e8",
        "allocate": "#6cc5b0",
        "build": "#7f8790",
    }
)
"""A part has one colour in every figure and table."""

SPARE_COLOURS: Final = ("#6cc5b0", "#9c6b4e", "#c8a2e8", "#7f8790", "#b5bd3c", "#d98880", "#5b8c2a")


def part_colours(names: Sequence[str]) -> dict[str, str]:
    """Return a colour for each part; names without one of their own have what no other one has."""
    own = {name: PART_COLOURS.get(name.removesuffix("_s")) for name in names}
    spare = cycle(colour for colour in SPARE_COLOURS if colour not in own.values())
    return {name: colour or next(spare) for name, colour in own.items()}


def plain(text: str, length: int = 30) -> str:
    """Return text that a figure can draw: short, one line, no formulas, no missing glyphs."""
    line = shorten(text, length)
    latin = line.encode("latin-1", "replace").decode("latin-1")
    return "".join(c if c.isprintable() else "?" for c in latin).replace("$", r"\$")


def new_figure(theme: Theme, height_in: float, title: str, note: str = "") -> "Figure":
    """Return an empty figure with a title on the left and a note on the line below it."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
    found = [
        line
        for text in (title, note)
        for line in wrap(plain(text, 120), int(_TITLE_CHARS_IN * theme.width_in))
    ]
    more_in = _TITLE_IN * max(0, len(found) - 2)
    size_in = (theme.width_in, height_in + more_in)
    figure = Figure(figsize=size_in, dpi=DPI, layout=layout)
    figure.set_facecolor(theme.background)
    lines = "\n".join(found)
    figure.suptitle(
        lines, x=0.07 / theme.width_in, ha="left", fontsize=11.5, fontweight="bold", color=theme.ink
    )
    return figure


def panels(figure: "Figure", theme: Theme, count: int, *, shares_y: bool = False) -> "list[Axes]":
    """Return axes beside each other, on a narrow figure below each other."""
    if theme.is_narrow:
        return list(figure.subplots(count, 1, squeeze=False).flat)
    return list(figure.subplots(1, count, sharey=shares_y, squeeze=False).flat)


def style_axes(axes: "Axes", theme: Theme, *, grid: Literal["x", "y", "both"] = "x") -> None:
    """Give axes the theme's colours, a light grid and no frame."""
    axes.set_facecolor(theme.background)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom" or (side == "left" and grid != "x"))
        spine.set_color(theme.grid)
    axes.tick_params(colors=theme.muted, labelsize=9, length=3, color=theme.grid)
    for one in (axes.xaxis, axes.yaxis):
        one.set_major_formatter("{x:,.6g}")
    axes.xaxis.label.set_color(theme.muted)
    axes.yaxis.label.set_color(theme.muted)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
    axes.grid(visible=True, axis=grid, color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    if theme.is_narrow:
        axes.locator_params(axis="x", nbins=4)


def log_axis(axes: "Axes", axis: Literal["x", "y"], low: float, high: float) -> None:
    """Make an axis logarithmic between two ends above 0, with ticks at round numbers."""
    ticks = log_ticks(low, high)
    axes.set(**{f"{axis}scale": "log", f"{axis}lim": (low, high)})
    set_ticks = axes.set_xticks if axis == "x" else axes.set_yticks
    set_ticks(ticks, [f"{tick:,.6g}" for tick in ticks])
    axes.minorticks_off()


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two: 1, 2 and 5 of each decade, or few of many decades."""
    first, last = math.floor(math.log10(low)), math.floor(math.log10(high))
    steps = next((s for most, s in LOG_STEPS if math.log10(high / low) <= most), (1,))
    stride = max(1, (last - first) // MOST_DECADES)
    found = (step * 10.0**power for power in range(first, last + 1, stride) for step in steps)
    return [tick for tick in found if low <= tick <= high]


def draw_legend(
    figure: "Figure", panels: "Sequence[Axes]", theme: Theme, num_columns: int = 4
) -> None:
    """Draw one legend of all axes along the figure's lower edge, without a frame."""
    handles, labels = [], []
    for axes in panels:
        found = axes.get_legend_handles_labels()
        handles += found[0]
        labels += found[1]
    if not labels:
        return
    column_in = _KEY_IN + _LABEL_IN * max(map(len, labels))
    fitting = max(1, min(num_columns, int((theme.width_in - 0.2) / column_in)))
    more_rows = -(-len(labels) // fitting) - -(-len(labels) // num_columns)
    figure.set_figheight(figure.get_figheight() + _ROW_IN * more_rows)
    figure.legend(
        handles,
        labels,
        loc="outside lower left",
        ncols=fitting,
        frameon=False,
        fontsize=9,
        labelcolor=theme.ink,
        handlelength=1.0,
        handleheight=1.0,
        columnspacing=1.4,
    )


def beside(
    axes: "Axes",
    text: str,
    at: tuple[float, float],
    offset: tuple[float, float],
    colour: str,
    **style: Any,
) -> None:
    """Write beside a place of the data, `offset` points away."""
    style = {"fontsize": 9} | style
    axes.annotate(text, at, xytext=offset, textcoords="offset points", color=colour, **style)


def inside_text(axes: "Axes", x: float, y: float, text: str, colour: str) -> None:
    """Write inside a bar of the given colour."""
    ink = ink_on(colour)
    axes.text(x, y, text, ha="center", va="center", fontsize=9, color=ink, fontweight="bold")


def ink_on(colour: str) -> str:
    """Return nearly black or white, whichever is easier to read on a #rrggbb colour.

    Neither is a colour of a theme: it stays as it is in the dark (`adaptive`).
    """
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#fefefe" if 0.299 * red + 0.587 * green + 0.114 * blue < 145 else "#17191d"


@dataclass(frozen=True)
class Drawing:
    """A figure, of which each kind of file is made when it is asked for."""

    figure: "Figure"

    def png(self) -> bytes:
        """Return the figure as PNG."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        buffer = io.BytesIO()
        # savefig would draw twice: once to lay out, once to render.
        FigureCanvasAgg(self.figure).print_png(buffer)  # type: ignore[no-untyped-call]
        return buffer.getvalue()

    def svg(self) -> bytes:
        """Return the figure as SVG, its text as text; equal figures give equal bytes."""
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG

        buffer = io.BytesIO()
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "tightfit"}):
            canvas = FigureCanvasSVG(self.figure)
            canvas.print_svg(buffer, metadata={"Date": None})  # type: ignore[no-untyped-call]
        return buffer.getvalue()


def adaptive(svg: bytes) -> bytes:
    """Return a light figure as SVG that follows the reader's colour scheme, in the page's font.

    For a page alone: what draws a file of its own need not know variables of CSS.
    """
    text = re.sub(rb"font-family: [^;]*", b"font-family: system-ui, sans-serif", svg)
    rules = {"light": "", "dark": ""}
    for item in fields(Theme):
        if item.name != "width_in":
            light, dark = (getattr(THEMES[name], item.name) for name in ("light", "dark"))
            text = text.replace(light.encode(), f"var(--{item.name})".encode())
            rules["light"] += f"--{item.name}: {light}; "
            rules["dark"] += f"--{item.name}: {dark}; "
    style = (
        f"<style>:root {{ {rules['light']}}}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {rules['dark']}}} }}</style>\n <metadata>"
    )
    return text.replace(b"<metadata>", style.encode(), 1)
