"""One point: from its configuration to its record, whatever happens to its workers."""

import hashlib
import json
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from catalogue.checkpoint import identify
from catalogue.files import expanded, read_json, tightfit_home
from catalogue.models import fetch, located
from catalogue.terminal import ErrorFacts, error_facts
from engine.asked.config import EngineConfig, ModelConfig
from engine.device.gpu import Gpu
from engine.errors import ConfigError
from engine.model.checkpoint import checkpoint_files, read_folder
from harness.config.engine import (
    check_yardstick,
    engine_config,
    reference_config,
    require_package,
    sizes_config,
    yardstick_config,
)
from harness.config.schema import RunConfig, SweepContext, SystemConfig
from harness.folders import plain, write_yaml
from harness.observe.environment import collect
from harness.observe.host import cached_share, drop_page_cache, num_new_kills, oom_kills
from harness.observe.machine_rates import read_rates
from harness.observe.run import Report, Telemetry
from harness.observe.statistics import TTable
from harness.observe.student import t_table
from harness.observe.window import Span
from harness.point import describe
from harness.point.devices import OwnDevice, first_gpu, own_device
from harness.point.process import (
    JOBS_FOLDER,
    PLAN_PHASE,
    UNFINISHED,
    WORKER_COMMAND,
    WORKER_LOG_NAME,
    Silence,
    WorkerJob,
    classify_exception,
    classify_exit,
    job_path,
    result_path,
    start_worker,
)
from harness.point.progress import Display, LiveView, display_title, open_display
from harness.point.rerun import Finished, FinishedPoints, fingerprint, input_hashes, take_over
from harness.point.show import build_report, point_title, print_summary
from harness.point.streams import interrupt_afterwards, sigterm_as_interrupt
from harness.tracking.base import GuardedTracker, PointFacts, Tracker
from harness.tracking.mlflow import open_tracker
from harness.work.correctness import read_reference, reference_key
from harness.work.load import summarise_loads
from harness.work.predicted import differences
from harness.work.prompts import PromptRow, read_prompts
from harness.work.quality import quality_text, read_yardstick, text_file
from harness.work.request_log import write_parquet
from harness.work.trace import TraceRow, check_lengths, read_trace
from reports.record.judging import believed
from reports.record.record import MEASURED, RESULT_NAME, STATE_NAME, RunRecord, write_text_atomic

COLD_SHARE: Final = 0.05
"""A start is cold when at most this share of the checkpoint is left in the page cache."""


@dataclass(kw_only=True)
class Findings(Report):
    """What is known of a point so far."""

    status: str = "ok"
    error: ErrorFacts | None = None
    plan: dict[str, Any] | None = None
    samples: dict[str, Any] = field(default_factory=dict)
    measured: list[str] = field(default_factory=list)
    """Parts of the scenario that were measured whole."""
    spans: list[Span] = field(default_factory=list)
    """What was timed, in order."""
    link_factor: float | None = None
    """Payload bytes per byte that the link's counter tells."""

    def fail(self, status: str, error: ErrorFacts) -> None:
        """Note why the point ended."""
        self.status, self.error = status, error

    def fail_part(self, asked: Sequence[str]) -> None:
        """Make the end that was noted that of one part, where other parts have figures.

        `asked` are the parts of the scenario.
        """
        error = self.error
        missing = [part for part in asked if part not in self.measured]
        if error is None or not self.measured or not missing:
            return
        failed = str(error.get("phase")).split(" ")[0]  # such as: latency warm-up
        failed = failed if failed in missing else missing[0]
        text = f"{failed} could not be measured ({self.status}): {error['message']}"
        facts = {"status": self.status, "measured": list(self.measured), "missing": missing}
        self.status, self.error = "partial", error | {"message": text} | facts

    def add(self, result: Mapping[str, Any]) -> None:
        """Take over a worker's result; what an earlier worker found stays."""
        if self.plan is None:
            self.plan = result.get("plan")
        for name in ("effective", "metrics", "samples"):
            mine = getattr(self, name)
            setattr(self, name, {**mine, **result.get(name, {}), **mine})
        for name in ("measured", "reasons", "notes", "warnings"):
            getattr(self, name).extend(result.get(name, []))


class PointEndedError(Exception):
    """A worker ended the point; the findings say how."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a point needs before it takes a device."""

    engine: EngineConfig
    """Configuration of the engine under test."""
    model_path: Path | None = None
    """Folder of the checkpoint; None: random weights."""
    model_facts: Mapping[str, Any] | None = None
    """Which checkpoint it is, for the record; None: no weights are read."""
    prompts: Mapping[str, list[PromptRow]] = field(default_factory=dict)
    """Part of the scenario -> rows of its prompts_file."""
    trace: Sequence[TraceRow] = ()
    yardstick: ModelConfig | Path | None = None
    """Plain weights whose greedy tokens quality is held against, or the folder of a run that has
    them; None: no tokens are compared."""


def read_inputs(config: RunConfig) -> tuple[dict[str, list[PromptRow]], list[TraceRow]]:
    """Return the rows of prompts by part of the scenario, and those of the trace.

    Raises:
        PromptError: A file cannot be read, or has rows that cannot be used; names their lines.
    """
    scenario, prompts, trace = config.scenario, dict[str, list[PromptRow]](), list[TraceRow]()
    for node in (scenario.throughput, scenario.latency, scenario.serve):
        if node is not None and node.prompts_file is not None:
            prompts[node.part] = read_prompts(expanded(node.prompts_file), node.num_rows)
    if scenario.serve is not None and scenario.serve.trace is not None:
        trace = read_trace(scenario.serve.trace, scenario.serve.num_requests)
    return prompts, trace


def prepare(config: RunConfig, say: Callable[[str], None]) -> Inputs:
    """Check prompts and traces and get the model, before a device is waited for.

    `say` gets a line before each long step. Raises what each of them raises.
    """
    require_package(config.system.kind)
    prompts, trace = read_inputs(config)
    serve = config.scenario.serve
    if config.scenario.quality is not None:
        quality_text(text_file(config.scenario.quality))
    if serve is not None and serve.trace is not None:
        for name, limit in config.length_limits().items():
            check_lengths(trace, serve.trace, limit_tokens=limit, limit_name=name)
    if not config.scenario.needs_engine:  # nothing of the model but its sizes
        return Inputs(engine=sizes_config(config, config.model.spec))
    path = fetch(config.model, report=say)
    load_format, is_fake = config.model.load_format, config.model.fake is not None
    return Inputs(
        engine=engine_config(config, path),
        model_path=path,
        model_facts={"source": "fake", "path": None} if is_fake else identify(path, load_format),
        prompts=prompts,
        trace=trace,
        yardstick=_yardstick_of(config, path),
    )


def _yardstick_of(config: RunConfig, path: Path | None) -> ModelConfig | Path | None:
    """Return what quality is held against; a model's weights are on this machine afterwards."""
    quality = config.scenario.quality
    if quality is None or not quality.num_prompts:
        return None
    if quality.reference is None:
        model = engine_config(config, path).model
        if path is not None:
            check_yardstick(config, read_folder(path).spec)
        return replace(model, quantize=None, keep_lossless=False)
    folder = expanded(quality.reference)
    if not (folder / RESULT_NAME).is_file():
        return replace(ModelConfig(**located(quality.reference)), quantize=None)
    if read_yardstick(folder) is None:
        raise ConfigError(
            f"scenario.quality.reference: expected the folder of a run with tokens of quality, "
            f"got {folder}, whose record has none. Run it with scenario.quality."
        )
    return folder


@dataclass(kw_only=True)
class Attempt:
    """Runs the workers of one point and gathers what they found."""

    config: RunConfig
    findings: Findings
    run_dir: Path
    home: Path
    environment: Mapping[str, Any]
    gpu: Gpu | None
    command: Sequence[str]
    """What runs a worker."""
    telemetry: Telemetry
    view: LiveView
    inputs: Inputs
    _deadline_s: float | None = None
    _unchecked: str | None = None

    def run(self) -> None:
        """Run all workers; PointEndedError where one ended otherwise than ok."""
        if self.config.timeout_s is not None:
            self._deadline_s = time.monotonic() + self.config.timeout_s
        scenario = self.config.scenario
        self._note_neighbours()
        reference = self._reference() if self._is_comparable() else None
        try:
            if scenario.is_timed or reference is not None:
                job = self._job("measure", "measure", reference)
                self._take(replace(job, yardstick=self._yardstick()))
            if scenario.load is not None:
                self._loads(scenario.load.cold_starts, scenario.load.warm_starts)
                self.findings.measured.append("load")
        except PointEndedError:
            self.findings.fail_part(scenario.part_names())
            raise
        finally:
            if self._unchecked is not None and self.findings.status in MEASURED:
                self.findings.reasons.append(self._unchecked)

    def _is_comparable(self) -> bool:
        """Return whether tokens are compared; a peer's dummy weights are not ours."""
        if not self.config.scenario.correctness.enabled:
            return False
        if self.config.system.api == "chat":
            why = (
                "correctness: the template of the server's chat makes other prompts, so no tokens "
                "were compared."
            )
        elif self.config.system.kind != "native" and self.config.model.load_format == "dummy":
            why = "correctness: dummy weights of two systems differ, so no tokens were compared."
        else:
            return True
        self.findings.effective["correctness"] = {"checked": False, "why": why}
        self.findings.notes.append(why)
        return False

    def _note_neighbours(self) -> None:
        """Note who else computes on the GPU now: their work is in our times."""
        count = len(self.gpu.compute_pids() or ()) if self.gpu else 0
        if count:
            self.findings.notes.append(
                f"gpu: {count} other processes computed on this GPU when the point began and take "
                "time and memory from it. Run the point when they have ended."
            )

    def _job(self, name: str, kind: str, reference: Path | None = None) -> WorkerJob:
        return WorkerJob(
            name=name,
            kind=kind,
            engine=replace(self.inputs.engine, measured_rates=self._measured_rates()),
            scenario=self.config.scenario,
            system=self.config.system,
            fake=self.config.model.fake,
            prompts=dict(self.inputs.prompts) if kind == "measure" else {},
            trace=list(self.inputs.trace) if kind == "measure" else [],
            reference=reference,
            gpu_uuid=self.gpu.uuid if self.gpu else None,
            t=self._t() if kind == "measure" else TTable(),
        )

    def _t(self) -> TTable:
        """Return Student's t for whatever the scenario may repeat or hold against itself."""
        scenario = self.config.scenario
        repeats, requests = [1], [len(self.inputs.trace)]
        for part in (scenario.throughput, scenario.latency, scenario.serve):
            if part is not None:
                repeats.append(part.repeats)
                requests.append(part.num_rows // part.repeats)
        if scenario.overhead is not None:
            repeats.append(scenario.overhead.repeats)
            requests.append(scenario.overhead.num_requests)
        return t_table(max(repeats), max(requests))

    def _measured_rates(self) -> dict[str, float | None]:
        """Return what is kept of this machine, under what an earlier worker of this point probed.

        So all workers of a point plan with the same.
        """
        prefix, kinds = "link/", ("_gb_s", "_us", "_overhead_s")
        kept = read_rates(self.gpu, self.home)
        return ({} if kept is None else kept.rates) | {
            name.removeprefix(prefix): rate
            for name, rate in self.findings.metrics.items()
            if name.startswith(prefix) and name.endswith(kinds) and rate is not None
        }

    def _reference(self) -> Path | None:
        """Return the file of the reference tokens, made now when absent; None if it cannot be."""
        config = reference_config(self.config, self.inputs.model_path)
        check = self.config.scenario.correctness
        fake = self.config.model.fake
        engine = "native" if fake is None else "fake"
        key = reference_key(config, asdict(check), self.environment, engine)
        path = self.home / "references" / f"{key}.json"
        is_kept = fake is None or not fake.fails_at("reference")  # it fails where it is made
        if is_kept and read_reference(path) is not None:
            return path
        lack = self._make(replace(self._job("reference", "reference", path), engine=config))
        if lack is None:
            return path
        self._unchecked = (
            f"correctness: the reference (every layer copied on demand, eager) could not be made "
            f"({lack}), so the tokens were not compared."
        )
        return None

    def _make(self, job: WorkerJob) -> str | None:
        """Run a worker that writes what this point is held against; return why it lacks room.

        The point ends where the worker fails otherwise, or the engine under test does not fit.
        """
        under_test = self.inputs.engine if self.config.system.kind == "native" else None
        job = replace(job, system=SystemConfig(), under_test=under_test)
        status, error, result = self._execute(job)
        if status in {"no_fit", "oom"} and error is not None and error["phase"] != PLAN_PHASE:
            return f"{status}: {error['message']}"
        self.findings.add({"plan": result.get("plan")})  # of the engine under test: no_fit's
        self._end_unless_ok(status, error)
        return None

    def _yardstick(self) -> Path | None:
        """Return the file of the tokens that quality is held against, made now when absent."""
        asked, quality = self.inputs.yardstick, self.config.scenario.quality
        if isinstance(asked, Path):
            return asked
        if quality is None or asked is None:
            return None
        config = yardstick_config(self.config, asked)
        counts = quality.num_prompts, quality.prompt_tokens, quality.output_tokens
        text = quality_text(text_file(quality))
        check = {"quality": counts, "text": hashlib.sha256(text.encode()).hexdigest()}
        key = reference_key(config, check, self.environment)
        path = self.home / "references" / f"{key}.json"
        if read_yardstick(path) is not None:
            return path
        job = self._job("yardstick", "yardstick")
        lack = self._make(replace(job, engine=config, yardstick=path))
        if lack is None:
            return path
        self.findings.reasons.append(
            f"quality: the plain weights (every layer copied on demand, eager) could not be run "
            f"({lack}), so greedy tokens were not compared. Give scenario.quality.reference the "
            "folder of a run that had this part on a larger machine, or set num_prompts=0."
        )
        return None

    def _loads(self, num_cold: int, num_warm: int) -> None:
        files = self._weight_files()
        if num_cold and not files:
            self.findings.notes.append(
                "load: dummy weights are made in memory, so there is no cold start; "
                f"cold_starts={num_cold} was skipped."
            )
            num_cold = 0
        names = [("cold", index) for index in range(1, num_cold + 1)]
        names += [("warm", index) for index in range(1, num_warm + 1)]
        rows = list[dict[str, Any]]()
        try:
            self._start_each(names, files, rows)
        finally:
            if rows:  # also of the starts before one that failed
                self._note_loads(rows)

    def _start_each(
        self, names: Sequence[tuple[str, int]], files: list[Path], rows: list[dict[str, Any]]
    ) -> None:
        """Start the engine for each kind and number, and add a row for each start."""
        kinds = [kind for kind, _ in names]
        for kind, index in names:
            if kind == "cold":
                drop_page_cache(files)
            share = cached_share(files)
            if kind == "cold":
                self._note_cold(share)
            result = self._take(self._job(f"load-{kind}-{index}", "load"), with_samples=False)
            (row,) = result["samples"]["load"]
            label = kind if kinds.count(kind) == 1 else f"{kind} {index}"
            rows.append({"start": label, "is_cold": kind == "cold", "cached_share": share, **row})

    def _note_loads(self, rows: list[dict[str, Any]]) -> None:
        outcome, metrics = summarise_loads(rows), self.findings.metrics
        metrics |= outcome.metrics
        predicted = (self.findings.plan or {}).get("predicted") or {}
        metrics["predicted/load_s"] = predicted.get("load_s")
        emulated = bool(self.findings.effective.get("emulated"))
        metrics |= differences(metrics, emulated=emulated)
        self.findings.samples["load"] = outcome.samples

    def _note_cold(self, share: float | None) -> None:
        if share is not None and share <= COLD_SHARE:
            return
        note = "load: this kernel does not show whether the page cache was dropped."
        if share is not None:
            note = (
                f"load: {share:.0%} of the checkpoint stayed in the page cache although the "
                "harness dropped it: the cold start is partly warm."
            )
        if note not in self.findings.notes:
            self.findings.notes.append(note)

    def _weight_files(self) -> list[Path]:
        model, path = self.config.model, self.inputs.model_path
        return [] if path is None or model.load_format == "dummy" else checkpoint_files(path)

    def _take(self, job: WorkerJob, *, with_samples: bool = True) -> dict[str, Any]:
        """Run a worker and take over what it found; end the point unless it was ok.

        Parts that had ended stay in the record, also where the rest was interrupted.
        """
        dropped: dict[str, Any] = {} if with_samples else {"samples": {}}
        try:
            status, error, result = self._execute(job)
        except KeyboardInterrupt:
            self.findings.add(self._result_of(job) | dropped)
            raise
        self.findings.add(result | dropped)
        self.findings.spans += [Span(job=job.name, **span) for span in result.get("windows", ())]
        self.findings.link_factor = result.get("link_factor") or self.findings.link_factor
        self._end_unless_ok(status, error)
        return result

    def _end_unless_ok(self, status: str, error: ErrorFacts | None) -> None:
        if status != "ok" and error is not None:
            self.findings.fail(status, error)
            raise PointEndedError

    def _result_of(self, job: WorkerJob) -> dict[str, Any]:
        """Return what a worker that ended has written; from then on the record holds it."""
        result = read_json(result_path(self.run_dir, job.name))
        for path_of in (result_path, job_path):
            path_of(self.run_dir, job.name).unlink(missing_ok=True)
        return result

    def _execute(self, job: WorkerJob) -> tuple[str, ErrorFacts | None, dict[str, Any]]:
        """Run one worker to its end; return status, error and its result."""
        run_dir = self.run_dir
        job.write(run_dir)
        (run_dir / STATE_NAME).unlink(missing_ok=True)  # of the worker before
        kills = oom_kills()
        visible = {"CUDA_VISIBLE_DEVICES": job.gpu_uuid} if job.gpu_uuid else {}
        worker = start_worker(run_dir, job.name, command=self.command, environ=visible)
        self.telemetry.watch(worker.pid, job.name)
        ended = worker.wait(
            deadline_s=self._deadline_s,
            silence=Silence(run_dir / STATE_NAME, self.config.silence_s),
            on_tick=self.view.tick,
        )
        self.telemetry.unwatch()
        result = self._result_of(job)
        if result.get("status", UNFINISHED) != UNFINISHED and not ended.timed_out:
            if ended.returncode != (0 if result["status"] == "ok" else 1):
                self.findings.warnings.append(
                    f"worker {job.name} ended with exit code {ended.returncode} after its result."
                )
            return str(result["status"]), result["error"], result
        status, error = classify_exit(
            ended,
            job=job.name,
            state=read_json(run_dir / STATE_NAME),
            num_oom_kills=num_new_kills(kills, oom_kills()),
            timeout_s=self.config.timeout_s,
            silence_s=self.config.silence_s,
            log=run_dir / WORKER_LOG_NAME,
        )
        return status, error, result


def run_point(
    config: RunConfig,
    run_dir: Path,
    overrides: Sequence[str] = (),
    sweep: SweepContext | None = None,
    *,
    config_dir: str | None = None,
    command: Sequence[str] = WORKER_COMMAND,
) -> RunRecord:
    """Run one point and return its record, which is also in `run_dir`.

    With `rerun` failed or none it is taken over from where it ended before, if it did. Whatever a
    worker does, and whatever the model, the reports or the tracker lack, ends as a status or a
    warning of the record; KeyboardInterrupt comes when the worker is gone and the record written.
    `run_dir` is a folder of its own, without a record, created when absent; `config_dir` is the
    user's folder of configurations; `command` runs a worker.
    """
    point = _Point(config, _own_folder(run_dir), list(overrides), sweep, config_dir)
    found = point.find_finished()
    return point.run(command) if found is None else point.take_over(found)


def skip_point(
    config: RunConfig,
    run_dir: Path,
    overrides: Sequence[str] = (),
    sweep: SweepContext | None = None,
    *,
    reason: str,
    config_dir: str | None = None,
) -> RunRecord:
    """Write and return the record of a point that does not run; `reason` says why."""
    return _Point(config, _own_folder(run_dir), list(overrides), sweep, config_dir).skip(reason)


def _own_folder(run_dir: Path) -> Path:
    """Create the point's folder; refuse one that holds a record already."""
    folder = run_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / RESULT_NAME).exists():
        what = "expected a folder of this run's own, found the record of another"
        raise FileExistsError(f"{folder}: {what}. Choose another folder.")
    return folder


class _Point:
    """The files, the tracker's run and the record of one point."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        overrides: list[str],
        sweep: SweepContext | None,
        config_dir: str | None,
    ) -> None:
        self._config = config
        self._config_dir = config_dir
        self._run_dir = run_dir
        self._overrides = overrides
        self._sweep = sweep
        self._home = tightfit_home()
        self._started = datetime.now(UTC).astimezone()
        self._begin_s = time.monotonic()
        self._run_id = f"{self._started:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        self._name = describe.point_name(config, overrides, sweep)
        self._gpu: Gpu | None = first_gpu(config)
        self._environment = collect(self._gpu)
        self._inputs = input_hashes(config)
        self._key = fingerprint(config, self._environment, self._inputs)
        self._ended = FinishedPoints(self._home)
        write_yaml(self._run_dir / "config.yaml", config.to_dict())
        write_yaml(self._run_dir / "overrides.yaml", overrides)

    def find_finished(self) -> Finished | None:
        """Return the same point where it ended before and need not run again."""
        before_s = self._sweep.began_s if self._sweep is not None else None
        return self._ended.find(self._key, self._config.rerun or "all", before_s=before_s)

    def take_over(self, found: Finished) -> RunRecord:
        """Take over the record and the files of the same point that ended before."""
        with interrupt_afterwards():
            record = take_over(
                found,
                self._run_dir,
                name=self._name,
                overrides=self._overrides,
                config_dir=self._config_dir,
            )
            tracker = open_tracker(self._config.tracking, self._home)
            facts = self._facts(run_id=record.run_id, taken_from=str(found.folder))
            tracker.take_over_point(facts, record, self._run_dir)
            record = self._warn(record, tracker.warnings)
        title = self._name if self._sweep is None else point_title(self._sweep, self._name)
        sys.stdout.write(
            f"{title}: {record.status}, as it ended in {found.folder} (rerun=all runs it again)\n"
        )
        return record

    def run(self, command: Sequence[str]) -> RunRecord:
        """Run the point; see run_point."""
        display = open_display(sweep=display_title(self._sweep, self._name))
        tracker = GuardedTracker(Tracker())  # until there is the one that is asked for
        interrupt: KeyboardInterrupt | None = None
        findings = Findings()
        try:
            with sigterm_as_interrupt():
                tracker = open_tracker(self._config.tracking, self._home)
                tracker.start_point(self._facts())
                inputs = self._prepare(findings, display.say)  # before a device is waited for
                if inputs is not None:
                    with own_device(
                        self._config,
                        self._home,
                        owner=str(self._run_dir),
                        say=display.say,
                        any_gpu=self._sweep is None or not self._sweep.label,
                    ) as device:
                        self._move_to(device, findings)
                        self._measure(inputs, findings, command, display, tracker)
        except KeyboardInterrupt as error:
            interrupt = error
            state = read_json(self._run_dir / STATE_NAME)
            message = "the harness was interrupted; the worker was ended."
            findings.fail("killed", error_facts("Interrupted", message, state.get("phase")))
        finally:
            display.close()
        with interrupt_afterwards(interrupt):
            record = self._finish(findings, tracker, with_report=interrupt is None)
            print_summary(
                record, self._run_dir, view_command=tracker.view_command(), sweep=self._sweep
            )
        return record

    def skip(self, reason: str) -> RunRecord:
        """Record the point as skipped."""
        findings = Findings()
        findings.fail("skipped", error_facts("Skipped", reason))
        with interrupt_afterwards():
            tracker = open_tracker(self._config.tracking, self._home)
            tracker.start_point(self._facts())
            return self._finish(findings, tracker, with_report=False)

    def _facts(self, run_id: str | None = None, **tags: str) -> PointFacts:
        """Return what a tracker shows; of a run elsewhere its id, and tags that say so."""
        own = {f"harness.{key}": value for key, value in tags.items()}
        return PointFacts(
            run_id=run_id or self._run_id,
            name=self._name,
            params=describe.flat_params(self._config, self._overrides),
            tags=describe.tags(self._config, self._environment) | own,
            sweep=self._sweep,
        )

    def _move_to(self, device: OwnDevice, findings: Findings) -> None:
        """Take over which GPU it became, and who computes beside it."""
        if device.gpu is not None and device.gpu.uuid != (self._gpu and self._gpu.uuid):
            self._gpu = device.gpu
            self._environment = collect(self._gpu)
        if device.num_busy:
            findings.notes.append(
                f"gpu: other points ran on {device.num_busy} other GPUs of this machine when this "
                "one began; they share host memory, processor and possibly links with it. Run "
                "points one after another to compare transfers."
            )

    def _prepare(self, findings: Findings, say: Callable[[str], None]) -> Inputs | None:
        """Return what the point needs; None where it cannot be had, which is noted."""
        try:
            inputs = prepare(self._config, say)
        except Exception as error:  # noqa: BLE001  the edge: a point never ends a sweep
            findings.fail(*classify_exception(error, "prepare"))
            return None
        if inputs.model_facts is not None:
            findings.effective["model"] = dict(inputs.model_facts)
        return inputs

    def _measure(
        self,
        inputs: Inputs,
        findings: Findings,
        command: Sequence[str],
        display: Display,
        tracker: GuardedTracker,
    ) -> None:
        telemetry = Telemetry(self._run_dir, self._gpu)
        view = LiveView(self._run_dir, display, tracker)
        attempt = Attempt(
            config=self._config,
            findings=findings,
            run_dir=self._run_dir,
            home=self._home,
            environment=self._environment,
            gpu=self._gpu,
            command=command,
            telemetry=telemetry,
            view=view,
            inputs=inputs,
        )
        try:
            missing = telemetry.missing()
            if missing is not None:
                display.say(missing)
            attempt.run()
        except PointEndedError:
            pass
        except Exception as error:  # noqa: BLE001  the edge: a point never ends a sweep
            findings.fail(*classify_exception(error, "run"))
        finally:
            view.flush()
            telemetry.close()
            uses_gpu = findings.effective.get("emulated") is False
            told = telemetry.report(findings.spans, findings.link_factor, uses_gpu=uses_gpu)
            findings.add(asdict(told))
            findings.warnings += filter(None, [write_parquet(self._run_dir)])

    def _finish(
        self, findings: Findings, tracker: GuardedTracker, *, with_report: bool
    ) -> RunRecord:
        """Write the record, then what is made from it; their troubles become warnings of it.

        The tracker comes last: what it is handed is the record that stays. Only where it fails
        then is the record written once more.
        """
        experiment_id = tracker.experiment_id()
        if experiment_id is not None:
            findings.effective["mlflow_experiment_id"] = experiment_id
        record = self._record(findings)
        try:
            record.write(self._run_dir / RESULT_NAME)
        except OSError as error:
            findings.fail(*classify_exception(error, "record"))
            tracker.finish_point(self._record(findings), self._run_dir)
            raise
        self._ended.note(self._key, self._run_dir, record)
        self._note_end(record.status)
        tracker.settle()
        before = list(tracker.warnings)
        record = self._warn(record, before)
        if with_report:
            record = self._warn(record, build_report(self._run_dir))
        tracker.finish_point(record, self._run_dir)
        return self._warn(record, tracker.warnings[len(before) :])

    def _warn(self, record: RunRecord, warnings: list[str]) -> RunRecord:
        """Return the record with the warnings added, in its file too."""
        if not warnings:
            return record
        effective = record.effective | {"warnings": [*record.effective["warnings"], *warnings]}
        record = replace(record, effective=effective)
        record.write(self._run_dir / RESULT_NAME)
        return record

    def _record(self, findings: Findings) -> RunRecord:
        effective = dict(findings.effective)
        effective["warnings"] = [*(effective.get("warnings") or []), *findings.warnings]
        effective["notes"] = findings.notes
        if self._inputs:
            effective["inputs"] = self._inputs
        if self._config_dir is not None:
            effective["config_dir"] = self._config_dir
        # An engine that was not built says nothing; without a GPU the tiers would be emulated. A
        # server has its own machine.
        own = None if self._config.system.kind == "http" else self._gpu is None
        environment = {**self._environment, "emulated": effective.get("emulated", own)}
        record = RunRecord(
            run_id=self._run_id,
            name=self._name,
            status=findings.status,
            error=plain(findings.error),
            valid=self._judge(findings),
            reasons=findings.reasons,
            started_at=self._started.isoformat(timespec="seconds"),
            duration_s=time.monotonic() - self._begin_s,
            config=plain(self._config.to_dict()),
            overrides=self._overrides,
            plan=plain(findings.plan),
            environment=plain(environment),
            effective=plain(effective),
            metrics=plain(findings.metrics),
            samples=plain(findings.samples),
        )
        return believed(record)

    def _judge(self, findings: Findings) -> bool | None:
        """Return whether the figures may be used; None where nobody compared the tokens."""
        if (findings.error or {}).get("type") == "WrongTokens":
            return False
        if findings.status not in MEASURED:
            return None
        if findings.reasons:
            return False
        correctness = findings.effective.get("correctness") or {}
        is_checked = correctness.get("checked") is not False
        return True if is_checked and self._config.scenario.correctness.enabled else None

    def _note_end(self, status: str) -> None:
        with suppress(OSError):
            (self._run_dir / JOBS_FOLDER).rmdir()
        path = self._run_dir / STATE_NAME
        state = read_json(path) | {"status": status, "ended_at": time.time()}
        write_text_atomic(path, json.dumps(plain(state)) + "\n")
