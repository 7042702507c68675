"""Statistics over repeats and over time: Student's t interval, convergence, drift.

Percentiles and summaries of samples are those of reports.record.record; this adds no second kind.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

CONFIDENCE: Final = 0.95
"""Confidence of the intervals that records carry."""
LEAST_REPEATS: Final = 3
"""Values below which an interval does not end a series."""
LEAST_DRIFT_VALUES: Final = 30
"""Values below which nothing is said of a drift: ten in each third."""
DRIFT_CONFIDENCE: Final = 0.99
TREND_BLOCKS: Final = 20
"""Stretches of time whose means a trend is read from."""
BLOCK_SPREAD: Final = 1.5
"""Variance of the sum of a random walk's steps between means of blocks over the sum of theirs.

Adjacent steps have a correlation of 1/4.
"""
DRIFT_SHARE: Final = 0.1
"""Change of the mean that is called a drift, where it is also beyond the noise."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Mean of repeated measurements and how well it is known."""

    count: int
    mean: float
    std: float
    """Sample deviation (ddof=1)."""
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval's width."""
        return (self.high - self.low) / 2


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Means of the first and the last third of values in order of time."""

    first: float
    last: float
    change: float
    """What is held against the noise: the difference of thirds, or of the first and last block."""
    noise: float
    """Half width of the interval of the change if nothing changed."""

    @property
    def share(self) -> float | None:
        """(last - first) / first; None for a first mean of 0."""
        return (self.last - self.first) / abs(self.first) if self.first else None

    @property
    def is_drift(self) -> bool:
        """Whether the change is larger than DRIFT_SHARE and than the noise."""
        share = self.share
        return share is not None and abs(share) > DRIFT_SHARE and abs(self.change) > self.noise


Quantile = Callable[[float, int], float]
"""Confidence and degrees of freedom -> Student's t (harness.observe.student), both tails."""


@dataclass(frozen=True)
class TTable:
    """Student's t for a process that does not import scipy."""

    values: Mapping[float, Sequence[float]] = field(default_factory=dict)
    """Confidence -> t of 1, 2, ... degrees of freedom."""

    def __call__(self, confidence: float, freedom: int) -> float:
        """Return one of them."""
        return self.values[confidence][freedom - 1]


def interval(values: Sequence[float], t: Quantile) -> Interval | None:
    """Return the Student-t interval of the mean of independent values; None below two.

    CONFIDENCE of such intervals hold the true mean.
    """
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    std = _deviation(values, mean)
    half = t(CONFIDENCE, count - 1) * std / math.sqrt(count)
    return Interval(count=count, mean=mean, std=std, low=mean - half, high=mean + half)


def is_settled(values: Sequence[float], share: float, t: Quantile) -> bool:
    """Return whether the interval of the mean reaches at most `share` of it to either side.

    False below LEAST_REPEATS values: two may agree by chance.
    """
    found = interval(values, t) if len(values) >= LEAST_REPEATS else None
    return found is not None and found.half_width <= share * abs(found.mean)


def drift(values: Sequence[float], t: Quantile) -> Drift | None:
    """Return how the last third of values differs from the first; None below LEAST_DRIFT_VALUES.

    Values are in order of time, and independent of each other: see `trend` for those that are not.
    """
    if len(values) < LEAST_DRIFT_VALUES:
        return None
    third = len(values) // 3
    first, last = values[:third], values[-third:]
    means = [math.fsum(part) / third for part in (first, last)]
    spread = [
        _deviation(part, mean) ** 2 / third for part, mean in zip((first, last), means, strict=True)
    ]
    # Welch's formula never has fewer degrees of freedom than one third: noise is not understated.
    noise = t(DRIFT_CONFIDENCE, third - 1) * math.sqrt(math.fsum(spread))
    return Drift(first=means[0], last=means[1], change=means[1] - means[0], noise=noise)


def trend(values: Sequence[float], t: Quantile) -> Drift | None:
    """Return how values grew or shrank that depend on the ones before, such as waits in a queue.

    A queue at a steady load wanders: thirds of its waits differ by far more than independent values
    would. So the mean step from one block of values to the next is held against the spread of these
    steps, as if the values were a random walk, than which no steady queue wanders further. What is
    left is growth that goes on through the run, as where more arrives than is served.

    None below LEAST_DRIFT_VALUES. Values are in order of time; the first ones that fill no block
    are left out of the steps.
    """
    if len(values) < LEAST_DRIFT_VALUES:
        return None
    third = len(values) // 3
    num_blocks = min(TREND_BLOCKS, third)
    size = len(values) // num_blocks
    kept = values[len(values) - size * num_blocks :]
    blocks = [math.fsum(kept[i : i + size]) / size for i in range(0, len(kept), size)]
    steps = [after - before for before, after in pairwise(blocks)]
    change = blocks[-1] - blocks[0]
    spread = _deviation(steps, change / len(steps)) * math.sqrt(BLOCK_SPREAD * len(steps))
    return Drift(
        first=math.fsum(values[:third]) / third,
        last=math.fsum(values[-third:]) / third,
        change=change,
        noise=t(DRIFT_CONFIDENCE, len(steps) - 1) * spread,
    )


def _deviation(values: Sequence[float], mean: float) -> float:
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
