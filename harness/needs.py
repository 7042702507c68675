"""What every command needs before it starts. Any Python 3.6 reads this, without a package."""

import shutil
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Tuple  # noqa: UP035  Python 3.6 has no others

PYTHONS = ((3, 11), (3, 13))
"""Versions of Python that serve: from the first, below the second."""
PACKAGES = ("torch", "transformers", "hydra", "omegaconf", "yaml", "psutil", "filelock")
"""Modules that commands import; where one is absent, the environment is another one.

MLflow is not among them: with tracking=none nothing imports it.
"""
SERVER_PACKAGES = ("httptools", "httpx", "starlette", "uvicorn", "uvloop")
"""Modules that the server and the console import, and no measurement of the engine."""

FOLDERS = ("catalogue", "console", "engine", "harness", "kernels", "reports", "server")
"""The project's folders, which a checkout imports by these names."""


def shadowed() -> str:
    """Return a text that names another module which is imported in place of a folder, or ""."""
    root = Path(__file__).resolve().parents[1]
    if __name__.count(".") > 1:  # installed, where all folders lie inside one package
        return ""
    for name in FOLDERS:
        spec = find_spec(name)
        found = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if found is not None and root not in found.parents:
            return (
                f"tightfit: expected {name} to be {root / name}, got {found}, which Python finds "
                f"first. Rename that file, or install the project:\n  pip install '{root}'"
            )
    return ""


def lacking(
    version: Tuple[int, int] = sys.version_info[:2],  # noqa: UP006  Python 3.6
    find: Callable[[str], Any] = find_spec,
    packages: Tuple[str, ...] = PACKAGES,  # noqa: UP006  Python 3.6
) -> str:
    """Return what is lacking here and what to do, commands on lines of their own; "" if nothing."""
    low, high = PYTHONS
    wanted = f"Python {low[0]}.{low[1]} or {high[0]}.{high[1] - 1}"
    here = f"Python {version[0]}.{version[1]} ({sys.executable})"
    remedy = "In the checkout run\n  make setup PYTHON=python3.12\n  . .venv/bin/activate"
    if not low <= version < high:
        return f"tightfit: expected {wanted}, got {here}. {remedy}"
    absent = [name for name in packages if find(name) is None]
    if absent:
        names = ", ".join(absent)
        return f"tightfit: expected its packages in {here}, found no {names}. {remedy}"
    return shadowed()


def require_environment(packages: Tuple[str, ...] = PACKAGES) -> None:  # noqa: UP006  Python 3.6
    """End the process with a few lines and exit code 2 where something is lacking."""
    text = lacking(packages=packages)
    if text:
        sentence, *commands = text.split("\n")
        width = shutil.get_terminal_size().columns
        said = textwrap.wrap(sentence, width, break_long_words=False, break_on_hyphens=False)
        sys.stderr.write("\n".join(said + commands) + "\n")
        sys.exit(2)
