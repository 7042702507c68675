"""One run at a time on one device: a lock file by the GPU's UUID, or one for the CPU."""

import fcntl
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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
def hold_one(
    paths: Sequence[Path], *, owner: str, say: Callable[[str], None]
) -> Iterator[tuple[int, int]]:
    """Hold the first of several locks that is free; while none is, wait and say so once.

    The lock ends with the process that holds it, however that ends.

    Args:
        paths: the lock files, the preferred one first; created when absent, never removed.
        owner: what the file says to those who wait.
        say: gets one line when there is someone to wait for.

    Yields:
        Which one, and how many of the others were in use then.
    """
    descriptors = [_open(path) for path in paths]
    try:
        index = _first_free(descriptors)
        if index is None:
            names = " or ".join(path.stem for path in paths)
            say(f"waiting for {names}: in use by {', '.join(map(_holder, descriptors))}.")
            while (index := _first_free(descriptors)) is None:
                time.sleep(POLL_S)
        _sign(descriptors[index], owner)
        others = [item for at, item in enumerate(descriptors) if at != index]
        yield index, sum(_is_held(item) for item in others)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _first_free(descriptors: Sequence[int]) -> int | None:
    """Take the first lock that nobody has; None where there is none."""
    return next((at for at, item in enumerate(descriptors) if _try_lock(item)), None)


def _is_held(descriptor: int) -> bool:
    """Return whether another process has a lock; it is not kept."""
    if not _try_lock(descriptor):
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


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
