"""`python -m harness.search`: look for the best settings; request.HELP is its help."""

import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from engine.errors import ConfigError
from harness.config.compose import Composer
from harness.config.schema import RunConfig, SweepContext
from harness.errors import EXIT_BAD_CONFIG, EXIT_INTERRUPTED, EXIT_NOT_ALL_OK, EXIT_OK
from harness.point.full_disk import DiskFullError, full_disk_ends, require_writable
from harness.point.streams import interrupt_afterwards, outlive_readers, sigterm_as_interrupt
from harness.studies.search import (
    Outcome,
    Study,
    TrialRunner,
    facts_of,
    open_study,
    require_optuna,
    searches_folder,
    write_best,
)
from harness.studies.search_request import HELP, SearchRequest, parse_request
from harness.studies.search_space import Proposal, overrides_of
from reports.record.record import write_text_atomic
from reports.record.text import number

TABLE_NAME: Final = "trials.csv"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m harness.search` with the given arguments; return its exit code."""
    try:
        request = parse_request(sys.argv[1:] if argv is None else argv)
        if request is None:
            sys.stdout.write(HELP)
            return EXIT_OK
        require_optuna()
        with sigterm_as_interrupt(), full_disk_ends():
            return search(request)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_BAD_CONFIG
    except DiskFullError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_NOT_ALL_OK
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def search(request: SearchRequest) -> int:
    """Run a search until its budget is spent; return the exit code.

    Raises:
        ConfigError: the scenario does not measure what is asked for.
        KeyboardInterrupt: Ctrl-C; trials that ended are kept.
    """
    folder = searches_folder() / request.name
    require_writable("TIGHTFIT_HOME", folder)
    runner = TrialRunner(Composer(request.config_dir), request.base, request.goal)
    _check(runner, request)
    with open_study(request, folder) as study:
        _say(f"search {request.name}: {study.num_built()} of {request.trials} trials are there.")

        def run_trial(index: int, proposal: Proposal) -> Outcome:
            return runner.run(overrides_of(proposal), _context(request, folder, index))

        interrupt: KeyboardInterrupt | None = None
        try:
            ended = study.run(run_trial, _say)
        except KeyboardInterrupt as error:
            ended, interrupt = "interrupted", error
        with interrupt_afterwards(interrupt):
            is_found = _conclude(request, study, runner, folder, ended)
    return EXIT_OK if is_found else EXIT_NOT_ALL_OK


def _check(runner: TrialRunner, request: SearchRequest) -> None:
    """Check base and goal with the first combination that composes."""
    first = None
    for proposal in (request.space.first(), {}):
        try:
            runner.check_goal(overrides_of(proposal))
        except ConfigError as error:
            first = first or error
        else:
            return
    if first is not None:
        raise first


def _context(request: SearchRequest, folder: Path, index: int) -> SweepContext:
    # Hydra's spelling of the base may differ; what varies is named by what is not in it.
    base = {item.lstrip("+") for item in request.base}
    shared = tuple(spelling for item in base for spelling in (item, f"+{item}", f"++{item}"))
    return SweepContext(
        sweep_id=request.name, folder=folder, index=index, total=request.trials, shared=shared
    )


def _conclude(
    request: SearchRequest, study: Study, runner: TrialRunner, folder: Path, ended: str
) -> bool:
    """Write tables and the best trial, close the tracker's run; return whether there is one."""
    from harness.sweep.track import finish_sweep  # noqa: PLC0415  not for requests that are wrong

    trials = study.trials()
    write_text_atomic(folder / TABLE_NAME, _table(trials))
    best = study.best()
    if runner.tracking is not None:
        warnings = finish_sweep(
            runner.tracking,
            _context(request, folder, 0),
            runner.records,
            interrupted=ended == "interrupted",
            is_ok=best is not None,
        )
        for text in warnings:
            _say(f"warning: {text}")
    failed = sum(trial.value is None for trial in trials)
    lines = ["", f"search {request.name}: {len(trials)} trials, {failed} failed ({ended})"]
    if best is None:
        lines.append("  no trial has a value that keeps the constraints")
    else:
        lines += _best_lines(request, runner, folder, best)
    lines.append(f"  all trials  {folder / TABLE_NAME}")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
    return best is not None


def _best_lines(request: SearchRequest, runner: TrialRunner, folder: Path, best: Any) -> list[str]:
    config, spelled = _composed(runner, best.params)
    goal = request.goal
    why = f"Trial {best.number} of search {request.name}: {goal.metric} {number(best.value)}."
    command = write_best(folder, spelled, config, why=why, config_dir=request.config_dir)
    settings = " ".join(overrides_of(best.params))
    return [
        f"  best        trial {best.number}: {goal.metric} {number(best.value)} with {settings}",
        f"  its run     {facts_of(best)['folder']}",
        f"  again       {command}",
    ]


def _composed(runner: TrialRunner, params: Proposal) -> tuple[RunConfig, list[str]]:
    return runner.compose(overrides_of(params))


def _table(trials: Sequence[Any]) -> str:
    """Return all trials as CSV."""
    keys = list(dict.fromkeys(key for trial in trials for key in trial.params))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["trial", "state", "status", "value", "not_kept", "reason", "folder", *keys])
    for trial in trials:
        facts = facts_of(trial)
        lead = [trial.number, trial.state.name.lower(), facts.get("status"), trial.value]
        rest = ["; ".join(facts.get("broken", [])), facts.get("reason"), facts.get("folder")]
        writer.writerow([*lead, *rest, *(trial.params.get(key) for key in keys)])
    return buffer.getvalue()


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    outlive_readers()
    sys.exit(main())
