"""The machine beside the worker: memory, swap, faults and reads of disks."""

import mmap
import os
from pathlib import Path
from typing import Final

from harness.telemetry.procfs import PROC, ProcFile, number_of, size_of

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
    """Reads the machine's columns.

    Args:
        proc: where /proc is.
    """

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
