"""Compiling CUDA kernels: several at once, what it raises, who is told what it took."""

import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, Final

import torch

LISTENER: Final[ContextVar[Callable[[float], object] | None]] = ContextVar("compiled", default=None)
"""Called with seconds, in the thread that compiled, after each kernel that was not kept on disk.
Triton has a listener of its own."""
_MAX_THREADS: Final = 4


class CudaError(RuntimeError):
    """NVRTC or the CUDA driver refused a call."""


class Compilation:
    """Kernels that threads compile, or find on disk, from now on; NVRTC holds no lock of Python's.

    Args:
        kernels: kernels.cuda.driver.Kernel, as kernels_of of a module of kernels.ops has them.
        device: that they are for.
    """

    def __init__(self, kernels: Collection[Any], device: torch.device) -> None:
        self.kernels = sorted(kernels, key=repr)

        def seconds(kernel: Any) -> float:
            begin = time.perf_counter()
            kernel.keep(device)
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
