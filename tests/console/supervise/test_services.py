"""A service of the console's own: start, stop, failures, restarts, what is shown of it."""

import asyncio
import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from console.registry.checks import BusyError, FieldError
from console.registry.database import Database
from console.supervise.figures import Figures
from tests.console.supervise.conftest import (
    NoMachine,
    add_model,
    main_of,
    serve,
    service_row,
    set_row,
    supervising,
    until,
)
from tests.slow import slow

pytestmark = pytest.mark.thorough_but(
    "test_a_service_is_started_shown_and_stopped",
    "test_failures_before_a_clock_was_set_back_are_forgotten",
    "test_a_load_is_stopped_where_it_stands",
)


def test_a_service_is_started_shown_and_stopped(database: Database, home: Path) -> None:
    async def run() -> None:
        machine = NoMachine()
        profile = add_model(database, "slow", offload="uva", max_model_len=32)
        async with supervising(database, home, machine=machine) as supervisor:
            first = main_of(supervisor)
            assert (first["state"], first["pid"], first["effective"]) == ("stopped", None, None)
            job = await supervisor.submit("switch", service_id=1, profile_id=profile)
            assert job.state in {"queued", "running"}
            loading = await until(
                lambda: (x := main_of(supervisor))["bytes_total"] and x["state"] == "loading" and x
            )
            assert (loading["phase"], loading["bytes_total"]) == ("weights", 80)
            assert loading["spent_s"] > 0
            await supervisor.wait(job)
            assert (job.state, job.phase, job.reason) == ("done", "ready", None)
            found = main_of(supervisor)
            assert found["state"] == "ready"
            assert found["requested"] == {"model": "slow", "offload": "uva", "max_model_len": 32}
            assert found["effective"] == {
                "model": "scripted",
                "dtype": "float32",
                "offload": "uva",
                "offload_bytes": 50,
                "max_model_len": 64,
                "max_num_seqs": 8,
                "kv_tokens": 640,
                "kv_host_bytes": 7,
                "budget_bytes": 1000,
                "load_s": pytest.approx(found["effective"]["load_s"]),
            }
            load = await until(
                lambda: (x := main_of(supervisor)["load"]) and x["decode_tokens_s"] and x
            )
            assert (load["running"], load["waiting"], load["kv_usage"]) == (3, 1, 0.5)
            assert load["decode_tokens_s"] == pytest.approx(100, rel=0.5)
            assert load["prefill_tokens_s"] is load["link_share"] is load["host_blocks"] is None
            pid = found["pid"]
            assert (service_row(database).pid, service_row(database).wanted) == (pid, "running")
            told = await until(lambda: machine.loads and machine.served[-1])
            assert told[0]["pid"] == pid
            assert (told[0]["weights_bytes"], told[0]["pinned_bytes"]) == (100, 50)
            stopped = await supervisor.wait(await supervisor.submit("stop", service_id=1))
            assert stopped.state == "done"
            last = main_of(supervisor)
            assert (last["state"], last["pid"], last["load"]) == ("stopped", None, None)
            assert not psutil.pid_exists(pid)
            assert (service_row(database).pid, service_row(database).wanted) == (None, "stopped")
            lines, after = supervisor.log(1)
            assert [x["text"] for x in lines][-1] == "ready: serving"
            assert supervisor.log(1, after) == ([], after)

    asyncio.run(run())


def test_a_wish_that_is_true_is_done_and_another_job_waits(database: Database, home: Path) -> None:
    async def run() -> None:
        profile = add_model(database, "slow")
        async with supervising(database, home) as supervisor:
            with pytest.raises(FieldError, match="profile: expected one to serve, got none"):
                await supervisor.submit("start", service_id=1)
            job = await supervisor.submit("switch", service_id=1, profile_id=profile)
            again = await supervisor.submit("switch", service_id=1, profile_id=profile)
            assert again is job
            with pytest.raises(BusyError, match="expected service main without a job, got switch"):
                await supervisor.submit("restart", service_id=1)
            await supervisor.wait(job)
            pid = main_of(supervisor)["pid"]
            for action in ("start", "switch"):
                more = {"profile_id": profile} if action == "switch" else {}
                done = await supervisor.submit(action, service_id=1, **more)
                assert (await supervisor.wait(done)).state == "done"
            assert main_of(supervisor)["pid"] == pid
            await supervisor.wait(await supervisor.submit("restart", service_id=1))
            assert main_of(supervisor)["state"] == "ready"
            assert main_of(supervisor)["pid"] != pid

    asyncio.run(run())


@pytest.mark.parametrize("words", ["slow", slow("stuck"), slow("mute")])
def test_a_load_is_stopped_where_it_stands(words: str, database: Database, home: Path) -> None:
    async def run() -> None:
        profile = add_model(database, words)
        async with supervising(database, home) as supervisor:
            start = await supervisor.submit("switch", service_id=1, profile_id=profile)
            pid = await until(lambda: main_of(supervisor)["pid"])
            stop = await supervisor.submit("stop", service_id=1)
            assert await supervisor.submit("stop", service_id=1) is stop
            await supervisor.wait(stop)
            assert (start.state, start.reason) == ("cancelled", "it was given up for another job")
            assert (stop.state, main_of(supervisor)["state"]) == ("done", "stopped")
            assert not psutil.pid_exists(pid)

    asyncio.run(run())


def test_what_ignores_sigterm_is_killed_with_all_that_it_started(
    database: Database, home: Path
) -> None:
    async def run() -> None:
        profile = add_model(database, "deaf+child")
        async with supervising(database, home, stop_s=0.3) as supervisor:
            await serve(supervisor, profile)
            pid = main_of(supervisor)["pid"]
            children = psutil.Process(pid).children()
            assert len(children) == 1
            await supervisor.wait(await supervisor.submit("stop", service_id=1))
            assert main_of(supervisor)["state"] == "stopped"
            assert not psutil.pid_exists(pid)
            assert not children[0].is_running()

    asyncio.run(run())


def test_a_crash_loop_stops_says_so_and_is_reset(database: Database, home: Path) -> None:
    async def run() -> None:
        profile = add_model(database, "dies")
        async with supervising(database, home) as supervisor:
            job = await serve(supervisor, profile)
            found = main_of(supervisor)
            assert (found["state"], found["is_crash_loop"], len(found["failures"])) == (
                "failed",
                True,
                3,
            )
            assert found["reason"] == job.reason
            assert job.reason == (
                "3 failures in 300 s, so it is not started again by itself. The last one: "
                "RuntimeError: the weights are not to be read"
            )
            assert job.log[-1] == "RuntimeError: the weights are not to be read"
            assert found["log_tail"].startswith("listening on")
            assert service_row(database).state == "failed"
            await supervisor.wait(await supervisor.submit("reset", service_id=1))
            found = main_of(supervisor)
            assert (found["state"], found["reason"], found["failures"]) == ("stopped", None, [])
            assert service_row(database).wanted == "stopped"
            started = await supervisor.wait(await supervisor.submit("start", service_id=1))
            assert started.state == "failed"
            assert len(main_of(supervisor)["failures"]) == 3

    asyncio.run(run())


def test_a_server_that_fails_after_it_was_ready_is_started_again(
    database: Database, home: Path
) -> None:
    async def run() -> None:
        profile = add_model(database, "deaf")
        async with supervising(database, home) as supervisor:
            await serve(supervisor, profile)
            pid = main_of(supervisor)["pid"]
            os.kill(pid, signal.SIGKILL)
            again = await until(
                lambda: (x := main_of(supervisor))["state"] == "ready" and x["pid"] != pid and x
            )
            assert len(again["failures"]) == 1
            off = {"service_id": 1, "auto_restart": False}
            await supervisor.wait(await supervisor.submit("set_auto_restart", **off))
            os.kill(again["pid"], signal.SIGKILL)
            last = await until(lambda: (x := main_of(supervisor))["state"] == "failed" and x)
            assert last["reason"].startswith("SIGKILL ended it")
            assert (last["is_crash_loop"], last["auto_restart"]) == (False, False)

    asyncio.run(run())


def test_a_server_that_falls_silent_is_not_shown_as_well(database: Database, home: Path) -> None:
    async def run() -> None:
        now_s = [0.0]
        profile = add_model(database, "plain")
        silences = {"answer_s": 0.3, "silent_s": 60.0}
        async with supervising(database, home, clock=lambda: now_s[0], **silences) as supervisor:
            await serve(supervisor, profile)
            found = await until(lambda: (x := main_of(supervisor))["load"] and x)
            holds, pid = found["effective"], found["pid"]
            os.kill(pid, signal.SIGSTOP)
            silent = await until(lambda: (x := main_of(supervisor))["reason"] and x)
            assert silent["reason"] == "it has not answered for 0 s"
            assert (silent["state"], silent["load"]) == ("ready", None)
            now_s[0] += 11.0
            silent = await until(lambda: (x := main_of(supervisor))["state"] != "ready" and x)
            assert (silent["state"], silent["load"]) == ("unresponsive", None)
            assert re.fullmatch(r"it has not answered for 1\d s", silent["reason"])
            assert (silent["effective"], supervisor.base_url(1)) == (holds, None)
            os.kill(pid, signal.SIGCONT)
            found = await until(lambda: (x := main_of(supervisor))["load"] and x)
            assert (found["state"], found["reason"], found["pid"]) == ("ready", None, pid)
            os.kill(pid, signal.SIGSTOP)
            await until(lambda: main_of(supervisor)["reason"])
            now_s[0] += 61.0
            await until(lambda: main_of(supervisor)["pid"] not in {None, pid})
            assert len(main_of(supervisor)["failures"]) == 1

    asyncio.run(run())


def test_a_port_that_is_taken_is_refused_with_who_has_it(database: Database, home: Path) -> None:
    async def run() -> None:
        profile = add_model(database, "plain")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            set_row(database, port=port)
            async with supervising(database, home) as supervisor:
                job = await serve(supervisor, profile)
                found = main_of(supervisor)
                assert job.state == found["state"] == "failed"
                assert (found["failures"], found["is_crash_loop"]) == ([], False)
                assert job.reason == found["reason"]
                assert str(job.reason).startswith(
                    f"port: expected a free one, got {port}, which process {os.getpid()} ("
                )
                assert str(job.reason).endswith(" End that, or choose another port.")
                with pytest.raises(FieldError, match=r"port: expected .* 65535, got 70000"):
                    await supervisor.submit("set_port", service_id=1, port=70000)
                moved = await supervisor.submit("set_port", service_id=1, port=0)
                assert (await supervisor.wait(moved)).state == "done"
                assert service_row(database).port == main_of(supervisor)["port"] == 0
                started = await supervisor.submit("start", service_id=1)
                assert (await supervisor.wait(started)).state == "done"

    asyncio.run(run())


def test_a_server_that_runs_moves_to_another_port(database: Database, home: Path) -> None:
    async def run() -> None:
        profile = add_model(database, "plain")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        async with supervising(database, home) as supervisor:
            await serve(supervisor, profile)
            moved = await supervisor.submit("set_port", service_id=1, port=port)
            await supervisor.wait(moved)
            assert (moved.state, moved.arguments) == ("done", {"service": "main", "port": port})
            assert supervisor.base_url(1) == f"http://127.0.0.1:{port}"

    asyncio.run(run())


def test_a_start_right_behind_a_stop_waits_for_it(database: Database, home: Path) -> None:
    async def run() -> None:
        profile = add_model(database, "deaf")
        async with supervising(database, home, stop_s=0.5) as supervisor:
            await serve(supervisor, profile)
            pid = main_of(supervisor)["pid"]
            stop = await supervisor.submit("stop", service_id=1)
            start = await supervisor.submit("start", service_id=1)
            assert (stop.is_open, start.state) == (True, "queued")
            assert await supervisor.submit("start", service_id=1) is start
            with pytest.raises(BusyError, match="expected service main without a job, got start"):
                await supervisor.submit("restart", service_id=1)
            await supervisor.wait(start)
            assert (stop.state, start.state) == ("done", "done")
            found = main_of(supervisor)
            assert (found["state"], found["wanted"], found["pid"] == pid) == (
                "ready",
                "running",
                False,
            )
            stop = await supervisor.submit("stop", service_id=1)
            start = await supervisor.submit("start", service_id=1)
            assert await supervisor.submit("stop", service_id=1) is stop  # the start is given up
            await supervisor.wait(stop)
            assert (start.state, main_of(supervisor)["state"]) == ("cancelled", "stopped")

    asyncio.run(run())


def test_failures_before_a_clock_was_set_back_are_forgotten(database: Database, home: Path) -> None:
    async def run() -> None:
        later = [time.time() + 3600] * 2
        set_row(database, port=0, failures=later)
        async with supervising(database, home) as supervisor:
            assert main_of(supervisor)["failures"] == []

    asyncio.run(run())


def test_what_would_fail_again_is_not_started_again(database: Database, home: Path) -> None:
    async def run() -> None:
        profile = add_model(database, "config")
        async with supervising(database, home) as supervisor:
            job = await serve(supervisor, profile)
            found = main_of(supervisor)
            assert (found["state"], len(found["failures"])) == ("failed", 1)
            assert job.reason == "offload: expected one of none, auto, got 7.\nWrite auto."
        async with supervising(database, home) as supervisor:  # nor by another console
            await asyncio.sleep(0.2)
            found = main_of(supervisor)
            assert (found["state"], found["reason"]) == ("failed", job.reason)

    asyncio.run(run())


@pytest.mark.parametrize("words", ["stuck", slow("mute")])
def test_a_load_without_progress_is_ended(words: str, database: Database, home: Path) -> None:
    async def run() -> None:
        now_s = [0.0]
        profile = add_model(database, words)
        set_row(database, auto_restart=False, port=0)
        async with supervising(
            database, home, clock=lambda: now_s[0], patience_s=100.0
        ) as supervisor:
            job = await supervisor.submit("switch", service_id=1, profile_id=profile)
            await until(lambda: main_of(supervisor)["pid"])
            await asyncio.sleep(0.3)
            assert main_of(supervisor)["state"] == "loading"
            now_s[0] = 101.0
            await supervisor.wait(job)
            assert job.reason == "it made no progress for 100 s (phase start)"
            assert main_of(supervisor)["state"] == "failed"

    asyncio.run(run())


def test_a_load_may_take_longer_than_it_may_stand_still(database: Database, home: Path) -> None:
    async def run() -> None:
        now_s = [0.0]
        profile = add_model(database, "slow")
        async with supervising(
            database, home, clock=lambda: now_s[0], patience_s=100.0
        ) as supervisor:
            job = await supervisor.submit("switch", service_id=1, profile_id=profile)
            seen: set[int] = set()
            while job.is_open:
                if (num_bytes := main_of(supervisor)["bytes_done"]) not in {None, *seen}:
                    seen.add(num_bytes)
                    now_s[0] += 90.0
                await asyncio.sleep(0.01)
            assert job.state == "done"
            assert now_s[0] > 200.0

    asyncio.run(run())


def test_a_new_console_starts_what_was_wanted(database: Database, home: Path) -> None:
    async def run() -> None:
        profile = add_model(database, "deaf")
        async with supervising(database, home, stop_s=0.1) as supervisor:
            await serve(supervisor, profile)
            pid = main_of(supervisor)["pid"]
        assert not psutil.pid_exists(pid)
        assert service_row(database).wanted == "running"
        async with supervising(database, home, stop_s=0.1) as supervisor:
            assert await until(lambda: main_of(supervisor)["state"] == "ready")
        set_row(database, auto_restart=False)
        async with supervising(database, home) as supervisor:
            found = main_of(supervisor)
            assert (found["state"], found["pid"]) == ("stopped", None)
            assert found["reason"] == "it ended with the console, and restarts are off"

    asyncio.run(run())


def test_a_fault_of_the_looks_leaves_no_process_behind(
    database: Database, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise RuntimeError("the transport is closed")

    async def run() -> None:
        profile = add_model(database, "a")
        async with supervising(database, home) as supervisor:
            await serve(supervisor, profile)
            pid = main_of(supervisor)["pid"]
            monkeypatch.setattr(Figures, "health", fail)
            found = await until(lambda: (x := main_of(supervisor))["state"] == "failed" and x)
            assert found["reason"] == "RuntimeError: the transport is closed"
            assert not psutil.pid_exists(pid)

    asyncio.run(run())
