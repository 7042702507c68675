"""Run what a command line asks for: every point checked first, then one after another by Hydra."""

import re
import secrets
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from omegaconf import Container, DictConfig, OmegaConf

from harness.cli_args import CommandLine
from harness.complaints import explain
from harness.composition import CONFIG_NAME, DEMO_MODEL, Composer, Plan, Point, to_run_config
from harness.errors import EXIT_INTERRUPTED, EXIT_NOT_ALL_OK, EXIT_OK, ConfigError
from harness.folders import CONF
from harness.keys import unknown_key
from harness.models.home import tightfit_home
from harness.overview import sweep_lines
from harness.schema import RunConfig, SweepContext
from reports.record import RESULT_NAME, RecordError, RunRecord

__all__ = ["run"]

_ABSENT: Final = object()


def run(line: CommandLine) -> int:
    """Compose every point, check them all, then run them; return the exit code.

    Raises:
        ConfigError: something in the command line or a file is wrong; nothing was run.
    """
    plan = Composer(line.config_dir).plan(line.overrides, multirun=line.multirun)
    if plan.is_demo:
        _say(
            f"No model chosen: taking the demo model {DEMO_MODEL}. model=NAME chooses one, --help "
            "lists them."
        )
    for message in dict.fromkeys(text for point in plan.points for text in point.warnings):
        _say(f"warning: {message}")
    if line.cfg is not None:
        sys.stdout.write("---\n".join(_print_point(point, line) for point in plan.points))
        return EXIT_OK
    _make_home()
    modes = {point.config.mode for point in plan.points}
    if len(modes) > 1:
        raise ConfigError("mode: expected run or plan for all points, got both. Run them apart.")
    if modes == {"plan"}:
        from harness.forecast.command import show_plans  # noqa: PLC0415  not for runs

        return show_plans(plan)
    _check_folder(plan)
    return _Session(plan, line.config_dir).run()


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _make_home() -> None:
    folder = tightfit_home() / "runs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"TIGHTFIT_HOME: expected a folder that can be written, got {tightfit_home()} "
            f"({error.strerror}). Set TIGHTFIT_HOME to another one."
        ) from error


def _check_folder(plan: Plan) -> None:
    """Refuse a folder of the user's choice that holds records, before anything runs."""
    hydra_node = plan.points[0].composed.hydra
    name, pattern = ("sweep", f"*/{RESULT_NAME}") if plan.multirun else ("run", RESULT_NAME)
    folder = Path(str(hydra_node[name].dir))
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


@dataclass(kw_only=True)
class _Progress:
    records: list[RunRecord] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    sweep: SweepContext | None = None


class _Session:
    """The points of one command, their records, and how they end."""

    def __init__(self, plan: Plan, config_dir: Path | None) -> None:
        self._plan = plan
        self._config_dir = config_dir
        self._done = _Progress()
        self._suffix = f"-{secrets.token_hex(3)}"

    def run(self) -> int:
        """Let Hydra run every point; return the exit code."""
        arguments = list(self._plan.overrides)
        if self._plan.multirun:
            arguments.append("--multirun")
        if self._config_dir is not None:
            arguments += ["--config-dir", str(self._config_dir.resolve())]
        start = hydra.main(version_base="1.3", config_path=str(CONF), config_name=CONFIG_NAME)
        try:
            with _arguments(arguments):
                start(self._task)()
        except KeyboardInterrupt:
            self._add_interrupted()
            self._finish_sweep(interrupted=True)
            return EXIT_INTERRUPTED
        self._finish_sweep(interrupted=False)
        statuses = [record.status for record in self._done.records]
        all_ran = len(statuses) == len(self._plan.points)
        return EXIT_OK if all_ran and set(statuses) == {"ok"} else EXIT_NOT_ALL_OK

    def _task(self, composed: DictConfig) -> None:
        """Run one point; it ends with a record whatever happens."""
        from harness.point import run_point, skip_point  # noqa: PLC0415  not for --cfg and errors

        job = HydraConfig.get()
        folder = Path(job.runtime.output_dir)
        overrides = [str(item) for item in job.overrides.task]
        config, _ = to_run_config(composed)
        sweep = self._context(job) if self._plan.multirun else None
        self._done.sweep = sweep
        self._done.folders.append(folder)
        failed = [record.name for record in self._done.records if record.status != "ok"]
        try:
            if config.fail_fast and failed:
                reason = f"fail_fast=true, and {failed[0]} is not ok."
                record = skip_point(config, folder, overrides, sweep, reason=reason)
            else:
                record = run_point(config, folder, overrides, sweep)
        except Exception as error:  # noqa: BLE001  the edge: a point never ends a sweep
            traceback.print_exc()
            record = _crashed(error, config, folder, overrides)
        self._done.records.append(record)

    def _context(self, job: HydraConf) -> SweepContext:
        folder = Path(job.sweep.dir).resolve()
        first, *others = (point.overrides for point in self._plan.points)
        shared = [item for item in first if all(item in other for other in others)]
        return SweepContext(
            sweep_id=self._sweep_id(folder),
            folder=folder,
            index=int(job.job.num),
            total=len(self._plan.points),
            shared=tuple(shared),
        )

    def _sweep_id(self, folder: Path) -> str:
        """Return a name that no other sweep has, of letters that a tracker can search for."""
        if folder.parent == (tightfit_home() / "runs").resolve():
            return folder.name
        return re.sub(r"[^\w.-]", "_", folder.name, flags=re.ASCII) + self._suffix

    def _add_interrupted(self) -> None:
        """Take over the record that an interrupted point left on disk."""
        if len(self._done.folders) > len(self._done.records):
            try:
                self._done.records.append(RunRecord.read(self._done.folders[-1] / RESULT_NAME))
            except RecordError:
                return

    def _finish_sweep(self, *, interrupted: bool) -> None:
        from harness.sweep import finish_sweep  # noqa: PLC0415  not for --cfg and errors

        sweep = self._done.sweep
        if sweep is None:
            return
        warnings = finish_sweep(
            self._plan.points[0].config.tracking,
            sweep,
            self._done.records,
            interrupted=interrupted,
        )
        for text in warnings:
            _say(f"warning: {text}")
        lines = sweep_lines(self._done.records, self._done.folders, sweep)
        sys.stdout.write("\n".join(lines) + "\n")


@contextmanager
def _arguments(values: Sequence[str]) -> Iterator[None]:
    """Let Hydra, which reads sys.argv, see these arguments."""
    before = sys.argv
    sys.argv = [before[0], *values]
    try:
        yield
    finally:
        sys.argv = before


def _crashed(error: Exception, config: RunConfig, folder: Path, overrides: list[str]) -> RunRecord:
    """Return the record of a point whose own harness failed, written if there is none yet."""
    record = RunRecord(
        run_id=folder.name,
        name=config.model.name,
        status="failed",
        error={
            "type": type(error).__name__,
            "message": str(error),
            "phase": "harness",
            "traceback": traceback.format_exc(),
        },
        config=config.to_dict(),
        overrides=overrides,
    )
    if not (folder / RESULT_NAME).exists():  # never over the record of another point
        record.write(folder / RESULT_NAME)
    return record
