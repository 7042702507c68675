"""The interface between the engine and a device, and the host memory that both devices share."""

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any, Protocol

import torch

from engine.device.machine import num_threads
from engine.errors import CapacityError
from engine.plan.cards import DeviceFacts
from engine.sealed import GIB

CHUNK_BYTES = 64 * 2**20
HUGE_PAGE_BYTES = 2 * 2**20

TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


PREFIXES = ("TIGHTFIT_DISABLE_", "VLLM_WEIGHT_OFFLOADING_DISABLE_")
"""What the switches UVA and PIN_MEMORY are called in the environment: our names, vLLM's."""


def disabled_by(switch: str) -> str | None:
    """Return the variable that turns a capability off: set to something other than 0."""
    names = (prefix + switch for prefix in PREFIXES)
    return next((name for name in names if os.environ.get(name, "0") not in {"", "0"}), None)


def capabilities() -> tuple[bool, bool, str]:
    """Return whether pinning and in-place reads are allowed here, and why not."""
    if name := disabled_by("PIN_MEMORY"):
        return False, False, f"{name} is set"
    if name := disabled_by("UVA"):
        return True, False, f"{name} is set"
    return True, True, ""


@contextlib.contextmanager
def worker_pool(num_workers: int | None = None) -> Iterator[ThreadPoolExecutor]:
    """Threads for work on host memory; each runs torch operators on its own core alone.

    Without that every thread would start a team of threads of its own. None: `num_threads`.
    """
    before = torch.get_num_threads()
    workers = num_threads() if num_workers is None else num_workers
    try:
        with ThreadPoolExecutor(
            max(1, workers), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)  # the threads changed what later threads begin with


def chunks(num_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of pieces of a buffer."""
    for start in range(0, num_bytes, chunk_bytes):
        yield start, min(num_bytes, start + chunk_bytes)


class HostBuffer:
    """Host memory of an exact size, private and anonymous, touched: every page is present.

    It begins at a multiple of a huge page. Whole huge pages are asked for as such, so that fewer
    pages are touched and registered; the rest is of ordinary pages, so that no more is taken than
    was asked for. The up to 2 MiB that are mapped for alignment are never touched.

    A forked child gets the memory where it is to inherit it.

    Raises:
        CapacityError: The kernel has not that much.
    """

    pinned = False
    """Registered with the device."""
    pin_s = 0.0
    """Seconds that registration took."""

    def __init__(self, num_bytes: int, *, inherit: bool = True) -> None:
        begin = perf_counter()
        # The tensor owns the mapping.
        self.tensor = _map(num_bytes, inherit=inherit)
        """uint8 [num_bytes]."""
        touch(self.tensor)
        self.touch_s = perf_counter() - begin
        """Seconds that mapping and touching took."""

    def close(self) -> None:
        """Drop this object's reference; the memory goes with the last view."""
        self.tensor = torch.empty(0, dtype=torch.uint8)


def _map(num_bytes: int, *, inherit: bool) -> torch.Tensor:
    slack = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else 0
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        mapping = mmap.mmap(-1, max(1, num_bytes) + slack, flags=flags)
    except OSError as error:
        raise _no_memory(num_bytes, error.errno) from error
    base = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    start = -base % HUGE_PAGE_BYTES if slack else 0
    huge = num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    rest = start + huge
    # Not on every kernel, and only faster: a refusal changes nothing else.
    with contextlib.suppress(OSError):
        if huge:
            mapping.madvise(mmap.MADV_HUGEPAGE, start, huge)
        mapping.madvise(mmap.MADV_NOHUGEPAGE, rest, len(mapping) - rest)
    if not inherit:
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_DONTFORK)
    # Its storage begins where the slab does: torch takes memory for pinned by the storage's start.
    found = torch.frombuffer(mapping, dtype=torch.uint8, offset=start, count=max(1, num_bytes))
    return found[:num_bytes]


def touch(memory: torch.Tensor) -> None:
    """Make every page of fresh memory present: several threads write a byte of each.

    It is uint8 of zeros and begins at the beginning of a page.
    """
    threads = num_threads()
    share = -(-memory.numel() // threads)
    size = max(1, min(CHUNK_BYTES, -(-share // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES))

    def touch_piece(piece: tuple[int, int]) -> None:
        start, stop = piece
        memory[start : stop : mmap.PAGESIZE].zero_()

    with worker_pool(min(threads, -(-memory.numel() // size))) as pool:
        for _ in pool.map(touch_piece, chunks(memory.numel(), size)):
            pass


def _no_memory(num_bytes: int, code: int | None) -> CapacityError:
    why = "unknown" if code is None else os.strerror(code)
    return CapacityError(
        f"host memory: expected to map {num_bytes} bytes ({num_bytes / GIB:.2f} GiB), the kernel "
        f"refused ({why}). Offload less, free memory, or raise the limit (ulimit -v, ulimit -d, "
        "the cgroup, vm.overcommit_memory)."
    )


class CopyStream(Protocol):
    """A queue of copies beside the compute stream; any thread may use it."""

    def after_compute(self) -> None:
        """Let later copies wait for everything enqueued on the compute stream so far."""

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Enqueue a copy; `src` must stay unchanged until it has run."""

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Enqueue copies, each a target and a source, with less work of the host than singly."""

    def copy_rows(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Enqueue one copy of rows that lie apart, uint8 [n, bytes], pinned host to device."""

    def run(self, work: Callable[[], object]) -> None:
        """Enqueue work that `work` launches when it is called; it must not wait for the device."""

    def after(self, other: "CopyStream", event: Any) -> None:
        """Let later copies wait for an event of another copy stream."""

    def record(self) -> Any:
        """Return an event that is done when the copies enqueued so far are."""

    def compute_after(self, event: Any) -> None:
        """Let later work on the compute stream wait for the event."""

    def wait(self, event: Any) -> None:
        """Block the caller until the event's copies are done."""

    def is_done(self, event: Any) -> bool:
        """Return whether the event's copies are done, without waiting."""


class Device(Protocol):
    """CUDA, or the CPU with the GPU tier emulated in host memory."""

    kind: str
    """cuda | cpu."""
    torch_device: torch.device
    name: str
    uuid: str | None
    """UUID of the GPU, as NVML writes it; None on the CPU."""

    def facts(self) -> DeviceFacts:
        """Return what a plan must know, read now."""

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Allocate uint8 [num_bytes] of GPU memory, counted by `allocated_bytes`."""

    def scratch(self, num_bytes: int, beside: int) -> AbstractContextManager[torch.Tensor]:
        """Lend uint8 [num_bytes] of GPU memory; what was lent is given back to the driver.

        Args:
            num_bytes: How much.
            beside: What is allocated meanwhile by others, and given back too.
        """

    def host_buffer(self, num_bytes: int, *, pin: bool) -> HostBuffer:
        """Allocate host memory of exactly that size; pinned where asked.

        Raises:
            CapacityError: Pinning failed.
        """

    def in_place(self, buffer: HostBuffer, view: torch.Tensor) -> torch.Tensor:
        """Return the view of a pinned buffer as a tensor that compute can read in place."""

    def copy_stream(self) -> CopyStream:
        """Create a copy stream."""

    def upload_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate host zeros that copies to or from the device pass at full speed.

        Pinned where this process may pin and the driver can; never where pinning is disabled.
        """

    def reach(self, host: torch.Tensor) -> torch.Tensor:
        """Return an upload buffer as kernels read and write it in place; itself where none can.

        A copy of it by a kernel does not queue behind the blocks that a copy engine moves: copies
        of one direction run in the order of their submission, whatever their streams (H200: 64 KiB
        behind 1 GiB take 19 ms, by a kernel 0.3 ms).
        """

    def enforce_budget(self, num_bytes: int) -> None:
        """Make allocations beyond the budget fail."""

    def count_working(self, num_bytes: int) -> None:
        """Count memory that steps take beside `empty`, where the device cannot see it."""

    def peak_bytes(self) -> int:
        """Return the most GPU memory that was in use, context included, bytes."""

    def allocated_bytes(self) -> int:
        """Return GPU memory in use now, bytes."""

    def new_graph(self, run: Callable[[], object]) -> Callable[[], None]:
        """Capture `run` as a graph; return what enqueues it on the compute stream again.

        Raises:
            EngineError: The device has no graphs.
        """

    def mark(self) -> "Mark":
        """Return a point behind what is enqueued on the compute stream so far."""

    def synchronize(self) -> None:
        """Wait for all work; for start-up and measurement only."""

    def close(self) -> None:
        """Release what the device holds."""


class Mark(Protocol):
    """A point in the work of the compute stream."""

    def wait(self) -> float:
        """Block until the work before it is done; return when the host first knew that.

        It knows by this or by `is_done`, in seconds of `time.perf_counter`.
        """

    def is_done(self) -> bool:
        """Return whether the work before it is done, without waiting."""
