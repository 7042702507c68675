"""Run the trials of a search in an Optuna study that outlives the process."""

import json
import logging
import shutil
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import yaml
from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from catalogue.files import read_json, tightfit_home
from engine.errors import ConfigError
from harness.config.compose import Composer
from harness.config.engine import require_package
from harness.config.schema import GROUPS, RunConfig, SweepContext, TrackingConfig
from harness.forecast.skip import planned_shortage
from harness.point.full_disk import is_full, require_room
from harness.studies.search_request import Goal, SearchRequest, check_measured
from harness.studies.search_space import Proposal, beside, overrides_of
from reports.record.record import RESULT_NAME, RunRecord, write_text_atomic

NAME: Final = "best"


def write_best(
    folder: Path,
    overrides: Sequence[str],
    config: RunConfig,
    *,
    why: str,
    config_dir: Path | None,
) -> str:
    """Write the best trial as an experiment; return the command that runs it.

    Args:
        folder: of the search.
        overrides: of the trial, in Hydra's spelling.
        config: of the trial, which the file must compose to.
        why: a line for the top of the file.
        config_dir: the user's configuration files, which the experiment may need.

    Raises:
        RuntimeError: the file composes to something else.
    """
    conf = folder / "conf"
    if config_dir is not None:
        shutil.copytree(config_dir, conf, dirs_exist_ok=True)
    file = conf / "experiment" / f"{NAME}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(file, experiment_text(Composer(conf), overrides, why))
    (point,) = Composer(conf).plan([f"+experiment={NAME}"]).points
    if point.config.to_dict() != config.to_dict():
        raise RuntimeError(f"{file}: it composes to another configuration than the trial's.")
    return f"python -m harness --config-dir {conf} +experiment={NAME}"


def experiment_text(composer: Composer, overrides: Sequence[str], why: str) -> str:
    """Return overrides as the text of an experiment file.

    Args:
        composer: that knows their syntax.
        overrides: in Hydra's spelling.
        why: a line for the top.
    """
    defaults: list[Any] = []
    values = OmegaConf.create({})
    for item in composer.parse(overrides):
        key = item.key_or_group
        if key == "experiment":
            defaults.insert(0, item.value())
        elif key == "model":
            defaults.append({"/model": item.value()})
        elif key in GROUPS:
            defaults.append({f"override /{key}": item.value()})
        elif key == "hydra.mode" or not key.startswith("hydra"):  # an experiment's own sweep
            OmegaConf.update(values, key, item.value(), force_add=True)
    content = {"defaults": defaults, **OmegaConf.to_container(values)}  # type: ignore[dict-item]
    body = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    return f"# @package _global_\n# {why}\n{body}"


def searches_folder() -> Path:
    """Return the folder of all searches."""
    return tightfit_home() / "searches"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a trial ended."""

    status: str
    """The point's status; refused: the plan does not fit; invalid: contradicting settings."""
    reason: str | None = None
    """Why the trial failed; None where it has a value."""
    value: float | None = None
    excesses: tuple[float, ...] = ()
    """Over each constraint, at most 0 where it is kept."""
    broken: tuple[str, ...] = ()
    """Constraints that are not kept."""
    folder: Path | None = None
    """Folder of the run; None where nothing was built."""


class TrialRunner:
    """Runs the trials of one search in its folder."""

    def __init__(self, composer: Composer, base: Sequence[str], goal: Goal) -> None:
        self._composer, self._base, self._goal = composer, list(base), goal
        self.records: list[RunRecord] = []
        self.tracking: TrackingConfig | None = None
        """Where trials are mirrored to; None before the first."""

    def compose(self, overrides: Sequence[str]) -> tuple[RunConfig, list[str]]:
        """Return the configuration of a trial and its overrides in Hydra's spelling.

        Raises:
            ConfigError: settings that contradict each other, a sweep, or a package that is absent.
        """
        plan = self._composer.plan([*beside(self._base, overrides), *overrides])
        if plan.multirun:
            raise ConfigError(
                "search: the experiment sweeps by itself. Add hydra.mode=RUN, and give the values "
                "to search on the command line."
            )
        config = plan.points[0].config
        require_package(config.system.kind)
        return config, plan.overrides

    def run(self, overrides: Sequence[str], sweep: SweepContext) -> Outcome:
        """Run a trial; see Outcome.

        Raises:
            KeyboardInterrupt: Ctrl-C; the point has its record.
        """
        try:
            config, spelled = self.compose(overrides)
        except ConfigError as error:
            return Outcome(status="invalid", reason=str(error))
        shortage = planned_shortage(config)
        if shortage is not None:
            return Outcome(status="refused", reason=f"the plan does not fit: {shortage}")
        from harness.point.point import run_point  # noqa: PLC0415  not for requests that are wrong

        folder = sweep.folder / str(sweep.index)
        self.tracking = config.tracking
        require_room(sweep.folder)
        try:
            record = run_point(replace(config, rerun="failed"), folder, spelled, sweep)
        except KeyboardInterrupt:
            if (folder / RESULT_NAME).is_file():
                self.records.append(RunRecord.read(folder / RESULT_NAME))
            raise
        except Exception as error:
            if is_full(error):
                raise
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
            return Outcome(status="failed", reason=reason, folder=folder)
        self.records.append(record)
        return judge(record, self._goal, folder)

    def check_goal(self, overrides: Sequence[str]) -> None:
        """Check that the scenario of a trial measures what the goal is about.

        Raises:
            ConfigError: it does not.
        """
        config, _ = self.compose(overrides)
        check_measured(self._goal, config.scenario)


def judge(record: RunRecord, goal: Goal, folder: Path) -> Outcome:
    """Return what a record says of a goal."""
    missing = goal.missing(record.metrics)
    reason = None
    if record.status != "ok":
        reason = f"{record.status}: {(record.error or {}).get('message')}"
    elif record.valid is False:
        reason = f"not valid: {'; '.join(record.reasons)}"
    elif missing:
        reason = (
            f"no value of {', '.join(missing)}: it was not measured, or its statistic needs more "
            "requests."
        )
    if reason is not None:
        return Outcome(status=record.status, reason=reason, folder=folder)
    return Outcome(
        status=record.status,
        value=float(record.metrics[goal.metric] or 0.0),
        excesses=tuple(goal.excesses(record.metrics)),
        broken=tuple(goal.broken(record.metrics)),
        folder=folder,
    )


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
