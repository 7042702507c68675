"""One sequence longer than the GPU's room: how long it can be, and what its steps cost."""

from statistics import median
from time import perf_counter
from typing import Any

from engine import LLM
from harness.bench.drive import SETTLE_STEPS, Gaps, params, prompt
from harness.bench.kv_room import gpu_tokens, host_tokens
from harness.bench.kv_work import KVWork


def measure_long(llm: LLM, work: KVWork) -> dict[str, Any]:
    """Decode one sequence at the end of the GPU's room, beyond it, and at the longest there is.

    `runs` has each by name; `resident` ends where the GPU's room does.
    """
    room, block = gpu_tokens(llm), llm.plan.block_size
    reach = room + host_tokens(llm)
    most = min(llm.max_model_len, reach)
    lengths = {"resident": min(room - 2 * block, most)}
    lengths |= {f"{times:g}": int(times * room) for times in work.beyond[:-1]}
    lengths["longest"] = most
    runs = {
        name: decode_at(llm, total, work.steps) for name, total in lengths.items() if total <= most
    }
    return {"room": room, "reach": reach, "max_model_len": llm.max_model_len, "runs": runs}


def measure_streamed(llm: LLM, work: KVWork) -> dict[str, Any]:
    """Decode one sequence beyond the GPU's room while weights are streamed too."""
    room = gpu_tokens(llm)
    total = min(llm.max_model_len, room + min(host_tokens(llm), work.streamed_tokens))
    return {"room": room} | decode_at(llm, total, work.steps)


def decode_at(llm: LLM, total: int, steps: int) -> dict[str, Any]:
    """Run one request that ends at `total` tokens; time the last of its steps.

    Args:
        llm: the engine.
        total: tokens of prompt and output.
        steps: decode steps that are timed.
    """
    output = steps + 2 * SETTLE_STEPS
    if total <= output:
        return {"no_room": f"{total} tokens leave no prompt for {output} of output"}
    llm.reset_cache()
    begin_s = perf_counter()
    llm.add_request(prompt(llm, total - output, 0), params(output))
    gaps, moved, prefill_s, num_tokens, reason = Gaps(), [], None, 0, None
    while llm.has_unfinished():
        events = llm.step()
        now_s, step = perf_counter(), llm.last_step
        num_tokens += len(events)
        if events:
            prefill_s = prefill_s or now_s - begin_s
            reason = events[-1].finish_reason
        if step is None or step.num_prefill_tokens or step.num_decode_tokens != 1:
            gaps.in_a_row = 0
            continue
        gaps.add(now_s, step.wait_s, total - output)
        moved.append((step.h2d_bytes, step.in_place_bytes, step.kv_in_place_bytes))
    timed = gaps.seconds[:steps]
    copied, read, kv = (median(column) for column in zip(*moved, strict=True))
    return {
        "total": total,
        "prefill_s": prefill_s,
        "step_s": median(timed),
        "steps": len(timed),
        "h2d_bytes": copied,
        "in_place_bytes": read,
        "kv_in_place_bytes": kv,
        "has_ended": reason == "length" and num_tokens == output,
    }
