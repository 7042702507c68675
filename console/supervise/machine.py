"""Machine: one sampler of GPUs, memory, disks and load for all pages, with an hour of history.

A value that is not known is None. NVML, the disks' sizes and the walk over the models' files each
have a thread of their own: one that hangs leaves its own values old, and delays nobody.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from catalogue.checkpoint import freed_bytes
from catalogue.files import models_folder
from engine.device.gpu import Gpu, attempt, visible_gpus

Plain = dict[str, Any]
SAMPLE_S: Final = 2.0
HISTORY_S: Final = 3600.0
DISK_S: Final = 30.0
WALK_S: Final = 300.0
"""Seconds between two walks over the files of models."""
STALE_S: Final = 15.0
"""What served processes were last said to hold counts for so long."""
LOADS: Final = ("running", "waiting", "prefill_tokens_s", "decode_tokens_s", "link_share")
"""What `tell_load` is told, as the history has it."""
logger = logging.getLogger("console")


def read_gpus() -> list[Plain]:
    """Return what NVML says of every GPU that CUDA would show: a dict for each.

    Keys: name, uuid, total_bytes, used_bytes, utilization (0 to 1), temperature_c, power_w,
    pids (process -> its bytes, None where the driver does not say; None: not known at all).
    """
    return [_gpu_facts(gpu) for gpu in visible_gpus()]


def _gpu_facts(gpu: Gpu) -> Plain:
    facts, now, slow = gpu.facts(), gpu.sample(), gpu.sample_slow(set())
    pids, held, busy = gpu.compute_pids(), gpu.processes(), slow["gpu_busy_pct"]
    return {
        "name": facts["name"],
        "uuid": gpu.uuid,
        "total_bytes": facts["memory_bytes"],
        "used_bytes": now["gpu_used_bytes"],
        "utilization": None if busy is None else busy / 100,
        "temperature_c": slow["gpu_temperature_c"],
        "power_w": now["gpu_power_w"],
        "pids": None if pids is None else {pid: held.get(pid) for pid in pids},
    }


class Machine:
    """The machine, looked at every two seconds however many pages are open.

    Args:
        gpus: returns what `read_gpus` returns; may block, and may raise.
        root: folder of the models.
        clock: wall-clock seconds.
    """

    def __init__(
        self,
        *,
        gpus: Callable[[], Sequence[Plain]] = read_gpus,
        root: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._read_gpus, self._clock = gpus, clock
        self._root = models_folder() if root is None else root
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._gpus: list[Plain] = []
        self._gpu_reason: str | None = "not looked at yet"
        self._gpus_s: float | None = None
        self._host: Plain = {}
        self._disk: Plain = {"path": str(self._root)}
        self._served: tuple[float, Sequence[Mapping[str, Any]]] = (0.0, ())
        self._load: tuple[float, Mapping[str, Any]] = (0.0, {})
        self._history: deque[Plain] = deque(maxlen=int(HISTORY_S / SAMPLE_S))
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to look."""
        looks = (
            (self.look_at_gpus, SAMPLE_S),
            (self.look_at_host, SAMPLE_S),
            (self.look_at_disk, DISK_S),
            (self.walk, WALK_S),
        )
        for look, pause_s in looks:
            thread = threading.Thread(
                target=self._repeat, args=(look, pause_s), name=look.__name__, daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """End the looks; one that hangs is left alone."""
        self._over.set()
        for thread in self._threads:
            thread.join(0.5)

    def _repeat(self, look: Callable[[], None], pause_s: float) -> None:
        while not self._over.is_set():
            try:
                look()
            except Exception:
                logger.exception("machine: %s failed", look.__name__)
            self._over.wait(pause_s)

    def tell(self, served: Sequence[Mapping[str, Any]]) -> None:
        """Take in what served processes hold of GPUs and of pinned memory, as they say.

        Args:
            served: for each pid, gpu_uuid (None: the first GPU), weights_bytes, kv_bytes,
                budget_bytes, pinned_bytes.
        """
        with self._lock:
            self._served = (self._clock(), list(served))

    def tell_load(self, load: Mapping[str, Any]) -> None:
        """Take in how much is served, for the history: see LOADS."""
        with self._lock:
            self._load = (self._clock(), dict(load))

    def look_at_gpus(self) -> None:
        """Read NVML once."""
        reason: str | None = None
        found: list[Plain] = []
        try:
            found = [dict(each) for each in self._read_gpus()]
        except Exception as error:  # noqa: BLE001  NVML raises one class per code
            reason = f"GPUs could not be read: {error}"
        if not found and reason is None:
            reason = "No GPU was found: NVML is not installed, or shows none."
        children = (
            {each.pid for each in _tree()} if any(each.get("pids") for each in found) else set()
        )
        for each in found:
            each["own_bytes"] = _sum_of(each.pop("pids", None), children)
        with self._lock:
            self._gpus, self._gpu_reason, self._gpus_s = found, reason, self._clock()

    def look_at_host(self) -> None:
        """Read memory once, and add a row to the history."""
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        events = _counters(Path("/proc/vmstat"))
        # Children that end meanwhile count no more.
        own = [attempt(lambda each=each: each.memory_info().rss) or 0 for each in _tree()]  # type: ignore[misc]
        host = {
            "ram": {
                "total_bytes": memory.total,
                "available_bytes": memory.available,
                "locked_bytes": _locked_bytes(),
                "ours_bytes": sum(own),
                "major_faults": events.get("pgmajfault"),
            },
            "swap": {
                "total_bytes": swap.total,
                "used_bytes": swap.used,
                "in_pages": events.get("pswpin"),
                "out_pages": events.get("pswpout"),
            },
        }
        with self._lock:
            now_s = self._clock()
            told_s, load = self._load
            is_fresh = now_s - told_s < STALE_S
            self._host = host
            self._history.append(
                {
                    "time_s": now_s,
                    **{name: load.get(name) if is_fresh else None for name in LOADS},
                    "gpu_used_bytes": self._gpus[0].get("used_bytes") if self._gpus else None,
                    "ram_available_bytes": memory.available,
                }
            )

    def look_at_disk(self) -> None:
        """Read how full the disk of models is."""
        folder = next(
            (each for each in (self._root, *self._root.parents) if each.is_dir()), Path("/")
        )
        usage = psutil.disk_usage(str(folder))
        with self._lock:
            self._disk |= {"total_bytes": usage.total, "free_bytes": usage.free}

    def walk(self) -> None:
        """Count the bytes of the models' files."""
        num_bytes = freed_bytes(self._root) if self._root.is_dir() else 0
        with self._lock:
            self._disk |= {"models_bytes": num_bytes}

    def snapshot(self) -> Plain:
        """Return the last of every value as plain data, at once.

        Keys: time_s, gpus (index, uuid, name, total_bytes, used_bytes, weights_bytes, kv_bytes,
        ours_bytes, others_bytes, free_bytes, budget_bytes, utilization, temperature_c, power_w),
        gpu_reason (why there is none), ram, swap, disks, history (a row each two seconds).
        """
        with self._lock:
            told_s, served = self._served
            known = served if self._clock() - told_s < STALE_S else ()
            times = [each for each in (self._gpus_s, self._newest_s()) if each is not None]
            pinned = [each.get("pinned_bytes") for each in known]
            told = [each for each in pinned if each is not None]
            ram = dict(self._host.get("ram", {}))
            locked = ram.pop("locked_bytes", None)
            ram["pinned_bytes"] = sum(told) if told else locked
            return {
                "time_s": min(times) if times else None,
                "gpus": [_with_parts(index, each, known) for index, each in enumerate(self._gpus)],
                "gpu_reason": self._gpu_reason,
                "ram": ram,
                "swap": dict(self._host.get("swap", {})),
                "disks": [dict(self._disk)],
                "history": list(self._history),
            }

    def _newest_s(self) -> float | None:
        return self._history[-1]["time_s"] if self._history else None


def _with_parts(index: int, gpu: Plain, served: Sequence[Mapping[str, Any]]) -> Plain:
    """Return a GPU with its bytes by what holds them; a part that is not known is None."""
    own = gpu.get("own_bytes")
    mine = [
        each
        for each in served
        if each.get("gpu_uuid") == gpu.get("uuid") or (each.get("gpu_uuid") is None and index == 0)
    ]

    def told(name: str) -> int | None:
        values = [each[name] for each in mine if each.get(name) is not None]
        return sum(values) if values else None

    weights, kv = told("weights_bytes"), told("kv_bytes")
    total, used = gpu.get("total_bytes"), gpu.get("used_bytes")
    parts = (weights or 0) + (kv or 0)
    return {
        **{name: value for name, value in gpu.items() if name != "own_bytes"},
        "index": index,
        "weights_bytes": weights,
        "kv_bytes": kv,
        "ours_bytes": None if own is None else max(0, own - parts),
        "others_bytes": None if own is None or used is None else max(0, used - own),
        "free_bytes": None if total is None or used is None else total - used,
        "budget_bytes": told("budget_bytes"),
    }


def _sum_of(pids: Mapping[int, int | None] | None, children: set[int]) -> int | None:
    """Return what processes of ours hold; None where one of them, or all, cannot be told."""
    if pids is None:
        return None
    own = [num_bytes for pid, num_bytes in pids.items() if pid in children]
    return None if None in own else sum(each for each in own if each is not None)


def _tree() -> list[psutil.Process]:
    """Return this process and all below it."""
    own = psutil.Process()
    return [own, *(attempt(lambda: own.children(recursive=True)) or [])]


def _locked_bytes() -> int | None:
    """Return the memory that is locked on the whole machine; drivers pin beside it."""
    found = _counters(Path("/proc/meminfo")).get("Mlocked:")
    return None if found is None else found * 1024


def _counters(file: Path) -> dict[str, int]:
    """Return the numbers of a file of names and numbers; empty where it cannot be read."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    pairs = (line.split()[:2] for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
