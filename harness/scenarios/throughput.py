"""Throughput: N requests at once; rates of tokens and requests, prefill and decode apart."""

from collections.abc import Sequence

from harness.scenarios.drive import Clock, Engine, OnEnd, OnProgress, StepTotals, run_at_once
from harness.scenarios.outcome import (
    Outcome,
    cut_reasons,
    failure_reasons,
    ratio,
    short_reasons,
)
from harness.scenarios.reuse import hit_tokens, note_reuse, reuse_since, with_outputs


def measure_throughput(
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
    """Offer all prompts at once; return their figures and the sums over the steps.

    The wall runs from the first submit to the last token. Prefill is the wall of steps with
    prefill work, decode that of the steps without; a step that does both counts as prefill. Prompt
    tokens that were found in a prefix cache are not among those that prefill computed. Of requests
    that were taken back the tokens until then count.
    """
    before = hit_tokens(llm.stats())
    requests, totals = run_at_once(
        llm,
        prompts,
        output_tokens,
        clock=clock,
        prefix="throughput",
        on_progress=on_progress,
        on_end=on_end,
        limit_s=limit_s,
        salt=salt,
    )
    found = reuse_since(before, llm.stats(), requests, lambda: with_outputs(prompts, requests))
    cut = cut_reasons("throughput", requests, len(prompts), limit_s)
    done = [request for request in requests if request.is_complete]
    cancelled = [request for request in requests if request.is_cancelled]
    counted = done + [request for request in cancelled if request.token_ids]
    prompt_tokens = sum(request.num_prompt_tokens for request in counted)
    num_output = sum(len(request.token_ids) for request in counted)
    wall_s = 0.0
    if counted:
        begin_s = min(request.submit_s for request in requests)
        wall_s = max(request.token_times_s[-1] for request in counted) - begin_s
    metrics = {
        "throughput/requests_s": ratio(len(done), wall_s),
        "throughput/output_tok_s": ratio(num_output, wall_s),
        "throughput/total_tok_s": ratio(prompt_tokens + num_output, wall_s),
        "throughput/prefill_tok_s": ratio(
            prompt_tokens - (found.hit_tokens or 0.0), totals.prefill_s
        ),
        "throughput/decode_tok_s": ratio(totals.num_decode_tokens, totals.decode_s),
        "throughput/wall_s": wall_s or None,
    }
    samples = {
        "num_requests": len(requests),
        "num_completed": len(done),
        "num_failed": len(requests) - len(done) - len(cancelled),
        "num_cancelled": len(cancelled),
        "num_prompt_tokens": prompt_tokens,
        "num_output_tokens": num_output,
        "wall_s": wall_s or None,
        "num_steps": totals.num_steps,
        "num_decode_steps": totals.num_decode_steps,
        "num_decode_tokens": totals.num_decode_tokens,
        "prefill_s": totals.prefill_s,
        "decode_s": totals.decode_s,
        "requests": [
            {key: value for key, value in request.to_row().items() if key != "itl_ms"}
            for request in requests
        ],
    }
    reasons = [
        *cut,
        *failure_reasons("throughput", requests),
        *short_reasons("throughput", requests, output_tokens),
    ]
    outcome = Outcome(
        metrics=metrics,
        samples=samples,
        num_measured=len(counted),
        reasons=reasons,
        is_cut=bool(cut),
    )
    note_reuse(outcome, "throughput", found)
    return outcome, totals
