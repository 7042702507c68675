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


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return host memory that can be taken: free memory, within the limits of every cgroup above.

    The page cache counts as free, in a cgroup too.

    Args:
        proc: Where this process's cgroups are named.
        cgroups: Where cgroups are mounted, version 1 or 2.
    """
    free = int(psutil.virtual_memory().available)
    rooms = (_cgroup_room(folder) for folder in _cgroup_folders(proc, cgroups))
    return max(0, min([free, *(room for room in rooms if room is not None)]))


def _cgroup_folders(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Yield the folders that may limit this process; in a container its own is the mount's root."""
    yield from (cgroups, cgroups / "memory")
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in {"", "memory"}:
                folder = Path(path.lstrip("/"))
                for part in (folder, *folder.parents)[:-1]:
                    yield cgroups / controllers / part


def _cgroup_room(folder: Path) -> int | None:
    """Return what a cgroup's limit leaves, bytes; None without a limit."""
    for limit, usage, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        with contextlib.suppress(OSError, ValueError):
            most = int((folder / limit).read_text())
            used = int((folder / usage).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cached = sum(
                int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active")
            )
            return most - used + cached
    return None


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
