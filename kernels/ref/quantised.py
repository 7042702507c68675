"""Twins of operators over quantised weights; kernels.arguments.Quantised says what they are."""

import itertools

import torch

from kernels.arguments import QUANTISED_ROWS, QUANTISED_TILE, Joined, Quantised
from kernels.ref import linear as plain

Weight = torch.Tensor | Quantised | Joined
"""What products take: a plain matrix, a quantised one, or several below each other."""

_CHUNK_BYTES = 2**20
"""Float32 weights that are restored at a time: so many stay in a core's cache."""
_CHUNK_IDS = 256
"""Rows that are restored at a time where any are asked for, each with 15 others."""
_COLUMNS = (2, 2, 2, 4, 2)
"""The columns of a tile: h, q, n, t and s, in the letters of Quantised."""
_LETTERS = "ughqnts"
_PLACES = torch.arange(1024).view(2, 8, *_COLUMNS)
"""The elements of a tile, by those of _LETTERS."""
_FOUR = tuple(itertools.product((0, 1), (0, 1)))
"""Values of q and n."""


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


def _values_of(weight: Quantised, blocks: slice | torch.Tensor) -> torch.Tensor:
    """Return the values of some blocks of 16 rows, uint8 [16 * blocks, K].

    Values of neighbouring columns, s, are moved together, in the low two bytes of a word.
    """
    bits, tiles = weight.bits, -(-weight.num_columns // QUANTISED_TILE)

    def words(each: torch.Tensor, dtype: torch.dtype, letters: str) -> torch.Tensor:
        """Return words with these letters as dimensions, in the order u, g, tiles, h, q, n, t."""
        sizes = (_PLACES.shape[_LETTERS.index(letter)] for letter in letters)
        found = each.view(dtype).view(-1, tiles, *sizes)[blocks]
        order = [2 + letters.index(letter) for letter in _LETTERS if letter in letters]
        order.insert(letters.count("u") + 1, 1)
        return found.permute(0, *order).contiguous()

    def pairs(word: torch.Tensor, shift: int, mask: int) -> torch.Tensor:
        """Return the bits of two columns at `shift` and 16 further, in bytes."""
        found = word >> shift
        found &= mask << 16 | mask
        found |= found >> 8
        return found.to(torch.int16)

    if bits == 8:
        values = words(weight.values, torch.int16, "hgtuqn")
    else:
        low = words(weight.values, torch.int32, "gthu")
        values = torch.empty((*low.shape[:5], 2, 2, 4), dtype=torch.int16, device=low.device)
        for q, n in _FOUR:
            values[..., q, n, :] = pairs(low, 8 * q + 4 * n, 15)
    if weight.high is not None and bits == 6:
        high = words(weight.high, torch.int32, "gth")
        for u, (q, n) in itertools.product((0, 1), _FOUR):
            values[:, u, ..., q, n, :] |= pairs(high, 8 * u + 4 * q + 2 * n, 3) << 4
    elif weight.high is not None:
        high = words(weight.high, torch.int32, "gt")
        for u, h, (q, n) in itertools.product((0, 1), (0, 1), _FOUR):
            values[:, u, :, :, h, q, n] |= pairs(high, 8 * h + 4 * u + 2 * q + n, 1) << 4
    found = values.view(torch.uint8).view(-1, tiles * QUANTISED_TILE)
    return found[:, : weight.num_columns]


def _of_groups(each: torch.Tensor, blocks: slice | torch.Tensor) -> torch.Tensor:
    """Return what belongs to the groups of some blocks of 16 rows, float32 [16 * blocks, G]."""
    found = each.view(-1, each.shape[1], 8, 2)[blocks].permute(0, 3, 2, 1)
    return found.reshape(-1, each.shape[1]).float()


def _spread(each: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """Return what belongs to groups of so many columns, once for each of `count` columns."""
    return each.repeat_interleave(size, 1)[:, :count]


def _grouped(
    found: torch.Tensor, each: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix and what belongs to its groups as two that can be multiplied."""
    rows, num_columns = found.shape
    if num_columns % size:
        each, size = _spread(each, size, num_columns), 1
    return found.view(rows, -1, size), each.unsqueeze(-1)


def _restored(weight: Quantised, blocks: slice | torch.Tensor) -> torch.Tensor:
    """Return some blocks of 16 rows, float32 [16 * blocks, K]."""
    num_columns, values = weight.num_columns, _values_of(weight, blocks)

    def scales(each: torch.Tensor, of_subgroups: torch.Tensor | None) -> tuple[torch.Tensor, int]:
        """Multiply what belongs to groups with what belongs to subgroups; return its groups too."""
        found, size, subsize = _of_groups(each, blocks), weight.group, weight.subgroup
        if each.dtype == torch.uint8:
            found = torch.ldexp(torch.ones_like(found), found.int() - 127)
        if of_subgroups is None:
            return found, size
        others = _of_groups(of_subgroups, blocks)
        if size % subsize:
            both = _spread(found, size, num_columns), _spread(others, subsize, num_columns)
            return both[0] * both[1], 1
        return _spread(found, size // subsize, others.shape[1]) * others, subsize

    if weight.kind == "table4":
        assert weight.table is not None
        found = weight.table[values.int()]
    elif weight.kind == "float8_e4m3fn":
        found = values.contiguous().view(torch.float8_e4m3fn).float()
    else:
        found = values.float()
        if weight.zero is not None:
            view, zero = _grouped(found, _of_groups(weight.zero, blocks), weight.group)
            view -= zero
        elif weight.offset:
            found -= weight.offset
    view, scale = _grouped(found, *scales(weight.scale, weight.subscale))
    view *= scale
    if weight.low is not None:
        view, low = _grouped(found, *scales(weight.low, weight.sublow))
        view -= low
    return found


def rows(weight: Quantised, ids_T: torch.Tensor) -> torch.Tensor:
    """Twin of kernels.ops.quantised.rows."""
    out = torch.empty(
        (len(ids_T), weight.num_columns), dtype=weight.dtype, device=weight.values.device
    )
    for at in range(0, len(ids_T), _CHUNK_IDS):
        ids = ids_T[at : at + _CHUNK_IDS]
        blocks, place = torch.unique(ids // QUANTISED_ROWS, return_inverse=True)
        every = _restored(weight, blocks).view(-1, QUANTISED_ROWS, weight.num_columns)
        out[at : at + _CHUNK_IDS] = every[place, ids % QUANTISED_ROWS]
    return out


def restore(weight: Quantised, out: torch.Tensor | None = None) -> torch.Tensor:
    """Twin of kernels.ops.quantised.restore."""
    num_rows, num_columns = weight.shape
    if out is None:
        out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.values.device)
    step = max(1, _CHUNK_BYTES // (4 * QUANTISED_ROWS * num_columns))
    for block in range(0, -(-num_rows // QUANTISED_ROWS), step):
        part = out[block * QUANTISED_ROWS : (block + step) * QUANTISED_ROWS]
        part.copy_(_restored(weight, slice(block, block + step))[: len(part)])
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


def linear_gated_mul(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, *, is_gelu: bool = False
) -> torch.Tensor:
    """Twin of kernels.ops.quantised.linear_gated_mul."""
    product = linear(x, weight, bias)
    gated = plain.gated_mul(product.reshape(-1, product.shape[-1]), is_gelu=is_gelu)
    return gated.view(*x.shape[:-1], gated.shape[-1])


def embedding(ids_T: torch.Tensor, weight: Quantised, scale: float | None = None) -> torch.Tensor:
    """Twin of kernels.ops.quantised.embedding."""
    found = rows(weight, ids_T)
    return found if scale is None else found.mul_(torch.tensor(scale, dtype=found.dtype).item())
