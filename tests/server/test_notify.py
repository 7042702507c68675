"""What a service manager hears, on a socket of the test's own."""

import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from engine.errors import ConfigError
from server.engine_link import EngineLink
from server.lifecycle import EXIT_CONFIG, Lifecycle
from server.notify import EXTEND_S, Notifier, Reporter
from server.wire import Beat
from tests.server.launch import open_stream, serving, wait_for

EXTENDED = f"EXTEND_TIMEOUT_USEC={EXTEND_S * 1e6:.0f}"


class Manager:
    """The end of the socket that a service manager has."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self.told: list[list[str]] = []

    def hear(self) -> list[str]:
        """Return the lines of all messages so far."""
        while True:
            try:
                self.told.append(self._listening.recv(4096).decode().split("\n"))
            except BlockingIOError:
                return [line for message in self.told for line in message]

    def new(self) -> list[str]:
        """Return the lines since the last call."""
        self.told.clear()
        return self.hear()


@contextmanager
def managing(address: str) -> Iterator[Manager]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.setblocking(False)
        listening.bind(address)
        yield Manager(listening)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    with managing(str(tmp_path / "a b")) as found:
        yield found


def test_the_address_may_be_abstract_and_is_not_handed_on() -> None:
    name = f"tightfit-test-{os.getpid()}"
    variables = {"NOTIFY_SOCKET": f"@{name}", "WATCHDOG_USEC": "3000000", "OTHER": "x"}
    with managing(f"\0{name}") as manager:
        notifier = Notifier.from_environment(variables)
        assert notifier is not None
        notifier.tell(READY="1", STATUS="two\nlines")
        assert manager.told == []
        manager.hear()
        assert manager.told == [["READY=1", "STATUS=two lines"]]
    assert notifier.watchdog_s == 3
    assert variables == {"OTHER": "x"}


def test_no_socket_no_notifier() -> None:
    assert Notifier.from_environment({"WATCHDOG_USEC": "1"}) is None


@pytest.mark.parametrize(("pid", "watchdog_s"), [("", 1.0), ("own", 1.0), ("1", None)])
def test_the_watchdog_may_be_for_another_process(pid: str, watchdog_s: float | None) -> None:
    pid = str(os.getpid()) if pid == "own" else pid
    variables = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": pid}
    notifier = Notifier.from_environment(variables)
    assert notifier is not None
    assert notifier.watchdog_s == watchdog_s


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"NOTIFY_SOCKET": "vsock:2:1"}, "NOTIFY_SOCKET: expected a path or @"),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "soon"}, "got 'soon'"),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "0"}, "above 0"),
    ],
)
def test_what_cannot_be_understood_is_refused(variables: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Notifier.from_environment(variables)


def test_a_manager_that_has_gone_is_logged_once(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a server leaves it that ran in this process (log_to_stderr).
    monkeypatch.setattr(logging.getLogger("server"), "propagate", False)
    logged: list[logging.LogRecord] = request.getfixturevalue("logged")
    notifier = Notifier(str(tmp_path / "none"))
    notifier.tell(WATCHDOG="1")
    logging.getLogger("asyncio").warning("a loop of an earlier test was slow")
    notifier.tell(WATCHDOG="1")
    assert [record.getMessage() for record in logged if record.name == "server"] == [
        "NOTIFY_SOCKET: the service manager does not listen: [Errno 2] No such file or directory"
    ]


class Scene:
    """A reporter with a clock of the test's."""

    def __init__(self, tmp_path: Path, watchdog_s: float | None = None) -> None:
        self.now_s, self.beats = 0.0, 0
        self.lifecycle = Lifecycle(lambda: self.now_s)
        notifier = Notifier(str(tmp_path / "a b"), watchdog_s)
        self.reporter = Reporter(notifier, self.lifecycle, lambda: self.beats, lambda: self.now_s)

    def after(self, seconds: float) -> None:
        self.now_s += seconds
        self.reporter.look()


def test_a_load_is_extended_only_while_it_makes_progress(tmp_path: Path, manager: Manager) -> None:
    scene = Scene(tmp_path)
    scene.lifecycle.enter("loading")
    scene.lifecycle.note_load("weights", 2**20, 4 * 2**20)
    scene.after(0)
    assert manager.new() == ["STATUS=loading: weights, 1 of 4 MiB", EXTENDED]
    scene.after(100)
    assert manager.new() == []
    scene.lifecycle.note_load("weights", 2 * 2**20, 4 * 2**20)
    scene.after(0.25)
    assert manager.new() == ["STATUS=loading: weights, 2 of 4 MiB", EXTENDED]
    scene.lifecycle.note_load("weights", 3 * 2**20, 4 * 2**20)
    scene.after(0.25)
    assert manager.new() == []  # one line a second is enough
    scene.lifecycle.note_load("graphs", 0, 0)
    scene.after(0.25)
    assert manager.new() == ["STATUS=loading: graphs", EXTENDED]
    scene.lifecycle.note_load("fetch", 2**20, 0)
    scene.after(1)
    assert manager.new() == ["STATUS=loading: fetch, 1 MiB", EXTENDED]
    scene.lifecycle.enter("ready")
    scene.after(0)
    assert manager.new() == ["READY=1", "STATUS=ready"]
    scene.lifecycle.enter("failed", "no\nmore")
    scene.after(0)
    assert manager.new() == ["STOPPING=1", "STATUS=failed: no more"]


def test_the_watchdog_hears_of_every_half_of_its_time_while_the_engine_lives(
    tmp_path: Path, manager: Manager
) -> None:
    scene = Scene(tmp_path, watchdog_s=10)
    scene.lifecycle.enter("loading")
    scene.beats = 1
    scene.after(0)
    assert "WATCHDOG=1" not in manager.new()
    scene.lifecycle.enter("ready")
    scene.after(0)
    assert "WATCHDOG=1" in manager.new()
    scene.beats = 2
    scene.after(4.9)
    assert manager.new() == []
    scene.after(0.1)
    assert manager.new() == ["WATCHDOG=1"]
    scene.after(20)
    assert manager.new() == []  # the engine has said nothing
    scene.beats = 3
    scene.after(0)
    assert manager.new() == ["WATCHDOG=1"]


def test_an_engine_with_work_lives_by_its_steps() -> None:
    link = EngineLink(Lifecycle(), on_plan=lambda _: None)
    for counts, live in (
        ({}, 1),  # it loads
        ({"running": 0, "waiting": 0, "steps": 5}, 2),
        ({"running": 1, "waiting": 0, "steps": 6}, 3),
        ({"running": 1, "waiting": 0, "steps": 6}, 3),
        ({"running": 0, "waiting": 1, "steps": 6}, 3),
        ({"running": 1, "waiting": 0, "steps": 7}, 4),
    ):
        link._take(Beat(dict(counts)))
        assert link.num_live_beats == live


@pytest.mark.slow
def test_a_server_tells_of_its_load_its_life_and_its_end(
    tiny_model: Path, tmp_path: Path, manager: Manager
) -> None:
    asked = {"NOTIFY_SOCKET": str(tmp_path / "a b"), "WATCHDOG_USEC": "400000"}
    with serving(tiny_model, **asked) as served:
        wait_for(lambda: "READY=1" in manager.hear(), served)
        before = manager.hear()
        before = before[: before.index("READY=1")]
        assert EXTENDED in before
        assert any(each.startswith("STATUS=loading: ") for each in before)
        wait_for(lambda: manager.hear().count("WATCHDOG=1") > 2, served)
        served.process.send_signal(signal.SIGTERM)
        assert served.end() == 0
    assert "STOPPING=1" in manager.hear()


@pytest.mark.slow
def test_a_stopped_engine_stops_the_watchdog(
    tiny_model: Path, tmp_path: Path, manager: Manager
) -> None:
    asked = {"NOTIFY_SOCKET": str(tmp_path / "a b"), "WATCHDOG_USEC": "400000"}
    with serving(tiny_model, **asked) as served, httpx.Client(timeout=60) as client:
        response = open_stream(client, served)
        wait_for(lambda: manager.hear().count("WATCHDOG=1") > 2, served)
        served.engine.suspend()
        response.close()
        manager.new()
        wait_for(lambda: "STOPPING=1" in manager.hear(), served)
        # A sign of life that was on its way, and none in the 3 s behind it.
        assert manager.hear().count("WATCHDOG=1") <= 2
        assert "is stopped (SIGSTOP)" in " ".join(manager.hear())
        assert served.end() == 1


@pytest.mark.slow
def test_a_refusal_is_told(tiny_model: Path, tmp_path: Path, manager: Manager) -> None:
    asked = {"NOTIFY_SOCKET": str(tmp_path / "a b")}
    with serving(tiny_model, "--max-model-len", "many", is_ready=False, **asked) as served:
        assert served.end() == EXIT_CONFIG
    assert "STATUS=refused: max-model-len: expected an integer, got 'many'." in manager.hear()
