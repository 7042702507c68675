"""Processes of the project: the name of a module, how one is started, and its end with its parent.

Imports little: they start with it.
"""

import ctypes
import os
import signal
import site
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

ROOT: Final = Path(__file__).resolve().parents[1]
"""Holds the project's folders: a checkout, or the package `tightfit` where that is installed."""
IMPORT_ROOT: Final = Path(__file__).resolve().parents[__name__.count(".")]
"""What a process that starts elsewhere needs on its path to find the packages."""


def module_name(name: str) -> str:
    """Return the name under which a module of the project runs here, for `python -m`.

    In a checkout it is `name`, such as harness.worker; in the wheel that lies below `tightfit`.
    """
    return __name__.rpartition("catalogue")[0] + name


def module_command(name: str) -> tuple[str, ...]:
    """Return the command that runs a module of the project; the working folder is not its path."""
    return (sys.executable, "-P", "-m", module_name(name))


def python_path(before: str, own: Sequence[str] | None = None) -> str:
    """Return PYTHONPATH with which a process that starts elsewhere finds the packages.

    Args:
        before: PYTHONPATH as it is.
        own: folders that Python looks into by itself; None: those of this one. There nothing is
            added, as what PYTHONPATH names comes before the standard library.
    """
    if own is None:
        own = [*site.getsitepackages(), site.getusersitepackages()]
    paths = [path for path in before.split(os.pathsep) if path]
    if str(IMPORT_ROOT) in {*paths, *(str(Path(path).resolve()) for path in own)}:
        return before
    return os.pathsep.join([str(IMPORT_ROOT), *paths])


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


def ending_with_us(command: Sequence[str]) -> list[str]:
    """Return the command that runs another one, which the kernel ends with this process.

    The thread that starts it must live as long: for the kernel, that is its parent.
    """
    return [*module_command("catalogue.processes"), str(os.getpid()), *command]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606  a shell is not wanted


def signal_name(number: int) -> str:
    """Return the name of a signal; real-time ones have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
