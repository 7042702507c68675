"""Twins of paged attention: one sequence after the other, scores and sums in float32.

Shape letters: T tokens, S sequences, M blocks per sequence, N query heads, K KV heads,
H head size, L tokens of one sequence.
"""

import torch
from torch.nn import functional

from kernels.host_cache import HostCache

QUERY_CHUNK_TOKENS = 128
"""Queries that prefill attends at a time; bounds the mask and skips keys that none may see."""


def paged_decode_attention(
    q_SNH: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables_SM: torch.Tensor,
    seq_lens_S: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    out: torch.Tensor | None = None,
    host: HostCache | None = None,
) -> torch.Tensor:
    """Twin of kernels.ops.paged_decode_attention."""
    out = torch.empty_like(q_SNH, memory_format=torch.contiguous_format) if out is None else out
    num_kv_heads, head_size = k_cache.shape[1], k_cache.shape[3]
    for index, seq_len in enumerate(seq_lens_S.tolist()):
        if seq_len == 0:
            out[index] = 0
            continue
        table, first = block_tables_SM[index], _first_key(seq_len - 1, window)
        keys = _gather(k_cache, table, first, seq_len, None if host is None else host.k)
        values = _gather(v_cache, table, first, seq_len, None if host is None else host.v)
        # All query heads of one KV head attend as rows of one product: no key is repeated.
        query = q_SNH[index].float().reshape(1, num_kv_heads, -1, head_size)
        attended = functional.scaled_dot_product_attention(query, keys, values, scale=scale)
        out[index] = attended.reshape(-1, head_size)
    return out


def paged_prefill_attention(
    q_TNH: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables_SM: torch.Tensor,
    query_starts_S1: torch.Tensor,
    seq_lens_S: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of kernels.ops.paged_prefill_attention."""
    if out is None:
        out = torch.zeros(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    starts = query_starts_S1.tolist()
    for index, seq_len in enumerate(seq_lens_S.tolist()):
        begin, end = starts[index], starts[index + 1]
        if begin == end:
            continue
        first_position = seq_len - (end - begin)
        table, first = block_tables_SM[index], _first_key(first_position, window)
        keys = _gather(k_cache, table, first, seq_len)
        values = _gather(v_cache, table, first, seq_len)
        for chunk in range(begin, end, QUERY_CHUNK_TOKENS):
            stop = min(chunk + QUERY_CHUNK_TOKENS, end)
            position = first_position + chunk - begin
            skipped = _first_key(position, window) - first
            out[chunk:stop] = _attend_causal(
                q_TNH[chunk:stop],
                keys[:, :, skipped:],
                values[:, :, skipped:],
                position - first - skipped,
                scale,
                window,
            )
    return out


def _attend_causal(
    q_TNH: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first_position: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attend to keys 0 to the query's own position, the last `window` of them at most.

    The first query is at first_position; key 0 is the first that it sees.
    """
    num_keys = first_position + q_TNH.shape[0]
    positions = torch.arange(first_position, num_keys, device=q_TNH.device)
    key_positions = torch.arange(num_keys, device=q_TNH.device)
    visible = key_positions <= positions[:, None]
    if window is not None:
        visible &= key_positions > positions[:, None] - window
    attended = functional.scaled_dot_product_attention(
        q_TNH.float().transpose(0, 1)[None],
        keys[:, :, :num_keys],
        values[:, :, :num_keys],
        attn_mask=visible,
        scale=scale,
        enable_gqa=q_TNH.shape[1] != keys.shape[1],
    )
    return attended[0].transpose(0, 1)


def _first_key(position: int, window: int | None) -> int:
    """Return the first key that a query at this position sees."""
    return 0 if window is None else max(0, position + 1 - window)


def _gather(
    cache: torch.Tensor,
    table_M: torch.Tensor,
    first: int,
    seq_len: int,
    beside: torch.Tensor | None = None,
) -> torch.Tensor:
    """Read one sequence's keys or values from `first` on as float32 [1, K, L - first, H]."""
    num_kv_heads, tokens_per_block, head_size = cache.shape[1:]
    first_block, num_blocks = first // tokens_per_block, -(-seq_len // tokens_per_block)
    blocks = _select(cache, beside, table_M[first_block:num_blocks])
    rows = blocks.transpose(0, 1).reshape(1, num_kv_heads, -1, head_size)
    skipped = first_block * tokens_per_block
    return rows[:, :, first - skipped : seq_len - skipped].float()


def _select(cache: torch.Tensor, beside: torch.Tensor | None, ids_m: torch.Tensor) -> torch.Tensor:
    """Return blocks [m, K, P, H], those with a number beyond the cache from the tier beside it."""
    if beside is None:
        return cache.index_select(0, ids_m)
    is_beside = ids_m >= cache.shape[0]
    blocks = cache.new_empty((ids_m.shape[0], *cache.shape[1:]))
    blocks[~is_beside] = cache[ids_m[~is_beside].long()]
    blocks[is_beside] = beside[ids_m[is_beside].long() - cache.shape[0]]
    return blocks
