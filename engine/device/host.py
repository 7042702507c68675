"""Host memory: buffers of exact size, and the switches that disable pinning."""

import contextlib
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import torch

from engine.device.facts import num_threads
from engine.errors import CapacityError
from engine.sealed import GIB

CHUNK_BYTES = 64 * 2**20
HUGE_PAGE_BYTES = 2 * 2**20


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


@contextlib.contextmanager
def worker_pool(num_workers: int | None = None) -> Iterator[ThreadPoolExecutor]:
    """Threads for work on host memory; each runs torch operators on its own core alone.

    Without that every thread would start a team of threads of its own.

    Args:
        num_workers: How many; None: `num_threads`.
    """
    before = torch.get_num_threads()
    workers = num_threads() if num_workers is None else num_workers
    try:
        with ThreadPoolExecutor(
            max(1, workers), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)  # the threads changed what later threads begin with


def chunks(num_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of pieces of a buffer."""
    for start in range(0, num_bytes, chunk_bytes):
        yield start, min(num_bytes, start + chunk_bytes)


class MappedBuffer:
    """Private anonymous memory of an exact size, touched in parallel: every page is present.

    It begins at a multiple of a huge page. Whole huge pages are asked for as such, so that fewer
    pages are touched and registered; the rest is of ordinary pages, so that no more is taken than
    was asked for. The up to 2 MiB that are mapped for alignment are never touched.

    Args:
        num_bytes: How much.
        inherit: Whether a forked child gets the memory.

    Raises:
        CapacityError: The kernel has not that much.
    """

    pinned = False
    pin_s = 0.0
    """Seconds that registration took."""

    def __init__(self, num_bytes: int, *, inherit: bool = True) -> None:
        begin = perf_counter()
        # The tensor owns the mapping.
        self.tensor = _map(num_bytes, inherit=inherit)
        touch(self.tensor)
        self.touch_s = perf_counter() - begin
        """Seconds that mapping and touching took."""

    def close(self) -> None:
        """Drop this object's reference; the memory goes with the last view."""
        self.tensor = torch.empty(0, dtype=torch.uint8)


def _map(num_bytes: int, *, inherit: bool) -> torch.Tensor:
    slack = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else 0
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        mapping = mmap.mmap(-1, max(1, num_bytes) + slack, flags=flags)
    except OSError as error:
        raise _no_memory(num_bytes, error.errno) from error
    base = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    start = -base % HUGE_PAGE_BYTES if slack else 0
    huge = num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    rest = start + huge
    # Not on every kernel, and only faster: a refusal changes nothing else.
    with contextlib.suppress(OSError):
        if huge:
            mapping.madvise(mmap.MADV_HUGEPAGE, start, huge)
        mapping.madvise(mmap.MADV_NOHUGEPAGE, rest, len(mapping) - rest)
    if not inherit:
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_DONTFORK)
    # Its storage begins where the slab does: torch takes memory for pinned by the storage's start.
    found = torch.frombuffer(mapping, dtype=torch.uint8, offset=start, count=max(1, num_bytes))
    return found[:num_bytes]


def touch(memory: torch.Tensor) -> None:
    """Make every page of fresh memory present: several threads write a byte of each.

    Args:
        memory: uint8 [num_bytes] of zeros, at the beginning of a page.
    """
    threads = num_threads()
    share = -(-memory.numel() // threads)
    size = max(1, min(CHUNK_BYTES, -(-share // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES))

    def touch_piece(piece: tuple[int, int]) -> None:
        start, stop = piece
        memory[start : stop : mmap.PAGESIZE].zero_()

    with worker_pool(min(threads, -(-memory.numel() // size))) as pool:
        for _ in pool.map(touch_piece, chunks(memory.numel(), size)):
            pass


def _no_memory(num_bytes: int, code: int | None) -> CapacityError:
    why = "unknown" if code is None else os.strerror(code)
    return CapacityError(
        f"host memory: expected to map {num_bytes} bytes ({num_bytes / GIB:.2f} GiB), the kernel "
        f"refused ({why}). Offload less, free memory, or raise the limit (ulimit -v, ulimit -d, "
        "the cgroup, vm.overcommit_memory)."
    )
