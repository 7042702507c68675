"""Predicted times of a plan, as the plan's record has them."""

from typing import Any

from engine.cost import (
    CONTEXT_TOKENS,
    PREFILL_TOKENS,
    decode_step_s,
    first_token_s,
    load_s,
    prefill_s,
    shape_of,
)
from engine.cost_queue import QUEUE_REQUESTS, queue_of, queue_s
from engine.plan import MemoryPlan
from engine.rates import Rates
from engine.spec import ModelSpec


def predict(plan: MemoryPlan, spec: ModelSpec, rates: Rates) -> dict[str, Any]:
    """Return the predicted times of a plan as plain data, with the rates that they follow from."""
    shape = shape_of(plan, spec)
    context = min(CONTEXT_TOKENS, plan.max_model_len)
    full = shape.concurrency(context)
    one_s, full_s = (decode_step_s(shape, rates, batch, context) for batch in (1, full))
    prefill = min(PREFILL_TOKENS, plan.max_model_len)
    prompt, output = queue_of(plan.max_model_len)
    prefill_time_s = prefill_s(shape, rates, prefill)
    queue_time_s = queue_s(shape, rates, QUEUE_REQUESTS, prompt, output)
    return {
        "context_tokens": context,
        "decode_step_ms": one_s * 1e3,
        "decode_tokens_s": 1 / one_s,
        "full_batch": full,
        "decode_step_full_ms": full_s * 1e3,
        "decode_tokens_full_s": full / full_s,
        "long_context_tokens": plan.max_model_len,
        "decode_step_long_ms": decode_step_s(shape, rates, 1, plan.max_model_len) * 1e3,
        "prefill_tokens": prefill,
        "prefill_ms": prefill_time_s * 1e3,
        "ttft_ms": first_token_s(shape, rates, prompt) * 1e3,
        "ttft_prompt_tokens": prompt,
        "queue": {
            "requests": QUEUE_REQUESTS,
            "batch": min(QUEUE_REQUESTS, shape.concurrency(prompt + output / 2)),
            "prompt_tokens": prompt,
            "output_tokens": output,
            "total_s": queue_time_s,
            "output_tokens_s": QUEUE_REQUESTS * output / queue_time_s,
        },
        "load_s": load_s(shape, rates),
        "bytes_per_step": plan.bytes_per_step(),
        "rates": rates.to_dict(),
    }
