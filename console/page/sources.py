"""Where the pages take their values from: the supervisor's snapshot, and the registry."""

import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from sqlalchemy import select

from console.page import texts
from console.registry.checks import BusyError, FieldError
from console.registry.database import Database
from console.registry.holdings import Holdings, Removal
from console.registry.models import Models
from console.registry.results import PAGE, Results
from console.registry.tables import (
    MOST_ID,
    OPEN,
    TEST_STATUSES,
    Comparison,
    Model,
    Performance,
    TestRun,
)
from console.verdicts import Verdicts

LABELS: Final = {"url": "address", "is_loopback": "only this machine", "needs_key": "needs a key"}
"""What the settings of the console are called, where it is not by their names."""
ENDED: Final = tuple(status for status in TEST_STATUSES if status not in OPEN)


class Supervisor(Protocol):
    """What the pages need of the supervisor."""

    def snapshot(self) -> dict[str, Any]:
        """Return the state of everything as plain data."""

    def feed(self) -> AsyncIterator[Any]:
        """Yield at once, and again after each change."""

    def log(self, service_id: int, after: str | None) -> tuple[list[dict[str, str]], str]:
        """Return lines of a service's log, and where later ones begin."""


class Sources:
    """Values of pages; safe to use from several threads.

    Args:
        supervisor: tells of services, jobs and the machine.
        database: of the registry.
        home: TIGHTFIT_HOME.
        verdicts: say which profiles fit.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        database: Database,
        home: Path,
        verdicts: Verdicts,
    ) -> None:
        self._supervisor, self._database, self.home = supervisor, database, home
        self._models, self._results = Models(database), Results(database)
        self._holdings, self._verdicts = Holdings(database), verdicts
        self._kept: dict[str, tuple[int, Any]] = {}
        self._lock = threading.Lock()

    def _while_unchanged(self, name: str, read: Any) -> Any:
        """Return what was read, anew after each commit to the registry."""
        with self._lock:
            version = self._database.version()
            known = self._kept.get(name)
            if known is None or known[0] != version:
                known = self._kept[name] = (version, read())
            return known[1]

    def snapshot(self) -> dict[str, Any]:
        """Return the supervisor's snapshot."""
        return self._supervisor.snapshot()

    def changes(self) -> AsyncIterator[Any]:
        """Yield at once, and again after each change."""
        return self._supervisor.feed()

    def models(self) -> Sequence[Model]:
        """Return all models in order of their names."""
        found: Sequence[Model] = self._while_unchanged("models", self._models.list)
        return found

    def models_by_id(self) -> dict[int, Model]:
        """Return all models by their ids."""
        return {model.id: model for model in self.models()}

    def model(self, model_id: int) -> Model | None:
        """Return a model; None: there is none."""
        return self.models_by_id().get(model_id)

    def latest(self) -> Mapping[int, Sequence[Performance]]:
        """Return the last measurements of each model."""
        found: Mapping[int, Sequence[Performance]] = self._while_unchanged(
            "latest", self._results.latest
        )
        return found

    def performance(self, model_id: int) -> Sequence[Performance]:
        """Return what was measured of a model, the last first."""
        return self._results.performance(model_id)

    def tests(self, before: int | None) -> tuple[Sequence[TestRun], Sequence[TestRun]]:
        """Return the tests that run, and a page of those that have ended."""
        running = self._results.runs(statuses=OPEN)
        return running, self._results.runs(statuses=ENDED, before_id=before, limit=PAGE)

    def test(self, run_id: int) -> TestRun | None:
        """Return a test; None: there is none."""
        with self._database.read() as session:
            return session.get(TestRun, run_id) if run_id <= MOST_ID else None

    def comparison(self, run_id: int) -> Comparison | None:
        """Return the comparison that a test made; None: it made none."""
        with self._database.read() as session:
            return session.scalar(select(Comparison).where(Comparison.test_run_id == run_id))

    def own_service(self) -> Mapping[str, Any] | None:
        """Return the service that the console starts by itself; None: there is none."""
        services = self.snapshot().get("services") or []
        return next((each for each in services if each.get("kind") == "own"), None)

    def card_name(self) -> str:
        """Return which card plans are for."""
        gpus = (self.snapshot().get("machine") or {}).get("gpus") or []
        return gpus[0].get("name") or texts.UNKNOWN if gpus else "the CPU, as no GPU was found"

    def fit(self, model: Model) -> Mapping[str, Any]:
        """Return the verdict of a plan of a model's default profile."""
        return self._verdicts.of_model(model)

    def removal(self, model: Model) -> Removal | str:
        """Return what a delete of a model takes, or why it is not possible now."""
        try:
            return self._holdings.removal(model.id)
        except BusyError as error:
            return str(error)
        except FieldError:
            return self._holdings.removal(model.id, keep_files=True)

    def log(self, service_id: int) -> tuple[list[dict[str, str]], str]:
        """Return the lines of a service's log with their levels, and where later ones begin."""
        return self._supervisor.log(service_id, None)

    def banners(self) -> list[str]:
        """Return what every page says on top."""
        console = self.snapshot().get("console") or {}
        if console.get("is_loopback", True):
            return []
        return [
            f"This console listens on {console['host']}: who reaches this machine and has a key "
            "controls it."
        ]

    def settings(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Return what the console runs with, in groups."""
        console = self.snapshot().get("console") or {}
        own = [(LABELS.get(name, name), texts.word(value)) for name, value in console.items()]
        return [
            ("Console", own),
            ("Folders", [("home", str(self.home)), ("registry", str(self._database.path))]),
        ]
