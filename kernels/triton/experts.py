"""Mixtures of experts: routing, products with plain experts, weighted sums.

Products of few tokens run here in float32, and for shapes that kernels.cuda.experts does not take;
products of many always. A product may have a part of the slots, by their first one; the others'
results are not touched. Shape letters: T tokens, k experts of each, P pairs of a token and an
expert, E experts, S slots, K inputs, N outputs, M tiles of pairs.

Of few tokens a program takes BLOCK_N rows of one expert and all tokens that go there, in groups of
16: every group is multiplied by instructions of the same shape, so that a row has the same bits
whatever else there is. Of more tokens pairs are sorted by slot, and a program takes a tile of pairs
of one slot.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.sizes import MAX_SMALL_TOKENS
from kernels.triton.activation import clamped_swiglu, gated
from kernels.triton.dependent import launch_options, release, wait
from kernels.triton.tiles import grouped_tile, pairs_of_tile

GROUP = 16
"""Tokens that are multiplied together."""
_SUM_COLUMNS = 1024


@triton.jit
def _route_kernel(
    logits,
    rows,
    chosen,
    ids,
    weights,
    stride_logits,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    ROUNDS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    IS_CHOSEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        wait()
        release()
    token = tl.program_id(0).to(tl.int64)
    experts, places = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    at = logits + token * stride_logits
    found = tl.load(at + experts, mask=experts < E, other=-float("inf")).to(tl.float32)
    most = tl.max(found, 0)
    total = tl.sum(tl.exp(found - most), 0)
    shares = tl.where(experts < E, tl.exp(found - most) / total, -1.0)
    is_place = places < TOP_K
    best = tl.zeros([BLOCK_K], dtype=tl.int32)
    if IS_CHOSEN:
        best = tl.load(chosen + token * TOP_K + places, mask=is_place, other=0)
    else:
        for place in range(TOP_K):
            largest = tl.max(shares, 0)
            expert = tl.min(tl.where(shares == largest, experts, BLOCK_E), 0)
            best = tl.where(places == place, expert, best)
            shares = tl.where(experts == expert, -2.0, shares)
    logit = tl.load(at + best, mask=is_place, other=0.0).to(tl.float32)
    share = tl.where(is_place, tl.exp(logit - most) / total, 0.0)
    if RENORMALISE:
        share = share / tl.sum(share, 0)
    if ROUNDS:
        share = share.to(logits.dtype.element_ty).to(tl.float32)
    if HAS_ROWS:
        is_padding = tl.load(rows + token) < 0
        best = tl.where(is_padding, -1, best)
        share = tl.where(is_padding, 0.0, share)
    tl.store(ids + token * TOP_K + places, best, mask=is_place)
    tl.store(weights + token * TOP_K + places, share, mask=is_place)


def route(
    logits_TE: torch.Tensor,
    top_k: int,
    *,
    renormalise: bool,
    rounds: bool,
    rows_T: torch.Tensor | None = None,
    chosen_Tk: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch kernels.ops.experts.route."""
    (num_tokens, num_experts), device = logits_TE.shape, logits_TE.device
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=device)
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits_TE,
            ids if rows_T is None else rows_T,
            ids if chosen_Tk is None else chosen_Tk.contiguous(),
            ids,
            weights,
            logits_TE.stride(0),
            E=num_experts,
            TOP_K=top_k,
            BLOCK_E=triton.next_power_of_2(num_experts),
            BLOCK_K=triton.next_power_of_2(top_k),
            RENORMALISE=renormalise,
            ROUNDS=rounds,
            HAS_ROWS=rows_T is not None,
            IS_CHOSEN=chosen_Tk is not None,
            num_warps=1,
            **launch_options(device),
        )
    return ids, weights


@triton.jit
def _sum_kernel(
    products,
    weights,
    ids,
    shared,
    shared_logits,
    out,
    D,
    TOP_K: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        wait()
        release()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = columns < D
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        is_there = tl.load(ids + pair) >= 0
        product = tl.load(products + pair * D + columns, mask=mask & is_there, other=0.0)
        acc += tl.load(weights + pair) * product.to(tl.float32)
    if HAS_SHARED:
        logit = tl.load(shared_logits + token).to(tl.float32)
        found = tl.load(shared + token * D + columns, mask=mask, other=0.0).to(tl.float32)
        acc += found / (1.0 + tl.exp(-logit))
    tl.store(out + token * D + columns, acc.to(out.dtype.element_ty), mask=mask)


def experts_sum(
    products_TkD: torch.Tensor,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    shared_TD: torch.Tensor | None,
    shared_logits_T1: torch.Tensor | None,
) -> torch.Tensor:
    """Launch kernels.ops.experts.experts_sum."""
    num_tokens, top_k, hidden = products_TkD.shape
    out = products_TkD.new_empty((num_tokens, hidden))
    if num_tokens:
        block = min(_SUM_COLUMNS, triton.next_power_of_2(hidden))
        _sum_kernel[(num_tokens, triton.cdiv(hidden, block))](
            products_TkD,
            weights_Tk,
            ids_Tk,
            out if shared_TD is None else shared_TD,
            out if shared_logits_T1 is None else shared_logits_T1,
            out,
            hidden,
            TOP_K=top_k,
            HAS_SHARED=shared_TD is not None,
            BLOCK_D=block,
            num_warps=4,
            **launch_options(out.device),
        )
    return out


@triton.jit
def slot_of_program(
    slots, num_tokens, first_slot, S, BY_PAIR: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the slot of a program, whether it has tokens, and each token's pair there or -1.

    Slots are numbered from the first of S; those of others have no program.

    Programs are numbered by slot, or by pair where there are fewer, of which a slot's first counts.
    """
    number = tl.program_id(1)
    tokens, places = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    pairs = tokens[:, None] * TOP_K + places[None, :]
    mask = (tokens < num_tokens)[:, None] & (places < TOP_K)[None, :]
    every = tl.load(slots + pairs, mask=mask, other=-1) - first_slot
    slot = number
    if BY_PAIR:
        slot = tl.load(slots + number) - first_slot
    NONE: tl.constexpr = BLOCK_T * BLOCK_K
    own = tl.min(tl.where((every == slot) & mask, pairs, NONE), 1)
    has = own < NONE
    first = tl.min(own, 0)
    is_used = tl.sum(has.to(tl.int32), 0) > 0
    if BY_PAIR:
        is_used = is_used & (first == number) & (slot >= 0) & (slot < S)
    return slot, is_used, tl.where(has, own, -1)


@triton.jit
def load_members(own, group, BLOCK_T: tl.constexpr, GROUP: tl.constexpr):
    """Return a group of the tokens that have a pair, and their pairs; -1 where there are no more.

    The numbers of tokens and pairs are found by sums, each of one term that is not 0.
    """
    has = own >= 0
    rank = tl.cumsum(has.to(tl.int32), 0) - 1
    places = group * GROUP + tl.arange(0, GROUP)
    is_it = has[None, :] & (rank[None, :] == places[:, None])
    tokens = tl.sum(tl.where(is_it, tl.arange(0, BLOCK_T)[None, :], 0), 1)
    pairs = tl.sum(tl.where(is_it, own[None, :], 0), 1)
    is_member = tl.sum(is_it.to(tl.int32), 1) > 0
    return tokens, pairs, is_member


@triton.jit
def rows_of_slot(slot, N, BLOCK_N: tl.constexpr, IS_GATED: tl.constexpr):
    """Return the outputs of a program, and the rows of the weight: of gates, and then of ups.

    Rows beyond the last of an expert are its last again.
    """
    first = slot.to(tl.int64)
    numbers = tl.arange(0, BLOCK_N)
    if IS_GATED:
        HALF: tl.constexpr = BLOCK_N // 2
        outputs = tl.program_id(0) * HALF + numbers % HALF
        rows = first * 2 * N + (numbers // HALF) * N + tl.minimum(outputs, N - 1)
    else:
        outputs = tl.program_id(0) * BLOCK_N + numbers
        rows = first * N + tl.minimum(outputs, N - 1)
    return rows


@triton.jit
def _activated(gate, up, IS_GELU: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Return what a gate and an up make; of a LIMIT of 0 without a clamp."""
    result = gated(gate, up, IS_GELU)
    if LIMIT > 0:
        result = clamped_swiglu(gate, up, LIMIT, ALPHA)
    return result


@triton.jit
def store_group(
    acc, bias, out, rows, pairs, is_member, N, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, IS_GELU: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
):  # fmt: skip
    """Store the sums of a group of tokens, [BLOCK_N, GROUP], with the gate where there is one."""
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    result = acc
    if HAS_BIAS:
        result += tl.load(bias + rows).to(tl.float32)[:, None]
    if IS_GATED:
        both = tl.permute(tl.reshape(result, [2, OUTPUTS, GROUP]), (1, 2, 0))
        gate, up = tl.split(both)
        # Rounded as the product alone would be.
        gate = gate.to(out.dtype.element_ty).to(tl.float32)
        up = up.to(out.dtype.element_ty).to(tl.float32)
        result = _activated(gate, up, IS_GELU, LIMIT, ALPHA)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    mask = (outputs < N)[:, None] & is_member[None, :]
    at = out + pairs.to(tl.int64)[None, :] * N + outputs[:, None]
    tl.store(at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rows_at(x, tokens, pairs, stride_x, inputs, IS_GATED: tl.constexpr):
    """Return where the inputs of tokens begin, or those of pairs where there is no gate."""
    rows = pairs
    if IS_GATED:
        rows = tokens
    return x + rows.to(tl.int64)[:, None] * stride_x + inputs[None, :]


@triton.jit
def _load_tokens(at, inputs, first, K, is_member, WHOLE_K: tl.constexpr):
    mask = is_member[:, None]
    if not WHOLE_K:
        mask = mask & (inputs < K - first)[None, :]
    return tl.load(at + first, mask=mask, other=0.0)


@triton.jit
def _multiply(
    x, weight, bias, out, own, rows, N, K, stride_x, stride_weight,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, WHOLE_K: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr,
    IS_GELU: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
):  # fmt: skip
    """Multiply rows of a weight with at most GROUPS groups of tokens, and store the result."""
    inputs = tl.arange(0, BLOCK_K)
    weight_at = weight + rows[:, None] * stride_weight + inputs[None, :]
    tokens0, pairs0, is0 = load_members(own, 0, BLOCK_T, GROUP)
    x0 = _rows_at(x, tokens0, pairs0, stride_x, inputs, IS_GATED)
    acc0 = tl.zeros([BLOCK_N, GROUP], dtype=tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    if GROUPS > 1:
        tokens1, pairs1, is1 = load_members(own, 1, BLOCK_T, GROUP)
        x1 = _rows_at(x, tokens1, pairs1, stride_x, inputs, IS_GATED)
    if GROUPS > 2:
        tokens2, pairs2, is2 = load_members(own, 2, BLOCK_T, GROUP)
        x2 = _rows_at(x, tokens2, pairs2, stride_x, inputs, IS_GATED)
        tokens3, pairs3, is3 = load_members(own, 3, BLOCK_T, GROUP)
        x3 = _rows_at(x, tokens3, pairs3, stride_x, inputs, IS_GATED)
    for first in range(0, K, BLOCK_K):
        if WHOLE_K:
            weights = tl.load(weight_at + first)
        else:
            weights = tl.load(weight_at + first, mask=(inputs < K - first)[None, :], other=0.0)
        values = _load_tokens(x0, inputs, first, K, is0, WHOLE_K)
        acc0 = tl.dot(weights, tl.trans(values), acc0, input_precision="ieee")
        if GROUPS > 1:
            values = _load_tokens(x1, inputs, first, K, is1, WHOLE_K)
            acc1 = tl.dot(weights, tl.trans(values), acc1, input_precision="ieee")
        if GROUPS > 2:
            values = _load_tokens(x2, inputs, first, K, is2, WHOLE_K)
            acc2 = tl.dot(weights, tl.trans(values), acc2, input_precision="ieee")
            values = _load_tokens(x3, inputs, first, K, is3, WHOLE_K)
            acc3 = tl.dot(weights, tl.trans(values), acc3, input_precision="ieee")
    store_group(
        acc0, bias, out, rows, pairs0, is0, N, BLOCK_N, GROUP, HAS_BIAS, IS_GATED, IS_GELU,
        LIMIT, ALPHA,
    )  # fmt: skip
    if GROUPS > 1:
        store_group(
            acc1, bias, out, rows, pairs1, is1, N, BLOCK_N, GROUP, HAS_BIAS, IS_GATED,
            IS_GELU, LIMIT, ALPHA,
        )  # fmt: skip
    if GROUPS > 2:
        store_group(
            acc2, bias, out, rows, pairs2, is2, N, BLOCK_N, GROUP, HAS_BIAS, IS_GATED,
            IS_GELU, LIMIT, ALPHA,
        )  # fmt: skip
        store_group(
            acc3, bias, out, rows, pairs3, is3, N, BLOCK_N, GROUP, HAS_BIAS, IS_GATED,
            IS_GELU, LIMIT, ALPHA,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "first_slot", "S"])
def _few_kernel(
    x, weight, bias, slots, out, num_tokens, first_slot, S, N, K, stride_x, stride_weight,
    TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_PLACES: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE_K: tl.constexpr, BY_PAIR: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, IS_GELU: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        release()
        wait()
    slot, is_used, own = slot_of_program(
        slots, num_tokens, first_slot, S, BY_PAIR, TOP_K, BLOCK_T, BLOCK_PLACES
    )
    if is_used:
        rows = rows_of_slot(slot, N, BLOCK_N, IS_GATED)
        count = tl.sum((own >= 0).to(tl.int32), 0)
        # The weight is read once, however many groups there are.
        if BLOCK_T == GROUP or count <= GROUP:
            _multiply(
                x, weight, bias, out, own, rows, N, K, stride_x, stride_weight, 1, GROUP, BLOCK_T,
                BLOCK_N, BLOCK_K, WHOLE_K, HAS_BIAS, IS_GATED, IS_GELU, LIMIT, ALPHA,
            )  # fmt: skip
        else:
            _multiply(
                x, weight, bias, out, own, rows, N, K, stride_x, stride_weight, BLOCK_T // GROUP,
                GROUP, BLOCK_T, BLOCK_N, BLOCK_K, WHOLE_K, HAS_BIAS, IS_GATED, IS_GELU, LIMIT,
                ALPHA,
            )  # fmt: skip


@triton.jit
def find_slot_of_tile(tiles, first_slot, S, BLOCK_S: tl.constexpr):
    """Return the slot of a program's tile of pairs, S where there is none, and its tile there.

    Slots are numbered from the first of S.
    """
    tiles += first_slot
    tile = tl.load(tiles) + tl.program_id(1)
    slots = tl.arange(0, BLOCK_S)
    ends = tl.load(tiles + 1 + slots, mask=slots < S, other=2147483647)
    slot = tl.sum((ends <= tile).to(tl.int32), 0)
    return slot, tile - tl.load(tiles + slot)


@triton.jit
def load_pairs_of_tile(order, starts, slot, tile, BLOCK_M: tl.constexpr):
    """Return the pairs of a tile, and which of its places have one."""
    numbers = tl.load(starts + slot) + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_pair = numbers < tl.load(starts + slot + 1)
    return tl.load(order + numbers, mask=is_pair, other=0), is_pair


@triton.jit
def store_tile(
    acc, up_acc, bias, out, rows, pairs, is_pair, outputs, N, HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr, IS_GELU: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
):  # fmt: skip
    """Store the sums of a tile of pairs, [BLOCK_M, BLOCK_N], with the gate where there is one."""
    if HAS_BIAS:
        acc += tl.load(bias + rows).to(tl.float32)[None, :]
        if IS_GATED:
            up_acc += tl.load(bias + rows + N).to(tl.float32)[None, :]
    if IS_GATED:
        # Rounded as the product alone would be.
        gate = acc.to(out.dtype.element_ty).to(tl.float32)
        up = up_acc.to(out.dtype.element_ty).to(tl.float32)
        acc = _activated(gate, up, IS_GELU, LIMIT, ALPHA)
    at = out + pairs.to(tl.int64)[:, None] * N + outputs[None, :]
    mask = is_pair[:, None] & (outputs < N)[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first_slot", "S"])
def _many_kernel(
    x, weight, bias, order, starts, tiles, out, N, K, first_slot, S, stride_x, stride_weight,
    TOP_K: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, WHOLE_K: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr,
    IS_GELU: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
):  # fmt: skip
    slot, tile = find_slot_of_tile(tiles, first_slot, S, BLOCK_S)
    if slot < S:
        pairs, is_pair = load_pairs_of_tile(order, starts + first_slot, slot, tile, BLOCK_M)
        x_rows = pairs
        if IS_GATED:
            x_rows = pairs // TOP_K
        inputs = tl.arange(0, BLOCK_K)
        x_at = x + x_rows.to(tl.int64)[:, None] * stride_x + inputs[None, :]
        outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = slot.to(tl.int64) * (2 * N if IS_GATED else N) + tl.minimum(outputs, N - 1)
        weight_at = weight + rows[:, None] * stride_weight + inputs[None, :]
        up_at = weight_at + N * stride_weight.to(tl.int64)
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        up_acc = acc
        for first in range(0, K, BLOCK_K):
            values = _load_tokens(x_at, inputs, first, K, is_pair, WHOLE_K)
            if WHOLE_K:
                weights = tl.load(weight_at + first)
            else:
                weights = tl.load(weight_at + first, mask=(inputs < K - first)[None, :], other=0.0)
            acc = tl.dot(values, tl.trans(weights), acc, input_precision="ieee")
            if IS_GATED:
                if WHOLE_K:
                    weights = tl.load(up_at + first)
                else:
                    weights = tl.load(up_at + first, mask=(inputs < K - first)[None, :], other=0.0)
                up_acc = tl.dot(values, tl.trans(weights), up_acc, input_precision="ieee")
        store_tile(
            acc, up_acc, bias, out, rows, pairs, is_pair, outputs, N, HAS_BIAS, IS_GATED, IS_GELU,
            LIMIT, ALPHA,
        )  # fmt: skip


class Gate(NamedTuple):
    """What is made of gates and ups.

    Attributes:
        is_gelu: act is gelu, not silu.
        clamp: limit and alpha of a clamped SwiGLU; None: act(gate) * up.
    """

    is_gelu: bool = False
    clamp: tuple[float, float] | None = None


class SortedPairs(NamedTuple):
    """Pairs of many tokens by their slot.

    Attributes:
        order: int64 [P], the pairs, those of lower slots first, of equal ones in order.
        starts: int64 [S + 1], where each slot's begin there.
        tiles: int64 [S + 1], how many tiles of block_m pairs slots before each one have.
        block_m: pairs of a tile.
        top_k: experts of a token.
    """

    order: torch.Tensor
    starts: torch.Tensor
    tiles: torch.Tensor
    block_m: int
    top_k: int

    @property
    def most_tiles(self) -> int:
        """Tiles at most: every slot with pairs has at most one that is not whole."""
        num_pairs, num_slots = self.order.shape[0], self.tiles.shape[0] - 1
        return num_pairs // self.block_m + min(num_slots, num_pairs)


def sort_pairs(slots_Tk: torch.Tensor, num_slots: int, dtype: torch.dtype) -> SortedPairs:
    """Sort pairs by slot; nothing waits for the device.

    Args:
        slots_Tk: int32, those below 0 are in no tile.
        num_slots: blocks of rows of the weight.
        dtype: of products.
    """
    slots = slots_Tk.reshape(-1)
    block_m = pairs_of_tile(slots.numel(), num_slots, dtype)
    found, order = slots.sort(stable=True)
    bounds = torch.arange(num_slots + 1, dtype=slots.dtype, device=slots.device)
    starts = torch.searchsorted(found, bounds)
    tiles = starts.new_zeros(num_slots + 1)
    torch.cumsum((starts.diff() + block_m - 1) // block_m, 0, out=tiles[1:])
    return SortedPairs(order, starts, tiles, block_m, slots_Tk.shape[1])


def meaning_of(gate: Gate | None) -> dict[str, Any]:
    """Return what kernels are compiled for of a gate."""
    is_gelu, clamp = gate or Gate()
    limit, alpha = clamp or (0.0, 0.0)
    return {"IS_GATED": gate is not None, "IS_GELU": is_gelu, "LIMIT": limit, "ALPHA": alpha}


def many(
    x: torch.Tensor,
    weight: torch.Tensor,
    pairs: SortedPairs,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    gate: Gate | None = None,
    first_slot: int = 0,
) -> None:
    """Launch a product of many tokens with some slots.

    Args:
        x: [T, K] where there is a gate, else [P, K]; stride 1 in the last dimension.
        weight: for each of these slots N rows, or N gates and N ups.
        pairs: by slot, of all slots.
        out: [P, N], contiguous; what is of these slots is written.
        bias: a value for each row of the weight, or None.
        gate: None: rows are no gates and ups.
        first_slot: the first of the slots.
    """
    size_out, size_in = out.shape[1], x.shape[1]
    num_slots = weight.shape[0] // (size_out if gate is None else 2 * size_out)
    tile = grouped_tile(pairs.block_m, x.dtype)
    _many_kernel[(triton.cdiv(size_out, tile.block_n), pairs.most_tiles)](
        x,
        weight,
        weight if bias is None else bias,
        pairs.order,
        pairs.starts,
        pairs.tiles,
        out,
        size_out,
        size_in,
        first_slot,
        num_slots,
        x.stride(0),
        weight.stride(0),
        TOP_K=pairs.top_k,
        BLOCK_S=triton.next_power_of_2(num_slots),
        BLOCK_M=pairs.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        WHOLE_K=size_in % tile.block_k == 0,
        HAS_BIAS=bias is not None,
        **meaning_of(gate),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def few_grid(
    slots_Tk: torch.Tensor, num_rows: int, size_out: int, block_n: int, *, is_gated: bool
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the programs of a product of few tokens, and what they are compiled for.

    Args:
        slots_Tk: the block of each pair.
        num_rows: of the weight.
        size_out: outputs of an expert.
        block_n: rows of the weight of a program.
        is_gated: whether rows are gates and ups.
    """
    num_tokens, top_k = slots_Tk.shape
    num_slots = num_rows // (2 * size_out if is_gated else size_out)
    block_t = max(GROUP, triton.next_power_of_2(num_tokens))
    assert block_t <= MAX_SMALL_TOKENS
    by_pair = num_tokens * top_k <= num_slots
    outputs = block_n // 2 if is_gated else block_n
    grid = triton.cdiv(size_out, outputs), num_tokens * top_k if by_pair else num_slots
    places = triton.next_power_of_2(top_k)
    return grid, {"BLOCK_T": block_t, "BLOCK_PLACES": places, "BY_PAIR": by_pair}


def few(
    x: torch.Tensor,
    weight: torch.Tensor,
    slots_Tk: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    gate: Gate | None = None,
    first_slot: int = 0,
) -> None:
    """Launch a product of at most MAX_SMALL_TOKENS tokens with some slots.

    Args:
        x: as that of `many`.
        weight: as there.
        slots_Tk: the block of each pair, or -1.
        out: as there.
        bias: as there.
        gate: as there.
        first_slot: as there.
    """
    (num_tokens, top_k), size_out, size_in = slots_Tk.shape, out.shape[1], x.shape[1]
    num_slots = weight.shape[0] // (size_out if gate is None else 2 * size_out)
    is_wide = x.dtype == torch.float32
    block_n, block_k = 32, 32 if is_wide else 128
    grid, shape = few_grid(slots_Tk, weight.shape[0], size_out, block_n, is_gated=gate is not None)
    _few_kernel[grid](
        x,
        weight,
        weight if bias is None else bias,
        slots_Tk,
        out,
        num_tokens,
        first_slot,
        num_slots,
        size_out,
        size_in,
        x.stride(0),
        weight.stride(0),
        TOP_K=top_k,
        **shape,
        GROUP=GROUP,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        WHOLE_K=size_in % block_k == 0,
        HAS_BIAS=bias is not None,
        **meaning_of(gate),
        num_warps=4,
        num_stages=3,
        **launch_options(x.device),
    )
