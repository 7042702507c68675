"""torch's allocator of one GPU, which all engines of a process share: its bound and its peak."""

import functools
import weakref

import torch


class SharedAllocator:
    """Bounds the allocator by what the open engines may take together, and knows their peak.

    Args:
        index: Of the GPU.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._bounds: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._base = 0

    def open(self) -> None:
        """Begin to count the peak anew, unless an engine is open."""
        if not self._bounds:
            self._base = torch.cuda.memory_reserved(self._index)
            torch.cuda.reset_peak_memory_stats(self._index)

    def bound(self, owner: object, num_bytes: int) -> None:
        """Let an engine take so many bytes, beside what others may and what was there before."""
        self._bounds[owner] = num_bytes
        self._apply()

    def release(self, owner: object) -> None:
        """Forget an engine; the bound is that of the others, none without any.

        With the last one go cuBLAS's workspaces, which torch keeps for each stream that called it.
        """
        self._bounds.pop(owner, None)
        if not self._bounds:
            torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001
        self._apply()

    def peak_bytes(self) -> int:
        """Return the most bytes of all engines together since the first of those open came."""
        return torch.cuda.max_memory_reserved(self._index) - self._base

    def _apply(self) -> None:
        share = 1.0
        if self._bounds:
            total = torch.cuda.mem_get_info(self._index)[1]
            share = max(0.0, min(1.0, (self._base + sum(self._bounds.values())) / total))
        torch.cuda.set_per_process_memory_fraction(share, self._index)


@functools.cache
def shared_allocator(index: int) -> SharedAllocator:
    """Return what keeps the accounts of a GPU's allocator, of which a process has one."""
    return SharedAllocator(index)
