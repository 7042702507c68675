"""Who is told what compiling a CUDA kernel took; Triton's has a listener of its own."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Final

LISTENER: Final[ContextVar[Callable[[float], object] | None]] = ContextVar("compiled", default=None)
"""Called with seconds, in the thread that compiled, after each kernel that was not kept on disk."""
