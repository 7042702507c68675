"""The device that a peer in this process runs on: its budget, and what was taken of it."""

import os
from dataclasses import dataclass
from typing import Any, Final

from engine.asked.config import EngineConfig
from engine.errors import ConfigError

MIB: Final = 2**20
RUNTIME_BYTES: Final = 864 * MIB
"""CUDA context and modules, outside the allocator, with room for those of any peer."""


@dataclass(frozen=True, kw_only=True)
class PeerDevice:
    """One device with a budget."""

    name: str
    kind: str
    """cuda | cpu."""
    budget_bytes: int
    runtime_bytes: int
    """Bytes of the budget outside of the allocator."""
    card_bytes: int

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the budget for tensors."""
        return self.budget_bytes - self.runtime_bytes

    @property
    def torch_name(self) -> str:
        """What torch calls it."""
        return "cuda:0" if self.kind == "cuda" else "cpu"

    def enforce(self) -> None:
        """Bound torch's allocator, so that more than the budget is an out-of-memory error."""
        if self.kind == "cuda":
            import torch  # noqa: PLC0415  takes seconds

            share = max(0.0, min(1.0, self.tensor_bytes / self.card_bytes))
            torch.cuda.empty_cache()  # of the probes: no part of the peak
            torch.cuda.set_per_process_memory_fraction(share, 0)
            torch.cuda.reset_peak_memory_stats(0)

    def peak_bytes(self) -> int | None:
        """Return the most that this process held of the card; None on a CPU."""
        if self.kind != "cuda":
            return None
        import torch  # noqa: PLC0415  takes seconds

        reserved = int(torch.cuda.memory_reserved(0))
        own = _own_bytes(str(torch.cuda.get_device_properties(0).uuid))
        outside = self.runtime_bytes if own is None else max(0, own - reserved)
        return int(torch.cuda.max_memory_reserved(0)) + outside


def open_peer_device(config: EngineConfig) -> PeerDevice:
    """Return the device that a configuration asks for.

    Raises:
        ConfigError: cuda was asked for and there is none.
    """
    import torch  # noqa: PLC0415  takes seconds

    has_cuda = torch.cuda.is_available()
    if config.gpu.device == "cuda" and not has_cuda:
        raise ConfigError("gpu.device: expected cuda, found no CUDA device. Set gpu.device=cpu.")
    is_cuda = has_cuda and config.gpu.device != "cpu"
    if is_cuda:
        facts: Any = torch.cuda.get_device_properties(0)
        name, card = str(facts.name), int(facts.total_memory)
    else:
        import psutil  # noqa: PLC0415

        name, card = "cpu", int(psutil.virtual_memory().available) // 2
    asked = config.gpu.memory_gib
    memory = card if asked is None else int(asked * 2**30)
    if is_cuda and memory > card:
        raise ConfigError(
            f"gpu.memory_gib: expected at most the card's {card / 2**30:.2f} GiB, got {asked}."
        )
    return PeerDevice(
        name=name,
        kind="cuda" if is_cuda else "cpu",
        budget_bytes=int(memory * config.engine.gpu_memory_utilization),
        runtime_bytes=RUNTIME_BYTES if is_cuda else 0,
        card_bytes=card,
    )


def _own_bytes(uuid: str) -> int | None:
    """Return what the driver says that this process holds; None where it does not say."""
    import pynvml  # noqa: PLC0415  needs a driver

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
    except pynvml.NVMLError:
        return None
    return None
