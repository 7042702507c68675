"""Prefill attention over a run of keys, tile after tile.

H head size, P tokens per block.
"""

import triton
import triton.language as tl

from kernels.triton.tiers import block_starts


@triton.jit
def keys_of_part(begin, end, num_parts, SPLIT: tl.constexpr, KEYS: tl.constexpr):
    """Return how many keys each part of keys begin to end - 1 has: tiles, SPLIT keys at least."""
    num_tiles = tl.cdiv(tl.cdiv(end - begin, num_parts), KEYS)
    return tl.maximum(num_tiles * KEYS, SPLIT)


@triton.jit
def attend_tiles(
    acc,
    row_max,
    row_sum,
    query,
    row_limits,
    first_seen,
    table,
    k_start,
    v_start,
    stage_k_start,
    stage_v_start,
    num_blocks,
    stride_k_block,
    stride_k_token,
    stride_v_block,
    stride_v_token,
    stride_stage_k_block,
    stride_stage_v_block,
    begin,
    end,
    scale_log2,
    H: tl.constexpr,
    H_PADDED: tl.constexpr,
    P: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_PART: tl.constexpr,
    IS_MASKED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Go over keys begin to end - 1 from a multiple of KEYS on; return acc, row_max, row_sum.

    Without IS_MASKED end is a multiple of KEYS too, and every row sees all keys. With IS_PART
    blocks from num_blocks on lie in the stage. With IS_SPLIT a row may see none of the keys.
    """
    columns = tl.arange(0, H_PADDED)
    is_column = columns < H
    for first_key in range(begin, end, KEYS):
        keys = first_key + tl.arange(0, KEYS)
        if IS_MASKED:
            is_key = keys < end
            if WINDOW > 0:
                is_key = is_key & (keys >= first_seen)
            block = tl.load(table + keys // P, mask=is_key, other=0).to(tl.int64)
            mask = is_key[:, None] & is_column[None, :]
        else:
            block = tl.load(table + keys // P).to(tl.int64)
            mask = is_column[None, :]
        offset = keys % P
        k_blocks = block_starts(
            k_start,
            stage_k_start,
            block,
            num_blocks,
            stride_k_block,
            stride_stage_k_block,
            TIERED=IS_PART,
        )
        v_blocks = block_starts(
            v_start,
            stage_v_start,
            block,
            num_blocks,
            stride_v_block,
            stride_stage_v_block,
            TIERED=IS_PART,
        )
        k_rows = k_blocks + offset * stride_k_token
        v_rows = v_blocks + offset * stride_v_token
        if IS_MASKED or H != H_PADDED:
            key = tl.load(k_rows[:, None] + columns[None, :], mask=mask, other=0.0)
            value = tl.load(v_rows[:, None] + columns[None, :], mask=mask, other=0.0)
        else:
            key = tl.load(k_rows[:, None] + columns[None, :])
            value = tl.load(v_rows[:, None] + columns[None, :])
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
        if IS_MASKED:
            is_seen = keys[None, :] < row_limits[:, None]
            if WINDOW > 0:
                is_seen = is_seen & (keys[None, :] >= row_limits[:, None] - WINDOW)
            scores = tl.where(is_seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        base = new_max
        if IS_MASKED and (WINDOW > 0 or IS_SPLIT):
            # A row may see no key so far: nothing is subtracted, and all its weights are 0.
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        shrink = tl.exp2(row_max - base)
        weights = tl.exp2(scores - base[:, None])
        row_sum = row_sum * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum
