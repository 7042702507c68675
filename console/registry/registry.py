"""Registry: one database with what is kept in it, under one name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from console.registry.database import Database
from console.registry.holdings import Holdings
from console.registry.models import Models
from console.registry.results import Results


@dataclass(frozen=True, kw_only=True)
class Registry:
    """The doors to the database."""

    database: Database
    models: Models
    holdings: Holdings
    results: Results

    @classmethod
    def open(cls, path: Path | None = None) -> Self:
        """Open the database, which is made where it is not (see Database.open)."""
        database = Database.open(path)
        return cls(
            database=database,
            models=Models(database),
            holdings=Holdings(database),
            results=Results(database),
        )
