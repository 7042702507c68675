"""Database: the registry's SQLite file; many processes may read and write it at once."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

from filelock import FileLock
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session

from catalogue.files import tightfit_home
from console.registry.listing import REVISION
from engine.errors import ConfigError, EngineError

MIGRATIONS: Final = Path(__file__).resolve().parent / "migrations"
BUSY_TIMEOUT_S: Final = 60
"""How long a transaction waits for those of other processes."""


class RegistryError(EngineError):
    """The database cannot be read or written."""


class Database:
    """A file of SQLite in WAL mode, where readers and one writer do not wait for each other.

    Objects may be shared by threads. A commit is on the disk when it returns.
    """

    def __init__(self, path: Path, engine: Engine) -> None:
        self.path = path
        self._engine = engine
        self._write = engine.execution_options(begin="BEGIN IMMEDIATE")
        self._watch = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, check_same_thread=False)
        self._watching = threading.Lock()
        self._file = _file_at(path)

    @classmethod
    def open(cls, path: Path | None = None) -> Self:
        """Open the registry; it is made, or brought to the newest form, where it is not.

        Args:
            path: of the file; None: registry.db in TIGHTFIT_HOME.

        Raises:
            ConfigError: it cannot be written, is no database, or is of a newer version.
        """
        path = (path or tightfit_home() / "registry.db").absolute()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_name(f".{path.name}.lock")):
                engine = _engine(path)
                _bring_up(path, engine)
        except (OSError, DBAPIError) as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            raise ConfigError(
                f"{path}: expected the registry's database, or a folder to make it in, got an "
                f"error ({cause}). Free some room if the disk is full, move a file away that is "
                "no database, or set TIGHTFIT_HOME to another folder."
            ) from error
        return cls(path, engine)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Give a session that sees one moment of the database; objects stay usable behind it.

        Raises:
            RegistryError: the disk does not read it.
        """
        with (
            self._telling(),
            Session(self._engine, expire_on_commit=False, autoflush=False) as session,
        ):
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """Give a session whose changes are committed at its end, and undone after an exception.

        No other process writes meanwhile: compute first, and keep it short.

        Raises:
            RegistryError: the disk is full, or does not take it, or the file was deleted or
                replaced since it was opened; nothing is changed then.
        """
        if _file_at(self.path) != self._file:
            raise RegistryError(
                f"{self.path}: expected the file that was opened, got another one or none: what is "
                "written now would be lost. Put it back, or restart this program."
            )
        with (
            self._telling(),
            Session(self._write, expire_on_commit=False) as session,
            session.begin(),
        ):
            session.connection()  # begins now: what is read here stays true until it is written
            yield session

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OperationalError as error:
            raise RegistryError(
                f"{self.path}: expected to read and write the registry, got: {error.orig}. Free "
                "room on its disk, or set TIGHTFIT_HOME to another folder."
            ) from error

    def version(self) -> int:
        """Return a number that is another one after a commit of any process, this one too."""
        with self._watching:
            row = self._watch.execute("PRAGMA data_version").fetchone()
        return int(row[0])

    def close(self) -> None:
        """Close every connection."""
        self._watch.close()
        self._engine.dispose()


def _file_at(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from another one at its place; None: there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _engine(path: Path) -> Engine:
    url = URL.create("sqlite", database=str(path))
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S})

    @event.listens_for(engine, "connect")
    def _(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # `begin` below says how transactions begin
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))

    return engine


def _bring_up(path: Path, engine: Engine) -> None:
    """Migrate the database where it is older; the caller holds the lock."""
    with engine.connect() as connection:
        tables = connection.exec_driver_sql(
            "SELECT count(*) FROM sqlite_master WHERE name = 'alembic_version'"
        )
        found = None
        if tables.scalar():
            found = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    if found == REVISION:
        return
    if found is not None and found > REVISION:
        raise ConfigError(
            f"{path}: expected the form {REVISION} of the registry or an older one, got {found}, "
            "which a newer Tightfit made. Install that one, or set TIGHTFIT_HOME to another folder."
        )
    from alembic import command  # noqa: PLC0415  only when it is needed: it takes long to load
    from alembic.config import Config  # noqa: PLC0415

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    with engine.execution_options(begin="BEGIN IMMEDIATE").connect() as connection:
        # A migration may make a table anew; dropping the old one must not take what points to it.
        # Inside of a transaction SQLite does not heed this.
        plain = connection.connection.dbapi_connection
        assert plain is not None
        plain.execute("PRAGMA foreign_keys=OFF")
        try:
            with connection.begin():
                config.attributes["connection"] = connection
                command.upgrade(config, REVISION)
        finally:
            plain.execute("PRAGMA foreign_keys=ON")
