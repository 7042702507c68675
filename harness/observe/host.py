"""Memory of a process and the kernel's out-of-memory counters; None where Linux does not tell."""

import ctypes
import os
import re
from collections.abc import Iterable
from pathlib import Path

_STATUS_FIELDS = {
    "rss_bytes": "VmRSS",
    "rss_peak_bytes": "VmHWM",
    "anon_bytes": "RssAnon",
    "shmem_bytes": "RssShmem",
    "locked_bytes": "VmLck",
}


def process_memory(pid: int | None = None) -> dict[str, int | None]:
    """Return the memory of a process (default: this one) in bytes, by name.

    The engine's slab of offloaded weights is private anonymous memory: it counts in anon_bytes,
    pinned or not.
    """
    text = read_text(Path("/proc") / (str(pid) if pid else "self") / "status")
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, flags=re.MULTILINE))
    return {
        name: int(found[key]) * 1024 if key in found else None
        for name, key in _STATUS_FIELDS.items()
    }


def reset_rss_peak() -> bool:
    """Start rss_peak_bytes of this process anew; return whether the kernel did it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def start_ticks(pid: int) -> int | None:
    """Return when a process started, clock ticks since boot; None when there is no such process.

    A pid and its start ticks together name one process: pids are used again.
    """
    text = read_text(Path("/proc") / str(pid) / "stat")
    after_name = text.rpartition(")")[2].split()
    return int(after_name[19]) if len(after_name) > 19 and after_name[0] != "Z" else None


def oom_kills() -> dict[str, int]:
    """Return every counter of out-of-memory kills that this process can see, by name."""
    counters = {}
    vmstat = re.search(r"^oom_kill (\d+)$", read_text(Path("/proc/vmstat")), flags=re.MULTILINE)
    if vmstat:
        counters["vmstat"] = int(vmstat[1])
    for line in read_text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            name, file = "cgroup", Path(f"/sys/fs/cgroup{path}/memory.events")
        elif controllers == "memory":
            name, file = "cgroup-v1", Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
        else:
            continue
        match = re.search(r"^oom_kill (\d+)$", read_text(file), flags=re.MULTILINE)
        if match:
            counters[name] = int(match[1])
    return counters


def num_new_kills(before: dict[str, int], after: dict[str, int]) -> int:
    """Return by how much the counter that rose most has risen."""
    return max((after[name] - before.get(name, 0) for name in after if name in before), default=0)


def read_text(path: Path) -> str:
    """Return the text of a file, empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


_PROT_READ = 1
_MAP_SHARED = 1


def drop_page_cache(files: Iterable[Path]) -> None:
    """Ask the kernel to drop the cached pages of `files`; pages that are in use stay."""
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
