"""The interface between the engine and a device: memory, streams, facts."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from engine.plan.memory import DeviceFacts

TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


class HostBuffer(Protocol):
    """Host memory of an exact size, pinned or not, released by `close` or with its last view."""

    tensor: torch.Tensor
    """uint8 [num_bytes] on the CPU."""
    pinned: bool
    touch_s: float
    """Seconds that mapping and touching took."""
    pin_s: float
    """Seconds that registration took."""

    def close(self) -> None:
        """Unregister and release; views must no longer be used."""


class CopyStream(Protocol):
    """A queue of copies beside the compute stream; any thread may use it."""

    def after_compute(self) -> None:
        """Let later copies wait for everything enqueued on the compute stream so far."""

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Enqueue a copy; `src` must stay unchanged until it has run."""

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Enqueue copies, each a target and a source, with less work of the host than singly."""

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

    def facts(self) -> DeviceFacts:
        """Return what a plan must know, read now."""

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Allocate uint8 [num_bytes] of GPU memory, counted by `allocated_bytes`."""

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

    def reach(self, host: torch.Tensor) -> torch.Tensor | None:
        """Return an upload buffer as kernels read and write it in place; None where none can.

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

    def new_graph(self, run: Callable[[], object]) -> "Graph":
        """Capture `run` as a graph.

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
        """Block until the work before it is done.

        Returns:
            When the host first knew that, by this or by `is_done`: seconds of `time.perf_counter`.
        """

    def is_done(self) -> bool:
        """Return whether the work before it is done, without waiting."""


class Graph(Protocol):
    """A captured step."""

    def replay(self) -> None:
        """Enqueue the captured work on the compute stream."""
