"""Twin of the cache write. T tokens, K KV heads, H head size, P tokens per block."""

import torch


def write_kv(
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Twin of kernels.ops.write_kv."""
    written = slots >= 0
    if not bool(written.all()):
        k_TKH, v_TKH, slots = k_TKH[written], v_TKH[written], slots[written]
    tokens_per_block = k_cache.shape[2]
    blocks, offsets = slots // tokens_per_block, slots % tokens_per_block
    k_cache[blocks, :, offsets] = k_TKH
    v_cache[blocks, :, offsets] = v_TKH
