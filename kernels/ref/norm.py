"""Twins of the normalisations. Shape letters: T tokens, D hidden."""

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """Twin of kernels.ops.norm.rms_norm."""
    x_f32 = x.float()
    scale = torch.rsqrt(x_f32.square().mean(-1, keepdim=True) + eps)
    return (x_f32 * scale * (weight.float() + offset)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float = 0.0,
) -> torch.Tensor:
    """Twin of kernels.ops.norm.add_rms_norm."""
    residual += x
    return rms_norm(residual, weight, eps, offset)


def rms_norm_add_(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float = 0.0,
) -> None:
    """Twin of kernels.ops.norm.rms_norm_add_."""
    residual += rms_norm(x, weight, eps, offset)
