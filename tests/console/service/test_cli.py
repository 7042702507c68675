"""`tightfit service` with a stand-in for systemctl."""

import json
import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from console.registry.database import Database
from console.registry.tables import Model, Profile
from console.service import cli
from console.service.systemd import Done, Systemd
from console.service.units import CONSOLE
from engine.errors import ConfigError

SERVER = "tightfit-server-7b.service"
BOTH = [SERVER, CONSOLE]


class Fake:
    """systemctl and journalctl: says what it is given, and keeps the calls."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.shown = {"LoadState": "loaded", "ActiveState": "active", "SubState": "running"}
        self.journal = ""
        self.refusal = ""

    def __call__(self, command: Sequence[str]) -> Done:
        self.calls.append(list(command))
        if self.refusal and command[0] == "systemctl" and "show" not in command:
            return Done(1, "", self.refusal)
        if command[0] == "journalctl":
            return Done(0, self.journal, "")
        shown = "".join(f"{key}={value}\n" for key, value in self.shown.items())
        return Done(0, shown if "show" in command else "", "")

    def verbs(self) -> list[list[str]]:
        """The calls that change something, without what is the same in all."""
        changing = (call for call in self.calls if "show" not in call and call[0] == "systemctl")
        return [[word for word in call[1:] if word != "--user"] for call in changing]


@pytest.fixture
def systemd() -> Fake:
    return Fake()


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry with models that are here."""
    path = tmp_path_factory.mktemp("registry") / "registry.db"
    with closing(Database.open(path)) as database, database.write() as session:
        for name in ("7b", "8b", "7b-x"):
            profiles = [
                Profile(name="default", is_default=True, settings={}),
                Profile(name="x", settings={}),
            ]
            model = Model(name=name, source="/m", kind="folder", path="/m", state="untested")
            model.profiles = profiles
            session.add(model)
    return path


@pytest.fixture
def folder(tmp_path: Path, registry: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "c d"))
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    shutil.copy(registry, tmp_path / "home")
    return tmp_path / "c d" / "systemd" / "user"


def install(systemd: Fake, *words: str) -> int:
    return cli.main(["install", "--profile", "7b", *words], systemd)


def test_install_writes_both_units_and_starts_them(folder: Path, systemd: Fake) -> None:
    assert install(systemd) == 0
    assert sorted(path.name for path in folder.iterdir()) == sorted(BOTH)
    assert systemd.verbs() == [
        ["daemon-reload"],
        ["enable", SERVER],
        ["restart", "--no-block", SERVER],
        ["enable", CONSOLE],
        ["restart", "--no-block", CONSOLE],
    ]
    assert all(call[1] == "--user" for call in systemd.calls)
    assert install(systemd, "--only", "server", "--no-start") == 0
    assert systemd.verbs()[5:] == [["daemon-reload"], ["enable", SERVER]]


def test_dry_run_prints_and_changes_nothing(
    folder: Path, systemd: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install(systemd, "--dry-run", "--system") == 0
    told = capsys.readouterr().out
    assert told.count("[Service]") == 2
    assert f"# /etc/systemd/system/{SERVER}" in told
    assert "User=tightfit" in told
    assert not folder.exists()
    assert systemd.calls == []


def test_flags_behind_two_dashes_are_the_programs(folder: Path, systemd: Fake) -> None:
    words = ["--only", "server", "--", "--port", "8001", "--drain-s", "100"]
    assert install(systemd, *words) == 0
    text = (folder / SERVER).read_text(encoding="utf-8")
    assert '"--profile" "7b" "--port" "8001" "--drain-s" "100"\n' in text
    assert "TimeoutStopSec=130\n" in text
    assert cli.main(["install", "--only", "console", "--", "--port", "7001"], systemd) == 0
    assert '"console" "--port" "7001"\n' in (folder / CONSOLE).read_text(encoding="utf-8")


def test_start_gives_a_unit_that_failed_a_new_beginning(folder: Path, systemd: Fake) -> None:
    install(systemd)
    systemd.calls.clear()
    systemd.shown["ActiveState"] = "failed"
    assert cli.main(["start", "--profile", "7b"], systemd) == 0
    assert systemd.verbs() == [["reset-failed", SERVER], ["start", "--no-block", SERVER]]


def test_uninstall_takes_the_console_with_the_last_server(folder: Path, systemd: Fake) -> None:
    install(systemd)
    cli.main(["install", "--profile", "8b", "--only", "server"], systemd)
    systemd.calls.clear()
    assert cli.main(["uninstall", "--profile", "8b"], systemd) == 0
    assert systemd.verbs() == [
        ["stop", "tightfit-server-8b.service"],
        ["disable", "tightfit-server-8b.service"],
        ["daemon-reload"],
    ]
    assert cli.main(["uninstall", "--profile", "7b", "--dry-run"], systemd) == 0
    assert cli.installed("user") == [CONSOLE, SERVER]
    assert cli.main(["uninstall", "--profile", "7b"], systemd) == 0
    assert list(folder.iterdir()) == []


def test_status_has_the_last_line_of_the_log_that_is_none_of_a_request(
    folder: Path, systemd: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    install(systemd, "--only", "server")
    assert cli.main(["status"], systemd) == 0
    systemd.shown |= {"ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": "78"}
    systemd.journal = 'start\nmodel: expected GiB\n{"path": "/v1"}\n\n'
    capsys.readouterr()
    assert cli.main(["status"], systemd) == cli.EXIT_NOT_RUNNING
    told = capsys.readouterr().out
    assert "failed" in told
    assert "  model: expected GiB\n" in told
    assert systemd.calls[-1][0] == "journalctl"
    assert "--identifier=tightfit-server-7b" in systemd.calls[-1]
    cli.main(["status", "--profile", "7b", "--json"], systemd)
    [unit] = json.loads(capsys.readouterr().out)["units"]
    assert (unit["exit_code"], unit["error"], unit["pid"]) == (78, "model: expected GiB", None)


def test_a_server_that_said_why_it_failed_is_believed(systemd: Fake) -> None:
    systemd.shown |= {"Result": "exit-code", "StatusText": "failed: 3 GiB short. Best fix"}
    systemd.journal = "3 GiB short.\nBest fix\n"
    assert Systemd("user", systemd).state(SERVER).error == "failed: 3 GiB short. Best fix"


def test_what_systemd_says_is_unknown_where_it_says_nothing(systemd: Fake) -> None:
    systemd.shown = {}
    state = Systemd("system", systemd).state(SERVER)
    assert {state.active, state.pid, state.exit_code, state.error} == {None}
    assert "--user" not in systemd.calls[0]


def test_a_refusal_of_systemd_is_told(
    folder: Path, systemd: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    systemd.refusal = "Failed to connect to bus"
    assert install(systemd) == cli.EXIT_REFUSED
    assert "systemctl --user daemon-reload: Failed to connect to bus" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["install"], "expected --profile NAME"),
        (["install", "--profile", "7b", "--account", "x"], "expected --system beside --account x"),
        (["install", "--profile", "7b", "--system", "--account", "no one"], "found no no one"),
        (["install", "--profile", "7b/none"], "profile: expected one of default, x, got 'none'"),
        (["install", "--profile", "7b", "--", "--port", "1"], "expected --only server or"),
        (["install", "--profile", "7b", "--only", "server", "--", "--prt", "1"], "mean --port"),
        (["stop", "--profile", "7b", "--", "--port", "1"], "expected -- with install alone"),
        (["start", "--profile", "7b"], "got none"),
        (["status", "--profile", "7b"], "got none"),
    ],
)
def test_refusals(folder: Path, systemd: Fake, words: Sequence[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        cli.main(words, systemd)
    assert systemd.calls == []


def test_a_file_of_another_program_stays(folder: Path, systemd: Fake) -> None:
    folder.mkdir(parents=True)
    (folder / CONSOLE).write_text("[Unit]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="got one of another program"):
        install(systemd)
    with pytest.raises(ConfigError, match="got another one"):
        cli.main(["uninstall", "--only", "console"], systemd)
    install(systemd, "--only", "server")
    cli.main(["install", "--profile", "7b-x", "--only", "server"], systemd)
    with pytest.raises(ConfigError, match="of 7b/x, got one of 7b-x"):
        cli.main(["install", "--profile", "7b/x", "--only", "server"], systemd)


def test_no_systemd(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    assert cli.main(["install", "--profile", "7b"]) == cli.EXIT_REFUSED
    assert "expected systemd, found no systemctl" in capsys.readouterr().err
