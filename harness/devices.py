"""Which GPU a point runs on: a free one of this machine, held so that no two points time it."""

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.lock import device_lock_path, hold_one
from harness.measure.nvml import Gpu, like_the_first, visible_gpus
from harness.schema import RunConfig

__all__ = ["OwnDevice", "first_gpu", "own_device"]


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
    on a server wait for that server.

    Args:
        config: of the point.
        home: where the lock of the CPU lies.
        owner: what those who wait are told.
        say: gets a line when there is someone to wait for.
        any_gpu: False: wait for the first GPU alone, as the runs of one comparison do.
    """
    gpus = _candidates(config)
    if config.system.kind == "http":
        with hold_one([_server_lock_path(str(config.system.base_url))], owner=owner, say=say):
            yield OwnDevice(gpu=next(iter(gpus), None))
        return
    kept = gpus if any_gpu else gpus[:1]
    paths = [device_lock_path(gpu.uuid, home) for gpu in kept] or [device_lock_path(None, home)]
    with hold_one(paths, owner=owner, say=say) as (index, num_busy):
        yield OwnDevice(gpu=kept[index] if kept else None, num_busy=num_busy)


def _candidates(config: RunConfig) -> list[Gpu]:
    return [] if config.gpu.device == "cpu" else like_the_first(visible_gpus())


def _server_lock_path(base_url: str) -> Path:
    """Return the lock file of a server, one for the machine."""
    name = hashlib.sha256(base_url.rstrip("/").encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / "tightfit-locks" / f"server-{name}.lock"
