"""`tightfit console` as a process: its port, its address, its end."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from server.lifecycle import EXIT_CONFIG, EXIT_USAGE

ADDRESS = "console at "


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """Put back the handlers that the loop of a command within this process leaves behind."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@contextmanager
def started(home: Path, *flags: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", "-m", "tightfit", "console", *flags]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        env={**os.environ, "TIGHTFIT_HOME": str(home), **env},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        if line.startswith(ADDRESS):
            return line.removeprefix(ADDRESS).partition(",")[0]
        said.append(line)
    raise AssertionError(f"it ended before it had an address: {''.join(said)}")


@pytest.mark.thorough
def test_it_answers_until_it_is_told_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from console.run import main

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        told = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        with started(tmp_path / "a home [1]", "--port", "0", **told) as process:
            url = address(process)
            assert "READY=1" in manager.recv(4096).decode()
            assert httpx.get(f"{url}/health").json() == {"state": "ready"}
            page = httpx.get(url)
            assert page.status_code == 200
            assert "Nothing is served" in page.text or "main" in page.text
            assert httpx.get(f"{url}/api/snapshot").json()["services"][0]["name"] == "main"
            monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "a home [1]"))
            assert main(["--port", "0"]) == EXIT_CONFIG
            assert "expected no other console on the registry" in capfd.readouterr().err
            with httpx.stream("GET", f"{url}/api/events") as stream:
                next(stream.iter_lines())
                begin_s = time.monotonic()
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 0
                assert time.monotonic() - begin_s < 20
            assert manager.recv(4096).decode() == "STOPPING=1"


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (("--host", "0.0.0.0"), EXIT_CONFIG, "host: expected this machine's own address"),
        (("--prot", "1"), EXIT_USAGE, "unknown argument --prot. Did you mean --port?"),
        (("--port", "x"), EXIT_CONFIG, "port: expected an integer, got 'x'"),
    ],
)
def test_what_is_refused(
    flags: tuple[str, ...], code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from console.run import main

    assert main(list(flags)) == code
    assert said in capfd.readouterr().err


def test_a_port_that_is_taken_names_who_has_it(capfd: pytest.CaptureFixture[str]) -> None:
    from console.run import main

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["--port", str(port)]) == 1
    assert f"got {port}, which process {os.getpid()} (" in capfd.readouterr().err
