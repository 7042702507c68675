"""Measure what the host link and the GPU's memory can carry, with plain copies."""

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from engine.device.base import Device
from engine.device.select import open_device

COPY_BYTES = 256 * 2**20
REPEATS = 20


def probe_link(device: str = "auto") -> dict[str, float | None]:
    """Return GB/s (10^9) of copies: host to device, back, both at once, in place, within HBM.

    Medians of 20 copies of 256 MiB from registered memory, after two warm-ups. On a CPU the copies
    are between host buffers (emulated, 32 MiB) and what has no counterpart is None.

    Args:
        device: auto | cuda | cpu.
    """
    opened = open_device(device)
    if opened.kind == "cpu":
        return _probe_cpu(opened)
    buffer = opened.host_buffer(2 * COPY_BYTES, pin=True)
    try:
        host_in, host_out = buffer.tensor[:COPY_BYTES], buffer.tensor[COPY_BYTES:]
        gpu_in, gpu_out = opened.empty(COPY_BYTES), opened.empty(COPY_BYTES)
        view = opened.in_place(buffer, host_in)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

        def both() -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                host_out.copy_(gpu_out, non_blocking=True)
            gpu_in.copy_(host_in, non_blocking=True)
            torch.cuda.current_stream().wait_stream(side)

        return {
            "h2d_gb_s": _rate(lambda: gpu_in.copy_(host_in, non_blocking=True), COPY_BYTES),
            "d2h_gb_s": _rate(lambda: host_out.copy_(gpu_out, non_blocking=True), COPY_BYTES),
            "two_way_gb_s": _rate(both, 2 * COPY_BYTES),
            "in_place_gb_s": _rate(lambda: _read_in_place(view, gpu_in), COPY_BYTES),
            "hbm_copy_gb_s": _rate(lambda: gpu_in.copy_(gpu_out), 2 * COPY_BYTES),
        }
    finally:
        opened.synchronize()
        buffer.close()


def _read_in_place(view: torch.Tensor, target: torch.Tensor) -> None:
    """Read host memory by a kernel, not by the copy engine."""
    torch.add(view.view(torch.int32), 0, out=target.view(torch.int32))


def _rate(work: Callable[[], object], num_bytes: int) -> float:
    times = []
    for index in range(REPEATS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        if index >= 2:
            times.append(begin.elapsed_time(end) / 1e3)
    return float(num_bytes / median(times) / 1e9)


def _probe_cpu(opened: Device) -> dict[str, float | None]:
    size = 32 * 2**20
    source = opened.host_buffer(size, pin=True)
    target = torch.zeros(size, dtype=torch.uint8)
    times = []
    for _ in range(REPEATS):
        begin = perf_counter()
        target.copy_(source.tensor)
        times.append(perf_counter() - begin)
    rate = size / median(times) / 1e9
    return {
        "h2d_gb_s": rate,
        "d2h_gb_s": rate,
        "two_way_gb_s": None,
        "in_place_gb_s": None,
        "hbm_copy_gb_s": None,
    }
