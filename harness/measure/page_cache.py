"""The page cache of a model's files: drop it for a cold start, and ask how much of it is there."""

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

_PROT_READ = 1
_MAP_SHARED = 1


def drop_page_cache(files: Iterable[Path]) -> None:
    """Ask the kernel to drop the cached pages of `files`; pages that are in use stay.

    Raises:
        OSError: a file cannot be opened.
    """
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # a dirty page cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_share(files: Iterable[Path]) -> float | None:
    """Return the share of the files' pages that is in the page cache, 0 to 1.

    None where the kernel does not tell: no mincore, or it refuses for these files.
    """
    resident = total = 0
    for path in files:
        counts = _count_pages(path)
        if counts is None:
            return None
        resident += counts[0]
        total += counts[1]
    return resident / total if total else None


def _count_pages(path: Path) -> tuple[int, int] | None:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        mmap, mincore, munmap = libc.mmap, libc.mincore, libc.munmap
    except (OSError, AttributeError):
        return None
    mmap.restype = ctypes.c_void_p
    mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    size = path.stat().st_size
    if size == 0:
        return 0, 0
    descriptor = os.open(path, os.O_RDONLY)
    try:
        address = mmap(None, size, _PROT_READ, _MAP_SHARED, descriptor, 0)
    finally:
        os.close(descriptor)
    if address in {None, ctypes.c_void_p(-1).value}:
        return None
    num_pages = -(-size // os.sysconf("SC_PAGE_SIZE"))
    flags = ctypes.create_string_buffer(num_pages)
    try:
        if mincore(address, size, flags) != 0:
            return None
    finally:
        munmap(address, size)
    return sum(byte & 1 for byte in flags.raw), num_pages
