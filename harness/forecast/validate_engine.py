"""Build engines, one after another, and time each beside its predictions.

`python -m harness.forecast.validate_engine` reads lines with the file of a job, a pickle of the
parent's, a tab and the file for its figures; it ends where an engine left memory behind.
"""

import gc
import json
import pickle
import sys
import time
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from engine import LLM
from engine.asked.offload import OffloadWarning
from engine.errors import CapacityError
from engine.plan.queue import queue_s
from engine.plan.times import Rates, decode_step_s, prefill_s, shape_of
from engine.referee import SETTLE_STEPS, TIMED_STEPS, Load, run_load
from engine.sealed import GIB
from harness.forecast.validate_cases import EngineCase
from harness.forecast.validate_worker import DONE
from harness.observe.host import process_memory
from harness.observe.probe_machine import probe_rates
from harness.work.drive import run_at_once
from harness.work.prompts import synthetic_prompts

LEFT_BYTES: Final = 2**28
"""Memory of an engine that may be left when it was closed, on either side."""
EARLY_SHARE: Final = 0.3
"""Of a queue's limit, after which its tokens so far say how long it would take."""
EARLY_FACTOR: Final = 2.0
"""Times its limit that a queue has to promise then to be given up."""


def measure(case: EngineCase) -> dict[str, Any]:
    """Build the case's engine and time it; `no_fit` says why where it does not fit."""
    begin_s = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OffloadWarning)  # the plan's notes are in the result
            llm = LLM.from_config(case.config)
    except CapacityError as error:
        return {"no_fit": str(error)}
    build_s = time.perf_counter() - begin_s
    try:
        return {"build_s": build_s} | _figures(llm, case)
    finally:
        llm.close()


def _figures(llm: LLM, case: EngineCase) -> dict[str, Any]:
    plan, spec = llm.plan, llm.spec
    predicted = plan.predicted or {}
    shape, rates = shape_of(plan, spec), Rates(**predicted["rates"])
    points = [point for batch in case.batches for point in _points(llm, case, batch)]
    given_up: dict[str, Any] = {}
    if case.num_requests:
        prompt, output = case.queue_tokens
        expected = queue_s(shape, rates, case.num_requests, prompt, output)
        measured_s = _queue_s(llm, case)
        if measured_s is not None:
            points.append(_point("queue", case.num_requests, expected, measured_s))
        else:
            given_up = {"queue_given_up_s": case.queue_limit_s}
    memory, host = llm.memory(), process_memory()
    return {
        "chosen": (plan.choice or {}).get("chosen"),
        "notes": list(plan.notes),
        "kv_tokens": plan.kv_tokens,
        "bytes_per_step": plan.bytes_per_step(),
        "rates": predicted["rates"],
        "points": points,
        **given_up,
        "gpu_planned_gib": plan.gpu_total_bytes / GIB,
        "gpu_peak_gib": memory["gpu_peak_bytes"] / GIB,
        "host_planned_gib": plan.host_total_bytes / GIB,
        "host_rss_gib": (host["rss_bytes"] or 0) / GIB,
    }


def _points(llm: LLM, case: EngineCase, batch: int) -> list[dict[str, Any]]:
    """A prefill of `batch` prompts and a decode step of them; none where KV has no room."""
    plan, spec = llm.plan, llm.spec
    shape, rates = shape_of(plan, spec), Rates(**(plan.predicted or {})["rates"])
    length = case.prompt_tokens
    chunks = -(-batch * length // plan.max_num_batched_tokens)
    output = min(SETTLE_STEPS + TIMED_STEPS + chunks + 2, plan.max_model_len - length)
    if shape.concurrency(length + output) < batch:
        return []
    load = Load(batch=batch, prompt_tokens=length, output_tokens=output)
    clock = time.perf_counter
    first = replace(load, output_tokens=min(output, SETTLE_STEPS + 2))
    run_load(llm, first, spec.vocab_size, clock)  # not counted
    _drain(llm)
    timing = run_load(llm, load, spec.vocab_size, clock)
    _drain(llm)
    context = length + SETTLE_STEPS + TIMED_STEPS / 2
    found = [_point("prefill", batch, prefill_s(shape, rates, length, batch), timing.prefill_s)]
    if timing.step_s is not None:
        expected = decode_step_s(shape, rates, batch, context)
        found.append(_point("decode step", batch, expected, timing.step_s))
    return found


def _point(what: str, batch: int, predicted_s: float, measured_s: float) -> dict[str, Any]:
    return {"what": what, "batch": batch, "predicted_s": predicted_s, "measured_s": measured_s}


class _TooLongError(Exception):
    """The queue took longer than its limit."""


def _queue_s(llm: LLM, case: EngineCase) -> float | None:
    """Seconds of the queue; None where it was given up."""
    prompt, output = case.queue_tokens
    prompts = synthetic_prompts(
        case.num_requests, prompt, vocab_size=llm.spec.vocab_size, seed=0, stream="queue"
    )
    begin_s = time.perf_counter()

    def check(_done: int, _requests: int, num_tokens: int) -> None:
        if case.queue_limit_s is None:
            return
        passed = (time.perf_counter() - begin_s) / case.queue_limit_s
        share = num_tokens / (case.num_requests * output)
        if passed > 1 or (passed > EARLY_SHARE and passed > EARLY_FACTOR * share):
            raise _TooLongError

    try:
        run_at_once(
            llm, prompts, output, clock=time.perf_counter, prefix="queue", on_progress=check
        )
    except _TooLongError:
        return None
    return time.perf_counter() - begin_s


def _drain(llm: LLM) -> None:
    while llm.has_unfinished():
        llm.step()


def main(jobs: Iterable[str] = sys.stdin) -> int:
    """Run jobs, each an EngineCase or the device to probe, and write their figures."""
    rss_bytes = None
    for line in jobs:
        job_file, result_file = line.rstrip("\n").split("\t")
        job = pickle.loads(Path(job_file).read_bytes())  # noqa: S301  written by our parent
        found = probe_rates(job) if isinstance(job, str) else measure(job)
        Path(result_file).write_text(json.dumps(found), encoding="utf-8")
        sys.stdout.write(DONE)
        sys.stdout.flush()
        gc.collect()
        now_bytes = process_memory()["rss_bytes"] or 0
        rss_bytes = now_bytes if rss_bytes is None else rss_bytes
        if _gpu_bytes() > LEFT_BYTES or now_bytes > rss_bytes + LEFT_BYTES:
            break
    return 0


def _gpu_bytes() -> int:
    """What torch's allocator still holds of the card."""
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


if __name__ == "__main__":
    sys.exit(main())
