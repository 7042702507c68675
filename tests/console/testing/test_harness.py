"""Tests with the harness itself."""

import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from console.registry.database import Database
from console.registry.models import Models
from console.registry.results import Results
from console.registry.tables import Model, Profile
from console.testing.tests import Ask, Tests
from engine.model.spec import ModelSpec
from tests.console.testing.test_tests import until
from tests.server.launch import SIZES, write_model

pytestmark = pytest.mark.slow
CPU = {"device": "cpu", "load_format": "dummy", "gpu_memory_gib": 0.125, "host_reserve_gib": 0.0}


@pytest.fixture
def tiny(database: Database, tmp_path: Path) -> str:
    """A model with made up weights, with a profile that fits and one that does not."""
    folder = write_model(tmp_path / "tiny [1]")
    small = CPU | {"gpu_memory_gib": 0.001}
    model = Model(
        name="tiny",
        source=str(folder),
        kind="folder",
        path=str(folder),
        max_model_len=1200,
        spec=asdict(ModelSpec.from_hf_config(SIZES)),
        state="untested",
        profiles=[
            Profile(name="default", is_default=True, settings=CPU),
            Profile(name="small", settings=small),
        ],
    )
    with database.write() as session:
        session.add(model)
    return model.name


def test_a_side_that_does_not_fit_is_a_result(tiny: str, database: Database) -> None:
    tests = Tests(database)
    ask = Ask(kind="ab", profiles=["default", "small"], num_requests=1, pairs=1, aa_pairs=0)
    test = tests.run(tests.queue(tiny, ask).id)
    assert (test.status, test.reason) == ("finished", None)
    [found] = Results(database).comparisons()
    assert str(found.verdict).startswith("side b does not fit: ")
    rows = Results(database).performance(test.model_id)
    assert {row.part for row in rows} == {"load", "throughput", "latency", "memory"}
    assert (test.progress or {})["unit"] == "runs"


def test_cancel_ends_the_workers_and_keeps_the_record(tiny: str, database: Database) -> None:
    tests = Tests(database)
    test = tests.queue(tiny, Ask(num_requests=500))
    thread = threading.Thread(target=tests.run, args=[test.id])
    thread.start()
    until(lambda: (Results(database).get(test.id).progress or {}).get("unit") == "requests", 90)
    tests.cancel(test.id)
    thread.join()
    ended = Results(database).get(test.id)
    assert ended.status == "cancelled"
    assert Models(database).get(tiny).state == "missing"  # weights that are made up are no files
    assert ended.environment is not None
