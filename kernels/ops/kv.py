"""Keys and values of a paged cache: written as tokens come, copied as blocks.

Shape letters: T tokens, B blocks, P tokens per block, N query heads, K KV heads, H head size, R
rotated elements of a head, W words of a block.
"""

import torch

from kernels.arguments import HostCache
from kernels.ops.checks import (
    KernelArgumentError,
    check_dims,
    check_float,
    check_host,
    check_stride,
    check_tensor,
)
from kernels.ref import kv as ref

# Triton is imported by the first call on a GPU: machines without one need not have it.
# ruff: noqa: PLC0415


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
    """Norm q and k where weights are given, rotate them, and put k and v into the cache.

    The rotation takes the first R elements of every head by the token's position; element i of
    their first half pairs with element i of their second half. Queries are overwritten, keys and
    values only read. A norm's result is rounded before the rotation, as rms_norm rounds it. A
    token's result depends on no other token.

    Args:
        q_TNH: queries, stride 1 in the last dimension; may be a strided view of a fused projection.
        k_TKH: keys, dtype of q; may be a view of the same tensor.
        v_TKH: values, shape and dtype of k; may be a view of the same tensor.
        q_weight: dtype of q; [H]: each head is normed, [N * H]: all heads of a token are normed as
            one row, None: no norm.
        k_weight: as q_weight, [H] or [K * H] with it; None where q_weight is.
        eps: added to the mean square; not read without weights.
        cos_sin: [max_positions, R] float32, R / 2 cosines and then R / 2 sines.
        positions: [T] int64, 0 to max_positions - 1; not checked, as that would wait for the GPU.
        k_cache: [B, K, P, H], dtype of q, stride 1 in the last dimension, other strides free.
        v_cache: [B, K, P, H], as k_cache.
        slots: [T] int64, block * P + offset, or -1 for a token that is not written. No slot twice,
            and none beyond the cache: neither is checked.
        offset: added to the weights of both norms, in float32.
        host: blocks B and above, written where they are; None where all blocks are the cache's.
    """
    _check_rotary_write_kv(
        q_TNH, k_TKH, v_TKH, q_weight, k_weight, cos_sin, positions, k_cache, v_cache, slots
    )
    if host is not None:
        check_host("rotary_write_kv_.host", host, k_cache, v_cache)
    if q_TNH.is_cuda:
        from kernels.triton import rotary_write_kv

        run = rotary_write_kv.rotary_write_kv_
    else:
        run = ref.rotary_write_kv_
    heads = (q_TNH, k_TKH, v_TKH)
    run(*heads, q_weight, k_weight, eps, cos_sin, positions, k_cache, v_cache, slots, offset, host)


def copy_blocks(
    dst_BW: torch.Tensor, src_BW: torch.Tensor, dst_ids: torch.Tensor, src_ids: torch.Tensor
) -> None:
    """Copy row src_ids[i] of src to row dst_ids[i] of dst, for every i.

    A row is a block, or the part of a block that belongs to one layer: rows may lie apart. Few
    programs run, enough for a host link and not for the card's own memory.

    Args:
        dst_BW: int32, strides W or more and 1; on a GPU also over pinned host memory.
        src_BW: int32, as dst. The number of rows may differ. Rows read must not be written.
        dst_ids: [n] int64, none twice; not checked.
        src_ids: [n] int64; not checked.
    """
    check_dims("copy_blocks.dst", dst_BW, "BW")
    words, device = dst_BW.shape[1], dst_BW.device
    for name, rows in (("dst", dst_BW), ("src", src_BW)):
        check_tensor(f"copy_blocks.{name}", rows, (None, words), torch.int32, device)
        if rows.stride(0) < words and rows.shape[0] > 1:
            expected = f"rows at least {words} words apart"
            raise KernelArgumentError(f"copy_blocks.{name}", expected, f"strides {rows.stride()}")
    check_tensor("copy_blocks.dst_ids", dst_ids, (None,), torch.int64, device)
    check_tensor("copy_blocks.src_ids", src_ids, dst_ids.shape, torch.int64, device)
    if dst_BW.is_cuda:
        from kernels.triton import block_copy

        block_copy.copy_blocks(dst_BW, src_BW, dst_ids, src_ids)
        return
    ref.copy_blocks(dst_BW, src_BW, dst_ids, src_ids)


def _check_rotary_write_kv(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Raise unless the arguments of rotary_write_kv_ agree with each other.

    Args:
        q_TNH: queries.
        k_TKH: keys.
        v_TKH: values.
        q_weight: of the queries' norm, or None.
        k_weight: of the keys' norm, or None.
        cos_sin: [max_positions, R].
        positions: [T].
        k_cache: [B, K, P, H].
        v_cache: [B, K, P, H].
        slots: [T].

    Raises:
        KernelArgumentError: naming the first argument that does not fit.
    """
    name = "rotary_write_kv_"
    check_float(f"{name}.q", q_TNH)
    check_dims(f"{name}.q", q_TNH, "TNH")
    check_dims(f"{name}.k", k_TKH, "TKH")
    check_dims(f"{name}.cos_sin", cos_sin, "PR")
    check_dims(f"{name}.k_cache", k_cache, "BKPH")
    num_tokens, num_q_heads, head_size = q_TNH.shape
    num_k_heads = k_TKH.shape[1]
    dtype, device = q_TNH.dtype, q_TNH.device
    kv_shape = (num_tokens, num_k_heads, head_size)
    check_stride(f"{name}.q", q_TNH)
    check_tensor(f"{name}.k", k_TKH, kv_shape, dtype, device)
    check_tensor(f"{name}.v", v_TKH, kv_shape, dtype, device)
    check_tensor(f"{name}.cos_sin", cos_sin, cos_sin.shape, torch.float32, device)
    check_tensor(f"{name}.positions", positions, (num_tokens,), torch.int64, device)
    check_tensor(f"{name}.slots", slots, (num_tokens,), torch.int64, device)
    num_blocks, _, tokens_per_block, _ = cache_shape = k_cache.shape
    expected_cache = (num_blocks, num_k_heads, tokens_per_block, head_size)
    check_tensor(f"{name}.k_cache", k_cache, expected_cache, dtype, device)
    check_tensor(f"{name}.v_cache", v_cache, cache_shape, dtype, device)
    rotated = cos_sin.shape[1]
    if rotated % 2 or not 0 < rotated <= head_size:
        expected = f"an even number of columns, 2 to {head_size} (H)"
        raise KernelArgumentError(f"{name}.cos_sin", expected, f"{rotated}")
    if (q_weight is None) != (k_weight is None):
        got = "q_weight alone" if k_weight is None else "k_weight alone"
        raise KernelArgumentError(f"{name}.k_weight", "both weights or neither", got)
    if q_weight is not None and k_weight is not None:
        is_head = q_weight.shape == (head_size,)
        q_size = head_size if is_head else num_q_heads * head_size
        k_size = head_size if is_head else num_k_heads * head_size
        check_tensor(f"{name}.q_weight", q_weight, (q_size,), dtype, device)
        check_tensor(f"{name}.k_weight", k_weight, (k_size,), dtype, device)
