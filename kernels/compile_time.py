"""Compiling kernels: CUDA's several at once, what it raises, and what it and Triton's take."""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
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


class CompileTime:
    """Counts kernels and the time of compiling them."""

    def __init__(self) -> None:
        self._microseconds = 0
        self.num_kernels = 0
        """Kernels compiled since counting began; those found in Triton's cache are not."""

    def add(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        """Count one kernel; Triton calls this."""
        self._microseconds += times.total
        self.num_kernels += not cache_hit

    def add_s(self, seconds: float) -> None:
        """Count one kernel that Triton has no part in."""
        self._microseconds += round(seconds * 1e6)
        self.num_kernels += 1

    def take_s(self) -> float:
        """Return the seconds since the last call."""
        seconds, self._microseconds = self._microseconds / 1e6, 0
        return seconds


@contextlib.contextmanager
def count_compile_time(*, enabled: bool) -> Iterator[CompileTime]:
    """Count while open; without Triton's where it does not tell (before 3.4).

    Args:
        enabled: Whether kernels run at all; Triton is imported only then.
    """
    counted = CompileTime()
    token = LISTENER.set(counted.add_s if enabled else None)
    try:
        with _triton_told(counted if enabled else None):
            yield counted
    finally:
        LISTENER.reset(token)


@contextlib.contextmanager
def _triton_told(counted: CompileTime | None) -> Iterator[None]:
    """Let Triton tell what it compiles, beside whom it tells already."""
    compilation = None if counted is None else _compilation_knobs()
    if counted is None or compilation is None:
        yield
        return
    before = compilation.listener

    def listen(**facts: Any) -> None:
        counted.add(**facts)
        if before is not None:
            before(**facts)

    compilation.listener = listen
    try:
        yield
    finally:
        compilation.listener = before


def _compilation_knobs() -> Any:
    try:
        from triton import knobs  # noqa: PLC0415  not on every machine
    except ImportError:
        return None
    return knobs.compilation if hasattr(knobs.compilation, "listener") else None
