"""Servers as units of systemd, with a stand-in for systemctl."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from console.registry.checks import FieldError
from console.registry.database import Database
from console.service.systemd import Done
from console.supervise.units import Journal, find_units
from tests.console.supervise.conftest import add_model, main_of, serve, supervising, until

UNIT = "tightfit-server-deaf.service"


class StandIn:
    """systemctl and journalctl of one unit."""

    def __init__(self) -> None:
        self.active, self.pid, self.error = "inactive", 0, ""
        self.calls: list[list[str]] = []

    def __call__(self, command: Sequence[str]) -> Done:
        self.calls.append(list(command))
        if command[0] == "journalctl":
            return Done(0, "one\ntwo\n", "")
        if "show" in command:
            text = f"LoadState=loaded\nActiveState={self.active}\nMainPID={self.pid}\nResult="
            text += "exit-code" if self.active == "failed" else "success"
            return Done(0, f"{text}\nStatusText={self.error}\n", "")
        if "start" in command:
            self.active = "failed" if self.error else "active"
        if "stop" in command or "reset-failed" in command:
            self.active = "inactive"
        return Done(0, "", "")


def unit_of(supervisor: Any) -> dict[str, Any]:
    found: dict[str, Any] = supervisor.snapshot()["services"][-1]
    return found


def test_a_unit_is_shown_started_and_stopped(database: Database, home: Path) -> None:
    async def run() -> None:
        systemd = StandIn()
        profile = add_model(database, "deaf")
        more = {"run_systemctl": systemd, "list_units": lambda: [("user", UNIT, "deaf/default")]}
        async with supervising(database, home, more=more, stop_s=0.1) as supervisor:
            await serve(supervisor, profile)
            systemd.pid = main_of(supervisor)["pid"]
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
            with pytest.raises(FieldError, match=f"expected a service that .* the unit {UNIT}"):
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
    assert [each for each in find_units() if each[0] == "user"] == [("user", UNIT, "deaf/default")]


def test_a_journal_gives_each_line_once() -> None:
    looks = [["a", "b"], ["b", "c", "c"], ["b", "c", "c"], ["x"]]
    journal = Journal(lambda: looks.pop(0))
    lines, place = journal.after(None)
    assert lines == ["a", "b"]
    lines, place = journal.after(place)
    assert lines == ["c", "c"]
    assert journal.after(place) == ([], place)
    assert journal.after(place) == (["x"], place + 1)
