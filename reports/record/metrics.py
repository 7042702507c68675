"""The metric table: what each metric is called, what it means, and where it is shown.

Names are `area/quantity_unit[/statistic]`. A metric is added here and where it is computed; pages,
comparisons, summaries and searches take it from here, in this order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal

from reports.record.listed import LISTED
from reports.record.record import SAMPLE_FLOORS
from reports.record.text import ABSENT, GIB, gib, number

Better = Literal["higher", "lower", "none"]
"""Which value of two is the better one; none: neither by itself."""
Place = Literal["card", "sweep", "best", "compare", "ab", "summary"]
"""Where a metric is shown.

card: on top of a run's page, and with ab on that of a comparison in pairs; sweep: a column of the
points; best: the best point of a sweep; compare: ratios of runs of the same work; ab: ratios of two
sides; summary: the terminal at the end of a run.
"""
Metrics = Mapping[str, float | None]
"""Metrics of one run by name, with their statistics."""


@dataclass(frozen=True)
class Metric:
    """One metric of a run, or one statistic of it."""

    name: str
    definition: str
    label: str = ""
    """Short, as above a column."""
    words: str = ""
    """Name in a line of text, for places ab and summary."""
    better: Better = "none"
    shown: tuple[Place, ...] = ()
    statistics: tuple[str, ...] = ()
    """Statistics that a summary shows, for a metric of samples; empty for a single value."""
    needs: str = ""
    """Metric that a run has where this one says something; empty: nothing more."""

    @property
    def quantity(self) -> str:
        """Name without its area."""
        return self.name.split("/", 1)[1]

    @property
    def unit(self) -> str:
        """Unit in a column, empty for a count."""
        return unit(self.name)

    @property
    def heading(self) -> str:
        """Label with the unit, as above a column."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    @property
    def title(self) -> str:
        """Label with a capital, as on a card."""
        return self.label[0].upper() + self.label[1:]

    @property
    def mean(self) -> "Metric":
        """The mean of a metric of samples, else the metric."""
        return self.at("mean") if "mean" in self.statistics else self

    def at(self, statistic: str) -> "Metric":
        """Return one statistic of a metric of samples."""
        word = "median" if statistic == "p50" else statistic
        return replace(
            self,
            name=f"{self.name}/{statistic}",
            label=f"{self.label} {statistic}",
            words=f"{self.words}, {word}",
        )


COLD: Final = "cold_"
"""Prefix of a load quantity measured with the checkpoint dropped from the page cache."""


def _cold(warm: Metric) -> Metric:
    """Return a metric of load, measured with the checkpoint dropped from the page cache."""
    above, _, quantity = warm.name.rpartition("/")
    text = warm.definition.replace("warm starts", "cold starts")
    return replace(
        warm,
        name=f"{above}/{COLD}{quantity}",
        definition=f"{text}; the checkpoint was dropped from the page cache first",
        label=f"{warm.label}, cold",
        words=f"{warm.words}, cold",
        shown=tuple(place for place in warm.shown if place in {"card", "ab", "summary"}),
    )


PREDICTED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "tpot_ms": "latency/tpot_ms",
        "ttft_ms": "latency/ttft_ms",
        "output_tok_s": "throughput/output_tok_s",
        "load_s": "load/total_s",
        "gpu_peak_gib": "memory/gpu_peak_gib",
    }
)
"""Quantity that the plan predicts (area predicted) -> what it is held against."""
_PREDICTED_TEXT: Final = {
    **{quantity: f"what the plan predicts of {base}" for quantity, base in PREDICTED.items()},
    "tpot_ms": (
        "latency/tpot_ms as the plan predicts it: a decode step of one sequence halfway "
        "through its output, at the rates of plan.predicted.rates"
    ),
    "gpu_peak_gib": "sum of the plan's parts on the GPU",
}
_DIFFERENCE: Final = (
    "(predicted / measured - 1) x 100; measured: the median, or the mean if there is none"
)
_EVERYWHERE: Final = ("card", "sweep", "compare", "ab", "summary")
_HOST_BLOCKS: Final = "kv/cpu_used_peak_share"
_LOAD: Final = Metric(
    "load/total_s",
    (
        "t(first token on the host) - t(start of the process); mean over the warm starts,"
        " equals the sum of the phases"
    ),
    label="load",
    words="load until the first token",
    better="lower",
    shown=_EVERYWHERE,
)
TOTAL: Final = Metric(
    "total_s",
    "load/total_s and all timed requests of one run, of repeated parts the mean of once",
    label="total",
    words="load and all timed requests together",
    better="lower",
    shown=("card", "ab"),
)
"""Metric that a comparison in pairs adds to those of each run."""
_SHOWN: Final = (
    Metric(
        "throughput/output_tok_s",
        "sum(output tokens) / (t(last token) - t(first submit))",
        label="output",
        words="output tokens, all requests at once",
        better="higher",
        shown=(*_EVERYWHERE, "best"),
    ),
    Metric(
        "throughput/decode_tok_s",
        "output tokens of the steps that only decode / wall time of those steps; a step that"
        " also does prefill counts as prefill",
        label="decode",
        words="decode",
        better="higher",
        shown=("compare", "summary"),
    ),
    Metric(
        "throughput/prefill_tok_s",
        "sum(prompt tokens that were not found in a prefix cache) / wall time of the steps with"
        " prefill work",
        label="prefill",
        words="prefill",
        better="higher",
        shown=("compare", "summary"),
    ),
    Metric(
        "throughput/total_tok_s",
        "(sum(prompt tokens) + sum(output tokens)) / (t(last token) - t(first submit))",
        label="prompt + output",
        words="prompt and output tokens",
        better="higher",
        shown=("summary",),
    ),
    Metric(
        "throughput/requests_s",
        "completed requests / (t(last token) - t(first submit))",
        label="requests",
        words="requests",
        better="higher",
        shown=("summary",),
    ),
    Metric(
        "throughput/wall_s",
        "t(last token) - t(first submit)",
        label="time",
        words="time of all requests at once",
        better="lower",
        shown=("ab",),
    ),
    Metric(
        "latency/ttft_ms",
        "time to first token: t(first token on the host) - t(submit)",
        label="TTFT",
        words="time to first token",
        better="lower",
        shown=(*_EVERYWHERE, "best"),
        statistics=("mean", "p50"),
    ),
    Metric(
        "latency/tpot_ms",
        "time per output token of a request: (E2E - TTFT) / (output tokens - 1); missing below"
        " 2 output tokens",
        label="TPOT",
        words="time per output token",
        better="lower",
        shown=(*_EVERYWHERE, "best"),
        statistics=("mean", "p50"),
    ),
    Metric(
        "latency/itl_ms",
        "inter-token latency: gap between consecutive moments at which tokens of a request arrived,"
        " all gaps pooled over requests; TTFT is not a gap",
        label="ITL, pooled",
        better="lower",
        statistics=("mean", "p50"),
    ),
    Metric(
        "latency/e2e_ms",
        "end to end: t(last token on the host) - t(submit)",
        label="E2E",
        words="request alone, end to end",
        better="lower",
        shown=("compare", "ab", "summary"),
        statistics=("mean",),
    ),
    Metric(
        "serve/peak_requests_s",
        "highest rate tried at which the share search.good_share of requests was good",
        label="peak rate",
        words="highest rate that keeps the SLO",
        better="higher",
        shown=(*_EVERYWHERE, "best"),
    ),
    Metric(
        "serve/requested_requests_s",
        "arrivals asked for per second: arrivals.rate_per_s, or those of the trace; with"
        " several turns, of conversations",
        label="requested",
        words="arrivals, requested",
        shown=("summary",),
    ),
    Metric(
        "serve/planned_requests_s",
        "(arrivals - 1) / (last - first planned arrival) as drawn; the ramp and later turns are"
        " left out",
        label="planned",
        words="arrivals, as drawn",
        shown=("summary",),
    ),
    Metric(
        "serve/sent_requests_s",
        "(requests sent - 1) / (t(last sent) - t(first sent)); the ramp and later turns are"
        " left out",
        label="sent",
        words="arrivals, achieved",
        shown=("summary",),
    ),
    Metric(
        "serve/requests_s",
        "completed requests / serve/wall_s",
        label="requests, served",
        words="requests served",
        better="higher",
        shown=("summary",),
    ),
    Metric(
        "serve/good_requests_s",
        "requests that completed within every bound / serve/wall_s",
        label="good requests a second",
        words="good requests served",
        better="higher",
        shown=("ab",),
    ),
    Metric(
        "serve/good_share",
        "requests that completed within every bound of the SLO / planned requests; failed and"
        " cancelled ones are bad; a bound on TPOT does not apply to one output token",
        label="good requests",
        words="share of good requests",
        better="higher",
        shown=("card", "sweep", "compare", "summary"),
    ),
    Metric(
        "serve/output_tok_s",
        "sum(output tokens of completed requests) / serve/wall_s",
        label="output, served",
        words="output tokens served",
        better="higher",
        shown=_EVERYWHERE,
    ),
    Metric(
        "serve/ttft_ms",
        "time to first token of a request that arrives by itself: t(first token on the "
        "host) - t(scheduled arrival); it includes waiting at the client and in the queue",
        label="TTFT from arrival",
        words="time to first token from arrival",
        better="lower",
        shown=_EVERYWHERE,
        statistics=("mean", "p50", "p90"),
    ),
    *(
        Metric(
            name, text, label=words, words=words, better="lower", shown=("ab",), statistics=("p50",)
        )
        for name, words, text in (
            ("serve/sent_ttft_ms", "TTFT from sending", "t(first token) - t(sent)"),
            ("serve/turn_ttft_ms", "TTFT of later turns", "serve/sent_ttft_ms of later turns"),
        )
    ),
    Metric(
        "serve/tpot_ms",
        "as latency/tpot_ms, of requests that arrive by themselves",
        label="TPOT, served",
        words="time per output token, served",
        better="lower",
        shown=("compare", "ab", "summary"),
        statistics=("mean", "p50"),
    ),
    Metric(
        "serve/itl_ms",
        "as latency/itl_ms, of requests that arrive by themselves",
        label="ITL, served",
        better="lower",
        statistics=("mean", "p50"),
    ),
    Metric(
        "serve/e2e_ms",
        "t(last token on the host) - t(scheduled arrival)",
        label="E2E from arrival",
        words="request, arrival to end",
        better="lower",
        shown=("ab", "summary"),
        statistics=("mean", "p50"),
    ),
    Metric(
        "serve/schedule_lag_ms",
        "t(request is handed to the engine) - t(scheduled arrival); with max_concurrency "
        "it includes the wait for a free place",
        label="schedule lag",
        better="lower",
        statistics=("mean", "p50"),
    ),
    _LOAD,
    _cold(_LOAD),
    Metric(
        "memory/gpu_peak_gib",
        "highest device memory in use by the run",
        label="GPU peak",
        words="GPU memory, peak",
        better="lower",
        shown=_EVERYWHERE,
    ),
    Metric(
        "memory/gpu_budget_gib",
        "device memory the run was allowed",
        label="GPU budget",
        words="GPU memory, budget",
        shown=("summary",),
    ),
    Metric(
        "memory/host_pinned_gib",
        "host bytes registered with the device (engine's ledger)",
        label="host pinned",
        words="host memory, pinned",
        better="lower",
        shown=_EVERYWHERE,
    ),
    Metric(
        "memory/host_rss_peak_gib",
        "highest resident set of the worker process",
        label="host peak",
        words="host memory of the worker, peak",
        better="lower",
        shown=("ab", "summary"),
    ),
    Metric(
        "quality/perplexity",
        "exp(-mean(log-probability)) of the tokens of a text, each given those before it "
        "in its window (scenario.quality: window_tokens, stride_tokens); later windows "
        "overlap the one before and count only tokens that are new",
        label="perplexity",
        words="perplexity of the text",
        better="lower",
        shown=_EVERYWHERE,
    ),
    Metric(
        "quality/equal_share",
        "of the plain weights' greedy answers (scenario.quality.reference), tokens that "
        "are the most probable ones here too, each given the answer before it / tokens",
        label="same tokens",
        words="greedy tokens as those of plain weights",
        better="higher",
        shown=_EVERYWHERE,
    ),
    Metric(
        "quality/first_difference_tokens",
        "mean over the prompts of the greedy tokens before the first that differs from "
        "the plain weights'; output_tokens if none differs",
        label="leading same tokens",
        words="greedy tokens before the first that differs",
        better="higher",
        shown=("sweep", "compare", "summary"),
    ),
    Metric(
        "link/h2d_gb_s",
        "host to device copy rate: median of 20 copies of 256 MiB from registered memory, GB ="
        " 10^9 bytes, measured in this run",
        label="link",
        words="link, host to GPU",
        better="higher",
        shown=("summary",),
    ),
    Metric(
        "link/share",
        "(bytes moved host to device in the steps that only decode / wall time of those steps)"
        " / mean of link/h2d_gb_s and link/h2d_after_gb_s",
        label="share of the link",
        words="share of the link used in decode",
        better="higher",
        shown=("card", "summary"),
    ),
    Metric(
        "offload/bytes_per_step",
        "bytes host to device, copied or read in place, experts included, per step that only"
        " decodes, as the engine counts them",
        label="bytes per step",
        words="host to GPU per decode step",
        better="lower",
        shown=("summary",),
    ),
    Metric(
        "experts/hit_share",
        "experts on the GPU / experts that steps that only decode used, each counted once "
        "per layer and step; model.routing says how tokens were routed",
        label="experts found",
        words="experts found on the GPU",
        better="higher",
        shown=("card", "sweep", "compare", "summary"),
    ),
    Metric(
        "experts/misses_per_step",
        "experts of all layers that crossed the link, per step that only decodes",
        label="expert misses per step",
        words="experts over the link per decode step",
        better="lower",
        shown=("summary",),
    ),
    Metric(
        "experts/bytes_per_step",
        "of offload/bytes_per_step, those of experts",
        label="expert bytes per step",
        words="experts, host to GPU per decode step",
        better="lower",
        shown=("sweep",),
    ),
    Metric(
        "energy/j_per_token",
        "energy/total_j / output tokens of the part of the scenario that it was measured over",
        label="energy per token",
        words="energy per output token",
        better="lower",
        shown=("card", "compare", "ab", "summary"),
    ),
    Metric(
        "kv/hit_share",
        "(kv/gpu_hit_tokens + kv/cpu_hit_tokens) / (those + kv/missed_tokens)",
        label="KV found",
        better="higher",
        shown=("sweep",),
        needs=_HOST_BLOCKS,
    ),
    Metric(
        "kv/loaded_gib",
        "bytes of blocks copied from the host tier to the GPU",
        label="KV loaded",
        shown=("sweep",),
        needs=_HOST_BLOCKS,
    ),
    Metric(
        "kv/in_place_gib",
        "bytes of keys and values that decodes read in the host tier",
        label="KV read in place",
        shown=("sweep",),
        needs=_HOST_BLOCKS,
    ),
)
_OTHERS: Final = {
    **LISTED,
    **{f"predicted/{quantity}": text for quantity, text in _PREDICTED_TEXT.items()},
    **{f"predicted/{quantity}_difference_pct": _DIFFERENCE for quantity in PREDICTED},
}
"""Metrics that a run's page lists by name: name -> definition."""
METRICS: Final[Mapping[str, Metric]] = MappingProxyType(
    {metric.name: metric for metric in _SHOWN}
    | {name: Metric(name, text) for name, text in _OTHERS.items()}
)
"""Name without its statistic (load/busy: without its phase) -> metric."""

STATISTIC_DEFINITIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "mean": "arithmetic mean",
        "p50": f"median; needs {SAMPLE_FLOORS[50]} samples",
        **{
            f"p{q}": f"{q}th percentile; needs {floor} samples"
            for q, floor in SAMPLE_FLOORS.items()
            if q != 50
        },
        "min": "smallest sample",
        "max": "largest sample",
        "std": "sample standard deviation (ddof=1); needs 2 samples",
        "repeat_std": "sample standard deviation of the repeats' means (ddof=1); needs 2 repeats",
        "ci95_low": "lower end of the mean's 95 % interval over repeats (Student's t, n - 1)",
        "ci95_high": "upper end of it; needs 2 repeats",
    }
)
"""Last part of a metric name -> what it means."""

CONVENTIONS: Final[tuple[str, ...]] = (
    "Percentiles interpolate linearly between the two nearest samples (numpy's default).",
    "A percentile is n/a below its sample floor: p50 needs 11 samples, p90 64, p95 130, p99 662.",
    "n/a means not measured or too few samples. It is never written as 0.",
    "GiB is 2^30 bytes; GB is 10^9 bytes; tokens are counted from token ids.",
    "The link bound of TPOT is offload bytes per step / measured host to device rate.",
)

AB: Final = "ab"
"""Area of the figures of a comparison of two sides."""
_UNITS: Final = (
    ("requests_s", "requests/s"),
    ("tok_s", "tok/s"),
    ("gb_s", "GB/s"),
    ("bytes_per_step", "GiB/step"),
    ("j_per_token", "J/token"),
    ("share", "%"),
    ("_gib", "GiB"),
    ("_bytes", "GiB"),
    ("_pct", "%"),
    ("_mhz", "MHz"),
    ("_hz", "Hz"),
    ("_w", "W"),
    ("_c", "C"),
    ("_ms", "ms"),
    ("_us", "us"),
    ("_s", "s"),
    ("_j", "J"),
)
"""Ending of a metric's quantity -> unit; the first match counts."""


def metric_of(name: str) -> Metric | None:
    """Return the metric of a name in a run's record, looked up by its longest known prefix.

    Args:
        name: a full name, such as `latency/ttft_ms/p50`.
    """
    parts = name.split("/")
    if parts[0] == "load" and parts[-1].startswith(COLD):
        warm = metric_of("/".join([*parts[:-1], parts[-1].removeprefix(COLD)]))
        return None if warm is None else _cold(warm)
    for length in range(len(parts), 0, -1):
        metric = METRICS.get("/".join(parts[:length]))
        if metric is not None:
            return metric
    return None


def definition(name: str) -> str | None:
    """Return the definition of a metric's full name, also of a comparison of two sides."""
    if name.startswith(f"{AB}/"):
        return _ab_definition(name.split("/")[1])
    metric = metric_of(name)
    return None if metric is None else metric.definition


def _ab_definition(name: str) -> str | None:
    """Return the definition of `AREA_QUANTITY_ratio` or `AREA_QUANTITY_noise_share`."""
    known = {metric.name.replace("/", "_", 1): metric.name for metric in shown("ab")}
    base = known.get(name.removesuffix("_ratio").removesuffix("_noise_share"))
    if base is None:
        return None
    if name.endswith("_ratio"):
        return f"b / a of {base}: geometric mean over the pairs of runs of both sides"
    return (
        f"share by which b / a of {base} may differ from 1 by chance: of side a against itself,"
        " 95 %, as many pairs"
    )


def shown(place: Place) -> list[Metric]:
    """Return the metrics of a place in order."""
    return [metric for metric in (*METRICS.values(), TOTAL) if place in metric.shown]


def of_samples(area: str) -> list[Metric]:
    """Return the metrics of an area that are of samples, such as the latencies of `serve`."""
    return [
        metric
        for metric in METRICS.values()
        if metric.statistics and metric.name.startswith(f"{area}/")
    ]


def found(place: Place, runs: Sequence[Metrics]) -> list[Metric]:
    """Return the metrics of a place that a run has, by the statistic that the runs share."""
    metrics = [
        shared(metric, runs)
        for metric in shown(place)
        if not metric.needs or _having(metric.needs, runs)
    ]
    return [metric for metric in metrics if _having(metric.name, runs)]


def shared(metric: Metric, runs: Sequence[Metrics]) -> Metric:
    """Return the statistic by which runs are held against each other.

    The mean where all that have one have its interval, else the median where all have it, else the
    mean; of a single value the metric itself.
    """
    having = [run for run in runs if run.get(f"{metric.name}/mean") is not None]
    if not having:
        return metric.at("p50") if _having(f"{metric.name}/p50", runs) else metric
    has = {
        end: all(run.get(f"{metric.name}/{end}") is not None for run in having)
        for end in ("ci95_low", "p50")
    }
    return metric.at("p50" if has["p50"] and not has["ci95_low"] else "mean")


def _having(name: str, runs: Sequence[Metrics]) -> bool:
    return any(run.get(name) is not None for run in runs)


def interval(run: Metrics, name: str) -> str:
    """Return the 95 % interval of a mean over repeats as text, empty without one."""
    base = name.removesuffix("/mean")
    ends = [run.get(f"{base}/{end}") for end in ("ci95_low", "ci95_high")]
    return "" if None in ends else " to ".join(metric_number(base, end) for end in ends)


def base_name(metric: str) -> str:
    """Return `area/quantity_unit` of a metric name."""
    return "/".join(metric.split("/")[:2])


def unit(metric: str) -> str:
    """Return the unit of a column of a metric, empty where its name has none."""
    quantity = base_name(metric)
    if metric.startswith("load/busy/"):
        quantity = metric
    for ending, text in _UNITS:
        if quantity.endswith(ending):
            return text
    return ""


def metric_number(metric: str, value: float | None) -> str:
    """Return a metric's value in the unit of `unit`, without the unit."""
    if value is None:
        return ABSENT
    quantity = base_name(metric)
    if quantity.endswith("share"):
        return number(100 * value)
    if quantity.endswith(("bytes_per_step", "_bytes")):
        return number(value / GIB)
    return number(value)


def metric_parts(metric: str, value: float | None) -> tuple[str, str]:
    """Return (number, unit) of one metric; small bytes are in MiB, short times in ms."""
    usual = unit(metric)
    if value is None:
        return ABSENT, ""
    if usual.startswith("GiB"):
        size = value * GIB if base_name(metric).endswith("_gib") else value
        text, _, prefix = gib(size).partition(" ")
        return text, prefix + usual.removeprefix("GiB")
    if usual == "s" and 0 < abs(value) < 0.1:
        return number(1000 * value), "ms"
    return metric_number(metric, value), usual


def metric_text(metric: str, value: float | None) -> str:
    """Return a metric's value with its unit."""
    return " ".join(metric_parts(metric, value)).rstrip()
