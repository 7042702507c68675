"""Servers as units of systemd, with a stand-in for systemctl."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from console.registry.checks import FieldError
from console.registry.database import Database
from console.registry.tables import Profile, Service
from console.service.systemd import Done, ServiceError
from console.service.units import Place, server_unit
from console.supervise.units import Installed, Journal, find_units, read_unit
from tests.console.supervise.conftest import add_model, main_of, serve, supervising, until

UNIT = "tightfit-server-deaf.service"
OTHER = "tightfit-server-other.service"


class StandIn:
    """systemctl and journalctl of units that are all alike."""

    def __init__(self) -> None:
        self.active, self.pid, self.error = "inactive", 0, ""
        self.calls: list[list[str]] = []
        self.refusal = ""

    def __call__(self, command: Sequence[str]) -> Done:
        self.calls.append(list(command))
        if command[0] == "journalctl":
            return Done(0, "one\ntwo\n", "")
        if "show" in command:
            text = f"LoadState=loaded\nActiveState={self.active}\nMainPID={self.pid}\nResult="
            text += "exit-code" if self.active == "failed" else "success"
            text += f"\nStatusText={self.error}\n"
            units = [word for word in command if word.endswith(".service")]
            return Done(0, "\n".join([text] * len(units)), "")
        if self.refusal:
            return Done(1, "", self.refusal)
        if "start" in command:
            self.active = "failed" if self.error else "active"
        if "stop" in command or "reset-failed" in command:
            self.active = "inactive"
        return Done(0, "", "")


def installed(unit: str = UNIT, **found: Any) -> Installed:
    return Installed(scope="user", unit=unit, profile="deaf/default", **found)


def rows_of(database: Database) -> list[str]:
    with database.read() as session:
        return list(session.scalars(select(Service.name).where(Service.kind == "systemd")))


def unit_of(supervisor: Any) -> dict[str, Any]:
    found: dict[str, Any] = supervisor.snapshot()["services"][-1]
    return found


def test_a_unit_is_shown_started_and_stopped(database: Database, home: Path) -> None:
    async def run() -> None:
        systemd = StandIn()
        profile = add_model(database, "deaf")
        ports = [8000]
        more = {"run_systemctl": systemd, "list_units": lambda: [installed(port=ports[-1])]}
        async with supervising(database, home, more=more, stop_s=0.1) as supervisor:
            await serve(supervisor, profile)
            systemd.pid = main_of(supervisor)["pid"]
            ports.append(int(str(supervisor.base_url(1)).rpartition(":")[2]))
            await supervisor._look_at_units()
            found = await until(lambda: (x := unit_of(supervisor))["kind"] == "systemd" and x)
            assert (found["name"], found["unit"]) == ("tightfit-server-deaf", UNIT)
            assert (found["state"], found["model"], found["profile"]) == (
                "stopped",
                "deaf",
                "default",
            )
            one = {"service_id": found["id"]}
            job = await supervisor.wait(await supervisor.submit("start", **one))
            assert (job.state, job.reason) == ("done", None)
            found = unit_of(supervisor)
            assert (found["state"], found["effective"]["max_num_seqs"]) == ("ready", 8)
            assert (found["pid"], found["load"]["running"]) == (systemd.pid, 3)
            assert ["systemctl", "--user", "start", "--no-block", UNIT] in systemd.calls
            lines, after = supervisor.log(found["id"])
            assert [line["text"] for line in lines] == ["one", "two"]
            assert supervisor.log(found["id"], after) == ([], after)
            await supervisor.wait(await supervisor.submit("stop", **one))
            assert unit_of(supervisor)["state"] == "stopped"
            systemd.error = "failed: it does not fit"
            job = await supervisor.wait(await supervisor.submit("start", **one))
            assert (job.state, job.reason) == ("failed", "failed: it does not fit")
            await supervisor.wait(await supervisor.submit("reset", **one))
            assert unit_of(supervisor)["state"] == "stopped"
            with pytest.raises(FieldError, match=f"the unit {UNIT}, whose file names"):
                await supervisor.submit("switch", profile_id=profile, **one)
        more["list_units"] = list
        async with supervising(database, home, more=more, stop_s=0.1) as supervisor:
            await until(lambda: len(supervisor.snapshot()["services"]) == 1)

    asyncio.run(run())


def test_units_are_those_that_were_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "systemd" / "user"
    folder.mkdir(parents=True)
    for name, text in {
        UNIT: "[Unit]\nX-Tightfit=deaf/default\n",
        "tightfit-console.service": "[Unit]\nX-Tightfit=console\n",
        "tightfit-other.service": "[Unit]\n",
        "other.service": "[Unit]\nX-Tightfit=deaf\n",
    }.items():
        (folder / name).write_text(text, encoding="utf-8")
    assert [each for each in find_units() if each.scope == "user"] == [installed()]


def test_a_journal_gives_each_line_once() -> None:
    looks = [["a", "b"], ["b", "c", "c"], ["b", "c", "c"], ["x"]]
    journal = Journal(lambda: looks.pop(0))
    lines, place = journal.after(None)
    assert lines == ["a", "b"]
    lines, place = journal.after(place)
    assert lines == ["c", "c"]
    assert journal.after(place) == ([], place)
    assert journal.after(place) == (["x"], place + 1)


def test_a_unit_is_read_as_it_was_written(tmp_path: Path) -> None:
    home = tmp_path / 'a "b" 50% $x'
    place = Place(scope="user", home=home)
    flags = ["--host=::", "--port", "8007", "--max-model-len", "32"]
    written = server_unit("deaf/default", place, flags, drain_s=30.0)
    found = read_unit("user", UNIT, written.text)
    assert found == installed(host="::", port=8007, home=home, max_model_len="32")
    assert found.url == "http://[::1]:8007"
    plain = read_unit("user", UNIT, server_unit("deaf/default", place, drain_s=30.0).text)
    assert plain is not None
    assert (plain.url, plain.max_model_len) == ("http://127.0.0.1:8000", None)


def test_another_context_window_goes_to_the_profile_and_restarts_the_unit(
    database: Database, home: Path
) -> None:
    async def run() -> None:
        systemd, profile = StandIn(), add_model(database, "deaf")
        systemd.active, found = "active", [installed(port=0, home=home)]
        more = {"run_systemctl": systemd, "list_units": lambda: found}
        async with supervising(database, home, more=more) as supervisor:
            unit = await until(lambda: (x := unit_of(supervisor))["kind"] == "systemd" and x)
            wish = {"service_id": unit["id"], "max_model_len": 32}
            job = await supervisor.wait(await supervisor.submit("set_context", **wish))
            assert (job.state, job.reason) == ("done", None)
            with database.read() as session:
                assert session.get_one(Profile, profile).settings["max_model_len"] == 32
            changes = [call[2] for call in systemd.calls if "show" not in call]
            assert changes == ["stop", "start"]
            assert unit_of(supervisor)["requested"]["max_model_len"] == 32
            for other, words in {
                installed(home=home / "other"): "which reads .*other",
                installed(max_model_len="16"): "with --max-model-len 16",
            }.items():
                found[:] = [other]
                await supervisor._look_at_units()
                with pytest.raises(FieldError, match=words):
                    await supervisor.submit("set_context", **wish)

    asyncio.run(run())


def test_all_units_are_asked_for_at_once_and_vanish_with_their_files(
    database: Database, home: Path
) -> None:
    async def run() -> None:
        systemd, found = StandIn(), [installed(), installed(OTHER)]
        more = {"run_systemctl": systemd, "list_units": lambda: found}
        async with supervising(database, home, more=more) as supervisor:
            await until(lambda: len(supervisor.snapshot()["services"]) == 3)
            assert [call[3:5] for call in systemd.calls] == [[UNIT, OTHER]]
            systemd.active = "failed"
            await supervisor._look_at_units()
            assert [each["state"] for each in supervisor.snapshot()["services"][1:]] == [
                "failed",
                "failed",
            ]
            del found[1]
            await supervisor._look_at_units()
            assert [each["unit"] for each in supervisor.snapshot()["services"]] == [None, UNIT]
            assert len(rows_of(database)) == 1

    asyncio.run(run())


def test_without_systemd_no_unit_is_shown(database: Database, home: Path) -> None:
    asked: list[Sequence[str]] = []

    def absent(command: Sequence[str]) -> Done:
        asked.append(command)
        raise ServiceError("found no systemctl")

    async def run() -> None:
        more = {"run_systemctl": absent, "list_units": lambda: [installed()]}
        async with supervising(database, home, more=more) as supervisor:
            await until(lambda: asked)
            await supervisor._look_at_units()
            assert [each["kind"] for each in supervisor.snapshot()["services"]] == ["own"]

    asyncio.run(run())
