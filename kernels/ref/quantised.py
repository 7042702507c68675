"""Twins of operators over quantised weights; kernels.arguments.Quantised says what they are."""

import torch

from kernels.arguments import QUANTISED_TILE, Joined, Quantised
from kernels.ref import linear as plain

Weight = torch.Tensor | Quantised | Joined
"""What products take: a plain matrix, a quantised one, or several below each other."""

_CHUNK_BYTES = 32 * 2**20
"""Float32 weights that are restored at a time."""


def _values_of(weight: Quantised, ids_T: torch.Tensor) -> torch.Tensor:
    """Return the values of some rows, uint8 [T, K]."""
    num_columns, tiles = weight.num_columns, -(-weight.num_columns // QUANTISED_TILE)
    if weight.bits == 8:
        return weight.values[ids_T, :num_columns]
    rows = weight.values[ids_T].view(-1, tiles, 32)
    found = torch.stack([rows & 15, rows >> 4], 2)
    if weight.high is not None:
        bits = weight.bits - 4
        high = weight.high[ids_T].view(-1, tiles, 1, 1, 8 * bits)
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=high.device)
        above = high >> shifts.view(2, -1, 1) & 2**bits - 1
        found |= above.reshape(found.shape) << 4
    return found.view(-1, tiles * QUANTISED_TILE)[:, :num_columns]


def _spread(each: torch.Tensor, size: int, num_columns: int) -> torch.Tensor:
    """Return what belongs to groups of so many columns, for every column, float32."""
    if each.shape[1] == 1:
        return each.float()
    return each.float().repeat_interleave(size, 1)[:, :num_columns]


def rows(weight: Quantised, ids_T: torch.Tensor) -> torch.Tensor:
    """Twin of kernels.ops.quantised.rows."""
    num_columns = weight.num_columns
    values = _values_of(weight, ids_T)
    if weight.kind == "table4":
        assert weight.table is not None
        found = weight.table[values.int()]
    elif weight.kind == "float8_e4m3fn":
        found = values.contiguous().view(torch.float8_e4m3fn).float()
    else:
        found = values.float()
        if weight.zero is not None:
            found -= _spread(weight.zero[ids_T], weight.group, num_columns)
        elif weight.offset:
            found -= weight.offset
    scale = _spread(weight.scale[ids_T], weight.group, num_columns)
    if weight.subscale is not None:
        scale = scale * _spread(weight.subscale[ids_T], weight.subgroup, num_columns)
    found *= scale
    if weight.low is not None:
        low = _spread(weight.low[ids_T], weight.group, num_columns)
        if weight.sublow is not None:
            low = low * _spread(weight.sublow[ids_T], weight.subgroup, num_columns)
        found -= low
    return found.to(weight.dtype)


def restore(weight: Quantised, out: torch.Tensor | None = None) -> torch.Tensor:
    """Twin of kernels.ops.quantised.restore."""
    num_rows, num_columns = weight.shape
    if out is None:
        out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.values.device)
    step = max(1, _CHUNK_BYTES // (4 * num_columns))
    for row in range(0, num_rows, step):
        ids = torch.arange(row, min(num_rows, row + step), device=out.device)
        out[row : row + step] = rows(weight, ids)
    return out


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Twin of kernels.ops.quantised.linear."""
    if isinstance(weight, Joined):
        product = torch.cat([linear(x, part) for part in weight.parts], -1)
        return product if bias is None else product + bias
    if isinstance(weight, torch.Tensor):
        return plain.linear(x, weight, bias)
    if weight.columns is not None:
        x = x.index_select(-1, weight.columns)
    return plain.linear(x, restore(weight, weight.scratch), bias)


def linear_silu_mul(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Twin of kernels.ops.quantised.linear_silu_mul."""
    product = linear(x, weight, bias)
    gated = plain.silu_mul(product.reshape(-1, product.shape[-1]))
    return gated.view(*x.shape[:-1], gated.shape[-1])


def linear_gelu_mul(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Twin of kernels.ops.quantised.linear_gelu_mul."""
    product = linear(x, weight, bias)
    gated = plain.gelu_mul(product.reshape(-1, product.shape[-1]))
    return gated.view(*x.shape[:-1], gated.shape[-1])


def embedding(ids_T: torch.Tensor, weight: Quantised, scale: float | None = None) -> torch.Tensor:
    """Twin of kernels.ops.quantised.embedding."""
    found = rows(weight, ids_T)
    return found if scale is None else found.mul_(torch.tensor(scale, dtype=found.dtype).item())
