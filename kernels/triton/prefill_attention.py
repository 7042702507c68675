"""Causal attention of many queries a sequence over a paged cache: launches of the kernels.

Shape letters: T tokens, S sequences, M blocks per sequence, N query heads, K KV heads, H head size,
R rows of partial results.
"""

from dataclasses import dataclass

import torch
import triton

from kernels import sizes
from kernels.host_cache import HostCache
from kernels.triton.prefill_kernel import prefill_kernel
from kernels.triton.prefill_sum import sum_parts
from kernels.triton.tiles import prefill_tile
from kernels.workspace import PrefillState, PrefillWorkspace

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class _Part:
    """Which keys a call attends to, where the others' share is kept, and what lies beside."""

    stage: HostCache
    state: PrefillState
    begin_key: int
    end_key: int
    is_last: bool


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
    workspace: PrefillWorkspace | None = None,
    num_parts: int | None = None,
) -> torch.Tensor:
    """Launch kernels.ops.paged_prefill_attention.

    Where it is measured, without a workspace, with another number of parts; 1: without a split.
    """
    if out is None:
        out = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    tables = (block_tables_SM, query_starts_S1, seq_lens_S)
    num_parts = num_parts or sizes.prefill_num_parts(*q_TNH.shape)
    split = None
    if num_parts > 1 and q_TNH.shape[0]:
        most_keys = block_tables_SM.shape[1] * k_cache.shape[2]
        split = _split(q_TNH, num_parts, most_keys, workspace)
    _launch(q_TNH, k_cache, v_cache, tables, scale, max_query_len, window, out, None, split)
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
    _launch(q_TNH, k_cache, v_cache, tables, scale, max_query_len, window, out, part, None)


def _split(
    q_TNH: torch.Tensor, num_parts: int, most_keys: int, workspace: PrefillWorkspace | None
) -> _Split | None:
    """Lay partial results out; None where one part holds the keys of any sequence."""
    if workspace is not None:
        most_keys = min(most_keys, workspace.max_seq_len)
    grid_parts = min(num_parts, triton.cdiv(most_keys, sizes.PREFILL_SPLIT_KEYS))
    if grid_parts <= 1:
        return None
    if workspace is not None:
        return _Split(workspace.partial, workspace.logsumexp, num_parts, grid_parts)
    num_tokens, num_heads, head_size = q_TNH.shape
    lse = torch.empty(num_tokens * num_heads * grid_parts, dtype=torch.float32, device=q_TNH.device)
    return _Split(lse.new_empty((lse.shape[0], head_size)), lse, num_parts, grid_parts)


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
    split: _Split | None,
) -> None:
    num_tokens, num_heads, head_size = q_TNH.shape
    block_tables_SM, query_starts_S1, seq_lens_S = tables
    num_seqs = seq_lens_S.shape[0]
    if num_tokens == 0 or num_seqs == 0 or max_query_len == 0:
        return
    num_kv_heads, tokens_per_block = k_cache.shape[1], k_cache.shape[2]
    group = num_heads // num_kv_heads
    tile = prefill_tile(head_size, k_cache.dtype)
    # Without a part, and without a split, these are not read.
    beside = part or _Part(HostCache(k_cache, v_cache), PrefillState(out, out, out), 0, 0, True)
    parts = split or _Split(out, out, 1, 1)
    num_tiles = triton.cdiv(max_query_len * group, tile.rows)
    prefill_kernel[(num_tiles, num_kv_heads, num_seqs * parts.grid_parts)](
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
        parts.partial,
        parts.logsumexp,
        parts.num_parts,
        parts.grid_parts,
        num_tokens * num_heads,
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
        SPLIT=sizes.PREFILL_SPLIT_KEYS,
        IS_PART=part is not None,
        IS_SPLIT=split is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if split is not None:
        sum_parts(
            split.partial,
            split.logsumexp,
            split.num_parts,
            query_starts_S1,
            seq_lens_S,
            out,
            num_kv_heads=num_kv_heads,
            max_query_len=max_query_len,
            window=window,
            tile=tile,
        )
