"""Twins of operators over quantised weights; kernels.arguments.Quantised says what they are."""

import torch

from kernels.arguments import QUANTISED_ROWS, QUANTISED_TILE, Joined, Quantised
from kernels.ref import linear as plain

Weight = torch.Tensor | Quantised | Joined
"""What products take: a plain matrix, a quantised one, or several below each other."""

_CHUNK_BYTES = 32 * 2**20
"""Float32 weights that are restored at a time."""
_COLUMNS = (2, 2, 2, 4, 2)
"""The columns of a tile: h, q, n, t and s, in the letters of Quantised."""
_LETTERS = "ughqnts"
_PLACES = torch.arange(1024).view(2, 8, *_COLUMNS)
"""The elements of a tile, by those of _LETTERS."""


def pack(values_NK: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Twin of kernels.ops.quantised.pack."""
    rows, columns = values_NK.shape
    rest = -columns % QUANTISED_TILE, -rows % QUANTISED_ROWS
    if any(rest):
        values_NK = torch.nn.functional.pad(values_NK, (0, rest[0], 0, rest[1]))
    rows = values_NK.shape[0]
    # Blocks of 16 rows, tiles of a block, and the elements of a tile.
    tiles = values_NK.reshape(rows // 16, 16, -1, 64).transpose(1, 2).flatten(2)

    def in_order(letters: str) -> torch.Tensor:
        """Return the values of each tile with these letters as dimensions, the last one inmost."""
        places = _PLACES.permute(*(_LETTERS.index(letter) for letter in letters)).flatten()
        return tiles.gather(2, places.to(tiles.device).expand(*tiles.shape))

    if bits == 8:
        return in_order("hgtuqns").view(rows, -1), None
    first, second = in_order("ngthusq").chunk(2, 2)
    low = first & 15 | second << 4
    if bits == 4:
        return low.view(rows, -1), None
    letters, count = ("uqngtsh", 8) if bits == 5 else ("qngthsu", 4)
    high = torch.zeros_like(low[..., : 128 * (bits - 4)])
    for at, each in enumerate((in_order(letters) >> 4).chunk(count, 2)):
        high |= each << at * (8 // count)
    return low.view(rows, -1), high.view(rows, -1)


def pack_groups(each_NG: torch.Tensor) -> torch.Tensor:
    """Twin of kernels.ops.quantised.pack_groups."""
    rows, groups = each_NG.shape
    if rest := -rows % QUANTISED_ROWS:
        each_NG = torch.cat([each_NG, each_NG.new_zeros((rest, groups))])
    return each_NG.reshape(-1, 2, 8, groups).permute(0, 3, 2, 1).reshape(-1, groups)


def _values_of(weight: Quantised, ids_T: torch.Tensor) -> torch.Tensor:
    """Return the values of some rows, uint8 [T, K]."""
    block, g, u = ids_T // 16, ids_T % 8, ids_T % 16 // 8
    tiles = -(-weight.num_columns // QUANTISED_TILE)

    def of_columns(each: torch.Tensor, at: torch.Tensor, step: int) -> torch.Tensor:
        """Return bytes of a tile's columns, from where they are where u is 0, u steps further."""
        places = at.to(ids_T.device) + u.view(-1, 1, 1) * step
        return each.gather(2, places.expand(-1, tiles, -1))

    h, q, n, t, s = torch.meshgrid(*map(torch.arange, _COLUMNS), indexing="ij")
    if weight.bits == 8:
        every = weight.values.view(-1, tiles, 2, 8, 64)[block, :, :, g].flatten(2)
        values = of_columns(every, (64 * h + 16 * t + 4 * q + 2 * n + s).view(-1), 8)
    else:
        every = weight.values.view(-1, tiles, 8, 64)[block, :, g]
        every = torch.cat([every & 15, every >> 4], 2)
        values = of_columns(every, (64 * n + 16 * t + 8 * h + 2 * s + q).view(-1), 4)
    if weight.high is not None:
        every = weight.high.view(-1, tiles, 8, 16 * (weight.bits - 4))[block, :, g]
        if weight.bits == 5:
            found = of_columns(every, (4 * t + 2 * s + h).view(-1), 0)
            shift = (2 * q + n).view(-1).to(ids_T.device) + u.view(-1, 1, 1) * 4
        else:
            found = of_columns(every, (8 * t + 4 * h + 2 * s).view(-1), 1)
            shift = (4 * q + 2 * n).view(-1).to(ids_T.device)
        values |= (found >> shift.to(torch.uint8) & 2 ** (weight.bits - 4) - 1) << 4
    return values.view(len(ids_T), -1)[:, : weight.num_columns]


def _of_rows(each: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
    """Return what belongs to the groups of some rows, [T, G]."""
    every = each.view(-1, each.shape[1], 8, 2)
    return every[ids_T // 16, :, ids_T % 8, ids_T % 16 // 8]


def _spread(each: torch.Tensor, size: int, num_columns: int) -> torch.Tensor:
    """Return what belongs to groups of so many columns, for every column, float32."""
    if each.shape[1] == 1:
        return each.float()
    return each.float().repeat_interleave(size, 1)[:, :num_columns]


def rows(weight: Quantised, ids_T: torch.Tensor) -> torch.Tensor:
    """Twin of kernels.ops.quantised.rows."""

    def spread(each: torch.Tensor, size: int) -> torch.Tensor:
        return _spread(_of_rows(each, ids_T), size, weight.num_columns)

    values = _values_of(weight, ids_T)
    if weight.kind == "table4":
        assert weight.table is not None
        found = weight.table[values.int()]
    elif weight.kind == "float8_e4m3fn":
        found = values.contiguous().view(torch.float8_e4m3fn).float()
    else:
        found = values.float()
        if weight.zero is not None:
            found -= spread(weight.zero, weight.group)
        elif weight.offset:
            found -= weight.offset
    scale = spread(weight.scale, weight.group)
    if weight.scale.dtype == torch.uint8:
        scale = torch.ldexp(torch.ones_like(scale), scale.int() - 127)
    if weight.subscale is not None:
        scale = scale * spread(weight.subscale, weight.subgroup)
    found *= scale
    if weight.low is not None:
        low = spread(weight.low, weight.group)
        if weight.sublow is not None:
            low = low * spread(weight.sublow, weight.subgroup)
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
