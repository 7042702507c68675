"""What is sent in one part of the scenario: token ids for the engine that is here."""

from collections.abc import Sequence
from typing import Unpack

from harness.config.schema import RequestSet
from harness.observe.statistics import Quantile, drift
from harness.work.drive import (
    Clock,
    Conduct,
    Engine,
    Outcome,
    StepTotals,
    cut_reasons,
    failure_reasons,
    ratio,
    run_requests,
    run_warm_up,
    short_reasons,
)
from harness.work.kv import hit_tokens, note_reuse, reuse_since, with_outputs
from harness.work.prompts import PromptRow, encode_rows, special_ids, synthetic_prompts
from harness.work.times import RequestTimes, latency_pools, pool_metrics


def measure_latency(
    llm: Engine,
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
    *,
    t: Quantile,
    **how: Unpack[Conduct],
) -> tuple[Outcome, StepTotals]:
    """Run the prompts one after the other; return their figures and the sums over the steps."""
    before = hit_tokens(llm.stats())
    requests, totals = run_requests(llm, prompts, output_tokens, prefix="latency", **how)
    outcome = _outcome("latency", prompts, requests, output_tokens, how)
    outcome.reasons += drift_reasons(requests, t)
    outcome.num_measured = sum(request.is_complete for request in requests)
    outcome.num_asked = len(requests)
    outcome.pools = latency_pools(requests)
    outcome.metrics = pool_metrics(outcome.pools)
    outcome.samples = [request.to_row() for request in requests]
    found = reuse_since(before, llm.stats(), requests, lambda: with_outputs(prompts, requests))
    note_reuse(outcome, "latency", found)
    return outcome, totals


def _outcome(
    part: str,
    prompts: Sequence[Sequence[int]],
    requests: Sequence[RequestTimes],
    output_tokens: int,
    how: Conduct,
) -> Outcome:
    """Return what speaks against the figures of a part; the figures are to be filled in."""
    cut = cut_reasons(part, requests, len(prompts), how.get("limit_s"))
    failed, short = failure_reasons(part, requests), short_reasons(part, requests, output_tokens)
    return Outcome(is_cut=bool(cut), reasons=[*cut, *failed, *short])


def drift_reasons(requests: Sequence[RequestTimes], t: Quantile) -> list[str]:
    """Return one reason when requests became slower or faster per token while they ran in turn."""
    times = [request.tpot_ms for request in requests if request.is_complete]
    found = drift([time_ms for time_ms in times if time_ms is not None], t)
    if found is None or not found.is_drift:
        return []
    return [
        f"latency: the mean time per output token went from {found.first:.4g} ms in the first "
        f"third of the requests to {found.last:.4g} ms in the last: the machine was not steady. "
        "End other work on it, let it cool, or raise scenario.latency.warmup_requests."
    ]


def measure_throughput(
    llm: Engine, prompts: Sequence[Sequence[int]], output_tokens: int, **how: Unpack[Conduct]
) -> tuple[Outcome, StepTotals]:
    """Offer all prompts at once; return their figures and the sums over the steps.

    The wall runs from the first submit to the last token. Prefill is the wall of steps with
    prefill work, decode that of the steps without; a step that does both counts as prefill. Prompt
    tokens that were found in a prefix cache are not among those that prefill computed. Of requests
    that were taken back the tokens until then count.
    """
    before = hit_tokens(llm.stats())
    requests, totals = run_requests(
        llm, prompts, output_tokens, prefix="throughput", at_once=True, **how
    )
    found = reuse_since(before, llm.stats(), requests, lambda: with_outputs(prompts, requests))
    outcome = _outcome("throughput", prompts, requests, output_tokens, how)
    done = [request for request in requests if request.is_complete]
    cancelled = [request for request in requests if request.is_cancelled]
    counted = done + [request for request in cancelled if request.token_ids]
    prompt_tokens = sum(request.num_prompt_tokens for request in counted)
    num_output = sum(len(request.token_ids) for request in counted)
    wall_s = 0.0
    if counted:
        begin_s = min(request.submit_s for request in requests)
        wall_s = max(request.token_times_s[-1] for request in counted) - begin_s
    outcome.num_measured = len(counted)
    outcome.metrics = {
        "throughput/requests_s": ratio(len(done), wall_s),
        "throughput/output_tok_s": ratio(num_output, wall_s),
        "throughput/total_tok_s": ratio(prompt_tokens + num_output, wall_s),
        "throughput/prefill_tok_s": ratio(
            prompt_tokens - (found.hit_tokens or 0.0), totals.prefill_s
        ),
        "throughput/decode_tok_s": ratio(totals.num_decode_tokens, totals.decode_s),
        "throughput/wall_s": wall_s or None,
    }
    outcome.samples = {
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
    note_reuse(outcome, "throughput", found)
    return outcome, totals


def part_prompts(
    llm: Engine, part: str, config: RequestSet, rows: Sequence[PromptRow] | None
) -> list[list[list[int]]]:
    """Return the prompts of each repeat; no two repeats share one.

    `rows` are those of the file of prompts, enough for all repeats; None: prompts are synthetic,
    and another part has others.
    """
    num, repeats = config.num_requests, config.repeats
    if rows is not None:
        encoded = encode_rows(rows, llm.tokenizer)
    else:
        encoded = engine_prompts(
            llm, num * repeats, config.prompt_tokens, seed=config.seed, stream=part
        )
    return [encoded[number * num : (number + 1) * num] for number in range(repeats)]


def engine_prompts(
    llm: Engine, num_prompts: int, num_tokens: int, *, seed: int, stream: str
) -> list[list[int]]:
    """Return synthetic prompts in the vocabulary of an engine, without its special tokens.

    Another seed or stream gives other prompts; no two of one are equal.
    """
    return synthetic_prompts(
        num_prompts,
        num_tokens,
        vocab_size=llm.spec.vocab_size,
        seed=seed,
        stream=stream,
        avoid=special_ids(llm.tokenizer),
    )


def warm_up_part(
    llm: Engine, part: str, config: RequestSet, *, clock: Clock, salt: str | None = None
) -> list[str]:
    """Run the requests before a part, with prompts of their own; return what went wrong."""
    stream, num = f"{part}/warm-up", config.warmup_requests
    prompts = engine_prompts(llm, num, config.prompt_tokens, seed=config.seed, stream=stream)
    limit_s = config.max_duration_s
    return run_warm_up(
        llm, part, prompts, config.output_tokens, clock=clock, limit_s=limit_s, salt=salt
    )
