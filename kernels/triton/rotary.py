"""Position encoding in place. T tokens, N query heads, K KV heads, H head size, R rotated."""

import torch
import triton
import triton.language as tl

_ELEMENTS_PER_PROGRAM = 2048


@triton.jit
def _rotate_heads(
    start,
    stride_head,
    first_head,
    num_heads,
    cos,
    sin,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
):
    heads = first_head + tl.arange(0, HEADS)
    columns = tl.arange(0, HALF_PADDED)
    mask = (heads < num_heads)[:, None] & (columns < HALF)[None, :]
    first_at = start + heads[:, None] * stride_head + columns[None, :]
    second_at = first_at + HALF
    first = tl.load(first_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(second_at, mask=mask, other=0.0).to(tl.float32)
    rotated_first = first * cos[None, :] - second * sin[None, :]
    rotated_second = second * cos[None, :] + first * sin[None, :]
    tl.store(first_at, rotated_first.to(start.dtype.element_ty), mask=mask)
    tl.store(second_at, rotated_second.to(start.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _rotary_kernel(
    q,
    k,
    cos_sin,
    positions,
    num_q_heads,
    num_k_heads,
    q_programs,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_table,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    columns = tl.arange(0, HALF_PADDED)
    row = cos_sin + tl.load(positions + token).to(tl.int64) * stride_table
    cos = tl.load(row + columns, mask=columns < HALF, other=0.0)
    sin = tl.load(row + HALF + columns, mask=columns < HALF, other=0.0)
    if program < q_programs:
        start = q + token * stride_q_token
        _rotate_heads(
            start,
            stride_q_head,
            program * HEADS,
            num_q_heads,
            cos,
            sin,
            HALF=HALF,
            HALF_PADDED=HALF_PADDED,
            HEADS=HEADS,
        )
    else:
        start = k + token * stride_k_token
        _rotate_heads(
            start,
            stride_k_head,
            (program - q_programs) * HEADS,
            num_k_heads,
            cos,
            sin,
            HALF=HALF,
            HALF_PADDED=HALF_PADDED,
            HEADS=HEADS,
        )


def rotary_(
    q_TNH: torch.Tensor, k_TKH: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor
) -> None:
    """Launch kernels.ops.rotary_."""
    num_tokens, num_q_heads = q_TNH.shape[:2]
    num_k_heads = k_TKH.shape[1]
    if num_tokens == 0:
        return
    half = cos_sin.shape[1] // 2
    half_padded = triton.next_power_of_2(half)
    heads = max(1, min(triton.next_power_of_2(num_q_heads), _ELEMENTS_PER_PROGRAM // half_padded))
    q_programs = triton.cdiv(num_q_heads, heads)
    k_programs = triton.cdiv(num_k_heads, heads)
    _rotary_kernel[(num_tokens, q_programs + k_programs)](
        q_TNH,
        k_TKH,
        cos_sin,
        positions,
        num_q_heads,
        num_k_heads,
        q_programs,
        q_TNH.stride(0),
        q_TNH.stride(1),
        k_TKH.stride(0),
        k_TKH.stride(1),
        cos_sin.stride(0),
        HALF=half,
        HALF_PADDED=half_padded,
        HEADS=heads,
        num_warps=4,
    )
