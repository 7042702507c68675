"""Gated activations. T tokens, F feed-forward."""

import functools

import torch
import triton
import triton.language as tl

from kernels.triton.launch import Launcher

_BLOCK_F = 1024


@triton.jit
def gated(gate, up, IS_GELU: tl.constexpr):
    """Return silu(gate) * up, or gelu(gate) * up in its approximation by tanh; all float32."""
    inner = gate
    if IS_GELU:
        # (1 + tanh(z)) / 2 is the logistic function of 2 z.
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-inner)) * up


@triton.jit
def clamped_swiglu(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Return gate * sigmoid(ALPHA * gate) * (up + 1), both clamped first; all float32."""
    gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)


@triton.jit
def _gated_kernel(
    gate_up, out, stride_row, F: tl.constexpr, BLOCK_F: tl.constexpr, IS_GELU: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = columns < F
    gate_at = gate_up + row * stride_row + columns
    gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_at + F, mask=mask, other=0.0).to(tl.float32)
    product = gated(gate, up, IS_GELU)
    tl.store(out + row * F + columns, product.to(out.dtype.element_ty), mask=mask)


@functools.cache
def _launcher(size: int, device: torch.device, *, is_gelu: bool) -> Launcher:
    constants = {"F": size, "BLOCK_F": _BLOCK_F, "IS_GELU": is_gelu}
    return Launcher(_gated_kernel, device, **constants, num_warps=4)


def gated_mul(gate_up_T2F: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    """Launch kernels.ops.linear.gated_mul."""
    num_rows, width = gate_up_T2F.shape
    size = width // 2
    out = gate_up_T2F.new_empty((num_rows, size))
    if num_rows == 0:
        return out
    launch, grid = _launcher(size, out.device, is_gelu=is_gelu), (num_rows, -(-size // _BLOCK_F), 1)
    launch(grid, (gate_up_T2F, out), (), (), gate_up_T2F.stride()[:1])
    return out
