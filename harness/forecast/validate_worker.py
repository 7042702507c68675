"""Processes that engines of a validation run in."""

import contextlib
import json
import pickle
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Final

from catalogue.files import CONF
from harness.forecast.validate_cases import EngineCase

TIMEOUT_S: Final = 240
DONE: Final = "job done\n"
"""What the process writes behind each job; it ends where the engine left memory behind."""
MODULE: Final = "harness.forecast.validate_engine"


class Workers:
    """Runs jobs one after another.

    A case that shares its process runs in the one that the case before it left, if that gave its
    memory back: starting Python, CUDA and kernels takes longer than most engines. All others get a
    fresh process, whose peak and host memory are then those of that engine alone.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, job: EngineCase | str) -> dict[str, Any]:
        """Return a job's figures; `failed` says what it failed of where it did.

        Args:
            job: An engine, or the device to probe.
        """
        shares = isinstance(job, EngineCase) and job.shares_process
        if not shares:
            self.close()
        is_used = self._process is not None
        found = self._try(job)
        if is_used and "failed" in found:
            self.close()
            found = self._try(job)  # the engines before it may be why
        if not shares:
            self.close()
        return found

    def close(self) -> None:
        """End the process and wait for it."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def _try(self, job: EngineCase | str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder, "job.pickle"), Path(folder, "result.json")
            source.write_bytes(pickle.dumps(job))
            process = self._process or self._start()
            failure = _hand_over(process, f"{source}\t{target}\n")
            if failure is None:
                found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
                return found
        self.close()
        return {"failed": failure or f"exit code {process.returncode}"}

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            cwd=CONF.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="surrogateescape",  # names of folders may be any bytes
        )
        return self._process


def _hand_over(process: subprocess.Popen[str], line: str) -> str | None:
    """Return None where the job is done, else the last line that the process wrote."""
    last = ""
    timer = threading.Timer(TIMEOUT_S, process.kill)
    timer.start()
    try:
        if process.stdin is not None:
            process.stdin.write(line)
            process.stdin.flush()
        for words in process.stdout or ():
            if words == DONE:
                return None
            last = words.strip() or last
    except BrokenPipeError:
        last = ""
    finally:
        is_late = timer.finished.is_set()
        timer.cancel()
    return f"not done after {TIMEOUT_S} s" if is_late else last
