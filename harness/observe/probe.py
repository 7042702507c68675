"""Measure what the host link and the GPU's memory can carry, with plain copies.

Probes run before an engine is built and after it is closed, never beside it: they take 512 MiB of
GPU memory that no plan counts, and start the peak of the process anew. They leave nothing behind.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Final

import torch

from engine.asked.config import EngineConfig, EngineSettings, GPUConfig, ModelConfig
from engine.asked.sampling import SamplingParams
from engine.device.base import Device, HostBuffer
from engine.device.cuda import open_device
from engine.errors import CapacityError, PinningError
from engine.kv.memory import BlockMover, HostBlocks
from engine.kv.moves import Move, MoveBatch, MoveKind
from engine.llm import LLM
from engine.model.spec import ModelSpec
from engine.plan.rates import dma_run_bytes, rates_for
from kernels.ops import codes, kv
from kernels.sizes import LEAST_CAPABILITY

COPY_BYTES = 256 * 2**20
EMULATED_COPY_BYTES = 32 * 2**20
REPEATS = 20
RATES = (
    "h2d_gb_s",
    "d2h_gb_s",
    "two_way_gb_s",
    "in_place_gb_s",
    "in_place_many_gb_s",
    "blocks_gb_s",
    "block_overhead_s",
    "rows_gb_s",
    "rows_overhead_s",
    "hbm_copy_gb_s",
    "launch_us",
)
"""Names of what is probed."""
ROW_BYTES: Final = 2**16
ROW_DISTANCE: Final = 2**20
"""From the beginning of one row to the next."""
LONG_RUN, SHORT_RUN = 512, 16
"""Rows of a copy."""
BLOCK_BYTES: Final = 2**21
"""Size of blocks that are moved: about where kernels and DMA take as long on an H200."""
MANY_ROWS, MANY_COLUMNS = 128, 4096
"""A product of more rows than read a weight once, and the columns of its weight."""
MANY_BYTES = COPY_BYTES // 2
"""Bytes of that weight, and of all blocks."""
LAUNCHES = 500
"""Between two looks at the clock; fewer than fill the driver's queue."""
HBM_COPIES = 8
"""Copies within device memory between two events: one of 256 MiB is too short to time."""


def probe_link(device: str) -> dict[str, float | None]:
    """Return GB/s (10^9) of copies: host to device, back, both at once, in place, within HBM.

    `in_place_many_gb_s` is what a product of 128 rows reads of a float16 weight in host memory,
    `blocks_gb_s` what the kernel carries that moves blocks of KV, 2 MiB each, none beside its
    neighbour, and `block_overhead_s` what a copy of each takes beside its bytes.

    `rows_gb_s` is that of copies of 512 rows of 64 KiB that lie apart, as one layer of neighbouring
    host blocks does, and `rows_overhead_s` what such a copy takes beside its bytes, from copies of
    16 rows in a row. And `launch_us`, what the host takes to launch one small kernel: the median of
    20 rounds of 500.

    Medians of 20 copies of 256 MiB from registered memory, after two warm-ups; within HBM of 8 such
    copies in a row. In place is an elementwise kernel that reads registered host memory and writes
    device memory. On a CPU the copies are between host buffers (emulated, 32 MiB) and what has no
    counterpart is None. So is all where the driver pins nothing, and in place where the device sees
    host memory at another address: an engine runs there nevertheless, and its plan says how.
    """
    opened = open_device(device)
    return _probe_cpu(opened) if opened.kind == "cpu" else _probe_cuda(opened)


def stream_link(seconds: float, device: str, *, in_place: bool = False) -> tuple[int, float, float]:
    """Copy host to device without a pause, for reading a counter of the link meanwhile.

    With in_place a kernel reads host memory instead. It lasts about so many seconds; on a CPU the
    copies are between host buffers. Bytes are returned, and when on `time.perf_counter` the first
    copy began and the last was done.

    Raises:
        CapacityError: in_place, and the device sees host memory at another address.
    """
    opened = open_device(device)
    is_cpu = opened.kind == "cpu"
    size = EMULATED_COPY_BYTES if is_cpu else COPY_BYTES
    with _registered(opened, size) as buffer:
        target = opened.empty(size)
        view = opened.in_place(buffer, buffer.tensor) if in_place else None
        num_copies, marks = 0, []
        begin_s = perf_counter()
        while perf_counter() - begin_s < seconds:
            if view is None:
                target.copy_(buffer.tensor, non_blocking=True)
            else:
                _read_in_place(view, target)
            marks.append(opened.mark())
            num_copies += 1
            if len(marks) > 2:  # two copies wait in the queue, so that the link has no pause
                marks.pop(0).wait()
        opened.synchronize()
        end_s = perf_counter()
        del target, view
    return num_copies * size, begin_s, end_s


@contextmanager
def _registered(opened: Device, size: int) -> Iterator[HostBuffer]:
    """Registered host memory; what was left in torch's cache goes back to the card with it.

    Raises:
        PinningError: the driver registers none.
    """
    buffer = opened.host_buffer(size, pin=True)
    try:
        yield buffer
    finally:
        opened.synchronize()
        buffer.close()
        if opened.kind == "cuda":
            torch.cuda.empty_cache()


def _median_s(
    work: Callable[[], object],
    repeats: int,
    *,
    before: Callable[[], object] = lambda: None,
    skip: int = 0,
) -> float:
    """Median seconds of the work, each time after `before`; the first ones are not counted."""
    times = []
    for _ in range(repeats + skip):
        before()
        begin_s = perf_counter()
        work()
        times.append(perf_counter() - begin_s)
    return median(times[skip:])


def _probe_cuda(opened: Device) -> dict[str, float | None]:
    try:
        with _registered(opened, 2 * COPY_BYTES) as buffer:
            return _rates(opened, buffer.tensor, _view(opened, buffer))
    except PinningError:
        return dict.fromkeys(RATES)


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
        **_many_rates(opened, host, view, gpu_in),
        **_row_rates(opened, host, gpu_in),
        "hbm_copy_gb_s": _rate(within, HBM_COPIES * 2 * COPY_BYTES),
        "launch_us": _launch_us(opened, gpu_in[:32]),
    }


def _many_rates(
    opened: Device, host: torch.Tensor, view: torch.Tensor | None, gpu: torch.Tensor
) -> dict[str, float | None]:
    """Measure products of many rows in place, and moves of blocks by a kernel and one by one."""
    names = "in_place_many_gb_s", "blocks_gb_s", "block_overhead_s"
    if view is None:
        return dict.fromkeys(names)
    weight = view[:MANY_BYTES].view(torch.float16).view(-1, MANY_COLUMNS)
    rows = torch.ones(MANY_ROWS, MANY_COLUMNS, dtype=torch.float16, device=weight.device)
    product_gb_s = _rate(lambda: torch.mm(rows, weight.T), MANY_BYTES)
    sources, targets = (part[:MANY_BYTES].view(-1, BLOCK_BYTES) for part in (host, gpu))
    pairs, stream = _pairs(len(targets), first=0, seed=0), opened.copy_stream()
    ids = [torch.tensor(side, device=gpu.device) for side in zip(*pairs, strict=True)]
    words = gpu[:MANY_BYTES].view(torch.int32), view[:MANY_BYTES].view(torch.int32)
    to, of = (part.view(-1, BLOCK_BYTES // 4) for part in words)

    def copy() -> None:
        stream.after_compute()
        stream.copy_all([(targets[a], sources[b]) for a, b in pairs])
        stream.compute_after(stream.record())

    kernel_gb_s = _rate(lambda: kv.copy_blocks(to, of, *ids), MANY_BYTES)
    near_gb_s = _rate(lambda: gpu.copy_(host[: gpu.numel()], non_blocking=True), gpu.numel())
    overhead_s = BLOCK_BYTES * 1e-9 * (1 / _rate(copy, MANY_BYTES) - 1 / near_gb_s)
    return dict(zip(names, (product_gb_s, kernel_gb_s, max(0.0, overhead_s)), strict=True))


def _row_rates(opened: Device, host: torch.Tensor, gpu: torch.Tensor) -> dict[str, float]:
    """Measure copies of rows that lie apart: the rate of long ones, what each adds to its bytes."""
    rows = host.view(-1, ROW_DISTANCE)[:, :ROW_BYTES]
    targets, stream = gpu.view(-1, ROW_BYTES), opened.copy_stream()

    def rate(run: int) -> float:
        """GB/s of copies of so many rows, one behind the other."""

        def work() -> None:
            stream.after_compute()
            for first in range(0, targets.shape[0], run):
                source = first % rows.shape[0]
                stream.copy_rows(targets[first : first + run], rows[source : source + run])
            stream.compute_after(stream.record())

        return _rate(work, targets.numel())

    long_gb_s, short_gb_s = rate(LONG_RUN), rate(SHORT_RUN)
    overhead_s = SHORT_RUN * ROW_BYTES * 1e-9 * (1 / short_gb_s - 1 / long_gb_s)
    return {"rows_gb_s": long_gb_s, "rows_overhead_s": max(0.0, overhead_s)}


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

    def launch() -> None:
        for _ in range(LAUNCHES):
            small.add_(1)

    return _median_s(launch, REPEATS, before=opened.synchronize) / LAUNCHES * 1e6


def _probe_cpu(opened: Device) -> dict[str, float | None]:
    target = torch.zeros(EMULATED_COPY_BYTES, dtype=torch.uint8)
    with _registered(opened, EMULATED_COPY_BYTES) as source:
        copy_s = _median_s(lambda: target.copy_(source.tensor), REPEATS)
    rate = EMULATED_COPY_BYTES / copy_s / 1e9
    return dict.fromkeys(RATES) | {"h2d_gb_s": rate, "d2h_gb_s": rate}


MOVED_BYTES: Final = 2**30
"""Bytes moved in one direction."""
EMULATED_MOVED_BYTES: Final = 2**24
MOVE_REPEATS: Final = 9
MOVE_RATES: Final = ("store_gb_s", "load_gb_s", "both_gb_s")
"""Names of what is probed."""


def probe_moves(block_bytes: int, device: str) -> dict[str, float | None]:
    """Return GB/s (10^9) of moves of scattered blocks: to the host tier, back, both at once.

    Each is the median of 9 batches of 1 GiB a direction (16 MiB in emulation) after two that are
    not counted, from handing in the batch until the last block has arrived. No two neighbours stay
    neighbours. All are None where memory cannot be pinned.
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
    run_bytes = dma_run_bytes(rates_for(GPUConfig(), facts))
    mover = BlockMover(opened, gpu, host, dma_run_bytes=run_bytes)
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
    stores, loads = (
        [(gpu, 2 * count + host) for gpu, host in _pairs(count, first=first, seed=seed)]
        for seed, first in enumerate((0, count))
    )

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
    """Return scattered GPU blocks, each with a host block."""
    gpu, host = ([first + index for index in range(count)] for _ in range(2))
    draw = random.Random(seed)
    draw.shuffle(gpu)
    draw.shuffle(host)
    return list(zip(gpu, host, strict=True))


FEW: Final = 2
MANY: Final = 12
"""Layers of the two models that are compared."""
BATCH: Final = 8
STEPS: Final = 12


def probe_layers() -> dict[str, float]:
    """Return seconds beside the bytes of weights: of a step, of a layer, of a sequence in a layer.

    Decode steps of two models whose products take no time, of 2 and 12 layers, of one sequence and
    of 8: medians of 12.
    """
    few, many = _decode_s(FEW, 1), _decode_s(MANY, 1)
    together = _decode_s(MANY, BATCH)
    layer_s = max(1e-6, (many - few) / (MANY - FEW))
    sequence_s = min(0.9 * layer_s, max(1e-9, together - many) / (BATCH - 1) / MANY)
    return {
        "layer_overhead_s": layer_s - sequence_s,
        "sequence_overhead_s": sequence_s,
        "step_overhead_s": max(1e-6, few - FEW * layer_s),
    }


def _decode_s(num_layers: int, batch: int) -> float:
    spec = ModelSpec(
        model_type="llama",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rope_theta=10000.0,
    )
    config = EngineConfig(
        model=ModelConfig(name="probe", load_format="dummy", spec=spec),
        gpu=GPUConfig(name="probe", device="cpu", memory_gib=0.25),
        engine=EngineSettings(max_num_seqs=BATCH, max_num_batched_tokens=64),
    )
    llm = LLM.from_config(config)
    try:
        for index in range(batch):
            params = SamplingParams(temperature=0, max_tokens=STEPS + 4, ignore_eos=True)
            llm.add_request([index + 1, 2, 3, 4], params)
        times = []
        while llm.has_unfinished():
            begin_s = perf_counter()
            llm.step()
            times.append(perf_counter() - begin_s)
        return median(times[2:-2])
    finally:
        llm.close()


RATE_REPEATS = 10
HOST_BYTES = 2**30
EMULATED_HOST_BYTES = 64 * 2**20
SMALL_COPIES, SMALL_BYTES = 64, 2**20
"""Copies whose time, less that of their bytes, is the overhead of each."""
TOKENS, IN, OUT = 2048, 4096, 22016
"""A product as prefills of models of 7B run it."""
EMULATED_PRODUCT = (128, 512, 512)
EMULATED_WEIGHTS = (32, 1024, 1024)


def probe_rates(device: str) -> dict[str, float | None]:
    """Return the rates of this machine; what cannot be measured here is None.

    Beside the rates of `probe_link`: `bf16_tflops` and `float32_tflops` (a product of 2048 rows,
    TF32 off; medians of 10), `copy_overhead_s` (64 copies of 1 MiB in a row) and `pin_gb_s` (1 GiB
    of host memory made present and registered). From compute capability 8.0 on there are
    `lossless_gb_s` (codes read by a product of one row) and `restore_gb_s` (bfloat16 written). On a
    CPU sizes are smaller, and there are `hbm_copy_gb_s` and `in_place_gb_s` (weights of 128 MiB
    read by products of one row) and those of `probe_layers`.
    """
    found = probe_link(device)
    opened = open_device(device)
    found |= _products(opened)
    if opened.kind == "cuda" and torch.cuda.get_device_capability() >= LEAST_CAPABILITY:
        found |= _codes(opened)
    if opened.kind == "cpu":
        read_gb_s = _weights_gb_s(opened)
        found |= {"hbm_copy_gb_s": read_gb_s, "in_place_gb_s": read_gb_s, **probe_layers()}
    size = EMULATED_HOST_BYTES if opened.kind == "cpu" else HOST_BYTES
    try:
        with _registered(opened, size) as buffer:
            found["pin_gb_s"] = size / max(1e-9, buffer.touch_s + buffer.pin_s) / 1e9
            found["copy_overhead_s"] = _copy_overhead_s(opened, buffer.tensor, found["h2d_gb_s"])
    except PinningError:
        found |= dict.fromkeys(("pin_gb_s", "copy_overhead_s"))
    return found


def _products(opened: Device) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, dtype in (("bf16_tflops", torch.bfloat16), ("float32_tflops", torch.float32)):
        rows, inner, columns = EMULATED_PRODUCT if opened.kind == "cpu" else (TOKENS, IN, OUT)
        if opened.kind == "cpu" and dtype is torch.bfloat16:
            rows //= 8  # without instructions for it, a hundred times slower
        left = torch.randn(rows, inner, device=opened.torch_device).to(dtype)
        weight = torch.randn(columns, inner, device=opened.torch_device).to(dtype)

        def work(a: torch.Tensor = left, w: torch.Tensor = weight) -> None:
            torch.nn.functional.linear(a, w)  # rows of weights, as layers have them

        found[name] = 2.0 * rows * inner * columns / _seconds(opened, work) / 1e12
    return found


def _codes(opened: Device) -> dict[str, float | None]:
    """GB/s of codes that one row is multiplied by, and of weights that are restored from them."""
    weight = torch.randn(OUT, IN, device=opened.torch_device).bfloat16()
    packed, out = codes.pack(weight), weight
    row = torch.randn(1, IN, device=opened.torch_device).bfloat16()
    size = sum(array.nbytes for array in (packed.bytes, packed.codes, packed.first))
    product_s = _seconds(opened, lambda: codes.linear(row, packed))
    restore_s = _seconds(opened, lambda: codes.restore(packed, out))
    return {"lossless_gb_s": size / product_s / 1e9, "restore_gb_s": out.nbytes / restore_s / 1e9}


def _weights_gb_s(opened: Device) -> float:
    """GB/s of float32 weights that one row is multiplied by, each read once."""
    count, rows, columns = EMULATED_WEIGHTS
    weights = torch.ones(count, rows, columns)
    row = torch.ones(1, columns)

    def work() -> None:
        for weight in weights:
            torch.nn.functional.linear(row, weight)

    return weights.numel() * weights.itemsize / _seconds(opened, work) / 1e9


def _seconds(opened: Device, work: Callable[[], object]) -> float:
    """Median time of one call; calls are enqueued in threes, so that none waits for its launch."""

    def thrice() -> None:
        for _ in range(3):
            work()
        opened.synchronize()

    return _median_s(thrice, RATE_REPEATS, before=opened.synchronize, skip=2) / 3


def _copy_overhead_s(opened: Device, host: torch.Tensor, h2d_gb_s: float | None) -> float | None:
    """Seconds of a copy beside its bytes; None on a CPU, where there is no queue of copies."""
    if opened.kind == "cpu" or not h2d_gb_s:
        return None
    target = opened.empty(SMALL_COPIES * SMALL_BYTES)

    def work() -> None:
        for index in range(SMALL_COPIES):
            part = slice(index * SMALL_BYTES, (index + 1) * SMALL_BYTES)
            target[part].copy_(host[part], non_blocking=True)

    each = _seconds(opened, work) / SMALL_COPIES
    return max(0.0, each - SMALL_BYTES / (h2d_gb_s * 1e9))
