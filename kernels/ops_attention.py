"""The attention operators of kernels.ops, which is where to import them from.

Shape letters: T tokens, S sequences, M blocks per sequence, B blocks, P tokens per block,
N query heads, K KV heads, H head size, C splits.
"""

import torch

from kernels.checks import (
    KernelArgumentError,
    check_attention,
    check_host,
    check_part,
    check_prefill_workspace,
    check_tensor,
    check_window,
    check_workspace,
)
from kernels.host_cache import HostCache
from kernels.ref import attention as ref_attention
from kernels.ref import prefill as ref_prefill
from kernels.workspace import DecodeWorkspace, PrefillState, PrefillWorkspace

# Triton is imported by the first call on a GPU: machines without one need not have it.
# ruff: noqa: PLC0415


def paged_decode_attention(
    q_SNH: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables_SM: torch.Tensor,
    seq_lens_S: torch.Tensor,
    scale: float,
    *,
    max_seq_len: int,
    window: int | None = None,
    out: torch.Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
    host: HostCache | None = None,
) -> torch.Tensor:
    """Attend from one query a sequence to the keys of that sequence in a paged cache.

    A sequence's result depends on nothing else in the batch, and not on which of its blocks lie in
    host. With out and workspace given, a call on a GPU allocates nothing. A block is read once for
    all query heads of a KV head, up to 32 of them.

    Args:
        q_SNH: queries, N a multiple of K, H from 16 to 256; may be a strided view.
        k_cache: [B, K, P, H], dtype of q, stride 1 in the last dimension, other strides free.
        v_cache: [B, K, P, H], as k_cache.
        block_tables_SM: int32; row s names the blocks of sequence s in order. Entries beyond the
            sequence's length are not read.
        seq_lens_S: int32, keys of each sequence; 0 gives a row of zeros.
        scale: multiplies the scores.
        max_seq_len: no sequence is longer; sizes the grid and the workspace, not checked against
            seq_lens_S.
        window: a query sees the last `window` keys up to its own; blocks and table entries that lie
            wholly before are not read. None: all keys.
        out: [S, N, H], dtype of q, stride 1 in the last dimension; allocated if None.
        workspace: from decode_workspace, for at least S sequences of max_seq_len; allocated if
            None. Read by no other call until this one is done. The CPU needs none.
        host: blocks B and above, read where they are; None where all blocks are the cache's.

    Returns:
        out, [S, N, H].
    """
    name = "paged_decode_attention"
    check_attention(name, q_SNH, k_cache, v_cache, block_tables_SM, seq_lens_S, out)
    check_window(name, window)
    if seq_lens_S.shape[0] != q_SNH.shape[0]:
        raise KernelArgumentError(
            f"{name}.seq_lens", f"{q_SNH.shape[0]} lengths", f"{seq_lens_S.shape[0]}"
        )
    if host is not None:
        check_host(f"{name}.host", host, k_cache, v_cache)
    if workspace is not None:
        check_workspace(name, q_SNH, workspace, max_seq_len)
    if q_SNH.is_cuda:
        from kernels.triton import decode_attention

        return decode_attention.paged_decode_attention(
            q_SNH,
            k_cache,
            v_cache,
            block_tables_SM,
            seq_lens_S,
            scale,
            max_seq_len=max_seq_len,
            window=window,
            out=out,
            workspace=workspace,
            host=host,
        )
    return ref_attention.paged_decode_attention(
        q_SNH,
        k_cache,
        v_cache,
        block_tables_SM,
        seq_lens_S,
        scale,
        window=window,
        out=out,
        host=host,
    )


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
) -> torch.Tensor:
    """Attend causally from the last tokens of each sequence to its keys in a paged cache.

    Sequence s has the queries query_starts[s] to query_starts[s + 1]; they are the last n of its
    seq_lens[s] tokens, and query i sees the keys 0 to seq_lens[s] - n + i. The keys and values of
    these tokens are already in the cache.

    With PREFILL_SPLIT_MAX_QUERIES or fewer in q, programs share the keys of a sequence and add
    their results. A sequence's parts depend on the shape of q and on its own numbers of queries and
    keys, on nothing else. With out and workspace given, a call on a GPU allocates nothing.

    Args:
        q_TNH: queries, N a multiple of K, H from 16 to 256; may be a strided view.
        k_cache: [B, K, P, H], dtype of q, stride 1 in the last dimension, other strides free.
        v_cache: [B, K, P, H], as k_cache.
        block_tables_SM: int32; row s names the blocks of sequence s in order. Entries beyond the
            sequence's length are not read.
        query_starts_S1: [S + 1] int32, ascending, the last at most T; not checked.
        seq_lens_S: int32, keys of each sequence, at least its number of queries; not checked.
        scale: multiplies the scores.
        max_query_len: no sequence has more queries; sizes the grid, not checked.
        window: a query sees the last `window` keys up to its own; blocks and table entries that lie
            wholly before are not read. None: all keys.
        out: [T, N, H], dtype of q, stride 1 in the last dimension; allocated if None.
        workspace: from prefill_workspace, for at least T queries, or for PREFILL_SPLIT_MAX_QUERIES,
            and for the longest sequence; allocated if None. Read by no other call until this one is
            done. The CPU needs none.

    Returns:
        out, [T, N, H]. Rows that belong to no sequence are undefined.
    """
    name = "paged_prefill_attention"
    check_attention(name, q_TNH, k_cache, v_cache, block_tables_SM, seq_lens_S, out)
    check_window(name, window)
    num_seqs = seq_lens_S.shape[0]
    check_tensor(
        f"{name}.query_starts", query_starts_S1, (num_seqs + 1,), torch.int32, q_TNH.device
    )
    if workspace is not None:
        check_prefill_workspace(name, q_TNH, workspace)
    if q_TNH.is_cuda:
        from kernels.triton import prefill_attention

        return prefill_attention.paged_prefill_attention(
            q_TNH,
            k_cache,
            v_cache,
            block_tables_SM,
            query_starts_S1,
            seq_lens_S,
            scale,
            max_query_len=max_query_len,
            window=window,
            out=out,
            workspace=workspace,
        )
    return ref_prefill.paged_prefill_attention(
        q_TNH,
        k_cache,
        v_cache,
        block_tables_SM,
        query_starts_S1,
        seq_lens_S,
        scale,
        window=window,
        out=out,
    )


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
    """Attend as paged_prefill_attention does, to a part of the keys at a time.

    The parts of a call follow each other: the first begins at key 0, each other where the one
    before ended, and the last ends at or after the longest sequence's end. Together they give the
    bits of one call of paged_prefill_attention with all blocks in one cache, where that call has
    more than PREFILL_SPLIT_MAX_QUERIES queries; results of fewer may differ in their rounding.
    Table entries of blocks without a key of the part are not read. Nothing is allocated.

    Args:
        q_TNH: queries of one or more sequences, N a multiple of K, H from 16 to 256; may be a
            strided view.
        k_cache: [B, K, P, H], dtype of q, stride 1 in the last dimension, other strides free.
        v_cache: [B, K, P, H], as k_cache.
        block_tables_SM: int32; row s names the blocks of sequence s in order.
        query_starts_S1: [S + 1] int32, as paged_prefill_attention's.
        seq_lens_S: int32, keys of each sequence, those of all parts; as paged_prefill_attention's.
        scale: multiplies the scores.
        stage: blocks B and above: a buffer in the card's memory that host blocks were copied into.
        begin_key: the part's first key in every sequence, a multiple of PREFILL_PART_KEYS; 0 begins
            anew.
        end_key: the key after the part's last one, a multiple of PREFILL_PART_KEYS unless is_last.
        state: from prefill_state, for at least T queries; carried from part to part, and free after
            the last one. Read by no other call in between.
        is_last: whether out is written; the others write the state.
        max_query_len: no sequence has more queries; sizes the grid, not checked.
        window: a query sees the last `window` keys up to its own; None: all keys.
        out: [T, N, H], dtype of q, stride 1 in the last dimension. Rows that belong to no sequence
            stay as they are.
    """
    name = "paged_prefill_part"
    check_attention(name, q_TNH, k_cache, v_cache, block_tables_SM, seq_lens_S, out)
    check_window(name, window)
    check_host(f"{name}.stage", stage, k_cache, v_cache)
    check_part(name, q_TNH, state, begin_key, end_key, is_last=is_last)
    starts_shape = (seq_lens_S.shape[0] + 1,)
    check_tensor(f"{name}.query_starts", query_starts_S1, starts_shape, torch.int32, q_TNH.device)
    tables = (block_tables_SM, query_starts_S1, seq_lens_S)
    if q_TNH.is_cuda:
        from kernels.triton import prefill_attention

        prefill_attention.paged_prefill_part(
            q_TNH,
            k_cache,
            v_cache,
            *tables,
            scale,
            stage=stage,
            begin_key=begin_key,
            end_key=end_key,
            state=state,
            is_last=is_last,
            max_query_len=max_query_len,
            window=window,
            out=out,
        )
        return
    ref_prefill.paged_prefill_part(
        q_TNH,
        k_cache,
        v_cache,
        *tables,
        scale,
        stage=stage,
        begin_key=begin_key,
        end_key=end_key,
        state=state,
        is_last=is_last,
        window=window,
        out=out,
    )
