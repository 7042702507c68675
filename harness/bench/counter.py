"""NVML's counter of bytes that reach the GPU over PCIe, and what it reads for a known rate."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean
from typing import Final

import torch

from harness.measure.nvml import open_gpu

CALIBRATION_S: Final = 2.0
CALIBRATION_BYTES: Final = 128 * 2**20


class LinkCounter:
    """Reads the counter in a thread; each reading is the driver's mean over about 20 ms."""

    def __init__(self) -> None:
        uuid = None
        if torch.cuda.is_available():
            uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        self._gpu = open_gpu(uuid)

    @contextmanager
    def reading(self) -> Iterator[list[float]]:
        """Yield a list that fills with GB/s until the end; it stays empty without a counter."""
        found: list[float] = []
        stop = threading.Event()

        def read() -> None:
            while self._gpu is not None and not stop.is_set():
                rate = self._gpu.link_rx_gb_s()
                if rate is None:
                    return
                found.append(rate)
                stop.wait(0.02)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield found
        finally:
            stop.set()
            thread.join()


def calibrate() -> dict[str, float | None]:
    """Copy host memory for two seconds; return the true rate, the counter's and their ratio."""
    host = torch.empty(CALIBRATION_BYTES, dtype=torch.uint8, pin_memory=True)
    gpu = torch.empty(CALIBRATION_BYTES, dtype=torch.uint8, device="cuda")
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copies, begin = 0, time.perf_counter()
    with LinkCounter().reading() as readings:
        while time.perf_counter() - begin < CALIBRATION_S:
            for _ in range(8):
                gpu.copy_(host, non_blocking=True)
            event.record()
            event.synchronize()
            copies += 8
        rate = copies * CALIBRATION_BYTES / (time.perf_counter() - begin) / 1e9
    counted = mean(readings) if readings else None
    return {
        "copied_gb_s": rate,
        "nvml_gb_s": counted,
        "factor": rate / counted if counted else None,
    }
