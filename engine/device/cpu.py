"""The CPU as a device: the GPU tier is emulated by host memory, the code path is the same.

Copies are real. The copy stream runs a copy as late as it may (when compute waits for it), so that
a missing wait shows up as wrong tokens; `eager_copies` runs it as early as it may instead.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter

import torch

from engine.device.base import CopyStream, HostBuffer, capabilities
from engine.device.machine import cpu_facts
from engine.errors import CapacityError, EngineError
from engine.plan.cards import DeviceFacts


class EmulatedPinnedBuffer(HostBuffer):
    """Host memory that counts as pinned in emulation; nothing is registered with a driver."""

    pinned = True


class LazyCopyStream:
    """A queue of copies that run when an event after them is waited for."""

    def __init__(self, *, eager: bool = False, lock: "threading.RLock | None" = None) -> None:
        self._eager = eager
        self._queue: deque[Callable[[], object]] = deque()
        self._enqueued = 0
        self._done = 0
        # One lock for all streams of a device, as a copy may run those of another stream first.
        self._lock = threading.RLock() if lock is None else lock

    def after_compute(self) -> None:
        """Compute on the CPU is done when its call returns."""

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Enqueue a copy."""
        self.run(lambda: dst.copy_(src))

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Enqueue copies."""
        for dst, src in pairs:
            self.copy(dst, src)

    def copy_rows(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Enqueue a copy."""
        self.copy(dst, src)

    def after(self, other: CopyStream, event: int) -> None:
        """Let later copies wait for an event of another copy stream."""
        self.run(lambda: other.wait(event))

    def run(self, work: Callable[[], object]) -> None:
        """Enqueue work."""
        with self._lock:
            self._enqueued += 1
            self._queue.append(work)
            if self._eager:
                self.compute_after(self._enqueued)

    def record(self) -> int:
        """Return the number of copies enqueued so far."""
        return self._enqueued

    def compute_after(self, event: int) -> None:
        """Run the copies that the event stands for."""
        with self._lock:
            while self._done < event:
                self._queue.popleft()()
                self._done += 1

    def wait(self, event: int) -> None:
        """Run the copies that the event stands for."""
        self.compute_after(event)

    def is_done(self, event: int) -> bool:
        """Run one copy of those that are left; return whether none of the event's is left."""
        with self._lock:
            if self._done < event:
                self.compute_after(self._done + 1)
            return self._done >= event


class CPUMark:
    """A point in the work of the CPU, passed when it is made."""

    def __init__(self) -> None:
        self._made_s = perf_counter()

    def wait(self) -> float:
        """Return at once when it was made."""
        return self._made_s

    def is_done(self) -> bool:
        """Return True: compute is done when its call returns."""
        return True


class CPUDevice:
    """Emulates a GPU of a given budget in host memory."""

    kind = "cpu"
    torch_device = torch.device("cpu")
    uuid: str | None = None

    def __init__(self, *, eager_copies: bool = False) -> None:
        self.name = "CPU emulation"
        self._eager = eager_copies
        self._allocated = self._peak = 0
        self._budget: int | None = None
        self._lock = threading.RLock()

    def facts(self) -> DeviceFacts:
        """Return host figures; half of the free memory may stand in for a card."""
        can_pin, can_uva, reason = capabilities()
        facts = replace(cpu_facts(), name=self.name, reason=reason)
        return replace(facts, can_pin=can_pin, can_uva=can_uva)

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Allocate emulated GPU memory."""
        self.count_working(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    @contextmanager
    def scratch(self, num_bytes: int, beside: int) -> Iterator[torch.Tensor]:
        """Lend emulated GPU memory.

        Raises:
            CapacityError: The budget would be exceeded.
        """
        before = self._allocated
        self.count_working(num_bytes + beside)
        self._peak = max(self._peak, self._allocated)
        try:
            yield torch.empty(num_bytes, dtype=torch.uint8)
        finally:
            self._allocated = before

    def host_buffer(self, num_bytes: int, *, pin: bool) -> HostBuffer:
        """Allocate host memory of exactly that size."""
        return EmulatedPinnedBuffer(num_bytes) if pin else HostBuffer(num_bytes)

    def in_place(self, buffer: HostBuffer, view: torch.Tensor) -> torch.Tensor:
        """Return the view itself: compute runs where the memory is."""
        if not buffer.pinned:
            raise CapacityError("in-place reads: expected pinned memory, got pageable memory.")
        return view

    def reach(self, host: torch.Tensor) -> torch.Tensor:
        """Return the buffer itself: a CPU copies with its own hands."""
        return host

    def copy_stream(self) -> LazyCopyStream:
        """Create a copy stream."""
        return LazyCopyStream(eager=self._eager, lock=self._lock)

    def upload_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a host tensor."""
        return torch.zeros(shape, dtype=dtype)

    def enforce_budget(self, num_bytes: int) -> None:
        """Make allocations beyond the budget fail; what was allocated before is released."""
        self._budget, self._allocated, self._peak = num_bytes, 0, 0

    def count_working(self, num_bytes: int) -> None:
        """Count emulated GPU memory that is not allocated through `empty`."""
        if self._budget is not None and self._allocated + num_bytes > self._budget:
            raise CapacityError(
                f"emulated GPU: {num_bytes} bytes more than {self._allocated} exceed the budget of "
                f"{self._budget} bytes. This is a fault of the plan."
            )
        self._allocated += num_bytes

    def peak_bytes(self) -> int:
        """Return the most emulated GPU memory that was in use."""
        return max(self._peak, self._allocated)

    def allocated_bytes(self) -> int:
        """Return the emulated GPU memory in use."""
        return self._allocated

    def new_graph(self, run: Callable[[], object]) -> Callable[[], None]:  # noqa: ARG002
        """Refuse: a CPU has no graphs, and no plan for it asks for one."""
        raise EngineError("graphs: expected a CUDA device, got the CPU.")

    def mark(self) -> "CPUMark":
        """Return a point that is passed already: compute is done when its call returns."""
        return CPUMark()

    def synchronize(self) -> None:
        """Return at once: nothing runs asynchronously."""

    def close(self) -> None:
        """Return at once: memory goes with its tensors."""
