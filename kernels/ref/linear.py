"""Twins of the products with weights; a GPU runs these too, with torch's own kernels."""

import torch
from torch.nn import functional


def embedding(ids_T: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
    """Twin of kernels.ops.embedding."""
    return table_VD.index_select(0, ids_T)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Twin of kernels.ops.linear."""
    return functional.linear(x, weight, bias)
