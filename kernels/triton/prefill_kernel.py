"""The kernel of prefill attention.

Shape letters: T tokens, S sequences, M blocks per sequence, N query heads, K KV heads, G query
heads of one KV head, H head size, P tokens per block. A program's query rows are pairs of token
and head, the G heads of one token side by side, so that a short chunk still fills a tile.

A part of the keys is attended to by the same tiles in the same order: between parts the running
maximum, sum and product of a row lie in memory, as they are in registers within one.

Where queries are few, programs share a tile's keys: each takes a run of them and leaves its result
and its softmax denominator, which a second kernel adds in the order of the runs.
"""

import triton
import triton.language as tl

from kernels.triton.prefill_tiles import attend_tiles, keys_of_part


# Slices of the index tensors start at any multiple of 4 bytes and widths vary; one compiled variant
# serves them all, so that none is compiled in the middle of a run.
@triton.jit(
    do_not_specialize=[
        "stride_table",
        "num_blocks",
        "begin_key",
        "end_key",
        "is_last",
        "num_parts",
        "grid_parts",
        "stride_part",
    ],
    do_not_specialize_on_alignment=["block_tables", "query_starts", "seq_lens"],
)
def prefill_kernel(
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
    partial,
    logsumexp,
    num_parts,
    grid_parts,
    stride_part,
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
    SPLIT: tl.constexpr,
    IS_PART: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Attend from one tile of a sequence's queries to its keys, or to a part of them.

    With IS_PART the parts are one call each, and go on from the state; with IS_SPLIT they are
    programs of one call, and leave partial results unless one part holds all of a tile's keys.
    """
    place = tl.program_id(2)
    split_part = 0
    if IS_SPLIT:
        split_part = place % grid_parts
        place = place // grid_parts
    seq = place.to(tl.int64)
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

    is_whole = True
    if IS_SPLIT:
        part_keys = keys_of_part(begin, end, num_parts, SPLIT, KEYS)
        is_whole = end - begin <= part_keys
        begin_key = begin + split_part * part_keys
        end_key = begin_key + part_keys
        if begin_key >= end:
            return

    is_element = (tokens < num_queries)[:, None] & (columns < H)[None, :]
    token_rows = (query_start + tokens).to(tl.int64)
    heads = kv_head * G + rows % G
    q_rows = q + token_rows * stride_q_token + heads * stride_q_head
    query = tl.load(q_rows[:, None] + columns[None, :], mask=is_element, other=0.0)
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
    if IS_PART or IS_SPLIT:
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
            IS_SPLIT=IS_SPLIT,
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
        IS_SPLIT=IS_SPLIT,
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
        IS_SPLIT=IS_SPLIT,
    )
    if IS_PART:  # noqa: SIM102  one is known when this is compiled, the other when it runs
        if is_last == 0:
            own_state = state_acc + state_rows[:, None] * H + columns[None, :]
            tl.store(own_state, acc, mask=is_element)
            tl.store(state_max + state_rows, row_max, mask=tokens < num_queries)
            tl.store(state_sum + state_rows, row_sum, mask=tokens < num_queries)
            return
    if IS_SPLIT:  # noqa: SIM102  as above
        if not is_whole:
            part_rows = token_rows * (tl.num_programs(1) * G) + heads + split_part * stride_part
            # A row that sees none of the part's keys has the weight 0.
            is_empty = row_sum == 0
            denominator = tl.where(is_empty, 1.0, row_sum)
            part_at = partial + part_rows[:, None] * H + columns[None, :]
            tl.store(part_at, acc / denominator[:, None], mask=is_element)
            lse = tl.where(is_empty, float("-inf"), row_max + tl.log2(denominator))
            tl.store(logsumexp + part_rows, lse, mask=tokens < num_queries)
            return
    attended = acc / row_sum[:, None]
    out_rows = out + token_rows * stride_out_token + heads * stride_out_head
    out_at = out_rows[:, None] + columns[None, :]
    tl.store(out_at, attended.to(out.dtype.element_ty), mask=is_element)
