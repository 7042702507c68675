"""Twins of what writes keys and values: norms, position encoding and cache write; copied blocks.

T tokens, N query heads, K KV heads, H head size, R rotated elements, P tokens per block,
W words of a block.
"""

import torch

from kernels.arguments import HostCache
from kernels.ref.norm import rms_norm


def rotary_write_kv_(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    offset: float = 0.0,
    host: HostCache | None = None,
) -> None:
    """Twin of kernels.ops.kv.rotary_write_kv_."""
    half = cos_sin.shape[1] // 2
    rows = cos_sin[positions].unsqueeze(1)
    cos, sin = rows[..., :half], rows[..., half:]
    q_TNH.copy_(_rotated(_normed(q_TNH, q_weight, eps, offset), cos, sin))
    keys = _rotated(_normed(k_TKH, k_weight, eps, offset), cos, sin)
    written = slots >= 0
    if not bool(written.all()):
        keys, v_TKH, slots = keys[written], v_TKH[written], slots[written]
    tokens_per_block = k_cache.shape[2]
    blocks, offsets = slots // tokens_per_block, slots % tokens_per_block
    if host is not None:
        is_host = blocks >= k_cache.shape[0]
        at = blocks[is_host] - k_cache.shape[0], offsets[is_host]
        host.k[at[0], :, at[1]] = keys[is_host]
        host.v[at[0], :, at[1]] = v_TKH[is_host]
        keys, v_TKH = keys[~is_host], v_TKH[~is_host]
        blocks, offsets = blocks[~is_host], offsets[~is_host]
    k_cache[blocks, :, offsets] = keys
    v_cache[blocks, :, offsets] = v_TKH


def copy_blocks(
    dst_BW: torch.Tensor, src_BW: torch.Tensor, dst_ids: torch.Tensor, src_ids: torch.Tensor
) -> None:
    """Twin of kernels.ops.kv.copy_blocks."""
    dst_BW[dst_ids] = src_BW[src_ids]


def _normed(
    x_TNH: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float
) -> torch.Tensor:
    """Norm each head, or all heads of a token as one row where the weight is as long."""
    if weight is None:
        return x_TNH
    if weight.shape[0] == x_TNH.shape[2]:
        return rms_norm(x_TNH, weight, eps, offset)
    return rms_norm(x_TNH.flatten(1), weight, eps, offset).view(x_TNH.shape)


def _rotated(x_TNH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second = x_TNH[..., :half].float(), x_TNH[..., half : 2 * half].float()
    out = x_TNH.clone()
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    return out
