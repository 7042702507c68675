"""The sum of a prefill's partial results, those of several parts of the keys.

T tokens, S sequences, N query heads, G query heads of one KV head, H head size, R rows of partial
results: parts of the keys, in each the tokens, in each the heads.
"""

import torch
import triton
import triton.language as tl

from kernels import sizes
from kernels.triton.dependent import launch_options, release, wait
from kernels.triton.prefill_tiles import keys_of_part
from kernels.triton.tiles import Tile

_SUM_ROWS = 8
"""Rows of a program; they divide those of every tile of prefill attention."""


@triton.jit(
    do_not_specialize=["num_parts", "stride_part"],
    do_not_specialize_on_alignment=["query_starts", "seq_lens"],
)
def _sum_kernel(
    partial,
    logsumexp,
    num_parts,
    stride_part,
    query_starts,
    seq_lens,
    out,
    stride_out_token,
    stride_out_head,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    H: tl.constexpr,
    H_PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add the parts of some rows in their order, weighted by their softmax denominators."""
    if OVERLAPS:
        wait()
        release()
    seq = tl.program_id(2)
    kv_head = tl.program_id(1)
    query_start = tl.load(query_starts + seq)
    num_queries = tl.load(query_starts + seq + 1) - query_start
    first_row = tl.program_id(0) * SUM_ROWS
    if first_row >= num_queries * G:
        return
    # The keys of the tile that these rows are of, and its parts, as in prefill_kernel.
    tile_row = first_row // ROWS * ROWS
    num_earlier = tl.load(seq_lens + seq) - num_queries
    end = num_earlier + tl.minimum((tile_row + ROWS - 1) // G, num_queries - 1) + 1
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(num_earlier + tile_row // G + 1 - WINDOW, 0) // KEYS * KEYS
    part_keys = keys_of_part(begin, end, num_parts, SPLIT, KEYS)
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
    for _ in range(own_parts):
        # Written by other programs: past the first cache, which may hold older bytes.
        part_at = partial + part_rows[:, None] * H + columns[None, :]
        part = tl.load(part_at, mask=is_element, other=0.0, cache_modifier=".cg")
        lse = tl.load(logsumexp + part_rows, mask=is_row, other=float("-inf"), cache_modifier=".cg")
        new_max = tl.maximum(running_max, lse)
        # A row may see no key so far: nothing is subtracted, and all its weights are 0.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        shrink = tl.exp2(running_max - base)
        weight = tl.exp2(lse - base)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + part * weight[:, None]
        running_max = new_max
        part_rows += stride_part
    attended = acc / tl.where(is_row, total, 1.0)[:, None]
    out_rows = out + token_rows * stride_out_token + heads * stride_out_head
    out_at = out_rows[:, None] + columns[None, :]
    tl.store(out_at, attended.to(out.dtype.element_ty), mask=is_element)


def sum_parts(
    partial: torch.Tensor,
    logsumexp: torch.Tensor,
    num_parts: int,
    query_starts_S1: torch.Tensor,
    seq_lens_S: torch.Tensor,
    out: torch.Tensor,
    *,
    num_kv_heads: int,
    max_query_len: int,
    window: int | None,
    tile: Tile,
) -> None:
    """Launch the sum behind the kernel that wrote the partial results.

    Args:
        partial: float32 [R, H].
        logsumexp: float32 [R].
        num_parts: parts of a tile's keys at most.
        query_starts_S1: as the operator's.
        seq_lens_S: as the operator's.
        out: [T, N, H]; rows of tiles whose keys one part holds stay as they are.
        num_kv_heads: of the cache.
        max_query_len: no sequence has more queries.
        window: as the operator's.
        tile: of the kernel that wrote the partial results.
    """
    num_tokens, num_heads, head_size = out.shape
    group = num_heads // num_kv_heads
    num_blocks = triton.cdiv(max_query_len * group, _SUM_ROWS)
    _sum_kernel[(num_blocks, num_kv_heads, seq_lens_S.shape[0])](
        partial,
        logsumexp,
        num_parts,
        num_tokens * num_heads,
        query_starts_S1,
        seq_lens_S,
        out,
        out.stride(0),
        out.stride(1),
        G=group,
        ROWS=tile.rows,
        SUM_ROWS=_SUM_ROWS,
        H=head_size,
        H_PADDED=max(16, triton.next_power_of_2(head_size)),
        KEYS=tile.keys,
        SPLIT=sizes.PREFILL_SPLIT_KEYS,
        WINDOW=window or 0,
        num_warps=4,
        **launch_options(out.device),
    )
