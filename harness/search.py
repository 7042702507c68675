"""`python -m harness.search`: look for the best settings in an Optuna study that outlives it."""

import csv
import io
import json
import logging
import shlex
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import yaml
from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from catalogue.files import read_json, tightfit_home
from catalogue.terminal import EXIT_NOT_ALL_OK, EXIT_OK, say, show
from engine.errors import ConfigError
from engine.sealed import GIB
from harness.config.compose import Composer
from harness.config.engine import require_package
from harness.config.schema import GROUPS, RunConfig, SweepContext
from harness.folders import install_extra
from harness.forecast.skip import planned_shortage
from harness.point.full_disk import exit_code, is_full, require_room, require_writable
from harness.point.streams import interrupt_afterwards, outlive_readers, sigterm_as_interrupt
from harness.studies.search_request import (
    DIGITS,
    HELP,
    Goal,
    Proposal,
    SearchRequest,
    beside,
    check_measured,
    overrides_of,
    parse_request,
)
from reports.record.folders import each_point
from reports.record.judging import ONE_RUN_EACH
from reports.record.record import RESULT_NAME, RunRecord, write_text_atomic
from reports.record.text import number

NAME: Final = "best"


def write_best(
    folder: Path, overrides: Sequence[str], config: RunConfig, *, why: str, config_dir: Path | None
) -> str:
    """Write the best trial as an experiment; return the command that runs it.

    `why` is a line for the top of the file, which must compose to `config`; it may need the
    user's own configuration files.
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
    return f"tightfit run --config-dir {shlex.quote(str(conf))} +experiment={NAME}"


def experiment_text(composer: Composer, overrides: Sequence[str], why: str) -> str:
    """Return overrides as the text of an experiment file, `why` at its top."""
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


@dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    """How a trial ended."""

    status: str
    """The point's status; refused: the plan does not fit; invalid: contradicting settings."""
    reason: str | None = None
    """Why the trial failed; None where it has a value."""
    value: float | None = None
    excesses: Sequence[float] = ()
    """Over each constraint, at most 0 where it is kept; without a value what is lacking, in GiB."""
    broken: Sequence[str] = ()
    """Constraints that are not kept."""
    folder: Path | None = None
    """Folder of the run; None where nothing was built."""


RunTrial = Callable[[int, Proposal], TrialOutcome]
"""Runs the trial of a number with the settings that were proposed."""


class TrialRunner:
    """Runs the trials of one search in its folder."""

    def __init__(self, composer: Composer, base: Sequence[str], goal: Goal) -> None:
        self._composer, self._base, self._goal = composer, list(base), goal

    def compose(self, overrides: Sequence[str]) -> tuple[RunConfig, list[str]]:
        """Return the configuration of a trial and its overrides in Hydra's spelling."""
        plan = self._composer.plan([*beside(self._base, overrides), *overrides])
        if plan.multirun:
            raise ConfigError(
                "search: this experiment is a sweep. Add hydra.mode=RUN, and give the values "
                "to search on the command line."
            )
        config = plan.points[0].config
        require_package(config.system.kind)
        return config, plan.overrides

    def run(self, overrides: Sequence[str], sweep: SweepContext) -> TrialOutcome:
        """Run a trial; after Ctrl-C too its point has its record."""
        try:
            config, spelled = self.compose(overrides)
        except ConfigError as error:
            return TrialOutcome(status="invalid", reason=str(error), excesses=UNKNOWN)
        shortage = planned_shortage(config)
        if shortage is not None:
            lacking = (_lacking_gib(shortage.plan or {}),)
            reason = f"the plan does not fit: {shortage}"
            return TrialOutcome(status="refused", reason=reason, excesses=lacking)
        from harness.point.point import run_point  # noqa: PLC0415  not for requests that are wrong

        folder = sweep.folder / str(sweep.index)
        require_room(sweep.folder)
        try:
            config = replace(config, rerun="failed")
            config_dir = self._composer.config_dir
            record = run_point(config, folder, spelled, sweep, config_dir=config_dir)
        except Exception as error:
            if is_full(error):
                raise
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
            return TrialOutcome(status="failed", reason=reason, excesses=UNKNOWN, folder=folder)
        return judge(record, self._goal, folder)

    def check_goal(self, overrides: Sequence[str]) -> RunConfig:
        """Return the configuration of a trial.

        Raise ConfigError unless the scenario of a trial measures what the goal is about.
        """
        config, _ = self.compose(overrides)
        check_measured(self._goal, config.scenario)
        return config


def _lacking_gib(plan: Mapping[str, Any]) -> float:
    """Return by how much a plan is over its limits, on the GPU and the host together."""
    over_bytes = 0
    for side, limit in (("gpu", "budget_bytes"), ("host", "limit_bytes")):
        sizes = plan.get(side) or {}
        if sizes.get("total_bytes") and sizes.get(limit):
            over_bytes += max(0, sizes["total_bytes"] - sizes[limit])
    return over_bytes / GIB or UNKNOWN_GIB


def judge(record: RunRecord, goal: Goal, folder: Path) -> TrialOutcome:
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
        return TrialOutcome(status=record.status, reason=reason, excesses=UNKNOWN, folder=folder)
    return TrialOutcome(
        status=record.status,
        value=float(record.metrics[goal.metric] or 0.0),
        excesses=tuple(goal.excesses(record.metrics)),
        broken=tuple(goal.broken(record.metrics)),
        folder=folder,
    )


LEAST_VERSION: Final = 4
QUESTION_NAME: Final = "search.json"
STUDY_NAME: Final = "study.db"
UNKNOWN_GIB: Final = 1.0
"""What a trial without a value lacks, where no plan says by how much."""
UNKNOWN: Final = (UNKNOWN_GIB,)
IDLE: Final = 50
"""Proposals in a row that build nothing, after which a search ends."""


def require_optuna() -> None:
    """Raise ConfigError unless Optuna 4 or newer is installed."""
    try:
        found = version("optuna")
    except PackageNotFoundError:
        found = ""
    if not found or int(found.split(".")[0]) < LEAST_VERSION:
        got = f"got {found}" if found else "which is not installed"
        raise ConfigError(
            f"search: expected the package optuna {LEAST_VERSION} or newer, {got}. Install it: "
            f"{install_extra('search')}"
        )


@contextmanager
def open_study(request: SearchRequest, folder: Path) -> Iterator["Study"]:
    """Open the study of a search, new or where it stopped; one process at a time.

    Raises ConfigError where another process has it, or the name is that of another search.
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

        self.is_early = False
        """Whether it ended before its budget was spent, for want of proposals."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        self._optuna: Any = optuna
        self._request = request
        path = str(folder / STUDY_NAME).replace("{", "{{").replace("}", "}}")  # it is a template
        self._study = optuna.create_study(
            study_name=request.name,
            storage=f"sqlite:///{path}",
            load_if_exists=True,
            direction="maximize" if request.goal.is_maximum else "minimize",
        )
        before = self._study.get_trials(deepcopy=False)
        for trial in before:
            if trial.state.name == "RUNNING":
                self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
                left = folder / str(trial.number)
                if not (left / RESULT_NAME).is_file():  # reports take it for one that still runs
                    shutil.rmtree(left, ignore_errors=True)
        # Seeded by what is there too, so that a search that goes on does not repeat itself.
        self._study.sampler = optuna.samplers.TPESampler(
            seed=request.seed + len(before),
            constraints_func=lambda trial: facts_of(trial).get("excesses", []),
        )

    def run(self, run_trial: RunTrial, say: Callable[[str], None]) -> str:
        """Run trials until the budget is spent, with a line for each; return why it ended."""
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
                self.is_early = True
                return (
                    f"ended early with {self.num_built()} of {self._request.trials} trials built: "
                    f"{IDLE} proposals in a row were refused or known"
                )

    def _run_one(self, run_trial: RunTrial, say: Callable[[str], None]) -> bool:
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
        folder = outcome.folder and str(outcome.folder)
        facts = asdict(outcome) | {"folder": folder, "is_new": is_new}
        del facts["value"]  # Optuna's own
        trial.set_user_attr("outcome", facts)
        if outcome.value is None:
            # Pruned, not failed: the sampler learns from it, by how much it lacks.
            self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
        else:
            self._study.tell(trial, outcome.value)
        if known is None:
            say(_line(trial.number, proposal, outcome))
        return is_new

    def _same_as(self, number: int, proposal: Proposal) -> TrialOutcome | None:
        """Return the outcome of an earlier trial with the same settings; None without one."""
        for trial in self._study.get_trials(deepcopy=False):
            facts = dict(facts_of(trial))
            if trial.number != number and trial.params == proposal and "status" in facts:
                del facts["is_new"]
                folder = facts.pop("folder")
                return TrialOutcome(**facts, value=trial.value, folder=folder and Path(folder))
        return None

    def _untried(self) -> list[Proposal] | None:
        """Return the combinations that are left, None where there are more than trials."""
        found = self._request.space.combinations(self._request.trials)
        if found is None:
            return None
        before = self._study.get_trials(deepcopy=False)
        tried = [trial.params for trial in before if "status" in facts_of(trial)]
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
    found: dict[str, Any] = trial.user_attrs.get("outcome", {"reason": "interrupted"})
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


def _line(number: int, proposal: Proposal, outcome: TrialOutcome) -> str:
    settings = " ".join(overrides_of(proposal))
    if outcome.value is None:
        return f"trial {number}: {settings}: failed, {outcome.reason}"
    kept = "" if not outcome.broken else f", not {', not '.join(outcome.broken)}"
    return f"trial {number}: {settings}: {outcome.value:g}{kept}"


TABLE_NAME: Final = "trials.csv"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m harness.search` with the given arguments; return its exit code."""
    return exit_code(_run, sys.argv[1:] if argv is None else argv)


def _run(argv: Sequence[str]) -> int:
    request = parse_request(argv)
    if request is None:
        sys.stdout.write(HELP)
        return EXIT_OK
    require_optuna()
    with sigterm_as_interrupt():
        return search(request)


def search(request: SearchRequest) -> int:
    """Run a search until its budget is spent; return the exit code.

    After Ctrl-C, which is raised again, trials that ended are kept.
    """
    folder = tightfit_home() / "searches" / request.name
    require_writable("TIGHTFIT_HOME", folder)
    runner = TrialRunner(Composer(request.config_dir), request.base, request.goal)
    config = _check(runner, request)
    with open_study(request, folder) as study:
        say(f"search {request.name}: {study.num_built()} of {request.trials} trials have run.")

        def run_trial(index: int, proposal: Proposal) -> TrialOutcome:
            context = _context(request, config.model.name, folder, index, study.num_built() + 1)
            return runner.run(overrides_of(proposal), context)

        interrupt: KeyboardInterrupt | None = None
        try:
            ended = study.run(run_trial, say)
        except KeyboardInterrupt as error:
            ended, interrupt = "interrupted", error
        with interrupt_afterwards(interrupt):
            is_found = _conclude(request, study, runner, config, folder, ended)
    return EXIT_OK if is_found and not study.is_early else EXIT_NOT_ALL_OK


def _check(runner: TrialRunner, request: SearchRequest) -> RunConfig:
    """Check base and goal with the first combination that composes, and return that."""
    try:
        return runner.check_goal(overrides_of(request.space.first()))
    except ConfigError as error:
        try:
            return runner.check_goal([])
        except ConfigError:
            raise error from None


def _context(
    request: SearchRequest, model: str, folder: Path, index: int, number: int = 0
) -> SweepContext:
    # Hydra's spelling of the base may differ; what varies is named by what is not in it.
    base = {item.lstrip("+") for item in request.base}
    shared = tuple(spelling for item in base for spelling in (item, f"+{item}", f"++{item}"))
    name = request.name.removeprefix("search-")
    extreme = "highest" if request.goal.is_maximum else "lowest"
    return SweepContext(
        sweep_id=request.name,
        folder=folder,
        index=index,
        total=request.trials,
        shared=shared,
        number=number,
        title=f"{model}: search {name}, {extreme} {request.goal.metric}",
    )


def _conclude(
    request: SearchRequest,
    study: Study,
    runner: TrialRunner,
    first: RunConfig,
    folder: Path,
    ended: str,
) -> bool:
    """Write tables and the best trial, close the tracker's run; return whether there is one."""
    from harness.sweep.track import finish_sweep  # noqa: PLC0415  not for requests that are wrong

    trials = study.trials()
    write_text_atomic(folder / TABLE_NAME, _table(trials))
    best = study.best()
    found = [] if best is None else _best_lines(request, runner, folder, best)
    records, view = _records(trials, folder), None
    if study.num_built():  # the tracker shows the search since its first trial
        warnings, view = finish_sweep(
            first.tracking,
            _context(request, first.model.name, folder, 0),
            list(records.values()),
            interrupted=ended == "interrupted",
            is_ok=best is not None,
            trials=list(records),
        )
        for text in warnings:
            say(f"warning: {text}")
    failed = sum(trial.value is None for trial in trials)
    lines = ["", f"search {request.name}: {len(trials)} trials, {failed} failed ({ended})"]
    lines += found or ["  no trial has a value that keeps the constraints"]
    lines.append(f"  all trials     {folder / TABLE_NAME}")
    page = folder / "sweep.html"
    lines += [f"  report         {page}"] if page.is_file() else []
    lines += [] if view is None else [f"  compare        {view}"]
    show(lines)
    return best is not None


def _records(trials: Sequence[Any], folder: Path) -> dict[int, RunRecord]:
    """Return number -> record of all trials that were built, also by processes before.

    Without records that cannot be read: the report says so of them.
    """
    found = {point.folder.name: point.record for point in each_point(folder)}
    records = {trial.number: found.get(str(trial.number)) for trial in trials}
    return {number: record for number, record in records.items() if record is not None}


def _best_lines(request: SearchRequest, runner: TrialRunner, folder: Path, best: Any) -> list[str]:
    config, spelled = runner.compose(overrides_of(best.params))
    goal = request.goal
    why = f"Trial {best.number} of search {request.name}: {goal.metric} {number(best.value)}."
    command = write_best(folder, spelled, config, why=why, config_dir=request.config_dir)
    settings = " ".join(overrides_of(best.params))
    return [
        f"  best measured  trial {best.number}: {goal.metric} {number(best.value)} with {settings}",
        f"                 {ONE_RUN_EACH}",
        f"  its run        {facts_of(best)['folder']}",
        f"  again          {command}",
    ]


def _table(trials: Sequence[Any]) -> str:
    """Return all trials as CSV."""
    keys = list(dict.fromkeys(key for trial in trials for key in trial.params))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["trial", "state", "status", "value", "not_kept", "reason", "folder", *keys])
    for trial in trials:
        facts = facts_of(trial)
        state = "fail" if trial.value is None else "complete"
        lead = [trial.number, state, facts.get("status"), trial.value]
        rest = ["; ".join(facts.get("broken", [])), facts.get("reason"), facts.get("folder")]
        values = [trial.params.get(key) for key in keys]
        values = [round(each, DIGITS) if isinstance(each, float) else each for each in values]
        writer.writerow([*lead, *rest, *values])
    return buffer.getvalue()


if __name__ == "__main__":
    outlive_readers()
    sys.exit(main())
