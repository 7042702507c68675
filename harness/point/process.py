"""One worker process: start it, wait for it without spinning, and leave nothing of it behind."""

import contextlib
import errno
import os
import pickle
import select
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from catalogue.checkpoint import ModelUnavailableError
from catalogue.processes import module_command, signal_name, start_child
from catalogue.terminal import ErrorFacts, error_facts
from engine.asked.config import EngineConfig
from engine.errors import CapacityError, EngineError
from engine.sealed import GIB
from harness.config.schema import FakeScript, ScenarioConfig, SystemConfig
from harness.observe.statistics import TTable
from harness.point.full_disk import is_full
from harness.work.correctness import WrongTokensError
from harness.work.prompts import PromptError, PromptRow
from harness.work.trace import TraceRow

SAMPLES_NAME: Final = "samples.jsonl"
WORKER_LOG_NAME: Final = "worker.log"
JOBS_FOLDER: Final = "jobs"
PLAN_PHASE: Final = "plan"
"""Phase of a reference job in which it plans the engine under test."""
UNFINISHED: Final = "unfinished"
"""Status of a worker's result until its job is done."""


@dataclass(frozen=True, kw_only=True)
class WorkerJob:
    """One start of the engine in a process of its own."""

    name: str
    """Unique in the run folder: measure, reference, load-cold-1, load-warm-1, ..."""
    kind: str
    """measure | load | reference | yardstick."""
    engine: EngineConfig
    scenario: ScenarioConfig
    system: SystemConfig = field(default_factory=SystemConfig)
    """What answers the requests."""
    fake: FakeScript | None = None
    """What an engine that computes nothing pretends; None: a real one."""
    prompts: dict[str, list[PromptRow]] = field(default_factory=dict)
    """Part of the scenario -> rows of its prompts_file."""
    trace: list[TraceRow] = field(default_factory=list)
    """Rows of the trace of scenario.serve."""
    reference: Path | None = None
    """File of the reference tokens: read by measure (None: no comparison), written by reference."""
    yardstick: Path | None = None
    """File, or run's folder, of the tokens that quality is held against: read by measure (None:
    none), written by yardstick."""
    under_test: EngineConfig | None = None
    """The configuration that a reference is for, planned before the reference is built."""
    gpu_uuid: str | None = None
    """The GPU whose energy counter is read."""
    t: TTable = field(default_factory=TTable)
    """Student's t for repeats and drifts of the scenario."""
    salt: str = field(default_factory=lambda: uuid4().hex)
    """Begins the salts of all requests: a server outlives the run and keeps prefixes."""

    def write(self, run_dir: Path) -> None:
        """Store the job where the worker finds it."""
        path = job_path(run_dir, self.name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps(self))


def read_job(run_dir: Path, name: str) -> WorkerJob:
    """Return the job `name` of a run folder, as its parent stored it."""
    job = pickle.loads(job_path(run_dir, name).read_bytes())  # noqa: S301  written by our parent
    if not isinstance(job, WorkerJob):
        raise TypeError(f"{job_path(run_dir, name)}: expected a WorkerJob, got {type(job)}.")
    return job


def job_path(run_dir: Path, name: str) -> Path:
    """Return the file that holds a job."""
    return run_dir / JOBS_FOLDER / f"{name}.pickle"


def result_path(run_dir: Path, name: str) -> Path:
    """Return the file that a worker writes its result to."""
    return run_dir / JOBS_FOLDER / f"{name}.result.json"


class Silence:
    """Whether a file was not written for too long.

    A worker writes state.json at every phase, twice a second while tokens come, and while bytes
    load; so one that does not, does nothing.
    """

    def __init__(self, path: Path, limit_s: float | None) -> None:
        self._path, self._limit_s = path, limit_s
        self._seen: int | None = None
        self._since_s = time.monotonic()

    def is_over(self) -> bool:
        """Return whether the limit has passed since the last write, or since the beginning."""
        if self._limit_s is None:
            return False
        try:
            written = self._path.stat().st_mtime_ns
        except OSError:
            written = None
        now_s = time.monotonic()
        if written != self._seen:
            self._seen, self._since_s = written, now_s
        return now_s - self._since_s >= self._limit_s


WORKER_COMMAND: Final = module_command("harness.worker")
GRACE_S: Final = 5.0
"""Seconds between SIGTERM and SIGKILL."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How a worker ended."""

    returncode: int
    """Negative: the number of the signal that ended it."""
    timed_out: bool = False
    """It was ended, at its deadline or for its silence."""
    is_silent: bool = False
    """It was ended because it said nothing for too long."""


class WorkerProcess:
    """A worker in a session and process group of its own, so that all of it can be ended."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._poll = select.poll()
        self._pidfd = os.pidfd_open(process.pid)
        self._poll.register(self._pidfd, select.POLLIN)
        self._returncode: int | None = None

    @property
    def pid(self) -> int:
        """Process id of the worker; its process group has the same number."""
        return self._process.pid

    def wait(
        self,
        *,
        deadline_s: float | None = None,
        silence: Silence | None = None,
        on_tick: Callable[[], None] | None = None,
        tick_s: float = 0.5,
        grace_s: float = GRACE_S,
    ) -> Exit:
        """Wait until the worker ends, or end it at the deadline or for its silence.

        `deadline_s` is a time.monotonic(); `on_tick` is called about every `tick_s` seconds
        meanwhile; after SIGTERM the worker has `grace_s` to end itself.
        """
        try:
            while True:
                left_s = tick_s
                if deadline_s is not None:
                    left_s = min(tick_s, max(0.0, deadline_s - time.monotonic()))
                if self._has_ended(left_s):
                    return Exit(returncode=self._reap())
                if deadline_s is not None and time.monotonic() >= deadline_s:
                    return Exit(returncode=self.stop(grace_s), timed_out=True)
                if silence is not None and silence.is_over():
                    return Exit(returncode=self.stop(grace_s), timed_out=True, is_silent=True)
                if on_tick is not None:
                    on_tick()
        except BaseException:
            self.stop(grace_s=0)
            raise

    def stop(self, grace_s: float = GRACE_S) -> int:
        """End the worker and its whole process group; return its exit code.

        The worker's stacks go to its log first (SIGUSR1), then SIGTERM, then SIGKILL.
        """
        if self._returncode is None and grace_s > 0 and not self._has_ended(0):
            for number in (signal.SIGUSR1, signal.SIGTERM):
                self._signal_group(number)
                self._has_ended(0.05)
            self._has_ended(grace_s)
        return self._reap()

    def _has_ended(self, timeout_s: float) -> bool:
        return self._returncode is not None or bool(self._poll.poll(timeout_s * 1e3))

    def _reap(self) -> int:
        """Kill what is left of the group, then collect the worker."""
        if self._returncode is None:
            # Not collected yet, so the group's number cannot belong to another process.
            self._signal_group(signal.SIGKILL)
            self._returncode = self._process.wait()
            os.close(self._pidfd)
        return self._returncode

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def start_worker(
    run_dir: Path,
    job: str,
    *,
    command: Sequence[str] = WORKER_COMMAND,
    environ: Mapping[str, str] | None = None,
) -> WorkerProcess:
    """Start the worker for the job `job` of a run folder; its output goes to worker.log.

    The arguments are appended to `command`, `environ` is added to this process's environment.
    """
    variables = {**os.environ, **(environ or {})}
    # Threads that spin at barriers starve each other where other processes want the cores too: with
    # two of them on two busy cores a decode step of 8 sequences took 1458 ms, now 214.
    variables.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    variables["PYTHONUNBUFFERED"] = "1"  # a killed worker's last words reach the log
    arguments = ["--job", job, "--parent", str(os.getpid()), "--spawned-s", repr(time.monotonic())]
    with (run_dir / WORKER_LOG_NAME).open("ab") as log:
        log.write(f"--- {job}\n".encode())
        log.flush()
        process = start_child(
            [*command, str(run_dir), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            environ=variables,
        )
    return WorkerProcess(process)


CLEAN_ERRORS: Final = (EngineError, ModelUnavailableError, PromptError, WrongTokensError)
"""Their message says it all; no traceback is kept."""
_OOM_TYPES: Final = {"OutOfMemoryError", "MemoryError"}
_OOM_TEXTS: Final = ("out of memory", "can't allocate memory", "cannot allocate memory")
_MESSAGE_CHARS: Final = 4000
_TAIL_LINES: Final = 40


def classify_exception(error: BaseException, phase: str) -> tuple[str, ErrorFacts]:
    """Return status and error of a run that `error` ended in `phase`."""
    status = "failed"
    if isinstance(error, CapacityError):
        status = "no_fit"
    elif _is_out_of_memory(error):
        status = "oom"
    is_clean = isinstance(error, CLEAN_ERRORS) or is_full(error)
    lines = None if is_clean else "".join(traceback.format_exception(error))
    message = str(error) or f"{type(error).__name__} without a message"
    kind = getattr(error, "kind", None)
    name = kind if isinstance(kind, str) else type(error).__name__
    return status, error_facts(name, message[:_MESSAGE_CHARS], phase, lines)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ in _OOM_TYPES:
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(part in text for part in _OOM_TEXTS)


def classify_exit(
    ended: Exit,
    *,
    job: str,
    state: Mapping[str, Any],
    num_oom_kills: int,
    timeout_s: float | None,
    silence_s: float | None,
    log: Path,
) -> tuple[str, ErrorFacts]:
    """Return status and error of a worker that ended without a result.

    `state` is its last state.json; `num_oom_kills` is by how much the kernel's counters rose
    meanwhile.
    """
    phase = str(state.get("phase") or "start")
    where = f"worker {job} in phase {phase}"
    status, kind = "failed", "WorkerExit"
    if ended.is_silent:
        status, kind = "timeout", "Silence"
        message = (
            f"{where}: nothing was done for silence_s={silence_s:g} s, so it was stopped; the "
            f"stacks of its threads are in {log}. Raise silence_s if a step or a pause may take "
            "so long."
        )
    elif ended.timed_out:
        status, kind = "timeout", "Timeout"
        message = (
            f"{where}: the point took longer than timeout_s={timeout_s:g} s and was stopped. Raise "
            "timeout_s, or ask for fewer requests or tokens in scenario."
        )
    elif ended.returncode == -signal.SIGKILL and num_oom_kills > 0:
        status, kind = "oom", "HostOutOfMemory"
        message = (
            f"{where}: killed by the kernel for lack of host memory{_rss(state)}. Give this "
            "machine or container more, or keep less in it (weights that offload moves, "
            "kv.cpu_gib, an emulated GPU)."
        )
    elif ended.returncode < 0:
        status, kind = "killed", signal_name(-ended.returncode)
        message = f"{where}: ended by signal {kind}{_rss(state)}. See {log}."
    else:
        message = f"{where}: exit code {ended.returncode} and no result. See {log}."
    return status, error_facts(kind, message, phase, _tail(log) if status != "oom" else None)


def _rss(state: Mapping[str, Any]) -> str:
    peak = (state.get("memory") or {}).get("rss_peak_bytes")
    if not peak:
        return ""
    return (
        f" (its resident set had reached {peak / GIB:.2f} GiB when it last told; "
        "memory/host_rss_peak_gib has what telemetry saw)"
    )


def _tail(log: Path) -> str | None:
    """Return the last lines of the worker's output: stacks of a hang or a crash end up there."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    start = max((i for i, line in enumerate(lines) if line.startswith("--- ")), default=-1)
    return "\n".join(lines[start + 1 :][-_TAIL_LINES:]) or None
