"""Tests from their wish to their end, with a stand-in for the harness."""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from console.registry.checks import BusyError
from console.registry.database import Database
from console.registry.models import Models
from console.registry.results import Results
from console.registry.tables import Service, TestRun
from console.testing.tests import Ask, Tests
from engine.errors import ConfigError
from tests.console.testing.conftest import StandIn, record


def until(is_true: Callable[[], bool], limit_s: float = 30) -> None:
    end_s = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def started(tests: Tests, database: Database, ask: Ask) -> tuple[TestRun, threading.Thread]:
    """A test that runs, and the thread that follows it."""
    test = tests.queue("toy", ask)
    thread = threading.Thread(target=tests.run, args=[test.id])
    thread.start()
    until(lambda: (Results(database).get(test.id).progress or {}).get("done") == 3)
    return Results(database).get(test.id), thread


def words_of(test: TestRun) -> list[str]:
    """The arguments that the harness got."""
    found = json.loads((Path(str(test.folder)) / "args.json").read_text(encoding="utf-8"))
    return [str(word) for word in found]


def test_a_test_runs_and_is_kept(
    tests: Tests, stand_in: StandIn, database: Database, models: Models
) -> None:
    stand_in.plays(records={".": record()})
    queued = tests.queue("toy", Ask(num_requests=5, profiles=["uva"]))
    assert queued.status == "queued"
    told: list[Mapping[str, Any]] = []
    test = tests.run(queued.id, told.append)
    assert (test.status, test.reason) == ("finished", None)
    assert test.started_s is not None
    assert test.ended_s is not None
    assert test.environment == {"gpu": {"name": "RTX 9"}, "cpu": {"name": "some"}}
    assert models.get("toy").state == "ready"
    assert len(Results(database).performance(test.model_id)) == 4
    words = words_of(test)
    assert "--json" in words
    assert {"model=glass", "offload=uva", "scenario.throughput.num_requests=5"} <= set(words)
    assert "tracking.experiment='toy'" in words
    assert tests.run(test.id).ended_s == test.ended_s  # it does not run twice


def test_progress_is_live_and_a_cancelled_test_ends_whole(
    tests: Tests, stand_in: StandIn, database: Database, models: Models
) -> None:
    stand_in.plays(records={".": record("killed")}, waits=True)
    test, thread = started(tests, database, Ask())
    assert test.status == "running"
    progress = test.progress or {}
    assert (progress["done"], progress["total"], progress["phase"]) == (3, 8, "throughput")
    assert models.get("toy").state == "testing"
    assert tests.cancel(test.id).status == "cancelled"
    thread.join()
    assert Results(database).get(test.id).status == "cancelled"
    assert not psutil.pid_exists(int(test.pid or 0))
    assert models.get("toy").state in {"untested", "missing"}
    assert tests.cancel(test.id).status == "cancelled"  # once more changes nothing


def test_one_that_does_not_listen_is_killed(
    tests: Tests, stand_in: StandIn, database: Database
) -> None:
    stand_in.plays(waits=True, deaf=True)
    test, thread = started(tests, database, Ask())
    tests._cancel_s = 0.05
    assert tests.cancel(test.id).status == "cancelled"
    thread.join()


@pytest.mark.thorough
def test_one_that_is_killed_from_outside_is_interrupted_and_can_be_resumed(
    tests: Tests, stand_in: StandIn, database: Database
) -> None:
    stand_in.plays(waits=True)
    test, thread = started(tests, database, Ask(num_requests=7))
    psutil.Process(int(test.pid or 0)).kill()
    thread.join()
    assert Results(database).get(test.id).status == "interrupted"
    stand_in.plays(records={".": record()})
    resumed = tests.resume(test.id)
    assert resumed.num_requests == 7
    resumed = tests.run(resumed.id)
    assert "rerun=failed" in words_of(resumed)
    with pytest.raises(ConfigError, match="one that ended early, got status finished"):
        tests.resume(resumed.id)


@pytest.mark.thorough
def test_what_an_earlier_process_left_is_finished_followed_or_interrupted(
    tests: Tests, stand_in: StandIn, database: Database, models: Models, tmp_path: Path
) -> None:
    queued, ended, gone = (tests.queue("toy", Ask()) for _ in range(3))
    stand_in.plays(waits=True)
    test, thread = started(tests, database, Ask())
    record().write(tmp_path / "result.json")
    for number, folder in ((ended.id, tmp_path), (gone.id, tmp_path / "none")):
        Results(database).change(
            number, status="running", folder=str(folder), pid=os.getpid(), pid_started_s=1.0
        )
    left = tests.recover()
    assert (left.running, left.queued) == ([test.id], [queued.id])
    assert Results(database).get(ended.id).status == "finished"
    assert Results(database).get(gone.id).status == "interrupted"
    assert len(Results(database).performance(test.model_id)) == 4
    follower = threading.Thread(target=tests.follow, args=[test.id])
    follower.start()
    tests.cancel(test.id)
    follower.join()
    thread.join()
    assert tests.cancel(queued.id).status == "cancelled"
    assert tests.run(queued.id).status == "cancelled"
    assert models.get("toy").state == "ready"


def test_a_sweep_takes_every_profile(tests: Tests, stand_in: StandIn) -> None:
    stand_in.plays(records={"0": record(), "1": record("no_fit"), "2": record()})
    test = tests.run(tests.queue("toy", Ask(kind="sweep")).id)
    assert test.status == "partial"
    assert list(test.settings["profiles"]) == ["default", "uva", "small"]
    assert set(test.metrics or {}) == {"default", "uva", "small"}


def test_a_refusal_of_the_harness_is_the_reason(
    tests: Tests, stand_in: StandIn, models: Models
) -> None:
    stand_in.plays(exit_code=2, document={"kind": "error", "message": "gpu: expected one"})
    test = tests.run(tests.queue("toy", Ask()).id)
    assert (test.status, test.reason) == ("failed", "gpu: expected one")
    assert (models.get("toy").state, models.get("toy").reason) == ("failed", "gpu: expected one")


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (Ask(kind="other"), "kind: expected one of test, ab, sweep"),
        (Ask(profiles=["none"]), "profile: expected one of default, uva, small, got 'none'"),
        (Ask(kind="ab", profiles=["uva"]), "expected two different ones for kind ab, got uva"),
        (Ask(kind="ab", profiles=["uva", "uva"]), "expected two different ones"),
        (Ask(profiles=["uva", "small"]), "expected one for kind test, got uva, small"),
        (Ask(num_requests=0), "num_requests: expected an integer from 1"),
        (Ask(num_requests=True), "num_requests: expected an integer from 1"),
        (Ask(kind="ab", profiles=["uva", "small"], pairs=0), "pairs: expected an integer"),
    ],
)
def test_refusals(tests: Tests, database: Database, ask: Ask, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tests.queue("toy", ask)
    assert Results(database).runs() == []


def test_a_server_on_the_gpu_is_stopped_only_when_that_is_said(
    tests: Tests, database: Database
) -> None:
    process = psutil.Process()
    row = Service(name="main", kind="own", pid=process.pid, pid_started_s=process.create_time())
    with database.write() as session:
        session.add(row)
    beside = tests.queue("toy", Ask())
    assert beside.settings["notes"] == [f"main (process {process.pid}) runs beside it"]
    tests._has_gpu = lambda: True
    with pytest.raises(BusyError, match=r"got main \(process \d+\) on it.*\(stop_service\)"):
        tests.queue("toy", Ask())
    assert tests.queue("toy", Ask(stop_service=True)).status == "queued"
    with database.write() as session:
        found = session.get(Service, row.id)
        assert found is not None
        found.pid_started_s = 1.0  # the number is another process's by now
    assert tests.queue("toy", Ask()).status == "queued"
