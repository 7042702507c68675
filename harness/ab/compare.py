"""Runs in pairs -> ratios with intervals, and what the machine could tell apart."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Final

from harness.measure.statistics import CONFIDENCE, interval, student_t
from reports.record.metrics import TOTAL, Better, Metric, Metrics, shown
from reports.record.record import RunRecord, percentile

COMPARED: Final[Mapping[str, Metric]] = MappingProxyType(
    {metric.mean.name: metric.mean for metric in shown("ab")}
)
"""What is compared, of samples their mean."""
PER_REQUEST: Final = ("ttft_ms", "tpot_ms", "e2e_ms")


def run_metrics(record: RunRecord) -> dict[str, float | None]:
    """Return the metrics of a run, and TOTAL: its load and its timed parts, one after another.

    Of a part that was repeated, which sides may do differently often, it holds the mean of once.
    """
    metrics = record.metrics
    times = [metrics.get(name) for name in ("load/total_s", "throughput/wall_s", "serve/wall_s")]
    alone = part_rows(record, "latency")
    num_repeats = len({row.get("repeat") for row in alone})
    alone_ms = [row.get("e2e_ms") for row in alone]
    times += [time_ms / 1e3 / num_repeats for time_ms in alone_ms if time_ms is not None]
    known = [time_s for time_s in times if time_s is not None]
    return dict(metrics) | {TOTAL.name: math.fsum(known) if known else None}


def part_rows(record: RunRecord, part: str) -> list[dict[str, Any]]:
    """Return the rows of the requests of a part of the scenario, none where it did not run."""
    found = record.samples.get(part) or []
    rows = found if isinstance(found, list) else found.get("requests", [])
    return list(rows)


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One metric of both sides."""

    metric: str
    label: str
    better: Better
    num_pairs: int
    """Pairs in which both sides have it."""
    a: float
    """Mean over the pairs."""
    b: float
    ratio: float | None
    """b / a, the geometric mean over the pairs; None where a side is 0."""
    low: float | None
    """Of its 95 % interval (Student's t on the logarithms of the pairs' ratios); None below 2."""
    high: float | None
    aa_ratio: float | None
    """The same of a against itself; None without such runs."""
    aa_low: float | None
    aa_high: float | None
    resolution: float | None
    """Share below which a difference could be noise: what a against itself would reach."""
    verdict: str

    def to_row(self) -> dict[str, Any]:
        """Return plain data for the record."""
        return asdict(self)


def compare(
    pairs: Sequence[tuple[Metrics, Metrics]], aa_pairs: Sequence[tuple[Metrics, Metrics]]
) -> list[Ratio]:
    """Return a ratio for every metric that at least one pair has on both sides.

    Args:
        pairs: metrics of a and of b, of runs next to each other.
        aa_pairs: metrics of a and of a again.
    """
    found = []
    for metric in COMPARED.values():
        values = _both(pairs, metric.name)
        if values:
            found.append(_ratio(metric, values, _both(aa_pairs, metric.name)))
    return found


def _both(pairs: Sequence[tuple[Metrics, Metrics]], metric: str) -> list[tuple[float, float]]:
    read = ((first.get(metric), second.get(metric)) for first, second in pairs)
    return [(one, other) for one, other in read if one is not None and other is not None]


def _ratio(
    metric: Metric,
    values: Sequence[tuple[float, float]],
    noise: Sequence[tuple[float, float]],
) -> Ratio:
    count = len(values)
    ratio, low, high = geometric(values)
    aa_ratio, aa_low, aa_high = geometric(noise)
    resolution = resolved_share(noise, count)
    return Ratio(
        metric=metric.name,
        label=metric.words,
        better=metric.better,
        num_pairs=count,
        a=math.fsum(one for one, _ in values) / count,
        b=math.fsum(other for _, other in values) / count,
        ratio=ratio,
        low=low,
        high=high,
        aa_ratio=aa_ratio,
        aa_low=aa_low,
        aa_high=aa_high,
        resolution=resolution,
        verdict=verdict_of(ratio, low, high, resolution),
    )


def geometric(
    values: Sequence[tuple[float, float]],
) -> tuple[float | None, float | None, float | None]:
    """Return the geometric mean of second / first and its 95 % interval.

    None for all without a pair or with a value that is not above 0; no interval below two pairs.
    """
    if not values or any(one <= 0 or other <= 0 for one, other in values):
        return None, None, None
    logs = [math.log(other / one) for one, other in values]
    known = interval(logs)
    if known is None:
        return math.exp(logs[0]), None, None
    return math.exp(known.mean), math.exp(known.low), math.exp(known.high)


def resolved_share(noise: Sequence[tuple[float, float]], count: int) -> float | None:
    """Return the share by which a mean of `count` pairs may differ from 1 by noise alone.

    The half width of the 95 % interval that pairs of one side against itself give: their root mean
    square about no difference, with as many degrees of freedom as there are pairs.
    """
    if len(noise) < 2 or any(one <= 0 or other <= 0 for one, other in noise):
        return None
    logs = [math.log(other / one) for one, other in noise]
    spread = math.sqrt(math.fsum(value**2 for value in logs) / len(logs))
    return math.expm1(student_t(CONFIDENCE, len(logs)) * spread / math.sqrt(count))


def verdict_of(
    ratio: float | None, low: float | None, high: float | None, resolution: float | None
) -> str:
    """Return in words what a ratio says."""
    if ratio is None:
        return "no ratio: a side is 0"
    if low is None or high is None:
        return "one pair: no interval"
    within = resolution is not None and abs(math.log(ratio)) <= math.log1p(resolution)
    if low <= 1 <= high or within:
        return "no difference resolved"
    return "b is lower" if ratio < 1 else "b is higher"


def per_request(
    pairs: Sequence[tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]],
) -> list[dict[str, Any]]:
    """Return by quantity how the ratios of single requests are spread; the same request in both.

    Args:
        pairs: rows of the latency part of a and of b.
    """
    found = []
    for quantity in PER_REQUEST:
        ratios = sorted(
            theirs[quantity] / ours[quantity]
            for one, other in pairs
            for ours, theirs in _matched(one, other)
            if ours.get(quantity) and theirs.get(quantity)
        )
        if ratios:
            found.append(
                {
                    "quantity": quantity,
                    "num": len(ratios),
                    "least": ratios[0],
                    "median": percentile(ratios, 50),
                    "most": ratios[-1],
                }
            )
    return found


def _matched(
    one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return the rows of the same request of the same repeat that completed on both sides."""
    theirs = {_name(row): row for row in other if row.get("error") is None}
    return [
        (row, theirs[_name(row)])
        for row in one
        if row.get("error") is None and _name(row) in theirs
    ]


def _name(row: Mapping[str, Any]) -> tuple[Any, Any]:
    return row.get("repeat"), row["request_id"]


def compare_tokens(
    pairs: Sequence[tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]],
) -> dict[str, Any]:
    """Return how many requests gave the same tokens on both sides, and the first that did not.

    Args:
        pairs: rows of one part of a and of b.
    """
    matched = [pair for one, other in pairs for pair in _matched(one, other)]
    known = [(x, y) for x, y in matched if x.get("tokens_hash") and y.get("tokens_hash")]
    unequal = [x["request_id"] for x, y in known if x["tokens_hash"] != y["tokens_hash"]]
    return {
        "num_compared": len(known),
        "num_equal": len(known) - len(unequal),
        "first_unequal": unequal[0] if unequal else None,
    }
