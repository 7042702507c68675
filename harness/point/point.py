"""One point: from its configuration to its record, whatever happens to the workers."""

import json
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from catalogue.files import read_json, tightfit_home
from harness.config.schema import RunConfig, SweepContext
from harness.folders import plain, write_yaml
from harness.observe.environment import collect
from harness.observe.gpu import Gpu
from harness.observe.run import Telemetry
from harness.point import describe
from harness.point.attempt import Attempt, Findings, PointEndedError, Surroundings
from harness.point.devices import OwnDevice, first_gpu, own_device
from harness.point.process import JOBS_FOLDER, WORKER_COMMAND, classify_exception
from harness.point.progress import Display, LiveView, open_display
from harness.point.rerun import Finished, FinishedPoints, fingerprint, input_hashes, take_over
from harness.point.show import build_report, print_summary
from harness.point.streams import interrupt_afterwards, sigterm_as_interrupt
from harness.tracking.base import GuardedTracker, NoTracker, PointFacts
from harness.tracking.choose import open_tracker
from harness.work.request_log import write_parquet
from reports.record.record import RESULT_NAME, STATE_NAME, RunRecord, write_text_atomic


def run_point(
    config: RunConfig,
    run_dir: Path,
    overrides: Sequence[str] = (),
    sweep: SweepContext | None = None,
    *,
    command: Sequence[str] = WORKER_COMMAND,
) -> RunRecord:
    """Run one point and return its record, which is also in `run_dir`.

    With `rerun` failed or none it is taken over from where it ended before, if it did. Whatever a
    worker does, and whatever the model, the reports or the tracker lack, ends as a status or a
    warning of the record.

    Args:
        config: what is asked.
        run_dir: a folder of this point's own, without a record; created when absent.
        overrides: as the user wrote them.
        sweep: the sweep that the point belongs to.
        command: what runs a worker.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; the worker is gone and the record written.
        FileExistsError: `run_dir` holds the record of another run.
    """
    point = _Point(config, _own_folder(run_dir), list(overrides), sweep)
    found = point.find_finished()
    return point.run(command) if found is None else point.take_over(found)


def skip_point(
    config: RunConfig,
    run_dir: Path,
    overrides: Sequence[str] = (),
    sweep: SweepContext | None = None,
    *,
    reason: str,
) -> RunRecord:
    """Write and return the record of a point that does not run; `reason` says why."""
    return _Point(config, _own_folder(run_dir), list(overrides), sweep).skip(reason)


def _own_folder(run_dir: Path) -> Path:
    """Create the point's folder; refuse one that holds a record already."""
    folder = run_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / RESULT_NAME).exists():
        raise FileExistsError(
            f"{folder}: expected a folder of this run's own, found the record of another. Choose "
            "another folder."
        )
    return folder


class _Point:
    """The files, the tracker's run and the record of one point."""

    def __init__(
        self, config: RunConfig, run_dir: Path, overrides: list[str], sweep: SweepContext | None
    ) -> None:
        self._config = config
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
            record = take_over(found, self._run_dir, name=self._name, overrides=self._overrides)
            facts = self._facts(run_id=record.run_id, taken_from=str(found.folder))
            tracker = self._start_tracker(facts)
            tracker.finish_point(record, self._run_dir)
            record = self._warn(record, tracker.warnings)
        sys.stdout.write(
            f"{self._name}: {record.status}, as it ended in {found.folder} (rerun=all runs it "
            "again)\n"
        )
        return record

    def run(self, command: Sequence[str]) -> RunRecord:
        """Run the point; see run_point."""
        display = open_display()
        tracker = GuardedTracker(NoTracker())  # until there is the one that is asked for
        interrupt: KeyboardInterrupt | None = None
        findings = Findings()
        try:
            with sigterm_as_interrupt():
                tracker = open_tracker(self._config.tracking, self._home)
                tracker.start_point(self._facts())
                with own_device(
                    self._config,
                    self._home,
                    owner=str(self._run_dir),
                    say=display.say,
                    any_gpu=self._sweep is None or not self._sweep.label,
                ) as device:
                    self._move_to(device, findings)
                    self._measure(findings, command, display, tracker)
        except KeyboardInterrupt as error:
            interrupt = error
            state = read_json(self._run_dir / STATE_NAME)
            findings.fail(
                "killed",
                {
                    "type": "Interrupted",
                    "message": "the harness was interrupted; the worker was ended.",
                    "phase": state.get("phase"),
                    "traceback": None,
                },
            )
        finally:
            display.close()
        with interrupt_afterwards(interrupt):
            record = self._finish(findings, tracker, with_report=interrupt is None)
            print_summary(record, self._run_dir, view_command=tracker.view_command())
        return record

    def skip(self, reason: str) -> RunRecord:
        """Record the point as skipped."""
        findings = Findings()
        error = {"type": "Skipped", "message": reason, "phase": None, "traceback": None}
        findings.fail("skipped", error)
        with interrupt_afterwards():
            tracker = self._start_tracker(self._facts())
            return self._finish(findings, tracker, with_report=False)

    def _start_tracker(self, facts: PointFacts) -> GuardedTracker:
        tracker = open_tracker(self._config.tracking, self._home)
        tracker.start_point(facts)
        return tracker

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

    def _measure(
        self,
        findings: Findings,
        command: Sequence[str],
        display: Display,
        tracker: GuardedTracker,
    ) -> None:
        telemetry = Telemetry(self._run_dir, self._gpu)
        view = LiveView(self._run_dir, display, tracker)
        around = Surroundings(
            run_dir=self._run_dir,
            home=self._home,
            environment=self._environment,
            gpu=self._gpu,
            command=command,
            on_start=telemetry.sampler.watch,
            on_tick=view.tick,
            on_end=telemetry.sampler.unwatch,
            say=display.say,
        )
        attempt = Attempt(self._config, around, findings)
        phase = "prepare"
        try:
            missing = telemetry.missing()
            if missing is not None:
                display.say(missing)
            attempt.prepare()
            phase = "run"
            attempt.run()
        except PointEndedError:
            pass
        except Exception as error:  # noqa: BLE001  the edge: a point never ends a sweep
            findings.fail(*classify_exception(error, phase))
        finally:
            view.flush()
            telemetry.close()
            findings.add_telemetry(telemetry)
            findings.warnings += filter(None, [write_parquet(self._run_dir)])

    def _finish(
        self, findings: Findings, tracker: GuardedTracker, *, with_report: bool
    ) -> RunRecord:
        """Write the record, then what is made from it; their troubles become warnings of it.

        The tracker comes last: what it is handed is the record that stays. Only where it fails
        then is the record written once more.
        """
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
        # An engine that was not built says nothing; without a GPU the tiers would be emulated.
        emulated = effective.get("emulated", self._gpu is None)
        environment = {**self._environment, "emulated": emulated}
        return RunRecord(
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

    def _judge(self, findings: Findings) -> bool | None:
        """Return whether the figures may be used; None where nobody compared the tokens."""
        if (findings.error or {}).get("type") == "WrongTokens":
            return False
        if findings.status == "ok" and findings.reasons:
            return False
        checked = findings.effective.get("correctness") or {}
        if findings.status != "ok" or not self._config.scenario.correctness.enabled:
            return None
        if checked.get("checked") is False:
            return None
        return True

    def _note_end(self, status: str) -> None:
        with suppress(OSError):
            (self._run_dir / JOBS_FOLDER).rmdir()
        path = self._run_dir / STATE_NAME
        state = read_json(path) | {"status": status, "ended_at": time.time()}
        write_text_atomic(path, json.dumps(plain(state)) + "\n")
