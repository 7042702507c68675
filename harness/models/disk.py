"""Room on the disk, checked before anything is downloaded."""

import shutil
from pathlib import Path
from typing import Final

from harness.models.errors import unavailable

GIB: Final = 1 << 30
_SPARE_BYTES: Final = 512 << 20  # left over for logs, databases and the user's other programs


def check_disk(name: str, folder: Path, needed_bytes: int) -> None:
    """Refuse when the file system of `folder` has less than `needed_bytes` and some spare left.

    Args:
        name: the model, for the message.
        folder: an existing folder on the file system that will be written.
        needed_bytes: the most that the download and the conversion hold at once.

    Raises:
        ModelUnavailableError: with the needed and the free size.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes >= needed_bytes + _SPARE_BYTES:
        return
    raise unavailable(
        name,
        f"expected {(needed_bytes + _SPARE_BYTES) / GIB:.1f} GiB free at {folder}, "
        f"found {free_bytes / GIB:.1f} GiB",
        "free some room or set TIGHTFIT_HOME to a folder on a larger disk",
    )
