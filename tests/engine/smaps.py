"""What the kernel says of a range of this process's memory."""

import re
from pathlib import Path

_RANGE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")


def mapped(address: int, num_bytes: int, smaps: str = "/proc/self/smaps") -> dict[str, int]:
    """Return sums over the mappings that overlap a range: bytes by field, and VmFlags counted."""
    found: dict[str, int] = {}
    inside = False
    for line in Path(smaps).read_text().splitlines():
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


def anonymous_bytes() -> int:
    """Return this process's resident anonymous memory."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+)", status)
    assert found is not None
    return int(found[1]) * 1024
