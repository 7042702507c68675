"""Measure one case in a process of its own: `python -m harness.bench.measure JOB RESULT`."""

import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

import torch

from engine import LLM
from engine.config import OffloadWarning
from engine.errors import CapacityError
from engine.plan import MemoryPlan
from engine.probe import probe_link, stream_link
from harness.bench.cases import Case, Limits, Work, engine_config
from harness.bench.drive import SETTLE_STEPS, Gaps, drain, params, prompt
from harness.bench.kv_bare import BARE_PARTS
from harness.bench.kv_parts import PARTS
from harness.measure.nvml import open_gpu
from harness.measure.pcie import LinkCounter, calibrate
from reports.record.record import write_text_atomic

SPARE_TOKENS: Final = 3
"""Tokens of a sequence beyond its timed steps: the prefill's, and those at its end."""
MOST_REPLAYS: Final = 20
LEAST_REPLAYS: Final = 3
REPLAY_S: Final = 0.5
"""Replays of a graph last about so long."""
REPEATS: Final = 5
"""Of prefills."""
NUM_COUNTED_TOKENS: Final = 256
"""Output tokens of a sequence that decodes beside the counter."""


Save = Callable[[dict[str, Any]], None]
"""Gets the figures so far."""


def measure(case: Case, limits: Limits, save: Save | None = None) -> dict[str, Any]:
    """Probe, build the engine, give it its work, close it, probe again; return the figures.

    Where the engine does not fit, `no_fit` says why instead.

    Args:
        case: the engine and its work.
        limits: what it shares with others.
        save: called with the figures so far.
    """
    found: dict[str, Any] = {"before": probe_link(limits.device)}
    counter = _link_counter(limits) if case.work.counter_s else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)  # notes of the plan are in the result
        return _measured(case, limits, found, counter, save)


def _measured(
    case: Case,
    limits: Limits,
    found: dict[str, Any],
    counter: LinkCounter | None,
    save: Save | None,
) -> dict[str, Any]:
    try:
        if set(case.parts) & set(BARE_PARTS):
            bare = {name: partial(run, limits) for name, run in BARE_PARTS.items()}
            _measure_parts(case, found, bare, save)
        elif case.parts:
            assert case.kv_work is not None
            with _engine(case, limits) as (llm, facts):
                found |= facts
                runs = {name: partial(run, llm, case.kv_work) for name, run in PARTS.items()}
                _measure_parts(case, found, runs, save)
                found["memory"] = llm.memory()
        elif case.sweep:
            found["sweep"] = {str(step): _swept(case, limits, step) for step in case.sweep}
        else:
            with _engine(case, limits) as (llm, facts):
                found |= facts | _figures(llm, case.work, counter)
    except CapacityError as error:
        return found | {"no_fit": str(error)}
    return found | {"after": probe_link(limits.device)}


def _measure_parts(
    case: Case,
    found: dict[str, Any],
    runs: Mapping[str, Callable[[], dict[str, Any]]],
    save: Save | None,
) -> None:
    """Measure the parts of a case; one that fails says so and leaves the others' figures."""
    found["kv"] = {}
    for name in case.parts:
        begin_s = time.perf_counter()
        try:
            figures = runs[name]()
        except Exception as error:  # noqa: BLE001  the edge: shown in the table
            figures = {"failed": f"{type(error).__name__}: {error}"}
        found["kv"][name] = figures | {"took_s": time.perf_counter() - begin_s}
        if save is not None:
            save(found)


@contextmanager
def _engine(case: Case, limits: Limits) -> Iterator[tuple[LLM, dict[str, Any]]]:
    """Build the case's engine; yield it with how it was built, and close it."""
    utilization, asked_kv_tokens = _utilization(case, limits)
    begin = time.perf_counter()
    llm = LLM.from_config(engine_config(case, limits, utilization))
    load_s = time.perf_counter() - begin
    # As in the harness's worker: no full collection of what stays amid the figures.
    gc.collect()
    gc.freeze()
    report = llm.load_report
    try:
        yield (
            llm,
            {
                "load_s": load_s,
                "phases": report.phases,
                "moved_bytes": report.moved,
                "utilization": utilization,
                "asked_utilization": case.utilizations[0],
                "asked_kv_tokens": asked_kv_tokens,
                "plan": _plan_facts(llm),
            },
        )
    finally:
        llm.close()


def _utilization(case: Case, limits: Limits) -> tuple[float, int | None]:
    """The first of the case's shares of the card whose KV cache holds its work, else the last.

    Returns:
        The share, and the KV tokens that the first share has room for; None where it is too small.

    Raises:
        CapacityError: The engine fits none of them.
    """
    refusal: CapacityError | None = None
    fits: dict[float, int] = {}
    for share in case.utilizations:
        try:
            plan = LLM.plan_for(engine_config(case, limits, share))
        except CapacityError as error:
            refusal = refusal or error
            continue
        fits[share] = plan.kv_tokens
        needs = [_needed_tokens(batch, case.work, plan) for batch in case.work.batches]
        if plan.kv_tokens >= max(needs, default=0):
            break
    if not fits:
        assert refusal is not None
        raise refusal
    return list(fits)[-1], fits.get(case.utilizations[0])


def _output_tokens(batch: int, work: Work, plan: MemoryPlan) -> int:
    """Tokens of each sequence of a decode, so that enough steps decode all of them."""
    prefill_steps = -(-batch * work.prompt_tokens // plan.max_num_batched_tokens)
    return work.steps + 2 * SETTLE_STEPS + SPARE_TOKENS + prefill_steps - 1


def _needed_tokens(batch: int, work: Work, plan: MemoryPlan) -> int:
    """Tokens of whole KV blocks that a decode of `batch` sequences takes."""
    length = work.prompt_tokens + _output_tokens(batch, work, plan)
    return batch * -(-length // plan.block_size) * plan.block_size


def _plan_facts(llm: LLM) -> dict[str, Any]:
    """What the rows need of the plan and the sizes."""
    spec, plan = llm.spec, llm.plan
    head = "model.embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"
    layers = spec.num_hidden_layers * sum(t.numel for t in spec.layer_tensors(0))
    outer = sum(t.numel for t in spec.outer_tensors() if t.name in {head, "model.norm.weight"})
    size = spec.weight_bytes(plan.dtype) // spec.num_parameters
    return {
        "read_bytes": (layers + outer) * size,
        "gpu_total_bytes": plan.gpu_total_bytes,
        "kv_tokens": plan.kv_tokens,
        "num_slots": plan.num_slots,
        "slot_bytes": plan.slot_bytes,
        "chosen": (plan.choice or {}).get("chosen"),
        "notes": list(plan.notes),
    }


def _figures(llm: LLM, work: Work, counter: LinkCounter | None) -> dict[str, Any]:
    return {
        "decode": {str(batch): _decode(llm, batch, work) for batch in work.batches},
        "prefill_s": {str(count): _prefill(llm, count, work) for count in work.prefills},
        "chunk_s": {str(length): _chunk(llm, length) for length in work.chunks},
        "counter": None if counter is None else _count(llm, work, counter),
        "memory": llm.memory(),
    }


def _swept(case: Case, limits: Limits, step: int) -> dict[str, Any]:
    """Decode with one value of prefetch_step."""
    offload = case.offload | {"offload_prefetch_step": step}
    with _engine(replace(case, offload=offload), limits) as (llm, facts):
        plan = facts["plan"]
        return {
            "num_slots": plan["num_slots"],
            "slot_bytes": plan["slot_bytes"],
            "decode": _decode(llm, case.work.batches[0], case.work),
        }


def _decode(llm: LLM, batch: int, work: Work) -> dict[str, Any]:
    """Time steps in which every one of `batch` sequences decodes, and bare replays among them.

    Where the KV cache does not hold them, `no_room` says so instead.
    """
    needed, room = _needed_tokens(batch, work, llm.plan), llm.plan.kv_tokens
    if room < needed or llm.plan.max_num_seqs < batch:
        return {"no_room": f"{needed} tokens of KV are needed, {room} have room"}
    for row in range(batch):
        tokens = _output_tokens(batch, work, llm.plan)
        llm.add_request(prompt(llm, work.prompt_tokens, row), params(tokens))
    gaps, stats, replay_s, digest = Gaps(), None, None, []
    size = next((size for size in llm.effective()["graphs"] if size >= batch), None)
    while llm.has_unfinished():
        digest += [event.token_id for event in llm.step()]
        now_s, step = time.perf_counter(), llm.last_step
        assert step is not None
        if step.num_prefill_tokens or step.num_decode_tokens != batch:
            gaps.in_a_row = 0
            continue
        stats = step
        gaps.add(now_s, step.wait_s, work.prompt_tokens)
        if size is not None and replay_s is None and len(gaps.seconds) == work.steps // 2:
            replay_s = _replay(llm, size, median(gaps.seconds))
            gaps.in_a_row = 0
    timed = slice(work.steps)
    assert stats is not None
    planned = llm.plan.moved_per_step(batch)
    context = mean(gaps.keys[timed])
    return {
        "step_s": median(gaps.seconds[timed]),
        "least_s": min(gaps.seconds[timed]),
        "steps": len(gaps.seconds[timed]),
        "wait_s": median(gaps.waits[timed]),
        "h2d_bytes": stats.h2d_bytes,
        "in_place_bytes": stats.in_place_bytes,
        "planned_h2d_bytes": planned[0],
        "planned_in_place_bytes": planned[1],
        "kv_bytes": round(batch * context * llm.spec.kv_bytes_per_token(llm.plan.dtype)),
        "used_graph": stats.used_graph,
        "is_overlapped": stats.is_overlapped,
        "replay_s": replay_s,
        "tokens": digest,
    }


def _replay(llm: LLM, size: int, step_s: float) -> float:
    """Time bare replays of the newest step's graph of `size` rows."""
    count = min(MOST_REPLAYS, max(LEAST_REPLAYS, round(REPLAY_S / step_s)))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    llm.replay_only(size)  # the step in flight ends before the clock starts
    begin.record()
    for _ in range(count):
        llm.replay_only(size)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / count


def _prefill(llm: LLM, count: int, work: Work) -> float | None:
    """Median time to the first tokens of `count` prompts at once; None where they do not fit."""
    length = min(work.prefill_tokens, llm.max_model_len - 1)
    if llm.plan.kv_tokens < count * (length + llm.plan.block_size):
        return None
    return _median_s(llm, [(length, row) for row in range(count)])


def _chunk(llm: LLM, length: int) -> float | None:
    """Median time of a step that prefills one prompt of this length; None: it is too long."""
    return None if length >= llm.max_model_len else _median_s(llm, [(length, 0)])


def _median_s(llm: LLM, prompts: Sequence[tuple[int, int]]) -> float:
    """Time prompts of (length, seed) until each has its token, once more than is counted."""
    times = []
    for repeat in range(REPEATS + 1):
        rows = [prompt(llm, length, 1000 * repeat + seed) for length, seed in prompts]
        begin = time.perf_counter()
        for row in rows:
            llm.add_request(row, params(1))
        drain(llm)
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def _link_counter(limits: Limits) -> LinkCounter:
    """NVML's counter of the GPU in use, calibrated on copies of known size."""

    def stream(seconds: float) -> tuple[int, float, float]:
        return stream_link(seconds, limits.device)

    gpu = None
    if limits.device != "cpu" and torch.cuda.is_available():
        gpu = open_gpu(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    read: Callable[[], float | None] = (lambda: None) if gpu is None else gpu.link_rx_gb_s
    return LinkCounter(read, calibrate(read, stream))


def _count(llm: LLM, work: Work, counter: LinkCounter) -> dict[str, Any]:
    """Decode one sequence after another for `counter_s` beside NVML's counter."""
    tokens = min(NUM_COUNTED_TOKENS, llm.max_model_len - work.prompt_tokens)

    def decode() -> tuple[int, float]:
        begin_s, before = time.perf_counter(), _moved(llm)
        while time.perf_counter() - begin_s < work.counter_s:
            name = llm.add_request(prompt(llm, work.prompt_tokens, 0), params(tokens))
            while llm.has_unfinished() and time.perf_counter() - begin_s < work.counter_s:
                llm.step()
            llm.abort(name)
        return _moved(llm) - before, time.perf_counter() - begin_s

    (num_bytes, wall_s), counted_gb_s = counter.measured(decode)
    drain(llm)
    return {
        "wall_s": wall_s,
        "engine_gb_s": num_bytes / wall_s / 1e9,
        "nvml_gb_s": counted_gb_s,
        "factor": counter.factor,
    }


def _moved(llm: LLM) -> int:
    stats = llm.stats()
    return int(stats["h2d_bytes"]) + int(stats["in_place_bytes"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job of a file; write its figures to another."""
    job_file, result_file = sys.argv[1:] if arguments is None else arguments
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))

    def save(found: dict[str, Any]) -> None:
        write_text_atomic(Path(result_file), json.dumps(found))

    save(measure(Case.from_dict(job["case"]), Limits(**job["limits"]), save))
    return 0


if __name__ == "__main__":
    sys.exit(main())
