"""What a run ran on: card, driver, link, CPU, memory, code and versions. Any field may be None."""

import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from harness.measure.nvml import Gpu, attempt

PACKAGES: Final = (
    "torch",
    "triton",
    "transformers",
    "safetensors",
    "numpy",
    "hydra-core",
    "mlflow",
)
SWITCHES: Final = (
    "TIGHTFIT_DISABLE_UVA",
    "TIGHTFIT_DISABLE_PIN_MEMORY",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
)
_GIT_TIMEOUT_S: Final = 10


def collect(gpu: Gpu | None) -> dict[str, Any]:
    """Return the facts of this machine and of `gpu`, if the run uses one. Imports no torch."""
    versions = {name: package_version(name) for name in PACKAGES}
    facts = gpu.facts() if gpu else None
    return {
        "gpu": facts,
        "driver": facts and facts["driver"],
        "torch": versions["torch"],
        "python": platform.python_version(),
        "packages": versions,
        "cpu": cpu_facts(),
        "memory_bytes": host_memory_bytes(),
        "os": platform.platform(),
        "host": socket.gethostname(),
        "git": git_state(Path(__file__).resolve().parent.parent),
        "switches": {name: os.environ[name] for name in SWITCHES if name in os.environ},
        "executable": sys.executable,
    }


def package_version(name: str) -> str | None:
    """Return the version of an installed package, None without it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_facts() -> dict[str, Any]:
    """Return the CPU's name, its logical cores, and those that this process may use."""
    name = None
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return {
        "name": name or platform.processor() or None,
        "num_cores": os.cpu_count(),
        "num_usable_cores": attempt(lambda: len(os.sched_getaffinity(0))),
    }


def host_memory_bytes() -> int | None:
    """Return the machine's memory in bytes."""
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return commit and whether tracked files differ from it; None outside a checkout."""
    sha = _git(folder, "rev-parse", "HEAD")
    if sha is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"sha": sha, "dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],  # noqa: S607  the user's git
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
