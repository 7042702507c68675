"""One worker process: start it, wait for it without spinning, and leave nothing of it behind."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from harness.job import WORKER_LOG_NAME
from harness.silence import Silence

WORKER_COMMAND: Final = (sys.executable, "-m", "harness.worker")
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

        Args:
            deadline_s: time.monotonic() at which the worker is ended; None: never.
            silence: says when the worker has done nothing for too long; None: never.
            on_tick: called about every `tick_s` seconds meanwhile.
            tick_s: seconds.
            grace_s: seconds that the worker has to end itself after SIGTERM.
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


def let_threads_sleep(environ: MutableMapping[str, str]) -> None:
    """Keep threads from spinning at barriers, unless it is set; torch reads it when it is imported.

    They starve each other where other processes want the cores too: with two threads on two busy
    cores a decode step of 8 sequences took 1458 ms, now 214.
    """
    environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def start_worker(
    run_dir: Path,
    job: str,
    *,
    command: Sequence[str] = WORKER_COMMAND,
    environ: Mapping[str, str] | None = None,
) -> WorkerProcess:
    """Start the worker for the job `job` of a run folder; its output goes to worker.log.

    Args:
        run_dir: the run's folder, which holds the job.
        job: name of the job.
        command: what runs the worker; the arguments are appended.
        environ: variables to add to this process's environment.
    """
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    variables = {**os.environ, **(environ or {}), "PYTHONPATH": os.pathsep.join(paths)}
    let_threads_sleep(variables)
    variables["PYTHONUNBUFFERED"] = "1"  # a killed worker's last words reach the log
    arguments = ["--job", job, "--parent", str(os.getpid()), "--spawned-s", repr(time.monotonic())]
    with (run_dir / WORKER_LOG_NAME).open("ab") as log:
        log.write(f"--- {job}\n".encode())
        log.flush()
        process = subprocess.Popen(
            [*command, str(run_dir), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=variables,
        )
    return WorkerProcess(process)
