"""The view Tests: what runs, what has run, and the results of one test with its comparison."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from console.page import texts
from console.page.texts import KINDS, UNKNOWN
from console.registry.tables import Comparison, Model, TestRun
from reports.record.metrics import METRICS, base_name, metric_number, metric_of, metric_parts
from reports.record.metrics import unit as unit_of
from reports.record.text import flatten, leaf

PAGE: Final = 50
"""Rows of a page."""
OPEN: Final = frozenset({"queued", "running"})
"""Statuses of tests that have not ended."""
WORDS: Final[Mapping[str, str]] = {"test": "Test", "ab": "A/B", "sweep": "Sweep"}
RESULTS: Final = (
    "throughput/output_tok_s",
    "serve/output_tok_s",
    "latency/tpot_ms",
    "latency/ttft_ms",
)
"""What a row of the history says, the first two that there are."""


def title(run: TestRun, models: Mapping[int, Model]) -> str:
    """Return what a test is, in a few words."""
    model = models.get(run.model_id)
    name = UNKNOWN if model is None else model.name
    profile = (
        None
        if model is None
        else next((each.name for each in model.profiles if each.id == run.profile_id), None)
    )
    count = (
        ""
        if run.num_requests is None
        else f", {run.num_requests:,} request{'s' if run.num_requests > 1 else ''}"
    )
    which = f" {profile}" if profile and run.kind == "test" else ""
    return f"{WORDS.get(run.kind, run.kind)} of {name}{which}{count}"


def state_of(run: TestRun) -> dict[str, Any]:
    """Return where a test stands, as the stream tells it."""
    progress = run.progress or {}
    done, total = progress.get("done"), progress.get("total")
    parts = [texts.word(progress.get("phase") or run.status)]
    if total:
        parts.append(f"{texts.number(done)} of {texts.number(total, progress.get('unit') or '')}")
    if progress.get("failed"):
        parts.append(f"{texts.number(progress['failed'])} failed")
    return {
        "key": run.id,
        "state": texts.word(run.status),
        "kind": KINDS.get(run.status),
        "progress": ", ".join(parts),
        "done": done if total else None,
        "total": total,
        "reason": run.reason,
        "cancel": f"/api/tests/{run.id}/cancel",
        "cancel_held": run.status not in OPEN,
        "is_settled": run.status not in OPEN,
        "address": f"/tests/{run.id}",
    }


def row(run: TestRun, models: Mapping[int, Model]) -> dict[str, Any]:
    """Return a test as a row of the history or a panel of what runs."""
    ended = None if run.started_s is None or run.ended_s is None else run.ended_s - run.started_s
    return state_of(run) | {
        "title": title(run, models),
        "moment": texts.moment(run.created_s)[:16],
        "result": result(run),
        "took": "" if ended is None else texts.duration(ended),
    }


def result(run: TestRun) -> str:
    """Return what a test found in a few words: two figures, or why there are none."""
    metrics = run.metrics or {}
    if run.kind == "sweep":
        return run.reason or fastest(metrics)
    found = [
        f"{metric.label} {' '.join(metric_parts(name, metrics[name])).rstrip()}"
        for name in RESULTS
        if (metric := METRICS.get(name)) is not None and isinstance(metrics.get(name), (int, float))
    ]
    return run.reason or ", ".join(found[:2])


def fastest(metrics: Mapping[str, Any]) -> str:
    """Return which profile of a sweep answered most tokens per second; empty where none did."""
    name = RESULTS[0]
    rates = {of: found[name] for of, found in metrics.items() if found.get(name) is not None}
    if not rates:
        return ""
    best = max(rates, key=lambda of: rates[of])
    return f"fastest of {len(metrics)}: {best}, {' '.join(metric_parts(name, rates[best]))}"


def sweep_table(run: TestRun) -> dict[str, Any] | None:
    """Return the figures of a sweep, a row for each profile; None: it is no sweep, or has none."""
    metrics = (run.metrics or {}) if run.kind == "sweep" else {}
    names = [name for name in RESULTS if any(name in found for found in metrics.values())]
    if not names:
        return None
    return {
        "columns": [f"{METRICS[name].label}, {unit_of(name)}" for name in names],
        "rows": [
            (of, [metric_number(name, found[name]) if name in found else UNKNOWN for name in names])
            for of, found in metrics.items()
        ],
    }


def live_list(
    running: Sequence[TestRun], past: Sequence[TestRun], models: Mapping[int, Model]
) -> dict[str, Any]:
    """Return the tests that run and a page of those that have ended."""
    return {
        "running": [row(each, models) for each in running],
        "has_no_running": not running,
        "past": [row(each, models) for each in past],
        "has_past": bool(past),
    }


def live_one(run: TestRun, shown_status: str) -> dict[str, Any]:
    """Return where one test stands; `shown_status` is what the page was made with."""
    return state_of(run) | {"is_same": run.status == shown_status or run.status in OPEN}


def tables(run: TestRun) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the settings and the environment of a test, as pairs."""
    trees = (("Settings", run.settings), ("Environment", run.environment))
    return [
        (caption, [(key, leaf(value)) for key, value in flatten(tree)])
        for caption, tree in trees
        if tree
    ]


def metric_tiles(run: TestRun) -> list[dict[str, str]]:
    """Return every figure of a test that the metric table knows."""
    found = []
    for name, value in (run.metrics or {}).items():
        metric = metric_of(name) or METRICS.get(base_name(name))
        if metric is None or not isinstance(value, (int, float)) or name.count("/") > 1:
            continue
        figure, unit = metric_parts(name, value)
        found.append({"label": metric.label, "value": figure, "unit": unit, "name": name})
    return found


def comparison(found: Comparison, model: Model | None) -> dict[str, Any]:
    """Return the table of an A/B test: both sides, ratio, interval, and equal tokens."""
    names = {} if model is None else {each.id: each for each in model.profiles}

    def side(profile_id: int | None) -> str:
        profile = None if profile_id is None else names.get(profile_id)
        return (
            "a removed profile"
            if profile is None
            else f"{profile.name} ({texts.settings_line(profile.settings)})"
        )

    equal, total = found.tokens_equal, found.tokens_total
    is_equal = equal is not None and equal == total
    return {
        "a": side(found.profile_a_id),
        "b": side(found.profile_b_id),
        "verdict": found.verdict or "no verdict",
        "kind": "good" if is_equal else "warn",
        "tokens": "Whether tokens are equal is unknown."
        if equal is None or total is None
        else f"{equal:,} of {total:,} requests gave equal tokens.",
        "rows": [ratio_row(each) for each in found.rows],
    }


def ratio_row(found: Mapping[str, Any]) -> dict[str, str]:
    """Return a metric of both sides; what one side has not is unknown."""
    name = str(found["metric"])
    metric = metric_of(name)
    low, high, ratio = found.get("low"), found.get("high"), found.get("ratio")
    return {
        "label": name if metric is None else metric.label,
        "a": UNKNOWN if found.get("a") is None else metric_number(name, found["a"]),
        "b": UNKNOWN if found.get("b") is None else metric_number(name, found["b"]),
        "unit": str(found.get("unit") or unit_of(name)),
        "ratio": UNKNOWN if ratio is None else f"{ratio:.3f}",
        "interval": UNKNOWN if low is None or high is None else f"{low:.3f} to {high:.3f}",
    }
