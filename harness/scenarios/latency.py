"""Latency: one request at a time after a warm-up; TTFT, TPOT, ITL and end to end."""

from collections.abc import Sequence

from harness.measure.latency import floor_note, latency_metrics
from harness.scenarios.drive import Clock, Engine, OnProgress, StepTotals, run_in_turn
from harness.scenarios.outcome import Outcome, failure_reasons


def measure_latency(
    llm: Engine,
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
    *,
    clock: Clock,
    on_progress: OnProgress | None = None,
) -> tuple[Outcome, StepTotals]:
    """Run the prompts one after the other; return their figures and the sums over the steps."""
    requests, totals = run_in_turn(
        llm, prompts, output_tokens, clock=clock, prefix="latency", on_progress=on_progress
    )
    num_complete = sum(request.is_complete for request in requests)
    note = floor_note(num_complete)
    outcome = Outcome(
        metrics=latency_metrics(requests),
        samples=[request.to_row() for request in requests],
        num_complete=num_complete,
        reasons=failure_reasons("latency", requests),
        notes=[note] if note else [],
    )
    return outcome, totals
