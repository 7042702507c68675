"""Predicted times of the host tier of KV blocks: moves, decodes over both tiers, and turns.

Turns are those of sequences that the GPU has no room for together.
"""

import math
from bisect import bisect_left
from dataclasses import replace
from typing import Any, Final

from engine.model.spec import ModelSpec
from engine.plan.memory import MemoryPlan
from engine.plan.rates import Rates
from engine.plan.sizes import CopyAhead, HostKVPlan, ReadRates, SwapRates, TierCosts
from engine.plan.times import (
    PREFILL_TOKENS,
    FarKeys,
    Keys,
    Shape,
    copied_keys,
    copied_run_bytes,
    decode_step_s,
    keys_step_s,
    prefill_s,
    shape_of,
)

PREFIX_TOKENS: Final = 8192
"""Prefix whose load from the host tier is predicted (shorter where max_model_len is)."""


def with_rates(plan: MemoryPlan, spec: ModelSpec, rates: Rates) -> HostKVPlan:
    """Return the plan's host tier with what moving and recomputing are expected to cost.

    Moves go at the rate of kernels, as DMA of large blocks is hardly faster; pageable blocks at
    that of pageable copies. The rates are those of the whole tier. No overlap with compute is
    counted on.
    """
    host = plan.host_kv
    assert host is not None
    first = plan.kv.groups[0]
    share = first.num_pinned / first.num_host_blocks

    def rate(pinned_gb_s: float) -> float:
        slow = min(pinned_gb_s, rates.pageable_gb_s)
        moved_gb_s = pinned_gb_s * rates.blocks_gb_s / rates.h2d_gb_s
        return 1e9 / (share / moved_gb_s + (1 - share) / slow)

    shape, tokens = shape_of(plan, spec, rates), min(PREFILL_TOKENS, plan.max_model_len)
    seconds = prefill_s(shape, tokens)
    room = min(plan.kv_tokens, plan.max_model_len)
    copies = copy_ahead(shape)
    read_gb_s = rates.in_place_gb_s if copies is None else rates.rows_gb_s
    return replace(
        host,
        costs=TierCosts(
            swap_rates=SwapRates(
                store_bytes_s=rate(rates.d2h_gb_s), load_bytes_s=rate(rates.h2d_gb_s)
            ),
            recompute_token_s=seconds / tokens,
            read_rates=ReadRates(
                step_s=decode_step_s(shape, 1, room), read_bytes_s=read_gb_s * 1e9
            ),
        ),
        copy_ahead=copies,
    )


def predict_host_kv(plan: MemoryPlan, spec: ModelSpec, rates: Rates) -> dict[str, Any] | None:
    """Return predicted times of the host tier as plain data; None where there is none.

    A sequence of max_model_len that exceeds the GPU has the rest come over the link in each decode
    step, read in place or copied ahead.
    """
    host = plan.host_kv
    if host is None or host.costs.swap_rates is None:
        return None
    shape, length, first = shape_of(plan, spec, rates), plan.max_model_len, plan.kv.groups[0]
    far = shape.beyond_gpu(min(length, first.window or length))
    host_bytes = int(far * shape.kv_layer_bytes * len(first.layers))
    prefix, copies = min(PREFIX_TOKENS, length), host.copy_ahead
    moved_bytes_s = host.costs.swap_rates.load_bytes_s
    return {
        "context_tokens": length,
        "decode_step_ms": decode_step_s(shape, 1, length) * 1e3,
        "host_bytes": host_bytes,
        "is_copied": copies is not None and host_bytes >= max(1, copies.step_bytes),
        "prefix_tokens": prefix,
        "prefix_load_ms": plan.kv.sequence_bytes(prefix) / moved_bytes_s * 1e3,
        "prefix_compute_ms": prefill_s(shape, prefix) * 1e3,
        "together": predict_long(plan),
    }


def copy_ahead(shape: Shape) -> CopyAhead | None:
    """Return from where on decodes' host blocks are copied instead of read in place; None: never.

    Steps that copy run without a graph: others must take as long as their launches do.
    """
    plan, run_bytes = shape.plan, copied_run_bytes(shape)

    def is_sooner(context: int) -> bool:
        keys = Keys(shape, 1, context, 0, is_long=True)
        in_place_s = keys_step_s(keys, FarKeys(shape.rates.in_place_gb_s * 1e9))
        copied = [keys_step_s(keys, far) for far in copied_keys(keys)]
        return any(seconds < in_place_s for seconds in copied)

    if run_bytes is None or not is_sooner(plan.max_model_len):
        return None
    first = plan.kv.groups[0]
    least = bisect_left(range(plan.max_model_len), True, lo=plan.kv_tokens, key=is_sooner)
    far_bytes = shape.beyond_gpu(least) * shape.kv_layer_bytes * len(first.layers)
    return CopyAhead(step_bytes=int(far_bytes), run_bytes=run_bytes)


# Sequences that the GPU has no room for: what steps and turns cost, and how long turns are.


MOVE_SHARE: Final = 0.02
"""Share of a turn that moving blocks for it may take, where MOST_TURN and MOST_TURN_S allow."""
LEAST_TURN: Final = 16
"""Tokens of a turn at least."""
MOST_TURN: Final = 256
"""Tokens of a turn at most."""
MOST_TURN_S: Final = 6.0
"""Seconds of a turn at most, where LEAST_TURN allows: each other long sequence waits for it."""
LONG_SHARE: Final = 0.4
"""Share of the time that reading host blocks takes, where short sequences decode too."""
MOST_SKIPPED: Final = 63
"""Steps of short sequences at most between two of long ones."""


def read_step_s(rates: ReadRates | None, read_bytes: float) -> float:
    """Return the time of a decode step that reads so much of the host tier; 0 without rates."""
    if rates is None:
        return 0.0
    return rates.step_s + max(0.0, read_bytes) / rates.read_bytes_s


def turn_of(costs: TierCosts, read_bytes: float, moved_bytes: float) -> tuple[float, int]:
    """Return the time of a token in a turn, its moves shared out, and the tokens of the turn.

    Args:
        costs: Of the host tier.
        read_bytes: What each step of it reads of the host tier.
        moved_bytes: What is moved to the GPU before it.
    """
    step_s, move_s = read_step_s(costs.read_rates, read_bytes), 0.0
    if costs.swap_rates is not None:
        move_s = moved_bytes / costs.swap_rates.load_bytes_s
    tokens = LEAST_TURN
    if step_s:
        most = min(MOST_TURN, int(MOST_TURN_S / step_s))
        tokens = max(tokens, min(most, math.ceil(move_s / step_s / MOVE_SHARE)))
    return step_s + move_s / tokens, tokens


def num_skipped(rates: ReadRates | None, read_bytes: float) -> int:
    """Return the steps of short sequences between two that read so much of the host tier."""
    step_s = read_step_s(rates, 0)
    if not step_s:
        return 0
    read_s = read_step_s(rates, read_bytes) - step_s
    return min(MOST_SKIPPED, max(0, math.ceil(read_s / step_s * (1 / LONG_SHARE - 1)) - 1))


def predict_long(plan: MemoryPlan) -> list[dict[str, Any]] | None:
    """Return what sequences of max_model_len do at once, by their number; None where none is long.

    `wait_s` bounds the time between two tokens of each while no prompt is computed and no short
    sequence decodes; beside short ones it is 1 / LONG_SHARE times that. `short_share` is the rate
    of short ones beside these, where their steps take as long as one of a sequence alone, over
    that without these; of longer steps it is more.
    """
    host, kv = plan.host_kv, plan.kv
    if host is None or host.costs.read_rates is None or not kv.groups[0].in_place:
        return None
    size, rates = plan.block_bytes, host.costs.read_rates
    need, room = kv.blocks(plan.max_model_len)[0] * size, plan.num_gpu_blocks * size
    rows = []
    for count in _counts(int(plan.max_concurrency)):
        together_s = read_step_s(rates, count * need - room)
        token_s, tokens = turn_of(host.costs, need - room, room)
        in_turns = count > 1 and token_s < together_s / count
        read = need - room if in_turns else count * need - room
        skips, step_s = num_skipped(rates, read), read_step_s(rates, 0)
        read_s = read_step_s(rates, read)
        rows.append(
            {
                "sequences": count,
                "in_turns": in_turns,
                "step_ms": read_s * 1e3,
                "tokens_s": 1 / token_s if in_turns else count / together_s,
                "turn_tokens": tokens if in_turns else None,
                "wait_s": (count - 1) * tokens * token_s if in_turns else together_s,
                "skipped_steps": skips,
                "short_share": (skips + 1) * step_s / (skips * step_s + read_s),
            }
        )
    return rows


def _counts(most: int) -> list[int]:
    """Return powers of two up to a number, and that."""
    return sorted({1, *(2**n for n in range(most.bit_length()) if 2**n <= most), max(1, most)})
