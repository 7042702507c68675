"""Supervisors of a registry in a folder of its own, with a scripted server."""

import asyncio
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from console.registry.database import Database
from console.registry.tables import Model, Profile, Service
from console.supervise.services import Limits
from console.supervise.supervisor import Supervisor

SCRIPT = Path(__file__).with_name("scripted.py")
COMMAND = (sys.executable, str(SCRIPT))
QUICK = Limits(look_s=0.05, patience_s=30.0, silent_s=30.0, stop_s=5.0, restart_s=0.05)
SPEC = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


class NoMachine:
    """A machine of which nothing is known, and what it was told."""

    def __init__(self) -> None:
        self.served: list[Sequence[Mapping[str, Any]]] = []
        self.loads: list[Mapping[str, Any]] = []

    def snapshot(self) -> dict[str, Any]:
        return {"time_s": None, "gpus": []}

    def tell(self, served: Sequence[Mapping[str, Any]]) -> None:
        self.served.append(served)

    def tell_load(self, load: Mapping[str, Any]) -> None:
        self.loads.append(load)


@pytest.fixture(scope="session")
def empty_registry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database without rows: migrations run once."""
    path = tmp_path_factory.mktemp("registry") / "registry.db"
    Database.open(path).close()
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home [1]"


@pytest.fixture
def database(home: Path, empty_registry: Path) -> Iterator[Database]:
    home.mkdir()
    shutil.copy(empty_registry, home)
    found = Database.open(home / "registry.db")
    yield found
    found.close()


def add_model(
    database: Database,
    words: str,
    *,
    name: str | None = None,
    path: Path | None = None,
    **settings: Any,
) -> int:
    """Add a model of which the scripted server does what its words say; return its profile."""
    row = Model(
        name=name or words.replace("+", "-"),
        source=f"/models/{words}",
        kind="folder",
        path=str(path or f"/models/{words}"),
        identity=f"folder:{name or words}",
        state="untested",
        spec=dict(SPEC),
    )
    row.profiles = [Profile(name="default", is_default=True, settings=settings)]
    with database.write() as session:
        session.add(row)
    return row.profiles[0].id


def service_row(database: Database) -> Service:
    with database.read() as session:
        return session.scalars(select(Service).where(Service.name == "main")).one()


def set_row(database: Database, **columns: Any) -> None:
    """Change the row of the service, which is made where it is absent."""
    with database.write() as session:
        row = session.scalar(select(Service).where(Service.name == "main"))
        if row is None:
            row = Service(name="main", kind="own", port=0, failures=[])
            session.add(row)
        for name, value in columns.items():
            setattr(row, name, value)


@asynccontextmanager
async def supervising(
    database: Database,
    home: Path,
    *,
    machine: NoMachine | None = None,
    command: Sequence[str] = COMMAND,
    clock: Callable[[], float] = time.monotonic,
    more: Mapping[str, Any] | None = None,
    **limits: Any,
) -> AsyncIterator[Supervisor]:
    """A supervisor whose service takes a free port."""
    if not has_row(database):
        set_row(database, port=0)
    supervisor = Supervisor(
        database,
        machine or NoMachine(),
        home=home,
        command=command,
        limits=replace(QUICK, **limits),
        clock=clock,
        **{"list_listeners": list, "list_units": list, **(more or {})},
    )
    await supervisor.start()
    try:
        yield supervisor
    finally:
        await supervisor.close()


def has_row(database: Database) -> bool:
    with database.read() as session:
        return session.scalar(select(Service.id)) is not None


def main_of(supervisor: Supervisor) -> dict[str, Any]:
    """The service, as pages get it."""
    found: dict[str, Any] = supervisor.snapshot()["services"][0]
    return found


async def until(found: Callable[[], Any], limit_s: float = 20.0) -> Any:
    """Return what a function returns once it is true."""
    async with asyncio.timeout(limit_s):
        while not (value := found()):
            await asyncio.sleep(0.01)
    return value


async def serve(supervisor: Supervisor, profile_id: int) -> Any:
    """Have the service serve a profile; return the job when it has ended."""
    job = await supervisor.submit("switch", service_id=1, profile_id=profile_id)
    return await supervisor.wait(job)


async def until_anew(supervisor: Supervisor, pid: int) -> dict[str, Any]:
    """Return the service once another process than one serves; say what it is where none does."""
    try:
        await until(lambda: (x := main_of(supervisor))["state"] == "ready" and x["pid"] != pid)
    except TimeoutError as error:
        raise AssertionError(f"process {pid} before, now {supervisor.snapshot()}") from error
    return main_of(supervisor)
