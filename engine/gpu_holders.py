"""Who holds the memory of a GPU, as the driver counts it. No torch."""

import os
from typing import Any

import psutil

GIB = 2**30


def gpu_holders(uuid: str | None, module: Any = None) -> tuple[str, ...]:
    """Return the other processes that compute on a GPU in words, the largest first.

    Empty where there are none, or where NVML does not answer. A process whose bytes the driver does
    not tell (some containers) is named without them.

    Args:
        uuid: Of the GPU, as NVML writes it.
        module: What asks the driver; None: pynvml, where it is installed.
    """
    try:
        nvml = _pynvml() if module is None else module
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - the module may be missing, or the driver
        return ()
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        found = {p.pid: p.usedGpuMemory or 0 for p in _processes(nvml, handle)}
    except Exception:  # noqa: BLE001 - NVML raises one class per code
        return ()
    finally:
        nvml.nvmlShutdown()
    others = sorted((size, pid) for pid, size in found.items() if pid != os.getpid())
    return tuple(_words(size, pid) for size, pid in reversed(others))


def _pynvml() -> Any:
    import pynvml  # noqa: PLC0415 - absent on machines without the package

    return pynvml


def _processes(nvml: Any, handle: Any) -> list[Any]:
    """Those that compute and those that draw; one that does both is in twice."""
    return [
        *nvml.nvmlDeviceGetComputeRunningProcesses(handle),
        *nvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
    ]


def _words(num_bytes: int, pid: int) -> str:
    try:
        name = f"{psutil.Process(pid).name()} (process {pid})"
    except psutil.Error:
        name = f"process {pid}"
    return f"{name} {num_bytes / GIB:.2f} GiB" if num_bytes else f"{name}, bytes unknown"
