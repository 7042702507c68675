"""The memory figure of one run: planned bytes by part against the GPU budget and the host limit."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from reports import facts, theme
from reports.record.record import RunRecord
from reports.record.text import GIB, gib, label_of, number
from reports.theme import THEMES, Drawing, Theme, ThemeName

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LIMIT_SHARE: Final = 4
"""A limit this many times the bytes is named, not drawn, so that the parts stay visible."""


@dataclass(frozen=True, kw_only=True)
class _Side:
    """One bar: its parts in bytes, its limit, and what was measured."""

    label: str
    parts: Mapping[str, float]
    limit_bytes: float | None
    word: str
    """What the limit is called."""
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
        """Where the axis has to reach."""
        limit = self.limit_bytes if self.is_limit_drawn and self.limit_bytes else 0
        return max(self.used_bytes, limit)


def memory_figure(record: RunRecord, theme_name: ThemeName = "light") -> Drawing | None:
    """Draw the planned GPU bytes by part against the budget, with the host's bytes below.

    Both bars share a scale unless one is more than MAX_LIMIT_SHARE times the other.
    """
    colours = THEMES[theme_name]
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
    theme.draw_legend(figure, panels, colours, 3)
    return theme.to_png(figure)


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
    axes.set_ylim(-0.78, 0.78)
    axes.set_yticks([0], [side.label])
    axes.set_xlabel(unit)
    _draw_parts(axes, colours, side, unit_bytes)
    _draw_limit(axes, colours, side, unit_bytes)
    if side.peak_bytes is not None:
        peak = side.peak_bytes / unit_bytes
        ground, ink = colours.background, colours.ink
        axes.plot([peak], [0], "D", color=ground, markeredgecolor=ink, clip_on=False, zorder=5)
        is_left = peak > end / 2
        axes.annotate(
            f"measured peak {gib(side.peak_bytes)}",
            (peak, -0.52),
            xytext=(4 if is_left else -4, 0),
            textcoords="offset points",
            ha="right" if is_left else "left",
            fontsize=9,
            color=ink,
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
