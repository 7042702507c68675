"""Causal attention of many queries a sequence over a paged cache.

Shape letters: T tokens, S sequences, M blocks per sequence, N query heads, K KV heads, G query
heads of one KV head, H head size, P tokens per block. A program's query rows are pairs of token
and head, the G heads of one token side by side, so that a short chunk still fills a tile.
"""

import torch
import triton
import triton.language as tl

from kernels.triton.tiles import prefill_tile

_LOG2_E = 1.4426950408889634


@triton.jit
def _attend(
    acc,
    row_max,
    row_sum,
    query,
    row_limits,
    first_seen,
    table,
    k_start,
    v_start,
    stride_k_block,
    stride_k_token,
    stride_v_block,
    stride_v_token,
    begin,
    end,
    scale_log2,
    H: tl.constexpr,
    H_PADDED: tl.constexpr,
    P: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
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
        k_rows = k_start + block * stride_k_block + offset * stride_k_token
        v_rows = v_start + block * stride_v_block + offset * stride_v_token
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
        if IS_MASKED and WINDOW > 0:
            # A row may see no key so far: nothing is subtracted, and all its weights are 0.
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        shrink = tl.exp2(row_max - base)
        weights = tl.exp2(scores - base[:, None])
        row_sum = row_sum * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


# Slices of the index tensors start at any multiple of 4 bytes and widths vary; one compiled variant
# serves them all, so that none is compiled in the middle of a run.
@triton.jit(
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=["block_tables", "query_starts", "seq_lens"],
)
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    block_tables,
    query_starts,
    seq_lens,
    out,
    scale_log2,
    stride_q_token,
    stride_q_head,
    stride_k_block,
    stride_k_head,
    stride_k_token,
    stride_v_block,
    stride_v_head,
    stride_v_token,
    stride_table,
    stride_out_token,
    stride_out_head,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    H: tl.constexpr,
    H_PADDED: tl.constexpr,
    P: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    seq = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    query_start = tl.load(query_starts + seq)
    num_queries = tl.load(query_starts + seq + 1) - query_start
    num_tiles = tl.cdiv(num_queries * G, ROWS)
    if tl.program_id(0) >= num_tiles:
        return
    # The last rows see the most keys: they start first, so that no long tile is left to the end.
    first_row = (num_tiles - 1 - tl.program_id(0)) * ROWS

    rows = first_row + tl.arange(0, ROWS)
    tokens = rows // G
    columns = tl.arange(0, H_PADDED)
    is_element = (tokens < num_queries)[:, None] & (columns < H)[None, :]
    token_rows = (query_start + tokens).to(tl.int64)
    heads = kv_head * G + rows % G
    q_rows = q + token_rows * stride_q_token + heads * stride_q_head
    query = tl.load(q_rows[:, None] + columns[None, :], mask=is_element, other=0.0)

    num_earlier = tl.load(seq_lens + seq) - num_queries
    # Rows of padding see what the last query sees, so that each has a key.
    row_limits = num_earlier + tl.minimum(tokens, num_queries - 1) + 1
    first_token = first_row // G
    last_token = tl.minimum((first_row + ROWS - 1) // G, num_queries - 1)
    # Keys before this one are seen by every row, in whole tiles; those after it need the mask.
    shared_end = (num_earlier + first_token + 1) // KEYS * KEYS
    end = num_earlier + last_token + 1
    first_seen = 0
    begin = 0
    window_end = 0
    if WINDOW > 0:
        # Keys before first_seen are seen by no row; those from window_end on, by every row that
        # they do not come after.
        first_seen = tl.maximum(num_earlier + first_token + 1 - WINDOW, 0)
        begin = first_seen // KEYS * KEYS
        last_begin = tl.maximum(num_earlier + last_token + 1 - WINDOW, 0)
        window_end = tl.minimum(tl.cdiv(last_begin, KEYS) * KEYS, shared_end)

    table = block_tables + seq * stride_table
    k_start = k_cache + kv_head * stride_k_head
    v_start = v_cache + kv_head * stride_v_head
    row_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([ROWS, H_PADDED], dtype=tl.float32)
    if WINDOW > 0:
        acc, row_max, row_sum = _attend(
            acc,
            row_max,
            row_sum,
            query,
            row_limits,
            first_seen,
            table,
            k_start,
            v_start,
            stride_k_block,
            stride_k_token,
            stride_v_block,
            stride_v_token,
            begin,
            window_end,
            scale_log2,
            H=H,
            H_PADDED=H_PADDED,
            P=P,
            KEYS=KEYS,
            WINDOW=WINDOW,
            IS_MASKED=True,
        )
    acc, row_max, row_sum = _attend(
        acc,
        row_max,
        row_sum,
        query,
        row_limits,
        first_seen,
        table,
        k_start,
        v_start,
        stride_k_block,
        stride_k_token,
        stride_v_block,
        stride_v_token,
        window_end,
        shared_end,
        scale_log2,
        H=H,
        H_PADDED=H_PADDED,
        P=P,
        KEYS=KEYS,
        WINDOW=WINDOW,
        IS_MASKED=False,
    )
    acc, row_max, row_sum = _attend(
        acc,
        row_max,
        row_sum,
        query,
        row_limits,
        first_seen,
        table,
        k_start,
        v_start,
        stride_k_block,
        stride_k_token,
        stride_v_block,
        stride_v_token,
        shared_end,
        end,
        scale_log2,
        H=H,
        H_PADDED=H_PADDED,
        P=P,
        KEYS=KEYS,
        WINDOW=WINDOW,
        IS_MASKED=True,
    )
    attended = acc / row_sum[:, None]
    out_rows = out + token_rows * stride_out_token + heads * stride_out_head
    out_at = out_rows[:, None] + columns[None, :]
    tl.store(out_at, attended.to(out.dtype.element_ty), mask=is_element)


def paged_prefill_attention(
    q_TNH: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables_SM: torch.Tensor,
    query_starts_S1: torch.Tensor,
    seq_lens_S: torch.Tensor,
    scale: float,
    *,
    max_query_len: int,
    window: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch kernels.ops.paged_prefill_attention."""
    num_tokens, num_heads, head_size = q_TNH.shape
    if out is None:
        out = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    num_seqs = seq_lens_S.shape[0]
    if num_tokens == 0 or num_seqs == 0 or max_query_len == 0:
        return out
    num_kv_heads, tokens_per_block = k_cache.shape[1], k_cache.shape[2]
    group = num_heads // num_kv_heads
    tile = prefill_tile(head_size, k_cache.dtype)
    grid = (triton.cdiv(max_query_len * group, tile.rows), num_kv_heads, num_seqs)
    _prefill_kernel[grid](
        q_TNH,
        k_cache,
        v_cache,
        block_tables_SM,
        query_starts_S1,
        seq_lens_S,
        out,
        scale * _LOG2_E,
        q_TNH.stride(0),
        q_TNH.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        block_tables_SM.stride(0),
        out.stride(0),
        out.stride(1),
        G=group,
        ROWS=tile.rows,
        H=head_size,
        H_PADDED=max(16, triton.next_power_of_2(head_size)),
        P=tokens_per_block,
        KEYS=tile.keys,
        WINDOW=window or 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
