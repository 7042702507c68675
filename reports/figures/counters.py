"""What an engine counted over a timed part, as figures: the KV cache by tier, and experts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from reports import facts
from reports.figures import theme
from reports.figures.theme import Drawing, Theme
from reports.record.record import RunRecord
from reports.record.text import GIB, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes


TIERS: Final = (("gpu", "GPU"), ("cpu", "host"))
PARTS: Final = (("owned", "of sequences"), ("cached", "findable"), ("in_transit", "under way"))
FLOWS: Final = (
    ("moved.stored_bytes", "stored"),
    ("moved.loaded_bytes", "loaded"),
    ("in_place_bytes", "read in place"),
    ("copied_ahead_bytes", "copied ahead"),
)
LEAST_ROWS: Final = 2
LEAST_SHARE: Final = 0.05
"""Share of a tier's size; less is not seen on an axis up to that size."""


@dataclass(frozen=True, kw_only=True)
class KVTrace:
    """Rows of the KV cache by column."""

    part: str
    columns: Mapping[str, Sequence[float]]
    blocks: Mapping[str, float]
    block_bytes: float

    @property
    def time_s(self) -> Sequence[float]:
        """Seconds since the part began."""
        return self.columns["time_s"]

    def gib(self, column: str) -> list[float]:
        """Return a column of blocks in GiB."""
        zeros = [0.0] * len(self.time_s)
        return [blocks * self.block_bytes / GIB for blocks in self.columns.get(column, zeros)]

    def rates(self, column: str) -> list[float]:
        """Return by how many GB a second a column of bytes rose between two rows."""
        times, values = self.time_s, self.columns.get(column, [0.0] * len(self.time_s))
        return [
            (after - before) / 1e9 / (end_s - begin_s) if end_s > begin_s else 0.0
            for (begin_s, end_s), (before, after) in zip(
                pairwise(times), pairwise(values), strict=True
            )
        ]


def kv_trace(record: RunRecord) -> KVTrace | None:
    """Return the rows of the KV cache, None without rows or sizes."""
    found = record.samples.get("kv")
    if not isinstance(found, Mapping):
        return None
    names, rows = found.get("columns"), found.get("rows")
    if not isinstance(names, list) or not isinstance(rows, list) or len(rows) < LEAST_ROWS:
        return None
    places = dict(enumerate(map(str, names)))
    columns = {name: [row[place] for row in rows] for place, name in places.items()}
    sizes = facts.numbers(found)
    if "time_s" not in columns or not sizes.get("block_bytes"):
        return None
    return KVTrace(
        part=str(found.get("part", "")),
        columns=columns,
        blocks={tier: sizes.get(f"{tier}_blocks", 0.0) for tier, _ in TIERS},
        block_bytes=sizes["block_bytes"],
    )


def kv_figure(record: RunRecord, colours: Theme) -> Drawing | None:
    """Draw what each tier held over the last timed part, and what crossed the link meanwhile."""
    trace = kv_trace(record)
    if trace is None:
        return None
    tiers = [(tier, label) for tier, label in TIERS if trace.blocks[tier]]
    moves = any(any(trace.rates(column)) for column, _ in FLOWS)
    count = len(tiers) + moves
    if not tiers:
        return None
    note = facts.figure_note(record)
    title = f"KV cache by tier during {trace.part}"
    figure = theme.new_figure(colours, 1.0 + 1.5 * count, title, note)
    panels = list(figure.subplots(count, 1, sharex=True, squeeze=False).flat)
    for axes, (tier, label) in zip(panels, tiers, strict=False):
        _draw_tier(axes, colours, trace, tier, label)
    if moves:
        _draw_flows(panels[-1], colours, trace)
    panels[-1].set_xlabel("seconds since the part began")
    legends = [panels[0 if len(tiers) == 1 else 1], *panels[len(tiers) :]]
    theme.draw_legend(figure, legends, colours, 6)
    return Drawing(figure)


def _draw_tier(axes: "Axes", colours: Theme, trace: KVTrace, tier: str, label: str) -> None:
    """Stack what the tier held, below a line at its size."""
    theme.style_axes(axes, colours, grid="y")
    names = PARTS if tier == "cpu" else PARTS[:2]
    palette = (colours.accent, colours.second, colours.muted)
    held = [trace.gib(f"{tier}.{name}") for name, _ in names]
    axes.stackplot(
        trace.time_s,
        held,
        colors=palette[: len(names)],
        labels=[words for _, words in names],
        linewidth=0,
        alpha=0.85,
    )
    size = trace.blocks[tier] * trace.block_bytes / GIB
    most = max(map(sum, zip(*held, strict=True)))
    if 0 < most < LEAST_SHARE * size:
        axes.set_ylim(0, most * 1.5)
        text = f"size {number(size)} GiB, beyond the axis"
        place = axes.transAxes
        axes.text(
            1, 0.97, text, transform=place, ha="right", va="top", fontsize=9, color=colours.muted
        )
    else:
        axes.axhline(size, color=colours.ink, linewidth=1.2, linestyle="--")
        axes.set_ylim(0, size * 1.1)
    axes.set_xlim(trace.time_s[0], max(trace.time_s[-1], trace.time_s[0] + 1e-9))
    axes.set_ylabel(f"{label}, GiB")


def _draw_flows(axes: "Axes", colours: Theme, trace: KVTrace) -> None:
    theme.style_axes(axes, colours, grid="y")
    palette = theme.SPARE_COLOURS[: len(FLOWS)]
    for (column, words), colour in zip(FLOWS, palette, strict=True):
        rates = trace.rates(column)
        axes.step(
            trace.time_s,
            [*rates[:1], *rates],
            where="pre",
            color=colour,
            linewidth=1.6,
            label=words,
        )
    axes.set_ylim(bottom=0)
    axes.set_ylabel("link, GB/s")


EXPERT_COLUMNS: Final = ("time_s", "hits", "misses", "bytes")


@dataclass(frozen=True, kw_only=True)
class ExpertsTrace:
    """Counters of experts over a timed part, and by layer."""

    part: str
    rows: Sequence[Mapping[str, float]]
    """Seconds since the part began, and hits, misses and bytes since then."""
    layers: Mapping[str, Sequence[float]]
    """layer, hits, misses and bytes of the whole part."""

    def over_time(self) -> list[tuple[float, float, float | None, float]]:
        """Return begin and end (s), share of hits (None: no experts) and GB/s between two rows."""
        found = []
        for before, after in pairwise(self.rows):
            rose = {name: after[name] - before[name] for name in EXPERT_COLUMNS}
            used = rose["hits"] + rose["misses"]
            share = rose["hits"] / used if used else None
            rate = rose["bytes"] / 1e9 / rose["time_s"] if rose["time_s"] > 0 else 0.0
            found.append((before["time_s"], after["time_s"], share, rate))
        return found

    def by_layer(self) -> list[tuple[int, float | None, float]]:
        """Return number, share of hits (None: no experts) and GiB over the link of each layer."""
        columns = [self.layers[name] for name in ("layer", "hits", "misses", "bytes")]
        return [
            (int(layer), hits / (hits + misses) if hits + misses else None, size / GIB)
            for layer, hits, misses, size in zip(*columns, strict=True)
        ]


def experts_trace(record: RunRecord) -> ExpertsTrace | None:
    """Return the counters of experts, None without rows."""
    found = record.samples.get("experts")
    if not isinstance(found, Mapping):
        return None
    names, rows, layers = (found.get(name) for name in ("columns", "rows", "layers"))
    if not isinstance(names, list) or not isinstance(rows, list) or len(rows) < LEAST_ROWS:
        return None
    if not isinstance(layers, Mapping) or not set(EXPERT_COLUMNS) <= set(names):
        return None
    return ExpertsTrace(
        part=str(found.get("part", "")),
        rows=[dict(zip(names, row, strict=True)) for row in rows],
        layers=layers,
    )


def experts_figure(record: RunRecord, colours: Theme) -> Drawing | None:
    """Draw hits and bytes over the last timed part, and hits and bytes by layer."""
    trace = experts_trace(record)
    if trace is None:
        return None
    title = f"Experts found on the GPU during {trace.part}"
    figure = theme.new_figure(colours, 5.2, title, facts.figure_note(record))
    hits, rates, layers = figure.subplots(3, 1)
    hits.sharex(rates)
    spans = trace.over_time()
    for axes in (hits, rates, layers):
        theme.style_axes(axes, colours, grid="y")
    known = [(begin, end, share) for begin, end, share, _ in spans if share is not None]
    middles = [(begin + end) / 2 for begin, end, _ in known]
    shares = [100 * share for *_, share in known]
    hits.plot(middles, shares, color=colours.accent, linewidth=1.6, marker=".", markersize=4)
    hits.set_ylim(0, 105)
    hits.set_ylabel("found, %")
    ends, gb_s = [end for _, end, *_ in spans], [rate for *_, rate in spans]
    rates.step(
        [spans[0][0], *ends], [gb_s[0], *gb_s], where="pre", color=colours.second, linewidth=1.6
    )
    rates.set_ylim(bottom=0)
    rates.set_ylabel("link, GB/s")
    rates.set_xlabel("seconds since the part began")
    found = [(layer, 100 * share) for layer, share, _ in trace.by_layer() if share is not None]
    layers.bar([layer for layer, _ in found], [share for _, share in found], color=colours.accent)
    layers.set_ylim(0, 105)
    layers.set_ylabel("found, %")
    layers.set_xlabel("layer")
    return Drawing(figure)
