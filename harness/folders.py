"""Data as strict JSON; JSON and YAML files of a run; the command that installs an extra."""

import math
import shlex
from pathlib import Path
from typing import Any

import yaml

from catalogue.processes import IMPORT_ROOT, ROOT
from reports.record.record import write_text_atomic


def install_extra(extra: str) -> str:
    """Return the command that installs an extra, from any folder, in backquotes."""
    is_checkout = IMPORT_ROOT == ROOT
    project = f"{ROOT}[{extra}]" if is_checkout else f"tightfit[{extra}]"
    return f"`pip install {'-e ' if is_checkout else ''}{shlex.quote(project)}`"


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
