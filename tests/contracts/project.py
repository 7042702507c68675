"""The project's own files, for tests that read them."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("catalogue", "console", "engine", "harness", "kernels", "reports", "server", "tightfit")


def python_files(*folders: str) -> list[Path]:
    """Every Python file below the given folders of the project."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def project_files() -> list[Path]:
    """Every file that belongs to the project: what git tracks, or would if it were added."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        names = [name for name in done.stdout.split("\0") if name]
        return [ROOT / name for name in names if (ROOT / name).is_file()]
    return list(_walk())


def _walk() -> Iterator[Path]:
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith(".") or name == ".ci"]
        yield from (Path(folder, name) for name in names)


def relative(path: Path) -> str:
    """Path below the project, for messages."""
    return str(path.relative_to(ROOT))
