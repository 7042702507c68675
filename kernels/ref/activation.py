"""Twins of the gated activations. T tokens, F feed-forward."""

import torch
from torch.nn import functional


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """Twin of kernels.ops.silu_mul."""
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    return (functional.silu(gate.float()) * up.float()).to(gate_up_T2F.dtype)


def gelu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """Twin of kernels.ops.gelu_mul."""
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    gated = functional.gelu(gate.float(), approximate="tanh")
    return (gated * up.float()).to(gate_up_T2F.dtype)
