"""A console that is killed while it serves and tests: what ends, what goes on, what is shown."""

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from catalogue.files import models_folder
from console.registry.database import Database
from console.registry.models import Models
from console.registry.tables import Service
from console.supervise.supervisor import MAIN
from tests.console.test_run import address, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SIZES = {"num_requests": 16}
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home whose registry has glass as `tiny`, and a service with a free port."""
    found = tmp_path / "home"
    shutil.copytree(models_folder() / "glass", found / "models" / "tiny")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    database = Database.open(found / "registry.db")
    with database.write() as session:
        session.add(Service(name=MAIN, kind="own", port=port, failures=[]))
    Models(database).add(str(found / "models" / "tiny"), settings={"max_model_len": 128})
    database.close()
    return found


class API:
    """The API of a console."""

    def __init__(self, url: str) -> None:
        self._url = url

    def post(self, path: str, body: dict[str, Any]) -> None:
        found = httpx.post(self._url + path, json=body, trust_env=False, timeout=30)
        found.raise_for_status()

    def get(self, path: str) -> Any:
        return httpx.get(self._url + path, trust_env=False, timeout=30).json()

    def main(self) -> dict[str, Any]:
        return self.get("/api/snapshot")["services"][0]

    def jobs(self) -> list[dict[str, Any]]:
        return self.get("/api/snapshot")["jobs"]

    def test(self) -> dict[str, Any]:
        return self.get("/api/tests")["tests"][0]


def until(found: Callable[[], Any], limit_s: float = 120.0) -> Any:
    """Return what a function returns once it is true."""
    end_s = time.monotonic() + limit_s
    while not (value := found()):
        assert time.monotonic() < end_s, "it did not come to pass"
        time.sleep(0.1)
    return value


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("is_test_killed", [False, True])
def test_a_killed_console_leaves_its_test_to_the_next_one(
    home: Path, *, is_test_killed: bool
) -> None:
    with started(home, "--port", "0", **HIDDEN) as console:
        api = API(address(console))
        api.post("/api/services/1/switch", {"profile_id": 1})
        server = until(lambda: (x := api.main())["state"] == "ready" and x["pid"])
        api.post("/api/tests", {"profile_id": 1, **SIZES})
        harness = until(lambda: (x := api.test())["progress"] and x["pid"])
        console.kill()
        console.wait()
        until(lambda: has_ended(server))  # the kernel ends it with the console
        assert not has_ended(harness)
    if is_test_killed:
        below = psutil.Process(harness).children(recursive=True)
        for process in (psutil.Process(harness), *below):
            os.kill(process.pid, signal.SIGKILL)
        psutil.wait_procs(below, timeout=30)
    with started(home, "--port", "0", **HIDDEN) as console:
        api = API(address(console))
        if is_test_killed:
            test = api.test()
            assert (test["status"], api.jobs()) == ("interrupted", [])
            assert "ended without a record" in test["reason"]
        else:
            assert api.jobs()[0]["action"] == "test"
            test = until(lambda: (x := api.test())["status"] != "running" and x)
            assert (test["status"], test["pid"]) == ("finished", harness)
            assert test["metrics"]["throughput/output_tok_s"] > 0
            assert until(lambda: api.jobs()[0]["state"] == "done")
        assert until(lambda: api.main()["state"] == "ready")  # automatic restart is on
        console.send_signal(signal.SIGTERM)
        assert console.wait(60) == 0
