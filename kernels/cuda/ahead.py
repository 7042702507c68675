"""Which kernels a product will launch, so that they can be compiled before."""

from typing import Final

import torch

from kernels.cuda.driver import Kernel, capability
from kernels.cuda.products import _launch_shape
from kernels.sizes import LEAST_CAPABILITY

_LEAST_TOKENS: Final = (1, 9, 17, 33)
"""The least of the numbers of tokens that one kernel serves."""


def kernels_of(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_gated: bool,
    has_codes: bool,
    max_tokens: int,
) -> set[Kernel]:
    """Return the kernels of the products of few tokens with a weight.

    Args:
        shape: of the weight.
        dtype: of the tokens.
        device: where they run.
        is_gated: whether its rows are gates and then as many ups.
        has_codes: whether it is in codes.
        max_tokens: of a product.
    """
    num_rows, size_in = shape
    fills_tiles = num_rows % (32 if is_gated else 16) == 0 and size_in % 64 == 0
    if not fills_tiles or dtype == torch.float32 or capability(device) < LEAST_CAPABILITY:
        return set()
    is_half = dtype == torch.float16
    counts = [count for count in _LEAST_TOKENS if count <= max_tokens]
    shapes = (_launch_shape(n, num_rows, device, is_gated, has_codes, is_half) for n in counts)
    return {kernel for kernel, *_ in shapes}
