"""Figures as the page says them: what is not known is `unknown`, never a number."""

import time
from collections.abc import Mapping
from typing import Any, Final

from reports.record.text import duration as as_duration
from reports.record.text import gib as as_gib
from reports.record.text import number as as_number

UNKNOWN: Final = "unknown"
KINDS: Final[Mapping[str, str]] = {
    "ready": "good",
    "done": "good",
    "finished": "good",
    "loading": "warn",
    "starting": "warn",
    "stopping": "warn",
    "downloading": "warn",
    "testing": "warn",
    "running": "warn",
    "queued": "warn",
    "partial": "warn",
    "interrupted": "warn",
    "failed": "bad",
    "unresponsive": "bad",
    "no_fit": "bad",
    "crash_loop": "bad",
}
"""State -> how it is marked; others are plain."""


def gib(num_bytes: float | None) -> str:
    """Return bytes as GiB with the unit, small ones as MiB or KiB."""
    return UNKNOWN if num_bytes is None else as_gib(num_bytes)


def number(value: float | None, unit: str = "") -> str:
    """Return a number and its unit, whole numbers in full."""
    if value is None:
        return UNKNOWN
    text = f"{value:,}" if isinstance(value, int) else as_number(value)
    return f"{text} {unit}".rstrip()


def share(value: float | None) -> str:
    """Return a share of 1 in percent."""
    return UNKNOWN if value is None else f"{100 * value:.0f} %"


def duration(seconds: float | None) -> str:
    """Return seconds as people read them."""
    return UNKNOWN if seconds is None else as_duration(seconds)


def moment(time_s: float | None) -> str:
    """Return a time since the epoch in this machine's zone, to the second."""
    if time_s is None:
        return UNKNOWN
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))


def word(value: object) -> str:
    """Return a state, a name or a setting as text."""
    if value is None or value == "":
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value).replace("_", " ") if value in KINDS else str(value)


def settings_line(settings: Mapping[str, Any]) -> str:
    """Return the settings of a profile in one line, as flags without their dashes."""
    parts = [f"{name} {word(value)}" for name, value in settings.items() if value is not None]
    return ", ".join(parts) or "all by the planner"
