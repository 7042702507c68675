"""Predicted times of a host tier of KV blocks: moves, recomputing, sequences beyond the GPU."""

from dataclasses import replace
from typing import Any, Final

from engine.cost import PREFILL_TOKENS, decode_step_s, prefill_s, shape_of
from engine.host_kv import HostKVPlan, SwapRates
from engine.plan import MemoryPlan
from engine.rates import Rates
from engine.spec import ModelSpec

MOVE_SHARE: Final = 0.90
"""Moves of blocks over the copy rate: kernels for blocks below 2 MiB reach 49 to 51 of 54.9 GB/s
(H200); DMA of larger ones is counted as no faster."""
PREFIX_TOKENS: Final = 8192
"""Prefix whose load from the host tier is predicted (shorter where max_model_len is)."""


def with_rates(plan: MemoryPlan, spec: ModelSpec, rates: Rates) -> HostKVPlan:
    """Return the plan's host tier with what moving and recomputing are expected to cost.

    Pageable blocks go at the rate of pageable copies; the rates are those of the whole tier. No
    overlap with compute is counted on.

    Args:
        plan: Has a host tier.
        spec: Sizes of the model.
        rates: Of the machine.
    """
    host = plan.host_kv
    assert host is not None
    first = plan.kv.groups[0]
    share = first.num_pinned / first.num_host_blocks

    def rate(pinned_gb_s: float) -> float:
        slow = min(pinned_gb_s, rates.pageable_gb_s)
        return 1e9 / (share / (MOVE_SHARE * pinned_gb_s) + (1 - share) / slow)

    tokens = min(PREFILL_TOKENS, plan.max_model_len)
    seconds = prefill_s(shape_of(plan, spec), rates, tokens)
    return replace(
        host,
        swap_rates=SwapRates(store_bytes_s=rate(rates.d2h_gb_s), load_bytes_s=rate(rates.h2d_gb_s)),
        recompute_token_s=seconds / tokens,
    )


def predict_host_kv(plan: MemoryPlan, spec: ModelSpec, rates: Rates) -> dict[str, Any] | None:
    """Return predicted times of the host tier as plain data; None where there is none.

    A sequence of max_model_len that exceeds the GPU reads the rest in place each decode step.
    """
    host = plan.host_kv
    if host is None or host.swap_rates is None:
        return None
    shape, length = shape_of(plan, spec), plan.max_model_len
    far_bytes = sum(
        shape.beyond_gpu(min(length, limit)) * shape.kv_layer_bytes
        for limit, is_first in zip(shape.kv_limits, shape.in_place_layers, strict=True)
        if is_first
    )
    prefix = min(PREFIX_TOKENS, length)
    prefix_bytes = plan.kv.sequence_bytes(prefix)
    return {
        "context_tokens": length,
        "decode_step_ms": decode_step_s(shape, rates, 1, length) * 1e3,
        "in_place_bytes": int(far_bytes),
        "prefix_tokens": prefix,
        "prefix_load_ms": prefix_bytes / host.swap_rates.load_bytes_s * 1e3,
        "prefix_compute_ms": prefill_s(shape, rates, prefix) * 1e3,
    }
