"""`tightfit doctor`: what this machine has for runs, each fact ok, warn or bad with what to do."""

import os
import platform
import shutil
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

from catalogue.listing import size_text
from catalogue.terminal import EXIT_OK, CommandParser, columns, show
from engine.lines import indented
from engine.plan.cards import BFLOAT16_CAPABILITY, TORCH_CAPABILITY
from engine.sealed import GIB
from harness.needs import PYTHONS

EXIT_BAD: Final = 1
"""At least one line is bad."""
LEAST_FREE_RAM_BYTES: Final = 2 * GIB
GOOD_FREE_RAM_BYTES: Final = 8 * GIB
LEAST_DISK_BYTES: Final = GIB
GOOD_DISK_BYTES: Final = 20 * GIB
"""A 7B model in bf16 takes 14 GiB."""
LEAST_FREE_SHARE: Final = 0.9
"""Of the GPU's memory; gpu_memory_utilization has it by default."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was found on a machine; None: not known, or not there."""

    python: tuple[int, int]
    torch: str | None
    torch_cuda: str | None
    """CUDA version that torch was built with; None: a CPU build."""
    cuda_works: bool | None
    """Whether torch can use the GPU; None: it was not asked."""
    cuda_bindings: bool
    gpu: dict[str, Any] | None
    """As engine.device.gpu has it."""
    gpu_free_bytes: int | None
    gpu_holders: tuple[str, ...]
    """Processes that hold memory of the GPU."""
    capability: tuple[int, int] | None
    link: dict[str, float] | None
    """Probed rates by name."""
    link_age: str
    ram_free_bytes: int
    memlock_bytes: int | None
    """Memory that may be locked; None: no limit."""
    huge_pages: str | None
    home: Path
    home_error: str
    """Why it cannot be written; empty where it can."""
    disk_free_bytes: int
    models: tuple[str, ...]
    """Names of the models that are here."""
    models_bytes: int
    has_mlflow: bool
    store: Path
    store_error: str
    """Why MLflow's database cannot be used; empty where it can or is not there yet."""
    store_runs: int | None
    """Runs in it; None: there is no database yet."""


Verdict = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Line:
    """One fact, and what to do about it."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


def main(arguments: Sequence[str]) -> int:
    """Print a line for each fact; return 1 where one is bad."""
    parser = CommandParser(
        prog="tightfit doctor", description="Check what this machine has for runs."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    if options.json:
        from harness.sweep.document import print_document  # noqa: PLC0415  only here

        return print_document(_fill)
    lines = list(judge(collect()))
    show(columns([(line.verdict, line.name, line.found) for line in lines], left={0, 1, 2}))
    remedies = [line for line in lines if line.remedy]
    if remedies:
        show(["", *indented(f"{line.name}: {line.remedy}" for line in remedies)])
    return _code(lines)


def _fill(document: dict[str, Any]) -> int:
    lines = list(judge(collect()))
    document.update({"kind": "doctor", "lines": [asdict(line) for line in lines]})
    return _code(lines)


def _code(lines: Sequence[Line]) -> int:
    return EXIT_BAD if any(line.verdict == "bad" for line in lines) else EXIT_OK


def judge(facts: Facts) -> Iterator[Line]:
    """Yield a line for each fact."""
    yield _python(facts)
    yield _torch(facts)
    yield from _gpu(facts)
    yield from _host(facts)
    yield from _files(facts)


def _python(facts: Facts) -> Line:
    low, high = PYTHONS
    version = ".".join(map(str, facts.python))
    if low <= facts.python < high:
        return Line("Python", "ok", version)
    wanted = f"{low[0]}.{low[1]} or {high[0]}.{high[1] - 1}"
    return Line("Python", "bad", version, f"Use Python {wanted}.")


def _torch(facts: Facts) -> Line:
    if facts.torch is None:
        return Line("torch", "bad", "not installed", "pip install torch")
    build = "CPU build" if facts.torch_cuda is None else f"built with CUDA {facts.torch_cuda}"
    found = f"{facts.torch}, {build}"
    if facts.gpu is None:
        return Line("torch", "ok", found)
    if facts.torch_cuda is None:
        remedy = "There is a GPU, and this build cannot use it: install the CUDA build of torch."
        return Line("torch", "bad", found, remedy)
    if not facts.cuda_works:
        driver = facts.gpu.get("cuda_driver") or "?"
        remedy = (
            f"torch cannot use the GPU (the driver offers CUDA {driver}). Update the driver, or "
            "install a torch that was built with an older CUDA; look at CUDA_VISIBLE_DEVICES too."
        )
        return Line("torch", "bad", found, remedy)
    if not facts.cuda_bindings:
        remedy = (
            "The package cuda-bindings is missing (torch's CUDA builds install it): small matrix "
            "products and weights in codes cannot be compiled. `pip install cuda-bindings "
            "nvidia-cuda-nvrtc`"
        )
        return Line("torch", "bad", f"{found}, no cuda-bindings", remedy)
    return Line("torch", "ok", found)


def _gpu(facts: Facts) -> Iterator[Line]:
    """Yield driver, GPU, its memory, link as it is and as it was probed."""
    gpu = facts.gpu
    if gpu is None:
        remedy = "Runs are emulated on the CPU. If the machine has a GPU, install its driver."
        yield Line("driver", "warn", "none found by NVML", remedy)
        yield Line("GPU", "warn", "none", "`tightfit plan gpu=NAME` plans for a card elsewhere.")
        yield _probed(facts)
        return
    yield Line("driver", "ok", f"{gpu['driver']}, up to CUDA {gpu['cuda_driver']}")
    yield _card(facts, gpu)
    yield _free(facts, gpu)
    yield _pcie(gpu["pcie"])
    yield _probed(facts)


def _card(facts: Facts, gpu: dict[str, Any]) -> Line:
    capability = facts.capability
    if capability is None:
        return Line("GPU", "warn", str(gpu["name"]), "The driver does not say what it can do.")
    found = f"{gpu['name']}, compute capability {capability[0]}.{capability[1]}"
    if capability < TORCH_CAPABILITY:
        least = ".".join(map(str, TORCH_CAPABILITY))
        return Line("GPU", "bad", found, f"{least} is the least that torch has kernels for.")
    if capability < BFLOAT16_CAPABILITY:
        remedy = "It has no bfloat16: such weights become float16, and codes have no use here."
        return Line("GPU", "warn", found, remedy)
    return Line("GPU", "ok", found)


def _free(facts: Facts, gpu: dict[str, Any]) -> Line:
    total, free = gpu["memory_bytes"], facts.gpu_free_bytes
    if total is None or free is None:
        return Line("GPU memory", "warn", "not known", "The driver does not say what is free.")
    found = f"{free / GIB:.2f} of {total / GIB:.2f} GiB free"
    if free >= LEAST_FREE_SHARE * total:
        return Line("GPU memory", "ok", found)
    held = f" ({', '.join(facts.gpu_holders)})" if facts.gpu_holders else ""
    remedy = f"Other processes hold the rest{held}: end them, or set gpu.memory_gib lower."
    return Line("GPU memory", "warn", found, remedy)


def _pcie(link: dict[str, Any]) -> Line:
    gen, width, max_gen, max_width = (
        int(link.get(name) or 0) for name in ("gen", "width", "max_gen", "max_width")
    )
    if 0 in {gen, width, max_gen, max_width}:
        return Line("PCIe", "warn", "not known", "The driver does not say: probe the link.")
    found = f"generation {gen} x{width} now, {max_gen} x{max_width} at most"
    if width < max_width:
        remedy = (
            f"The link has {width} of {max_width} lanes, and offloading is as fast as the link: "
            "put the card into a slot with all lanes."
        )
        return Line("PCIe", "warn", found, remedy)
    return Line("PCIe", "ok", f"{found}{' (an idle card clocks down)' if gen < max_gen else ''}")


_SHOWN_RATES: Final = (("h2d_gb_s", "copies"), ("in_place_gb_s", "reads in place"))


def _probed(facts: Facts) -> Line:
    what = "link" if facts.gpu is not None else "CPU rates"
    if facts.link is None:
        used = "the card's data sheet" if facts.gpu is not None else "assumed rates"
        remedy = (
            f"`tightfit run scenario=probe` measures the rates. Until then, predictions use {used}."
        )
        return Line(what, "warn", "not probed", remedy)
    rates = [
        f"{words} {facts.link[name]:.1f} GB/s" for name, words in _SHOWN_RATES if name in facts.link
    ]
    return Line(what, "ok", ", ".join([*rates, f"probed {facts.link_age}"]))


def _host(facts: Facts) -> Iterator[Line]:
    """Yield memory of the host, what may be locked of it, huge pages."""
    free = facts.ram_free_bytes
    found = f"{free / GIB:.1f} GiB free"
    remedy = "Offloaded weights need host memory: close programs that use it, or offload less."
    if free < LEAST_FREE_RAM_BYTES:
        yield Line("host memory", "bad", found, remedy)
    else:
        enough = free >= GOOD_FREE_RAM_BYTES
        yield Line("host memory", "ok" if enough else "warn", found, "" if enough else remedy)
    limit = facts.memlock_bytes
    if limit is None:
        yield Line("memlock", "ok", "no limit")
    elif limit >= free:
        yield Line("memlock", "ok", f"{limit / GIB:.1f} GiB")
    else:
        remedy = (
            "Less than the free memory may be locked, and some drivers count pinned memory: raise "
            "it (`ulimit -l unlimited`, or memlock in /etc/security/limits.conf; in a container "
            "--ulimit memlock=-1)."
        )
        yield Line("memlock", "warn", f"{limit / GIB:.2f} GiB", remedy)
    if facts.huge_pages in {"always", "madvise"}:
        yield Line("huge pages", "ok", facts.huge_pages)
    else:
        remedy = (
            "Pinning takes longer with small pages: `echo madvise | sudo tee "
            "/sys/kernel/mm/transparent_hugepage/enabled`"
        )
        yield Line("huge pages", "warn", facts.huge_pages or "not known", remedy)


def _files(facts: Facts) -> Iterator[Line]:
    """Yield home, disk, models and MLflow's store."""
    if facts.home_error:
        remedy = "Set TIGHTFIT_HOME to a folder that can be written."
        yield Line("home", "bad", f"{facts.home}: {facts.home_error}", remedy)
    else:
        yield Line("home", "ok", str(facts.home))
    free = facts.disk_free_bytes
    remedy = "Free some room, or set TIGHTFIT_HOME to a folder on a larger disk."
    verdict: Verdict = "ok"
    if free < GOOD_DISK_BYTES:
        verdict = "bad" if free < LEAST_DISK_BYTES else "warn"
    found = f"{free / GIB:.1f} GiB free at home"
    yield Line("disk", verdict, found, "" if verdict == "ok" else remedy)
    if facts.models:
        size = f"{size_text(facts.models_bytes / GIB)} GiB"
        yield Line("models", "ok", f"{', '.join(facts.models)} ({size})")
    else:
        yield Line("models", "warn", "none here", "tightfit models fetch smollm2_135m")
    if not facts.has_mlflow:
        remedy = "Run `make setup`, or set tracking=none; records are complete without it."
        yield Line("MLflow", "warn", "not installed", remedy)
    elif facts.store_error:
        remedy = "Move the file away, or choose tracking=none; records are complete without it."
        yield Line("MLflow", "bad", f"{facts.store}: {facts.store_error}", remedy)
    elif facts.store_runs is None:
        yield Line("MLflow", "ok", "no database yet; the first run makes it")
    else:
        runs = "1 run" if facts.store_runs == 1 else f"{facts.store_runs} runs"
        yield Line("MLflow", "ok", f"{runs} in {facts.store}")


def collect() -> Facts:
    """Return the facts of this machine. Loads torch where there is a GPU to ask it about."""
    from catalogue.files import tightfit_home  # noqa: PLC0415  when it runs
    from engine.device.gpu import open_gpu  # noqa: PLC0415
    from engine.device.machine import available_bytes, memlock_room  # noqa: PLC0415
    from harness.observe.environment import (  # noqa: PLC0415
        huge_page_facts,
        package_version,
        torch_cuda,
    )
    from harness.observe.machine_rates import read_rates  # noqa: PLC0415
    from harness.tracking.mlflow import DATABASE_NAME  # noqa: PLC0415

    home, gpu, built = tightfit_home(), open_gpu(), torch_cuda()
    facts = None if gpu is None else gpu.facts()
    used = None if gpu is None else gpu.sample()["gpu_used_bytes"]
    total = None if facts is None else facts["memory_bytes"]
    probed = read_rates(gpu)
    models, models_bytes = _models()
    error, runs = _store(home / DATABASE_NAME)
    return Facts(
        python=sys.version_info[:2],
        torch=package_version("torch"),
        torch_cuda=built,
        cuda_works=_cuda_works() if gpu is not None and built is not None else None,
        cuda_bindings=find_spec("cuda") is not None and find_spec("cuda.bindings") is not None,
        gpu=facts,
        gpu_free_bytes=None if total is None or used is None else int(total - used),
        gpu_holders=() if gpu is None else gpu.holders(),
        capability=None if gpu is None else gpu.compute_capability(),
        link=None if probed is None else {k: v for k, v in probed.rates.items() if v is not None},
        link_age="" if probed is None else probed.age(),
        ram_free_bytes=available_bytes() if platform.system() == "Linux" else _psutil_available(),
        memlock_bytes=memlock_room(),
        huge_pages=huge_page_facts()["enabled"],
        home=home,
        home_error=_write_error(home),
        disk_free_bytes=shutil.disk_usage(_nearest(home)).free,
        models=models,
        models_bytes=models_bytes,
        has_mlflow=find_spec("mlflow") is not None,
        store=home / DATABASE_NAME,
        store_error=error,
        store_runs=runs,
    )


def _cuda_works() -> bool:
    import torch  # noqa: PLC0415  takes seconds

    return torch.cuda.is_available()


def _psutil_available() -> int:
    import psutil  # noqa: PLC0415  when it runs

    return int(psutil.virtual_memory().available)


def _nearest(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _write_error(folder: Path) -> str:
    there = _nearest(folder)
    if not there.is_dir():
        return f"{there} is no folder"
    return "" if os.access(there, os.W_OK | os.X_OK) else "it cannot be written"


def _models() -> tuple[tuple[str, ...], int]:
    from catalogue.models import entries, state  # noqa: PLC0415  when it runs

    found = {model.name: state(model) for model in entries()}
    here = {name: each.num_bytes for name, each in found.items() if each.kind == "present"}
    return tuple(here), sum(here.values())


def _store(database: Path) -> tuple[str, int | None]:
    """Return why a database cannot be used, or how many runs it has; None where there is none."""
    if not database.exists():
        return "", None
    if not os.access(database, os.W_OK):
        return "it cannot be written", None
    try:
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
            (count,) = connection.execute("SELECT COUNT(*) FROM runs").fetchone()
    except sqlite3.Error as error:
        return str(error), None
    return "", int(count)
