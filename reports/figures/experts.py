"""The experts of one run: found on the GPU over time and by layer, and bytes over the link."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from reports import facts
from reports.figures import theme
from reports.figures.theme import Drawing, Theme
from reports.record.record import RunRecord
from reports.record.text import GIB

LEAST_ROWS: Final = 2
_COLUMNS: Final = ("time_s", "hits", "misses", "bytes")


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
            rose = {name: after[name] - before[name] for name in _COLUMNS}
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
    if not isinstance(layers, Mapping) or not set(_COLUMNS) <= set(names):
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
