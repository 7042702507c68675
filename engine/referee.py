"""Time the best predicted placements for a few steps and keep the fastest (planner.referee)."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final, Protocol

from engine.asked.offload import OffloadWarning
from engine.asked.request import TokenEvent
from engine.asked.sampling import SamplingParams
from engine.errors import CapacityError
from engine.plan.memory import MemoryPlan
from engine.plan.queue import QUEUE_REQUESTS, queue_of
from engine.plan.times import CONTEXT_TOKENS
from engine.run.core import StepStats

NUM_CANDIDATES: Final = 2
SETTLE_STEPS: Final = 3
"""Decode steps that are not timed: the first of all sequences, and those behind a break."""
TIMED_STEPS: Final = 12
LONGEST_PROMPT: Final = 2048
"""Longest prompt of the objective context, so that the referee computes none at length."""


class TimedEngine(Protocol):
    """The part of engine.LLM that is timed."""

    @property
    def last_step(self) -> StepStats | None:
        """What the newest step did."""
        ...

    def add_request(self, prompt: list[int], params: SamplingParams) -> str:
        """Queue a prompt."""
        ...

    def step(self) -> list[TokenEvent]:
        """Run a step."""
        ...

    def has_unfinished(self) -> bool:
        """Whether a step has work."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one candidate is given."""

    batch: int
    prompt_tokens: int
    output_tokens: int
    """At most; what is decoded beyond the timed steps is dropped."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What was measured of one candidate."""

    prefill_s: float
    """Until every prompt had its first token."""
    step_s: float | None
    """Median of the steps in which all sequences decoded; None: there were too few."""


def judge(
    plans: Sequence[MemoryPlan],
    vocab_size: int,
    open_engine: Callable[[MemoryPlan], TimedEngine],
    clock: Callable[[], float] = time.perf_counter,
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
    rows: list[dict[str, Any]] = []
    seconds: list[float | None] = []
    for plan in plans:
        load = load_of(plan, objective)
        try:
            timing = _timed(open_engine, plan, load, vocab_size, clock)
        except CapacityError as error:
            timing, failure = None, str(error)
        else:
            failure = ""
        found = None if timing is None else _seconds(plan, load, timing, objective)
        seconds.append(found)
        rows.append(_row(plan, load, timing, found) | ({"error": failure} if failure else {}))
    measured = [(value, index) for index, value in enumerate(seconds) if value is not None]
    if len(measured) < len(plans):
        return _noted(plans[0], "not every candidate could be timed", rows)
    _, winner = min(measured)
    words = "the best predicted" if winner == 0 else "the second best predicted"
    return _noted(plans[winner], f"{words} is the fastest of {len(plans)} that were timed", rows)


def load_of(plan: MemoryPlan, objective: str) -> Load:
    """Return what a candidate is timed with: the objective's batch and lengths."""
    spare = SETTLE_STEPS + TIMED_STEPS
    if objective == "throughput":
        prompt, output = queue_of(plan.max_model_len)
        full = (plan.predicted or {})["queue"]["batch"]
        return Load(batch=full, prompt_tokens=prompt, output_tokens=output)
    most = LONGEST_PROMPT if objective == "context" else CONTEXT_TOKENS
    prompt = max(1, min(most, plan.max_model_len - spare - 2))
    output = min(spare + 2, plan.max_model_len - prompt)
    return Load(batch=1, prompt_tokens=prompt, output_tokens=output)


def _timed(
    open_engine: Callable[[MemoryPlan], TimedEngine],
    plan: MemoryPlan,
    load: Load,
    vocab_size: int,
    clock: Callable[[], float],
) -> Timing:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)  # they come when the winner is built
        engine = open_engine(plan)
    try:
        return run_load(engine, load, vocab_size, clock)
    finally:
        engine.close()


def run_load(
    engine: TimedEngine, load: Load, vocab_size: int, clock: Callable[[], float]
) -> Timing:
    """Prefill the prompts, then time steps in which all of them decode."""
    params = SamplingParams(temperature=0, max_tokens=load.output_tokens, ignore_eos=True)
    begin_s = last_s = clock()
    for row in range(load.batch):
        prompt = [(7919 * row + 31 * index) % vocab_size for index in range(load.prompt_tokens)]
        engine.add_request(prompt, params)
    started: set[str] = set()
    gaps: list[float] = []
    prefill_s, in_a_row = 0.0, 0
    while engine.has_unfinished() and len(gaps) < TIMED_STEPS:
        started |= {event.request_id for event in engine.step()}
        now_s, step = clock(), engine.last_step
        if not prefill_s and len(started) == load.batch:
            prefill_s = now_s - begin_s
        counts = None if step is None else (step.num_prefill_tokens, step.num_decode_tokens)
        is_full = counts == (0, load.batch)
        in_a_row = in_a_row + 1 if is_full else 0
        if in_a_row > SETTLE_STEPS or (is_full and load.output_tokens <= SETTLE_STEPS + 1):
            gaps.append(now_s - last_s)
        last_s = now_s
    return Timing(prefill_s=prefill_s, step_s=median(gaps) if gaps else None)


def _seconds(plan: MemoryPlan, load: Load, timing: Timing, objective: str) -> float | None:
    """What the objective minimises: a decode step, or the queue at the measured times."""
    if timing.step_s is None or objective != "throughput":
        return timing.step_s
    _, output = queue_of(plan.max_model_len)
    waves = max(1.0, QUEUE_REQUESTS / load.batch)
    return waves * (timing.prefill_s + (output - 1) * timing.step_s)


def _row(
    plan: MemoryPlan, load: Load, timing: Timing | None, seconds: float | None
) -> dict[str, Any]:
    step_s = None if timing is None else timing.step_s
    return {
        "label": (plan.choice or {}).get("chosen"),
        "batch": load.batch,
        "prompt_tokens": load.prompt_tokens,
        "predicted_decode_step_ms": (plan.predicted or {})["decode_step_ms"],
        "prefill_ms": None if timing is None else timing.prefill_s * 1e3,
        "decode_step_ms": None if step_s is None else step_s * 1e3,
        "seconds": seconds,
    }


def _noted(plan: MemoryPlan, words: str, rows: list[dict[str, Any]]) -> MemoryPlan:
    choice = dict(plan.choice or {})
    choice["referee"] = {"result": words, "timed": rows}
    return replace(plan, choice=choice)
