"""Most probable tokens: a program takes one row, in blocks of the vocabulary."""

import functools

import torch
import triton
import triton.language as tl

from kernels.triton.launch import Launcher, power_of_2

_MAX_BLOCK_V = 16384
"""A block's logits are in flight together, 16 of each thread."""


# Rows start at any multiple of 4 bytes; one compiled variant serves them all.
@triton.jit(do_not_specialize_on_alignment=["logits"])
def _most_probable_kernel(
    found, largest, logits, stride_row, V: tl.constexpr, BLOCK_V: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride_row
    most = float("-inf")
    total = 0.0
    token = V - 1
    for first in range(0, V, BLOCK_V):
        columns = first + tl.arange(0, BLOCK_V)
        values = tl.load(start + columns, mask=columns < V, other=float("-inf"))
        block_most = tl.max(values, axis=0)
        block_token = tl.min(tl.where(values == block_most, columns, V - 1), axis=0)
        token = tl.where(block_most > most, block_token, token)
        new_most = tl.maximum(most, block_most)
        # While there is nothing but negative infinity, nothing is added.
        shift = tl.where(new_most == float("-inf"), 0.0, new_most)
        total = total * tl.exp(most - shift) + tl.sum(tl.exp(values - shift), axis=0)
        most = new_most
    total = tl.where(most == float("-inf"), float("nan"), total)
    tl.store(found + row * 2, token.to(tl.float64))
    tl.store(found + row * 2 + 1, -tl.log(total.to(tl.float64)))
    tl.store(largest + row, most)


@functools.cache
def _launcher(size: int, device: torch.device) -> Launcher:
    block = min(_MAX_BLOCK_V, power_of_2(size))
    num_warps = max(1, min(32, block // 512))
    return Launcher(_most_probable_kernel, device, V=size, BLOCK_V=block, num_warps=num_warps)


def most_probable(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch kernels.ops.logits.most_probable."""
    num_rows, size = logits_SV.shape
    found = logits_SV.new_empty((num_rows, 2), dtype=torch.float64)
    largest = logits_SV.new_empty(num_rows)
    if num_rows:
        launch = _launcher(size, logits_SV.device)
        launch((num_rows, 1, 1), (found, largest), (logits_SV,), (), logits_SV.stride()[:1])
    return found, largest
