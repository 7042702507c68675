"""What operators take beside plain tensors: a second tier of blocks, scratch, an attention call.

Shape letters: T tokens, S sequences, M blocks per sequence, B blocks, C blocks beside them or
splits of a sequence, P tokens per block, N query heads, K KV heads, H head size, R rows of partial
results.
"""

from dataclasses import dataclass

import torch

from kernels.sizes import decode_num_counters, decode_num_splits, prefill_partial_rows


@dataclass(frozen=True, slots=True)
class HostCache:
    """Keys and values of blocks that have the numbers after those of the cache.

    A block table or slot that names block B + c, where the cache has B blocks, means block c here.
    On a GPU these are CUDA tensors: over pinned host memory, which kernels then read and write in
    place, or over memory of the card, as a buffer that host blocks were copied into.

    Attributes:
        k: [C, K, P, H], dtype and device of the cache; the strides of head, token and element are
            the cache's, that of blocks is free.
        v: [C, K, P, H], as k beside the cache of values.
    """

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of attention over a paged cache: what is read, what is seen of it, what is written.

    Made once, and handed as it is to the checks and to the kernel or its twin.

    Attributes:
        q: queries, [S, N, H] of decode, [T, N, H] of prefill; N a multiple of K, H from 16 to 256;
            may be a strided view.
        k_cache: [B, K, P, H], dtype of q, stride 1 in the last dimension, other strides free.
        v_cache: [B, K, P, H], as k_cache.
        block_tables: [S, M] int32; row s names the blocks of sequence s in order. Entries beyond
            the sequence's length are not read.
        seq_lens: [S] int32, keys of each sequence.
        scale: multiplies the scores.
        out: shape and dtype of q, stride 1 in the last dimension; written.
        window: a query sees the last `window` keys up to its own; blocks and table entries that lie
            wholly before are not read. None: all keys.
        host: blocks B and above, read where they are; None where all blocks are the cache's.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    scale: float
    out: torch.Tensor
    window: int | None = None
    host: HostCache | None = None


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Partial results of decode attention, and the counters of kernels that share work.

    One workspace may serve calls of the same stream with fewer sequences or shorter ones; two
    streams need two.

    Attributes:
        partial: float32 [S, N, C, H], the output of each of C splits.
        logsumexp: float32 [S, N, C], base-2 logarithm of each split's softmax denominator.
        counters: int32, how many programs of a shared result are done; the last one, which puts the
            parts together, sets it back to zero. Zeros between kernels.
    """

    partial: torch.Tensor
    logsumexp: torch.Tensor
    counters: torch.Tensor


def decode_workspace(
    num_seqs: int, num_heads: int, head_dim: int, max_seq_len: int, device: torch.device | str
) -> DecodeWorkspace:
    """Allocate the scratch tensors of paged_decode_attention and linear.

    Args:
        num_seqs: sequences in a step at most.
        num_heads: query heads.
        head_dim: elements of a head.
        max_seq_len: tokens of a sequence at most.
        device: where attention runs.

    Returns:
        Tensors of decode_workspace_bytes(...) bytes in sum; the counters are zero, the others not
        initialised.
    """
    splits = max(1, decode_num_splits(max_seq_len))
    return DecodeWorkspace(
        partial=torch.empty(
            (num_seqs, num_heads, splits, head_dim), dtype=torch.float32, device=device
        ),
        logsumexp=torch.empty((num_seqs, num_heads, splits), dtype=torch.float32, device=device),
        counters=torch.zeros(
            decode_num_counters(num_seqs, num_heads), dtype=torch.int32, device=device
        ),
    )


@dataclass(frozen=True, slots=True)
class PrefillWorkspace:
    """Partial results of prefill attention with few queries.

    One workspace may serve calls of the same stream with fewer queries or shorter sequences; two
    streams need two.

    Attributes:
        partial: float32 [R, H], the output of each part of the keys, query and head.
        logsumexp: float32 [R], base-2 logarithm of each one's softmax denominator.
        max_seq_len: no sequence of a call is longer, in tokens; bounds the grid.
    """

    partial: torch.Tensor
    logsumexp: torch.Tensor
    max_seq_len: int


def prefill_workspace(
    num_queries: int, num_heads: int, head_dim: int, max_seq_len: int, device: torch.device | str
) -> PrefillWorkspace:
    """Allocate the scratch tensors of paged_prefill_attention.

    Args:
        num_queries: queries of a call at most, of all its sequences; those of calls of more than
            kernels.sizes.PREFILL_SPLIT_MAX_QUERIES need none.
        num_heads: query heads.
        head_dim: elements of a head.
        max_seq_len: tokens of a sequence at most.
        device: where attention runs.

    Returns:
        Tensors of prefill_workspace_bytes(...) bytes in sum, not initialised.
    """
    rows = prefill_partial_rows(num_queries, num_heads, head_dim, max_seq_len)
    return PrefillWorkspace(
        partial=torch.empty((rows, head_dim), dtype=torch.float32, device=device),
        logsumexp=torch.empty(rows, dtype=torch.float32, device=device),
        max_seq_len=max_seq_len,
    )


@dataclass(frozen=True, slots=True)
class PrefillState:
    """What is known of a prefill's queries between two parts of their keys.

    One state may serve calls of the same stream with fewer queries, one prefill after the other.

    Attributes:
        row_max: float32 [T, N], the largest score so far; of what base is the operator's affair.
        row_sum: float32 [T, N], the softmax denominator so far, relative to row_max.
        acc: float32 [T, N, H], the weighted sum of values so far, relative to row_max.
    """

    row_max: torch.Tensor
    row_sum: torch.Tensor
    acc: torch.Tensor


def prefill_state(
    num_tokens: int, num_heads: int, head_dim: int, device: torch.device | str
) -> PrefillState:
    """Allocate the state of paged_prefill_part.

    Args:
        num_tokens: queries of a call at most.
        num_heads: query heads.
        head_dim: elements of a head.
        device: where attention runs.

    Returns:
        Tensors of prefill_state_bytes(...) bytes in sum, not initialised: the first part does.
    """
    shape = (num_tokens, num_heads, head_dim)
    return PrefillState(
        row_max=torch.empty(shape[:2], dtype=torch.float32, device=device),
        row_sum=torch.empty(shape[:2], dtype=torch.float32, device=device),
        acc=torch.empty(shape, dtype=torch.float32, device=device),
    )


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """A part of a prefill's keys.

    Attributes:
        begin_key: its first key in every sequence, a multiple of PREFILL_PART_KEYS; 0 begins anew.
        end_key: the key after its last one, a multiple of PREFILL_PART_KEYS unless is_last.
        is_last: whether out is written; the other parts write the state.
        state: for at least T queries; carried from part to part, and free after the last one. Read
            by no other call in between.
    """

    begin_key: int
    end_key: int
    is_last: bool
    state: PrefillState
