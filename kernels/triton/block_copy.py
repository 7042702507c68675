"""Copy of blocks, any to any. B blocks, W words of a block."""

import torch
import triton
import triton.language as tl

_TILE = 4096
MAX_PROGRAMS = 32
"""Enough to fill a PCIe 5 link in either direction, and few beside the card's multiprocessors,
which compute needs."""


# Lists of numbers start at any multiple of 8 bytes; one compiled variant serves them all, so that
# none is compiled in the middle of a run.
@triton.jit(do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["dst_ids", "src_ids"])
def _copy_blocks_kernel(
    dst,
    src,
    dst_ids,
    src_ids,
    num_blocks,
    W,
    stride_dst,
    stride_src,
    TILE: tl.constexpr,
):
    tiles = tl.cdiv(W, TILE)
    for unit in range(tl.program_id(0), num_blocks * tiles, tl.num_programs(0)):
        place = unit // tiles
        words = (unit % tiles) * TILE + tl.arange(0, TILE)
        mask = words < W
        source = src + tl.load(src_ids + place).to(tl.int64) * stride_src
        target = dst + tl.load(dst_ids + place).to(tl.int64) * stride_dst
        tl.store(target + words, tl.load(source + words, mask=mask), mask=mask)


def copy_blocks(
    dst_BW: torch.Tensor,
    src_BW: torch.Tensor,
    dst_ids: torch.Tensor,
    src_ids: torch.Tensor,
    *,
    max_programs: int = MAX_PROGRAMS,
) -> None:
    """Launch kernels.ops.kv.copy_blocks, with another bound of programs where one is measured."""
    num_blocks, words = dst_ids.shape[0], dst_BW.shape[1]
    if num_blocks == 0 or words == 0:
        return
    tile = min(_TILE, triton.next_power_of_2(words))
    programs = min(max_programs, num_blocks * triton.cdiv(words, tile))
    _copy_blocks_kernel[(programs,)](
        dst_BW,
        src_BW,
        dst_ids,
        src_ids,
        num_blocks,
        words,
        dst_BW.stride(0),
        src_BW.stride(0),
        TILE=tile,
        num_warps=8,
    )
