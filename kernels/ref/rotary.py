"""Twin of the position encoding. T tokens, N query heads, K KV heads, H head size, R rotated."""

import torch


def rotary_(
    q_TNH: torch.Tensor, k_TKH: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor
) -> None:
    """Twin of kernels.ops.rotary_."""
    half = cos_sin.shape[1] // 2
    rows = cos_sin[positions].unsqueeze(1)
    cos, sin = rows[..., :half], rows[..., half:]
    for x in (q_TNH, k_TKH):
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        rotated_first = first * cos - second * sin
        rotated_second = second * cos + first * sin
        x[..., :half] = rotated_first
        x[..., half : 2 * half] = rotated_second
