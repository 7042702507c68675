"""The sampler: one row of a run's resources every tenth of a second, appended to the spool.

It runs in a process of its own (harness.observe.run starts it) and ends when its standard
input does. Each line there is a worker to watch, `PID JOB`, or `0` where none is left.
"""

import argparse
import contextlib
import gc
import json
import mmap
import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from catalogue.processes import die_with_parent
from engine.device.gpu import Gpu, open_gpu
from reports.record.record import STATE_NAME
from reports.record.rows import TELEMETRY_SPOOL

PROC: Final = Path("/proc")
# Not psutil: it takes 2 to 5 times the CPU time for a row, and 200 times for a list of children.
_LINE_BYTES: Final = 40
"""Bytes of a line after its name: blanks, a number, a unit."""
_READ_BYTES: Final = 2**16


class ProcFile:
    """One file of /proc; opening it is done once, reading it is one system call.

    One that is not there, or ends, reads as empty.
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
    """Reads one process and all below it."""

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


_VMSTAT: Final = {
    "host_swap_in_bytes": (b"pswpin ", mmap.PAGESIZE),
    "host_swap_out_bytes": (b"pswpout ", mmap.PAGESIZE),
    "host_major_faults": (b"pgmajfault ", 1),
    "host_disk_read_bytes": (b"pgpgin ", 1024),
}
"""Column -> counter of /proc/vmstat and its unit in bytes."""
_IDLE: Final = (3, 4)
"""Fields of the first line of /proc/stat in which a core does nothing: idle, iowait."""
_GUEST: Final = 8
"""From this field on, times are in others already."""


class Machine:
    """Reads the machine's columns."""

    def __init__(self, proc: Path = PROC) -> None:
        self._meminfo = ProcFile(proc / "meminfo")
        self._vmstat = ProcFile(proc / "vmstat")
        self._stat = ProcFile(proc / "stat")

    def read(self) -> dict[str, int | None]:
        """Return memory, swap, faults and reads."""
        memory, counters = self._meminfo.read(), self._vmstat.read()
        cached, buffers = size_of(memory, b"Cached"), size_of(memory, b"Buffers")
        total, free = size_of(memory, b"SwapTotal"), size_of(memory, b"SwapFree")
        row: dict[str, int | None] = {
            "host_available_bytes": size_of(memory, b"MemAvailable"),
            "host_cached_bytes": _added(cached, buffers),
            "host_swap_used_bytes": _added(total, free, -1),
        }
        for name, (key, unit) in _VMSTAT.items():
            number = number_of(counters, key)
            row[name] = None if number is None else number * unit
        return row

    def cpu_s(self) -> float | None:
        """Return the core seconds that the machine was busy since it started."""
        fields = self._stat.read(512).partition(b"\n")[0].split()[1 : 1 + _GUEST]
        if not fields:
            return None
        ticks = sum(int(value) for place, value in enumerate(fields) if place not in _IDLE)
        return ticks / os.sysconf("SC_CLK_TCK")


def _added(first: int | None, second: int | None, sign: int = 1) -> int | None:
    return None if first is None or second is None else first + sign * second


INTERVAL_S: Final = 0.1
SLOW_S: Final = 1.0
"""Between two readings of what changes slowly; rows in between repeat the last one."""
COSTLY_S: Final = 5.0
"""Least time between readings that the driver takes milliseconds for."""
COSTLY_SHARE: Final = 0.002
"""Share of a core that such readings may take: one takes 5 ms, 40 to 140 ms while kernels read host
memory in place (H200), and the next is then later."""
MOST_SHARE: Final = 0.008
"""Share of a core that all rows may have taken once another such reading is done."""
_STOPPED: Final = 0
Row = dict[str, Any]


class Rows:
    """Builds one row after another."""

    def __init__(self, run_dir: Path, gpu: Gpu | None, machine: Machine) -> None:
        self._gpu, self._machine = gpu, machine
        self._state = _StateFile(run_dir / STATE_NAME)
        self._tree: ProcessTree | None = None
        self._job: str | None = None
        self._slow: Row = {}
        self._costly: Row = {}
        self._slow_due_s = self._costly_due_s = self._costly_took_s = 0.0
        self._begin_s, self._cpu_begin_s = time.monotonic(), time.process_time()

    def watch(self, pid: int, job: str | None) -> None:
        """Watch another worker from now on; `_STOPPED` for none."""
        if self._tree is not None:
            self._tree.close()
        self._tree = None if pid == _STOPPED else ProcessTree(pid)
        self._job = job
        self._slow_due_s = self._costly_due_s = 0.0

    def read(self) -> Row:
        """Return the row of this moment; what is not to be had is left out."""
        begin_s = time.monotonic()
        row: Row = {
            "clock_s": round(begin_s, 6),
            "time": round(time.time(), 6),
            "sampler_cpu_s": round(time.process_time() - self._cpu_begin_s, 6),
            "job": self._job,
        }
        if begin_s >= self._slow_due_s:
            self._slow_due_s = begin_s + SLOW_S
            self._slow = {"slow_clock_s": row["clock_s"], **self._read_slow()}
        if self._gpu is not None and self._is_costly_due(begin_s, row["sampler_cpu_s"]):
            before_s = time.process_time()
            self._costly = {"costly_clock_s": row["clock_s"], **self._gpu.sample_costly()}
            self._costly_took_s = time.process_time() - before_s
            self._costly_due_s = begin_s + max(COSTLY_S, self._costly_took_s / COSTLY_SHARE)
        row |= self._slow | self._costly
        if self._tree is not None:
            row |= self._tree.read()
            row |= self._state.read()
        if self._gpu is not None:
            row |= self._gpu.sample()
        row["took_s"] = round(time.monotonic() - begin_s, 6)
        return {name: value for name, value in row.items() if value is not None}

    def _is_costly_due(self, now_s: float, cpu_s: float) -> bool:
        """Each worker's first row has such a reading; later ones wait until CPU time is left."""
        is_first = self._costly_due_s == 0.0
        has_time = cpu_s + self._costly_took_s <= MOST_SHARE * (now_s - self._begin_s)
        return is_first or (now_s >= self._costly_due_s and has_time)

    def _read_slow(self) -> Row:
        pids: set[int] = set()
        row: Row = {**self._machine.read(), "host_cpu_s": self._machine.cpu_s()}
        if self._tree is not None:
            self._tree.refresh()
            pids = self._tree.pids
            row |= self._tree.read_slow()
        return row if self._gpu is None else row | self._gpu.sample_slow(pids)


class _StateFile:
    """The worker's state.json, parsed when it is another one than before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._row: Row = {}

    def read(self) -> Row:
        """Return the phase and the pinned bytes; empty without the file."""
        try:
            found = self._path.stat()
            seen = (found.st_ino, found.st_mtime_ns)
            if seen != self._seen:
                state = json.loads(self._path.read_bytes())
                self._row = {key: state.get(key) for key in ("phase", "pinned_bytes")}
                self._seen = seen
        except (OSError, ValueError):
            self._row, self._seen = {}, None
        return self._row


class Commands:
    """Lines of a pipe, read without waiting longer than until the next row is due."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN | select.POLLHUP)
        self._text = b""

    def wait(self, seconds: float) -> list[str] | None:
        """Return the lines that came within `seconds`, after the first; None when it ended."""
        if not self._poll.poll(max(0.0, seconds) * 1e3):
            return []
        data = os.read(self._descriptor, 4096)
        if not data:
            return None
        *lines, self._text = (self._text + data).split(b"\n")
        return [line.decode() for line in lines]


def run(
    run_dir: Path, gpu_uuid: str | None, commands: Commands, *, interval_s: float = INTERVAL_S
) -> None:
    """Append rows to the spool until the commands end.

    Rows are due at whole multiples of the interval from the first on; one that is late costs its
    successors nothing, but moments that passed meanwhile are left out.
    """
    gpu = open_gpu(gpu_uuid) if gpu_uuid is not None else None
    rows = Rows(run_dir, gpu, Machine())
    gc.collect()
    gc.freeze()
    descriptor = os.open(run_dir / TELEMETRY_SPOOL, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        _loop(rows, commands, lambda data: _write(descriptor, data), interval_s)
    finally:
        os.close(descriptor)


def _loop(
    rows: Rows, commands: Commands, write: Callable[[bytes], None], interval_s: float
) -> None:
    encode = json.JSONEncoder(separators=(",", ":")).encode
    due_s = time.monotonic()
    while True:
        lines = commands.wait(due_s - time.monotonic())
        if lines is None:
            write(encode(rows.read()).encode() + b"\n")
            return
        for line in lines:
            pid, _, job = line.partition(" ")
            rows.watch(int(pid), job or None)
        now_s = time.monotonic()
        if now_s < due_s:
            continue
        write(encode(rows.read()).encode() + b"\n")
        due_s += interval_s * max(1, int((time.monotonic() - due_s) / interval_s + 1))


def _write(descriptor: int, data: bytes) -> None:
    """Write a whole row at once, so that a kill cuts at most the last one."""
    while data:
        data = data[os.write(descriptor, data) :]


def main(argv: Sequence[str] | None = None) -> int:
    """Sample until standard input ends; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m harness.observe.sampler", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="where the rows go")
    parser.add_argument("--gpu", help="UUID of the run's GPU")
    parser.add_argument("--parent", type=int, help="process with which this one ends")
    parser.add_argument("--interval-s", type=float, default=INTERVAL_S, help="between two rows")
    arguments = parser.parse_args(argv)
    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    run(
        arguments.run_dir,
        arguments.gpu,
        Commands(sys.stdin.fileno()),
        interval_s=arguments.interval_s,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
