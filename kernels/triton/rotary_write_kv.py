"""What lies between the projection of q, k, v and attention: norms, rotation, cache write.

T tokens, N query heads, K KV heads, H head size, R rotated elements, P tokens per block. A program
takes one token and some heads of q, of k or of v; all heads where the norm spans them.
"""

import functools

import torch
import triton
import triton.language as tl

from kernels.arguments import HostCache
from kernels.triton.dependent import launch_options, release, wait
from kernels.triton.launch import Launcher, power_of_2
from kernels.triton.tiers import block_starts

_ELEMENTS_PER_PROGRAM = 2048


@triton.jit
def _scale(squares, count, eps, NORM: tl.constexpr):
    """Return 1 / root mean square [HEADS, 1] of a head, or of all heads."""
    if NORM == "full":
        squares = tl.zeros_like(squares) + tl.sum(squares, axis=0)
    return tl.rsqrt(squares / count + eps)[:, None]


@triton.jit
def _normed(values, scale, weight, OFFSET: tl.constexpr, rounded: tl.constexpr):
    return (values * scale * (weight.to(tl.float32) + OFFSET)).to(rounded).to(tl.float32)


@triton.jit
def _rotate(
    source,
    target,
    stride_source,
    stride_target,
    first_head,
    num_heads,
    weight,
    cos,
    sin,
    eps,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    H: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    heads = first_head + tl.arange(0, HEADS)
    columns = tl.arange(0, HALF_PADDED)
    rest = 2 * HALF + tl.arange(0, REST_PADDED)
    is_head = (heads < num_heads)[:, None]
    mask = is_head & (columns < HALF)[None, :]
    rest_mask = is_head & (rest < H)[None, :]
    row = source + heads[:, None] * stride_source
    if NORM != "none":
        weight_row = weight + heads[:, None] * (H if NORM == "full" else 0)
        first_weight = tl.load(weight_row + columns[None, :], mask=mask, other=0.0)
        second_weight = tl.load(weight_row + HALF + columns[None, :], mask=mask, other=0.0)
        if 2 * HALF < H:
            other_weight = tl.load(weight_row + rest[None, :], mask=rest_mask, other=0.0)
    if OVERLAPS:  # behind weights and what the step brought along
        wait()
        release()
    first = tl.load(row + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(row + HALF + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    others = tl.zeros([HEADS, REST_PADDED], dtype=tl.float32)
    if 2 * HALF < H:
        others = tl.load(row + rest[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if NORM != "none":
        squares = tl.sum(first * first + second * second, axis=1)
        if 2 * HALF < H:
            squares += tl.sum(others * others, axis=1)
        rounded: tl.constexpr = source.dtype.element_ty
        count = num_heads * H if NORM == "full" else H
        scale = _scale(squares, count, eps, NORM)
        first = _normed(first, scale, first_weight, OFFSET, rounded)
        second = _normed(second, scale, second_weight, OFFSET, rounded)
        if 2 * HALF < H:
            others = _normed(others, scale, other_weight, OFFSET, rounded)
    to = target + heads.to(tl.int64)[:, None] * stride_target
    rotated_first = first * cos[None, :] - second * sin[None, :]
    rotated_second = second * cos[None, :] + first * sin[None, :]
    tl.store(to + columns[None, :], rotated_first.to(target.dtype.element_ty), mask=mask)
    tl.store(to + HALF + columns[None, :], rotated_second.to(target.dtype.element_ty), mask=mask)
    if 2 * HALF < H:
        tl.store(to + rest[None, :], others.to(target.dtype.element_ty), mask=rest_mask)


@triton.jit(do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["positions", "slots"])
def _rotary_write_kv_kernel(
    q,
    k,
    v,
    q_weight,
    k_weight,
    cos_sin,
    k_cache,
    v_cache,
    host_k,
    host_v,
    positions,
    slots,
    num_blocks,
    num_q_heads,
    num_k_heads,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_table,
    stride_kc_block,
    stride_kc_head,
    stride_kc_token,
    stride_vc_block,
    stride_vc_head,
    stride_vc_token,
    stride_host_k_block,
    stride_host_v_block,
    eps,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    H: tl.constexpr,
    H_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    P: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    TIERED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    q_programs = tl.cdiv(num_q_heads, Q_HEADS)
    k_programs = tl.cdiv(num_k_heads, K_HEADS)
    slot = tl.load(slots + token).to(tl.int64)
    columns = tl.arange(0, HALF_PADDED)
    row = cos_sin + tl.load(positions + token).to(tl.int64) * stride_table
    cos = tl.load(row + columns, mask=columns < HALF, other=0.0)
    sin = tl.load(row + HALF + columns, mask=columns < HALF, other=0.0)
    if program >= q_programs and slot < 0:
        return  # at once: the programs of q are there to wait
    block = slot // P
    offset = slot % P
    if program < q_programs:
        start = q + token * stride_q_token
        _rotate(
            start,
            start,
            stride_q_head,
            stride_q_head,
            program * Q_HEADS,
            num_q_heads,
            q_weight,
            cos,
            sin,
            eps,
            NORM=NORM,
            OFFSET=OFFSET,
            H=H,
            HALF=HALF,
            HALF_PADDED=HALF_PADDED,
            REST_PADDED=REST_PADDED,
            HEADS=Q_HEADS,
            OVERLAPS=OVERLAPS,
        )
    elif program < q_programs + k_programs:
        target = block_starts(
            k_cache,
            host_k,
            block,
            num_blocks,
            stride_kc_block,
            stride_host_k_block,
            TIERED=TIERED,
        )
        _rotate(
            k + token * stride_k_token,
            target + offset * stride_kc_token,
            stride_k_head,
            stride_kc_head,
            (program - q_programs) * K_HEADS,
            num_k_heads,
            k_weight,
            cos,
            sin,
            eps,
            NORM=NORM,
            OFFSET=OFFSET,
            H=H,
            HALF=HALF,
            HALF_PADDED=HALF_PADDED,
            REST_PADDED=REST_PADDED,
            HEADS=K_HEADS,
            OVERLAPS=OVERLAPS,
        )
    else:
        if OVERLAPS:
            wait()
            release()
        heads = (program - q_programs - k_programs) * K_HEADS + tl.arange(0, K_HEADS)
        elements = tl.arange(0, H_PADDED)
        mask = (heads < num_k_heads)[:, None] & (elements < H)[None, :]
        source = v + token * stride_v_token + heads[:, None] * stride_v_head + elements[None, :]
        target = block_starts(
            v_cache,
            host_v,
            block,
            num_blocks,
            stride_vc_block,
            stride_host_v_block,
            TIERED=TIERED,
        )
        target += offset * stride_vc_token
        to = target + heads.to(tl.int64)[:, None] * stride_vc_head + elements[None, :]
        tl.store(to, tl.load(source, mask=mask), mask=mask)


@functools.cache
def _launcher(
    num_q_heads: int,
    num_k_heads: int,
    head_size: int,
    rotated: int,
    tokens_per_block: int,
    norm: str,
    offset: float,
    device: torch.device,
    *,
    is_tiered: bool,
) -> tuple[Launcher, int]:
    """Return what launches the kernel for these sizes, and the programs of a token."""
    half, padded = rotated // 2, power_of_2(head_size)
    q_heads, k_heads = power_of_2(num_q_heads), power_of_2(num_k_heads)
    # A function of the sizes alone, so that a token's result is the same in every batch.
    most_heads = max(1, _ELEMENTS_PER_PROGRAM // padded)
    if norm != "full":
        q_heads, k_heads = min(q_heads, most_heads), min(k_heads, most_heads)
    launch = Launcher(
        _rotary_write_kv_kernel,
        device,
        NORM=norm,
        OFFSET=offset,
        H=head_size,
        H_PADDED=padded,
        HALF=half,
        HALF_PADDED=power_of_2(half),
        REST_PADDED=power_of_2(max(1, head_size - 2 * half)),
        P=tokens_per_block,
        Q_HEADS=q_heads,
        K_HEADS=k_heads,
        TIERED=is_tiered,
        num_warps=max(1, min(8, max(q_heads, k_heads) * padded // 512)),
        **launch_options(device),
    )
    return launch, -(-num_q_heads // q_heads) - 2 * (-num_k_heads // k_heads)


def rotary_write_kv_(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    offset: float = 0.0,
    host: HostCache | None = None,
) -> None:
    """Launch kernels.ops.kv.rotary_write_kv_."""
    num_tokens, num_q_heads, head_size = q_TNH.shape
    num_k_heads = k_TKH.shape[1]
    if num_tokens == 0:
        return
    norm = "none"
    if q_weight is not None:
        norm = "head" if q_weight.shape[0] == head_size else "full"
    beside_k, beside_v = (k_cache, v_cache) if host is None else (host.k, host.v)
    sizes = num_q_heads, num_k_heads, head_size, cos_sin.shape[1], k_cache.shape[2]
    launch, programs = _launcher(*sizes, norm, offset, q_TNH.device, is_tiered=host is not None)
    launch(
        (num_tokens, programs, 1),
        (
            q_TNH,
            k_TKH,
            v_TKH,
            cos_sin if q_weight is None else q_weight,
            cos_sin if k_weight is None else k_weight,
            cos_sin,
            k_cache,
            v_cache,
            beside_k,
            beside_v,
        ),
        (positions, slots),
        (k_cache.shape[0],),
        (
            num_q_heads,
            num_k_heads,
            *q_TNH.stride()[:2],
            *k_TKH.stride()[:2],
            *v_TKH.stride()[:2],
            cos_sin.stride()[0],
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            beside_k.stride()[0],
            beside_v.stride()[0],
            float(eps),
        ),
    )
