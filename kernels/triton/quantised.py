"""Products of few rows with quantised weights, and rows restored; the layout is that of Quantised.

They run where kernels.cuda does not: in float32, and for shapes that do not fill tiles.

Shape letters: T tokens, K inputs, N outputs. A program takes BLOCK_N rows of the weight and some
tiles of 64 columns at a time. Values of fewer than 8 bits give two blocks of 32 columns of every
tile, the halves 0 and 1 of their bytes, which are multiplied one after the other, so that nothing
is interleaved. The letters h, u, g, q, n, t and s are those of Quantised.
"""

import torch
import triton
import triton.language as tl

from kernels.arguments import Quantised
from kernels.triton.activation import gated
from kernels.triton.dependent import launch_options, release, wait
from kernels.triton.small_linear import _sum_of_parts
from kernels.triton.tiles import PART_INPUTS, linear_tile

_RESTORE_ROWS = 16
_RESTORE_TILES = 2


@triton.jit
def columns_of_step(block, HALVES: tl.constexpr):
    """Return the column of each place of a block's half 0; those of half 1 are 8 further."""
    columns = block
    if HALVES == 2:
        columns = (block // 32) * 64 + (block % 32) // 8 * 16 + block % 8
    return columns


@triton.jit
def _row_places(rows, row_bytes, SIZE: tl.constexpr, U: tl.constexpr):
    """Return where rows begin in an array: a tile has SIZE bytes for each g, rows u are U apart."""
    return (rows // 16) * 16 * row_bytes + (rows % 8) * SIZE + (rows % 16) // 8 * U


@triton.jit
def _value_places(block, HALVES: tl.constexpr):
    """Return where the bytes of the places of a block are, from where its row begins."""
    t = block % 8 // 2
    s = block % 2
    if HALVES == 2:
        j = block % 32
        places = block // 32 * 512 + t * 16 + j // 16 * 8 + s * 2 + j // 8 % 2
    else:
        j = block % 64
        places = block // 64 * 1024 + j // 32 * 512 + t * 16 + j // 8 % 4 * 2 + s
    return places


@triton.jit
def _of_groups(
    at,
    rows,
    count,
    first,
    half,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALVES: tl.constexpr,
):
    """Load what belongs to groups of SIZE columns for a block, [BLOCK_N, BLOCK] float32.

    One value is loaded for the places of a block that follow each other and are of one group.
    """
    RUN: tl.constexpr = (16 if SIZE == 16 else 32 if SIZE == 32 else 64) // HALVES
    COUNT: tl.constexpr = BLOCK // RUN
    starts = columns_of_step(tl.arange(0, COUNT) * RUN, HALVES) + first + half * 8
    numbers = tl.minimum(starts // SIZE, count - 1) * 16
    found = tl.load(at + _row_places(rows, count, 2, 1)[:, None] + numbers[None, :]).to(tl.float32)
    spread = tl.broadcast_to(found[:, :, None], [BLOCK_N, COUNT, RUN])
    return tl.reshape(spread, [BLOCK_N, BLOCK])


@triton.jit
def restore_values(
    bytes_,
    high,
    scale,
    zero,
    low,
    subscale,
    sublow,
    table,
    rows,
    groups,
    subgroups,
    first,
    half,
    KIND: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    SUBGROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_LOW: tl.constexpr,
    HAS_SUBSCALE: tl.constexpr,
    HAS_SUBLOW: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    HALVES: tl.constexpr,
):
    """Return one half of a block of weights, [BLOCK_N, BLOCK] float32, from its bytes.

    `high` are the upper bits of uint5 and uint6 of this half, else it is not looked at.
    """
    values = bytes_.to(tl.int32)
    if HALVES == 2:
        values = (values >> (half * 4)) & 15
        if HIGH_BITS:
            values = values | (high << 4)
    if KIND == "table4":
        weights = tl.load(table + values)
    elif KIND == "float8_e4m3fn":
        magnitude = values & 127
        bits = ((values & 128) << 8) | (magnitude << 7)
        # The same number as float16, but for a bias of 15 in place of 7.
        weights = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        weights = tl.where(magnitude == 127, float("nan"), weights)
    else:
        weights = values.to(tl.float32)
        if HAS_ZERO:
            weights -= _of_groups(zero, rows, groups, first, half, GROUP, BLOCK, BLOCK_N, HALVES)
        else:
            weights -= OFFSET
    scales = _of_groups(scale, rows, groups, first, half, GROUP, BLOCK, BLOCK_N, HALVES)
    if scale.dtype.element_ty == tl.uint8:
        # The exponent of a float32; of 0, the bits of 2 ** -127.
        exponents = scales.to(tl.int32)
        bits = tl.where(exponents == 0, 1 << 22, exponents << 23)
        scales = bits.to(tl.float32, bitcast=True)
    if HAS_SUBSCALE:
        scales *= _of_groups(
            subscale, rows, subgroups, first, half, SUBGROUP, BLOCK, BLOCK_N, HALVES
        )
    weights *= scales
    if HAS_LOW:
        lows = _of_groups(low, rows, groups, first, half, GROUP, BLOCK, BLOCK_N, HALVES)
        if HAS_SUBLOW:
            lows *= _of_groups(
                sublow, rows, subgroups, first, half, SUBGROUP, BLOCK, BLOCK_N, HALVES
            )
        weights -= lows
    return weights


@triton.jit
def upper_bits_of(at, rows, row_bytes, first, half, tiles, block, HIGH_BITS: tl.constexpr):
    """Load the bits above the low four of one half of a block; zero where there are none."""
    found = block[None, :] * 0
    if HIGH_BITS:
        tile = first // 64 + block // 32
        j = block % 32
        t = block % 8 // 2
        s = block % 2
        q = j // 8 % 2
        if HIGH_BITS == 1:
            places = tile * 128 + t * 4 + s * 2 + j // 16
            row_places = _row_places(rows, row_bytes, 16, 0)
            shift = ((rows % 16) // 8 * 4)[:, None] + (q * 2 + half)[None, :]
        else:
            places = tile * 256 + t * 8 + j // 16 * 4 + s * 2
            row_places = _row_places(rows, row_bytes, 32, 1)
            shift = (rows * 0)[:, None] + (q * 4 + half * 2)[None, :]
        mask = (tile < tiles)[None, :]
        loaded = tl.load(at + row_places[:, None] + places[None, :], mask=mask, other=0)
        found = (loaded.to(tl.int32) >> shift.to(tl.int32)) & (2 * HIGH_BITS - 1)
    return found


@triton.jit
def bytes_of_values(at, rows, row_bytes, first, tiles, block, HALVES: tl.constexpr):
    """Load the bytes of a block, [BLOCK_N, BLOCK]."""
    row_places = _row_places(rows, row_bytes, 64, 8 // HALVES)
    places = first // 64 * (1024 // HALVES) + _value_places(block, HALVES)
    mask = (first // 64 + block // (64 // HALVES) < tiles)[None, :]
    return tl.load(at + row_places[:, None] + places[None, :], mask=mask, other=0)


# One compiled variant serves every number of tokens with the same BLOCK_T, so that none is compiled
# in the middle of a run.
@triton.jit(do_not_specialize=["num_tokens", "size"])
def _linear_kernel(
    x,
    values,
    high,
    scale,
    zero,
    low,
    subscale,
    sublow,
    table,
    bias,
    out,
    partial,
    counters,
    num_tokens,
    N,
    K,
    row_bytes,
    high_bytes,
    groups,
    subgroups,
    size,
    stride_x,
    KIND: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    SUBGROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_LOW: tl.constexpr,
    HAS_SUBSCALE: tl.constexpr,
    HAS_SUBLOW: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    PART_UNIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        release()
    BLOCK: tl.constexpr = BLOCK_K // HALVES
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows beyond the last read the last again.
    rows = tl.minimum(outputs, N - 1).to(tl.int64)
    tokens = tl.arange(0, BLOCK_T)
    block = tl.arange(0, BLOCK)
    places = columns_of_step(block, HALVES)
    tiles = tl.cdiv(K, 64)
    is_token = (tokens < num_tokens)[:, None]
    x_at = x + tokens.to(tl.int64)[:, None] * stride_x
    share = tl.cdiv(tl.cdiv(K, PART_UNIT), PARTS) * PART_UNIT
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, K)
    acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    up_acc = acc

    if OVERLAPS:
        wait()
    for first in range(begin, end, BLOCK_K):
        bytes_ = bytes_of_values(values, rows, row_bytes, first, tiles, block, HALVES)
        up_bytes = bytes_
        if IS_GATED:
            up_bytes = bytes_of_values(values, rows + N, row_bytes, first, tiles, block, HALVES)
        for half in tl.static_range(HALVES):
            inputs = first + half * 8 + places
            mask = is_token & (inputs < K)[None, :]
            tokens_in = tl.load(x_at + inputs[None, :], mask=mask, other=0.0)
            upper = upper_bits_of(high, rows, high_bytes, first, half, tiles, block, HIGH_BITS)
            weights = restore_values(
                bytes_, upper, scale, zero, low, subscale, sublow, table, rows, groups, subgroups,
                first, half, KIND, OFFSET, GROUP, SUBGROUP, HAS_ZERO, HAS_LOW, HAS_SUBSCALE,
                HAS_SUBLOW, BLOCK, BLOCK_N, HIGH_BITS, HALVES,
            )  # fmt: skip
            acc = tl.dot(weights.to(x.dtype.element_ty), tl.trans(tokens_in), acc)
            if IS_GATED:
                upper = upper_bits_of(
                    high, rows + N, high_bytes, first, half, tiles, block, HIGH_BITS
                )
                weights = restore_values(
                    up_bytes, upper, scale, zero, low, subscale, sublow, table, rows + N, groups,
                    subgroups, first, half, KIND, OFFSET, GROUP, SUBGROUP, HAS_ZERO, HAS_LOW,
                    HAS_SUBSCALE, HAS_SUBLOW, BLOCK, BLOCK_N, HIGH_BITS, HALVES,
                )  # fmt: skip
                up_acc = tl.dot(weights.to(x.dtype.element_ty), tl.trans(tokens_in), up_acc)

    acc = tl.trans(acc)
    up_acc = tl.trans(up_acc)
    out_rows = tokens.to(tl.int64)
    mask = is_token & (outputs < N)[None, :]
    is_last = True
    if PARTS > 1:
        acc, is_last = _sum_of_parts(
            acc, partial, counters, out_rows, outputs, mask, size, N, PARTS
        )
    if is_last:
        if HAS_BIAS:
            acc += tl.load(bias + outputs, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            if HAS_BIAS:
                up_bias = tl.load(bias + N + outputs, mask=outputs < N, other=0.0)
                up_acc += up_bias.to(tl.float32)[None, :]
            # Rounded as the product alone would be, so that the result is that of both operators.
            gate = acc.to(out.dtype.element_ty).to(tl.float32)
            up = up_acc.to(out.dtype.element_ty).to(tl.float32)
            acc = gated(gate, up, IS_GELU)
        at = out + out_rows[:, None] * N + outputs[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rows_kernel(
    ids,
    values,
    high,
    scale,
    zero,
    low,
    subscale,
    sublow,
    table,
    out,
    num_rows,
    K,
    row_bytes,
    high_bytes,
    groups,
    subgroups,
    KIND: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    SUBGROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_LOW: tl.constexpr,
    HAS_SUBSCALE: tl.constexpr,
    HAS_SUBLOW: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    HALVES: tl.constexpr,
    HAS_IDS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        release()
        wait()
    BLOCK: tl.constexpr = BLOCK_K // HALVES
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(outputs, num_rows - 1).to(tl.int64)
    if HAS_IDS:
        rows = tl.load(ids + rows)
    block = tl.arange(0, BLOCK)
    first = tl.program_id(1) * BLOCK_K
    tiles = tl.cdiv(K, 64)
    bytes_ = bytes_of_values(values, rows, row_bytes, first, tiles, block, HALVES)
    for half in tl.static_range(HALVES):
        upper = upper_bits_of(high, rows, high_bytes, first, half, tiles, block, HIGH_BITS)
        weights = restore_values(
            bytes_, upper, scale, zero, low, subscale, sublow, table, rows, groups, subgroups,
            first, half, KIND, OFFSET, GROUP, SUBGROUP, HAS_ZERO, HAS_LOW, HAS_SUBSCALE,
            HAS_SUBLOW, BLOCK, BLOCK_N, HIGH_BITS, HALVES,
        )  # fmt: skip
        columns = first + half * 8 + columns_of_step(block, HALVES)
        mask = (outputs < num_rows)[:, None] & (columns < K)[None, :]
        at = out + outputs.to(tl.int64)[:, None] * K + columns[None, :]
        tl.store(at, weights.to(out.dtype.element_ty), mask=mask)


def restore(weight: Quantised, out: torch.Tensor) -> None:
    """Launch kernels.ops.quantised.restore."""
    _launch_rows(weight, None, out)


def rows(weight: Quantised, ids_T: torch.Tensor) -> torch.Tensor:
    """Launch kernels.ops.quantised.rows."""
    shape = ids_T.shape[0], weight.num_columns
    out = torch.empty(shape, dtype=weight.dtype, device=ids_T.device)
    _launch_rows(weight, ids_T, out)
    return out


def _launch_rows(weight: Quantised, ids: torch.Tensor | None, out: torch.Tensor) -> None:
    num_rows, size_in = out.shape
    if not num_rows:
        return
    block_n, block_k = (_RESTORE_ROWS if ids is None else 1), 64 * _RESTORE_TILES
    grid = (triton.cdiv(num_rows, block_n), triton.cdiv(size_in, block_k))
    _rows_kernel[grid](
        weight.values if ids is None else ids,
        *arrays_of(weight),
        out,
        num_rows,
        size_in,
        *sizes_of(weight),
        **meaning_of_weight(weight),
        HAS_IDS=ids is not None,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
        **launch_options(out.device),
    )


def linear(
    x_TK: torch.Tensor,
    weight: Quantised,
    bias: torch.Tensor | None,
    counters: torch.Tensor | None,
    *,
    is_gated: bool = False,
    is_gelu: bool = False,
) -> torch.Tensor:
    """Launch a product of few tokens.

    Args:
        x_TK: [T, K], in the order of the weight's columns.
        weight: of N rows, or of N gates and then N ups.
        bias: [N] or [2N], or None.
        counters: int32 zeros, one for each of the tile's programs along N; zeros again afterwards.
        is_gated: return silu(gate) * up.
        is_gelu: of a gated product, gelu(gate) * up instead.

    Returns:
        A new tensor [T, N].
    """
    if x_TK.stride(-1) != 1:
        x_TK = x_TK.contiguous()
    num_tokens, size_in = x_TK.shape
    tile = linear_tile(num_tokens, weight.shape[0], size_in, is_gated=is_gated)
    # Float32 weights pass through registers: half of the inputs that plain weights take at a time.
    block_k = min(128, tile.block_k)
    size_out = weight.shape[0] // 2 if is_gated else weight.shape[0]
    out = torch.empty((num_tokens, size_out), dtype=x_TK.dtype, device=x_TK.device)
    programs = triton.cdiv(size_out, tile.block_n)
    partial = out
    if tile.parts > 1:
        shape = (tile.parts, num_tokens, size_out)
        partial = torch.empty(shape, dtype=torch.float32, device=x_TK.device)
        if counters is None:
            counters = torch.zeros(programs, dtype=torch.int32, device=x_TK.device)
    _linear_kernel[(programs, tile.parts)](
        x_TK,
        *arrays_of(weight),
        out if bias is None else bias,
        out,
        partial,
        out if counters is None else counters,
        num_tokens,
        size_out,
        size_in,
        *sizes_of(weight),
        num_tokens * size_out,
        x_TK.stride(0),
        **meaning_of_weight(weight),
        BLOCK_T=tile.block_t,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        PARTS=tile.parts,
        PART_UNIT=max(PART_INPUTS, block_k),
        HAS_BIAS=bias is not None,
        IS_GATED=is_gated,
        IS_GELU=is_gelu,
        num_warps=tile.num_warps,
        num_stages=3,
        **launch_options(x_TK.device),
    )
    return out


def arrays_of(weight: Quantised) -> list[torch.Tensor]:
    """Return the arrays that kernels take; for those that there are none of, the values."""
    names = ("values", "high", "scale", "zero", "low", "subscale", "sublow", "table")
    found = [getattr(weight, name) for name in names]
    return [weight.values if each is None else each for each in found]


def sizes_of(weight: Quantised) -> tuple[int, int, int, int]:
    """Return bytes of a row of values and of upper bits, groups and subgroups of a row."""
    high = 0 if weight.high is None else weight.high.shape[1]
    subgroups = -(-weight.num_columns // weight.subgroup)
    return weight.values.shape[1], high, weight.scale.shape[1], subgroups


def meaning_of_weight(weight: Quantised) -> dict[str, object]:
    """Return what kernels are compiled for."""
    whole = weight.num_columns
    return {
        "KIND": weight.kind,
        "OFFSET": weight.offset,
        # A group of all columns is longer than any column's number, however many there are.
        "GROUP": 2**30 if weight.group == whole else weight.group,
        "SUBGROUP": 2**30 if weight.subgroup == whole else weight.subgroup,
        "HAS_ZERO": weight.zero is not None,
        "HAS_LOW": weight.low is not None,
        "HAS_SUBSCALE": weight.subscale is not None,
        "HAS_SUBLOW": weight.sublow is not None,
        "HIGH_BITS": weight.bits - 4 if weight.high is not None else 0,
        "HALVES": 1 if weight.bits == 8 else 2,
    }
