"""Tile shapes of the attention kernels, from head size and element size alone.

A batch has no say in them, so that a sequence's result is the same in every batch. All fit the
99 KiB of shared memory that a block has on consumer cards.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel's shape.

    Attributes:
        keys: keys of one iteration.
        num_warps: warps of a program.
        num_stages: iterations whose loads are in flight.
        rows: query rows of a program; decode derives its own from the heads.
    """

    keys: int
    num_warps: int
    num_stages: int
    rows: int = 0


def decode_tile(head_size: int, dtype: torch.dtype) -> Tile:
    """Return the tile of decode attention.

    Args:
        head_size: elements of a head.
        dtype: element type of the cache.
    """
    if dtype == torch.float32:
        return Tile(keys=32 if head_size <= 128 else 16, num_warps=4, num_stages=2)
    return Tile(keys=64 if head_size <= 128 else 32, num_warps=4, num_stages=3)


def prefill_tile(head_size: int, dtype: torch.dtype) -> Tile:
    """Return the tile of prefill attention.

    Args:
        head_size: elements of a head.
        dtype: element type of the cache.
    """
    if dtype == torch.float32:
        return Tile(rows=32, keys=16, num_warps=8, num_stages=2)
    if head_size <= 128:
        return Tile(rows=128, keys=64, num_warps=8, num_stages=3)
    return Tile(rows=64, keys=32, num_warps=8, num_stages=2)
