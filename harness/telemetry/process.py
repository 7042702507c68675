"""The parent's side of the sampler: start it, say whom to watch, end it, keep its rows."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from harness.telemetry.spool import write_parquet

SAMPLER_COMMAND: Final = (sys.executable, "-m", "harness.telemetry")
GRACE_S: Final = 2.0
"""Seconds that the sampler has to write its last row."""


class Sampler:
    """A sampler in a process of its own. Its troubles become warnings and cost no run.

    Args:
        run_dir: the run's folder, where the rows go.
        gpu_uuid: of the run's GPU; None for a run without one.
        command: what runs the sampler; the arguments are appended.
    """

    def __init__(
        self, run_dir: Path, gpu_uuid: str | None, command: Sequence[str] = SAMPLER_COMMAND
    ) -> None:
        self._run_dir = run_dir
        self._process: subprocess.Popen[bytes] | None = None
        self.warnings: list[str] = []
        """What went wrong, once it was closed."""
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        arguments = [str(run_dir), "--parent", str(os.getpid())]
        if gpu_uuid is not None:
            arguments += ["--gpu", gpu_uuid]
        try:
            self._process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C ends the workers; the sampler sees them end
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        except OSError as error:
            self.warnings.append(f"telemetry: the sampler did not start: {error}.")

    @property
    def pid(self) -> int | None:
        """Process id of the sampler, None where it did not start."""
        return None if self._process is None else self._process.pid

    def watch(self, pid: int, job: str) -> None:
        """Say which worker runs now."""
        self._tell(f"{pid} {job}\n")

    def unwatch(self) -> None:
        """Say that no worker runs now."""
        self._tell("0\n")

    def _tell(self, line: str) -> None:
        pipe = None if self._process is None else self._process.stdin
        if pipe is None or pipe.closed:
            return
        try:
            pipe.write(line.encode())
            pipe.flush()
        except OSError:  # it ended; close() says why
            return

    def close(self) -> None:
        """End the sampler and turn its rows into a Parquet file; the second call does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        message = _end(process)
        if message is not None:
            self.warnings.append(f"telemetry: {message} Rows after its end are missing.")
        warning = write_parquet(self._run_dir)
        if warning is not None:
            self.warnings.append(warning)


def _end(process: subprocess.Popen[bytes]) -> str | None:
    """Close the sampler's input, wait for it and return what is wrong with its end."""
    try:
        _, errors = process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"the sampler did not end within {GRACE_S:g} s and was killed."
    except BaseException:
        process.kill()
        process.wait()
        raise
    if process.returncode == 0:
        return None
    lines = errors.decode(errors="replace").strip().splitlines()
    why = lines[-1].rstrip(".") if lines else "no message"
    return f"the sampler ended with exit code {process.returncode} ({why})."
