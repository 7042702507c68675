"""Host memory: what may be taken, buffers of exact size, and the switches that disable pinning."""

import contextlib
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import torch

CHUNK_BYTES = 64 * 2**20


def available_bytes() -> int:
    """Return host memory that can be taken: free memory, within the cgroup's limit.

    The page cache counts as free, in the cgroup too.
    """
    free = int(psutil.virtual_memory().available)
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit != "max":
            used = int((root / "memory.current").read_text())
            stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
            cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
            free = min(free, int(limit) - used + cached)
    except (OSError, ValueError):
        return free
    return max(0, free)


def disabled(switch: str) -> bool:
    """Whether TIGHTFIT_DISABLE_<switch> is set to something other than 0."""
    return os.environ.get(f"TIGHTFIT_DISABLE_{switch}", "0") not in {"", "0"}


def capabilities() -> tuple[bool, bool, str]:
    """Return whether pinning and in-place reads are allowed here, and why not."""
    if disabled("PIN_MEMORY"):
        return False, False, "TIGHTFIT_DISABLE_PIN_MEMORY is set"
    if disabled("UVA"):
        return True, False, "TIGHTFIT_DISABLE_UVA is set"
    return True, True, ""


def num_threads() -> int:
    """Return how many threads host memory work uses: the cores this process may run on."""
    return min(16, len(os.sched_getaffinity(0)))


def chunks(num_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of pieces of a buffer."""
    for start in range(0, num_bytes, chunk_bytes):
        yield start, min(num_bytes, start + chunk_bytes)


class MappedBuffer:
    """Anonymous memory of an exact size, touched in parallel so that every page is present."""

    pinned = False

    def __init__(self, num_bytes: int) -> None:
        mapping = mmap.mmap(-1, max(1, num_bytes))
        with contextlib.suppress(AttributeError, OSError):  # not on every kernel; only faster
            mapping.madvise(mmap.MADV_HUGEPAGE)
        # The tensor owns the mapping.
        self.tensor = torch.frombuffer(mapping, dtype=torch.uint8)[:num_bytes]
        with ThreadPoolExecutor(num_threads()) as pool:
            list(
                pool.map(lambda piece: self.tensor[piece[0] : piece[1]].zero_(), chunks(num_bytes))
            )

    def close(self) -> None:
        """Drop this object's reference; the memory goes with the last view."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
