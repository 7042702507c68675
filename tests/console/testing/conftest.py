"""A registry with one model that was added, and a stand-in for the harness."""

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from catalogue.models import named
from console.registry.database import Database
from console.registry.models import Models
from console.registry.tables import Model, Profile
from console.testing.tests import Tests
from reports.record.record import RunRecord

METRICS = {
    "load/total_s": 7.5,
    "throughput/output_tok_s": 100.0,
    "latency/tpot_ms/mean": 10.0,
    "latency/tpot_ms/p99": None,
    "memory/gpu_peak_gib": 2.0,
}
ENVIRONMENT = {"gpu": {"name": "RTX 9"}, "cpu": {"name": "some"}}


def record(status: str = "ok", **changes: Any) -> RunRecord:
    """A run's record."""
    is_ok = status in {"ok", "partial"}
    error = None if status == "ok" else {"type": "Some", "message": f"it is {status}\nand more"}
    found = {"metrics": dict(METRICS) if is_ok else {}, "error": error, "environment": ENVIRONMENT}
    return RunRecord(run_id="r", name="n", status=status, **(found | changes))


class StandIn:
    """What the stand-in for the harness will do."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.plays()

    def plays(self, *, records: dict[str, RunRecord] | None = None, **script: Any) -> None:
        written = {name: asdict(each) for name, each in (records or {}).items()}
        self._path.write_text(json.dumps({"records": written, **script}), encoding="utf-8")


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setenv("STAND_IN", str(tmp_path / "script.json"))
    return StandIn(tmp_path / "script.json")


@pytest.fixture(scope="session")
def empty_registry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("registry") / "registry.db"
    Database.open(path).close()
    return path


@pytest.fixture
def database(
    tmp_path: Path, empty_registry: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Database]:
    home = tmp_path / "home [1]"
    home.mkdir()
    monkeypatch.setenv("TIGHTFIT_HOME", str(home))
    shutil.copy(empty_registry, home)
    found = Database.open()
    add_model(found, home)
    yield found
    found.close()


def add_model(database: Database, folder: Path) -> None:
    """Add glass under the name of toy, as if its weights were here, with three profiles."""
    spec = named("glass").spec
    assert spec is not None
    settings = {"default": {}, "uva": {"offload": "uva", "cpu_offload_gb": 4.0}, "small": {}}
    model = Model(
        name="toy",
        source="glass",
        kind="package",
        path=str(folder),
        max_model_len=128,
        spec=asdict(spec),
        state="untested",
        profiles=[
            Profile(name=name, is_default=name == "default", settings=each)
            for name, each in settings.items()
        ],
    )
    with database.write() as session:
        session.add(model)


@pytest.fixture
def models(database: Database) -> Models:
    return Models(database)


@pytest.fixture
def tests(database: Database, stand_in: StandIn) -> Tests:
    command = [sys.executable, "-S", "-E", str(Path(__file__).with_name("stand_in.py"))]
    return Tests(database, command=command, has_gpu=lambda: False, look_s=0.01, cancel_s=20.0)
