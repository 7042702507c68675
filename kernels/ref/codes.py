"""Twins of operators over weights in codes; kernels.arguments.Codes says what codes are.

T tokens, N rows, K columns, G groups of 16 rows. Every function works alike on the CPU and on a
GPU, a few rows at a time: 8 rows g are one of the two registers of a pair, A or B.
"""

import torch

from kernels.arguments import Codes, Escapes, TooManyEscapesError, empty_codes
from kernels.ref import linear as plain
from kernels.sizes import pack_chunk_rows

_BOTH = 0x10001
"""Puts the same into both halves of a word of 32 bits."""
_SIGN_MANTISSA_BOTH = 0x807F807F - 2**32
"""Bits 15 and 6 to 0 of both halves, as int32."""
_UPPER_BYTES, _LOWER_BYTES = 0xFF00FF00 - 2**32, 0x00FF00FF
"""Of each half, as int32."""
_OTHER = 0x7F80
"""The bits of 16 that hold the other register's sign and mantissa, its bytes swapped."""
_ESCAPE = 15
_CHUNK_WEIGHTS = 2**18
"""Weights that are restored at a time: so many stay in a core's cache."""
_CHUNK_IDS = 256
"""Rows that are restored at a time where any are asked for, each with 15 others."""


def pack(weight: torch.Tensor) -> Codes:
    """Twin of kernels.ops.codes.pack."""
    codes = empty_codes(weight.shape[0], weight.shape[1], weight.device)
    escapes = pack_into(weight, codes)
    if not escapes.fits(codes.capacity):
        raise TooManyEscapesError(escapes, codes.capacity)
    return codes


def pack_into(weight: torch.Tensor, codes: Codes) -> Escapes:
    """Twin of kernels.ops.codes.pack_into."""
    (num_rows, num_columns), escapes = codes.shape, Escapes(0, 0)
    step = pack_chunk_rows(num_columns)
    for row in range(0, num_rows, step):
        bits = weight[row : row + step].view(torch.int16)
        found = _pack_chunk(bits, codes, row, escapes.total)
        escapes = Escapes(escapes.total + found.total, max(escapes.most, found.most))
    codes.table[escapes.total :] = 0
    return escapes


def _pack_chunk(bits_NK: torch.Tensor, codes: Codes, row: int, before: int) -> Escapes:
    """Pack rows unless their escapes do not fit; either way return how many there are."""
    num_rows, num_columns = bits_NK.shape
    exponents = (bits_NK >> 7).to(torch.uint8)
    first_N, escapes_N = _windows(exponents)
    escapes_G = escapes_N.view(-1, 16).sum(1)
    escapes = Escapes(*torch.stack([escapes_G.sum(), escapes_G.max()]).tolist())
    if not escapes.fits(codes.capacity - before):
        return escapes
    group, stop = row // 16, (row + num_rows) // 16
    offsets_G = escapes_G.cumsum(0) - escapes_G + before
    codes.first[row : row + num_rows] = first_N
    codes.offsets[group:stop] = offsets_G

    # Below the window the difference wraps around to 15 or more.
    code = exponents.sub_(first_N.unsqueeze(1)).clamp_(max=_ESCAPE)
    kept = bits_NK.clone(memory_format=torch.contiguous_format)
    at = (code == _ESCAPE).view(-1).nonzero().view(-1)
    numbers = torch.arange(before, before + escapes.total, device=at.device)
    numbers -= offsets_G[at // (16 * num_columns)]
    codes.table[before : before + escapes.total] = kept.view(-1)[at]
    kept.view(-1)[at] = ((numbers & 0x80) << 8 | numbers & 0x7F).to(torch.int16)

    columns = (-1, 2, 8, num_columns // 64, 2, 2, 2, 4, 2)
    first, second = kept.view(columns).unbind(1)
    halves = first ^ ((first ^ _swapped(second)) & _OTHER)  # [G, g, tile, h, j, p, t, s]
    _halves(codes)[group:stop] = halves.permute(0, 2, 3, 1, 6, 4, 5, 7)
    first, second = code.view(columns).unbind(1)
    nibbles = first | second << 4  # [G, g, tile, h, j, p, t, s]
    _nibbles(codes)[group:stop] = nibbles.permute(0, 2, 1, 6, 3, 4, 7, 5)
    return escapes


def _windows(exponents_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's first exponent, uint8, and its number of escapes."""
    num_rows, num_columns = exponents_NK.shape
    rows = torch.arange(num_rows, dtype=torch.int32, device=exponents_NK.device).unsqueeze(1)
    counts = (exponents_NK + 256 * rows).view(-1).bincount(minlength=256 * num_rows)
    below = counts.view(num_rows, 256).cumsum(1, dtype=torch.int32)
    inside = below[:, 14:].clone()
    inside[:, 1:] -= below[:, :-15]
    most_inside, first = inside.max(1)  # of equal ones the lowest
    return first.to(torch.uint8), num_columns - most_inside


def _swapped(halves: torch.Tensor) -> torch.Tensor:
    """Swap the two bytes of int16."""
    return halves << 8 | halves >> 8 & 0xFF


def _halves(codes: Codes) -> torch.Tensor:
    """Return the bytes as int16 [G, tile, h, g, t, j, p, s]."""
    groups, tiles = codes.bytes.shape[:2]
    return codes.bytes.view(torch.int16).view(groups, tiles, 2, 8, 4, 2, 2, 2)


def _nibbles(codes: Codes) -> torch.Tensor:
    """Return the codes, A's in the low four bits, as uint8 [G, tile, g, t, h, j, s, p]."""
    groups, tiles = codes.codes.shape[:2]
    return codes.codes.view(torch.uint8).view(groups, tiles, 8, 4, 2, 2, 2, 2)


def restore(codes: Codes, out: torch.Tensor | None = None) -> torch.Tensor:
    """Twin of kernels.ops.codes.restore."""
    num_rows, num_columns = codes.shape
    if out is None:
        out = codes.bytes.new_empty(codes.shape, dtype=torch.bfloat16)
    step = max(1, _CHUNK_WEIGHTS // (16 * num_columns))
    for group in range(0, num_rows // 16, step):
        out[16 * group : 16 * (group + step)] = _groups(codes, slice(group, group + step))
    return out


def _groups(codes: Codes, groups: slice | torch.Tensor) -> torch.Tensor:
    """Return some groups of 16 rows in bfloat16, [16 * groups, K].

    Weights of neighbouring columns, s, are the halves of a word of 32 bits.
    """
    halves = _halves(codes).view(torch.int32)[groups].squeeze(-1)
    halves = halves.permute(0, 3, 1, 2, 5, 6, 4).contiguous()  # [G, g, tile, h, j, p, t]
    nibbles = _nibbles(codes).flatten(-2).view(torch.int32)[groups].squeeze(-1)
    nibbles = nibbles.permute(0, 2, 1, 4, 5, 3).contiguous()  # [G, g, tile, h, j, t]
    first = codes.first.view(-1, 2, 8, 1, 1, 1, 1)[groups].to(torch.int32) * _BOTH
    shape = len(halves), 2, *halves.shape[1:]
    bits = torch.empty(shape, dtype=torch.int32, device=halves.device)
    is_escape = torch.empty((*shape, 2), dtype=torch.bool, device=halves.device)
    for second in (0, 1):
        kept = halves
        if second:
            kept = (halves << 8 & _UPPER_BYTES) | (halves >> 8 & _LOWER_BYTES)
        kept = kept & _SIGN_MANTISSA_BOTH
        for p in (0, 1):
            code = nibbles >> 8 * p + 4 * second & _ESCAPE * _BOTH
            is_escape[:, second, ..., p, :, :] = (
                code.view(torch.int16).view(*code.shape, 2) == _ESCAPE
            )
            code += first[:, second]
            code &= _LOWER_BYTES  # an escape's is 256 at most, and must leave the sign as it is
            code <<= 7
            bits[:, second, ..., p, :] = kept[..., p, :] | code
    found, size = bits.view(torch.int16).view(-1), 16 * codes.shape[1]
    at = is_escape.view(-1).nonzero().view(-1)
    numbers = found[at] >> 8 & 0x80 | found[at] & 0x7F
    found[at] = codes.table[codes.offsets[groups][at // size] + numbers]
    return found.view(torch.bfloat16).view(-1, codes.shape[1])


def _rows(codes: Codes, ids_T: torch.Tensor) -> torch.Tensor:
    """Return rows in bfloat16, [T, K]."""
    out = codes.bytes.new_empty((len(ids_T), codes.shape[1]), dtype=torch.bfloat16)
    for at in range(0, len(ids_T), _CHUNK_IDS):
        ids = ids_T[at : at + _CHUNK_IDS]
        groups, place = torch.unique(ids // 16, return_inverse=True)
        every = _groups(codes, groups).view(-1, 16, codes.shape[1])
        out[at : at + _CHUNK_IDS] = every[place, ids % 16]
    return out


def linear(x: torch.Tensor, codes: Codes, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Twin of kernels.ops.codes.linear."""
    return plain.linear(x, restore(codes), bias)


def linear_gated_mul(
    x: torch.Tensor, codes: Codes, bias: torch.Tensor | None = None, *, is_gelu: bool = False
) -> torch.Tensor:
    """Twin of kernels.ops.codes.linear_gated_mul."""
    return plain.linear_gated_mul(x, restore(codes), bias, is_gelu=is_gelu)


def embedding(ids_T: torch.Tensor, codes: Codes, scale: float | None = None) -> torch.Tensor:
    """Twin of kernels.ops.codes.embedding."""
    rows = _rows(codes, ids_T)
    return rows if scale is None else rows.mul_(torch.tensor(scale, dtype=rows.dtype).item())
