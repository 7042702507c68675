"""Measure what the host link and the GPU's memory can carry, with plain copies.

Probes run before an engine is built and after it is closed, never beside it: they take 512 MiB of
GPU memory that no plan counts, and start the peak of the process anew. They leave nothing behind.
"""

import random
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Final

import torch

from engine.device.base import Device, HostBuffer
from engine.device.cuda import open_device
from engine.errors import CapacityError, PinningError
from engine.kv.memory import HostBlocks
from engine.kv.mover import BlockMover
from engine.kv.moves import Move, MoveBatch, MoveKind

COPY_BYTES = 256 * 2**20
EMULATED_COPY_BYTES = 32 * 2**20
REPEATS = 20
RATES = ("h2d_gb_s", "d2h_gb_s", "two_way_gb_s", "in_place_gb_s", "hbm_copy_gb_s", "launch_us")
"""Names of what is probed."""
LAUNCHES = 500
"""Between two looks at the clock; fewer than fill the driver's queue."""
HBM_COPIES = 8
"""Copies within device memory between two events: one of 256 MiB is too short to time."""


def probe_link(device: str = "auto") -> dict[str, float | None]:
    """Return GB/s (10^9) of copies: host to device, back, both at once, in place, within HBM.

    And `launch_us`, what the host takes to launch one small kernel: the median of 20 rounds of 500.

    Medians of 20 copies of 256 MiB from registered memory, after two warm-ups; within HBM of 8 such
    copies in a row. In place is an elementwise kernel that reads registered host memory and writes
    device memory. On a CPU the copies are between host buffers (emulated, 32 MiB) and what has no
    counterpart is None. So is all where the driver pins nothing, and in place where the device sees
    host memory at another address: an engine runs there nevertheless, and its plan says how.

    Args:
        device: auto | cuda | cpu.
    """
    opened = open_device(device)
    return _probe_cpu(opened) if opened.kind == "cpu" else _probe_cuda(opened)


def stream_link(seconds: float, device: str = "auto") -> tuple[int, float, float]:
    """Copy host to device without a pause, for reading a counter of the link meanwhile.

    Args:
        seconds: For how long, about.
        device: auto | cuda | cpu (there between host buffers).

    Returns:
        Bytes copied, and when on `time.perf_counter` the first copy began and the last was done.
    """
    opened = open_device(device)
    is_cpu = opened.kind == "cpu"
    size = EMULATED_COPY_BYTES if is_cpu else COPY_BYTES
    buffer = opened.host_buffer(size, pin=True)
    try:
        target = opened.empty(size)
        num_copies, marks = 0, []
        begin_s = perf_counter()
        while perf_counter() - begin_s < seconds:
            target.copy_(buffer.tensor, non_blocking=True)
            marks.append(opened.mark())
            num_copies += 1
            if len(marks) > 2:  # two copies wait in the queue, so that the link has no pause
                marks.pop(0).wait()
        opened.synchronize()
        end_s = perf_counter()
    finally:
        opened.synchronize()
        buffer.close()
    del target
    _give_back(opened)
    return num_copies * size, begin_s, end_s


def _probe_cuda(opened: Device) -> dict[str, float | None]:
    try:
        buffer = opened.host_buffer(2 * COPY_BYTES, pin=True)
    except PinningError:
        return dict.fromkeys(RATES)
    try:
        return _rates(opened, buffer.tensor, _view(opened, buffer))
    finally:
        opened.synchronize()
        buffer.close()
        _give_back(opened)


def _view(opened: Device, buffer: HostBuffer) -> torch.Tensor | None:
    """The first half of a buffer for kernels to read in place; None where they cannot."""
    try:
        return opened.in_place(buffer, buffer.tensor[:COPY_BYTES])
    except CapacityError:
        return None


def _rates(
    opened: Device, host: torch.Tensor, view: torch.Tensor | None
) -> dict[str, float | None]:
    host_in, host_out = host[:COPY_BYTES], host[COPY_BYTES:]
    gpu_in, gpu_out = opened.empty(COPY_BYTES), opened.empty(COPY_BYTES)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def both() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            host_out.copy_(gpu_out, non_blocking=True)
        gpu_in.copy_(host_in, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)

    def within() -> None:
        for _ in range(HBM_COPIES):
            gpu_in.copy_(gpu_out)

    return {
        "h2d_gb_s": _rate(lambda: gpu_in.copy_(host_in, non_blocking=True), COPY_BYTES),
        "d2h_gb_s": _rate(lambda: host_out.copy_(gpu_out, non_blocking=True), COPY_BYTES),
        "two_way_gb_s": _rate(both, 2 * COPY_BYTES),
        "in_place_gb_s": (
            None if view is None else _rate(lambda: _read_in_place(view, gpu_in), COPY_BYTES)
        ),
        "hbm_copy_gb_s": _rate(within, HBM_COPIES * 2 * COPY_BYTES),
        "launch_us": _launch_us(opened, gpu_in[:32]),
    }


def _give_back(opened: Device) -> None:
    """Return what the probe's tensors left in torch's cache to the card."""
    if opened.kind == "cuda":
        torch.cuda.empty_cache()


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


def _launch_us(opened: Device, small: torch.Tensor) -> float:
    """The host's microseconds for one launch; the device is faster than that."""
    times = []
    for _ in range(REPEATS):
        opened.synchronize()
        begin = perf_counter()
        for _ in range(LAUNCHES):
            small.add_(1)
        times.append(perf_counter() - begin)
    return median(times) / LAUNCHES * 1e6


def _probe_cpu(opened: Device) -> dict[str, float | None]:
    source = opened.host_buffer(EMULATED_COPY_BYTES, pin=True)
    target = torch.zeros(EMULATED_COPY_BYTES, dtype=torch.uint8)
    times = []
    for _ in range(REPEATS):
        begin = perf_counter()
        target.copy_(source.tensor)
        times.append(perf_counter() - begin)
    source.close()
    rate = EMULATED_COPY_BYTES / median(times) / 1e9
    return dict.fromkeys(RATES) | {"h2d_gb_s": rate, "d2h_gb_s": rate}


MOVED_BYTES: Final = 2**30
"""Bytes moved in one direction."""
EMULATED_MOVED_BYTES: Final = 2**24
MOVE_REPEATS: Final = 9
MOVE_RATES: Final = ("store_gb_s", "load_gb_s", "both_gb_s")
"""Names of what is probed."""


def probe_moves(block_bytes: int, device: str = "auto") -> dict[str, float | None]:
    """Return GB/s (10^9) of moves of scattered blocks: to the host tier, back, both at once.

    Each is the median of 9 batches of 1 GiB a direction (16 MiB in emulation) after two that are
    not counted, from handing in the batch until the last block has arrived. No two neighbours stay
    neighbours. All are None where memory cannot be pinned.

    Args:
        block_bytes: Of one block over all layers.
        device: auto | cuda | cpu.
    """
    opened = open_device(device)
    facts = opened.facts()
    if not facts.can_pin:
        return dict.fromkeys(MOVE_RATES)
    size = EMULATED_MOVED_BYTES if opened.kind == "cpu" else MOVED_BYTES
    count = max(2, size // block_bytes)
    try:
        host = HostBlocks(
            opened,
            num_pinned=2 * count,
            num_pageable=0,
            block_bytes=block_bytes,
            can_uva=facts.can_uva,
        )
    except (CapacityError, PinningError):
        return dict.fromkeys(MOVE_RATES)
    gpu = opened.empty(2 * count * block_bytes).view(2 * count, block_bytes)
    mover = BlockMover(opened, gpu, host)
    try:
        return _move_rates(opened, mover, count, block_bytes)
    finally:
        opened.synchronize()
        mover.close()
        del mover, gpu
        host.close()
        opened.close()


def _move_rates(
    opened: Device, mover: BlockMover, count: int, block_bytes: int
) -> dict[str, float | None]:
    ids = iter(range(2**62))
    stores, loads = _pairs(count, first=0, seed=0), _pairs(count, first=count, seed=1)

    def rate(*parts: tuple[MoveKind, Sequence[tuple[int, int]]]) -> float:
        times = []
        for _ in range(MOVE_REPEATS + 2):
            moves = [
                Move(next(ids), kind, *((gpu, host) if kind == "store" else (host, gpu)))
                for pairs in zip(*(part for _, part in parts), strict=True)
                for (kind, _), (gpu, host) in zip(parts, pairs, strict=True)
            ]
            opened.synchronize()
            begin_s = perf_counter()
            mover.submit(MoveBatch(tuple(moves), frozenset()))
            mover.wait([move.move_id for move in moves])
            times.append(perf_counter() - begin_s)
            mover.poll()
        return len(parts) * count * block_bytes / median(times[2:]) / 1e9

    return {
        "store_gb_s": rate(("store", stores)),
        "load_gb_s": rate(("load", loads)),
        "both_gb_s": rate(("store", stores), ("load", loads)),
    }


def _pairs(count: int, *, first: int, seed: int) -> list[tuple[int, int]]:
    """Return scattered GPU blocks, each with a host block of the pool's numbering."""
    gpu, host = ([first + index for index in range(count)] for _ in range(2))
    draw = random.Random(seed)
    draw.shuffle(gpu)
    draw.shuffle(host)
    return [(a, 2 * count + b) for a, b in zip(gpu, host, strict=True)]
