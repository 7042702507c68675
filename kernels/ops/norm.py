"""Norms of rows.

Shape letters: T tokens, D hidden.
"""

import torch

from kernels.ops.checks import (
    KernelArgumentError,
    check_dims,
    check_float,
    check_stride,
    check_tensor,
)
from kernels.ref import norm as ref

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
    check_stride("rms_norm.x", x)
    check_tensor("rms_norm.weight", weight, (x.shape[-1],), x.dtype, x.device)
    if x.is_cuda:
        from kernels.triton import norm

        return norm.rms_norm(x, weight, eps, offset)
    return ref.rms_norm(x, weight, eps, offset)


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
    _check_added("add_rms_norm", x, residual, weight)
    if x.is_cuda:
        from kernels.triton import norm

        return norm.add_rms_norm(x, residual, weight, eps, offset)
    return ref.add_rms_norm(x, residual, weight, eps, offset)


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
    _check_added("rms_norm_add_", x, residual, weight)
    if x.is_cuda:
        from kernels.triton import norm

        norm.rms_norm_add_(x, residual, weight, eps, offset)
        return
    ref.rms_norm_add_(x, residual, weight, eps, offset)


def _check_added(name: str, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise unless the arguments of a norm beside a sum agree with each other."""
    check_float(f"{name}.x", x)
    check_dims(f"{name}.x", x, "TD")
    check_stride(f"{name}.x", x)
    check_tensor(f"{name}.residual", residual, x.shape, x.dtype, x.device)
    check_tensor(f"{name}.weight", weight, (x.shape[1],), x.dtype, x.device)
