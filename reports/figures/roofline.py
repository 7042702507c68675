"""The roofline of decode: tokens a second over bytes a token, below what link and memory carry."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from reports import facts
from reports.figures import theme
from reports.figures.theme import Drawing, Theme
from reports.record.record import RunRecord
from reports.record.text import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Roof = Literal["link", "hbm"]
WORDS: Final[dict[Roof, str]] = {"link": "host to GPU", "hbm": "GPU memory"}


@dataclass(frozen=True, kw_only=True)
class DecodePoint:
    """One way in which a run decoded."""

    label: str
    batch: float
    """Mean tokens of a step."""
    measured_tok_s: float
    predicted_tok_s: float | None
    size_bytes: Mapping[Roof, float]
    """Bytes for each token over the link, and of weights in GPU memory; keys and values on top."""
    rate_gb_s: Mapping[Roof, float | None]
    """Rates that the probes measured."""

    def bound_tok_s(self, roof: Roof) -> float | None:
        """Return the tokens a second that the roof allows, None where it does not bind."""
        rate, size = self.rate_gb_s[roof], self.size_bytes[roof]
        return rate * 1e9 / size if rate and size else None


def decode_points(record: RunRecord) -> list[DecodePoint]:
    """Return a point for latency (one sequence) and one for throughput, as far as measured."""
    placed = facts.numbers(facts.dig(record.plan, "placements"))
    total, in_place = sum(placed.values()), placed.get("uva", 0.0)
    step = facts.dig_number(record.plan, "bytes_per_step") or 0.0
    if not total or facts.is_emulated(record):
        return []
    metrics, found = record.metrics, []
    rates: dict[Roof, float | None] = {
        "link": metrics.get("link/h2d_gb_s"),
        "hbm": metrics.get("link/hbm_copy_gb_s"),
    }
    tpot = metrics.get("latency/tpot_ms/p50") or metrics.get("latency/tpot_ms/mean")
    steps = facts.dig_number(record.samples.get("throughput"), "num_decode_steps")
    tokens = facts.dig_number(record.samples.get("throughput"), "num_decode_tokens")
    batch = tokens / steps if tokens and steps else None
    for label, size, measured, predicted in (
        ("one sequence", 1.0, _per_s(tpot), _per_s(metrics.get("predicted/tpot_ms"))),
        ("throughput", batch, metrics.get("throughput/decode_tok_s"), None),
    ):
        if size and measured:
            found.append(
                DecodePoint(
                    label=label,
                    batch=size,
                    measured_tok_s=measured,
                    predicted_tok_s=predicted,
                    size_bytes={"link": step / size, "hbm": (total - in_place) / size},
                    rate_gb_s=rates,
                )
            )
    return found


def roofline_figure(record: RunRecord, colours: Theme) -> Drawing | None:
    """Draw tokens a second over bytes a token: roofs as lines, measured full, predicted hollow."""
    points = decode_points(record)
    roofs = [roof for roof in WORDS if any(point.bound_tok_s(roof) for point in points)]
    if not roofs:
        return None
    title = "Decode against what link and GPU memory carry"
    figure = theme.new_figure(colours, 0.6 + 3.3 * (len(roofs) if colours.is_narrow else 1), title)
    panels = theme.panels(figure, colours, len(roofs), shares_y=True)
    for axes, roof in zip(panels, roofs, strict=True):
        _draw_roof(axes, colours, points, roof)
        if axes is panels[0] or colours.is_narrow:
            axes.set_ylabel("decode (tok/s)")
    theme.draw_legend(figure, panels[:1], colours)
    return Drawing(figure)


def _draw_roof(axes: "Axes", colours: Theme, points: Sequence[DecodePoint], roof: Roof) -> None:
    theme.style_axes(axes, colours, grid="both")
    shown = [point for point in points if point.bound_tok_s(roof)]
    sizes = [point.size_bytes[roof] / 1e9 for point in shown]
    ends = (min(sizes) / 3, max(sizes) * 3)
    rate = shown[0].rate_gb_s[roof] or 0.0
    axes.plot(ends, [rate / end for end in ends], color=colours.alarm, linewidth=1.6)
    theme.beside(axes, f"{number(rate)} GB/s", (ends[0], rate / ends[0]), (6, 2), colours.alarm)
    measured = [point.measured_tok_s for point in shown]
    predicted = [point.predicted_tok_s for point in shown]
    accent = colours.accent
    for values, face, word, size_pt in (
        (predicted, "none", "predicted", 13),
        (measured, accent, "measured", 7),
    ):
        dots = [(size, value) for size, value in zip(sizes, values, strict=True) if value]
        if dots:
            xs, ys = zip(*dots, strict=True)
            axes.plot(xs, ys, "o", ms=size_pt, mfc=face, mec=accent, label=word)
    for point, at in zip(shown, zip(sizes, measured, strict=True), strict=True):
        theme.beside(axes, point.label, at, (0, -15), colours.ink, ha="center")
    theme.log_axis(axes, "x", *ends)
    rates = [value for value in (*measured, *predicted) if value]
    lowest, highest = min([*rates, rate / ends[1]]), max([*rates, rate / ends[0]])
    theme.log_axis(axes, "y", lowest / 4, highest * 1.6)
    axes.set_xlabel(f"GB a token, {WORDS[roof]}")


def _per_s(time_ms: float | None) -> float | None:
    return 1000 / time_ms if time_ms else None
