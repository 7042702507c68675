"""Twin of the copy of blocks."""

import torch


def copy_blocks(
    dst_BW: torch.Tensor, src_BW: torch.Tensor, dst_ids: torch.Tensor, src_ids: torch.Tensor
) -> None:
    """Twin of kernels.ops.copy_blocks."""
    dst_BW[dst_ids] = src_BW[src_ids]
