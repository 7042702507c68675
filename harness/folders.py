"""Folders of the checkout."""

from pathlib import Path
from typing import Final

__all__ = ["CONF"]

CONF: Final = Path(__file__).resolve().parents[1] / "conf"
"""The configuration files, found from any working folder."""
