"""`python -m harness.ui [--port N] [--store URI]`: MLflow's pages of all runs, in one process.

`mlflow ui` imports MLflow five times over (its command, four workers) and starts a runner of jobs
that nothing here uses; on two cores that took more than half a minute. This starts its server once.
"""

import gc
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from catalogue.files import tightfit_home
from catalogue.terminal import EXIT_OK, CommandParser, say
from harness.config.schema import TrackingConfig
from harness.tracking.mlflow import (
    ENVIRONMENT,
    artifact_root,
    prepare_store,
    sqlite_path,
    store_uri,
)
from reports.record.text import experiment_page


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
    home = tightfit_home()
    home.mkdir(parents=True, exist_ok=True)
    store = asked.store or store_uri(TrackingConfig(), home)
    file = sqlite_path(store)
    is_new = file is not None and not file.exists()
    first = "; there are no runs yet, so its database is made first" if is_new else ""
    say(f"starting MLflow: importing it takes about 5 s of one core{first}")
    serve(store, home, asked.host, asked.port, asked.experiment)
    return EXIT_OK


def serve(store: str, home: Path, host: str, port: int, experiment: str) -> None:
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
            say(f"MLflow answers: {experiment_page(f'http://{host}:{port}', number)}")
            say("Ctrl-C ends it.")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of MLflow's packages about each other
        from mlflow.server.fastapi_app import app  # reads the variables above
    gc.enable()
    Announcing(uvicorn.Config(app, host=host, port=port, log_level="warning")).run()


if __name__ == "__main__":
    sys.exit(main())
