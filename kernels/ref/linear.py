"""Twins of the products with weights; a GPU runs these too, with torch's own kernels."""

import torch
from torch.nn import functional

from kernels.ref.activation import gelu_mul, silu_mul


def embedding(
    ids_T: torch.Tensor, table_VD: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Twin of kernels.ops.embedding."""
    rows = table_VD.index_select(0, ids_T)
    if scale is None:
        return rows
    return rows.mul_(torch.tensor(scale, dtype=table_VD.dtype).item())


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Twin of kernels.ops.linear."""
    return functional.linear(x, weight, bias)


def linear_silu_mul(
    x: torch.Tensor, weight_2FD: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Twin of kernels.ops.linear_silu_mul."""
    product = linear(x, weight_2FD, bias)
    gated = silu_mul(product.reshape(-1, product.shape[-1]))
    return gated.view(*x.shape[:-1], gated.shape[-1])


def linear_gelu_mul(
    x: torch.Tensor, weight_2FD: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Twin of kernels.ops.linear_gelu_mul."""
    product = linear(x, weight_2FD, bias)
    gated = gelu_mul(product.reshape(-1, product.shape[-1]))
    return gated.view(*x.shape[:-1], gated.shape[-1])
