"""Keys and values of one sequence out of the blocks of a paged cache, for the twins of attention.

Shape letters: M blocks per sequence, K KV heads, H head size, P tokens per block, L tokens of one
sequence.
"""

import torch


def first_key(position: int, window: int | None) -> int:
    """Return the first key that a query at this position sees."""
    return 0 if window is None else max(0, position + 1 - window)


def gather(
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
