"""The machine that a plan is for: a card of conf/gpu, the GPU that is here, or the CPU."""

import psutil

from engine.plan import DeviceFacts
from harness.measure.nvml import open_gpu
from harness.schema import RunConfig

GIB = 2**30
UNKNOWN_HOST_BYTES = 2**50
"""Host memory of a machine that is not here: no limit."""


def machine_facts(config: RunConfig) -> DeviceFacts:
    """Return what a plan must know of the machine; nothing is allocated.

    gpu.device=cpu, or auto where no GPU is here and no card is named: the CPU. A card with
    memory_gib: that card, free of others' memory, in a machine with any host memory. Else the GPU
    that is here.
    """
    gpu = config.gpu
    host = int(psutil.virtual_memory().available)
    if gpu.device != "cpu" and gpu.memory_gib is not None:
        total = int(gpu.memory_gib * GIB)
        return DeviceFacts(
            kind="cuda",
            name=gpu.name,
            total_bytes=total,
            free_bytes=total,
            host_available_bytes=UNKNOWN_HOST_BYTES,
        )
    here = open_gpu() if gpu.device != "cpu" else None
    facts = here.facts() if here is not None else {}
    memory = facts.get("memory_bytes")
    if here is not None and memory:
        used = here.sample()["gpu_used_bytes"] or 0
        return DeviceFacts(
            kind="cuda",
            name=str(facts["name"]),
            total_bytes=int(memory),
            free_bytes=int(memory) - int(used),
            host_available_bytes=host,
        )
    return DeviceFacts(
        kind="cpu",
        name="CPU",
        total_bytes=host // 2,
        free_bytes=host,
        host_available_bytes=host,
    )
