"""Rows of `study=validate`, `validate_grid`, `overhead`: what plans and the harness are off by."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from engine.sealed import GIB
from harness.studies.table import (
    Found,
    Judged,
    LackError,
    Row,
    Value,
    grid,
    lacks,
    make_row,
    times_ratio,
)
from reports.record.text import number

TOLERANCE: Final = 0.15
"""Share by which a predicted decode step may differ from the measured one."""
LEAST_SHARE: Final = 0.95
"""Share of the best split by hand that auto has to reach."""
AUTO: Final = {"decode step": "auto_latency", "queue": "auto_throughput"}
"""What is timed -> the point of auto whose objective it is."""


def judge(found: Found, **_: object) -> Judged:
    """Return a row for each prefill and decode step, and what memory the engines took."""
    return Judged(rows=list(_rows(found)), tables=_memory(found), lacks=lacks(found))


def _rows(found: Found) -> Iterator[Row]:
    for result in found.values():
        for batch, run in result.decodes():
            what = f"{result.title}, decode step at batch {batch}: predicted / measured"
            value = _against(run["predicted_s"], run["step_s"])
            yield make_row(what, value, least=1 - TOLERANCE, most=1 + TOLERANCE)
        for num, run in result.sample("steps").get("prefill", {}).items():
            if "seconds" in run:
                what = f"{result.title}, prefill of {num}: predicted / measured"
                yield make_row(what, _against(run["predicted_s"], run["seconds"]))


def _against(predicted_s: float | None, measured_s: float) -> Value:
    if predicted_s is None:
        return "not predicted", None
    return times_ratio(predicted_s, measured_s)


def _memory(found: Found) -> list[str]:
    rows = []
    for result in found.values():
        record = result.record
        if record is None or record.plan is None:
            continue
        pairs = (("gpu", "memory/gpu_peak_gib"), ("host", "memory/host_rss_peak_gib"))
        cells = [result.title]
        for side, metric in pairs:
            measured = record.metrics.get(metric)
            cells.append(f"{record.plan[side]['total_bytes'] / GIB:.2f}")
            cells.append("n/a" if measured is None else f"{measured:.2f}")
        rows.append(cells)
    head = ("engine", "GPU planned, GiB", "GPU peak", "host planned, GiB", "RSS of the worker")
    return ["", *grid(head, rows)] if rows else []


def judge_grid(found: Found, **_: object) -> Judged:
    """Return what auto reaches of the best split by hand (points hand_1, ...), and all times."""
    steps: dict[str, float] = {}
    queues: dict[str, float] = {}
    given_up: list[str] = []
    for name, result in found.items():
        runs = dict(result.decodes())
        if 1 in runs:
            steps[name] = runs[1]["step_s"]
        queue = result.sample("throughput")
        if queue.get("num_cancelled"):
            given_up.append(name)
        elif queue.get("wall_s"):
            queues[name] = queue["wall_s"]
    rows = []
    for name, result in found.items():
        if result.record is not None and result.record.samples.get("bare"):
            continue
        queue_text = "given up" if name in given_up else _shown(queues.get(name), 1)
        label = result.title if result.lack is None else f"{result.title} ({result.lack})"
        rows.append((label, _shown(steps.get(name), 1e3), queue_text))
    made = [
        make_row(
            f"{what}: best manual split / {found[AUTO[what]].title}",
            partial(_reached, what, times, found, given_up),
            least=LEAST_SHARE,
        )
        for what, times in (("decode step", steps), ("queue", queues))
        if AUTO[what] in found
    ]
    table = ["", *grid(("split", "decode step, ms", "queue, s"), rows)]
    judged = {
        name: result
        for name, result in found.items()
        if not (name.startswith("hand_") and result.record and result.record.status == "no_fit")
    }
    return Judged(rows=made, tables=table, lacks=lacks(judged))


def _reached(what: str, times: dict[str, float], found: Found, given_up: list[str]) -> Value:
    """Compare auto with the best split by hand that came to its end."""
    auto = AUTO[what]
    if auto not in times:
        raise LackError("auto has no figures")
    hand = {name: value for name, value in times.items() if not name.startswith("auto")}
    if not hand:
        if what == "queue" and given_up:  # each would have taken longer than auto
            return f"{times[auto]:.3g} s; all manual splits that fit were stopped early", 1.0
        raise LackError("no manual split has figures")
    best = min(hand, key=lambda name: hand[name])
    text = f"{hand[best]:.4g} s ({found[best].title}) against {times[auto]:.4g} s"
    return text, hand[best] / times[auto]


def _shown(value: float | None, factor: float) -> str:
    return "-" if value is None else f"{value * factor:.4g}"


def judge_overhead(found: Found, **_: object) -> Judged:
    """Return a table for each point: of scenario.overhead, or of a known rate."""
    tables: list[str] = []
    for result in found.values():
        figures = result.sample("overhead")
        if figures:
            words = f"{figures['num_requests']} requests of {figures['output_tokens']} tokens to "
            words += f"an engine that takes no time; microseconds, mean of {figures['repeats']}, "
            words += "with half of its 95 % interval; own is what exceeds a bare loop of the same"
            head = ("", "per request", "per token", "own, request", "own, token")
            tables += ["", f"{result.title}: {words}:", "", *grid(head, _cells(figures))]
        elif result.record is not None and result.record.status == "ok":
            metrics = result.record.metrics
            names = ["latency/ttft_ms/mean", "latency/tpot_ms/mean", "latency/itl_ms/max"]
            names += ["serve/schedule_lag_ms/mean", "serve/sent_requests_s"]
            rows = [
                (name, "n/a" if metrics.get(name) is None else number(metrics[name]))
                for name in names
            ]
            tables += ["", f"{result.title}:", "", *grid(("metric", "measured"), rows)]
    return Judged(tables=tables, lacks=lacks(found))


def _cells(figures: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, part in figures["parts"].items():
        own = figures["own"].get(name)
        cells = [part["request_us"], part["token_us"]]
        cells += [own["request_us"], own["token_us"]] if own else [None, None]
        shown = [f"{number(c['mean'])} +- {number(c['half'])}" if c else "" for c in cells]
        yield name if own else f"bare, {name}", *shown
