"""The registry's database: made, migrated, written by many processes, killed meanwhile."""

import contextlib
import multiprocessing
from multiprocessing.connection import Connection as Pipe
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event, func, select
from sqlalchemy.engine import URL

from console.registry.database import MIGRATIONS, Database, RegistryError
from console.registry.listing import REVISION, read_models
from console.registry.models import Models
from console.registry.results import Results
from console.registry.tables import Base, Service
from engine.errors import ConfigError
from tests.slow import slow


def test_the_migrations_make_the_tables(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "100% [a] b" / "registry.db")
    with database.read() as session:
        context = MigrationContext.configure(session.connection())
        assert context.get_current_revision() == REVISION
        assert compare_metadata(context, Base.metadata) == []
        assert session.connection().exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    assert read_models(database.path) == []
    database.close()


def test_the_last_migration_is_the_one_of_the_tables() -> None:
    assert ScriptDirectory(str(MIGRATIONS)).get_heads() == [REVISION]


def test_rows_of_every_older_form_outlive_the_migrations(tmp_path: Path) -> None:
    """Also those that point to a table which a migration makes anew."""
    from alembic import command
    from alembic.config import Config

    revisions = [each.revision for each in ScriptDirectory(str(MIGRATIONS)).walk_revisions()]
    for revision in revisions:
        path = tmp_path / f"{revision}.db"
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        engine = create_engine(URL.create("sqlite", database=str(path)))
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, revision)
            for statement in (
                "INSERT INTO models (name, source, kind, state, created_s, changed_s) "
                "VALUES ('m', 's', 'hub', 'ready', 1, 1)",
                "INSERT INTO profiles (model_id, name, is_default, settings, created_s, changed_s) "
                "VALUES (1, 'default', 1, '{}', 1, 1)",
                "INSERT INTO test_runs (model_id, profile_id, kind, settings, status, created_s) "
                "VALUES (1, 1, 'test', '{}', 'finished', 1)",
            ):
                connection.exec_driver_sql(statement)
        engine.dispose()
        database = Database.open(path)
        assert [profile.name for profile in Models(database).get("m").profiles] == ["default"]
        assert [run.profile_id for run in Results(database).runs(1)] == [1]
        with database.read() as session:
            connection = session.connection()
            assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
            assert connection.exec_driver_sql("PRAGMA foreign_key_check").all() == []
        database.close()


def test_a_disk_that_takes_nothing_is_told(database: Database, models: Models) -> None:
    with database.read() as session:
        size = session.connection().exec_driver_sql("PRAGMA page_count").scalar()

    def limit(connection: Connection) -> None:
        connection.exec_driver_sql(f"PRAGMA max_page_count={size}")

    event.listen(Engine, "begin", limit)
    try:
        with pytest.raises(RegistryError, match=r"registry\.db: .*disk is full\. Free room on its"):
            models.store(models.describe("glass"), {"gpu_name": "x" * 100_000})
    finally:
        event.remove(Engine, "begin", limit)
    assert models.list() == []


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
    models = Models(database)
    models.store(models.describe("glass"), {})
    assert database.version() != before
    database.close()


def write(count: int, pipe: Pipe, may_begin: Event) -> None:
    """Open the registry, store tests, and tell their ids once they are stored."""
    database = Database.open()
    results = Results(database)
    pipe.send("ready")
    may_begin.wait()
    for index in range(count):
        run = results.create(1, "test", num_requests=index)
        assert results.change(run.id, status="running", progress={"done": index})
        pipe.send(run.id)
    database.close()


class Writers:
    """Processes that write at once."""

    def __init__(self, number: int, count: int) -> None:
        context = multiprocessing.get_context("fork")
        may_begin = context.Event()
        self._pipes = []
        self.processes = []
        for _ in range(number):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=write, args=(count, there, may_begin))
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)
        assert [pipe.recv() for pipe in self._pipes] == ["ready"] * number
        may_begin.set()

    def told(self, pipe: int = 0) -> int:
        """Return an id as it comes."""
        return self._pipes[pipe].recv()

    def join(self) -> list[int]:
        """Return all ids that were told, when the processes have ended."""
        found = []
        for pipe in self._pipes:
            with contextlib.suppress(EOFError):
                while True:
                    found.append(pipe.recv())
            pipe.close()
        for process in self.processes:
            process.join()
        return found


@pytest.mark.thorough
@pytest.mark.parametrize("number", [5, slow(20)])
def test_many_writers_and_a_reader_are_never_locked_out(
    database: Database, models: Models, number: int
) -> None:
    models.store(models.describe("glass"), {})
    results, writers = Results(database), Writers(number, 3)
    seen, versions = 0, set()
    while any(process.is_alive() for process in writers.processes):
        versions.add(database.version())
        found = len(results.runs(limit=1000))
        assert found >= seen
        seen = found
    told = writers.join()
    assert [process.exitcode for process in writers.processes] == [0] * number
    assert sorted(told) == sorted(run.id for run in results.runs(limit=1000))
    assert len(told) == 3 * number
    assert len(versions) > 1


def test_what_was_told_as_stored_outlives_kill_9(database: Database, models: Models) -> None:
    models.store(models.describe("glass"), {})
    writers = Writers(1, 100_000)
    told = [writers.told() for _ in range(20)]
    writers.processes[0].kill()
    told += writers.join()
    found = {run.id: run.progress for run in Results(database).runs(limit=100_000)}
    assert [found[run_id] for run_id in told] == [{"done": index} for index in range(len(told))]
    with database.read() as session:
        assert session.connection().exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"


@pytest.mark.thorough
def test_many_processes_may_make_it_at_once(home: Path) -> None:
    writers = Writers(4, 0)
    assert writers.join() == []
    assert [process.exitcode for process in writers.processes] == [0] * 4


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "registry.db").write_text("nothing of the kind" * 100)
    expected = r"registry\.db: expected the registry's database.*move a file away"
    with pytest.raises(ConfigError, match=expected):
        Database.open(tmp_path / "registry.db")


def test_changes_of_a_transaction_that_failed_are_undone(
    database: Database, models: Models
) -> None:
    def fail() -> None:
        with database.write() as session:
            session.add(Service(name="s", kind="own"))
            session.flush()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    with database.read() as session:
        assert session.scalar(select(func.count(Service.id))) == 0


def test_nothing_is_written_to_a_file_that_was_deleted(database: Database) -> None:
    kept = database.path.rename(database.path.with_name("kept.db"))
    with (
        pytest.raises(RegistryError, match=r"registry\.db: expected the file that was opened"),
        database.write(),
    ):
        pass
    kept.rename(database.path)
    with database.write() as session:
        session.add(Service(name="s", kind="own"))
