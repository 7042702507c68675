"""Rows of `study=validate` and `validate_grid`: predictions and auto against measured times."""

from collections.abc import Iterator
from typing import Final

from engine.sealed import GIB
from harness.studies.table import Found, Judged, LackError, Row, Value, grid, lacks, make_row

TOLERANCE: Final = 0.15
"""Share by which a predicted decode step may differ from the measured one."""
LEAST_SHARE: Final = 0.95
"""Share of the best split by hand that auto has to reach."""
AUTO: Final = {"decode step": "auto_latency", "queue": "auto_throughput"}
"""What is timed -> the point of auto whose objective it is."""


def judge(found: Found, *, card: str | None, is_default: bool) -> Judged:
    """Return a row for each prefill and decode step, and what memory the engines took.

    Args:
        found: the points.
        card: as in other studies.
        is_default: likewise.
    """
    del card, is_default
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
    text = f"{predicted_s * 1e3:.2f} against {measured_s * 1e3:.2f} ms"
    return text, predicted_s / measured_s


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


def judge_grid(found: Found, *, card: str | None, is_default: bool) -> Judged:
    """Return what auto reaches of the best split by hand, and every split's times.

    Args:
        found: points of auto, and points hand_1, ... on the same budget.
        card: as in other studies.
        is_default: likewise.
    """
    del card, is_default
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
            f"{what}: best by hand / {found[AUTO[what]].title}",
            lambda w=what, t=times: _reached(w, t, found, given_up),  # type: ignore[misc]
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
            return f"{times[auto]:.3g} s; every split by hand that fits was given up", 1.0
        raise LackError("no split by hand has figures")
    best = min(hand, key=lambda name: hand[name])
    text = f"{hand[best]:.4g} s ({found[best].title}) against {times[auto]:.4g} s"
    return text, hand[best] / times[auto]


def _shown(value: float | None, factor: float) -> str:
    return "-" if value is None else f"{value * factor:.4g}"
