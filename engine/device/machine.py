"""What a plan must know of the machine that it is for: a GPU that is here, a card, or the CPU.

And its host memory that may be taken and pinned: free memory, cgroups, RLIMIT_MEMLOCK. No torch.
"""

import contextlib
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.asked.config import ANY_CARD, GPUConfig
from engine.device.gpu import Gpu, open_gpu
from engine.plan.cards import CARDS, DeviceFacts
from engine.plan.sizes import MAX_LOAD_THREADS


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The device that a plan is for."""

    facts: DeviceFacts
    gpu: Gpu | None
    """The GPU where it is one that is here."""
    is_here: bool
    """Whether it is a device of this machine."""


def machine_of(asked: GPUConfig) -> Machine:
    """Return the device that a configuration asks for; nothing is allocated, and nothing probed.

    gpu.device=cpu, or auto where no GPU is here and no card is described: the CPU, as a run takes
    it. A card that is described and not here: that card, free of others' memory, in a machine with
    any host memory. Else the GPU that is here, of which gpu.memory_gib is the part that is used.
    """
    here = open_gpu() if asked.device != "cpu" else None
    if here is not None and (asked.memory_gib is None or _is_here(asked, here)):
        facts = _facts_here(here)
        if facts is not None:
            return Machine(facts=facts, gpu=here, is_here=True)
    if asked.memory_gib is not None and (here is not None or asked.is_described):
        return Machine(facts=DeviceFacts.of_card(asked), gpu=None, is_here=False)
    return Machine(facts=cpu_facts(), gpu=None, is_here=True)


def has_gpu() -> bool:
    """Return whether this machine has a GPU that CUDA would show."""
    return open_gpu() is not None


def cpu_facts() -> DeviceFacts:
    """Return what a plan must know of this machine without a GPU."""
    host = available_bytes()
    return DeviceFacts(
        kind="cpu",
        name="CPU",
        total_bytes=host // 2,
        free_bytes=host,
        host_available_bytes=host,
        num_threads=num_threads(),
    )


def _is_here(asked: GPUConfig, here: Gpu) -> bool:
    """Whether the card that is asked for is the one in this machine, by name or by its sheet."""
    sheet = CARDS.get(str(here.facts().get("name")))
    rates = (asked.link_gb_s, asked.hbm_gb_s, asked.bf16_tflops)
    if asked.name == ANY_CARD and not any(rates):
        return True
    return sheet is not None and rates == (sheet.link_gb_s, sheet.hbm_gb_s, sheet.bf16_tflops)


def _facts_here(here: Gpu) -> DeviceFacts | None:
    """Return the facts of the GPU in this machine; None where its driver does not tell."""
    facts = here.facts()
    memory = facts.get("memory_bytes")
    if not memory:
        return None
    used = here.sample()["gpu_used_bytes"] or 0
    return DeviceFacts(
        kind="cuda",
        name=str(facts["name"]),
        total_bytes=int(memory),
        free_bytes=int(memory) - int(used),
        host_available_bytes=available_bytes(),
        compute_capability=here.compute_capability(),
        num_threads=num_threads(),
        holders=here.holders(),
    )


CAP_IPC_LOCK = 14
"""The bit of the capability that lifts RLIMIT_MEMLOCK."""


def num_threads() -> int:
    """Return how many threads host memory work uses: the cores this process may run on."""
    return min(MAX_LOAD_THREADS, len(os.sched_getaffinity(0)))


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return host memory that can be taken: free memory, within the limits of every cgroup above.

    The page cache counts as free, in a cgroup too.

    Args:
        proc: Where this process's cgroups are named.
        cgroups: Where cgroups are mounted, version 1 or 2.
    """
    free = int(psutil.virtual_memory().available)
    rooms = (_cgroup_room(folder) for folder in _cgroup_folders(proc, cgroups))
    return max(0, min([free, *(room for room in rooms if room is not None)]))


def _cgroup_folders(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Yield the folders that may limit this process; in a container its own is the mount's root."""
    yield from (cgroups, cgroups / "memory")
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in {"", "memory"}:
                folder = Path(path.lstrip("/"))
                for part in (folder, *folder.parents)[:-1]:
                    yield cgroups / controllers / part


def _cgroup_room(folder: Path) -> int | None:
    """Return what a cgroup's limits leave, bytes; None without a limit.

    Beyond memory.high a group is slowed down until it has given memory back, which a load of
    weights cannot: it is a limit too.
    """
    rooms = []
    for limit, usage, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.high", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        with contextlib.suppress(OSError, ValueError):
            most = int((folder / limit).read_text(encoding="utf-8"))
            used = int((folder / usage).read_text(encoding="utf-8"))
            stat = dict(
                line.split()
                for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
            )
            cached = sum(
                int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active")
            )
            rooms.append(most - used + cached)
    return min(rooms, default=None)


def memlock_room(proc: Path = Path("/proc")) -> int | None:
    """Return what RLIMIT_MEMLOCK leaves this process, bytes; None where it does not bind it.

    Whether registering memory with a device counts against the limit is the driver's choice; ask
    the device.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return None
    status, locked = {}, 0
    with contextlib.suppress(OSError):
        lines = (proc / "self" / "status").read_text(encoding="utf-8").splitlines()
        status = dict(line.split(":", 1) for line in lines if ":" in line)
    with contextlib.suppress(ValueError):
        if int(status.get("CapEff", "0"), 16) >> CAP_IPC_LOCK & 1:
            return None
    with contextlib.suppress(ValueError, IndexError):
        locked = int(status.get("VmLck", "0 kB").split()[0]) * 1024
    return max(0, limit - locked)
