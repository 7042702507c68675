"""Tile shapes of the attention kernels, from head size, element size and shared memory alone.

A batch has no say in them, so that a sequence's result is the same in every batch.
"""

from dataclasses import dataclass

import torch

_LARGE_SHARED_MEMORY = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Compute capabilities with 160 KiB or more of shared memory a block; others have 99 KiB."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel's shape.

    Attributes:
        rows: query rows of a program; prefill only.
        keys: keys of one iteration.
        num_warps: warps of a program.
        num_stages: iterations whose loads are in flight.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def decode_tile(head_size: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """Return the tile of decode attention; rows is unused.

    Args:
        head_size: elements of a head.
        dtype: element type of the cache.
        device: where the kernel runs.
    """
    if dtype == torch.float32:
        return Tile(rows=0, keys=32 if head_size <= 128 else 16, num_warps=4, num_stages=2)
    keys = 64 if head_size <= 128 else 32
    return Tile(rows=0, keys=keys, num_warps=4, num_stages=3 if _has_large_shared(device) else 2)


def prefill_tile(head_size: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """Return the tile of prefill attention.

    Args:
        head_size: elements of a head.
        dtype: element type of the cache.
        device: where the kernel runs.
    """
    if dtype == torch.float32:
        keys = 32 if head_size <= 128 else 16
        return Tile(rows=32, keys=keys, num_warps=4, num_stages=2)
    num_stages = 3 if _has_large_shared(device) else 2
    if head_size <= 64:
        return Tile(rows=128, keys=64, num_warps=4, num_stages=num_stages)
    if head_size <= 128:
        return Tile(rows=128, keys=64, num_warps=8, num_stages=num_stages)
    return Tile(rows=64, keys=32, num_warps=4, num_stages=2)


def _has_large_shared(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) in _LARGE_SHARED_MEMORY
