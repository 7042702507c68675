"""The registry's database: made, migrated, written by many processes, killed meanwhile."""

from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from console.registry.database import MIGRATIONS, Database
from console.registry.models import Models
from console.registry.tables import REVISION, Base
from engine.errors import ConfigError


def test_the_migrations_make_the_tables(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "100% [a] b" / "registry.db")
    with database.read() as session:
        context = MigrationContext.configure(session.connection())
        assert context.get_current_revision() == REVISION
        assert compare_metadata(context, Base.metadata) == []
        assert session.connection().exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    database.close()


def test_the_last_migration_is_the_one_of_the_tables() -> None:
    from alembic.script import ScriptDirectory

    assert ScriptDirectory(str(MIGRATIONS)).get_heads() == [REVISION]


def test_a_newer_database_is_refused(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "registry.db")
    with database.write() as session:
        session.connection().exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    database.close()
    with pytest.raises(ConfigError, match="got 9999, which a newer Tightfit made"):
        Database.open(tmp_path / "registry.db")


def test_the_version_is_another_one_after_a_commit(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "registry.db")
    before = database.version()
    assert database.version() == before
    Models(database).add("glass")
    assert database.version() != before
    database.close()
