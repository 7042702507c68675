"""What figures say: which run is best, how two sides differ, and which rates cannot be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, TypeGuard

from reports.record.metrics import Metric, Metrics, base_name, found, metric_text, shown
from reports.record.record import MEASURED, RunRecord
from reports.record.text import GIB, gib, number


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

    It is `other / base` where higher is better, else `base / other`; None where one of them is 0.
    """
    is_higher = metric.better == "higher"
    value = ratio(base, other, metric.name) if is_higher else ratio(other, base, metric.name)
    return value or None


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
            return f"{times}, but one or both ran only once"
        span = f"{self.interval[0]:.3f} to {self.interval[1]:.3f}"
        if self.is_settled:
            return f"{times} ({span})"
        return f"{times}, but the interval {span} includes 1"

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


ONE_RUN_EACH: Final = "one run each; not compared"
"""What settles nothing between the trials of a search."""
_REPEATED: Final = frozenset({"latency", "throughput", "serve"})
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


def best_by_model(points: Sequence[tuple[str, RunRecord]]) -> list[Best]:
    """Return the best of points (label, record) in each metric that has one, for each model.

    Points that were not measured, or are not valid, do not count; nor does a model with one point
    beside others.
    """
    groups: dict[str, list[tuple[str, Metrics]]] = {}
    for label, record in points:
        counts = record.valid is not False and not impossible_rate(record)
        if record.status in MEASURED and counts:
            groups.setdefault(_model(record), []).append((label, record.metrics))
    several = [group for group in groups.values() if len(group) > 1]
    return [
        best
        for group in (several if len(groups) > 1 else groups.values())
        for metric in found("best", [metrics for _, metrics in group])
        if (best := best_of(group, metric)) is not None
    ]


def _model(record: RunRecord) -> str:
    """Return what says which model ran, in any format: its sizes, else its name."""
    node = record.config.get("model")
    if not isinstance(node, Mapping):
        return ""
    sizes = node.get("spec") or {"name": node.get("name")}
    return repr({key: sizes[key] for key in sizes if key not in {"quantization", "dtype"}})


UNRESOLVED: Final = "no difference resolved"
"""Verdict of a ratio whose interval includes 1."""
WITHIN_NOISE: Final = "within this machine's noise"
"""Verdict of another ratio that noise alone could give."""
_MOST: Final = 3
"""Quantities that a sentence names."""


def main_metrics() -> list[Metric]:
    """Return what is compared and on top of a run's page."""
    return [metric.mean for metric in shown("ab") if "card" in metric.shown]


def is_resolved(row: Mapping[str, Any]) -> bool:
    """Return whether a ratio differs from 1 by more than noise."""
    return str(row["verdict"]).startswith("b is")


def answer_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return which side is how much more or less in what, or that no difference was found.

    `rows` are those of a comparison's record.
    """
    found = {row.get("metric"): row for row in rows if row.get("ratio") is not None}
    main = [(metric, found[metric.name]) for metric in main_metrics() if metric.name in found]
    if not main:
        return "No figures of both sides"
    settled = [(metric, row) for metric, row in main if is_resolved(row)]
    if not settled:
        return f"No difference found: {noise_of([row for _, row in main])}"
    parts = [
        f"{metric.label} {row['ratio']:.3f} times ({row['low']:.3f} to {row['high']:.3f})"
        for metric, row in settled[:_MOST]
    ]
    more = len(settled) - _MOST
    parts += [f"and {more} more figures differ"] if more > 0 else []
    rest = [metric.label for metric, row in main if not is_resolved(row)]
    none = f"; no difference found in {', '.join(rest)}" if rest else ""
    return f"Side b against a: {', '.join(parts)}{none}"


def noise_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what the machine could resolve: noise as a share, above 100 % as a factor."""
    known = sorted(row["resolution"] for row in rows if row.get("resolution") is not None)
    if not known:
        spans = [row for row in rows if row.get("low") is not None]
        return "the intervals include 1" if spans else "one pair has no interval (raise ab.pairs)"
    least, most = (_noise(share) for share in (known[0], known[-1]))
    return f"noise is {most}" if least == most else f"noise is {least} to {most}"


def _noise(share: float) -> str:
    return f"a factor of {number(1 + share)}" if share >= 1 else f"{number(100 * share)} %"


TOLERANCE: Final = 0.05
"""Share by which a run may exceed the link's rate before it is not believed."""
LINK_RATES: Final = (
    "link/h2d_gb_s",
    "link/in_place_gb_s",
    "link/h2d_after_gb_s",
    "link/in_place_after_gb_s",
)
"""Metrics with what the link carried when it was probed."""
LANE_GB_S: Final[Mapping[int, float]] = MappingProxyType(
    {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
)
"""PCIe generation -> GB/s of one lane before packet headers, which nothing exceeds."""


def predicts_another_card(record: RunRecord) -> bool:
    """Return whether predictions are for a card that a CPU stood in for, so not comparable."""
    rates = ((record.plan or {}).get("predicted") or {}).get("rates") or {}
    return record.effective.get("emulated") is True and rates.get("is_cpu") is False


def impossible_rate(record: RunRecord) -> str:
    """Return why a run's single-stream rate cannot be, empty where it can or nothing is known.

    Empty, too, where the record's own reasons say so.

    Each token of a request that runs alone takes all offloaded weights over the link once, so
    tokens a second are at most the link's rate / the offloaded bytes. It holds for every system:
    bytes are those that the engine counted, else those of the plan, else those that the system
    says it keeps in host memory, else those that were asked for.
    """
    tpot_ms = record.metrics.get("latency/tpot_ms/p50") or record.metrics.get(
        "latency/tpot_ms/mean"
    )
    size, words = offloaded_bytes(record)
    rate, source = link_gb_s(record)
    if not tpot_ms or not size or not rate or record.environment.get("emulated") is True:
        return ""
    measured, bound = 1000 / tpot_ms, rate * 1e9 / size
    is_said = any(text.startswith("latency:") and "the link c" in text for text in record.reasons)
    if is_said or measured <= bound * (1 + TOLERANCE):
        return ""
    return (
        f"latency: {number(measured)} tokens/s of one request are impossible: {gib(size)} "
        f"{words} for each token, and the link carries {number(rate)} GB/s ({source}), which is "
        f"{number(bound)} tokens/s at most. The offload did not take place, or the clock or the "
        "bytes are wrong: do not use these rates."
    )


def believed(record: RunRecord) -> RunRecord:
    """Return a record, not valid and with the reason where its rate cannot be."""
    reason = impossible_rate(record)
    if not reason or record.status not in MEASURED:
        return record
    return replace(record, valid=False, reasons=[*record.reasons, reason])


def offloaded_bytes(record: RunRecord) -> tuple[float | None, str]:
    """Return the bytes that cross the link for each token of one request, and where from."""
    placed = record.effective.get("placement_bytes")
    away = {k: v for k, v in placed.items() if k != "resident"} if _is_tree(placed) else {}
    asked_gib = _number(_dig(record.config, "offload", "uva", "cpu_offload_gb"))
    for size, words in (
        (record.metrics.get("offload/bytes_per_step"), "were counted"),
        (_number(_dig(record.plan, "bytes_per_step")), "are planned"),
        (sum(filter(None, map(_number, away.values()))) or None, "are in host memory"),
        (_number(record.effective.get("host_pinned_bytes")) or None, "are in host memory"),
        (asked_gib * GIB if asked_gib else None, "were to be in host memory"),
    ):
        if size is not None:
            return size, words
    return None, ""


def link_gb_s(record: RunRecord) -> tuple[float | None, str]:
    """Return the highest rate that the link is known to carry in GB/s, and how it is known."""
    probed = [rate for name in LINK_RATES if (rate := record.metrics.get(name))]
    if probed:
        return max(probed), "as probed"
    pcie = _dig(record.environment, "gpu", "pcie")
    facts = pcie if _is_tree(pcie) else {}
    gen, width = (
        _number(facts.get(f"max_{key}")) or _number(facts.get(key)) for key in ("gen", "width")
    )
    lane = LANE_GB_S.get(int(gen)) if gen else None
    return (lane * width, f"PCIe {gen:.0f} x{width:.0f}") if lane and width else (None, "")


def _dig(tree: object, *path: str) -> object:
    for key in path:
        tree = tree.get(key) if _is_tree(tree) else None
    return tree


def _is_tree(value: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(value, Mapping)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)
