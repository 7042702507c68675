"""Tests: queues, runs, ends and takes up tests of the registry's models."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from subprocess import Popen
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from catalogue.files import tightfit_home
from catalogue.models import state
from catalogue.processes import module_command
from console.registry.checks import BusyError, FieldError, shown
from console.registry.database import Database
from console.registry.models import Models, default_of, entry_of, profile_of, standing
from console.registry.results import Results
from console.registry.stale import is_alive
from console.registry.tables import OPEN, Model, Performance, Profile, Service, TestRun
from console.testing import asked
from console.testing.process import Harness, progress_of
from console.testing.results import Outcome, outcome_of
from engine.device.gpu import visible_gpus
from engine.errors import did_you_mean

LOOK_S: Final = 0.5
"""Seconds between two looks at a test that runs."""
CANCEL_S: Final = 90.0
"""Seconds that a cancelled test has to end its workers and write its record."""
NUM_REQUESTS: Final = 100
MOST_OPEN: Final = 10_000
MOST_PROFILES: Final = 100
"""Of a sweep."""
PAIRS: Final = 4
AA_PAIRS: Final = 3
OnProgress = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What is to be tested."""

    kind: str = "test"
    """test: one profile | ab: two in turns | sweep: several, one after another."""
    profiles: Sequence[str] = ()
    """By name; empty: the default one, of a sweep all."""
    num_requests: int = NUM_REQUESTS
    pairs: int = PAIRS
    """Of an A/B: how often each side runs."""
    aa_pairs: int = AA_PAIRS
    """Of an A/B: how often side a runs against itself, which says what noise is."""
    stop_service: bool = False
    """Whether servers on the GPU may be stopped for it; the caller stops them."""


@dataclass(frozen=True, kw_only=True)
class Left:
    """Tests that an earlier process left, by id, the first one first."""

    running: Sequence[int]
    """Their processes live: to be followed."""
    queued: Sequence[int]
    """To be run."""


class Tests:
    """The tests of a registry; objects may be shared by threads.

    Args:
        database: The registry.
        command: Starts the harness.
        has_gpu: Whether tests run on a GPU of this machine.
        look_s: Seconds between two looks at a test that runs.
        cancel_s: Seconds that a cancelled test has to end by itself.
    """

    __test__ = False

    def __init__(
        self,
        database: Database,
        *,
        command: Sequence[str] | None = None,
        has_gpu: Callable[[], bool] = lambda: bool(visible_gpus()),
        look_s: float = LOOK_S,
        cancel_s: float = CANCEL_S,
    ) -> None:
        self._database, self._models = database, Models(database)
        self._results = Results(database)
        self._command = module_command("harness") if command is None else tuple(command)
        self._has_gpu = has_gpu
        self._look_s, self._cancel_s = look_s, cancel_s

    def queue(self, model: str | int, ask: Ask) -> TestRun:
        """Check a test and note it as queued, with the settings as they are now.

        Raises:
            BusyError: A server is on the GPU, and may not be stopped.
            ConfigError: There is no such model or profile, or the harness cannot test it so.
        """
        row = self._models.get(model)
        profiles = _profiles(row, ask)
        _check(ask, profiles)
        serving = self.serving()
        uses_gpu = self._has_gpu() and not all(
            profile.settings.get("device") == "cpu" for profile in profiles
        )
        if serving and uses_gpu and not ask.stop_service:
            raise BusyError(
                "stop_service",
                f"test: expected a free GPU, got {', '.join(serving)} on it. Stop it first, or "
                "say in the console that it may be stopped (stop_service).",
            )
        notes = [] if uses_gpu or not serving else [f"{each} runs beside it" for each in serving]
        settings = {
            "profiles": {profile.name: dict(profile.settings) for profile in profiles},
            "profile_ids": {profile.name: profile.id for profile in profiles},
            "pairs": ask.pairs,
            "aa_pairs": ask.aa_pairs,
            "stop_service": ask.stop_service,
            "notes": notes,
            "rerun": "all",
        }
        sized = {"num_requests": ask.num_requests, "settings": settings}
        self._arguments(row, ask.kind, sized, None)  # refused now, not when it begins
        return self._results.create(row.id, ask.kind, profile_id=profiles[0].id, **sized)

    def resume(self, test_id: int) -> TestRun:
        """Queue a test once more, which takes over the points of it that finished.

        Runs of an A/B lie side by side in time, so that one begins anew.

        Raises:
            ConfigError: It has not ended, or ended well.
        """
        before = self._results.get(test_id)
        if before.status in {*OPEN, "finished"}:
            raise FieldError(
                "test",
                f"test {test_id}: expected one that ended early, got status {before.status}.",
            )
        return self._results.create(
            before.model_id,
            before.kind,
            profile_id=before.profile_id,
            num_requests=before.num_requests,
            settings=before.settings | {"rerun": "failed", "resumes": before.id},
        )

    def serving(self) -> list[str]:
        """Return the services of the registry whose process lives, in words."""
        with self._database.read() as session:
            rows = session.scalars(select(Service).where(Service.pid.is_not(None))).all()
        return [
            f"{row.name} (process {row.pid})"
            for row in rows
            if is_alive(row.pid, row.pid_started_s)
        ]

    def run(self, test_id: int, on_progress: OnProgress = lambda _: None) -> TestRun:
        """Run a queued test to its end; return it with its results stored.

        Blocks; progress comes on this thread. An exception, such as KeyboardInterrupt, ends the
        test first.
        """
        test = self._results.get(test_id)
        if test.status != "queued":
            return test
        model = self._models.get(test.model_id)
        sized = {"num_requests": test.num_requests, "settings": test.settings}
        folder = _new_folder()
        arguments = self._arguments(model, test.kind, sized, folder)
        child = self._start(test, folder, [*self._command, "--json", *arguments])
        if child is None:
            return self._results.get(test_id)
        return self._follow(test_id, on_progress, child)

    def _start(self, test: TestRun, folder: Path, command: Sequence[str]) -> "Popen[bytes] | None":
        """Start a test's process and note it, in one step; None where it is queued no more."""
        with self._database.write() as session:
            row = _row_of(session, TestRun, test.id)
            if row.status != "queued":
                return None
            harness, child = Harness.start(command, folder)
            row.status, row.started_s, row.folder = "running", time.time(), str(folder)
            row.pid, row.pid_started_s = harness.pid, harness.started_s
            _row_of(session, Model, test.model_id).state = "testing"
        return child

    def follow(self, test_id: int, on_progress: OnProgress = lambda _: None) -> TestRun:
        """Wait for a test that another process started, and store its results."""
        return self._follow(test_id, on_progress, None)

    def _follow(
        self, test_id: int, on_progress: OnProgress, child: "Popen[bytes] | None"
    ) -> TestRun:
        test = self._results.get(test_id)
        try:
            self._watch(test, on_progress, child)
        except BaseException:
            self.cancel(test_id)
            raise
        return self._finish(test_id, None if child is None else child.wait())

    def _watch(self, test: TestRun, on_progress: OnProgress, child: "Popen[bytes] | None") -> None:
        told: dict[str, Any] = {}
        while _is_alive(test, child):
            found = progress_of(Path(test.folder or ""), test.kind, _num_runs(test))
            if found != told:
                told = found
                with self._database.write() as session:
                    row = _row_of(session, TestRun, test.id)
                    row.progress = found | {"is_cancelled": _is_cancelled(row)}
                on_progress(found)
            time.sleep(self._look_s)

    def cancel(self, test_id: int) -> TestRun:
        """End a test: at once where it waits, else as Ctrl-C does, and by force after a while.

        Returns when it has ended. Whoever follows it stores what it had measured; where nobody
        does, this call.
        """
        with self._database.write() as session:
            row: TestRun = _row_of(session, TestRun, test_id)
            if row.status == "queued":
                row.status, row.ended_s, row.reason = "cancelled", time.time(), "before it began"
            elif row.status == "running":
                row.progress = (row.progress or {}) | {"is_cancelled": True}
        if row.status != "running":
            return row
        harness = _harness(row)
        harness.interrupt()
        end_s = time.monotonic() + self._cancel_s
        while harness.process() is not None and time.monotonic() < end_s:
            time.sleep(min(self._look_s, 0.1))
        harness.kill()
        while harness.process() is not None:
            time.sleep(0.01)
        return self._finish(test_id, None)

    def recover(self) -> Left:
        """Bring tests in order that an earlier process left, before `interrupt_stale` does.

        A test whose process has gone is finished with what it left, or interrupted.
        """
        running = self._results.runs(statuses=["running"], limit=MOST_OPEN)
        queued = self._results.runs(statuses=["queued"], limit=MOST_OPEN)
        alive = [row.id for row in running if is_alive(row.pid, row.pid_started_s)]
        for row in running:
            if row.id not in alive:
                self._finish(row.id, None)
        return Left(running=alive[::-1], queued=[row.id for row in reversed(queued)])

    def _finish(self, test_id: int, exit_code: int | None) -> TestRun:
        """Store what a test that has ended measured; once, whoever comes first."""
        test = self._results.get(test_id)
        if test.status != "running":
            return test
        folder = Path(test.folder or "")
        outcome = outcome_of(folder, test.kind, test.settings["profile_ids"], exit_code)
        model = self._models.get(test.model_id)
        on_disk = standing(state(entry_of(model)))
        with self._database.write() as session:
            row: TestRun = _row_of(session, TestRun, test_id)
            if row.status != "running":
                return row
            if outcome.status == "interrupted" and _is_cancelled(row):
                outcome.status = "cancelled"
            _store(session, row, outcome)
            _settle(session, _row_of(session, Model, row.model_id), outcome, on_disk)
        return row

    def _arguments(
        self, model: Model, kind: str, sized: Mapping[str, Any], folder: Path | None
    ) -> list[str]:
        """Return the arguments of the harness for a test; without a folder they are only checked.

        `sized` has a test's num_requests and settings.
        """
        settings = sized["settings"]
        by_name: Mapping[str, Mapping[str, Any]] = settings["profiles"]
        profiles = {name: asked.asked_of(each, model) for name, each in by_name.items()}
        lengths = [each.get("max_model_len") for each in by_name.values()]
        known = [int(each) for each in (*lengths, model.max_model_len) if each]
        sizes = asked.sizes_of(kind, sized["num_requests"], min(known, default=None))
        base = [
            *asked.model_of(model, by_name.values()).overrides(),
            *(f"{key}={value}" for key, value in sizes.items()),
            f"tracking.experiment={asked.as_hydra(model.name)}",
            f"rerun={settings['rerun']}",
        ]
        if folder is None:
            return base
        match kind:
            case "test":
                return asked.test_command(base, next(iter(profiles.values())), folder)
            case "ab":
                pairs = {name: settings[name] for name in ("pairs", "aa_pairs")}
                return asked.ab_command(base, list(profiles.values()), folder, **pairs)
            case _:
                return asked.sweep_command(base, profiles, folder)


def _profiles(model: Model, ask: Ask) -> list[Profile]:
    if ask.profiles:
        return [profile_of(model, name) for name in ask.profiles]
    return list(model.profiles) if ask.kind == "sweep" else [default_of(model)]


def _check(ask: Ask, profiles: Sequence[Profile]) -> None:
    wanted = {"test": (1, 1), "ab": (2, 2), "sweep": (1, MOST_PROFILES)}
    if ask.kind not in wanted:
        raise FieldError(
            "kind",
            f"kind: expected one of {', '.join(wanted)}, got {shown(ask.kind)}."
            f"{did_you_mean(ask.kind, wanted)}",
        )
    least, most = wanted[ask.kind]
    names = [profile.name for profile in profiles]
    if not least <= len(names) <= most or len({*names}) < len(names):
        words = {"test": "one", "ab": "two different ones", "sweep": f"at most {most}, each once"}
        raise FieldError(
            "profiles",
            f"profiles: expected {words[ask.kind]} for kind {ask.kind}, got {', '.join(names)}.",
        )
    bounds: dict[str, tuple[int, int]] = {
        "num_requests": (1, 1_000_000),
        "pairs": (1, 100),
        "aa_pairs": (0, 100),
    }
    for name, (low, high) in bounds.items():
        value: Any = getattr(ask, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise FieldError(
                name, f"{name}: expected an integer from {low} to {high}, got {shown(value)}."
            )


def _new_folder() -> Path:
    """Make a folder for a run, named as the harness names its own."""
    now = datetime.now(UTC).astimezone()
    name = f"{now:%Y%m%d-%H%M%S-%f}-{secrets.token_hex(3)}"
    folder = tightfit_home() / "runs" / name
    folder.mkdir(parents=True)
    return folder


def _num_runs(test: TestRun) -> int:
    settings = test.settings
    if test.kind == "ab":
        return 2 * int(settings["pairs"] + settings["aa_pairs"])
    return len(settings["profiles"])


def _is_alive(test: TestRun, child: "Popen[bytes] | None") -> bool:
    return _harness(test).process() is not None if child is None else child.poll() is None


def _is_cancelled(row: TestRun) -> bool:
    return bool((row.progress or {}).get("is_cancelled"))


def _harness(row: TestRun) -> Harness:
    return Harness(row.pid or 0, row.pid_started_s or 0.0)


def _row_of(session: Session, table: Any, row_id: int) -> Any:
    found = session.get(table, row_id)
    if found is None:
        raise FieldError("id", f"{table.__tablename__}: expected {row_id}, which was removed.")
    return found


def _store(session: Session, row: TestRun, outcome: Outcome) -> None:
    row.status, row.reason, row.ended_s = outcome.status, outcome.reason, time.time()
    row.environment, row.metrics = outcome.environment, outcome.metrics
    for each in outcome.performance:
        each.model_id, each.test_run_id = row.model_id, row.id
        session.add(each)
    if (comparison := outcome.comparison) is not None:
        comparison.model_id, comparison.test_run_id = row.model_id, row.id
        session.add(comparison)


def _settle(
    session: Session, model: Model, outcome: Outcome, on_disk: Mapping[str, str | None]
) -> None:
    """Bring a model's state in order behind a test; `on_disk` is what it is without figures."""
    session.flush()
    measured = select(Performance.id).where(Performance.model_id == model.id).limit(1)
    if session.scalar(measured) is not None:
        model.state, model.reason = "ready", None
    elif outcome.status in {"failed", "no_fit"}:
        model.state, model.reason = "failed", outcome.reason
    else:
        model.state, model.reason = str(on_disk["state"]), on_disk["reason"]
