"""One CUDA device: exact pinned slabs, views of host memory, a copy stream, graphs."""

import contextlib
import functools
import mmap
import os
import resource
import weakref
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import torch

from engine.device.base import CopyStream, Device, HostBuffer, capabilities
from engine.device.cpu import CPUDevice
from engine.device.gpu import open_gpu
from engine.device.machine import available_bytes, memlock_room, num_threads
from engine.errors import CapacityError, ConfigError, EngineError, PinningError
from engine.plan.cards import DeviceFacts


class SharedAllocator:
    """Bounds a GPU's allocator by what the open engines may take together; knows their peak."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._bounds: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._base = 0

    def open(self) -> None:
        """Begin to count the peak anew, unless an engine is open."""
        if not self._bounds:
            self._base = torch.cuda.memory_reserved(self._index)
            torch.cuda.reset_peak_memory_stats(self._index)

    def bound(self, owner: object, num_bytes: int) -> None:
        """Let an engine take so many bytes, beside what others may and what was there before."""
        self._bounds[owner] = num_bytes
        self._apply()

    def release(self, owner: object) -> None:
        """Forget an engine; the bound is that of the others, none without any.

        With the last one go cuBLAS's workspaces, which torch keeps for each stream that called it.
        """
        self._bounds.pop(owner, None)
        if not self._bounds:
            torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001
        self._apply()

    def peak_bytes(self) -> int:
        """Return the most bytes of all engines together since the first of those open came."""
        return torch.cuda.max_memory_reserved(self._index) - self._base

    def _apply(self) -> None:
        share = 1.0
        if self._bounds:
            total = torch.cuda.mem_get_info(self._index)[1]
            share = max(0.0, min(1.0, (self._base + sum(self._bounds.values())) / total))
        torch.cuda.set_per_process_memory_fraction(share, self._index)


@functools.cache
def shared_allocator(index: int) -> SharedAllocator:
    """Return what keeps the accounts of a GPU's allocator, of which a process has one."""
    return SharedAllocator(index)


CONTEXT_BYTES = 640 * 2**20
"""A CUDA context with its modules, about."""


def _register(address: int, num_bytes: int) -> int:
    """Register host memory with CUDA; return its error code, 0 where it is registered."""
    code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))  # type: ignore[no-untyped-call]
    if code != 0:
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # collects the error that CUDA remembers
    return code


def _unregister(address: int, keep: object, owner: int) -> None:  # noqa: ARG001
    if os.getpid() == owner:  # a forked child has neither the registration nor CUDA
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class RegisteredBuffer(HostBuffer):
    """Host memory of an exact size, registered with CUDA once.

    Forked children do not get it: the kernel would copy every pinned page at the fork, and where it
    does not, a write after the fork would move the page away from under the GPU.
    """

    pinned = True

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes, inherit=False)
        begin = perf_counter()
        address = self.tensor.data_ptr()
        code = _register(address, max(1, num_bytes))
        if code != 0:
            raise PinningError(
                f"pinning: cudaHostRegister of {num_bytes} bytes failed with CUDA error {code}. "
                "Free host memory, or set TIGHTFIT_DISABLE_PIN_MEMORY=1 to run from pageable "
                "memory."
            )
        self.pin_s = perf_counter() - begin
        # The finalizer holds the memory, so that it is unregistered before it is unmapped.
        self._finalizer = weakref.finalize(self, _unregister, address, self.tensor, os.getpid())

    def close(self) -> None:
        """Unregister now; views must no longer be used."""
        self._finalizer()
        super().close()


def probe_pinning() -> tuple[str, int | None]:
    """Ask the driver, with one page, whether it pins and whether RLIMIT_MEMLOCK binds it.

    NVIDIA's driver for Linux takes the pages itself and does not count them as locked (os-mlock.c
    of its published module), so that the usual limit of 8 MiB does not matter there; other
    platforms may count them. Where the limit binds this process, a page is registered while the
    soft limit is 0.

    Returns:
        Why nothing can be pinned (empty: it can), and how many bytes can be pinned (None: any).
    """
    room = memlock_room()
    try:
        RegisteredBuffer(mmap.PAGESIZE).close()
    except PinningError as error:
        return str(error), room
    if room is None:
        return "", None
    return "", room if _counts_as_locked() else None


def _counts_as_locked() -> bool:
    """Whether a registration counts against RLIMIT_MEMLOCK; the limit is restored."""
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, limits[1]))
    except (OSError, ValueError):  # a sandbox that forbids it: what NVIDIA's driver does
        return False
    try:
        RegisteredBuffer(mmap.PAGESIZE).close()
    except PinningError:
        return True
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)
    return False


class _HostArray:
    """Tells torch where pinned host memory lies; keeps its owner alive."""

    def __init__(self, keep: object, view: torch.Tensor) -> None:
        self._keep = keep
        self.__cuda_array_interface__ = {
            "shape": (view.numel() * view.element_size(),),
            "typestr": "|u1",
            "data": (view.data_ptr(), False),
            "version": 2,
        }


def _copy_rows(dst: torch.Tensor, src: torch.Tensor, stream: int) -> None:
    """Enqueue a copy of rows, uint8 [n, bytes], from pinned host memory.

    Raises:
        EngineError: CUDA refused it.
    """
    from cuda.bindings import runtime  # noqa: PLC0415  only PyTorch for CUDA brings it

    (status,) = runtime.cudaMemcpy2DAsync(
        dst.data_ptr(),
        dst.stride(0),
        src.data_ptr(),
        src.stride(0),
        *dst.shape[::-1],
        runtime.cudaMemcpyKind.cudaMemcpyHostToDevice,
        stream,
    )
    if status != runtime.cudaError_t.cudaSuccess:
        raise EngineError(
            f"copy of rows: expected cudaMemcpy2DAsync to enqueue {tuple(dst.shape)} bytes, got "
            f"{status!r}. This is a fault of the engine or of the driver."
        )


class CUDACopyStream:
    """A CUDA stream for copies; every method only enqueues."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def after_compute(self) -> None:
        """Let later copies wait for the compute stream's work so far."""
        self._stream.wait_stream(torch.cuda.current_stream())

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Enqueue a copy on the copy stream."""
        with torch.cuda.stream(self._stream):
            dst.copy_(src, non_blocking=True)

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Enqueue copies on the copy stream."""
        with torch.cuda.stream(self._stream):
            for dst, src in pairs:
                dst.copy_(src, non_blocking=True)

    def copy_rows(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Enqueue one copy on the copy stream; torch would gather the rows on the host first."""
        _copy_rows(dst, src, self._stream.cuda_stream)

    def run(self, work: Callable[[], object]) -> None:
        """Call `work` with the copy stream as the current one."""
        with torch.cuda.stream(self._stream):
            work()

    def after(self, other: CopyStream, event: torch.cuda.Event) -> None:  # noqa: ARG002
        """Let later copies wait for an event of another copy stream."""
        self._stream.wait_event(event)

    def record(self) -> torch.cuda.Event:
        """Return an event after the copies enqueued so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def compute_after(self, event: torch.cuda.Event) -> None:
        """Let the compute stream wait for the event."""
        torch.cuda.current_stream().wait_event(event)

    def wait(self, event: torch.cuda.Event) -> None:
        """Block until the event has come; other threads run meanwhile."""
        event.synchronize()

    def is_done(self, event: torch.cuda.Event) -> bool:
        """Return whether the event has come."""
        return bool(event.query())  # type: ignore[no-untyped-call]


class CUDAMark:
    """An event on the stream that was current."""

    def __init__(self) -> None:
        self._passed_s: float | None = None
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> float:
        """Block until the event is done; other threads may run meanwhile."""
        if self._passed_s is None:
            self._event.synchronize()
            self._passed_s = perf_counter()
        return self._passed_s

    def is_done(self) -> bool:
        """Return whether the event is done, without waiting."""
        if self._passed_s is None and self._event.query():  # type: ignore[no-untyped-call]
            self._passed_s = perf_counter()
        return self._passed_s is not None


class CUDADevice:
    """The current CUDA device."""

    kind = "cuda"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("gpu.device: expected a CUDA device, found none. Set gpu.device=cpu.")
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        index = torch.cuda.current_device()
        self.torch_device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(index)
        self.uuid: str | None = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        self._gpu = open_gpu(self.uuid)
        """What its driver tells; None where NVML does not show it."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(index)
        outside = total - free - torch.cuda.memory_reserved(index)
        # Where the driver does not count per process: what exceeds a context is other processes'.
        self._others = max(0, outside - CONTEXT_BYTES)
        self._pool: Any = None
        self._can_pin = capabilities()[0]
        self._allocator = shared_allocator(index)
        self._allocator.open()

    def facts(self) -> DeviceFacts:
        """Return what the card and the host have now."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        can_pin, can_uva, reason = capabilities()
        limit = None
        if can_pin:
            refusal, limit = probe_pinning()
            if refusal:
                can_pin, can_uva, reason = False, False, refusal
        self._can_pin = can_pin
        return DeviceFacts(
            kind=self.kind,
            name=self.name,
            total_bytes=total,
            free_bytes=free + cached + self._outside_bytes(),
            host_available_bytes=available_bytes(),
            can_pin=can_pin,
            can_uva=can_uva,
            reason=reason,
            compute_capability=torch.cuda.get_device_capability(self.torch_device),
            pin_limit_bytes=limit,
            num_threads=num_threads(),
            holders=() if self._gpu is None else self._gpu.holders(),
        )

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Allocate GPU memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    @contextlib.contextmanager
    def scratch(self, num_bytes: int, beside: int) -> Iterator[torch.Tensor]:  # noqa: ARG002
        """Lend GPU memory; the allocator gives back what it does not use afterwards."""
        lent = self.empty(num_bytes)
        try:
            yield lent
        finally:
            lent.untyped_storage().resize_(0)  # whatever views of it are left
            torch.cuda.empty_cache()

    def host_buffer(self, num_bytes: int, *, pin: bool) -> HostBuffer:
        """Allocate host memory of exactly that size, registered where asked."""
        return RegisteredBuffer(num_bytes) if pin else HostBuffer(num_bytes)

    def in_place(self, buffer: HostBuffer, view: torch.Tensor) -> torch.Tensor:
        """Return a CUDA tensor over pinned host memory; it keeps the buffer alive.

        Raises:
            CapacityError: The buffer is pageable, or its device address differs.
        """
        if not buffer.pinned:
            raise CapacityError("in-place reads: expected pinned memory, got pageable memory.")
        if view.numel() == 0:
            return torch.empty(view.shape, dtype=view.dtype, device=self.torch_device)
        found = self._reached(buffer, view)
        if found is None:
            raise CapacityError(
                "in-place reads: this device maps host memory to another address. "
                "Set TIGHTFIT_DISABLE_UVA=1."
            )
        return found

    def _reached(self, keep: object, view: torch.Tensor) -> torch.Tensor | None:
        """Return pinned host memory as a CUDA tensor; None where its device address differs."""
        flat = torch.as_tensor(_HostArray(keep, view), device=self.torch_device)
        is_same = flat.data_ptr() == view.data_ptr()
        return flat.view(view.dtype).view(view.shape) if is_same else None

    def reach(self, host: torch.Tensor) -> torch.Tensor:
        """Return an upload buffer as kernels see it; itself where pageable or out of reach."""
        is_pinned = host.is_pinned() and capabilities()[1]
        found = self._reached(host, host) if is_pinned else None
        return host if found is None else found

    def copy_stream(self) -> CUDACopyStream:
        """Create a copy stream."""
        return CUDACopyStream()

    def upload_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a host tensor, pinned where this process may pin."""
        return torch.zeros(shape, dtype=dtype, pin_memory=self._can_pin)

    def enforce_budget(self, num_bytes: int) -> None:
        """Bound torch's allocator; `num_bytes` leaves out what lies outside it.

        Engines of one process share the allocator; together they may take the sum of their bounds.
        """
        self._allocator.bound(self, num_bytes)

    def _outside_bytes(self) -> int:
        """Memory of this process outside torch's allocator: context, modules, graphs."""
        reserved = torch.cuda.memory_reserved(self.torch_device)
        own = None if self._gpu is None else self._gpu.processes().get(os.getpid())
        if own is None:
            free, total = torch.cuda.mem_get_info(self.torch_device)
            own = total - free - self._others
        return max(0, own - reserved)

    def count_working(self, num_bytes: int) -> None:
        """Return at once: the allocator counts what steps take."""

    def peak_bytes(self) -> int:
        """Return the peak of all engines of this process since opening, and what lies outside."""
        return self._allocator.peak_bytes() + self._outside_bytes()

    def allocated_bytes(self) -> int:
        """Return bytes of live tensors."""
        return torch.cuda.memory_allocated(self.torch_device)

    def new_graph(self, run: Callable[[], object]) -> Callable[[], None]:
        """Capture `run`; all graphs share one memory pool."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph.replay

    def mark(self) -> "CUDAMark":
        """Record an event after the current stream's work so far."""
        return CUDAMark()

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        torch.cuda.synchronize(self.torch_device)  # noqa: TID251

    def close(self) -> None:
        """Give cached memory back and lift the budget."""
        self._pool = None
        self._allocator.release(self)
        torch.cuda.empty_cache()


def open_device(device: str) -> Device:
    """Open cuda, cpu, or whichever is here (auto).

    Raises:
        ConfigError: cuda was asked for and there is none.
    """
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return CUDADevice()
    return CPUDevice()
