"""The attention operators of kernels.ops, which is where to import them from.

Shape letters: T tokens, S sequences, M blocks per sequence, B blocks, P tokens per block,
N query heads, K KV heads, H head size, C splits.
"""

import torch

from kernels.checks import (
    KernelArgumentError,
    check_attention,
    check_host,
    check_tensor,
    check_window,
    check_workspace,
)
from kernels.host_cache import HostCache
from kernels.ref import attention as ref_attention
from kernels.workspace import DecodeWorkspace

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
) -> torch.Tensor:
    """Attend causally from the last tokens of each sequence to its keys in a paged cache.

    Sequence s has the queries query_starts[s] to query_starts[s + 1]; they are the last n of its
    seq_lens[s] tokens, and query i sees the keys 0 to seq_lens[s] - n + i. The keys and values of
    these tokens are already in the cache.

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
        )
    return ref_attention.paged_prefill_attention(
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
