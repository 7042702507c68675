"""Twins of products with weights and of gates; a GPU runs products too, with torch's kernels."""

import torch
from torch.nn import functional


def gated_mul(gate_up_T2F: torch.Tensor, *, is_gelu: bool = False) -> torch.Tensor:
    """Twin of kernels.ops.linear.gated_mul."""
    gate, up = gate_up_T2F.float().chunk(2, dim=-1)
    gated = functional.gelu(gate, approximate="tanh") if is_gelu else functional.silu(gate)
    return (gated * up).to(gate_up_T2F.dtype)


def embedding(
    ids_T: torch.Tensor, table_VD: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Twin of kernels.ops.linear.embedding."""
    rows = table_VD.index_select(0, ids_T)
    if scale is None:
        return rows
    return rows.mul_(torch.tensor(scale, dtype=table_VD.dtype).item())


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Twin of kernels.ops.linear.linear."""
    return functional.linear(x, weight, bias)


def linear_gated_mul(
    x: torch.Tensor,
    weight_2FD: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_gelu: bool = False,
) -> torch.Tensor:
    """Twin of kernels.ops.linear.linear_gated_mul."""
    product = linear(x, weight_2FD, bias)
    gated = gated_mul(product.reshape(-1, product.shape[-1]), is_gelu=is_gelu)
    return gated.view(*x.shape[:-1], gated.shape[-1])
