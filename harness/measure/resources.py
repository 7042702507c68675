"""Samples of a worker's memory and of its GPU, taken by the parent, not to disturb the worker."""

import json
import time
from pathlib import Path
from typing import Any, Final

from harness.measure.host import process_memory
from harness.measure.nvml import Gpu

RESOURCES_NAME: Final = "resources.jsonl"
GIB: Final = 2**30
_PEAKS: Final = {
    "gpu_used_bytes": "memory/gpu_peak_global_gib",
    "rss_peak_bytes": "memory/host_rss_peak_gib",
    "anon_bytes": "memory/host_anon_gib",
    "shmem_bytes": "memory/host_shmem_gib",
}


class ResourceSampler:
    """Appends one line a sample to `resources.jsonl` and keeps the peaks."""

    def __init__(self, run_dir: Path, gpu: Gpu | None, interval_s: float = 1.0) -> None:
        self._path = run_dir / RESOURCES_NAME
        self._gpu = gpu
        self._interval_s = interval_s
        self._due_s = 0.0
        self.peaks: dict[str, float] = {}
        """Highest value of each quantity over all samples."""

    def metrics(self) -> dict[str, float | None]:
        """Return the peaks that records carry; what was never sampled is left out."""
        return {
            metric: self.peaks[name] / GIB for name, metric in _PEAKS.items() if name in self.peaks
        }

    def sample(self, pid: int) -> dict[str, Any] | None:
        """Take a sample if one is due; return it with its time, None if none was taken."""
        now = time.monotonic()
        if now < self._due_s:
            return None
        self._due_s = now + self._interval_s
        row: dict[str, Any] = {"time": time.time(), **process_memory(pid)}
        if self._gpu is not None:
            row |= self._gpu.sample()
        for name, value in row.items():
            if value is not None and name != "time":
                self.peaks[name] = max(value, self.peaks.get(name, value))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return row
