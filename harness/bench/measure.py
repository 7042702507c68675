"""Measure one engine in a process of its own: `python -m harness.bench.measure JOB RESULT`."""

import json
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

import torch

from engine import LLM, SamplingParams
from engine.errors import CapacityError, EngineError
from harness.bench.cases import Case, Limits, Work, engine_config
from harness.bench.counter import LinkCounter

SETTLE_STEPS: Final = 4
"""Decode steps before those that are timed, and after them."""
REPLAYS: Final = 10
PREFILL_REPEATS: Final = 3


def measure(case: Case, limits: Limits) -> dict[str, Any]:
    """Build the engine and give it its work; return figures, or why there are none."""
    begin = time.perf_counter()
    try:
        llm = LLM.from_config(engine_config(case, limits))
    except CapacityError as error:
        return {"no_fit": str(error)}
    load_s = time.perf_counter() - begin
    try:
        return {
            "load_s": load_s,
            "phases": llm.load_report.phases,
            "moved_bytes": llm.load_report.moved,
            "plan": _plan_facts(llm),
            "effective": llm.effective(),
            "decode": {str(b): _decode(llm, b, case.work) for b in case.work.batches},
            "prefill_s": {str(n): _prefill(llm, n, case.work) for n in case.work.prefills},
            "chunk_s": {str(n): _chunk(llm, n) for n in case.work.chunks},
            "counter": _count(llm, case.work),
            "memory": llm.memory(),
        }
    finally:
        llm.close()


def _plan_facts(llm: LLM) -> dict[str, Any]:
    """What the rows need of the plan and the sizes."""
    spec, plan = llm.spec, llm.plan
    head = "model.embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"
    layers = spec.num_hidden_layers * sum(t.numel for t in spec.layer_tensors(0))
    outer = sum(t.numel for t in spec.outer_tensors() if t.name in {head, "model.norm.weight"})
    size = spec.weight_bytes(plan.dtype) // spec.num_parameters
    return {
        "read_bytes": (layers + outer) * size,
        "kv_bytes_per_token": spec.kv_bytes_per_token(plan.dtype),
        "kv_tokens": plan.kv_tokens,
        "num_slots": plan.num_slots,
        "slot_bytes": plan.slot_bytes,
        "gpu_items": plan.gpu_items,
        "bytes_per_step": plan.bytes_per_step(),
        "notes": list(plan.notes),
    }


def _prompt(llm: LLM, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, llm.spec.vocab_size - 1, (length,), generator=generator).tolist()


def _params(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def _drain(llm: LLM) -> None:
    while llm.has_unfinished():
        llm.step()


def _start(llm: LLM, batch: int, work: Work, tokens: int) -> list[str]:
    prompts = [_prompt(llm, work.prompt_tokens, row) for row in range(batch)]
    return [llm.add_request(prompt, _params(tokens)) for prompt in prompts]


def _decode(llm: LLM, batch: int, work: Work) -> dict[str, Any] | None:
    """Time steps in which every one of `batch` sequences decodes; None where they do not fit."""
    total = work.steps + 2 * SETTLE_STEPS
    if llm.plan.kv_tokens < batch * (work.prompt_tokens + total + 2 * llm.plan.block_size):
        return None
    _start(llm, batch, work, total)
    gaps, waits, moved, used_graph = [], [], (0, 0), False
    last: float | None = None
    digest = []
    while llm.has_unfinished():
        events = llm.step()
        now = time.perf_counter()
        digest += [event.token_id for event in events]
        stats = llm.last_step
        assert stats is not None
        if stats.num_prefill_tokens == 0 and stats.num_decode_tokens == batch:
            if last is not None:
                gaps.append(now - last)
                waits.append(stats.wait_s)
                moved, used_graph = (stats.h2d_bytes, stats.in_place_bytes), stats.used_graph
            last = now
    timed = slice(SETTLE_STEPS, len(gaps) - SETTLE_STEPS)
    # Token p of a sequence reads p keys; the timed steps lie around the middle of the output.
    context = work.prompt_tokens + total / 2
    return {
        "step_s": median(gaps[timed]),
        "least_s": min(gaps[timed]),
        "steps": len(gaps[timed]),
        "wait_s": median(waits[timed]),
        "h2d_bytes": moved[0],
        "in_place_bytes": moved[1],
        "kv_bytes": round(batch * context * llm.spec.kv_bytes_per_token(llm.plan.dtype)),
        "used_graph": used_graph,
        "replay_s": _replay(llm, batch, work),
        "tokens": digest,
    }


def _replay(llm: LLM, batch: int, work: Work) -> float | None:
    """Time bare replays of the step's graph in the middle of a decode; None without a graph."""
    total = work.steps + 2 * SETTLE_STEPS
    _start(llm, batch, work, total)
    for _ in range(total // 2):
        llm.step()
    try:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(REPLAYS):
            llm.replay_only(batch)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / REPLAYS
    except (EngineError, RuntimeError):  # no graph of that size, or no GPU
        return None
    finally:
        _drain(llm)


def _prefill(llm: LLM, count: int, work: Work) -> float | None:
    """Least time to the first token of `count` prompts at once; None where they do not fit."""
    length = min(work.prefill_tokens, llm.max_model_len - 1)
    if llm.plan.kv_tokens < count * (length + llm.plan.block_size):
        return None
    times = []
    for repeat in range(PREFILL_REPEATS):
        begin = time.perf_counter()
        for row in range(count):
            llm.add_request(_prompt(llm, length, 1000 * repeat + row), _params(1))
        _drain(llm)
        times.append(time.perf_counter() - begin)
    return min(times)


def _chunk(llm: LLM, length: int) -> float | None:
    """Least time of a step that prefills one prompt of this length; None where it is too long."""
    if length >= llm.max_model_len:
        return None
    times = []
    for repeat in range(PREFILL_REPEATS):
        begin = time.perf_counter()
        llm.add_request(_prompt(llm, length, repeat), _params(1))
        _drain(llm)
        times.append(time.perf_counter() - begin)
    return min(times)


def _count(llm: LLM, work: Work) -> dict[str, Any] | None:
    """Decode one sequence beside NVML's counter, again and again for `counter_s`."""
    if not work.counter_s:
        return None
    counter = LinkCounter()
    before = llm.stats()
    tokens = min(256, llm.max_model_len - work.prompt_tokens)
    begin = time.perf_counter()
    with counter.reading() as readings:
        while time.perf_counter() - begin < work.counter_s:
            (name,) = _start(llm, 1, work, tokens)
            while llm.has_unfinished() and time.perf_counter() - begin < work.counter_s:
                llm.step()
            llm.abort(name)
        wall_s = time.perf_counter() - begin
        after = llm.stats()
    _drain(llm)
    counted = sum(after[k] - before[k] for k in ("h2d_bytes", "in_place_bytes"))
    return {
        "wall_s": wall_s,
        "counted_gb_s": counted / wall_s / 1e9,
        "nvml_gb_s": mean(readings) if readings else None,
        "readings": len(readings),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job of a file; write its figures to another."""
    job_file, result_file = sys.argv[1:] if arguments is None else arguments
    warnings.simplefilter("ignore")  # notes of the plan are in the result
    job = json.loads(Path(job_file).read_text())
    found = measure(Case.from_dict(job["case"]), Limits(**job["limits"]))
    Path(result_file).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
