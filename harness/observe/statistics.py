"""Statistics over repeats and over time: Student's t interval, convergence, drift.

Percentiles and summaries of samples are those of reports.record.record; this adds no second kind.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

CONFIDENCE: Final = 0.95
"""Of the intervals that records carry."""
LEAST_REPEATS: Final = 3
"""Values below which an interval does not end a series."""
LEAST_DRIFT_VALUES: Final = 30
"""Values below which nothing is said of a drift: ten in each third."""
DRIFT_CONFIDENCE: Final = 0.99
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
    noise: float
    """Half width of the interval of their difference if nothing changed."""

    @property
    def share(self) -> float | None:
        """(last - first) / first; None for a first mean of 0."""
        return (self.last - self.first) / abs(self.first) if self.first else None

    @property
    def is_drift(self) -> bool:
        """Whether the change is larger than DRIFT_SHARE and than the noise."""
        share = self.share
        return (
            share is not None
            and abs(share) > DRIFT_SHARE
            and abs(self.last - self.first) > self.noise
        )


def student_t(confidence: float, freedom: int) -> float:
    """Return the t beyond which a share 1 - confidence of Student's distribution lies, both tails.

    Args:
        confidence: above 0 and below 1.
        freedom: degrees of freedom, a whole number from 1.

    Raises:
        ValueError: an argument is out of bounds.
    """
    if not 0 < confidence < 1 or freedom < 1:
        raise ValueError(
            f"student_t: expected 0 < confidence < 1 and freedom >= 1, got {confidence} and "
            f"{freedom}."
        )
    low, high = 0.0, math.pi / 2
    while True:  # bisect the angle atan(t / sqrt(freedom)) to the last bit
        middle = (low + high) / 2
        if not low < middle < high:
            return math.sqrt(freedom) * math.tan(middle)
        if _central_share(middle, freedom) < confidence:
            low = middle
        else:
            high = middle


def _central_share(angle: float, freedom: int) -> float:
    """Return the share of the distribution within +-t, t = sqrt(freedom) tan(angle).

    The finite sums over powers of the cosine that hold for a whole number of degrees of freedom.
    """
    sine, square = math.sin(angle), math.cos(angle) ** 2
    is_odd = freedom % 2 == 1
    term = math.cos(angle) if is_odd else 1.0
    total = term if freedom > 1 else 0.0
    for step in range(2 if is_odd else 1, freedom - 2, 2):
        term *= square * step / (step + 1)
        total += term
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


def interval(values: Sequence[float]) -> Interval | None:
    """Return the Student-t interval of the mean of independent values; None below two.

    CONFIDENCE of such intervals hold the true mean.

    Args:
        values: one of each repeat, finite.
    """
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    std = _deviation(values, mean)
    half = student_t(CONFIDENCE, count - 1) * std / math.sqrt(count)
    return Interval(count=count, mean=mean, std=std, low=mean - half, high=mean + half)


def is_settled(values: Sequence[float], share: float) -> bool:
    """Return whether the interval of the mean reaches at most `share` of it to either side.

    False below LEAST_REPEATS values: two may agree by chance.
    """
    found = interval(values) if len(values) >= LEAST_REPEATS else None
    return found is not None and found.half_width <= share * abs(found.mean)


def drift(values: Sequence[float]) -> Drift | None:
    """Return how the last third of values differs from the first; None below LEAST_DRIFT_VALUES.

    Args:
        values: in order of time, finite.
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
    noise = student_t(DRIFT_CONFIDENCE, third - 1) * math.sqrt(math.fsum(spread))
    return Drift(first=means[0], last=means[1], noise=noise)


def _deviation(values: Sequence[float], mean: float) -> float:
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
