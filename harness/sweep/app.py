"""Run what a command line asks for: every point checked first, then one after another by Hydra."""

import contextlib
import re
import secrets
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from omegaconf import Container, DictConfig, OmegaConf

from catalogue.files import make_home, tightfit_home
from catalogue.terminal import EXIT_NOT_ALL_OK, EXIT_OK, error_facts, say, show
from engine.errors import ConfigError
from harness.config.cli_args import CommandLine
from harness.config.compose import DEMO_MODEL, Composer, Plan, Point, explain, unknown_key
from harness.config.engine import missing_package
from harness.config.launchers import BASIC, keep_gpus_visible, make_importable
from harness.config.schema import RunConfig, SweepContext
from harness.point.describe import point_name, sweep_title
from harness.point.full_disk import (
    DiskFullError,
    full_disk_ends,
    is_full,
    require_room,
    require_writable,
    require_writable_stores,
)
from harness.point.rerun import TAKEN_FROM
from harness.point.streams import interrupt_afterwards, sigterm_as_interrupt
from harness.studies.ab import Comparison, Sides, check_comparisons
from harness.studies.run import Planned, StudyRun, check_studies
from harness.sweep.document import Document, of_runs
from harness.sweep.launch import FOLDER as POINTS_FOLDER
from harness.sweep.launch import BegunPoints, ComposedPoints, launch
from harness.sweep.track import sweep_lines
from reports.record.folders import SweepNote, write_planned
from reports.record.record import RESULT_NAME, RecordError, RunRecord


@dataclass(kw_only=True)
class PointTask:
    """Runs one composed configuration; a point ends with a record whatever happens."""

    points: ComposedPoints
    """All of the command."""
    sweep: SweepContext | None
    """Where the first point of a sweep stands; None: a single point."""
    planned: Planned = field(default_factory=dict)
    """Points of a study."""
    sides: Sides | None = None
    """The two sides of a comparison; None: there is none."""
    folders: list[Path] = field(default_factory=list)
    """Folders of the points that began in this process, in order."""
    records: list[RunRecord] = field(default_factory=list)
    """Records of the points that ended in this process, in order."""

    def __call__(self, _: DictConfig) -> None:
        """Run the point whose number Hydra's job has.

        Raises DiskFullError without room for its record, or for what comes after it.
        """
        job = HydraConfig.get()
        with sigterm_as_interrupt(), full_disk_ends():
            require_room(Path(job.runtime.output_dir))
            self._begin(job)
            if self.sweep is not None and int(job.job.num) + 1 < self.sweep.total:
                require_room(self.sweep.folder)  # Hydra writes before the next one is asked

    def _begin(self, job: HydraConf) -> None:
        folder = Path(job.runtime.output_dir)
        self.folders.append(folder)
        if self.sweep is None:
            self.records.append(self._run(self.points[0], folder, None, None))
            return
        index = int(job.job.num)
        point = self.points[index]
        config = point.config
        begun = BegunPoints(self.sweep.folder)
        if begun.is_stopped:
            return
        begun.begin(index, folder)
        config = config if config.rerun else replace(config, rerun="failed")
        reason = self._reason_to_skip(config, begun)
        with begun.ends_with_session():
            point = replace(point, config=config)
            sweep = replace(self.sweep, index=index, point_s=self._point_s(begun))
            record = self._run(point, folder, sweep, reason)
        self.records.append(record)

    def _ended(self, begun: BegunPoints) -> Sequence[RunRecord]:
        """Return the records of the points that ended, here or in other processes."""
        if self.sweep is None:
            return ()
        return self.records or list(begun.records(self.sweep.total).values())

    def _point_s(self, begun: BegunPoints) -> float | None:
        """Return the mean time of the points that ran; of those that did not begin to, none."""
        took_s = [
            record.duration_s
            for record in self._ended(begun)
            if record.duration_s is not None
            and record.status not in {"no_fit", "skipped"}
            and TAKEN_FROM not in record.effective
        ]
        return sum(took_s) / len(took_s) if took_s else None

    def _reason_to_skip(self, config: RunConfig, begun: BegunPoints) -> str | None:
        """Return why this point does not run, from how the others ended; None where it does."""
        if (missing := missing_package(config.system.kind)) is not None:
            return missing
        ended = self._ended(begun)
        failed = [record.name for record in ended if record.status != "ok"]
        if config.fail_fast and failed:
            return f"fail_fast=true, and {failed[0]} is not ok."
        if not config.monotone_stop or not ended:
            return None
        from harness.forecast.skip import certain_not_to_fit  # noqa: PLC0415  not for --cfg and errors

        return certain_not_to_fit(config, ended)

    def _run(
        self, point: Point, folder: Path, sweep: SweepContext | None, reason: str | None
    ) -> RunRecord:
        from harness.point.point import run_point, skip_point  # noqa: PLC0415  not for --cfg and errors

        config, overrides = point.config, point.overrides
        run_one = partial(run_point, config_dir=point.config_dir)
        try:
            if reason is not None:
                skip = partial(skip_point, reason=reason, config_dir=point.config_dir)
                return skip(config, folder, overrides, sweep)
            if self.sides is not None:
                return Comparison(point, folder, self.sides).run(run_one)
            if config.study is not None:
                return StudyRun(point, folder, self.planned).run(run_one)
            return run_one(config, folder, overrides, sweep)
        except Exception as error:
            if is_full(error):
                raise
            traceback.print_exc()
            kind, trace = type(error).__name__, traceback.format_exc()
            facts = error_facts(kind, str(error), "harness", trace)
            return failure_record(point, folder, sweep, status="failed", error=facts)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what ran here: a process that a launcher starts has seen nothing."""
        return vars(self) | {"folders": [], "records": []}


def failure_record(
    point: Point, folder: Path, sweep: SweepContext | None, *, status: str, error: dict[str, Any]
) -> RunRecord:
    """Return the record of a point that could not write one, written if there is none yet."""
    record = RunRecord(
        run_id=folder.name,
        name=point_name(point.config, point.overrides, sweep),
        status=status,
        error=error,
        config=point.config.to_dict(),
        overrides=point.overrides,
    )
    if not (folder / RESULT_NAME).exists():  # never over the record of another point
        folder.mkdir(parents=True, exist_ok=True)
        record.write(folder / RESULT_NAME)
    return record


_ABSENT: Final = object()


def run(line: CommandLine, document: Document | None = None) -> int:
    """Compose every point, check them all, then run them; return the exit code.

    ConfigError: nothing was run. DiskFullError: points that ended have their records. What was
    found is put into `document` as data.
    """
    plan = Composer(line.config_dir).plan(line.overrides, multirun=line.multirun)
    if plan.is_demo:
        say(
            f"No model chosen: taking the demo model {DEMO_MODEL}. model=NAME chooses one, --help "
            "lists them."
        )
    for message in dict.fromkeys(text for point in plan.points for text in point.warnings):
        say(f"warning: {message}")
    if line.cfg is not None:
        sys.stdout.write("---\n".join(_print_point(point, line) for point in plan.points))
        return EXIT_OK
    _check_home()
    _check_store(plan)
    planned = check_studies(plan, line.config_dir)
    modes = {point.config.mode for point in plan.points}
    if len(modes) > 1:
        raise ConfigError("mode: expected run or plan for all points, got both. Run them apart.")
    if modes == {"plan"}:
        _check_planned(plan)
        if plan.multirun:  # which keeps a table
            make_home("runs")
        from harness.sweep.plan import show_plans  # noqa: PLC0415  not for runs

        return show_plans(plan, check_comparisons(plan, line.config_dir), document)
    _check_packages(plan)
    require_room(make_home("runs"))
    require_writable_stores([point.config.tracking for point in plan.points], tightfit_home())
    _check_folder(plan)
    _check_inputs(plan)
    session = _Session(plan, planned, check_comparisons(plan, line.config_dir))
    try:
        return session.run(_command(line))
    finally:
        if document is not None:
            document.update(of_runs(session.ended, session.sweep_folder))


def _check_packages(plan: Plan) -> None:
    """Refuse systems that are not installed; a sweep skips their points if others can run."""
    kinds = dict.fromkeys(point.config.system.kind for point in plan.points)
    missing = [text for text in map(missing_package, kinds) if text is not None]
    if len(missing) == len(kinds):
        raise ConfigError(missing[0])
    for text in missing:
        say(f"warning: {text} Its points are skipped.")


def _check_inputs(plan: Plan) -> None:
    """Read the files of prompts and traces once, so that a wrong row is refused before any run."""
    from harness.point.point import read_inputs  # noqa: PLC0415  not for --cfg and errors
    from harness.work.prompts import PromptError  # noqa: PLC0415

    for config in {repr(point.config.scenario): point.config for point in plan.points}.values():
        try:
            read_inputs(config)
        except PromptError as error:
            raise ConfigError(str(error)) from error


def _check_home() -> None:
    if "${" in str(tightfit_home()):
        raise ConfigError(
            f"TIGHTFIT_HOME: expected a path without ${{, which is a reference in a configuration, "
            f"got {tightfit_home()}. Set TIGHTFIT_HOME to another one."
        )


def _check_store(plan: Plan) -> None:
    """Refuse what is no address of a store, and a home that cannot be written in SQLite's."""
    home = str(tightfit_home())
    nodes = [point.config.tracking for point in plan.points]
    wrong = next((node.uri for node in nodes if node.uri and "://" not in node.uri), None)
    if wrong is not None:
        raise ConfigError(
            "tracking.uri: expected an address such as sqlite:////PATH/runs.db or "
            f"http://HOST:PORT, got {wrong!r}. Write it out."
        )
    if any(node.backend == "mlflow" and node.uri is None for node in nodes) and {*home} & {*"?%"}:
        raise ConfigError(
            f"TIGHTFIT_HOME: expected a path without ? and %, which the address of MLflow's "
            f"database cannot hold, got {home}. Set TIGHTFIT_HOME to another one, or choose "
            "tracking=none."
        )


def _check_planned(plan: Plan) -> None:
    """Refuse what has no effect on plans, which are made in this process."""
    launcher = plan.points[0].composed.hydra.runtime.choices["hydra/launcher"]
    if launcher != BASIC:
        raise ConfigError(
            f"hydra/launcher: {launcher} has no effect with mode=plan: plans are arithmetic. "
            "Remove it."
        )


def _check_folder(plan: Plan) -> None:
    """Refuse a folder of the user's choice that holds records, before anything runs."""
    hydra_node = plan.points[0].composed.hydra
    name, pattern = ("sweep", f"*/{RESULT_NAME}") if plan.multirun else ("run", RESULT_NAME)
    folder = Path(str(hydra_node[name].dir))
    require_writable(f"hydra.{name}.dir", folder)
    found = next(folder.glob(pattern), None)
    if found is not None:
        raise ConfigError(
            f"hydra.{name}.dir: expected a folder without records, found {found}. Choose another "
            "folder, or remove the setting."
        )


def _print_point(point: Point, line: CommandLine) -> str:
    """Return one point's configuration as YAML."""
    shown: object = point.composed
    if line.cfg == "job":
        shown = OmegaConf.masked_copy(
            point.composed, [str(key) for key in point.composed if key != "hydra"]
        )
    elif line.cfg == "hydra":
        shown = point.composed.hydra
    if line.package is not None:
        shown = OmegaConf.select(point.composed, line.package, default=_ABSENT)
        if shown is _ABSENT:
            raise unknown_key(line.package)
    if not isinstance(shown, Container):
        return "null\n" if shown is None else f"{shown}\n"
    try:
        return OmegaConf.to_yaml(shown, resolve=line.resolve)
    except Exception as error:
        raise explain(error) from error


def _command(line: CommandLine) -> str:
    """Return the command that starts the same sweep."""
    folder = [] if line.config_dir is None else ["--config-dir", str(line.config_dir.resolve())]
    return shlex.join(["tightfit", "sweep", *folder, *line.overrides])


class _Session:
    """The points of one command, their records, and how they end."""

    def __init__(self, plan: Plan, planned: Planned, sides: Sides | None) -> None:
        self._plan = plan
        self._hydra = plan.points[0].composed.hydra
        self._launcher = str(self._hydra.runtime.choices["hydra/launcher"])
        self._points = ComposedPoints(points=plan.points)
        self._task = PointTask(
            points=self._points,
            sweep=self._sweep() if plan.multirun else None,
            planned=planned,
            sides=sides,
        )
        self._is_shown = False
        """Whether a tracker may show the sweep although no point of it began."""
        self.ended: list[tuple[Path, RunRecord]] = []
        """Folder and record of every point that ended, after `run`."""
        self.sweep_folder = None if self._task.sweep is None else self._task.sweep.folder

    def run(self, command: str) -> int:
        """Let Hydra run every point and show what ended, after Ctrl-C too; return the exit code.

        `command` starts the same sweep, for its report.
        """
        sweep = self._task.sweep
        if sweep is not None:
            shutil.rmtree(sweep.folder / POINTS_FOLDER, ignore_errors=True)  # of a sweep cut short
            with full_disk_ends():
                note = SweepNote(num_points=sweep.total, command=command, title=sweep.title)
                write_planned(sweep.folder, note)
        records: list[tuple[Path, RunRecord]] | None = None
        interrupt: KeyboardInterrupt | None = None
        full: DiskFullError | None = None
        try:
            with sigterm_as_interrupt(), full_disk_ends():
                if sweep is not None and self._launcher != BASIC:
                    self._prepare_launch(sweep)
                self._launch()
                records = self._records(sweep)
        except KeyboardInterrupt as error:
            interrupt = error
        except DiskFullError as error:
            full = error
        with interrupt_afterwards(interrupt):
            if records is None:
                records = self._interrupted(sweep)
            if sweep is not None:
                self._finish_sweep(sweep, records, interrupted=interrupt is not None)
        self.ended = records
        if full is not None:
            raise full
        all_ran = len(records) == len(self._plan.points)
        statuses = {record.status for _, record in records}
        return EXIT_OK if all_ran and statuses == {"ok"} else EXIT_NOT_ALL_OK

    def _prepare_launch(self, sweep: SweepContext) -> None:
        """Get ready what processes of a launcher share, before there is any."""
        from harness.sweep.track import begin_sweep  # noqa: PLC0415  not for --cfg and errors

        make_importable()
        keep_gpus_visible(self._launcher)
        BegunPoints(sweep.folder).claim()
        self._points.save(sweep.folder / POINTS_FOLDER)
        tracking = self._plan.points[0].config.tracking
        self._is_shown = True
        for text in begin_sweep(tracking, sweep):
            say(f"warning: {text}")

    def _launch(self) -> None:
        try:
            launch(self._plan, self._points, self._task)
        except Exception as error:  # noqa: BLE001  of a launcher, or of a folder that Hydra makes
            # The points that it started have records, or get one.
            what = f"{type(error).__name__}: {error}"
            say(f"warning: hydra/launcher={self._launcher} ended early ({what}).")

    def _sweep(self) -> SweepContext:
        folder = Path(str(self._hydra.sweep.dir)).resolve()
        first, *others = (point.overrides for point in self._plan.points)
        return SweepContext(
            sweep_id=_sweep_id(folder),
            folder=folder,
            index=0,
            total=len(self._plan.points),
            shared=tuple(item for item in first if all(item in other for other in others)),
            began_s=time.time(),
            title=sweep_title([(point.config, point.overrides) for point in self._plan.points]),
        )

    def _records(self, sweep: SweepContext | None) -> list[tuple[Path, RunRecord]]:
        """Return folder and record of every point that ended, in order."""
        if sweep is None or self._launcher == BASIC:
            return list(zip(self._task.folders, self._task.records, strict=False))
        begun = BegunPoints(sweep.folder)
        begun.wait(sweep.total)
        return [self._collect(begun, sweep, index) for index in range(sweep.total)]

    def _interrupted(self, sweep: SweepContext | None) -> list[tuple[Path, RunRecord]]:
        """Return what there is after Ctrl-C; points in other processes are ended first."""
        if sweep is None:
            return []
        if self._launcher == BASIC:
            folders, records = self._task.folders, list(self._task.records)
            if len(folders) > len(records):
                with contextlib.suppress(RecordError):  # interrupted before it had one
                    records.append(RunRecord.read(folders[-1] / RESULT_NAME))
            return list(zip(folders, records, strict=False))
        begun = BegunPoints(sweep.folder)
        begun.end_all(sweep.total)
        indices = [index for index in range(sweep.total) if begun.owner(index) is not None]
        return [self._collect(begun, sweep, index) for index in indices]

    def _collect(
        self, begun: BegunPoints, sweep: SweepContext, index: int
    ) -> tuple[Path, RunRecord]:
        """Return folder and record of a point that a launcher ran; write one if it has none."""
        owner, record = begun.owner(index), begun.record(index)
        folder = Path(owner.folder) if owner is not None else sweep.folder / str(index)
        if record is not None:
            return folder, record
        what = "ended" if owner is not None else "was not started, or ended"
        if begun.is_stopped:  # a launcher may end its processes before they can write theirs
            what = "was interrupted and ended"
        message = (
            f"the job of hydra/launcher={self._launcher} {what} without a record. See its output "
            f"in {sweep.folder}."
        )
        point, here = self._plan.points[index], replace(sweep, index=index)
        facts = error_facts("LauncherJobEnded", message, "harness")
        return folder, failure_record(point, folder, here, status="killed", error=facts)

    def _finish_sweep(
        self, sweep: SweepContext, points: Sequence[tuple[Path, RunRecord]], *, interrupted: bool
    ) -> None:
        from harness.sweep.track import finish_sweep  # noqa: PLC0415  not for --cfg and errors

        if not (points or self._task.folders or self._is_shown):
            return
        folders = [folder for folder, _ in points]
        records = [record for _, record in points]
        warnings, view = finish_sweep(
            self._plan.points[0].config.tracking, sweep, records, interrupted=interrupted
        )
        for text in warnings:
            say(f"warning: {text}")
        show(sweep_lines(records, folders, sweep, view))


def _sweep_id(folder: Path) -> str:
    """Return a name that no other sweep has, of letters that a tracker can search for."""
    if folder.parent == (tightfit_home() / "runs").resolve():
        return folder.name
    suffix = f"-{secrets.token_hex(3)}"
    return re.sub(r"[^\w.-]", "_", folder.name, flags=re.ASCII) + suffix
