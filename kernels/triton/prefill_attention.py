"""Causal attention of many queries a sequence over a paged cache.

Shape letters: T tokens, S sequences, M blocks per sequence, N query heads, K KV heads, G query
heads of one KV head, H head size, P tokens per block. A program's query rows are pairs of token
and head, the G heads of one token side by side, so that a short chunk still fills a tile.

A part of the keys is attended to by the same tiles in the same order: between parts the running
maximum, sum and product of a row lie in memory, as they are in registers within one.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.host_cache import HostCache
from kernels.triton.prefill_tiles import attend_tiles
from kernels.triton.tiles import prefill_tile
from kernels.workspace import PrefillState

_LOG2_E = 1.4426950408889634


# Slices of the index tensors start at any multiple of 4 bytes and widths vary; one compiled variant
# serves them all, so that none is compiled in the middle of a run.
@triton.jit(
    do_not_specialize=["stride_table", "num_blocks", "begin_key", "end_key", "is_last"],
    do_not_specialize_on_alignment=["block_tables", "query_starts", "seq_lens"],
)
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    stage_k,
    stage_v,
    num_blocks,
    block_tables,
    query_starts,
    seq_lens,
    state_max,
    state_sum,
    state_acc,
    begin_key,
    end_key,
    is_last,
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
    stride_stage_k_block,
    stride_stage_v_block,
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
    IS_PART: tl.constexpr,
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
    stage_k_start = stage_k
    stage_v_start = stage_v
    row_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([ROWS, H_PADDED], dtype=tl.float32)
    state_rows = token_rows
    if IS_PART:
        stage_k_start += kv_head * stride_k_head
        stage_v_start += kv_head * stride_v_head
        # Rows of padding go on from where the last query is, for whom they stand.
        own_tokens = (query_start + tl.minimum(tokens, num_queries - 1)).to(tl.int64)
        state_rows = own_tokens * (tl.num_programs(1) * G) + heads
        goes_on = begin_key > 0
        row_max = tl.load(state_max + state_rows, mask=goes_on & (heads >= 0), other=float("-inf"))
        row_sum = tl.load(state_sum + state_rows, mask=goes_on & (heads >= 0), other=0.0)
        state_at = state_acc + state_rows[:, None] * H + columns[None, :]
        is_read = goes_on & (heads >= 0)[:, None] & (columns < H)[None, :]
        acc = tl.load(state_at, mask=is_read, other=0.0)
    # What each of the three loops takes; a part's bounds are those of tiles, or beyond all keys.
    window_begin = begin
    whole_begin = window_end
    whole_end = shared_end
    rest_begin = shared_end
    if IS_PART:
        window_begin = tl.maximum(begin, begin_key)
        window_end = tl.minimum(window_end, end_key)
        whole_begin = tl.maximum(whole_begin, begin_key)
        whole_end = tl.minimum(whole_end, end_key)
        rest_begin = tl.maximum(rest_begin, begin_key)
        end = tl.minimum(end, end_key)
    if WINDOW > 0:
        acc, row_max, row_sum = attend_tiles(
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
            window_begin,
            window_end,
            scale_log2,
            H=H,
            H_PADDED=H_PADDED,
            P=P,
            KEYS=KEYS,
            WINDOW=WINDOW,
            IS_PART=IS_PART,
            IS_MASKED=True,
        )
    acc, row_max, row_sum = attend_tiles(
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
        whole_begin,
        whole_end,
        scale_log2,
        H=H,
        H_PADDED=H_PADDED,
        P=P,
        KEYS=KEYS,
        WINDOW=WINDOW,
        IS_PART=IS_PART,
        IS_MASKED=False,
    )
    acc, row_max, row_sum = attend_tiles(
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
        rest_begin,
        end,
        scale_log2,
        H=H,
        H_PADDED=H_PADDED,
        P=P,
        KEYS=KEYS,
        WINDOW=WINDOW,
        IS_PART=IS_PART,
        IS_MASKED=True,
    )
    if IS_PART:  # noqa: SIM102  one is known when this is compiled, the other when it runs
        if is_last == 0:
            own_state = state_acc + state_rows[:, None] * H + columns[None, :]
            tl.store(own_state, acc, mask=is_element)
            tl.store(state_max + state_rows, row_max, mask=tokens < num_queries)
            tl.store(state_sum + state_rows, row_sum, mask=tokens < num_queries)
            return
    attended = acc / row_sum[:, None]
    out_rows = out + token_rows * stride_out_token + heads * stride_out_head
    out_at = out_rows[:, None] + columns[None, :]
    tl.store(out_at, attended.to(out.dtype.element_ty), mask=is_element)


@dataclass(frozen=True, slots=True)
class _Part:
    """Which keys a call attends to, where the others' share is kept, and what lies beside."""

    stage: HostCache
    state: PrefillState
    begin_key: int
    end_key: int
    is_last: bool


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
    if out is None:
        out = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    tables = (block_tables_SM, query_starts_S1, seq_lens_S)
    _launch(q_TNH, k_cache, v_cache, tables, scale, max_query_len, window, out, None)
    return out


def paged_prefill_part(
    q_TNH: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables_SM: torch.Tensor,
    query_starts_S1: torch.Tensor,
    seq_lens_S: torch.Tensor,
    scale: float,
    *,
    stage: HostCache,
    begin_key: int,
    end_key: int,
    state: PrefillState,
    is_last: bool,
    max_query_len: int,
    window: int | None = None,
    out: torch.Tensor,
) -> None:
    """Launch kernels.ops.paged_prefill_part."""
    tables = (block_tables_SM, query_starts_S1, seq_lens_S)
    part = _Part(stage, state, begin_key, end_key, is_last)
    _launch(q_TNH, k_cache, v_cache, tables, scale, max_query_len, window, out, part)


def _launch(
    q_TNH: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    max_query_len: int,
    window: int | None,
    out: torch.Tensor,
    part: _Part | None,
) -> None:
    num_tokens, num_heads, head_size = q_TNH.shape
    block_tables_SM, query_starts_S1, seq_lens_S = tables
    num_seqs = seq_lens_S.shape[0]
    if num_tokens == 0 or num_seqs == 0 or max_query_len == 0:
        return
    num_kv_heads, tokens_per_block = k_cache.shape[1], k_cache.shape[2]
    group = num_heads // num_kv_heads
    tile = prefill_tile(head_size, k_cache.dtype)
    grid = (triton.cdiv(max_query_len * group, tile.rows), num_kv_heads, num_seqs)
    # Without a part these are not read.
    beside = part or _Part(HostCache(k_cache, v_cache), PrefillState(out, out, out), 0, 0, True)
    _prefill_kernel[grid](
        q_TNH,
        k_cache,
        v_cache,
        beside.stage.k,
        beside.stage.v,
        k_cache.shape[0],
        block_tables_SM,
        query_starts_S1,
        seq_lens_S,
        beside.state.row_max,
        beside.state.row_sum,
        beside.state.acc,
        beside.begin_key,
        beside.end_key,
        int(beside.is_last),
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
        beside.stage.k.stride(0),
        beside.stage.v.stride(0),
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
        IS_PART=part is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
