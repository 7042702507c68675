"""Tests and what they measured; what processes that are gone left behind."""

import os
import time

import psutil
import pytest
from sqlalchemy import Engine, event

from console.registry.checks import FieldError
from console.registry.database import Database
from console.registry.models import Models
from console.registry.results import Results
from console.registry.stale import interrupt_stale, is_alive, own_process
from console.registry.tables import Comparison, Model
from tests.console.registry.conftest import measured


@pytest.fixture
def results(database: Database, models: Models) -> Results:
    for name in ("glass", "olmo7b"):
        models.store(models.describe(name), {})
    return Results(database)


def test_a_test_that_has_ended_is_not_changed(results: Results) -> None:
    run = results.create(1, "test", profile_id=1, num_requests=100)
    assert (run.status, run.settings) == ("queued", {})
    assert results.change(run.id, status="running", progress={"done": 1, "total": 100})
    assert results.change(run.id, status="cancelled")
    assert not results.change(run.id, status="running", progress={"done": 2, "total": 100})
    found = results.get(run.id)
    assert (found.status, found.progress) == ("cancelled", {"done": 1, "total": 100})
    assert found.ended_s is not None
    with pytest.raises(ValueError, match="status: expected one of queued, running"):
        results.change(run.id, status="done")
    with pytest.raises(FieldError, match="test: expected the number of one that there is, got 9"):
        results.get(9)


def test_runs_come_in_pages(results: Results) -> None:
    for index in range(7):
        results.create(1 + index % 2, "test")
    first = results.runs(limit=3)
    assert [run.id for run in first] == [7, 6, 5]
    assert [run.id for run in results.runs(before_id=5, limit=3)] == [4, 3, 2]
    assert [run.id for run in results.runs(2)] == [6, 4, 2]
    results.change(4, status="failed", reason="out of memory")
    assert [run.id for run in results.runs(statuses=("failed", "no_fit"))] == [4]


def test_measurements_are_kept_and_the_last_ones_found(results: Results, models: Models) -> None:
    run = results.create(1, "test", profile_id=1)
    for speed in (10.0, 12.0):
        measured(results, run, "NVIDIA L4", "throughput", {"output_tok_s": speed})
    measured(results, run, "CPU", "load", {"load_s": 1.5})
    assert [row.metrics for row in results.performance(1, card="NVIDIA L4")] == [
        {"output_tok_s": 12.0},
        {"output_tok_s": 10.0},
    ]
    assert {(row.part, row.card) for row in results.latest()[1]} == {
        ("throughput", "NVIDIA L4"),
        ("load", "CPU"),
    }
    models.set_profile("glass", "b", make_default=True)
    models.remove_profile("glass", "default")  # what was measured with it stays
    assert len(results.performance(1)) == 3
    pair = results.create(1, "ab")
    rows = [{"metric": "x", "ratio": 1.1}]
    with results._database.write() as session:
        session.add(Comparison(model_id=1, test_run_id=pair.id, rows=rows))
    assert results.comparisons(1)[0].rows == [{"metric": "x", "ratio": 1.1}]
    assert results.comparisons(2) == []


def test_what_has_no_process_is_interrupted(results: Results, database: Database) -> None:
    alive, gone, reused = (results.create(1, "test") for _ in range(3))
    queued = results.create(1, "test")
    own = own_process()
    results.change(alive.id, status="running", pid=own.pid, pid_started_s=own.started_s)
    results.change(gone.id, status="running", pid=2**22 + 1, pid_started_s=time.time())
    began = psutil.Process().create_time() - 60
    results.change(reused.id, status="running", pid=os.getpid(), pid_started_s=began)
    with database.write() as session:
        session.get(Model, 1).state = "testing"
        session.get(Model, 2).state = "downloading"
    found = interrupt_stale(database)
    assert (found.tests, found.models) == ((gone.id, reused.id), ("olmo7b",))
    statuses = [results.get(run.id).status for run in (alive, gone, reused, queued)]
    assert statuses == ["running", "interrupted", "interrupted", "queued"]
    assert results.get(gone.id).reason == "its process is gone"
    with database.read() as session:
        other = session.get(Model, 2)
        assert (session.get(Model, 1).state, other.state) == ("testing", "missing")
        assert other.reason == "interrupted while downloading: its process is gone"
    assert results.change(alive.id, status="finished")
    assert interrupt_stale(database).models == ("glass",)
    with database.read() as session:
        assert session.get(Model, 1).state == "ready"
    assert interrupt_stale(database).tests == ()


def test_a_process_is_known_by_its_start() -> None:
    own = own_process()
    assert is_alive(own.pid, own.started_s)
    assert not is_alive(own.pid, None)
    assert not is_alive(None, 1.0)


def test_rows_are_found_by_indexes_however_many_there_are(
    results: Results, models: Models, database: Database
) -> None:
    """What pages ask for: SQLite searches an index, and a list takes as many queries as tables."""
    asked: list[tuple[str, object]] = []

    def keep(_: object, __: object, statement: str, parameters: object, *___: object) -> None:
        asked.append((statement, parameters))

    event.listen(Engine, "before_cursor_execute", keep)
    try:
        results.runs(1)
        results.runs(1, before_id=9, statuses=("finished",))
        results.runs(statuses=("queued", "running"))
        results.performance(1, card="CPU")
        results.throughput(1)
        results.latest(1)
        results.comparisons(1)
        models.get("glass")
        found = [each for each in asked if each[0].startswith("SELECT")]
        asked.clear()
        models.list()
        assert len([each for each in asked if each[0].startswith("SELECT")]) == 2
    finally:
        event.remove(Engine, "before_cursor_execute", keep)
    assert len(found) == 9
    with database.read() as session:
        for statement, parameters in found:
            rows = session.connection().exec_driver_sql(
                f"EXPLAIN QUERY PLAN {statement}", parameters
            )
            steps = [row.detail for row in rows]
            assert not [step for step in steps if step.startswith("SCAN")], (statement, steps)
