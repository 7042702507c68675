"""This project's server, started with a point's settings and measured through HTTP."""

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections import deque
from operator import attrgetter
from typing import Any, Final

import yaml

from catalogue.processes import module_command, python_path
from engine.asked.config import EngineConfig
from engine.asked.keywords import keywords_of
from engine.errors import EngineError
from harness.config.schema import SystemConfig
from harness.systems.door import EngineDoor, Progress
from harness.systems.http_engine import HTTPEngine, remote_door

END_S: Final = 20.0
"""Seconds that the server has to end by itself."""
LAST_LINES: Final = 5
NOT_SENT: Final = (
    "model",
    "model_name",
    "spec",
    "facts_folder",
    "kept_folder",
    "emulated_kv_tokens",
)
"""Settings that the server takes from its model, or that follow from a scenario's requests."""
PENDING: Final = 2**20
"""Requests that may wait: a scenario bounds them itself."""


def settings_of(config: EngineConfig) -> dict[str, Any]:
    """Return what the server's file of settings holds for a configuration.

    Raises:
        EngineError: The model's weights are neither in a folder nor made up by its name.
    """
    model = config.model
    if model.path is None and model.load_format != "dummy":
        raise EngineError("system=serve: expected a model with a folder, got none.")
    found: dict[str, Any] = {}
    for name, setting in keywords_of().items():
        value = attrgetter(setting.path)(config)
        if name not in NOT_SENT and value != setting.default:
            found[name] = list(value) if isinstance(value, list) else value
    found["measured_rates"] = dict(config.measured_rates)
    return {name: value for name, value in found.items() if value not in ({}, None)} | {
        "model": model.path or model.name,
        "served_model_name": [model.name],
        "generation_config": "vllm",  # requests sample as the engine alone would
        "port": 0,
        "access_log": False,
        "max_num_queued_reqs": PENDING,
    }


class ServeEngine(HTTPEngine):
    """A client of a server that it started, and ends."""

    def __init__(self, config: EngineConfig, *, progress: Progress) -> None:
        self._server = _Server(settings_of(config))
        try:
            progress("serve", 0, 0)
            url = self._server.wait_ready()
            super().__init__(config, SystemConfig(kind="http", base_url=f"{url}/v1"))
        except BaseException:
            self._server.end()
            raise

    def effective(self) -> dict[str, Any]:
        """Return what is known of the server."""
        return super().effective() | {"system": "serve", "base_url": None}

    def close(self) -> None:
        """Close the connections and end the server."""
        super().close()
        self._server.end()


class _Server:
    """A server's process, in the worker's process group: it ends with that."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._file = tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8")  # noqa: SIM115
        yaml.safe_dump(settings, self._file)
        self._file.flush()
        self._process = subprocess.Popen(
            [*module_command("server"), "--config", self._file.name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": python_path(os.environ.get("PYTHONPATH", ""))},
        )
        self._reader: threading.Thread | None = None

    def wait_ready(self) -> str:
        """Return its address once it serves.

        Raises:
            EngineError: It ended instead.
        """
        assert self._process.stderr is not None
        lines, url = deque[str](maxlen=LAST_LINES), ""
        for line in self._process.stderr:
            lines.append(line.rstrip())
            if line.startswith("listening on "):
                url = line.split()[2].rstrip(",")
            if line.startswith("ready: "):
                stream = self._process.stderr
                self._reader = threading.Thread(target=deque, args=(stream, 0), daemon=True)
                self._reader.start()
                return url
        raise EngineError(f"system=serve: the server ended before it was ready: {' '.join(lines)}")

    def end(self) -> None:
        """End the process and what it started."""
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._process.kill()
        self._process.wait()
        if self._reader is not None:
            # Its engine holds the other end of stderr; one that is stopped would keep it open.
            self._reader.join(END_S)
        if self._reader is None or not self._reader.is_alive():
            assert self._process.stderr is not None
            self._process.stderr.close()
        self._file.close()


def serve_door() -> EngineDoor:
    """Return the door to a server that is started with the point's settings."""
    return remote_door(ServeEngine)
