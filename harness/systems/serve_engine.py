"""This project's server, started with a point's settings and measured through HTTP."""

import tempfile
from operator import attrgetter
from typing import Any, Final

import yaml

from catalogue.own_server import OwnServer
from engine.asked.config import EngineConfig
from engine.asked.keywords import keywords_of
from engine.errors import EngineError
from harness.config.schema import SystemConfig
from harness.systems.door import EngineDoor, Progress
from harness.systems.http_engine import HTTPEngine, remote_door

END_S: Final = 20.0
"""Seconds that the server has to end by itself."""
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
    """A client of a server that it started, in the worker's process group, and ends."""

    def __init__(self, config: EngineConfig, *, progress: Progress) -> None:
        settings = settings_of(config)
        self._file = tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8")  # noqa: SIM115
        yaml.safe_dump(settings, self._file)
        self._file.flush()
        self._server = OwnServer(["--config", self._file.name])
        try:
            progress("serve", 0, 0)
            url = self._server.wait_ready()
            if url is None:
                lines = " ".join(self._server.last_lines)
                raise EngineError(f"system=serve: the server ended before it was ready: {lines}")
            super().__init__(config, SystemConfig(kind="http", base_url=f"{url}/v1"))
        except BaseException:
            self._end()
            raise

    def effective(self) -> dict[str, Any]:
        """Return what is known of the server."""
        return super().effective() | {"system": "serve", "base_url": None}

    def close(self) -> None:
        """Close the connections and end the server."""
        super().close()
        self._end()

    def _end(self) -> None:
        self._server.end(END_S)
        self._file.close()


def serve_door() -> EngineDoor:
    """Return the door to a server that is started with the point's settings."""
    return remote_door(ServeEngine)
