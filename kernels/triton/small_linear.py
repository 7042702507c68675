"""Products of few rows with a weight, bound by reading the weight once.

Shape letters: T tokens, K inputs, N outputs. A program multiplies BLOCK_N rows of the weight, whole
or one part of their K, with all tokens; its loads of the weight run several iterations ahead.
"""

import torch
import triton
import triton.language as tl

from kernels.triton.activation import gated
from kernels.triton.dependent import launch_options, release, wait
from kernels.triton.tiles import PART_INPUTS, LinearTile, linear_tile, shared_bytes


@triton.jit
def _load_inputs(at, inputs, first, K, WHOLE_K: tl.constexpr):
    if WHOLE_K:
        values = tl.load(at + first)
    else:
        values = tl.load(at + first, mask=(inputs < K - first)[None, :], other=0.0)
    return values


@triton.jit
def _sum_of_parts(acc, partial, counters, out_rows, columns, mask, size, N, PARTS: tl.constexpr):
    """Store one part's sums; in the last program of a tile add all parts, in order."""
    tile = tl.program_id(0)
    at = partial + out_rows[:, None] * N + columns[None, :]
    tl.store(at + tl.program_id(1).to(tl.int64) * size, acc, mask=mask)
    tl.debug_barrier()
    is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == PARTS - 1
    if is_last:
        acc = tl.zeros_like(acc)
        for part in tl.static_range(PARTS):
            acc += tl.load(
                at + part * size.to(tl.int64), mask=mask, other=0.0, cache_modifier=".cg"
            )
        tl.store(counters + tile, 0)
    return acc, is_last


# One compiled variant serves every number of tokens with the same BLOCK_T, so that none is compiled
# in the middle of a run.
@triton.jit(do_not_specialize=["num_tokens", "size"])
def _linear_kernel(
    x,
    weight,
    bias,
    out,
    partial,
    counters,
    num_tokens,
    N,
    K,
    size,
    stride_x,
    stride_weight,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    PART_UNIT: tl.constexpr,
    WHOLE_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        release()
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows beyond the last read the last again: no mask on the loads that the speed depends on.
    rows = tl.minimum(columns, N - 1).to(tl.int64)
    tokens = tl.arange(0, BLOCK_T)
    inputs = tl.arange(0, BLOCK_K)
    weight_at = weight + rows[:, None] * stride_weight + inputs[None, :]
    x_at = x + tokens.to(tl.int64)[:, None] * stride_x + inputs[None, :]
    is_token = (tokens < num_tokens)[:, None]
    # Parts end at the same inputs whatever BLOCK_K is.
    share = tl.cdiv(tl.cdiv(K, PART_UNIT), PARTS) * PART_UNIT
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, K)
    acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    up_acc = acc
    up_at = weight + (rows + N)[:, None] * stride_weight + inputs[None, :]

    if OVERLAPS:
        wait()
    for first in range(begin, end, BLOCK_K):
        x_mask = is_token
        if not WHOLE_K:
            x_mask = x_mask & (inputs < K - first)[None, :]
        values = tl.load(x_at + first, mask=x_mask, other=0.0)
        weights = _load_inputs(weight_at, inputs, first, K, WHOLE_K)
        acc = tl.dot(weights, tl.trans(values), acc)
        if IS_GATED:
            weights = _load_inputs(up_at, inputs, first, K, WHOLE_K)
            up_acc = tl.dot(weights, tl.trans(values), up_acc)

    acc = tl.trans(acc)
    up_acc = tl.trans(up_acc)
    out_rows = tokens.to(tl.int64)
    mask = is_token & (columns < N)[None, :]
    is_last = True
    if PARTS > 1:
        acc, is_last = _sum_of_parts(
            acc, partial, counters, out_rows, columns, mask, size, N, PARTS
        )
    if is_last:
        if HAS_BIAS:
            acc += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            if HAS_BIAS:
                up_bias = tl.load(bias + N + columns, mask=columns < N, other=0.0)
                up_acc += up_bias.to(tl.float32)[None, :]
            # Rounded as the product alone would be, so that the result is that of both operators.
            gate = acc.to(out.dtype.element_ty).to(tl.float32)
            up = up_acc.to(out.dtype.element_ty).to(tl.float32)
            acc = gated(gate, up, IS_GELU)
        at = out + out_rows[:, None] * N + columns[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), mask=mask)


def linear(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias: torch.Tensor | None,
    counters: torch.Tensor | None,
) -> torch.Tensor:
    """Launch kernels.ops.linear.linear for few tokens."""
    num_tokens, size_in = x_TK.shape
    tile = linear_tile(num_tokens, weight_NK.shape[0], size_in)
    return launch(x_TK, weight_NK, bias, counters, tile, is_gated=False)


def linear_gated_mul(
    x_TK: torch.Tensor, weight_2FK: torch.Tensor, bias: torch.Tensor | None, *, is_gelu: bool
) -> torch.Tensor:
    """Launch kernels.ops.linear.linear_gated_mul for few tokens."""
    num_tokens, size_in = x_TK.shape
    tile = linear_tile(num_tokens, weight_2FK.shape[0], size_in, is_gated=True)
    return launch(x_TK, weight_2FK, bias, None, tile, is_gated=True, is_gelu=is_gelu)


def launch(
    x_TK: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    counters: torch.Tensor | None,
    tile: LinearTile,
    *,
    is_gated: bool,
    is_gelu: bool = False,
) -> torch.Tensor:
    """Launch a product with a given tile.

    Args:
        x_TK: [T, K], stride 1 in the last dimension.
        weight: [N, K], or [2N, K] of gates and ups; stride 1 in the last dimension.
        bias: [N] or [2N], or None.
        counters: int32 zeros, one for each of the tile's programs along N; zeros again afterwards.
        tile: the kernel's shape.
        is_gated: return silu(gate) * up.
        is_gelu: of a gated product, gelu(gate) * up instead.

    Returns:
        A new tensor [T, N].
    """
    num_tokens, size_in = x_TK.shape
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
        weight,
        weight if bias is None else bias,
        out,
        partial,
        out if counters is None else counters,
        num_tokens,
        size_out,
        size_in,
        num_tokens * size_out,
        x_TK.stride(0),
        weight.stride(0),
        BLOCK_T=tile.block_t,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        PARTS=tile.parts,
        PART_UNIT=max(PART_INPUTS, tile.block_k),
        WHOLE_K=size_in % tile.block_k == 0,
        HAS_BIAS=bias is not None,
        IS_GATED=is_gated,
        IS_GELU=is_gelu,
        num_warps=tile.num_warps,
        num_stages=_num_stages(tile, x_TK.device, is_gated=is_gated),
        **launch_options(x_TK.device),
    )
    return out


def _num_stages(tile: LinearTile, device: torch.device, *, is_gated: bool) -> int:
    """Return the stages for which a block of this card has shared memory, 2 at least."""
    rows = tile.block_t + tile.block_n * (2 if is_gated else 1)
    return max(2, min(tile.num_stages, shared_bytes(device) // (rows * tile.block_k * 2)))
