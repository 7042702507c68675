"""Blocks of a cache and of the tier beside it, in one numbering."""

import triton
import triton.language as tl


@triton.jit
def block_starts(
    start,
    host_start,
    block,
    num_blocks,
    stride,
    host_stride,
    TIERED: tl.constexpr,
):
    """Return pointers to blocks: those from num_blocks on lie beside the cache.

    Without TIERED all lie in the cache; host_start, num_blocks and host_stride are not read.
    """
    starts = start + block * stride
    if TIERED:
        beside = host_start + (block - num_blocks) * host_stride
        starts = tl.where(block < num_blocks, starts, beside)
    return starts
