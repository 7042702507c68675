"""Attention over a paged cache: of one query a sequence, of many, to all of the keys or to a part.

Shape letters: T tokens, S sequences, M blocks per sequence, B blocks, P tokens per block,
N query heads, K KV heads, H head size.
"""

import torch

from kernels.arguments import (
    AttentionCall,
    DecodePart,
    DecodeWorkspace,
    PrefillPart,
    PrefillWorkspace,
)
from kernels.ops.checks import (
    KernelArgumentError,
    check_dims,
    check_float,
    check_host,
    check_stride,
    check_tensor,
)
from kernels.ref import attention as ref
from kernels.sizes import (
    DECODE_SPLIT_TOKENS,
    PREFILL_PART_KEYS,
    decode_num_splits,
    prefill_partial_rows,
)

# Triton is imported by the first call on a GPU: machines without one need not have it.
# ruff: noqa: PLC0415


def paged_decode_attention(
    call: AttentionCall, *, max_seq_len: int, workspace: DecodeWorkspace | None = None
) -> None:
    """Attend from one query a sequence to the keys of that sequence in a paged cache.

    A sequence's result depends on nothing else in the batch, and not on which of its blocks lie in
    host. With a workspace given, a call on a GPU allocates nothing. A block is read once for
    all query heads of a KV head, up to 32 of them.

    Args:
        call: q and out are [S, N, H]; a sequence of 0 keys gets a row of zeros.
        max_seq_len: no sequence is longer; sizes the grid and the workspace, not checked against
            the lengths.
        workspace: from decode_workspace, for at least S sequences of max_seq_len; allocated if
            None. Read by no other call until this one is done. The CPU needs none.
    """
    name = "paged_decode_attention"
    _check_decode(name, call)
    if workspace is not None:
        _check_decode_workspace(name, call.q, workspace, max_seq_len)
    if call.q.is_cuda:
        from kernels.triton import decode_attention

        decode_attention.paged_decode_attention(call, max_seq_len=max_seq_len, workspace=workspace)
        return
    ref.paged_decode_attention(call)


def paged_decode_part(call: AttentionCall, part: DecodePart) -> None:
    """Attend as paged_decode_attention does, to a part of the keys at a time.

    The parts of a call follow each other: the first begins at key 0, each other where the one
    before ended, and the last holds the last key of every sequence. Together they give the bits of
    one call of paged_decode_attention. Table entries of blocks without a key of the part are not
    read. Nothing is allocated on a GPU.

    Args:
        call: as paged_decode_attention's, with the keys of all parts, at least one a sequence;
            window is None. Each part may have another host, and other numbers of its blocks.
        part: the keys that are attended to, and where partial results are kept.
    """
    name = "paged_decode_part"
    _check_decode(name, call)
    if call.window is not None:
        raise KernelArgumentError(f"{name}.window", "None", f"{call.window}")
    _check_decode_part(name, call.q, part)
    if call.q.is_cuda:
        from kernels.triton import decode_attention

        decode_attention.paged_decode_part(call, part)
        return
    ref.paged_decode_part(call, part)


def paged_prefill_attention(
    call: AttentionCall,
    query_starts_S1: torch.Tensor,
    *,
    max_query_len: int,
    workspace: PrefillWorkspace | None = None,
) -> None:
    """Attend causally from the last tokens of each sequence to its keys in a paged cache.

    Sequence s has the queries query_starts[s] to query_starts[s + 1]; they are the last n of its
    seq_lens[s] tokens, and query i sees the keys 0 to seq_lens[s] - n + i. The keys and values of
    these tokens are already in the cache. Rows of out that belong to no sequence are undefined.

    With PREFILL_SPLIT_MAX_QUERIES or fewer in q, programs share the keys of a sequence and add
    their results. A sequence's parts depend on the shape of q and on its own numbers of queries and
    keys, on nothing else. With a workspace given, a call on a GPU allocates nothing.

    Args:
        call: q and out are [T, N, H]; a sequence has at least as many keys as queries, which is not
            checked; host is None.
        query_starts_S1: [S + 1] int32, ascending, the last at most T; not checked.
        max_query_len: no sequence has more queries; sizes the grid, not checked.
        workspace: from prefill_workspace, for at least T queries, or for PREFILL_SPLIT_MAX_QUERIES,
            and for the longest sequence; allocated if None. Read by no other call until this one is
            done. The CPU needs none.
    """
    name = "paged_prefill_attention"
    _check_call(name, call)
    _check_query_starts(name, call, query_starts_S1)
    if call.host is not None:
        expected = "None, as paged_prefill_part alone reads blocks beside the cache"
        raise KernelArgumentError(f"{name}.host", expected, f"{call.host.k.shape[0]} blocks")
    if workspace is not None:
        _check_prefill_workspace(name, call.q, workspace)
    if call.q.is_cuda:
        from kernels.triton import prefill_attention

        prefill_attention.paged_prefill_attention(
            call, query_starts_S1, max_query_len=max_query_len, workspace=workspace
        )
        return
    ref.paged_prefill_attention(call, query_starts_S1)


def paged_prefill_part(
    call: AttentionCall, query_starts_S1: torch.Tensor, part: PrefillPart, *, max_query_len: int
) -> None:
    """Attend as paged_prefill_attention does, to a part of the keys at a time.

    The parts of a call follow each other: the first begins at key 0, each other where the one
    before ended, and the last ends at or after the longest sequence's end. Together they give the
    bits of one call of paged_prefill_attention with all blocks in one cache, where that call has
    more than PREFILL_SPLIT_MAX_QUERIES queries; results of fewer may differ in their rounding.
    Table entries of blocks without a key of the part are not read. Nothing is allocated.

    Args:
        call: as paged_prefill_attention's, with the keys of all parts; host is a buffer in the
            card's memory that host blocks were copied into. Rows of out that belong to no sequence
            stay as they are.
        query_starts_S1: [S + 1] int32, as paged_prefill_attention's.
        part: the keys that are attended to, and what is known from the parts before.
        max_query_len: no sequence has more queries; sizes the grid, not checked.
    """
    name = "paged_prefill_part"
    _check_call(name, call)
    if call.host is None:
        raise KernelArgumentError(f"{name}.host", "a buffer of host blocks", "None")
    _check_part(name, call.q, part)
    _check_query_starts(name, call, query_starts_S1)
    if call.q.is_cuda:
        from kernels.triton import prefill_attention

        prefill_attention.paged_prefill_part(
            call, query_starts_S1, part, max_query_len=max_query_len
        )
        return
    ref.paged_prefill_part(call, query_starts_S1, part)


def _check_call(name: str, call: AttentionCall) -> None:
    """Raise unless the arguments that all operators share agree with each other."""
    q, k_cache, block_tables = call.q, call.k_cache, call.block_tables
    q_shape, cache_shape = q.shape, k_cache.shape
    if len(q_shape) != 3 or len(cache_shape) != 4 or block_tables.dim() != 2:
        check_dims(f"{name}.q", q, "TNH")
        check_dims(f"{name}.k_cache", k_cache, "BKPH")
        check_dims(f"{name}.block_tables", block_tables, "SM")
    check_float(f"{name}.q", q)
    num_blocks, num_kv_heads, tokens_per_block, _ = cache_shape
    num_heads, head_size = q_shape[1:]
    dtype, device = q.dtype, q.device
    if not 16 <= head_size <= 256:
        raise KernelArgumentError(f"{name}.q", "a head size (H) of 16 to 256", f"{head_size}")
    if num_heads % num_kv_heads:
        expected = f"a multiple of {num_kv_heads} query heads (N), the cache's KV heads"
        raise KernelArgumentError(f"{name}.q", expected, f"{num_heads}")
    # Shapes are given in full where they can be: comparing with None costs a loop.
    num_seqs, table_width = block_tables.shape
    expected_cache = (num_blocks, num_kv_heads, tokens_per_block, head_size)
    check_stride(f"{name}.q", q)
    check_tensor(f"{name}.k_cache", k_cache, expected_cache, dtype, device)
    check_tensor(f"{name}.v_cache", call.v_cache, cache_shape, dtype, device)
    tables_shape = (num_seqs, table_width)
    check_tensor(f"{name}.block_tables", block_tables, tables_shape, torch.int32, device)
    check_tensor(f"{name}.seq_lens", call.seq_lens, (num_seqs,), torch.int32, device)
    check_tensor(f"{name}.out", call.out, q_shape, dtype, device)
    if call.window is not None and call.window < 1:
        raise KernelArgumentError(f"{name}.window", "None or at least 1 token", f"{call.window}")
    if call.host is not None:
        check_host(f"{name}.host", call.host, k_cache, call.v_cache)
    if call.sinks is not None:
        check_tensor(f"{name}.sinks", call.sinks, (num_heads,), dtype, device)


def _check_decode(name: str, call: AttentionCall) -> None:
    """Raise as _check_call does, and unless there is a length for each query."""
    _check_call(name, call)
    if call.seq_lens.shape[0] != call.q.shape[0]:
        expected = f"{call.q.shape[0]} lengths"
        raise KernelArgumentError(f"{name}.seq_lens", expected, f"{call.seq_lens.shape[0]}")


def _check_query_starts(name: str, call: AttentionCall, query_starts_S1: torch.Tensor) -> None:
    """Raise unless there is a first query of each sequence, and one behind the last."""
    shape = (call.seq_lens.shape[0] + 1,)
    check_tensor(f"{name}.query_starts", query_starts_S1, shape, torch.int32, call.q.device)


def _check_decode_workspace(
    name: str, q_SNH: torch.Tensor, workspace: DecodeWorkspace, max_seq_len: int
) -> None:
    """Raise where a workspace has too few sequences or splits, or other heads."""
    num_seqs, num_heads, head_size = q_SNH.shape
    partial = workspace.partial
    splits = decode_num_splits(max_seq_len)
    fits = partial.shape[0] >= num_seqs and partial.shape[2] >= splits
    if not fits or (partial.shape[1], partial.shape[3]) != (num_heads, head_size):
        expected = f"room for {num_seqs} x {num_heads} heads x {splits} splits x {head_size}"
        raise KernelArgumentError(f"{name}.workspace", expected, f"{tuple(partial.shape)}")
    if partial.device != q_SNH.device:
        expected = f"tensors on {q_SNH.device}"
        raise KernelArgumentError(f"{name}.workspace", expected, f"{partial.device}")


def _check_prefill_workspace(name: str, q_TNH: torch.Tensor, workspace: PrefillWorkspace) -> None:
    """Raise where a workspace has too few rows, or rows of another size."""
    what, partial = f"{name}.workspace", workspace.partial
    num_tokens, num_heads, size = q_TNH.shape
    rows = prefill_partial_rows(num_tokens, num_heads, size, workspace.max_seq_len)
    if partial.shape[0] < rows or partial.shape[1] != size:
        raise KernelArgumentError(what, f"room for {rows} x {size}", f"{tuple(partial.shape)}")
    if partial.device != q_TNH.device:
        raise KernelArgumentError(what, f"tensors on {q_TNH.device}", f"{partial.device}")


def _check_decode_part(name: str, q_SNH: torch.Tensor, part: DecodePart) -> None:
    """Raise unless a part of the keys of decodes is made of whole splits that have room."""
    begin_key, end_key = part.begin_key, part.end_key
    if begin_key < 0 or begin_key % DECODE_SPLIT_TOKENS:
        expected = f"a multiple of {DECODE_SPLIT_TOKENS}"
        raise KernelArgumentError(f"{name}.begin_key", expected, f"{begin_key}")
    if end_key <= begin_key:
        raise KernelArgumentError(f"{name}.end_key", f"more than {begin_key}", f"{end_key}")
    if end_key % DECODE_SPLIT_TOKENS and not part.is_last:
        expected = f"a multiple of {DECODE_SPLIT_TOKENS} in all parts but the last"
        raise KernelArgumentError(f"{name}.end_key", expected, f"{end_key}")
    _check_decode_workspace(name, q_SNH, part.workspace, end_key)


def _check_part(name: str, q_TNH: torch.Tensor, part: PrefillPart) -> None:
    """Raise unless a part of a prefill's keys is made of whole tiles and its state has room."""
    begin_key, end_key, state = part.begin_key, part.end_key, part.state
    if begin_key < 0 or begin_key % PREFILL_PART_KEYS:
        expected = f"a multiple of {PREFILL_PART_KEYS}"
        raise KernelArgumentError(f"{name}.begin_key", expected, f"{begin_key}")
    if end_key <= begin_key:
        raise KernelArgumentError(f"{name}.end_key", f"more than {begin_key}", f"{end_key}")
    if end_key % PREFILL_PART_KEYS and not part.is_last:
        expected = f"a multiple of {PREFILL_PART_KEYS} in all parts but the last"
        raise KernelArgumentError(f"{name}.end_key", expected, f"{end_key}")
    num_tokens, num_heads, head_size = q_TNH.shape
    have = state.acc.shape
    if have[0] < num_tokens or have[1:] != (num_heads, head_size):
        expected = f"room for {num_tokens} queries x {num_heads} heads x {head_size}"
        raise KernelArgumentError(f"{name}.state", expected, f"{tuple(have)}")
    if state.acc.device != q_TNH.device:
        expected = f"tensors on {q_TNH.device}"
        raise KernelArgumentError(f"{name}.state", expected, f"{state.acc.device}")
