"""Exit codes of `python -m harness`, and the one error that ends it before anything loads."""

import difflib
from collections.abc import Iterable
from typing import Final

from engine.errors import ConfigError

__all__ = [
    "EXIT_BAD_CONFIG",
    "EXIT_INTERRUPTED",
    "EXIT_NOT_ALL_OK",
    "EXIT_OK",
    "ConfigError",
    "closest",
    "did_you_mean",
]

EXIT_OK: Final = 0
"""Every point has status ok."""
EXIT_BAD_CONFIG: Final = 2
"""The command line or a configuration file is wrong; nothing was loaded."""
EXIT_NOT_ALL_OK: Final = 3
"""At least one point has another status than ok."""
EXIT_INTERRUPTED: Final = 130
"""Ctrl-C."""


def closest(word: str, choices: Iterable[str]) -> list[str]:
    """Return the choice that resembles a word most, in a list that is empty if none does."""
    lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=0.5)
    return [lower[name] for name in found]


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return " Did you mean X?" for the closest choice, or an empty string."""
    found = closest(word, choices)
    return f" Did you mean {found[0]}?" if found else ""
