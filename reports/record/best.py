"""Which of several runs is best in a metric, and whether repeats settle that it is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from reports.record.metrics import Metric, Metrics, base_name, metric_text


def ratio(base: Metrics, other: Metrics, metric: str) -> float | None:
    """Return a metric of `other` over that of `base`, None where one is absent or below 0."""
    below, above = base.get(metric), other.get(metric)
    if below is None or above is None:
        return None
    return above / below if below > 0 <= above else None


def ratio_interval(base: Metrics, other: Metrics, metric: str) -> tuple[float, float] | None:
    """Return the least and the largest ratio of two means within their 95 % intervals.

    It is wider than the 95 % interval of the ratio. None where a run has no repeats.
    """
    mean = metric.removesuffix("/mean")
    ends = [run.get(f"{mean}/{end}") for run in (base, other) for end in ("ci95_low", "ci95_high")]
    known = [end for end in ends if end is not None and end > 0]
    if len(known) < len(ends):
        return None
    base_low, base_high, low, high = known
    return low / base_high, high / base_low


def gain(metric: Metric, base: Metrics, other: Metrics) -> float | None:
    """Return how many times as good as `base` a run is in a metric: above 1 is better.

    Of what is better when it is higher `other / base`, else `base / other`.
    """
    if metric.better == "higher":
        return ratio(base, other, metric.name)
    return ratio(other, base, metric.name)


def gain_interval(metric: Metric, base: Metrics, other: Metrics) -> tuple[float, float] | None:
    """Return the ends of `gain` that ratio_interval gives."""
    if metric.better == "higher":
        return ratio_interval(base, other, metric.name)
    return ratio_interval(other, base, metric.name)


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best of several runs in one metric."""

    metric: Metric
    label: str
    value: float
    next_label: str | None
    """The run behind it; None: no other has the metric."""
    gain: float | None
    """How many times as good as the next it is."""
    interval: tuple[float, float] | None
    """Ends of the gain within the 95 % intervals of both; None without repeats of both."""

    @property
    def is_settled(self) -> bool:
        """Whether repeats say that it is better than the next."""
        return self.interval is not None and self.interval[0] > 1

    @property
    def text(self) -> str:
        """The value with its unit."""
        return metric_text(self.metric.name, self.value)

    @property
    def against(self) -> str:
        """How it stands against the next one, and why that settles nothing where it does not."""
        if self.next_label is None or self.gain is None:
            return "no other point has it"
        share = f"{self.gain:.2f}"
        times = f"{share} times as good as" if share != "1.00" else "the same as"
        times = f"{times} {self.next_label}"
        if self.interval is None:
            return f"{times}, but not both were repeated"
        span = f"{self.interval[0]:.3f} to {self.interval[1]:.3f}"
        return (
            f"{times} ({span})" if self.is_settled else f"{times}, but the interval {span} holds 1"
        )

    @property
    def remedy(self) -> str:
        """The setting that gives intervals; empty where they are there or none does."""
        part = self.metric.name.split("/")[0]
        is_single = self.next_label is not None and self.interval is None
        return f"scenario.{part}.repeats=5" if is_single and part in _REPEATED else ""

    @property
    def title(self) -> str:
        """What it is best in, and whether that is settled."""
        if self.is_settled:
            return f"Best {self.metric.label}"
        if self.next_label is None:
            return f"Only {self.metric.label}"
        extreme = "Highest" if self.metric.better == "higher" else "Lowest"
        return f"{extreme} {self.metric.label}, no winner"


_REPEATED = frozenset({"latency", "throughput", "serve"})
"""Parts of a scenario that may be measured several times in a run."""


def best_of(points: Sequence[tuple[str, Metrics]], metric: Metric) -> Best | None:
    """Return the best of runs (label, metrics) in a metric; None where none has it.

    Of samples the mean counts where all have intervals, which are of means.
    """
    having = [(label, found) for label, found in points if (found.get(metric.name) or 0) > 0]
    if not having:
        return None
    base = base_name(metric.name)
    if metric.name != base and all(found.get(f"{base}/ci95_low") for _, found in having):
        label = f"{metric.label.rsplit(' ', 1)[0]} mean"
        metric = replace(metric, name=f"{base}/mean", label=label)
    sign = -1 if metric.better == "higher" else 1
    order = sorted(having, key=lambda each: sign * (each[1].get(metric.name) or 0))
    (label, first), second = order[0], order[1] if len(order) > 1 else None
    return Best(
        metric=metric,
        label=label,
        value=first[metric.name] or 0.0,
        next_label=second[0] if second else None,
        gain=gain(metric, second[1], first) if second else None,
        interval=gain_interval(metric, second[1], first) if second else None,
    )
