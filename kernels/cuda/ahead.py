"""Compile the kernels of a model's products before their first launch, several at once."""

import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from kernels.cuda.driver import Kernel, cache_folder, capability, kept
from kernels.cuda.products import _launch_shape
from kernels.sizes import LEAST_CAPABILITY

_LEAST_TOKENS: Final = (1, 9, 17, 33)
"""The least of the numbers of tokens that one kernel serves."""
_MAX_THREADS: Final = 4


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


class Compilation:
    """Kernels that threads compile, or find on disk, from now on; NVRTC holds no lock of Python's.

    Args:
        kernels: which.
        device: that they are for.
    """

    def __init__(self, kernels: Collection[Kernel], device: torch.device) -> None:
        card, self.kernels = capability(device), sorted(kernels, key=repr)

        def seconds(kernel: Kernel) -> float:
            begin = time.perf_counter()
            kept(kernel, card, cache_folder())
            return time.perf_counter() - begin

        self._pool = ThreadPoolExecutor(_MAX_THREADS, "compile")
        self._seconds = [self._pool.submit(seconds, each) for each in self.kernels]

    def join(self) -> float:
        """Wait until all are on disk; return the seconds that they took, summed over threads.

        Raises:
            CudaError: one does not compile.
        """
        seconds = sum(each.result() for each in self._seconds)
        self.close()
        return seconds

    def close(self) -> None:
        """Begin no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
