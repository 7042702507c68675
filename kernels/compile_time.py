"""How long Triton compiles, told apart from the steps in which it does."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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

    def take_s(self) -> float:
        """Return the seconds since the last call."""
        seconds, self._microseconds = self._microseconds / 1e6, 0
        return seconds


@contextmanager
def count_compile_time(*, enabled: bool) -> Iterator[CompileTime]:
    """Count while open; zero where nothing compiles or this Triton does not tell (before 3.4).

    Args:
        enabled: Whether Triton runs at all; it is imported only then.
    """
    counted = CompileTime()
    compilation = _compilation_knobs() if enabled else None
    if compilation is None:
        yield counted
        return
    before = compilation.listener

    def listen(**facts: Any) -> None:
        counted.add(**facts)
        if before is not None:
            before(**facts)

    compilation.listener = listen
    try:
        yield counted
    finally:
        compilation.listener = before


def _compilation_knobs() -> Any:
    try:
        from triton import knobs  # noqa: PLC0415  not on every machine
    except ImportError:
        return None
    return knobs.compilation if hasattr(knobs.compilation, "listener") else None
