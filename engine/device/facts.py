"""Host memory that may be taken and pinned: free memory, cgroups, RLIMIT_MEMLOCK. No torch."""

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from engine.plan.sizes import MAX_LOAD_THREADS

CAP_IPC_LOCK = 14
"""The bit of the capability that lifts RLIMIT_MEMLOCK."""


def num_threads() -> int:
    """Return how many threads host memory work uses: the cores this process may run on."""
    return min(MAX_LOAD_THREADS, len(os.sched_getaffinity(0)))


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
        for line in (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in {"", "memory"}:
                folder = Path(path.lstrip("/"))
                for part in (folder, *folder.parents)[:-1]:
                    yield cgroups / controllers / part


def _cgroup_room(folder: Path) -> int | None:
    """Return what a cgroup's limits leave, bytes; None without a limit.

    Beyond memory.high a group is slowed down until it has given memory back, which a load of
    weights cannot: it is a limit too.
    """
    rooms = []
    for limit, usage, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.high", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        with contextlib.suppress(OSError, ValueError):
            most = int((folder / limit).read_text(encoding="utf-8"))
            used = int((folder / usage).read_text(encoding="utf-8"))
            stat = dict(
                line.split()
                for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
            )
            cached = sum(
                int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active")
            )
            rooms.append(most - used + cached)
    return min(rooms, default=None)


def memlock_room(proc: Path = Path("/proc")) -> int | None:
    """Return what RLIMIT_MEMLOCK leaves this process, bytes; None where it does not bind it.

    Whether registering memory with a device counts against the limit is the driver's choice; ask
    the device.

    Args:
        proc: Where this process's status is found.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return None
    status, locked = {}, 0
    with contextlib.suppress(OSError):
        lines = (proc / "self" / "status").read_text(encoding="utf-8").splitlines()
        status = dict(line.split(":", 1) for line in lines if ":" in line)
    with contextlib.suppress(ValueError):
        if int(status.get("CapEff", "0"), 16) >> CAP_IPC_LOCK & 1:
            return None
    with contextlib.suppress(ValueError, IndexError):
        locked = int(status.get("VmLck", "0 kB").split()[0]) * 1024
    return max(0, limit - locked)
