"""The folder of the code; data as strict JSON; JSON and YAML files of a run."""

import math
import os
import shlex
import site
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from reports.record.record import write_text_atomic

ROOT: Final = Path(__file__).resolve().parents[1]
"""Holds the project's folders: a checkout, or the package `tightfit` where that is installed."""
IMPORT_ROOT: Final = Path(__file__).resolve().parents[__name__.count(".")]
"""What a process that starts elsewhere needs on its path to find the packages."""


def module_name(name: str) -> str:
    """Return the name under which a module of the project runs here, for `python -m`.

    In a checkout it is `name`, such as harness.worker; in the wheel that lies below `tightfit`.
    """
    return __name__.rpartition("harness")[0] + name


def module_command(name: str) -> tuple[str, ...]:
    """Return the command that runs a module of the project; the working folder is not its path."""
    return (sys.executable, "-P", "-m", module_name(name))


def python_path(before: str, own: Sequence[str] | None = None) -> str:
    """Return PYTHONPATH with which a process that starts elsewhere finds the packages.

    Args:
        before: PYTHONPATH as it is.
        own: folders that Python looks into by itself; None: those of this one. There nothing is
            added, as what PYTHONPATH names comes before the standard library.
    """
    if own is None:
        own = [*site.getsitepackages(), site.getusersitepackages()]
    paths = [path for path in before.split(os.pathsep) if path]
    if str(IMPORT_ROOT) in {*paths, *(str(Path(path).resolve()) for path in own)}:
        return before
    return os.pathsep.join([str(IMPORT_ROOT), *paths])


def install_extra(extra: str) -> str:
    """Return the command that installs an extra, from any folder."""
    is_checkout = IMPORT_ROOT == ROOT
    project = f"{ROOT}[{extra}]" if is_checkout else f"tightfit[{extra}]"
    return f"pip install {'-e ' if is_checkout else ''}{shlex.quote(project)}"


def plain(value: Any) -> Any:
    """Return `value` as strict JSON data: text keys, lists, finite numbers; others become text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(plain(item) for item in value)
    return str(value)


def write_yaml(path: Path, content: Any) -> None:
    """Write `content` as plain data, whole or not at all."""
    text = yaml.safe_dump(plain(content), sort_keys=False, allow_unicode=True)
    write_text_atomic(path, text)
