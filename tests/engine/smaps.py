"""What the kernel says of a range of this process's memory."""

import mmap
import re
import struct
from pathlib import Path
from typing import Any

_RANGE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")


def mapped(address: int, num_bytes: int, smaps: str = "/proc/self/smaps") -> dict[str, int]:
    """Return sums over the mappings that overlap a range: bytes by field, and VmFlags counted."""
    found: dict[str, int] = {}
    inside = False
    for line in Path(smaps).read_text(encoding="utf-8").splitlines():
        bounds = _RANGE.match(line)
        if bounds:
            start, stop = int(bounds[1], 16), int(bounds[2], 16)
            inside = start < address + max(1, num_bytes) and stop > address
        elif inside:
            key, *values = line.split()
            if key == "VmFlags:":
                for flag in values:
                    found[flag] = found.get(flag, 0) + 1
            elif values[-1] == "kB":
                found[key[:-1]] = found.get(key[:-1], 0) + int(values[0]) * 1024
    return found


def present_bytes(view: Any) -> int:
    """Return how much is present of the whole mapping that a tensor is a view of.

    Args:
        view: A tensor over memory that was mapped for it; mappings beside it are not counted,
            which the kernel may have joined with it.
    """
    storage = view.untyped_storage()
    first = storage.data_ptr() // mmap.PAGESIZE
    count = -(-storage.nbytes() // mmap.PAGESIZE)
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(8 * first)
        entries = struct.unpack(f"<{count}Q", file.read(8 * count))
    return sum(entry >> 63 for entry in entries) * mmap.PAGESIZE


def anonymous_bytes() -> int:
    """Return this process's resident anonymous memory."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(r"RssAnon:\s+(\d+)", status)
    assert found is not None
    return int(found[1]) * 1024
