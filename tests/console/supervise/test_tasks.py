"""Downloads, removals and tests as jobs."""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import select

from console.registry.checks import BusyError
from console.registry.database import Database
from console.registry.tables import Model, Profile, Service, TestRun
from console.testing.tests import Tests
from tests.console.registry.conftest import checkpoint
from tests.console.supervise.conftest import (
    add_model,
    main_of,
    serve,
    supervising,
    until,
    until_anew,
)
from tests.console.supervise.test_units import StandIn as Systemctl
from tests.console.supervise.test_units import installed, unit_of
from tests.console.testing.conftest import StandIn, record, stand_in
from tests.slow import slow

__all__ = ["stand_in"]
HARNESS = Path(__file__).parents[1] / "testing" / "stand_in.py"
FETCH = (sys.executable, str(Path(__file__).with_name("fetching.py")))
SIZES = {"num_requests": 3, "stop_service": True}


@pytest.fixture
def more(database: Database, home: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
    """Scripts in the place of the harness and of downloads."""
    monkeypatch.setenv("TIGHTFIT_HOME", str(home))
    tests = Tests(
        database,
        command=[sys.executable, str(HARNESS)],
        has_gpu=lambda: True,
        look_s=0.02,
        cancel_s=2.0,
    )
    return {"tests": tests, "fetch": FETCH}


def row_of(database: Database, table: Any, row_id: int) -> Any:
    with database.read() as session:
        return session.get(table, row_id)


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended, also where nobody has waited for it."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def held_of(database: Database) -> list[int | None]:
    with database.read() as session:
        return list(session.scalars(select(Service.held_by_test_id)))


def model_of(database: Database, profile_id: int) -> Any:
    return row_of(database, Model, row_of(database, Profile, profile_id).model_id)


def lacks_files(database: Database, profile_id: int) -> int:
    """Note that a model's files are absent; return its id."""
    with database.write() as session:
        model = session.get_one(Model, session.get_one(Profile, profile_id).model_id)
        model.state, model.path = "missing", None
    return int(model.id)


@pytest.mark.thorough
def test_a_test_stops_what_is_served_and_starts_it_again(
    database: Database, home: Path, more: Mapping[str, Any], stand_in: StandIn
) -> None:
    async def run() -> None:
        stand_in.plays(records={".": record()}, waits=True)
        profile = add_model(database, "deaf", path=checkpoint(home / "deaf"))
        async with supervising(database, home, more=more, stop_s=0.2) as supervisor:
            await serve(supervisor, profile)
            with pytest.raises(BusyError, match="expected a free GPU, got main"):
                await supervisor.submit(
                    "test", profile_id=profile, num_requests=3, stop_service=False
                )
            pid = main_of(supervisor)["pid"]
            job = await supervisor.submit("test", profile_id=profile, **SIZES)
            second = await supervisor.submit("test", profile_id=profile, **SIZES)
            await until(lambda: job.phase == "throughput, 3 of 8 requests")
            assert (second.state, second is job) == ("queued", False)
            found = main_of(supervisor)
            assert (found["state"], found["reason"]) == ("stopped", "test 1 runs")
            assert (found["wanted"], psutil.pid_exists(pid)) == ("running", False)
            with pytest.raises(BusyError, match="start: expected no test, got test 1"):
                await supervisor.submit("start", service_id=1)
            await supervisor.wait(await supervisor.submit("cancel_test", test_id=2))
            await supervisor.wait(await supervisor.submit("cancel_test", test_id=1))
            await supervisor.wait(job)
            assert (job.state, row_of(database, TestRun, 1).status) == ("cancelled", "cancelled")
            await supervisor.wait(second)
            assert row_of(database, TestRun, 2).status == "cancelled"
            assert (await until_anew(supervisor, pid))["wanted"] == "running"

    asyncio.run(run())


def test_a_phase_without_an_end_has_no_count(
    database: Database, home: Path, more: Mapping[str, Any], stand_in: StandIn
) -> None:
    async def run() -> None:
        stand_in.plays(
            records={".": record()}, waits=True, state={"phase": "close", "progress": {}}
        )
        profile = add_model(database, "deaf", path=checkpoint(home / "deaf"))
        async with supervising(database, home, more=more) as supervisor:
            job = await supervisor.submit("test", profile_id=profile, **SIZES)
            await until(lambda: job.phase == "close")
            await supervisor.wait(await supervisor.submit("cancel_test", test_id=1))
            await supervisor.wait(job)

    asyncio.run(run())


@pytest.mark.thorough
@pytest.mark.parametrize("refusal", ["", "Access denied"])
def test_a_test_stops_a_unit_where_it_may(
    database: Database, home: Path, more: Mapping[str, Any], stand_in: StandIn, refusal: str
) -> None:
    async def run() -> None:
        stand_in.plays(records={".": record()}, waits=True)
        systemd, profile = Systemctl(), add_model(database, "deaf", path=checkpoint(home / "deaf"))
        units = {"run_systemctl": systemd, "list_units": lambda: [installed(port=0)]}
        async with supervising(database, home, more={**more, **units}, stop_s=0.1) as supervisor:
            assert (await serve(supervisor, profile)).state == "done"
            pid = main_of(supervisor)["pid"]
            systemd.active, systemd.refusal = "active", refusal
            await supervisor._look_at_units()
            job = await supervisor.submit("test", profile_id=profile, **SIZES)
            if not refusal:
                await until(lambda: job.phase == "throughput, 3 of 8 requests")
                assert (systemd.active, unit_of(supervisor)["state"]) == ("inactive", "stopped")
                await supervisor.wait(await supervisor.submit("cancel_test", test_id=1))
            await supervisor.wait(job)
            assert row_of(database, TestRun, 1).status == "cancelled"
            assert systemd.active == "active"
            if refusal:
                assert job.reason is not None
                assert job.reason.startswith("tightfit-server-deaf was not stopped: ")
                assert job.reason.endswith("Access denied")
            await until_anew(supervisor, pid)

    asyncio.run(run())


@pytest.mark.thorough
def test_a_test_goes_on_without_a_console_and_the_next_one_follows_it(
    database: Database, home: Path, more: Mapping[str, Any], stand_in: StandIn
) -> None:
    async def run() -> None:
        stand_in.plays(records={".": record()}, waits=True)
        profile = add_model(database, "deaf", path=checkpoint(home / "deaf"))
        async with supervising(database, home, more=more, stop_s=0.2) as supervisor:
            await serve(supervisor, profile)
            job = await supervisor.submit("test", profile_id=profile, **SIZES)
            await until(lambda: job.phase == "throughput, 3 of 8 requests")
        test = row_of(database, TestRun, 1)
        assert (test.status, psutil.pid_exists(test.pid)) == ("running", True)
        async with supervising(database, home, more=more, stop_s=0.2) as supervisor:
            found = main_of(supervisor)
            assert (found["state"], found["reason"]) == ("stopped", "test 1 runs")
            followed = supervisor.snapshot()["jobs"][0]
            assert (followed["action"], followed["arguments"]["test"]) == ("test", 1)
            psutil.Process(test.pid).terminate()
            await until(lambda: main_of(supervisor)["state"] == "ready")
            assert row_of(database, TestRun, 1).status == "interrupted"

    asyncio.run(run())


@pytest.mark.thorough
@pytest.mark.parametrize("ends", [slow("with nobody"), "with the next console"])
def test_a_unit_is_started_again_by_the_console_behind_the_one_that_stopped_it(
    database: Database, home: Path, more: Mapping[str, Any], stand_in: StandIn, ends: str
) -> None:
    async def run() -> None:
        stand_in.plays(records={".": record()}, waits=True)
        systemd, profile = Systemctl(), add_model(database, "deaf", path=checkpoint(home / "deaf"))
        units = {"run_systemctl": systemd, "list_units": lambda: [installed(port=0)]}
        systemd.active = "active"
        async with supervising(database, home, more={**more, **units}) as supervisor:
            job = await supervisor.submit("test", profile_id=profile, **SIZES)
            await until(lambda: job.phase == "throughput, 3 of 8 requests")
            assert systemd.active == "inactive"
        process = psutil.Process(row_of(database, TestRun, 1).pid)
        if ends == "with nobody":
            process.terminate()
            await until(lambda: has_ended(process))
        async with supervising(database, home, more={**more, **units}) as supervisor:
            if ends == "with the next console":
                await until(lambda: supervisor.snapshot()["jobs"][0]["phase"])
                assert systemd.active == "inactive"
                process.terminate()
            await until(lambda: systemd.active == "active")
            await until(lambda: held_of(database) == [None, None])
        assert row_of(database, TestRun, 1).status == "interrupted"
        systemd.active = "inactive"
        async with supervising(database, home, more={**more, **units}) as supervisor:
            assert unit_of(supervisor)["state"] == "stopped"  # by a person: it stays so

    asyncio.run(run())


@pytest.mark.thorough
def test_a_download_is_shown_and_may_fail(
    database: Database, home: Path, more: Mapping[str, Any]
) -> None:
    async def run() -> None:
        comes, fails = add_model(database, "comes"), add_model(database, "fails")
        ids = [lacks_files(database, each) for each in (comes, fails)]
        async with supervising(database, home, more=more) as supervisor:
            job = await supervisor.wait(await supervisor.submit("download", model_id=ids[0]))
            assert (job.state, job.reason) == ("done", None)
            assert job.to_dict()["arguments"] == {"model": "comes"}
            again = await supervisor.wait(await supervisor.submit("download", model_id=ids[0]))
            assert again.state == "done"
            job = await supervisor.wait(await supervisor.submit("download", model_id=ids[1]))
            assert (job.state, job.reason) == ("failed", "the hub has no such repository")
            with pytest.raises(LookupError, match=r"model: expected the id of one .*, got 99"):
                await supervisor.submit("download", model_id=99)

    asyncio.run(run())


@pytest.mark.thorough
def test_a_download_without_progress_ends_and_one_at_a_time_changes_a_model(
    database: Database, home: Path, more: Mapping[str, Any]
) -> None:
    async def run() -> None:
        model_id = lacks_files(database, profile := add_model(database, "waits"))
        async with supervising(database, home, more=more, patience_s=1.5) as supervisor:
            job = await supervisor.submit("download", model_id=model_id)
            assert await supervisor.submit("download", model_id=model_id) is job
            with pytest.raises(BusyError, match="expected model waits without a job"):
                await supervisor.submit("delete", model_id=model_id, keep_files=True)
            await until(lambda: job.phase == "0.50 of 1.00 GiB" or not job.is_open)
            await supervisor.wait(job)
            assert str(job.reason).startswith("the download made no progress for 1.5 s")
            row = model_of(database, profile)
            assert (row.state, row.pid) == ("missing", None)
            deleted = await supervisor.submit("delete", model_id=model_id, keep_files=True)
            assert (await supervisor.wait(deleted)).state == "done"
            assert row_of(database, Model, model_id) is None

    asyncio.run(run())
