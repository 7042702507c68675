"""A disk that is full, or fills while points run: told in one line; what ended before stays."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from catalogue.files import tightfit_home
from catalogue.terminal import (
    EXIT_BAD_CONFIG,
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_NOT_ALL_OK,
    say_error,
)
from engine.errors import ConfigError
from harness.config.schema import TrackingConfig
from harness.tracking.mlflow import DATABASE_NAME, sqlite_path

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
    """Raise DiskFullError, before anything runs, where less is free than a point needs."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < ROOM_BYTES:
        raise DiskFullError(
            f"{folder}: expected {ROOM_BYTES >> 20} MiB free on its disk for the records of a "
            f"run, got {free_bytes >> 20} MiB. {_ways()}"
        )


@contextmanager
def full_disk_ends() -> Iterator[None]:
    """Turn an OSError for lack of room into a DiskFullError."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        found = Path(str(error.filename or tightfit_home()))
        folder = next((path for path in (found, found.parent) if path.is_dir()), tightfit_home())
        free_bytes = shutil.disk_usage(folder).free
        raise DiskFullError(
            f"{found}: {error.strerror}, {free_bytes:,} bytes are free on its disk. {_ways()}"
        ) from error


def _ways() -> str:
    return (
        f"Points that ended keep their records. Free some room, or set TIGHTFIT_HOME (now "
        f"{tightfit_home()}) to a folder on another disk; a sweep that is run again takes points "
        "over that ended in the same home."
    )


def exit_code(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Return the exit code of a command; its refusal is written, with --json as a document too."""
    try:
        with full_disk_ends():
            return command(arguments)
    except (ConfigError, DiskFullError) as error:
        return say_error(error, arguments, code_of(error))
    except KeyboardInterrupt as error:
        return code_of(error)


def code_of(error: BaseException) -> int:
    """Return the exit code of a command that an error ended."""
    match error:
        case ConfigError():
            return EXIT_BAD_CONFIG
        case DiskFullError():
            return EXIT_NOT_ALL_OK
        case KeyboardInterrupt():
            return EXIT_INTERRUPTED
        case _:
            return EXIT_BUG


def require_writable(name: str, folder: Path) -> None:
    """Raise ConfigError unless files can be made in a folder, or in the nearest one above it.

    The setting `name` chooses the folder.
    """
    whole = folder.absolute()
    there = next(path for path in (whole, *whole.parents) if os.access(path, os.F_OK))
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ConfigError(
            f"{name}: expected a folder that can be written, got {folder} ({error.strerror}). "
            f"Set {name} to another one."
        ) from error


def require_writable_stores(nodes: Iterable[TrackingConfig], home: Path) -> None:
    """Raise ConfigError unless MLflow can write its SQLite files: itself it tries for minutes.

    A file that no address names lies in `home`.
    """
    for uri in {node.uri for node in nodes if node.backend == "mlflow"}:
        name = "TIGHTFIT_HOME" if uri is None else "tracking.uri"
        file = home / DATABASE_NAME if uri is None else sqlite_path(uri)
        if file is None:
            continue
        if file.exists() and not os.access(file, os.W_OK):
            raise ConfigError(
                f"{name}: expected a database that can be written, got {file}. Set {name} to "
                "another one, or choose tracking=none."
            )
        require_writable(name, file.parent)
