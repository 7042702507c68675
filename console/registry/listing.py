"""The list of all models, read without SQLAlchemy, which takes longer to load than the rest."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Final

REVISION: Final = "0003"
"""The last migration, which makes the tables that are read here."""
_RATE: Final = "throughput/output_tok_s"
_TEXTS: Final = ("spec", "settings", "metrics")
"""Columns of plain data."""

Plain = dict[str, Any]


def read_models(path: Path) -> list[Plain] | None:
    """Return the models by name: columns, `profiles`, and `output_tok_s`, the last one measured.

    Args:
        path: of the registry's database.

    Returns:
        None where it is not of this form: `Database.open` brings it there, or says what it is.
    """
    try:
        with closing(sqlite3.connect(path)) as connection:
            connection.row_factory = _plain
            connection.execute("BEGIN")  # all of it as of one moment
            found = connection.execute("SELECT version_num FROM alembic_version").fetchone()
            if found is None or found["version_num"] != REVISION:
                return None
            models = connection.execute("SELECT * FROM models ORDER BY name").fetchall()
            profiles = connection.execute("SELECT * FROM profiles ORDER BY id").fetchall()
            # Beside max(id) SQLite returns the columns of that row.
            measured = connection.execute(
                "SELECT model_id, metrics, max(id) FROM performance "
                "WHERE part = 'throughput' GROUP BY model_id"
            ).fetchall()
    except sqlite3.Error:
        return None
    rates = {row["model_id"]: row["metrics"].get(_RATE) for row in measured}
    by_id = {row["id"]: row | {"profiles": []} for row in models}
    for row in profiles:
        row["is_default"] = bool(row["is_default"])
        by_id[row["model_id"]]["profiles"].append(row)
    return [row | {"output_tok_s": rates.get(number)} for number, row in by_id.items()]


def _plain(cursor: sqlite3.Cursor, values: tuple[Any, ...]) -> Plain:
    row = {column[0]: value for column, value in zip(cursor.description, values, strict=True)}
    return row | {name: json.loads(row[name]) for name in _TEXTS if row.get(name) is not None}
