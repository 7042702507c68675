"""Memory in which products of many tokens restore matrices, or some of their experts."""

import torch

from kernels.sizes import restored_experts


def scratch_of(
    memory: torch.Tensor, shape: tuple[int, int], num_experts: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return the rows that are restored together, in memory; None: they have no room there.

    Args:
        memory: uint8, one dimension.
        shape: rows and columns of the whole matrix.
        num_experts: of the matrix, some of which are restored together; 0: it has none.
        dtype: of what is restored.
    """
    rows, columns = shape
    if num_experts:
        each = rows // num_experts
        rows = each * restored_experts(num_experts, each, columns, dtype.itemsize)
    size = rows * columns * dtype.itemsize
    return None if memory.numel() < size else memory[:size].view(dtype).view(rows, columns)


def check_scratch(
    name: str, scratch: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Raise ValueError unless scratch has rows of a matrix.

    Args:
        name: of what holds the scratch, for the message.
        scratch: that was given.
        shape: rows and columns of the whole matrix.
        dtype: of what is restored.
    """
    rows, columns = scratch.shape
    is_matrix = scratch.is_contiguous() and scratch.dtype == dtype
    if not is_matrix or columns != shape[1] or rows > shape[0]:
        raise ValueError(
            f"{name}.scratch: expected a contiguous matrix of at most {shape[0]} rows, {shape[1]} "
            f"columns and {dtype}, got shape {tuple(scratch.shape)} and {scratch.dtype}. Make it "
            "with with_scratch."
        )
