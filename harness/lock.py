"""One run at a time on one device: a lock file by the GPU's UUID, or one for the CPU."""

import fcntl
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

POLL_S: Final = 0.5


def device_lock_path(gpu_uuid: str | None, home: Path) -> Path:
    """Return the lock file of a GPU (one for the machine) or of the CPU (one for `home`)."""
    if gpu_uuid is None:
        return home / "locks" / "cpu.lock"
    return Path(tempfile.gettempdir()) / "tightfit-locks" / f"{gpu_uuid}.lock"


@contextmanager
def hold(path: Path, *, owner: str, say: Callable[[str], None]) -> Iterator[float]:
    """Hold the lock `path`; while another process has it, wait and say so once.

    The lock ends with the process that holds it, however that ends.

    Args:
        path: the lock file; created when absent, never removed.
        owner: what the file says to those who wait.
        say: gets one line when there is someone to wait for.

    Yields:
        Seconds waited.
    """
    descriptor = _open(path)
    try:
        begin_s = time.monotonic()
        if not _try_lock(descriptor):
            say(f"waiting for {path.stem}: in use by {_holder(descriptor)}.")
            while not _try_lock(descriptor):
                time.sleep(POLL_S)
        _sign(descriptor, owner)
        yield time.monotonic() - begin_s
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(PermissionError):
            path.parent.chmod(0o1777)  # other users of the machine lock the same GPU
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sign(descriptor: int, owner: str) -> None:
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "run": owner})
    with suppress(OSError):  # another user's file is opened for reading only
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def _holder(descriptor: int) -> str:
    try:
        facts = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {facts['pid']} ({facts['run']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
