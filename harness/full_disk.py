"""A disk that is full, or fills while points run: told in one line; what ended before stays."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from catalogue.files import tightfit_home

__all__ = ["DiskFullError", "full_disk_ends", "is_full", "require_room"]

ROOM_BYTES: Final = 16 << 20
"""What has to be free before a point: its records, its report, its entry in the database."""


class DiskFullError(BaseException):
    """No room for what a point has to write; the message says where, and what is free.

    Not an Exception: it ends a sweep through Hydra and all that keeps one point's errors from the
    others, as Ctrl-C does.
    """


def is_full(error: BaseException) -> bool:
    """Return whether an error is a lack of room on a disk, or of a user's share of it."""
    return isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}


def require_room(folder: Path) -> None:
    """Refuse to begin what would be measured and then lost.

    Args:
        folder: lies on the disk that is meant.

    Raises:
        DiskFullError: less is free than a point needs.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < ROOM_BYTES:
        raise DiskFullError(
            f"{folder}: expected {ROOM_BYTES >> 20} MiB free on its disk for the records of a "
            f"run, got {free_bytes >> 20} MiB. {_ways()}"
        )


@contextmanager
def full_disk_ends() -> Iterator[None]:
    """Turn an OSError for lack of room into a DiskFullError.

    Raises:
        DiskFullError: a disk filled meanwhile.
    """
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        folder = Path(str(error.filename or tightfit_home())).parent
        free_bytes = shutil.disk_usage(folder if folder.is_dir() else tightfit_home()).free
        raise DiskFullError(
            f"{error.filename or tightfit_home()}: {error.strerror}, {free_bytes:,} bytes are "
            f"free on its disk. {_ways()}"
        ) from error


def _ways() -> str:
    return (
        f"Points that ended keep their records. Free some room, or set TIGHTFIT_HOME (now "
        f"{tightfit_home()}) to a folder on another disk; a sweep that is run again takes points "
        "over that ended in the same home."
    )
