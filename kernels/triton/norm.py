"""Normalisations. Shape letters: T tokens, N heads, D the normalised dimension."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton.dependent import launch_options, release, wait
from kernels.triton.launch import Launcher, power_of_2

_ELEMENTS_PER_PROGRAM = 2048


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x,
    weight,
    out,
    num_rows,
    inner,
    stride_outer,
    stride_inner,
    eps,
    OFFSET: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_D)
    weights = tl.load(weight + columns, mask=columns < D, other=0.0).to(tl.float32) + OFFSET
    if OVERLAPS:
        release()
        wait()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (rows < num_rows)[:, None] & (columns < D)[None, :]
    starts = (rows // inner) * stride_outer + (rows % inner) * stride_inner
    values = tl.load(x + starts[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / D + eps)
    normed = values * scale[:, None] * weights[None, :]
    targets = out + rows[:, None] * D + columns[None, :]
    tl.store(targets, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    stride_x,
    stride_residual,
    eps,
    OFFSET: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    mask = columns < D
    weights = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32) + OFFSET
    if OVERLAPS:
        release()
        wait()
    added = tl.load(x + row * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    sums_at = residual + row * stride_residual + columns
    sums = added + tl.load(sums_at, mask=mask, other=0.0).to(tl.float32)
    # The norm is taken of what is stored, so that a later reader of residual sees its input.
    rounded = sums.to(residual.dtype.element_ty)
    tl.store(sums_at, rounded, mask=mask)
    values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / D + eps)
    normed = values * scale * weights
    tl.store(out + row * D + columns, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_add_kernel(
    x,
    residual,
    weight,
    stride_x,
    stride_residual,
    eps,
    OFFSET: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    mask = columns < D
    weights = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32) + OFFSET
    if OVERLAPS:
        release()
        wait()
    values = tl.load(x + row * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    sums_at = residual + row * stride_residual + columns
    before = tl.load(sums_at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / D + eps)
    # Rounded as the norm alone would be, so that the result is that of both operators.
    normed = (values * scale * weights).to(residual.dtype.element_ty).to(tl.float32)
    tl.store(sums_at, (before + normed).to(residual.dtype.element_ty), mask=mask)


@functools.cache
def _launcher(
    kernel: Any, size: int, offset: float, device: torch.device, **options: Any
) -> Launcher:
    """Return what launches a kernel for rows of this size, several to a program with ROWS."""
    block_d = power_of_2(size)
    elements = block_d * options.get("ROWS", 1)
    # At least 16 elements of a program's tile for a thread, within 1 to 16 warps.
    warps = max(1, min(16, elements // 512))
    sizes = {"OFFSET": offset, "D": size, "BLOCK_D": block_d, **options}
    return Launcher(kernel, device, **sizes, num_warps=warps, **launch_options(device))


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """Launch kernels.ops.norm.rms_norm."""
    size = x.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = x if x.dim() <= 3 else x.reshape(-1, *x.shape[-2:])
    num_rows = rows.numel() // size
    if num_rows == 0:
        return out
    inner = rows.shape[1] if rows.dim() == 3 else 1
    strides = rows.stride(0) if rows.dim() > 1 else 0, rows.stride(1) if rows.dim() == 3 else 0
    # A function of the size alone, so that a row's sum has the same order in every batch.
    each = max(1, min(16, _ELEMENTS_PER_PROGRAM // power_of_2(size)))
    launch = _launcher(_rms_norm_kernel, size, offset, x.device, ROWS=each)
    grid = -(-num_rows // each), 1, 1
    launch(grid, (rows, weight, out), (), (num_rows,), (inner, *strides, float(eps)))
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float = 0.0,
) -> torch.Tensor:
    """Launch kernels.ops.norm.add_rms_norm."""
    num_rows, size = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if num_rows == 0:
        return out
    launch = _launcher(_add_rms_norm_kernel, size, offset, x.device)
    numbers = x.stride()[0], residual.stride()[0], float(eps)
    launch((num_rows, 1, 1), (x, residual, weight, out), (), (), numbers)
    return out


def rms_norm_add_(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float = 0.0,
) -> None:
    """Launch kernels.ops.norm.rms_norm_add_."""
    num_rows, size = x.shape
    if num_rows == 0:
        return
    launch = _launcher(_rms_norm_add_kernel, size, offset, x.device)
    numbers = x.stride()[0], residual.stride()[0], float(eps)
    launch((num_rows, 1, 1), (x, residual, weight), (), (), numbers)
