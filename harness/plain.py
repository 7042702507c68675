"""Anything as strict JSON data, and JSON files that may be absent."""

import json
import math
from pathlib import Path
from typing import Any


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


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an absent, unreadable or broken file gives an empty one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
