"""GPU memory of this process as the driver counts it."""

import os

import torch


def own_bytes(index: int) -> int | None:
    """Return the GPU memory that this process holds, context included, bytes.

    None where NVML is absent, does not count per process, or does not know this process by its
    number (some containers).

    Args:
        index: The device's index in torch.
    """
    try:
        import pynvml  # noqa: PLC0415 - absent on machines without the package

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - the module may be missing, or the driver
        return None
    try:
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    return None
