"""The trials of one search in an Optuna study that outlives the process."""

import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

from harness.errors import ConfigError
from harness.plain import read_json
from harness.search.request import SearchRequest
from harness.search.space import Proposal, overrides_of
from harness.search.trial import Outcome
from reports.record.record import write_text_atomic

__all__ = ["Study", "facts_of", "open_study", "require_optuna"]

LEAST_VERSION: Final = 4
QUESTION_NAME: Final = "search.json"
DATABASE_NAME: Final = "study.db"
IDLE: Final = 50
"""Proposals in a row that build nothing, after which a search ends."""
INTERRUPTED: Final = "interrupted"


def require_optuna() -> None:
    """Check that Optuna 4 or newer is installed.

    Raises:
        ConfigError: it is not.
    """
    try:
        found = version("optuna")
    except PackageNotFoundError:
        found = ""
    if not found or int(found.split(".")[0]) < LEAST_VERSION:
        got = f"got {found}" if found else "which is not installed"
        raise ConfigError(
            f"search: expected the package optuna {LEAST_VERSION} or newer, {got}. Install it: "
            "pip install 'tightfit[search]'"
        )


@contextmanager
def open_study(request: SearchRequest, folder: Path) -> Iterator["Study"]:
    """Open the study of a search, new or where it stopped; one process at a time.

    Raises:
        ConfigError: another process has it, or the name is that of another search.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder / "search.lock").acquire(timeout=0)
    except Timeout as error:
        raise ConfigError(
            f"search {request.name}: another process runs it. Wait, or give another --name."
        ) from error
    with lock:
        _check_question(request, folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Optuna about its own features
            yield Study(request, folder)


class Study:
    """Proposes settings and keeps what became of them."""

    def __init__(self, request: SearchRequest, folder: Path) -> None:
        import optuna  # noqa: PLC0415  an extra

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        self._optuna: Any = optuna
        self._request = request
        storage = f"sqlite:///{folder / DATABASE_NAME}"
        self._study = optuna.create_study(
            study_name=request.name,
            storage=storage,
            load_if_exists=True,
            direction="maximize" if request.goal.is_maximum else "minimize",
        )
        for trial in self._study.get_trials(deepcopy=False):
            if not trial.state.is_finished() and trial.state.name == "RUNNING":
                self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        # Seeded by what is there too, so that a search that goes on does not repeat itself.
        self._study.sampler = optuna.samplers.TPESampler(
            seed=request.seed + len(self._study.get_trials(deepcopy=False)),
            constraints_func=lambda trial: facts_of(trial).get("excesses", []),
        )

    def run(self, run_trial: Callable[[int, Proposal], Outcome], say: Callable[[str], None]) -> str:
        """Run trials until the budget is spent; return why it ended.

        Args:
            run_trial: runs the trial of a number.
            say: gets a line at the end of each.

        Raises:
            KeyboardInterrupt: Ctrl-C; what ended is kept.
        """
        begin_s = time.monotonic()
        todo = self._untried()
        idle = 0
        while True:
            if self.num_built() >= self._request.trials:
                return f"{self._request.trials} trials were built"
            limit = self._request.minutes
            if limit is not None and time.monotonic() - begin_s > limit * 60:
                return f"{limit:g} minutes have passed"
            if todo is not None:
                if not todo:
                    return "every combination was tried"
                self._study.enqueue_trial(todo.pop(0))
            is_new = self._run_one(run_trial, say)
            idle = 0 if is_new else idle + 1
            if idle >= IDLE:
                return f"{IDLE} proposals in a row were refused or known"

    def _run_one(
        self, run_trial: Callable[[int, Proposal], Outcome], say: Callable[[str], None]
    ) -> bool:
        """Run one trial; return whether anything was built."""
        trial = self._study.ask()
        proposal = self._request.space.propose(trial)
        known = self._same_as(trial.number, proposal)
        try:
            outcome = known or run_trial(trial.number, proposal)
        except KeyboardInterrupt:
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
            raise
        is_new = known is None and outcome.folder is not None
        facts = {
            "status": outcome.status,
            "reason": outcome.reason,
            "excesses": list(outcome.excesses),
            "broken": list(outcome.broken),
            "folder": None if outcome.folder is None else str(outcome.folder),
            "is_new": is_new,
        }
        trial.set_user_attr("outcome", facts)
        if outcome.value is None:
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(trial, outcome.value)
        if known is None:
            say(_line(trial.number, proposal, outcome))
        return is_new

    def _same_as(self, number: int, proposal: Proposal) -> Outcome | None:
        """Return the outcome of an earlier trial with the same settings; None without one."""
        for trial in self._study.get_trials(deepcopy=False):
            facts = facts_of(trial)
            if trial.number != number and trial.params == proposal and "status" in facts:
                return Outcome(
                    status=str(facts["status"]),
                    reason=facts["reason"],
                    value=trial.value,
                    excesses=tuple(facts["excesses"]),
                    broken=tuple(facts["broken"]),
                    folder=None if facts["folder"] is None else Path(facts["folder"]),
                )
        return None

    def _untried(self) -> list[Proposal] | None:
        """Return the combinations that are left, None where there are more than trials."""
        found = self._request.space.combinations(self._request.trials)
        if found is None:
            return None
        tried = [
            trial.params
            for trial in self._study.get_trials(deepcopy=False)
            if "status" in facts_of(trial)
        ]
        return [proposal for proposal in found if proposal not in tried]

    def num_built(self) -> int:
        """Return how many trials were built, in all processes."""
        return sum(bool(facts_of(trial).get("is_new")) for trial in self.trials())

    def trials(self) -> list[Any]:
        """Return Optuna's trials that ended, in order."""
        found = self._study.get_trials(deepcopy=False)
        return [trial for trial in found if trial.state.is_finished()]

    def best(self) -> Any | None:
        """Return the trial with the best value of those that keep the constraints."""
        kept = [
            trial
            for trial in self.trials()
            if trial.value is not None and not facts_of(trial).get("broken")
        ]
        sign = -1 if self._request.goal.is_maximum else 1
        return min(kept, key=lambda trial: sign * trial.value, default=None)


def facts_of(trial: Any) -> dict[str, Any]:
    """Return what is kept of an Optuna trial's outcome; of one that was cut short its reason."""
    found: dict[str, Any] = trial.user_attrs.get("outcome", {"reason": INTERRUPTED})
    return found


def _check_question(request: SearchRequest, folder: Path) -> None:
    path = folder / QUESTION_NAME
    before, now = read_json(path), request.question()
    if before and before != now:
        differing = [key for key in now if before.get(key) != now[key]]
        raise ConfigError(
            f"search {request.name}: expected the search of that name, in which "
            f"{', '.join(differing)} differ: {path}. Give another --name."
        )
    write_text_atomic(path, json.dumps(now, indent=1) + "\n")


def _line(number: int, proposal: Proposal, outcome: Outcome) -> str:
    settings = " ".join(overrides_of(proposal))
    if outcome.value is None:
        return f"trial {number}: {settings}: failed, {outcome.reason}"
    kept = "" if not outcome.broken else f", not {', not '.join(outcome.broken)}"
    return f"trial {number}: {settings}: {outcome.value:g}{kept}"
