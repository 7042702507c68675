"""Which GPU a point runs on: a free one of this machine, held so that no two points time it."""

import hashlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from filelock import BaseFileLock, FileLock, Timeout

from engine.device.gpu import Gpu, like_the_first, visible_gpus
from harness.config.schema import RunConfig

POLL_S: Final = 0.5


def device_lock_path(name: str | None, home: Path) -> Path:
    """Return the lock file of a GPU or a server (one for the machine), or of the CPU of `home`."""
    if name is None:
        return home / "locks" / "cpu.lock"
    return Path(tempfile.gettempdir()) / "tightfit-locks" / f"{name}.lock"


@contextmanager
def hold_one(
    paths: Sequence[Path], *, owner: str, say: Callable[[str], None]
) -> Iterator[tuple[int, int]]:
    """Hold the first of several locks that is free; while none is, wait and say so once.

    The lock ends with the process that holds it, however that ends. The preferred file is the
    first; files are created when absent, never removed. A file says `owner` to those who wait.
    Yields which one it is, and how many of the others were in use then.
    """
    locks = [_lock(path) for path in paths]
    index = _first_free(locks)
    if index is None:
        names = " or ".join(path.stem for path in paths)
        say(f"waiting for {names}: in use by {', '.join(map(_holder, paths))}.")
        while (index := _first_free(locks)) is None:
            time.sleep(POLL_S)
    try:
        facts = {"pid": os.getpid(), "host": socket.gethostname(), "run": owner}
        paths[index].write_text(json.dumps(facts), encoding="utf-8")
        yield index, sum(_is_held(lock) for at, lock in enumerate(locks) if at != index)
    finally:
        locks[index].release()


def _lock(path: Path) -> BaseFileLock:
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(PermissionError):
            path.parent.chmod(0o1777)  # other users of the machine lock the same GPU
    return FileLock(path, timeout=0, mode=0o666)


def _first_free(locks: Sequence[BaseFileLock]) -> int | None:
    """Take the first lock that nobody has; None where there is none."""
    return next((at for at, lock in enumerate(locks) if _take(lock)), None)


def _is_held(lock: BaseFileLock) -> bool:
    """Return whether another process has a lock; it is not kept."""
    is_free = _take(lock)
    if is_free:
        lock.release()
    return not is_free


def _take(lock: BaseFileLock) -> bool:
    try:
        lock.acquire()
    except Timeout:
        return False
    return True


def _holder(path: Path) -> str:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return f"process {facts['pid']} ({facts['run']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


@dataclass(frozen=True, kw_only=True)
class OwnDevice:
    """What a point holds while it runs."""

    gpu: Gpu | None
    """None: the CPU, or a GPU that NVML does not show."""
    num_busy: int = 0
    """GPUs of this machine that other points held when it began."""


def first_gpu(config: RunConfig) -> Gpu | None:
    """Return the GPU that a point runs on if it is free, None for the CPU."""
    return next(iter(_candidates(config)), None)


@contextmanager
def own_device(
    config: RunConfig, home: Path, *, owner: str, say: Callable[[str], None], any_gpu: bool
) -> Iterator[OwnDevice]:
    """Hold the device of a point: the first GPU that is free among those that CUDA would show.

    Only GPUs of the first one's kind serve. Where all are in use it waits for one of them. Points
    on a server wait for that server. Without `any_gpu` it waits for the first GPU alone, as the
    runs of one comparison do.
    """
    gpus = _candidates(config)
    if config.system.kind == "http":
        base_url = str(config.system.base_url).rstrip("/")
        name = f"server-{hashlib.sha256(base_url.encode()).hexdigest()[:16]}"
        with hold_one([device_lock_path(name, home)], owner=owner, say=say):
            yield OwnDevice(gpu=next(iter(gpus), None))
        return
    kept = gpus if any_gpu else gpus[:1]
    paths = [device_lock_path(gpu.uuid, home) for gpu in kept] or [device_lock_path(None, home)]
    with hold_one(paths, owner=owner, say=say) as (index, num_busy):
        yield OwnDevice(gpu=kept[index] if kept else None, num_busy=num_busy)


def _candidates(config: RunConfig) -> list[Gpu]:
    return [] if config.gpu.device == "cpu" else like_the_first(visible_gpus())
