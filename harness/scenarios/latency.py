"""Latency: one request at a time after a warm-up; TTFT, TPOT, ITL and end to end."""

from collections.abc import Sequence

from harness.measure.latency import RequestTimes, floor_note, latency_pools, pool_metrics
from harness.measure.statistics import drift
from harness.scenarios.drive import Clock, Engine, OnEnd, OnProgress, StepTotals, run_in_turn
from harness.scenarios.outcome import Outcome, cut_reasons, failure_reasons, short_reasons
from harness.scenarios.reuse import hit_tokens, note_reuse, reuse_since, with_outputs


def measure_latency(
    llm: Engine,
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
    *,
    clock: Clock,
    on_progress: OnProgress | None = None,
    on_end: OnEnd | None = None,
    limit_s: float | None = None,
    salt: str | None = None,
) -> tuple[Outcome, StepTotals]:
    """Run the prompts one after the other; return their figures and the sums over the steps."""
    before = hit_tokens(llm.stats())
    requests, totals = run_in_turn(
        llm,
        prompts,
        output_tokens,
        clock=clock,
        prefix="latency",
        on_progress=on_progress,
        on_end=on_end,
        limit_s=limit_s,
        salt=salt,
    )
    cut = cut_reasons("latency", requests, len(prompts), limit_s)
    num_complete = sum(request.is_complete for request in requests)
    note = floor_note(num_complete)
    pools = latency_pools(requests)
    outcome = Outcome(
        metrics=pool_metrics(pools),
        pools=pools,
        samples=[request.to_row() for request in requests],
        num_measured=num_complete,
        is_cut=bool(cut),
        reasons=[
            *cut,
            *failure_reasons("latency", requests),
            *short_reasons("latency", requests, output_tokens),
            *drift_reasons(requests),
        ],
        notes=[note] if note else [],
    )
    found = reuse_since(before, llm.stats(), requests, lambda: with_outputs(prompts, requests))
    note_reuse(outcome, "latency", found)
    return outcome, totals


def drift_reasons(requests: Sequence[RequestTimes]) -> list[str]:
    """Return one reason when requests became slower or faster per token while they ran in turn."""
    times = [request.tpot_ms for request in requests if request.is_complete]
    found = drift([time_ms for time_ms in times if time_ms is not None])
    if found is None or not found.is_drift:
        return []
    return [
        f"latency: the mean time per output token went from {found.first:.4g} ms in the first "
        f"third of the requests to {found.last:.4g} ms in the last: the machine was not steady. "
        "End other work on it, let it cool, or raise scenario.latency.warmup_requests."
    ]
