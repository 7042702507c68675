"""Gated activation. T tokens, F feed-forward."""

import torch
import triton
import triton.language as tl

_BLOCK_F = 1024


@triton.jit
def _silu_mul_kernel(gate_up, out, stride_row, F: tl.constexpr, BLOCK_F: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = columns < F
    gate_at = gate_up + row * stride_row + columns
    gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_at + F, mask=mask, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * F + columns, product.to(out.dtype.element_ty), mask=mask)


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """Launch kernels.ops.silu_mul."""
    num_rows, width = gate_up_T2F.shape
    size = width // 2
    out = torch.empty((num_rows, size), dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    if num_rows == 0:
        return out
    _silu_mul_kernel[(num_rows, triton.cdiv(size, _BLOCK_F))](
        gate_up_T2F, out, gate_up_T2F.stride(0), F=size, BLOCK_F=_BLOCK_F, num_warps=4
    )
    return out
