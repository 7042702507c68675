"""Anything as strict JSON data."""

import math
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
