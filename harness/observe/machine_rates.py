"""What a machine carries, as probed, kept in TIGHTFIT_HOME: one file per machine and driver."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from catalogue.files import read_json, tightfit_home
from engine.device.gpu import Gpu
from engine.device.machine import num_threads
from harness.folders import plain
from harness.observe.environment import package_version, processor_facts
from reports.record.record import write_text_atomic

FOLDER: Final = "rates"
LEAST_CORES: Final = 0.3
"""Cores that other processes may use while rates are probed..."""
LEAST_SHARE: Final = 0.1
"""... or this share of all cores, where that is more."""
REPEAT_S: Final = 600.0
"""Age from which on rates that others' work disturbed are made again."""
Rates = Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Probed:
    """Rates of this machine and when they were measured."""

    rates: dict[str, float | None]
    """By the names of engine.plan.times and harness.observe.probe."""
    measured_at: float
    """Seconds since 1970."""
    others_cores: float = 0.0
    """Cores that other processes used meanwhile."""

    @property
    def is_disturbed(self) -> bool:
        """Whether other processes used so much that the rates are not the machine's."""
        return is_disturbing(self.others_cores)

    def is_outdated(self) -> bool:
        """Return whether they were disturbed, and long enough ago to be made again."""
        return self.is_disturbed and time.time() - self.measured_at > REPEAT_S

    def age(self, now: float | None = None) -> str:
        """Return how long ago they were measured, in words, and what disturbed them."""
        minutes = max(0.0, (time.time() if now is None else now) - self.measured_at) / 60
        words = f"{minutes:.0f} minutes ago"
        for unit, size in (("hours", 60), ("days", 24 * 60)):
            if minutes >= 2 * size:
                words = f"{minutes / size:.0f} {unit} ago"
        if self.is_disturbed:
            words += f" while other processes used {self.others_cores:.1f} cores"
        return words


def is_disturbing(others_cores: float) -> bool:
    """Return whether the work of other processes disturbs a probe."""
    return others_cores > max(LEAST_CORES, LEAST_SHARE * (os.cpu_count() or 1))


def watched(probe: Callable[[], Rates]) -> tuple[Rates, float]:
    """Return what a probe measured, and how many cores other processes used meanwhile."""
    import psutil  # noqa: PLC0415  for a probe alone

    def used_s() -> tuple[float, float]:
        machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
        idle_s = machine.idle + getattr(machine, "iowait", 0.0) + getattr(machine, "guest", 0.0)
        return sum(machine) - idle_s, own.user + own.system

    begin_s, before = time.perf_counter(), used_s()
    rates = probe()
    took_s, after = time.perf_counter() - begin_s, used_s()
    others_s = (after[0] - before[0]) - (after[1] - before[1])
    return rates, max(0.0, others_s) / max(took_s, 1e-9)


def identity(gpu: Gpu | None) -> dict[str, Any]:
    """Return what rates hold for: this card, driver, torch and processor.

    Without a GPU the CPU stands in for one, with as many threads.
    """
    facts = gpu.facts() if gpu else {}
    threads = {} if gpu else {"threads": (num_threads(), os.environ.get("OMP_NUM_THREADS"))}
    return {
        "gpu": facts.get("name"),
        "uuid": facts.get("uuid"),
        "driver": facts.get("driver"),
        "torch": package_version("torch"),
        "cpu": processor_facts()["name"],
        **threads,
    }


def rates_path(gpu: Gpu | None, home: Path | None = None) -> Path:
    """Return the file of this machine's rates."""
    text = json.dumps(identity(gpu), sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    return (home or tightfit_home()) / FOLDER / f"{name}.json"


def read_rates(gpu: Gpu | None, home: Path | None = None) -> Probed | None:
    """Return what was probed on this machine with this driver; None: nothing, or not readable."""
    found = read_json(rates_path(gpu, home))
    rates, measured_at = found.get("rates"), found.get("measured_at")
    if not isinstance(rates, dict) or not isinstance(measured_at, (int, float)):
        return None
    kept = {str(k): float(v) for k, v in rates.items() if isinstance(v, (int, float))}
    others = found.get("others_cores")
    return Probed(
        rates={**kept},
        measured_at=float(measured_at),
        others_cores=float(others) if isinstance(others, (int, float)) else 0.0,
    )


def write_rates(gpu: Gpu | None, rates: Rates, others_cores: float = 0.0) -> Path:
    """Keep what was probed now while other processes used so many cores; return the file."""
    path = rates_path(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {
        "machine": identity(gpu),
        "measured_at": time.time(),
        "others_cores": others_cores,
        "rates": dict(rates),
    }
    write_text_atomic(path, json.dumps(plain(found), indent=1) + "\n")
    return path
