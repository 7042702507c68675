"""Holdings: what this machine has of the models; downloads, scans and removes them.

The catalogue finds, fetches and removes files; here rows follow what it found.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from catalogue.checkpoint import ModelUnavailableError, freed_bytes
from catalogue.entry import Model as Entry
from catalogue.entry import ModelSource, is_hub_id
from catalogue.files import models_folder
from catalogue.hub import cached, downloaded_bytes, wanted_bytes
from catalogue.models import fetch, find, kept_copy, named, names, own_folder, remove, state
from console.registry.checks import BusyError, FieldError
from console.registry.database import Database
from console.registry.models import (
    Models,
    entry_of,
    from_files,
    identity_of,
    name_of,
    read_row,
    short_name,
    standing,
)
from console.registry.stale import is_alive, own_process, tested_state
from console.registry.tables import OPEN, Model, Performance, Service, TestRun
from engine.errors import CheckpointError, ConfigError
from engine.model.gguf import files_of, is_gguf
from engine.sealed import GIB

PROGRESS_S: Final = 1.0
"""Seconds between two looks at how much of a model has come."""
IN_WORK: Final = ("downloading", "testing")
"""States in which a scan leaves a model alone."""


@dataclass(frozen=True, kw_only=True)
class Removal:
    """What goes with a model."""

    name: str
    folder: Path | None
    """Folder of its files; None: the files stay."""
    copy: Path | None
    """Its copy in lossless codes, which is removed with it; None: there is none."""
    num_bytes: int
    """Bytes that become free, of folder and copy."""
    copy_bytes: int
    profiles: tuple[str, ...]
    num_tests: int
    num_measurements: int


@dataclass(kw_only=True)
class Scan:
    """What a scan found, by names of models."""

    vanished: list[str] = field(default_factory=list)
    returned: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    """Their files are others than before."""
    failed: list[str] = field(default_factory=list)
    """Their files are damaged."""
    added: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Folders and repositories that were not added, and why."""


class Holdings:
    """What this machine has of the models of a registry."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._models = Models(database)

    def fetch(self, model: str | int, *, report: Callable[[str], None]) -> Model:
        """Download a model where it is absent, its row following; return the row.

        Args:
            model: its name or id.
            report: gets one line before each long step.

        Raises:
            BusyError: another process downloads it.
            ModelUnavailableError: it is not to be had; the row says why.
            FieldError: there is no such model, or what came is damaged.
        """
        row = self._models.get(model)
        entry = entry_of(row)
        self._begin(row)
        try:
            if entry.path is None and entry.source.kind == "hub" and state(entry).kind != "present":
                self._set(row.id, total_bytes=wanted_bytes(row.name, entry.source))
            with self._progress(row):
                fetch(entry, report=report)
            columns = _columns(row)
        except (ModelUnavailableError, CheckpointError, ConfigError) as error:
            self._end(row.id, state="failed", reason=str(error))
            if isinstance(error, ModelUnavailableError):
                raise
            raise FieldError("source", f"source: {error}") from error
        except BaseException:
            self._end(row.id, **standing(state(entry)))
            raise
        self._end(row.id, **columns)
        return self._models.get(row.id)

    def _begin(self, row: Model) -> None:
        with self._database.write() as session:
            now = session.get_one(Model, row.id)
            if now.state == "downloading" and is_alive(now.pid, now.pid_started_s):
                raise BusyError("model", f"model {row.name}: process {now.pid} downloads it.")
            if now.state == "testing":
                raise BusyError("model", f"model {row.name}: it is being tested. Wait for that.")
            now.state, now.reason = "downloading", None
            now.done_bytes, now.total_bytes = 0, None
            own = own_process()
            now.pid, now.pid_started_s = own.pid, own.started_s

    def _end(self, model_id: int, **columns: Any) -> None:
        self._set(model_id, pid=None, pid_started_s=None, **columns)

    def _set(self, model_id: int, **columns: Any) -> None:
        with self._database.write() as session:
            session.execute(update(Model).where(Model.id == model_id).values(**columns))

    @contextmanager
    def _progress(self, row: Model) -> Iterator[None]:
        """Write the bytes that have come, now and then, while something goes on."""
        source, over = entry_of(row).source, threading.Event()

        def follow() -> None:
            while not over.wait(PROGRESS_S):
                self._set(row.id, done_bytes=downloaded_bytes(source))

        thread = threading.Thread(target=follow, daemon=True)
        if row.kind == "hub":
            thread.start()
        try:
            yield
        finally:
            over.set()
            if thread.is_alive():
                thread.join()

    def scan(self) -> Scan:
        """Compare the registry with the disk: what vanished, changed, came back, and is new.

        New are whole models in TIGHTFIT_HOME/models, and in our and the user's cache of the hub.
        They are added with a profile that leaves every setting open.
        """
        found, rows = Scan(), self._models.list()
        for row in rows:
            if row.state not in IN_WORK:
                self._look(row, found)
        known = {row.identity for row in rows}
        for entry in _candidates():
            if identity_of(entry) not in known:
                self._add(entry, found)
        return found

    def _look(self, row: Model, found: Scan) -> None:
        """Have a row say what is on the disk."""
        try:
            now = _columns(row)
        except (CheckpointError, ConfigError) as error:
            now = {"state": "failed", "reason": str(error)}
        is_same = all(now.get(name) in {None, getattr(row, name)} for name in ("weights_bytes",))
        is_same = is_same and now.get("spec") in (None, row.spec)
        match row.state, now["state"]:
            case ("missing", "missing") | ("failed", "failed"):
                pass
            case _, "missing":
                found.vanished.append(row.name)
            case _, "failed":
                found.failed.append(row.name)
            case (("missing" | "failed"), _):
                found.returned.append(row.name)
            case _ if is_same:
                now = {"path": now["path"]}
            case _:
                found.changed.append(row.name)
                now["reason"] = (
                    f"its files changed: {(row.weights_bytes or 0) / GIB:.2f} GiB before, "
                    f"{now['weights_bytes'] / GIB:.2f} GiB now"
                )
        if all(getattr(row, name) == value for name, value in now.items()):
            return
        with self._database.write() as session:
            if now.get("state") == "untested" and is_same:
                now["state"] = tested_state(session, row.id)
            where = (Model.id == row.id, Model.state.not_in(IN_WORK))
            session.execute(update(Model).where(*where).values(**now))

    def _add(self, entry: Entry, found: Scan) -> None:
        source = entry.path or str(entry.source.repo or entry.name)
        own = name_of(entry)
        with_owner = [] if entry.path else [short_name(source)]
        numbered = (f"{own}-{count}" for count in range(2, 100))
        for name in (own, *with_owner, *numbered):
            try:
                row = self._models.store(self._models.describe_entry(entry, name), {})
            except (ConfigError, ModelUnavailableError) as error:
                if isinstance(error, FieldError) and error.field == "name":
                    continue  # another model has it
                found.refused[source] = str(error)
                return
            found.added.append(row.name)
            return

    def removal(self, model: str | int, *, keep_files: bool = False) -> Removal:
        """Return what `remove` would remove.

        Raises:
            BusyError: the model is served, tested or downloaded.
            FieldError: there is no such model, or its files are the user's.
        """
        with self._database.read() as session:
            row = read_row(session, model)
            _check_idle(session, row)
            tests, measurements = (
                session.scalar(select(func.count()).where(table.model_id == row.id)) or 0
                for table in (TestRun, Performance)
            )
            folder = None if keep_files else _own_folder(session, row)
        copy = _copy_of(row)
        copy_bytes = 0 if copy is None else freed_bytes(copy)
        return Removal(
            name=row.name,
            folder=folder,
            copy=copy,
            num_bytes=copy_bytes + (0 if folder is None else freed_bytes(folder)),
            copy_bytes=copy_bytes,
            profiles=tuple(profile.name for profile in row.profiles),
            num_tests=tests,
            num_measurements=measurements,
        )

    def remove(self, model: str | int, *, keep_files: bool = False) -> Removal:
        """Remove a model from the registry with its profiles and tests, and its files.

        Folders of test runs stay. Files are removed where they were fetched into TIGHTFIT_HOME,
        or lie in its folder models; others are the user's. A copy in lossless codes goes in any
        case: it is made anew when it is asked for.

        Args:
            model: its name or id.
            keep_files: leave its files; those of the user's must be left.

        Raises:
            BusyError: the model is served, tested or downloaded.
            FieldError: there is no such model, or its files are the user's.
        """
        found = self.removal(model, keep_files=keep_files)
        with self._database.write() as session:
            row = read_row(session, model)
            _check_idle(session, row)
            if found.folder is not None:
                # Nobody starts it from here on; were this process killed, the row would still say.
                row.state, row.reason = "missing", "its files are being removed"
        if found.folder is not None or found.copy is not None:
            remove(entry_of(row), keep_files=found.folder is None)
        with self._database.write() as session:
            session.delete(session.get_one(Model, row.id))
        return found


def _columns(row: Model) -> dict[str, Any]:
    """Return the columns of a row that say what is on the disk now.

    Raises:
        CheckpointError: its files are damaged.
        ConfigError: they are of no supported model, or the catalogue has it no more.
    """
    entry = entry_of(row)
    found = state(entry)
    if found.kind != "present":
        return standing(found) | ({} if entry.path is not None else {"path": _text(found.path)})
    return from_files(entry, found)


def _candidates() -> Iterator[Entry]:
    """Yield the whole models in the folder of models, and in both caches of the hub."""
    root, catalogue = models_folder(), set(names())
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if path.name.startswith(".") or path.is_symlink():
            continue
        entry = named(path.name) if path.name in catalogue else None
        if entry is None or entry.source.kind != "package" or entry.path is not None:
            entry = find(str(path))
        is_model = path.is_dir() or (is_gguf(path) and files_of(path)[0] == path)
        if is_model and state(entry).kind == "present":
            yield entry
    for repository, revision in cached():
        if not is_hub_id(repository):
            continue
        entry = named(repository)
        if entry.source.revision != revision:
            source = ModelSource(kind="hub", repo=repository, revision=revision)
            entry = Entry(name=entry.name, source=source)
        if state(entry).kind == "present":
            yield entry


def _check_idle(session: Session, row: Model) -> None:
    """Raise BusyError where something uses a model."""
    if row.state == "downloading" and is_alive(row.pid, row.pid_started_s):
        raise BusyError(
            "model", f"model {row.name}: process {row.pid} downloads it. End that first."
        )
    for service in session.scalars(select(Service).where(Service.model_id == row.id)):
        if service.wanted == "running" or is_alive(service.pid, service.pid_started_s):
            raise BusyError(
                "model", f"model {row.name}: service {service.name} serves it. Stop that first."
            )
    tests = select(TestRun.id).where(TestRun.model_id == row.id, TestRun.status.in_(OPEN))
    if (number := session.scalar(tests)) is not None:
        raise BusyError(
            "model", f"model {row.name}: its test {number} has not ended. Cancel that first."
        )


def _copy_of(row: Model) -> Path | None:
    """Return the folder of a model's copy in lossless codes; None: there is none."""
    try:
        return kept_copy(entry_of(row))
    except ConfigError:
        return None  # the catalogue has the model no more


def _own_folder(session: Session, row: Model) -> Path | None:
    """Return the folder of a model's files where they may be removed; None: there are none.

    Raises:
        FieldError: they are the user's, or another model's too.
    """
    keep = "With --keep-files they stay, and it leaves the registry."
    try:
        entry = entry_of(row)
        if state(entry).kind == "absent":
            return None
        folder = own_folder(entry)
    except ConfigError as error:
        raise FieldError("model", f"{error} {keep}") from error
    if row.kind == "hub":
        repository = f"{str(row.identity).rpartition('@')[0]}@"
        shares = (Model.identity.startswith(repository, autoescape=True), Model.id != row.id)
        if (other := session.scalar(select(Model.name).where(*shares))) is not None:
            raise FieldError(
                "model", f"model {row.name}: {other} is in the same repository, {folder}. {keep}"
            )
    return folder


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path.resolve())
