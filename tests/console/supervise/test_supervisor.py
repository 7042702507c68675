"""What pages read of a supervisor, what it refuses, and what is left when it is killed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from console.registry.checks import FieldError
from console.registry.database import Database
from console.registry.models import Models
from console.supervise.discover import Listener
from engine.errors import ConfigError
from tests.console.page import snapshots
from tests.console.supervise.conftest import (
    COMMAND,
    NoMachine,
    add_model,
    main_of,
    serve,
    service_row,
    set_row,
    supervising,
    until,
)

LONE = """
import asyncio, json, sys, time
from pathlib import Path
from console.registry.database import Database
from tests.console.supervise.conftest import main_of, serve, supervising

async def run():
    home, profile = Path(sys.argv[1]), int(sys.argv[2])
    async with supervising(Database.open(home / "registry.db"), home) as supervisor:
        await serve(supervisor, profile)
        print(json.dumps(main_of(supervisor)["pid"]), flush=True)
        await asyncio.sleep(60)

asyncio.run(run())
"""


def test_the_snapshot_has_what_pages_show(database: Database, home: Path) -> None:
    async def run() -> None:
        profile = add_model(database, "deaf")
        more: Any = {"about": {"host": "127.0.0.1", "port": 7999, "is_loopback": True}}
        async with supervising(database, home, more=more, stop_s=0.1) as supervisor:
            await serve(supervisor, profile)
            await until(lambda: main_of(supervisor)["load"])
            found = json.loads(json.dumps(supervisor.snapshot()))
        expected = snapshots.snapshot(0.0)
        assert expected.keys() <= found.keys()
        assert found["console"] == more["about"]
        service, job = found["services"][0], found["jobs"][0]
        assert expected["services"][0].keys() | expected["services"][1].keys() <= service.keys()
        assert expected["jobs"][0].keys() <= job.keys()
        assert job["arguments"] == {"service": "main", "model": "deaf", "profile": "default"}
        for name in ("effective", "load"):
            assert expected["services"][0][name].keys() <= service[name].keys()

    asyncio.run(run())


@pytest.mark.thorough
def test_a_feed_tells_of_changes_and_ends(database: Database, home: Path) -> None:
    async def run() -> None:
        states: list[str] = []

        async def follow(supervisor: Any) -> None:
            async for _ in supervisor.feed():
                states.append(main_of(supervisor)["state"])  # noqa: PERF401  seen as they come

        profile = add_model(database, "slow")
        async with supervising(database, home) as supervisor:
            following = asyncio.create_task(follow(supervisor))
            await until(lambda: states)
            assert states == ["stopped"]
            await serve(supervisor, profile)
            await until(lambda: states[-1] == "ready")
            assert "loading" in states
            assert len(states) < 30
        await asyncio.wait_for(following, 5)

    asyncio.run(run())


def test_one_console_has_a_registry(database: Database, home: Path) -> None:
    async def run() -> None:
        async with supervising(database, home):
            with pytest.raises(ConfigError, match="expected no other console on the registry"):
                async with supervising(database, home):
                    pass
        async with supervising(database, home):
            pass

    asyncio.run(run())


@pytest.mark.thorough_but("burn", "set_context")
@pytest.mark.parametrize(
    ("action", "asked", "message"),
    [
        ("burn", {}, "action: expected one of start, stop, .*, got 'burn'"),
        ("start", {}, "service_id: expected a value for start, got none"),
        ("start", {"service_id": True}, "service_id: expected an integer, got True"),
        ("start", {"service_id": 1, "now": 1}, "now: start has no such argument"),
        (
            "set_auto_restart",
            {"service_id": 1, "auto_restart": "yes"},
            "auto_restart: expected true or false, got 'yes'",
        ),
        (
            "set_context",
            {"service_id": 1, "max_model_len": 65},
            "--max-model-len: expected at least 2",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    action: str, asked: dict[str, Any], message: str, database: Database, home: Path
) -> None:
    async def run() -> None:
        set_row(database, port=0, profile_id=add_model(database, "deaf"))
        async with supervising(database, home) as supervisor:
            with pytest.raises(FieldError, match=message):
                await supervisor.submit(action, **asked)
            with pytest.raises(LookupError, match="service: expected the id of one"):
                await supervisor.submit("start", service_id=7)
            with pytest.raises(LookupError, match="service: expected the id of one"):
                supervisor.log(7)

    asyncio.run(run())


@pytest.mark.thorough
def test_the_context_window_is_changed_in_the_profile_and_in_what_is_served(
    database: Database, home: Path
) -> None:
    async def run() -> None:
        profile = add_model(database, "deaf", max_model_len=48)
        async with supervising(database, home, stop_s=0.1) as supervisor:
            await serve(supervisor, profile)
            pid = main_of(supervisor)["pid"]
            job = await supervisor.submit("set_context", service_id=1, max_model_len=32)
            assert (await supervisor.wait(job)).state == "done"
            found = main_of(supervisor)
            assert (found["state"], found["requested"]["max_model_len"]) == ("ready", 32)
            assert found["pid"] != pid
            assert Models(database).get("deaf").profiles[0].settings == {"max_model_len": 32}
            words = psutil.Process(found["pid"]).cmdline()
            assert "--max-model-len=32" in words

    asyncio.run(run())


@pytest.mark.thorough
def test_nothing_is_left_when_the_console_is_killed(database: Database, home: Path) -> None:
    profile = add_model(database, "deaf+child")
    set_row(database, port=0)
    root = Path(__file__).parents[3]
    lone = subprocess.Popen(
        [sys.executable, "-c", LONE, str(home), str(profile)],
        stdout=subprocess.PIPE,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert lone.stdout is not None
    pid = json.loads(lone.stdout.readline())
    server = psutil.Process(pid)
    assert (service_row(database).pid, server.is_running()) == (pid, True)
    lone.kill()
    lone.wait()
    lone.stdout.close()
    server.wait(60)
    assert not server.is_running()


@pytest.mark.thorough
def test_a_process_that_cannot_be_identified_is_left_alone(database: Database, home: Path) -> None:
    sleeping = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", *words])
        for words in ((), COMMAND)
    ]
    try:
        foreign, ours = (psutil.Process(each.pid) for each in sleeping)

        async def run() -> None:
            for process, started_s in (
                (foreign, foreign.create_time()),  # another command
                (ours, ours.create_time() - 60.0),  # another process had this id
            ):
                set_row(
                    database, port=0, wanted="running", pid=process.pid, pid_started_s=started_s
                )
                async with supervising(database, home) as supervisor:
                    assert main_of(supervisor)["pid"] is None
                    assert process.is_running()
                assert service_row(database).pid is None
            set_row(database, pid=ours.pid, pid_started_s=ours.create_time())
            async with supervising(database, home):
                sleeping[1].wait(5)

        asyncio.run(run())
        assert sleeping[0].poll() is None
        assert sleeping[1].returncode == -signal.SIGKILL
    finally:
        for each in sleeping:
            each.kill()
            each.wait()


@pytest.mark.thorough
def test_foreign_servers_are_shown_and_not_stopped(database: Database, home: Path) -> None:
    async def run() -> None:
        profile = add_model(database, "deaf")
        async with supervising(database, home, stop_s=0.1) as first:
            await serve(first, profile)
            url, pid = first.base_url(), main_of(first)["pid"]
            port = int(str(url).rpartition(":")[2])
            found = Listener("127.0.0.1", port, pid, time.time(), "some serve", "user")
            other = Database.open(home / "other" / "registry.db")
            set_row(other, port=0)
            more: Any = {"list_listeners": lambda: [found]}
            async with supervising(other, home / "other", more=more) as second:
                foreign = await until(lambda: second.snapshot()["foreign"])
                assert [(x["port"], x["pid"], x["model"]) for x in foreign] == [
                    (port, pid, "scripted")
                ]
            other.close()
            assert psutil.pid_exists(pid)

    asyncio.run(run())


def test_the_machine_is_told_what_is_served(database: Database, home: Path) -> None:
    async def run() -> None:
        machine = NoMachine()
        async with supervising(database, home, machine=machine) as supervisor:
            assert supervisor.snapshot()["machine"] == machine.snapshot()
            await until(lambda: machine.served)
            assert (machine.served[-1], machine.loads) == ([], [])

    asyncio.run(run())
