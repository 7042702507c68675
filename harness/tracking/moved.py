"""An SQLite store that is elsewhere than it was made: its files are found beside it again."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

__all__ = ["follow_store"]

_COLUMNS: Final = (("experiments", "artifact_location"), ("runs", "artifact_uri"))
"""Where MLflow keeps absolute addresses of files."""


def follow_store(database: Path, artifacts: str, experiment: str) -> None:
    """Make a moved or copied store keep files beside itself, not where it was made.

    Nothing changes unless the folder of the experiment's files has the name of `artifacts`, is
    another one, and `artifacts` came along with the store.

    Args:
        database: the SQLite file; it exists.
        artifacts: address of the folder beside it, file://...
        experiment: whose files tell where the store was made.

    Raises:
        sqlite3.Error: the file cannot be read or written.
    """
    now = _path(artifacts)
    with closing(sqlite3.connect(database, timeout=60.0)) as store, store:
        has_tables = store.execute(
            "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name IN (?, ?)",
            [table for table, _ in _COLUMNS],
        ).fetchone()[0] == len(_COLUMNS)
        if now is None or not now.is_dir() or not has_tables:
            return
        row = store.execute(
            "SELECT artifact_location FROM experiments WHERE name = ?", [experiment]
        ).fetchone()
        before = None if row is None else _path(str(row[0]))
        if before is None or before.name != now.name or before.resolve() == now.resolve():
            return
        old = str(row[0])
        for table, column in _COLUMNS:
            store.execute(
                f"UPDATE {table} SET {column} = ? || substr({column}, ?) "  # noqa: S608  constants
                f"WHERE {column} = ? OR substr({column}, 1, ?) = ?",
                [artifacts, len(old) + 1, old, len(old) + 1, f"{old}/"],
            )


def _path(address: str) -> Path | None:
    """Return the folder of a file:// address, None of another kind."""
    parts = urlsplit(address)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None
