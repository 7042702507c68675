"""`python -m harness.telemetry --self-test`: what the sampler costs on this machine."""

import os
import sys
import tempfile
import time
from pathlib import Path

from harness.observe.gpu import open_gpu
from harness.observe.run import Sampler
from harness.observe.window import LARGEST_SHARE, cpu_share, null_columns
from reports.record.telemetry import read_telemetry


def self_test(seconds: float, gpu_uuid: str | None) -> int:
    """Sample this process for some seconds; print rows, cost and null columns.

    Returns 0 when the sampler took at most LARGEST_SHARE of a core, 1 when more or no rows came.

    Args:
        seconds: how long, after the first row.
        gpu_uuid: of a GPU; None: the first that CUDA would show.
    """
    gpu = open_gpu(gpu_uuid)
    uuid = gpu.uuid if gpu is not None else None
    with tempfile.TemporaryDirectory() as folder:
        sampler = Sampler(Path(folder), uuid)
        sampler.watch(os.getpid(), "self-test")
        time.sleep(seconds + 1)
        sampler.close()
        table = read_telemetry(Path(folder))
    lines = [f"warning: {text}" for text in sampler.warnings]
    lines.append(f"GPU: {uuid or 'none'}")
    share = cpu_share(table) if table is not None else None
    if table is None or share is None:
        lines.append("no rows")
    else:
        clock, took = table["clock_s"], sorted(table["took_s"])
        lines += [
            f"rows: {len(clock)}, {(len(clock) - 1) / (clock[-1] - clock[0]):.2f} a second",
            f"reading a row: median {1e3 * took[len(took) // 2]:.2f} ms, most {1e3 * took[-1]:.2f}",
            f"CPU share of the sampler: {100 * share:.2f} % of a core",
            f"null columns: {', '.join(null_columns(table)) or 'none'}",
        ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if share is not None and share <= LARGEST_SHARE else 1
