"""Causal attention of many queries a sequence over a paged cache.

Shape letters: T tokens, S sequences, M blocks per sequence, N query heads, K KV heads, G query
heads of one KV head, H head size, P tokens per block, R rows of partial results: parts of the keys,
in each the tokens, in each the heads. A program's query rows are pairs of token and head, the G
heads of one token side by side, so that a short chunk still fills a tile.

A part of the keys is attended to by the same tiles in the same order: between parts the running
maximum, sum and product of a row lie in memory, as they are in registers within one.

Where queries are few, programs share a tile's keys: each takes a run of them and leaves its result
and its softmax denominator, which a second kernel adds in the order of the runs.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels import sizes
from kernels.arguments import AttentionCall, PrefillPart, PrefillWorkspace
from kernels.triton.dependent import launch_options, release, wait
from kernels.triton.launch import Launcher, power_of_2
from kernels.triton.sinks import sink_weights
from kernels.triton.tiers import block_starts
from kernels.triton.tiles import Tile, prefill_tile

_LOG2_E = 1.4426950408889634
_SUM_ROWS = 8
"""Rows of a program of the sum; they divide those of every tile of prefill attention."""
_SUMMED_PARTS = 8
"""Parts whose loads the sum has in flight together."""
_FILLING_WARPS = 1024
"""Warps of one sequence's programs up to which its keys are shared among more of them."""


@dataclass(frozen=True, slots=True)
class _Split:
    """Into how many parts the keys of a tile of queries go, and where their results lie.

    Attributes:
        partial: float32 [R, H].
        logsumexp: float32 [R].
        num_parts: parts of a tile's keys at most; their bounds depend on it.
        grid_parts: parts that the longest sequence has at most; nothing depends on it.
    """

    partial: torch.Tensor
    logsumexp: torch.Tensor
    num_parts: int
    grid_parts: int


def paged_prefill_attention(
    call: AttentionCall,
    query_starts_S1: torch.Tensor,
    *,
    max_query_len: int,
    workspace: PrefillWorkspace | None = None,
    num_parts: int | None = None,
    tile: Tile | None = None,
) -> None:
    """Launch kernels.ops.attention.paged_prefill_attention.

    Where it is measured, without a workspace, with another number of parts (1: without a split) or
    another tile.
    """
    num_parts = num_parts or sizes.prefill_num_parts(*call.q.shape)
    num_queries, _, head_size = call.q.shape
    # Whether there is more than one part in the end is a matter of lengths, on which no bit of a
    # sequence beside others may depend.
    few = num_queries if num_parts > 1 else None
    tile = tile or prefill_tile(head_size, call.k_cache.dtype, few)
    split = None
    if num_parts > 1 and call.q.shape[0]:
        most_keys = call.block_tables.shape[1] * call.k_cache.shape[2]
        split = _split(call.q, num_parts, most_keys, workspace)
    _launch(call, query_starts_S1, max_query_len, tile, split=split)


def paged_prefill_part(
    call: AttentionCall, query_starts_S1: torch.Tensor, part: PrefillPart, *, max_query_len: int
) -> None:
    """Launch kernels.ops.attention.paged_prefill_part."""
    tile = prefill_tile(call.q.shape[2], call.k_cache.dtype)
    _launch(call, query_starts_S1, max_query_len, tile, part=part)


def _split(
    q_TNH: torch.Tensor, num_parts: int, most_keys: int, workspace: PrefillWorkspace | None
) -> _Split | None:
    """Lay partial results out; None where one part holds the keys of any sequence."""
    if workspace is not None:
        most_keys = min(most_keys, workspace.max_seq_len)
    grid_parts = min(num_parts, -(-most_keys // sizes.PREFILL_SPLIT_KEYS))
    if grid_parts <= 1:
        return None
    if workspace is not None:
        return _Split(workspace.partial, workspace.logsumexp, num_parts, grid_parts)
    num_tokens, num_heads, head_size = q_TNH.shape
    lse = torch.empty(num_tokens * num_heads * grid_parts, dtype=torch.float32, device=q_TNH.device)
    return _Split(lse.new_empty((lse.shape[0], head_size)), lse, num_parts, grid_parts)


def _launch(
    call: AttentionCall,
    query_starts_S1: torch.Tensor,
    max_query_len: int,
    tile: Tile,
    *,
    part: PrefillPart | None = None,
    split: _Split | None = None,
) -> None:
    q, k_cache, v_cache, out = call.q, call.k_cache, call.v_cache, call.out
    block_tables_SM, seq_lens_S = call.block_tables, call.seq_lens
    num_tokens, num_heads, head_size = q.shape
    num_seqs = seq_lens_S.shape[0]
    if num_tokens == 0 or num_seqs == 0 or max_query_len == 0:
        return
    num_kv_heads, tokens_per_block = k_cache.shape[1], k_cache.shape[2]
    group = num_heads // num_kv_heads
    # Without a part, and without a split, these are not read.
    host_k, host_v = (k_cache, v_cache) if call.host is None else (call.host.k, call.host.v)
    state, bounds, first_block = (out, out, out), (0, 0, 1), k_cache.shape[0]
    if part is not None:
        state = part.state.row_max, part.state.row_sum, part.state.acc
        bounds = part.begin_key, part.end_key, int(part.is_last)
        if part.tiers == "cache":
            first_block = 0
        elif part.tiers == "host":
            k_cache, v_cache = host_k, host_v
    partial, logsumexp, num_parts, grid_parts = out, out, 1, 1
    if split is not None:
        partial, logsumexp = split.partial, split.logsumexp
        num_parts, grid_parts = split.num_parts, split.grid_parts
    num_tiles = -(-max_query_len * group // tile.rows)
    has_sinks = call.sinks is not None
    at = sizes.PREFILL_SPLIT_KEYS, call.window or 0, out.device
    launch = _launcher(
        group,
        head_size,
        tokens_per_block,
        tile,
        *at,
        is_part=part is not None,
        is_tiered=part is not None and part.tiers == "both",
        is_split=split is not None,
        has_sinks=has_sinks,
    )
    launch(
        (num_tiles, num_kv_heads, num_seqs * grid_parts),
        (
            q,
            k_cache,
            v_cache,
            host_k,
            host_v,
            *state,
            partial,
            logsumexp,
            out if call.sinks is None else call.sinks,
            out,
        ),
        (block_tables_SM, query_starts_S1, seq_lens_S),
        (
            first_block,
            *bounds,
            num_parts,
            grid_parts,
            num_tokens * num_heads,
            block_tables_SM.stride(0),
        ),
        (
            call.scale * _LOG2_E,
            *q.stride()[:2],
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            host_k.stride(0),
            host_v.stride(0),
            *out.stride()[:2],
        ),
    )
    if split is not None:
        _sum_parts(call, query_starts_S1, max_query_len, split, tile)


def _sum_parts(
    call: AttentionCall,
    query_starts_S1: torch.Tensor,
    max_query_len: int,
    split: _Split,
    tile: Tile,
) -> None:
    """Launch the sum behind the kernel that wrote the partial results, with that kernel's tile.

    Rows of tiles whose keys one part holds stay as they are.
    """
    out, num_kv_heads = call.out, call.k_cache.shape[1]
    num_tokens, num_heads, head_size = out.shape
    group = num_heads // num_kv_heads
    num_blocks = -(-max_query_len * group // _SUM_ROWS)
    has_sinks = call.sinks is not None
    at = sizes.PREFILL_SPLIT_KEYS, call.window or 0, out.device
    launch = _sum_launcher(group, head_size, tile, *at, has_sinks=has_sinks)
    launch(
        (num_blocks, num_kv_heads, call.seq_lens.shape[0]),
        (split.partial, split.logsumexp, out if call.sinks is None else call.sinks, out),
        (query_starts_S1, call.seq_lens),
        (split.num_parts, num_tokens * num_heads),
        out.stride()[:2],
    )


@functools.cache
def _launcher(
    group: int,
    head_size: int,
    tokens_per_block: int,
    tile: Tile,
    split_keys: int,
    window: int,
    device: torch.device,
    *,
    is_part: bool,
    is_tiered: bool,
    is_split: bool,
    has_sinks: bool,
) -> Launcher:
    """Return what launches _prefill_kernel for these sizes."""
    return Launcher(
        _prefill_kernel,
        device,
        G=group,
        ROWS=tile.rows,
        H=head_size,
        H_PADDED=max(16, power_of_2(head_size)),
        P=tokens_per_block,
        KEYS=tile.keys,
        WINDOW=window,
        SPLIT=split_keys,
        FILLING=_FILLING_WARPS // tile.num_warps,
        IS_PART=is_part,
        TIERED=is_tiered,
        IS_SPLIT=is_split,
        HAS_SINKS=has_sinks,
        num_warps=tile.num_warps,
        num_stages=tile.stages_on(device, head_size),
        **(launch_options(device) if is_split else {"OVERLAPS": False}),
    )


@functools.cache
def _sum_launcher(
    group: int,
    head_size: int,
    tile: Tile,
    split_keys: int,
    window: int,
    device: torch.device,
    *,
    has_sinks: bool,
) -> Launcher:
    """Return what launches _sum_kernel for these sizes."""
    return Launcher(
        _sum_kernel,
        device,
        G=group,
        ROWS=tile.rows,
        SUM_ROWS=_SUM_ROWS,
        H=head_size,
        H_PADDED=max(16, power_of_2(head_size)),
        KEYS=tile.keys,
        SPLIT=split_keys,
        FILLING=_FILLING_WARPS // tile.num_warps,
        SUMMED_PARTS=_SUMMED_PARTS,
        WINDOW=window,
        HAS_SINKS=has_sinks,
        num_warps=4,
        **launch_options(device),
    )


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
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    stage_k,
    stage_v,
    state_max,
    state_sum,
    state_acc,
    partial,
    logsumexp,
    sinks,
    out,
    block_tables,
    query_starts,
    seq_lens,
    num_blocks,
    begin_key,
    end_key,
    is_last,
    num_parts,
    grid_parts,
    stride_part,
    stride_table,
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
    FILLING: tl.constexpr,
    IS_PART: tl.constexpr,
    TIERED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Attend from one tile of a sequence's queries to its keys, or to a part of them.

    With IS_PART the parts are one call each, and go on from the state; with IS_SPLIT they are
    programs of one call, and leave partial results unless one part holds all of a tile's keys.
    Blocks of a part from num_blocks on lie in the stage with TIERED; without it the number of the
    cache's first block is num_blocks.
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
    num_earlier = tl.load(seq_lens + seq) - num_queries
    if OVERLAPS:  # behind these loads: no kernel that another may overlap writes what they read
        wait()
    num_tiles = tl.cdiv(num_queries * G, ROWS)
    if tl.program_id(0) >= num_tiles:
        return
    # The last rows see the most keys: they start first, so that no long tile is left to the end.
    first_row = (num_tiles - 1 - tl.program_id(0)) * ROWS

    rows = first_row + tl.arange(0, ROWS)
    tokens = rows // G
    columns = tl.arange(0, H_PADDED)
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
        num_parts = _parts_of_sequence(num_parts, num_tiles, FILLING)
        part_keys = _keys_of_part(begin, end, num_parts, SPLIT, KEYS)
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
        if not TIERED:  # where block 0 would lie
            k_start -= num_blocks.to(tl.int64) * stride_k_block
            v_start -= num_blocks.to(tl.int64) * stride_v_block
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
        acc, row_max, row_sum = _attend_tiles(
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
            TIERED=TIERED,
            IS_MASKED=True,
            IS_SPLIT=IS_SPLIT,
        )
    acc, row_max, row_sum = _attend_tiles(
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
        TIERED=TIERED,
        IS_MASKED=False,
        IS_SPLIT=IS_SPLIT,
    )
    acc, row_max, row_sum = _attend_tiles(
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
        TIERED=TIERED,
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
    if HAS_SINKS:
        row_sum += sink_weights(sinks, heads, heads >= 0, row_max)
    attended = acc / row_sum[:, None]
    out_rows = out + token_rows * stride_out_token + heads * stride_out_head
    out_at = out_rows[:, None] + columns[None, :]
    tl.store(out_at, attended.to(out.dtype.element_ty), mask=is_element)


@triton.jit
def _parts_of_sequence(num_parts, num_tiles, FILLING: tl.constexpr):
    """Return how many parts the keys of a sequence's tiles have at most: what fills the card."""
    return tl.minimum(num_parts, tl.maximum(FILLING // (num_tiles * tl.num_programs(1)), 1))


@triton.jit
def _keys_of_part(begin, end, num_parts, SPLIT: tl.constexpr, KEYS: tl.constexpr):
    """Return how many keys each part of keys begin to end - 1 has: tiles, SPLIT keys at least."""
    num_tiles = tl.cdiv(tl.cdiv(end - begin, num_parts), KEYS)
    return tl.maximum(num_tiles * KEYS, SPLIT)


@triton.jit
def _attend_tiles(
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
    TIERED: tl.constexpr,
    IS_MASKED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Go over keys begin to end - 1 from a multiple of KEYS on; return acc, row_max, row_sum.

    Without IS_MASKED end is a multiple of KEYS too, and every row sees all keys. With TIERED
    blocks from num_blocks on lie in the stage. With IS_SPLIT a row may see none of the keys.
    """
    columns = tl.arange(0, H_PADDED)
    is_column = columns < H
    for first_key in range(begin, end, KEYS):
        keys = first_key + tl.arange(0, KEYS)
        places = keys.to(tl.uint32)  # divided by a shift, as none is negative
        if IS_MASKED:
            is_key = keys < end
            if WINDOW > 0:
                is_key = is_key & (keys >= first_seen)
            block = tl.load(table + places // P, mask=is_key, other=0).to(tl.int64)
            mask = is_key[:, None] & is_column[None, :]
        else:
            block = tl.load(table + places // P).to(tl.int64)
            mask = is_column[None, :]
        offset = places % P
        k_blocks = block_starts(
            k_start,
            stage_k_start,
            block,
            num_blocks,
            stride_k_block,
            stride_stage_k_block,
            TIERED=TIERED,
        )
        v_blocks = block_starts(
            v_start,
            stage_v_start,
            block,
            num_blocks,
            stride_v_block,
            stride_stage_v_block,
            TIERED=TIERED,
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


@triton.jit(
    do_not_specialize=["num_parts", "stride_part"],
    do_not_specialize_on_alignment=["query_starts", "seq_lens"],
)
def _sum_kernel(
    partial,
    logsumexp,
    sinks,
    out,
    query_starts,
    seq_lens,
    num_parts,
    stride_part,
    stride_out_token,
    stride_out_head,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    H: tl.constexpr,
    H_PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    FILLING: tl.constexpr,
    SUMMED_PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add the parts of some rows in their order, weighted by their softmax denominators."""
    seq = tl.program_id(2)
    kv_head = tl.program_id(1)
    query_start = tl.load(query_starts + seq)
    num_queries = tl.load(query_starts + seq + 1) - query_start
    num_earlier = tl.load(seq_lens + seq) - num_queries
    if OVERLAPS:  # behind these loads, as in _prefill_kernel
        wait()
        release()
    first_row = tl.program_id(0) * SUM_ROWS
    if first_row >= num_queries * G:
        return
    # The keys of the tile that these rows are of, and its parts, as in _prefill_kernel.
    tile_row = first_row // ROWS * ROWS
    end = num_earlier + tl.minimum((tile_row + ROWS - 1) // G, num_queries - 1) + 1
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(num_earlier + tile_row // G + 1 - WINDOW, 0) // KEYS * KEYS
    num_parts = _parts_of_sequence(num_parts, tl.cdiv(num_queries * G, ROWS), FILLING)
    part_keys = _keys_of_part(begin, end, num_parts, SPLIT, KEYS)
    own_parts = tl.cdiv(end - begin, part_keys)
    if own_parts <= 1:
        return

    rows = first_row + tl.arange(0, SUM_ROWS)
    tokens = rows // G
    columns = tl.arange(0, H_PADDED)
    is_row = tokens < num_queries
    is_element = is_row[:, None] & (columns < H)[None, :]
    token_rows = (query_start + tokens).to(tl.int64)
    heads = kv_head * G + rows % G
    part_rows = token_rows * (tl.num_programs(1) * G) + heads
    running_max = tl.full([SUM_ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([SUM_ROWS], dtype=tl.float32)
    acc = tl.zeros([SUM_ROWS, H_PADDED], dtype=tl.float32)
    # Several at a time, so that their loads are in flight together.
    for first in range(0, own_parts, SUMMED_PARTS):
        for index in tl.static_range(SUMMED_PARTS):
            is_part = first + index < own_parts
            # Written by other programs: past the first cache, which may hold older bytes.
            part_at = partial + part_rows[:, None] * H + columns[None, :]
            part = tl.load(part_at, mask=is_element & is_part, other=0.0, cache_modifier=".cg")
            lse = tl.load(
                logsumexp + part_rows,
                mask=is_row & is_part,
                other=float("-inf"),
                cache_modifier=".cg",
            )
            new_max = tl.maximum(running_max, lse)
            # A row may see no key so far: nothing is subtracted, and all its weights are 0.
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
            shrink = tl.exp2(running_max - base)
            weight = tl.exp2(lse - base)
            total = total * shrink + weight
            acc = acc * shrink[:, None] + part * weight[:, None]
            running_max = new_max
            part_rows += stride_part
    if HAS_SINKS:
        total += sink_weights(sinks, heads, is_row, running_max)
    attended = acc / tl.where(is_row, total, 1.0)[:, None]
    out_rows = out + token_rows * stride_out_token + heads * stride_out_head
    out_at = out_rows[:, None] + columns[None, :]
    tl.store(out_at, attended.to(out.dtype.element_ty), mask=is_element)
