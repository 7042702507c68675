"""Time the best predicted placements for a few steps and keep the fastest (planner.referee)."""

import contextlib
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

from engine.asked.offload import OffloadWarning
from engine.asked.sampling import SamplingParams
from engine.errors import CapacityError
from engine.plan.memory import MemoryPlan
from engine.plan.queue import QUEUE_REQUESTS, queue_of
from engine.plan.times import CONTEXT_TOKENS

NUM_CANDIDATES: Final = 2
SETTLE_STEPS: Final = 3
"""Decode steps that are not timed: the first of all sequences, and those behind a break."""
TIMED_STEPS: Final = 12
LONGEST_PROMPT: Final = 2048
"""Longest prompt of the objective context, so that the referee computes none at length."""

Clock = Callable[[], float]
OpenEngine = Callable[[MemoryPlan], Any]
"""Builds the engine.LLM of a plan."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one candidate is given."""

    batch: int
    prompt_tokens: int
    output_tokens: int
    """At most; what is decoded beyond the timed steps is dropped."""


def judge(
    plans: Sequence[MemoryPlan],
    vocab_size: int,
    open_engine: OpenEngine,
    clock: Clock = time.perf_counter,
) -> MemoryPlan:
    """Return the plan that is fastest when it runs; `choice` holds both times.

    Engines are built one after another, with random weights; the memory of one is released before
    the next takes its own. One candidate alone, or one whose times cannot be had, is not timed
    against others: the best predicted plan stays, and `choice` says why.

    `plans` begin with the best predicted; each has its `choice`.
    """
    objective = str((plans[0].choice or {}).get("objective", "latency"))
    if len(plans) < NUM_CANDIDATES:
        return _noted(plans[0], "only one placement fits, so nothing was timed", [])
    rows = [_row(plan, objective, vocab_size, open_engine, clock) for plan in plans]
    seconds = [row["seconds"] for row in rows]
    if None in seconds:
        return _noted(plans[0], "not every candidate could be timed", rows)
    winner = seconds.index(min(seconds))
    words = "the best predicted" if winner == 0 else "the second best predicted"
    return _noted(plans[winner], f"{words} is the fastest of {len(plans)} that were timed", rows)


def workload_of(plan: MemoryPlan, objective: str) -> Workload:
    """Return what a candidate is timed with: the objective's batch and lengths."""
    spare = SETTLE_STEPS + TIMED_STEPS
    if objective == "throughput":
        prompt, output = queue_of(plan.max_model_len)
        full = (plan.predicted or {})["queue"]["batch"]
        return Workload(batch=full, prompt_tokens=prompt, output_tokens=output)
    most = LONGEST_PROMPT if objective == "context" else CONTEXT_TOKENS
    prompt = max(1, min(most, plan.max_model_len - spare - 2))
    output = min(spare + 2, plan.max_model_len - prompt)
    return Workload(batch=1, prompt_tokens=prompt, output_tokens=output)


def _row(
    plan: MemoryPlan, objective: str, vocab_size: int, open_engine: OpenEngine, clock: Clock
) -> dict[str, Any]:
    """Time a candidate; `seconds` is what the objective minimises, None where that failed."""
    workload = workload_of(plan, objective)
    prefill_s = step_s = seconds = None
    failure = {}
    try:
        prefill_s, step_s = _times(plan, workload, vocab_size, open_engine, clock)
    except CapacityError as error:
        failure = {"error": str(error)}
    if prefill_s is not None and step_s is not None:
        seconds = step_s
        if objective == "throughput":
            _, output = queue_of(plan.max_model_len)
            waves = max(1.0, QUEUE_REQUESTS / workload.batch)
            seconds = waves * (prefill_s + (output - 1) * step_s)
    return {
        "label": (plan.choice or {}).get("chosen"),
        "batch": workload.batch,
        "prompt_tokens": workload.prompt_tokens,
        "predicted_decode_step_ms": (plan.predicted or {})["decode_step_ms"],
        "prefill_ms": None if prefill_s is None else prefill_s * 1e3,
        "decode_step_ms": None if step_s is None else step_s * 1e3,
        "seconds": seconds,
        **failure,
    }


def _times(
    plan: MemoryPlan, workload: Workload, vocab_size: int, open_engine: OpenEngine, clock: Clock
) -> tuple[float, float | None]:
    """Return the time of the prefill, and the median of steps in which all sequences decode.

    The second is None where there were too few of these.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)  # they come when the winner is built
        engine = open_engine(plan)
    params = SamplingParams(temperature=0, max_tokens=workload.output_tokens, ignore_eos=True)
    started: set[str] = set()
    gaps: list[float] = []
    prefill_s, in_a_row = 0.0, 0
    with contextlib.closing(engine):
        begin_s = last_s = clock()
        for row in range(workload.batch):
            prompt = [
                (7919 * row + 31 * index) % vocab_size for index in range(workload.prompt_tokens)
            ]
            engine.add_request(prompt, params)
        while engine.has_unfinished() and len(gaps) < TIMED_STEPS:
            started |= {event.request_id for event in engine.step()}
            now_s, step = clock(), engine.last_step
            if not prefill_s and len(started) == workload.batch:
                prefill_s = now_s - begin_s
            counts = None if step is None else (step.num_prefill_tokens, step.num_decode_tokens)
            is_full = counts == (0, workload.batch)
            in_a_row = in_a_row + 1 if is_full else 0
            if in_a_row > SETTLE_STEPS or (is_full and workload.output_tokens <= SETTLE_STEPS + 1):
                gaps.append(now_s - last_s)
            last_s = now_s
    return prefill_s, median(gaps) if gaps else None


def _noted(plan: MemoryPlan, words: str, rows: list[dict[str, Any]]) -> MemoryPlan:
    choice = dict(plan.choice or {})
    choice["referee"] = {"result": words, "timed": rows}
    return replace(plan, choice=choice)
