"""What a run ran on: card, driver, link, CPU, memory, code and versions. Any field may be None."""

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import psutil

from catalogue.processes import IMPORT_ROOT, ROOT
from engine.device.gpu import Gpu, attempt
from harness.observe.host import read_text

PACKAGES: Final = (
    "tightfit",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "accelerate",
    "vllm",
    "numpy",
    "pyarrow",
    "nvidia-ml-py",
    "hydra-core",
    "omegaconf",
    "mlflow",
)
SYS: Final = Path("/sys")
SWITCHES: Final = (
    "TIGHTFIT_DISABLE_UVA",
    "TIGHTFIT_DISABLE_PIN_MEMORY",
    "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA",
    "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
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
        "cuda": {"driver": facts and facts["cuda_driver"], "torch": torch_cuda()},
        "torch": versions["torch"],
        "python": platform.python_version(),
        "packages": versions,
        "cpu": processor_facts(),
        "memory_bytes": psutil.virtual_memory().total,
        "swap_bytes": psutil.swap_memory().total,
        "numa": numa_facts(facts["numa_node"] if facts else None),
        "huge_pages": huge_page_facts(),
        "os": platform.platform(),
        "kernel": platform.release(),
        "host": socket.gethostname(),
        "git": git_state(ROOT) if ROOT == IMPORT_ROOT else None,  # the wheel has no commit
        "switches": {name: os.environ[name] for name in SWITCHES if name in os.environ},
        "executable": sys.executable,
    }


def package_version(name: str) -> str | None:
    """Return the version of an installed package, None without it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_cuda() -> str | None:
    """Return the CUDA version that the installed torch was built with, without importing it."""
    found = attempt(lambda: importlib.util.find_spec("torch"))
    if found is None or found.origin is None:
        return None
    for line in _lines(Path(found.origin).with_name("version.py")):
        match = re.match(r"cuda\b.*=\s*['\"]([\d.]+)['\"]", line)
        if match:
            return match[1]
    return None


def processor_facts() -> dict[str, Any]:
    """Return the CPU's name, its cores and sockets, those usable here, and its governor."""
    fields: dict[str, list[str]] = {}
    for line in _lines(Path("/proc/cpuinfo")):
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), []).append(value.strip())
    names, sockets = fields.get("model name"), fields.get("physical id")
    return {
        "name": (names[0] if names else platform.processor()) or None,
        "num_cores": os.cpu_count(),
        "num_physical_cores": psutil.cpu_count(logical=False),
        "num_sockets": len(set(sockets)) if sockets else None,
        "num_usable_cores": attempt(lambda: len(os.sched_getaffinity(0))),
        "governor": _text(SYS / "devices/system/cpu/cpu0/cpufreq/scaling_governor"),
    }


def numa_facts(gpu_node: int | None, root: Path = SYS) -> dict[str, Any]:
    """Return the nodes of the host's memory with their cores and bytes, and the GPU's node."""
    nodes = []
    for folder in sorted((root / "devices/system/node").glob("node[0-9]*")):
        total = next((line for line in _lines(folder / "meminfo") if "MemTotal:" in line), None)
        nodes.append(
            {
                "node": int(folder.name.removeprefix("node")),
                "cpus": _text(folder / "cpulist"),
                "memory_bytes": None if total is None else int(total.split()[-2]) * 1024,
            }
        )
    return {"nodes": nodes or None, "gpu_node": gpu_node}


def huge_page_facts(root: Path = SYS) -> dict[str, str | None]:
    """Return the choices of transparent huge pages, such as always, madvise or never."""
    folder = root / "kernel/mm/transparent_hugepage"
    found = {name: _text(folder / name) for name in ("enabled", "defrag", "shmem_enabled")}
    return {name: text and _chosen(text) for name, text in found.items()}


def _chosen(text: str) -> str:
    """Return the word in brackets, the whole text where there is none."""
    match = re.search(r"\[([\w+]+)\]", text)
    return match[1] if match else text


def _text(path: Path) -> str | None:
    """Return the first line of a file, None without one."""
    return next(iter(_lines(path)), "").strip() or None


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return commit, whether tracked files differ from it, and a hash of what differs.

    None outside a checkout; `changes` is None where nothing differs or git does not tell.
    """
    sha = _git(folder, "rev-parse", "HEAD")
    if sha is None:
        return None
    changes = _git(folder, "diff", "HEAD", "--no-ext-diff", "--no-color", "--binary")
    return {
        "sha": sha,
        "dirty": None if changes is None else bool(changes),
        "changes": hashlib.sha256(changes.encode()).hexdigest() if changes else None,
    }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],  # noqa: S607  the user's git
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _lines(path: Path) -> list[str]:
    return read_text(path).splitlines()
