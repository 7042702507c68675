"""Hand points to Hydra's launchers, and know from the sweep's folder which process runs each."""

import contextlib
import json
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from hydra._internal.callbacks import Callbacks
from hydra.core.config_loader import ConfigLoader
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from catalogue.files import read_json
from catalogue.terminal import EXIT_INTERRUPTED
from harness.config.compose import Plan, Point, register
from harness.config.launchers import default_settings
from harness.config.source import copied
from harness.observe.host import start_ticks
from reports.record.record import RESULT_NAME, RecordError, RunRecord, write_text_atomic

FOLDER: Final = ".points"
STOP_NAME: Final = "stop"
SESSION: Final = "session"
POLL_S: Final = 0.2
WATCH_S: Final = 1.0
"""Seconds between looks of a launcher's process at whether the sweep's own still lives."""
END_S: Final = 60.0
"""Seconds that an interrupted point has to write its record before it is killed."""
EXIT_S: Final = 5.0
"""Seconds that its process has to end then, before it is killed."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that runs a point."""

    folder: str
    host: str
    pid: int
    ticks: int | None
    """When it started: a pid may be used again."""

    @property
    def is_alive(self) -> bool:
        """Whether it runs on this host."""
        return self._is_here and self.ticks is not None and start_ticks(self.pid) == self.ticks

    @property
    def is_gone(self) -> bool:
        """Whether it ran on this host and has ended; of other hosts nothing is known."""
        return self._is_here and not self.is_alive

    @property
    def _is_here(self) -> bool:
        return self.host == socket.gethostname()


class BegunPoints:
    """The points of one sweep that began, in any process."""

    def __init__(self, sweep_folder: Path) -> None:
        self._folder = sweep_folder / FOLDER
        self._records: dict[int, RunRecord] = {}

    def claim(self) -> None:
        """Note that this process runs the sweep; where it is gone, no further point begins."""
        self._note(SESSION, self._folder.parent)

    def begin(self, index: int, folder: Path) -> None:
        """Note that this process runs a point in a folder."""
        self._note(str(index), folder)

    def _note(self, name: str, folder: Path) -> None:
        pid = os.getpid()
        owner = Owner(
            folder=str(folder), host=socket.gethostname(), pid=pid, ticks=start_ticks(pid)
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        write_text_atomic(self._folder / f"{name}.json", json.dumps(asdict(owner)) + "\n")

    def owner(self, index: int | str) -> Owner | None:
        """Return who runs or ran a point, None where it did not begin."""
        facts = read_json(self._folder / f"{index}.json")
        return Owner(**facts) if facts else None

    def record(self, index: int) -> RunRecord | None:
        """Return the record of a point, None where there is none yet."""
        owner = self.owner(index)
        if index not in self._records and owner is not None:
            with contextlib.suppress(RecordError):
                self._records[index] = RunRecord.read(Path(owner.folder) / RESULT_NAME)
        return self._records.get(index)

    def records(self, total: int) -> dict[int, RunRecord]:
        """Return the records there are, by the number of the point."""
        found = {index: self.record(index) for index in range(total)}
        return {index: record for index, record in found.items() if record is not None}

    @property
    def is_stopped(self) -> bool:
        """Whether no further point is to begin."""
        session = self.owner(SESSION)
        is_orphan = session is not None and session.is_gone
        return is_orphan or (self._folder / STOP_NAME).exists()

    @contextlib.contextmanager
    def ends_with_session(
        self, poll_s: float = WATCH_S, exit_now: Callable[[int], object] = os._exit
    ) -> Iterator[None]:
        """Interrupt this process meanwhile, as Ctrl-C would, when that of the sweep is gone.

        Only where both run on this host and are not the same. Then the process ends: a
        launcher's would wait for more work, and nobody is left to send it.
        """
        session = self.owner(SESSION)
        if session is None or not session.is_alive or session.pid == os.getpid():
            yield
            return
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(poll_s):
                if session.is_gone:
                    os.kill(os.getpid(), signal.SIGTERM)
                    return

        watcher = threading.Thread(target=watch, name="session", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            is_over.set()
            watcher.join()
            if session.is_gone:
                exit_now(EXIT_INTERRUPTED)

    def stop(self) -> None:
        """Let no further point begin."""
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / STOP_NAME).touch()

    def running(self, total: int) -> list[Owner]:
        """Return the processes of this host that run a point without a record yet."""
        found = [self.owner(index) for index in range(total) if self.record(index) is None]
        here = [owner for owner in found if owner is not None and owner.is_alive]
        return [owner for owner in here if owner.pid != os.getpid()]

    def wait(self, total: int) -> None:
        """Return when no process of this host runs a point of the sweep any more."""
        while self.running(total):
            time.sleep(POLL_S)

    def end_all(self, total: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Interrupt the points that run on this host; each ends its worker and has a record.

        A process that does not end by itself, before its record or after it, is killed.
        """
        self.stop()
        ending = self.running(total)
        for owner in ending:
            _signal(owner, signal.SIGTERM)
        _wait(lambda: not self.running(total), END_S, clock)
        for owner in self.running(total):
            _signal(owner, signal.SIGKILL)
        _wait(lambda: not any(owner.is_alive for owner in ending), EXIT_S, clock)
        for owner in ending:
            if owner.is_alive:
                _signal(owner, signal.SIGKILL)
        _wait(lambda: not any(owner.is_alive for owner in ending), EXIT_S, clock)


def _wait(is_over: Callable[[], bool], most_s: float, clock: Callable[[], float]) -> None:
    limit_s = clock() + most_s
    while not is_over() and clock() < limit_s:
        time.sleep(POLL_S)


def _signal(owner: Owner, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(owner.pid, number)


_MULTIRUN_NAME: Final = "multirun.yaml"
_FILE: Final = "{}.pickle"


@dataclass(kw_only=True)
class ComposedPoints:
    """Points by their number and by their overrides, in any process that a launcher starts.

    It stands where a launcher expects what composes configurations: these are composed already.
    """

    points: Sequence[Point] = ()
    """In the process that composed them."""
    folder: Path | None = None
    """Where other processes read them from."""
    numbers: dict[tuple[str, ...], int] = field(default_factory=dict)
    """The number of each point by its overrides."""

    def __post_init__(self) -> None:
        for number, point in enumerate(self.points):
            self.numbers.setdefault(tuple(point.overrides), number)

    def save(self, folder: Path) -> None:
        """Write the points where processes that a launcher starts reach them."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for number, point in enumerate(self.points):
            (folder / _FILE.format(number)).write_bytes(pickle.dumps(point))

    def __getitem__(self, number: int) -> Point:
        """Return a point."""
        if self.folder is None or self.points:
            return self.points[number]
        content = (self.folder / _FILE.format(number)).read_bytes()
        found: Point = pickle.loads(content)  # noqa: S301  written by `save`
        return found

    def load_sweep_config(self, _: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Return the configuration of a point, as a launcher asks for it."""
        return copied(self[self.numbers[tuple(sweep_overrides)]].composed)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the points: each process reads its own."""
        return {"folder": self.folder, "points": (), "numbers": self.numbers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrive in a process that a launcher started, where nothing is registered yet."""
        self.__dict__.update(state)
        register()


def launch(plan: Plan, points: ComposedPoints, task: Callable[[DictConfig], None]) -> None:
    """Have every point run by the launcher that was chosen; a single one runs here."""
    context = HydraContext(config_loader=cast("ConfigLoader", points), callbacks=Callbacks())
    if not plan.multirun:
        done = run_job(
            task,
            config=copied(points[0].composed),
            job_dir_key="hydra.run.dir",
            job_subdir_key=None,
            hydra_context=context,
        )
        _ = done.return_value  # raises what the task raised
        return
    folder = Path(str(plan.master.hydra.sweep.dir))
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(plan.master, folder / _MULTIRUN_NAME)
    name = str(plan.master.hydra.runtime.choices["hydra/launcher"])
    for key, value in default_settings(name, plan.overrides).items():
        OmegaConf.update(plan.master, key, value)
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=context, task_function=task, config=plan.master
    )
    batches = [point.overrides for point in plan.points]
    size = plan.master.hydra.sweeper.max_batch_size or len(batches)
    for start in range(0, len(batches), size):
        for done in launcher.launch(batches[start : start + size], initial_job_idx=start):
            _ = done.return_value
