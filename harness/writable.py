"""Refuse places that cannot be written before anything runs, not when the first record is due."""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from harness.errors import ConfigError
from harness.schema import TrackingConfig
from harness.tracking.mlflow import DATABASE_NAME, sqlite_path

__all__ = ["require_writable", "require_writable_stores"]


def require_writable(name: str, folder: Path) -> None:
    """Check that files can be made in a folder, or in the nearest one above that is there.

    Args:
        name: the setting that chooses it.
        folder: it may be absent yet.

    Raises:
        ConfigError: they cannot.
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
    """Check that MLflow's SQLite files can be made or written; MLflow itself tries for minutes.

    Args:
        nodes: of the points.
        home: TIGHTFIT_HOME, where the file is that no address names.

    Raises:
        ConfigError: one cannot.
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
