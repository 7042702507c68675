"""What a machine carries, as probed, kept in TIGHTFIT_HOME: one file per machine and driver."""

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from catalogue.files import read_json, tightfit_home
from engine.device.facts import num_threads
from harness.folders import plain
from harness.observe.environment import cpu_facts, package_version
from harness.observe.gpu import Gpu
from reports.record.record import write_text_atomic

FOLDER: Final = "rates"


@dataclass(frozen=True, kw_only=True)
class Probed:
    """Rates of this machine and when they were measured."""

    rates: dict[str, float | None]
    """By the names of engine.plan.times and harness.observe.probe."""
    measured_at: float
    """Seconds since 1970."""

    def age(self, now: float | None = None) -> str:
        """Return how long ago they were measured, in words."""
        minutes = max(0.0, (time.time() if now is None else now) - self.measured_at) / 60
        for unit, size in (("days", 24 * 60), ("hours", 60)):
            if minutes >= 2 * size:
                return f"{minutes / size:.0f} {unit} ago"
        return f"{minutes:.0f} minutes ago"


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
        "cpu": cpu_facts()["name"],
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
    return Probed(rates={**kept}, measured_at=float(measured_at))


def write_rates(gpu: Gpu | None, rates: Mapping[str, float | None]) -> Path:
    """Keep what was probed now; return the file."""
    path = rates_path(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"machine": identity(gpu), "measured_at": time.time(), "rates": dict(rates)}
    write_text_atomic(path, json.dumps(plain(found), indent=1) + "\n")
    return path
