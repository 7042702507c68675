"""Twins of the normalisations. Shape letters: T tokens, D hidden."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Twin of kernels.ops.rms_norm."""
    x_f32 = x.float()
    scale = torch.rsqrt(x_f32.square().mean(-1, keepdim=True) + eps)
    return (x_f32 * scale * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Twin of kernels.ops.add_rms_norm."""
    residual += x
    return rms_norm(residual, weight, eps)


def rms_norm_add_(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    """Twin of kernels.ops.rms_norm_add_."""
    residual += rms_norm(x, weight, eps)
