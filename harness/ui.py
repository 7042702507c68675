"""`python -m harness.ui [--port N] [--store URI]`: MLflow's pages of all runs, in one process.

`mlflow ui` imports MLflow five times over (its command, four workers) and starts a runner of jobs
that nothing here uses; on two cores that took more than half a minute. This starts its server once.
"""

import gc
import os
import socket
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from catalogue.files import make_home
from catalogue.terminal import EXIT_OK, CommandParser, say
from engine.errors import ConfigError
from harness.config.schema import TrackingConfig
from harness.point.full_disk import exit_code
from harness.tracking.mlflow import (
    DATABASES,
    ENVIRONMENT,
    artifact_root,
    prepare_store,
    sqlite_path,
    store_uri,
)
from reports.record.text import experiment_page

_MOST_PORT = 65535


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the pages until Ctrl-C; return the exit code."""
    parser = CommandParser(
        prog="tightfit ui", description="Show all runs in MLflow, in the browser."
    )
    parser.add_argument("--port", type=int, default=5000, help="port (default: 5000)")
    parser.add_argument("--host", default="127.0.0.1", help="address (default: this machine only)")
    parser.add_argument("--store", help="tracking URI (default: the database in TIGHTFIT_HOME)")
    parser.add_argument(
        "--experiment",
        default=TrackingConfig().experiment,
        help="experiment whose address is printed",
    )
    asked = parser.parse_args(arguments)
    home = make_home()
    store = asked.store or store_uri(TrackingConfig(), home)
    if asked.store is not None:
        check_store(asked.store)
    if not 0 <= asked.port <= _MOST_PORT:
        raise ConfigError(
            f"--port: expected an integer >= 0 and <= {_MOST_PORT}, got {asked.port}. 0 takes a "
            "free one."
        )
    with listening(asked.host, asked.port) as listener:
        file = sqlite_path(store)
        is_new = file is not None and not file.exists()
        first = "; there are no runs yet, so its database is made first" if is_new else ""
        say(f"starting MLflow: importing it takes about 5 s of one core{first}")
        serve(store, home, listener, asked.experiment)
    return EXIT_OK


def check_store(store: str) -> None:
    """Raise ConfigError for a store that is no database, or for a file that is absent."""
    if not store.startswith(DATABASES):
        is_server = store.startswith("http")
        hint = "A file of runs: sqlite:////PATH."
        if is_server:
            hint = f"A server shows its own pages: open {store} in the browser."
        names = ", ".join(f"{name}://" for name in DATABASES)
        raise ConfigError(f"--store: expected a database ({names}), got {store!r}. {hint}")
    file = sqlite_path(store)
    if file is not None and not file.is_file():
        raise ConfigError(
            f"--store: expected a file of runs, found none at {file}. Runs write it with "
            f"tracking.uri={store}."
        )


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens there.

    Raises:
        ConfigError: it cannot.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        why = str(error.strerror).partition(" (")[0]
        raise ConfigError(
            f"tightfit ui: cannot listen on {host}, port {port}: {why}. Use another port (--port "
            "0 takes a free one), or an address of this machine as --host."
        ) from error


def address_of(listener: socket.socket) -> str:
    """Return the address of pages, as a browser takes it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(store: str, home: Path, listener: socket.socket, experiment: str) -> None:
    """Run MLflow's server in this process; say the address of the experiment when it answers."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    gc.disable()  # importing MLflow takes most of the start; collections find nothing in it
    import uvicorn  # noqa: PLC0415  comes with MLflow
    from mlflow import MlflowClient
    from mlflow.server.constants import ARTIFACT_ROOT_ENV_VAR, BACKEND_STORE_URI_ENV_VAR

    prepare_store(store, home, experiment)
    os.environ[BACKEND_STORE_URI_ENV_VAR] = store
    artifacts = artifact_root(store, home)
    if artifacts is not None:
        os.environ[ARTIFACT_ROOT_ENV_VAR] = artifacts

    class Announcing(uvicorn.Server):
        """Says where the pages are once they answer."""

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            found = MlflowClient(tracking_uri=store).get_experiment_by_name(experiment)
            number = None if found is None else found.experiment_id
            say(f"MLflow answers: {experiment_page(address_of(listener), number)}")
            say("Ctrl-C ends it.")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of MLflow's packages about each other
        from mlflow.server.fastapi_app import app  # reads the variables above
    gc.enable()
    Announcing(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
