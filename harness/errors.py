"""Exit codes of `python -m harness`, and the one error that ends it before anything loads."""

from typing import Final

EXIT_OK: Final = 0
"""Every point has status ok."""
EXIT_BAD_CONFIG: Final = 2
"""The command line or a configuration file is wrong; nothing was loaded."""
EXIT_NOT_ALL_OK: Final = 3
"""At least one point has another status than ok."""
EXIT_INTERRUPTED: Final = 130
"""Ctrl-C."""
