"""Products with quantised experts, whose weights are restored as they are read.

Those of few tokens run where kernels.cuda.experts does not, those of many with experts that have
biases. Only experts that are routed to are read. Shape letters and programs are those of
kernels.triton.experts; weights are restored anew for each 16 tokens of few, and for each tile of
pairs of many.
"""

import torch
import triton
import triton.language as tl

from kernels.arguments import Quantised
from kernels.triton.dependent import launch_options, release, wait
from kernels.triton.experts import (
    GROUP,
    Gate,
    SortedPairs,
    few_grid,
    find_slot_of_tile,
    load_members,
    load_pairs_of_tile,
    meaning_of,
    rows_of_slot,
    slot_of_program,
    store_group,
    store_tile,
)
from kernels.triton.quantised import (
    arrays_of,
    bytes_of_values,
    columns_of_step,
    meaning_of_weight,
    restore_values,
    sizes_of,
    upper_bits_of,
)
from kernels.triton.tiles import grouped_tile


@triton.jit(do_not_specialize=["num_tokens"])
def _few_kernel(
    x, values, high, scale, zero, low, subscale, sublow, table, bias, slots, out, num_tokens, N, K,
    row_bytes, high_bytes, groups, subgroups, stride_x,
    KIND: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, SUBGROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_LOW: tl.constexpr, HAS_SUBSCALE: tl.constexpr,
    HAS_SUBLOW: tl.constexpr, HIGH_BITS: tl.constexpr, HALVES: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_PLACES: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BY_PAIR: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, IS_GELU: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        release()
        wait()
    BLOCK: tl.constexpr = BLOCK_K // HALVES
    ALL: tl.constexpr = 2147483647
    slot, is_used, own = slot_of_program(
        slots, num_tokens, 0, ALL, BY_PAIR, TOP_K, BLOCK_T, BLOCK_PLACES
    )
    if is_used:
        rows = rows_of_slot(slot, N, BLOCK_N, IS_GATED)
        block = tl.arange(0, BLOCK)
        places, tiles = columns_of_step(block, HALVES), tl.cdiv(K, 64)
        count = tl.sum((own >= 0).to(tl.int32), 0)
        for number in range(tl.cdiv(count, TOKENS)):
            tokens, pairs, is_member = load_members(own, number, BLOCK_T, TOKENS)
            x_rows = pairs
            if IS_GATED:
                x_rows = tokens
            x_at = x + x_rows.to(tl.int64)[:, None] * stride_x
            acc = tl.zeros([BLOCK_N, TOKENS], dtype=tl.float32)
            for first in range(0, K, BLOCK_K):
                bytes_ = bytes_of_values(values, rows, row_bytes, first, tiles, block, HALVES)
                for half in tl.static_range(HALVES):
                    inputs = first + half * 8 + places
                    mask = is_member[:, None] & (inputs < K)[None, :]
                    read = tl.load(x_at + inputs[None, :], mask=mask, other=0.0)
                    upper = upper_bits_of(
                        high, rows, high_bytes, first, half, tiles, block, HIGH_BITS
                    )
                    weights = restore_values(
                        bytes_, upper, scale, zero, low, subscale, sublow, table, rows, groups,
                        subgroups, first, half, KIND, OFFSET, GROUP, SUBGROUP, HAS_ZERO, HAS_LOW,
                        HAS_SUBSCALE, HAS_SUBLOW, BLOCK, BLOCK_N, HIGH_BITS, HALVES,
                    )  # fmt: skip
                    weights = weights.to(x.dtype.element_ty)
                    acc = tl.dot(weights, tl.trans(read), acc, input_precision="ieee")
            store_group(
                acc, bias, out, rows, pairs, is_member, N, BLOCK_N, TOKENS, HAS_BIAS, IS_GATED,
                IS_GELU, LIMIT, ALPHA,
            )  # fmt: skip


def few(
    x: torch.Tensor,
    weight: Quantised,
    slots_Tk: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    gate: Gate | None = None,
) -> None:
    """Launch a product of at most MAX_SMALL_TOKENS tokens.

    Args:
        x: as that of kernels.triton.experts.few, and so are the others.
        weight: its columns in their own order.
        slots_Tk: as there.
        out: as there.
        bias: as there.
        gate: as there.
    """
    assert weight.columns is None
    (num_tokens, top_k), size_out, size_in = slots_Tk.shape, out.shape[1], x.shape[1]
    block_n, block_k = 32, 64 if x.dtype == torch.float32 else 128
    grid, shape = few_grid(slots_Tk, weight.shape[0], size_out, block_n, is_gated=gate is not None)
    _few_kernel[grid](
        x,
        *arrays_of(weight),
        weight.values if bias is None else bias,
        slots_Tk,
        out,
        num_tokens,
        size_out,
        size_in,
        *sizes_of(weight),
        x.stride(0),
        **meaning_of_weight(weight),
        TOP_K=top_k,
        **shape,
        TOKENS=GROUP,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        HAS_BIAS=bias is not None,
        **meaning_of(gate),
        num_warps=4,
        num_stages=3,
        **launch_options(x.device),
    )


@triton.jit
def _many_kernel(
    x, values, high, scale, zero, low, subscale, sublow, table, bias, order, starts, all_tiles, out,
    N, K, S, row_bytes, high_bytes, groups, subgroups, stride_x,
    KIND: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, SUBGROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_LOW: tl.constexpr, HAS_SUBSCALE: tl.constexpr,
    HAS_SUBLOW: tl.constexpr, HIGH_BITS: tl.constexpr, HALVES: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, IS_GELU: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = BLOCK_K // HALVES
    slot, tile = find_slot_of_tile(all_tiles, 0, S, BLOCK_S)
    if slot < S:
        pairs, is_pair = load_pairs_of_tile(order, starts, slot, tile, BLOCK_M)
        x_rows = pairs
        if IS_GATED:
            x_rows = pairs // TOP_K
        x_at = x + x_rows.to(tl.int64)[:, None] * stride_x
        outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = slot.to(tl.int64) * (2 * N if IS_GATED else N) + tl.minimum(outputs, N - 1)
        block = tl.arange(0, BLOCK)
        places, tiles = columns_of_step(block, HALVES), tl.cdiv(K, 64)
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        up_acc = acc
        for first in range(0, K, BLOCK_K):
            bytes_ = bytes_of_values(values, rows, row_bytes, first, tiles, block, HALVES)
            up_bytes = bytes_
            if IS_GATED:
                up_bytes = bytes_of_values(values, rows + N, row_bytes, first, tiles, block, HALVES)
            for half in tl.static_range(HALVES):
                inputs = first + half * 8 + places
                mask = is_pair[:, None] & (inputs < K)[None, :]
                read = tl.load(x_at + inputs[None, :], mask=mask, other=0.0)
                upper = upper_bits_of(high, rows, high_bytes, first, half, tiles, block, HIGH_BITS)
                weights = restore_values(
                    bytes_, upper, scale, zero, low, subscale, sublow, table, rows, groups,
                    subgroups, first, half, KIND, OFFSET, GROUP, SUBGROUP, HAS_ZERO, HAS_LOW,
                    HAS_SUBSCALE, HAS_SUBLOW, BLOCK, BLOCK_N, HIGH_BITS, HALVES,
                ).to(x.dtype.element_ty)  # fmt: skip
                acc = tl.dot(read, tl.trans(weights), acc, input_precision="ieee")
                if IS_GATED:
                    upper = upper_bits_of(
                        high, rows + N, high_bytes, first, half, tiles, block, HIGH_BITS
                    )
                    weights = restore_values(
                        up_bytes, upper, scale, zero, low, subscale, sublow, table, rows + N,
                        groups, subgroups, first, half, KIND, OFFSET, GROUP, SUBGROUP, HAS_ZERO,
                        HAS_LOW, HAS_SUBSCALE, HAS_SUBLOW, BLOCK, BLOCK_N, HIGH_BITS, HALVES,
                    ).to(x.dtype.element_ty)  # fmt: skip
                    up_acc = tl.dot(read, tl.trans(weights), up_acc, input_precision="ieee")
        store_tile(
            acc, up_acc, bias, out, rows, pairs, is_pair, outputs, N, HAS_BIAS, IS_GATED, IS_GELU,
            LIMIT, ALPHA,
        )  # fmt: skip


def many(
    x: torch.Tensor,
    weight: Quantised,
    pairs: SortedPairs,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    gate: Gate | None = None,
) -> None:
    """Launch a product of many tokens.

    Args:
        x: as that of kernels.triton.experts.many, and so are the others.
        weight: its columns in their own order.
        pairs: as there.
        out: as there.
        bias: as there.
        gate: as there.
    """
    assert weight.columns is None
    size_out, size_in, num_slots = out.shape[1], x.shape[1], pairs.tiles.shape[0] - 1
    tile = grouped_tile(pairs.block_m, x.dtype)
    _many_kernel[(triton.cdiv(size_out, tile.block_n), pairs.most_tiles)](
        x,
        *arrays_of(weight),
        weight.values if bias is None else bias,
        pairs.order,
        pairs.starts,
        pairs.tiles,
        out,
        size_out,
        size_in,
        num_slots,
        *sizes_of(weight),
        x.stride(0),
        **meaning_of_weight(weight),
        TOP_K=pairs.top_k,
        BLOCK_S=triton.next_power_of_2(num_slots),
        BLOCK_M=pairs.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=64,
        HAS_BIAS=bias is not None,
        **meaning_of(gate),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
