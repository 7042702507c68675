"""Processes of the project, which end with their parent. Imports little: they start with it."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, Final

from harness.folders import python_path

Stream = int | IO[bytes]
_PR_SET_PDEATHSIG: Final = 1


def start_child(
    command: Sequence[str],
    *,
    stdin: int,
    stdout: Stream,
    stderr: Stream,
    environ: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that finds the project, in a session of its own: Ctrl-C does not reach it.

    `environ` is added to this process's environment.
    """
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        env={
            **os.environ,
            **(environ or {}),
            "PYTHONPATH": python_path(os.environ.get("PYTHONPATH", "")),
        },
    )


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel end this process when its parent ends (Linux); called in the child."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before the call above
        os._exit(1)
