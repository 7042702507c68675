"""Decode attention over a paged cache: partial results of fixed splits, then their sum.

With a window, splits that lie wholly before it are skipped. A sequence of one split needs no sum;
otherwise the last program of a sequence and KV head to be done adds the partial results, in the
order of the splits. Of a part of the keys at a time, the last part's programs do that.

Shape letters: S sequences, M blocks per sequence, N query heads, K KV heads, G query heads of one
KV head, H head size, P tokens per block, C splits of a sequence.
"""

import functools

import torch
import triton
import triton.language as tl

from kernels.arguments import AttentionCall, DecodePart, DecodeWorkspace, decode_workspace
from kernels.triton.dependent import fetch, launch_options, release, wait
from kernels.triton.launch import Launcher, power_of_2
from kernels.triton.sinks import sink_weights
from kernels.triton.tiers import block_starts
from kernels.triton.tiles import DecodeTile, decode_tile

_LOG2_E = 1.4426950408889634
_MIN_DOT_ROWS = 16
_MAX_DOT_ROWS = 32
_MAX_PROGRAMS = 2048
"""A larger grid gets fewer programs a sequence, each of which then takes several splits in turn:
programs that find nothing to do are not free where max_seq_len is far above the actual lengths.
Chosen on an H200, which holds some 500 at a time, by layers of decode steps."""
_MIN_HOST_PROGRAMS = 64
"""Programs of a sequence at least where blocks lie beside the cache: 32 fill a link, and they need
not all be at work on it."""


@triton.jit
def _sum_of_splits(
    partial_rows,
    lse_rows,
    stride_split,
    begin_split,
    num_splits,
    mask,
    sinks,
    heads,
    SUM_ROWS: tl.constexpr,
    H_PADDED: tl.constexpr,
    SPLITS_PER_STEP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Add the partial results [SUM_ROWS, H] of all splits, weighted by their softmax denominators.

    Splits before begin_split have none.
    """
    running_max = tl.full([SUM_ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([SUM_ROWS], dtype=tl.float32)
    acc = tl.zeros([SUM_ROWS, H_PADDED], dtype=tl.float32)
    # Other programs wrote what is read here: past the first cache, which may hold older bytes.
    for first in range(begin_split, num_splits, SPLITS_PER_STEP):
        for index in tl.static_range(SPLITS_PER_STEP):
            split = first + index
            is_split = split < num_splits
            at = partial_rows + split * stride_split
            part = tl.load(at, mask=mask & is_split, other=0.0, cache_modifier=".cg")
            lse = tl.load(
                lse_rows + split, mask=is_split, other=float("-inf"), cache_modifier=".cg"
            )
            new_max = tl.maximum(running_max, lse)
            shrink = tl.exp2(running_max - new_max)
            weight = tl.exp2(lse - new_max)
            total = total * shrink + weight
            acc = acc * shrink[:, None] + part * weight[:, None]
            running_max = new_max
    if HAS_SINKS:
        total += sink_weights(sinks, heads, heads >= 0, running_max)
    return acc / total[:, None]


# Slices of the index tensors start at any multiple of 4 bytes and widths vary; one compiled variant
# serves them all, so that none is compiled in the middle of a run.
@triton.jit(
    do_not_specialize=[
        "stride_table",
        "stride_lse_seq",
        "stride_lse_head",
        "num_blocks",
        "part_begin",
        "part_end",
        "is_last",
    ],
    do_not_specialize_on_alignment=["block_tables", "seq_lens"],
)
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    host_k,
    host_v,
    partial,
    logsumexp,
    counters,
    sinks,
    out,
    block_tables,
    seq_lens,
    num_blocks,
    part_begin,
    part_end,
    is_last,
    stride_table,
    stride_lse_seq,
    stride_lse_head,
    scale_log2,
    stride_q_seq,
    stride_q_head,
    stride_k_block,
    stride_k_head,
    stride_k_token,
    stride_v_block,
    stride_v_head,
    stride_v_token,
    stride_host_k_block,
    stride_host_v_block,
    stride_partial_seq,
    stride_partial_head,
    stride_partial_split,
    stride_out_seq,
    stride_out_head,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    H: tl.constexpr,
    H_PADDED: tl.constexpr,
    P: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS_PER_STEP: tl.constexpr,
    WINDOW: tl.constexpr,
    TIERED: tl.constexpr,
    PART: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Splits part_begin to part_end - 1 with PART, whose sum is added if is_last; else all."""
    seq = tl.program_id(0).to(tl.int64)
    kv_head = (tl.program_id(1) // ROW_TILES).to(tl.int64)
    seq_len = tl.load(seq_lens + seq)
    table = block_tables + seq * stride_table
    num_splits = tl.cdiv(seq_len, SPLIT)
    first_seen = 0
    if WINDOW > 0:
        first_seen = tl.maximum(seq_len - WINDOW, 0)
    begin_split = first_seen // SPLIT
    first_own = begin_split
    stop_split = num_splits
    if PART:
        first_own = part_begin
        stop_split = tl.minimum(num_splits, part_end)
    place = tl.program_id(2)
    if TIERED:
        # Programs start in their order. Taking splits from both ends in turn starts those of the
        # link early, whichever end they lie at, and others beside them.
        taken = tl.minimum(stop_split - first_own, tl.num_programs(2))
        if place < taken:
            place = tl.where(place % 2 == 0, place // 2, taken - 1 - place // 2)
    first_split = first_own + place
    if first_split >= tl.maximum(stop_split, 1):
        if OVERLAPS and PART:  # no sequence may reach it; else each has a program that waits below
            wait()
        return
    if OVERLAPS:  # behind what the step brought along
        fetch(table + first_split * (SPLIT // P))
        wait()
        release()

    rows = (tl.program_id(1) % ROW_TILES) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, H_PADDED)
    is_row = rows < G
    is_column = columns < H
    is_element = is_row[:, None] & is_column[None, :]
    heads = kv_head * G + rows
    out_at = out + seq * stride_out_seq + heads[:, None] * stride_out_head + columns[None, :]
    if num_splits == 0:
        nothing = tl.zeros([ROWS, H_PADDED], dtype=out.dtype.element_ty)
        tl.store(out_at, nothing, mask=is_element)
        return
    partial_rows = partial + seq * stride_partial_seq + heads[:, None] * stride_partial_head
    partial_rows = partial_rows + columns[None, :]
    lse_rows = logsumexp + seq * stride_lse_seq + heads * stride_lse_head
    q_at = q + seq * stride_q_seq + heads[:, None] * stride_q_head + columns[None, :]
    query = tl.load(q_at, mask=is_element, other=0.0)
    k_start = k_cache + kv_head * stride_k_head
    v_start = v_cache + kv_head * stride_v_head
    host_k_start = host_k
    host_v_start = host_v
    if TIERED:
        host_k_start += kv_head * stride_k_head
        host_v_start += kv_head * stride_v_head

    for split in range(first_split, stop_split, tl.num_programs(2)):
        start = split * SPLIT
        end = tl.minimum(start + SPLIT, seq_len)
        row_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        row_sum = tl.zeros([ROWS], dtype=tl.float32)
        acc = tl.zeros([ROWS, H_PADDED], dtype=tl.float32)
        begin = start
        if WINDOW > 0:
            # Tiles start where they do without a window, so that none lacks a key that is seen.
            begin += tl.maximum(first_seen - start, 0) // KEYS * KEYS
        for first_key in range(begin, end, KEYS):
            keys = first_key + tl.arange(0, KEYS)
            is_key = keys < end
            if WINDOW > 0:
                is_key = is_key & (keys >= first_seen)
            block = tl.load(table + keys // P, mask=is_key, other=0).to(tl.int64)
            offset = keys % P
            k_blocks = block_starts(
                k_start,
                host_k_start,
                block,
                num_blocks,
                stride_k_block,
                stride_host_k_block,
                TIERED=TIERED,
            )
            v_blocks = block_starts(
                v_start,
                host_v_start,
                block,
                num_blocks,
                stride_v_block,
                stride_host_v_block,
                TIERED=TIERED,
            )
            k_rows = k_blocks + offset * stride_k_token
            v_rows = v_blocks + offset * stride_v_token
            mask = is_key[:, None] & is_column[None, :]
            key = tl.load(k_rows[:, None] + columns[None, :], mask=mask, other=0.0)
            value = tl.load(v_rows[:, None] + columns[None, :], mask=mask, other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
            scores = tl.where(is_key[None, :], scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, axis=1))
            shrink = tl.exp2(row_max - new_max)
            weights = tl.exp2(scores - new_max[:, None])
            row_sum = row_sum * shrink + tl.sum(weights, axis=1)
            acc = acc * shrink[:, None]
            acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
            row_max = new_max

        if HAS_SINKS:  # noqa: SIM102  one is known when this is compiled, the other when it runs
            if num_splits - begin_split == 1:
                row_sum += sink_weights(sinks, heads, is_row, row_max)
        attended = acc / row_sum[:, None]
        if num_splits - begin_split == 1:
            tl.store(out_at, attended.to(out.dtype.element_ty), mask=is_element)
        else:
            tl.store(partial_rows + split * stride_partial_split, attended, mask=is_element)
            tl.store(lse_rows + split, row_max + tl.log2(row_sum), mask=is_row)

    adds = num_splits - begin_split > 1
    if PART:
        adds = adds & (is_last != 0)
    if adds:
        # All of this program's stores come before its count, and all counts before the sum.
        tl.debug_barrier()
        counter = counters + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        num_counting = tl.minimum(stop_split - first_own, tl.num_programs(2))
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_counting - 1:
            # Rows that only fill up the product's tile are left out here.
            sum_rows = (tl.program_id(1) % ROW_TILES) * ROWS + tl.arange(0, SUM_ROWS)
            sum_heads = kv_head * G + sum_rows
            is_summed = (sum_rows < G)[:, None] & is_column[None, :]
            part_at = partial + seq * stride_partial_seq + sum_heads[:, None] * stride_partial_head
            # Rows beyond the heads read another head's sums, and write nothing.
            safe_heads = tl.where(sum_rows < G, sum_heads, kv_head * G)
            attended = _sum_of_splits(
                part_at + columns[None, :],
                logsumexp + seq * stride_lse_seq + safe_heads * stride_lse_head,
                stride_partial_split,
                begin_split,
                num_splits,
                is_summed,
                sinks,
                safe_heads,
                SUM_ROWS=SUM_ROWS,
                H_PADDED=H_PADDED,
                SPLITS_PER_STEP=SPLITS_PER_STEP,
                HAS_SINKS=HAS_SINKS,
            )
            sum_at = out + seq * stride_out_seq + sum_heads[:, None] * stride_out_head
            summed = attended.to(out.dtype.element_ty)
            tl.store(sum_at + columns[None, :], summed, mask=is_summed)
            tl.store(counter, 0)


def paged_decode_attention(
    call: AttentionCall,
    *,
    max_seq_len: int,
    workspace: DecodeWorkspace | None = None,
    tile: DecodeTile | None = None,
) -> None:
    """Launch kernels.ops.attention.paged_decode_attention; with another tile to measure one."""
    num_seqs, num_heads, head_size = call.q.shape
    if num_seqs == 0:
        return
    if workspace is None:
        workspace = decode_workspace(num_seqs, num_heads, head_size, max_seq_len, call.q.device)
    tile = tile or decode_tile(head_size, call.k_cache.dtype)
    num_splits = -(-max_seq_len // tile.split)
    if call.window is not None:
        # A window may start and end within a split.
        num_splits = min(num_splits, -(-call.window // tile.split) + 1)
    _launch(call, workspace, tile, num_splits, None)


def paged_decode_part(call: AttentionCall, part: DecodePart) -> None:
    """Launch kernels.ops.attention.paged_decode_part."""
    if call.q.shape[0] == 0:
        return
    tile = decode_tile(call.q.shape[2], call.k_cache.dtype)
    num_splits = -(-(part.end_key - part.begin_key) // tile.split)
    _launch(call, part.workspace, tile, num_splits, part)


def _launch(
    call: AttentionCall,
    workspace: DecodeWorkspace,
    tile: DecodeTile,
    num_splits: int,
    part: DecodePart | None,
) -> None:
    """Launch the kernel for at most so many splits of a sequence: of all, or of a part's."""
    q_SNH, k_cache, v_cache, out = call.q, call.k_cache, call.v_cache, call.out
    block_tables_SM, seq_lens_S = call.block_tables, call.seq_lens
    num_seqs, num_heads, head_size = q_SNH.shape
    partial, logsumexp = workspace.partial, workspace.logsumexp
    num_kv_heads, tokens_per_block = k_cache.shape[1], k_cache.shape[2]
    group = num_heads // num_kv_heads
    sizes = group, head_size, tokens_per_block
    window, has_sinks = call.window or 0, call.sinks is not None
    launch, row_tiles = _launcher(
        sizes,
        tile,
        window,
        q_SNH.device,
        is_tiered=call.host is not None,
        is_part=part is not None,
        has_sinks=has_sinks,
    )
    head_programs = num_kv_heads * row_tiles
    split_programs = -(-_MAX_PROGRAMS // (num_seqs * head_programs))
    if call.host is not None:
        split_programs = max(split_programs, -(-_MIN_HOST_PROGRAMS // head_programs))
    split_programs = min(max(1, num_splits), split_programs)
    host_k, host_v = (k_cache, v_cache) if call.host is None else (call.host.k, call.host.v)
    splits = (0, 0, 0)
    if part is not None:
        last_split = -(-part.end_key // tile.split)
        splits = part.begin_key // tile.split, last_split, int(part.is_last)
    launch(
        (num_seqs, head_programs, split_programs),
        (
            q_SNH,
            k_cache,
            v_cache,
            host_k,
            host_v,
            partial,
            logsumexp,
            workspace.counters,
            out if call.sinks is None else call.sinks,
            out,
        ),
        (block_tables_SM, seq_lens_S),
        (k_cache.shape[0], *splits, block_tables_SM.stride(0), *logsumexp.stride()[:2]),
        (
            call.scale * _LOG2_E,
            *q_SNH.stride()[:2],
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            host_k.stride(0),
            host_v.stride(0),
            *partial.stride()[:3],
            *out.stride()[:2],
        ),
    )


@functools.cache
def _launcher(
    sizes: tuple[int, int, int],
    tile: DecodeTile,
    window: int,
    device: torch.device,
    *,
    is_tiered: bool,
    is_part: bool,
    has_sinks: bool,
) -> tuple[Launcher, int]:
    """Return what launches the kernel for these sizes, and the programs of a KV head's rows.

    `sizes` are query heads of a KV head, elements of a head, tokens of a block.
    """
    group, head_size, tokens_per_block = sizes
    rows = max(_MIN_DOT_ROWS, min(_MAX_DOT_ROWS, power_of_2(group)))
    row_tiles = -(-group // rows)
    sum_rows = min(rows, power_of_2(group))
    launch = Launcher(
        _decode_kernel,
        device,
        G=group,
        ROWS=rows,
        ROW_TILES=row_tiles,
        SUM_ROWS=sum_rows,
        H=head_size,
        H_PADDED=max(16, power_of_2(head_size)),
        P=tokens_per_block,
        SPLIT=tile.split,
        KEYS=tile.keys,
        SPLITS_PER_STEP=tile.sum_splits(sum_rows),
        WINDOW=window,
        TIERED=is_tiered,
        PART=is_part,
        HAS_SINKS=has_sinks,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch_options(device),
    )
    return launch, row_tiles
