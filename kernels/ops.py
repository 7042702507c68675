"""The operators: each is described here, checks its arguments, and runs where its tensors are.

CUDA tensors go to Triton kernels (embedding, and products of many tokens or in float32, to torch's
own), CPU tensors to the PyTorch twins in kernels.ref. All take float32, bfloat16 and float16 and
accumulate in float32; copy_blocks takes words of any meaning. On a GPU every operator enqueues on
the current stream, waits for nothing, and can be captured in a CUDA graph; its arguments must stay
alive until that work is done. On cards of compute capability 9 or more a kernel may start before
the one before it has ended; it waits for it before it touches anything but weights.

Shape letters: T tokens, S sequences, M blocks per sequence, B blocks, P tokens per block,
N query heads, K KV heads, H head size, D hidden, F feed-forward, V vocabulary, R rotated elements
of a head.
"""

import torch

from kernels.checks import (
    KernelArgumentError,
    check_dims,
    check_float,
    check_gate_up,
    check_host,
    check_linear,
    check_rotary_write_kv,
    check_tensor,
    is_small_product,
)
from kernels.host_cache import HostCache
from kernels.ops_attention import (
    paged_decode_attention,
    paged_prefill_attention,
    paged_prefill_part,
)
from kernels.ref import activation as ref_activation
from kernels.ref import block_copy as ref_block_copy
from kernels.ref import linear as ref_linear
from kernels.ref import norm as ref_norm
from kernels.ref import rotary_write_kv as ref_rotary_write_kv
from kernels.sizes import (
    DECODE_SPLIT_TOKENS,
    MAX_SMALL_TOKENS,
    PREFILL_PART_KEYS,
    decode_workspace_bytes,
    prefill_state_bytes,
)
from kernels.workspace import DecodeWorkspace, PrefillState, decode_workspace, prefill_state

__all__ = [
    "DECODE_SPLIT_TOKENS",
    "MAX_SMALL_TOKENS",
    "PREFILL_PART_KEYS",
    "DecodeWorkspace",
    "HostCache",
    "KernelArgumentError",
    "PrefillState",
    "add_rms_norm",
    "copy_blocks",
    "decode_workspace",
    "decode_workspace_bytes",
    "embedding",
    "gelu_mul",
    "linear",
    "linear_gelu_mul",
    "linear_silu_mul",
    "paged_decode_attention",
    "paged_prefill_attention",
    "paged_prefill_part",
    "prefill_state",
    "prefill_state_bytes",
    "rms_norm",
    "rms_norm_add_",
    "rotary_write_kv_",
    "silu_mul",
]

# Triton is imported by the first call on a GPU: machines without one need not have it.
# ruff: noqa: PLC0415


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """Divide each row by its root mean square, multiply by weight + offset, round once.

    Args:
        x: [..., D], stride 1 in the last dimension; the others may be strided, as the heads of a
            fused projection are.
        weight: [D], dtype of x.
        eps: added to the mean square.
        offset: added to the weight, in float32.

    Returns:
        A new contiguous tensor, shape and dtype of x.
    """
    check_float("rms_norm.x", x)
    if x.dim() == 0:
        raise KernelArgumentError("rms_norm.x", "one dimension or more", "none")
    check_tensor("rms_norm.x", x, x.shape, x.dtype, x.device)
    check_tensor("rms_norm.weight", weight, (x.shape[-1],), x.dtype, x.device)
    if x.is_cuda:
        from kernels.triton import norm

        return norm.rms_norm(x, weight, eps, offset)
    return ref_norm.rms_norm(x, weight, eps, offset)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float = 0.0,
) -> torch.Tensor:
    """Add x to residual in place, and return the rms_norm of the sum as it is stored.

    Args:
        x: [T, D], stride 1 in the last dimension.
        residual: [T, D], dtype of x; overwritten.
        weight: [D], dtype of x.
        eps: added to the mean square.
        offset: added to the weight, in float32.

    Returns:
        A new contiguous tensor [T, D], dtype of x.
    """
    check_float("add_rms_norm.x", x)
    check_dims("add_rms_norm.x", x, "TD")
    check_tensor("add_rms_norm.x", x, x.shape, x.dtype, x.device)
    check_tensor("add_rms_norm.residual", residual, x.shape, x.dtype, x.device)
    check_tensor("add_rms_norm.weight", weight, (x.shape[1],), x.dtype, x.device)
    if x.is_cuda:
        from kernels.triton import norm

        return norm.add_rms_norm(x, residual, weight, eps, offset)
    return ref_norm.add_rms_norm(x, residual, weight, eps, offset)


def rms_norm_add_(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float = 0.0,
) -> None:
    """Add the rms_norm of x, rounded to its dtype, to residual in place.

    Args:
        x: [T, D], stride 1 in the last dimension.
        residual: [T, D], dtype of x; overwritten.
        weight: [D], dtype of x.
        eps: added to the mean square.
        offset: added to the weight, in float32.
    """
    check_float("rms_norm_add_.x", x)
    check_dims("rms_norm_add_.x", x, "TD")
    check_tensor("rms_norm_add_.x", x, x.shape, x.dtype, x.device)
    check_tensor("rms_norm_add_.residual", residual, x.shape, x.dtype, x.device)
    check_tensor("rms_norm_add_.weight", weight, (x.shape[1],), x.dtype, x.device)
    if x.is_cuda:
        from kernels.triton import norm

        norm.rms_norm_add_(x, residual, weight, eps, offset)
        return
    ref_norm.rms_norm_add_(x, residual, weight, eps, offset)


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
    check_rotary_write_kv(
        q_TNH, k_TKH, v_TKH, q_weight, k_weight, cos_sin, positions, k_cache, v_cache, slots
    )
    if host is not None:
        check_host("rotary_write_kv_.host", host, k_cache, v_cache)
    if q_TNH.is_cuda:
        from kernels.triton import rotary_write_kv

        run = rotary_write_kv.rotary_write_kv_
    else:
        run = ref_rotary_write_kv.rotary_write_kv_
    heads = (q_TNH, k_TKH, v_TKH)
    run(*heads, q_weight, k_weight, eps, cos_sin, positions, k_cache, v_cache, slots, offset, host)


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of a fused projection, rounding once.

    Args:
        gate_up_T2F: [T, 2F], F columns of gate and then F of up, stride 1 in the last dimension.

    Returns:
        A new contiguous tensor [T, F], dtype of the argument.
    """
    check_gate_up("silu_mul", gate_up_T2F)
    if gate_up_T2F.is_cuda:
        from kernels.triton import activation

        return activation.silu_mul(gate_up_T2F)
    return ref_activation.silu_mul(gate_up_T2F)


def gelu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up of a fused projection, gelu approximated by tanh, rounding once.

    Args:
        gate_up_T2F: as silu_mul's.

    Returns:
        A new contiguous tensor [T, F], dtype of the argument.
    """
    check_gate_up("gelu_mul", gate_up_T2F)
    if gate_up_T2F.is_cuda:
        from kernels.triton import activation

        return activation.gelu_mul(gate_up_T2F)
    return ref_activation.gelu_mul(gate_up_T2F)


def embedding(
    ids_T: torch.Tensor, table_VD: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Return the table's rows for these ids, times a scale if there is one.

    Args:
        ids_T: int64, 0 to V - 1.
        table_VD: on a GPU also a CUDA tensor over pinned host memory, of which only the rows asked
            for cross the link.
        scale: rounded to the dtype of the table before it multiplies.

    Returns:
        A new tensor [T, D], dtype of the table.
    """
    check_dims("embedding.table", table_VD, "VD")
    check_float("embedding.table", table_VD)
    check_tensor("embedding.ids", ids_T, (None,), torch.int64, table_VD.device)
    return ref_linear.embedding(ids_T, table_VD, scale)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    workspace: DecodeWorkspace | None = None,
) -> torch.Tensor:
    """Return x @ weight.T + bias.

    On a GPU a product of at most MAX_SMALL_TOKENS bfloat16 or float16 tokens runs in a kernel that
    reads the weight once; which kernel runs, and so the result, follows from the number of tokens,
    the sizes and the dtype, never from where the weight lies. There a token's result depends on no
    other token, and is the same in every batch of 1 to 16 tokens, of 17 to 32 and of 33 to 64.
    Sums are float32, and their order is fixed: the same call gives the same bits.

    Args:
        x: [..., in], stride 1 in the last dimension where few tokens run on a GPU.
        weight: [out, in], dtype of x; on a GPU also a CUDA tensor over pinned host memory.
        bias: [out], dtype of x, or None.
        workspace: from decode_workspace; its counters are used. Allocated if None. Read by no other
            call until this one is done. The CPU needs none.

    Returns:
        A new tensor [..., out], dtype of x.
    """
    check_linear("linear", x, weight, bias)
    if is_small_product(x, weight):
        from kernels.triton import small_linear

        counters = None if workspace is None else workspace.counters
        rows = x.reshape(-1, x.shape[-1])
        return small_linear.linear(rows, weight, bias, counters).view(*x.shape[:-1], -1)
    return ref_linear.linear(x, weight, bias)


def linear_silu_mul(
    x: torch.Tensor, weight_2FD: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return silu_mul(linear(x, weight, bias)), in one kernel where linear has its own.

    The product is rounded before the activation, as linear rounds it. What linear says of batches
    and of the weight's place holds here too.

    Args:
        x: [..., D], as linear's.
        weight_2FD: F rows of gate and then F of up, as linear's.
        bias: [2F], dtype of x, or None.

    Returns:
        A new tensor [..., F], dtype of x.
    """
    rows = _gated_rows("linear_silu_mul", x, weight_2FD, bias)
    if rows is not None:
        from kernels.triton import small_linear

        return small_linear.linear_silu_mul(rows, weight_2FD, bias).view(*x.shape[:-1], -1)
    product = ref_linear.linear(x, weight_2FD, bias)
    gated = silu_mul(product.reshape(-1, product.shape[-1]))
    return gated.view(*x.shape[:-1], gated.shape[-1])


def linear_gelu_mul(
    x: torch.Tensor, weight_2FD: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return gelu_mul(linear(x, weight, bias)), in one kernel where linear has its own.

    All else is as linear_silu_mul says.

    Args:
        x: [..., D], as linear's.
        weight_2FD: F rows of gate and then F of up, as linear's.
        bias: [2F], dtype of x, or None.

    Returns:
        A new tensor [..., F], dtype of x.
    """
    rows = _gated_rows("linear_gelu_mul", x, weight_2FD, bias)
    if rows is not None:
        from kernels.triton import small_linear

        return small_linear.linear_gelu_mul(rows, weight_2FD, bias).view(*x.shape[:-1], -1)
    product = ref_linear.linear(x, weight_2FD, bias)
    gated = gelu_mul(product.reshape(-1, product.shape[-1]))
    return gated.view(*x.shape[:-1], gated.shape[-1])


def _gated_rows(
    name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """Check a gated product; return its tokens as rows where the kernel for few tokens runs."""
    check_linear(name, x, weight, bias)
    if weight.shape[0] % 2:
        raise KernelArgumentError(f"{name}.weight", "an even number of rows", f"{weight.shape[0]}")
    return x.reshape(-1, x.shape[-1]) if is_small_product(x, weight) else None


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
    ref_block_copy.copy_blocks(dst_BW, src_BW, dst_ids, src_ids)
