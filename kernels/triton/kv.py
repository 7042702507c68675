"""Cache write. T tokens, K KV heads, H head size, P tokens per block."""

import torch
import triton
import triton.language as tl

_ELEMENTS_PER_PROGRAM = 4096


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _write_kv_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    num_heads,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_kc_block,
    stride_kc_head,
    stride_kc_token,
    stride_vc_block,
    stride_vc_head,
    stride_vc_token,
    P: tl.constexpr,
    H: tl.constexpr,
    H_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    block = slot // P
    offset = slot % P
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    columns = tl.arange(0, H_PADDED)
    mask = (heads < num_heads)[:, None] & (columns < H)[None, :]
    k_from = k + token * stride_k_token + heads[:, None] * stride_k_head + columns[None, :]
    v_from = v + token * stride_v_token + heads[:, None] * stride_v_head + columns[None, :]
    k_start = k_cache + block * stride_kc_block + offset * stride_kc_token
    v_start = v_cache + block * stride_vc_block + offset * stride_vc_token
    k_to = k_start + heads[:, None] * stride_kc_head + columns[None, :]
    v_to = v_start + heads[:, None] * stride_vc_head + columns[None, :]
    tl.store(k_to, tl.load(k_from, mask=mask), mask=mask)
    tl.store(v_to, tl.load(v_from, mask=mask), mask=mask)


def write_kv(
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Launch kernels.ops.write_kv."""
    num_tokens, num_heads, head_size = k_TKH.shape
    if num_tokens == 0:
        return
    padded = triton.next_power_of_2(head_size)
    heads = max(1, min(triton.next_power_of_2(num_heads), _ELEMENTS_PER_PROGRAM // padded))
    _write_kv_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        k_TKH,
        v_TKH,
        k_cache,
        v_cache,
        slots,
        num_heads,
        k_TKH.stride(0),
        k_TKH.stride(1),
        v_TKH.stride(0),
        v_TKH.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        P=k_cache.shape[2],
        H=head_size,
        H_PADDED=padded,
        HEADS=heads,
        num_warps=4,
    )
