"""Twin of decode attention: one sequence after the other, scores and sums in float32.

Shape letters: S sequences, M blocks per sequence, N query heads, K KV heads, H head size.
"""

import torch
from torch.nn import functional

from kernels.host_cache import HostCache
from kernels.ref.gather import first_key, gather


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
        table, first = block_tables_SM[index], first_key(seq_len - 1, window)
        keys = gather(k_cache, table, first, seq_len, None if host is None else host.k)
        values = gather(v_cache, table, first, seq_len, None if host is None else host.v)
        # All query heads of one KV head attend as rows of one product: no key is repeated.
        query = q_SNH[index].float().reshape(1, num_kv_heads, -1, head_size)
        attended = functional.scaled_dot_product_attention(query, keys, values, scale=scale)
        out[index] = attended.reshape(-1, head_size)
    return out
