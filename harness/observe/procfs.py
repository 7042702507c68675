"""Files of /proc that are read again and again, kept open and parsed with little work.

psutil tells neither anonymous, shared, locked and peak memory nor faults, and costs more: of a
process of 100 threads 16 us instead of 4 for resident memory, 79 (`oneshot`) instead of 49 for
the rest, 3,000 instead of 700 for its children, and 180 instead of 40 for the machine's memory.
"""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
_LINE_BYTES: Final = 40
"""Of a line after its name: blanks, a number, a unit."""
_READ_BYTES: Final = 2**16


class ProcFile:
    """One file of /proc; opening it is done once, reading it is one system call.

    Args:
        path: the file; one that is not there, or ends, reads as empty.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = -1

    def read(self, size: int = _READ_BYTES) -> bytes:
        """Return the file's first `size` bytes as they are now, empty where there are none."""
        if self._descriptor < 0:
            return b""
        try:
            return os.pread(self._descriptor, size, 0)
        except OSError:  # its process ended
            return b""

    def close(self) -> None:
        """Give the descriptor back."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def size_of(text: bytes, name: bytes) -> int | None:
    """Return the bytes of the line `NAME: N kB`, None without it."""
    number = number_of(text, name + b":")
    return None if number is None else number * 1024


def number_of(text: bytes, name: bytes) -> int | None:
    """Return the number of the line that begins with `name`, None without it.

    A search for one name: taking all lines apart is most of the work of a row.
    """
    begin = 0 if text.startswith(name) else text.find(b"\n" + name) + 1
    if begin == 0 and not text.startswith(name):
        return None
    field = text[begin + len(name) : begin + len(name) + _LINE_BYTES].split(maxsplit=1)
    return int(field[0]) if field and field[0].isdigit() else None


Number = int | float | None
_TICK_S: Final = 1.0 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_MEMORY: Final = {
    "anon_bytes": b"RssAnon",
    "shmem_bytes": b"RssShmem",
    "locked_bytes": b"VmLck",
    "swapped_bytes": b"VmSwap",
}
"""Column -> field of /proc/PID/status; summed over the tree."""
_STAT: Final = {"minor_faults": (7, 8), "major_faults": (9, 10), "cpu_s": (11, 12, 13, 14)}
"""Column -> fields of /proc/PID/stat after the name, of the process and of its ended children; the
time in ticks."""


class ProcessTree:
    """Reads one process and all below it.

    Args:
        pid: of the process at the top.
        proc: where /proc is.
    """

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        self._pid, self._proc = pid, proc
        self._open: dict[int, _Process] = {pid: _Process(pid, proc)}
        self._loadavg = ProcFile(proc / "loadavg")
        self._newest = b""

    @property
    def pids(self) -> set[int]:
        """Processes of the tree, as of the last `refresh`."""
        return set(self._open)

    def refresh(self) -> None:
        """Look for new and ended processes, if any process or thread of the machine is new.

        Listing the children of a hundred threads is most of what a second of sampling costs; the
        last field of /proc/loadavg is the newest id.
        """
        newest = self._loadavg.read().rpartition(b" ")[2].strip()
        if newest == self._newest and newest not in {b"", b"0"}:
            return
        self._newest = newest
        found = descendants(self._pid, self._proc) | {self._pid}
        for pid in self._open.keys() - found:
            self._open.pop(pid).close()
        for pid in found - self._open.keys():
            self._open[pid] = _Process(pid, self._proc)

    def read(self) -> dict[str, Number]:
        """Return what costs little: the tree's resident memory."""
        found = _total(process.rss_bytes() for process in self._open.values())
        return {} if found is None else {"rss_bytes": found}

    def read_slow(self) -> dict[str, Number]:
        """Return the other columns; sums leave out what a process does not tell."""
        rows = [row for process in self._open.values() if (row := process.read())]
        if not rows:
            return {}
        names = {name for row in rows for name in row}
        found = {name: _total(row.get(name) for row in rows) for name in names}
        # Ticks are added before they become seconds: rounding must not let the counter go back.
        ticks = found["cpu_s"]
        found["cpu_s"] = None if ticks is None else ticks * _TICK_S
        top = self._open[self._pid].peak_bytes
        return found | {"num_processes": len(rows), "rss_peak_bytes": top}

    def close(self) -> None:
        """Close every file."""
        self._loadavg.close()
        for process in self._open.values():
            process.close()
        self._open = {}


def descendants(pid: int, proc: Path = PROC) -> set[int]:
    """Return the ids of all processes below `pid`; empty where the kernel does not list them."""
    found: set[int] = set()
    new = {pid}
    while new:
        children = {child for parent in new for child in _children(parent, proc)}
        new = children - found - {pid}
        found |= new
    return found


def _children(pid: int, proc: Path) -> list[int]:
    """Return the children that all threads of a process started.

    Without pathlib, which takes three times as long: a worker has a hundred threads.
    """
    folder = f"{proc}/{pid}/task"
    try:
        threads = os.listdir(folder)  # noqa: PTH208
    except OSError:
        return []
    found: list[int] = []
    for thread in threads:
        try:
            descriptor = os.open(f"{folder}/{thread}/children", os.O_RDONLY)
        except OSError:
            continue
        text = b""
        with contextlib.suppress(OSError):
            while chunk := os.read(descriptor, 65536):
                text += chunk
        os.close(descriptor)
        found += [int(child) for child in text.split()]
    return found


class _Process:
    """The files of one process."""

    def __init__(self, pid: int, proc: Path) -> None:
        folder = proc / str(pid)
        self._statm = ProcFile(folder / "statm")
        self._status = ProcFile(folder / "status")
        self._stat = ProcFile(folder / "stat")
        self._io = ProcFile(folder / "io")
        self.peak_bytes: int | None = None
        """Highest resident memory, as of the last reading."""

    def rss_bytes(self) -> int | None:
        """Return its resident memory; None when it ended."""
        fields = self._statm.read().split()
        # The kernel keeps a line of zeros for a process that ended and was not waited for.
        return int(fields[1]) * _PAGE_BYTES if len(fields) > 1 and fields[0] != b"0" else None

    def read(self) -> dict[str, Number]:
        """Return its other columns, the time in ticks; empty when it ended."""
        stat = self._stat.read().rpartition(b")")[2].split()
        if not stat or stat[0] in {b"Z", b"X"}:
            return {}
        memory = self._status.read()
        self.peak_bytes = size_of(memory, b"VmHWM")
        row: dict[str, Number] = {name: size_of(memory, key) for name, key in _MEMORY.items()}
        for name, places in _STAT.items():
            row[name] = sum(int(stat[place]) for place in places)
        row["read_bytes"] = number_of(self._io.read(), b"read_bytes:")
        return row

    def close(self) -> None:
        for file in (self._statm, self._status, self._stat, self._io):
            file.close()


def _total(values: Iterable[Number]) -> Number:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
