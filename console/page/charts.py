"""Charts of the last minutes as paths of SVG; a gap is where nothing was known."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from console.page import texts

WIDTH: Final = 600
HEIGHT: Final = 100
RANGES: Final[Mapping[str, tuple[str, float]]] = {
    "5m": ("5 min", 300.0),
    "15m": ("15 min", 900.0),
    "1h": ("1 h", 3600.0),
}
"""Name -> label and seconds."""
MOST_POINTS: Final = 300
"""Of a path: two pixels each."""
GAP_S: Final = 15.0
"""Samples that are further apart are not joined."""

Point = tuple[float, float | None]
"""Seconds since the epoch, and a value or that it was not known."""


def chart(
    key: str,
    label: str,
    unit: str,
    series: Sequence[Sequence[Point]],
    *,
    now_s: float,
    range_name: str,
    top: float | None = None,
) -> dict[str, Any]:
    """Return what the template draws of one or two series.

    Args:
        key: names the chart in lists.
        label: of the caption.
        unit: of its values; GiB takes bytes, % takes shares of 1.
        series: of points in order of time.
        now_s: the right edge, seconds since the epoch.
        range_name: how far back the left edge is, a key of RANGES.
        top: value of the upper edge; None: a round one above the largest.
    """
    ago, range_s = RANGES[range_name]
    shown = [[point for point in each if point[0] >= now_s - range_s] for each in series]
    known = [value for each in shown for _, value in each if value is not None]
    if top is None:
        top = round_up(max(known, default=0.0), unit)
    last = [each[-1][1] if each else None for each in shown]
    paths = [path(each, now_s=now_s, range_s=range_s, top=top) for each in shown]
    value = " and ".join(said(each, unit) for each in last)
    return {
        "key": key,
        "label": label,
        "value": value,
        "top": said(top, unit) if known else "",
        "begin": f"{ago} ago",
        "d": paths[0],
        "d2": paths[1] if len(paths) > 1 else "",
        "spoken": f"{label}: now {value}"
        + (f", between {said(min(known), unit)} and {said(max(known), unit)}" if known else ""),
    }


def said(value: float | None, unit: str) -> str:
    """Return a value of a chart with its unit."""
    if unit == "GiB":
        return texts.gib(value)
    if value is not None and value == int(value):
        value = int(value)
    return texts.share(value) if unit == "%" else texts.number(value, unit)


def round_up(value: float, unit: str) -> float:
    """Return a value of one or two digits that is not below `value`; GiB are round as such."""
    scale = 2.0**30 if unit == "GiB" else 1.0
    if value <= 0:
        return scale
    power = 10.0 ** math.floor(math.log10(value / scale))
    return (
        scale
        * power
        * next(step for step in (1, 1.5, 2, 3, 5, 7.5, 10) if step * power * scale >= value * 0.999)
    )


def path(points: Sequence[Point], *, now_s: float, range_s: float, top: float) -> str:
    """Return the path of a series in a box of WIDTH x HEIGHT, upper edge at `top`."""
    parts: list[str] = []
    before_s: float | None = None
    for time_s, value in thinned(points):
        if value is None:
            before_s = None
            continue
        x = WIDTH * (1 - (now_s - time_s) / range_s)
        y = HEIGHT * (1 - min(value / top, 1.0))
        is_joined = before_s is not None and time_s - before_s <= max(
            GAP_S, range_s / MOST_POINTS * 3
        )
        parts.append(f"{'L' if is_joined else 'M'}{x:.1f} {y:.1f}")
        before_s = time_s
    return "".join(parts)


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Return at most MOST_POINTS of the points: of neighbours the highest, so that peaks stay."""
    size = -(-len(points) // MOST_POINTS)
    if size <= 1:
        return points
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return [
        max(group, key=lambda point: -math.inf if point[1] is None else point[1])
        for group in groups
    ]
