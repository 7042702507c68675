"""The one adapter between composed points and Hydra's launchers, which run them."""

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from hydra.core.config_loader import ConfigLoader
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from harness.config.compose import Plan, Point, register
from harness.config.launchers import default_settings

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
        """Write the points for processes that a launcher starts.

        Args:
            folder: that these reach too.
        """
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
        return copy.deepcopy(self[self.numbers[tuple(sweep_overrides)]].composed)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the points: each process reads its own."""
        return {"folder": self.folder, "points": (), "numbers": self.numbers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrive in a process that a launcher started, where nothing is registered yet."""
        self.__dict__.update(state)
        register()


class _NoCallbacks:
    """Stands where Hydra calls back around each job."""

    def on_job_start(self, **_: Any) -> None:
        """Do nothing."""

    def on_job_end(self, **_: Any) -> None:
        """Do nothing."""


def launch(plan: Plan, points: ComposedPoints, task: Callable[[DictConfig], None]) -> None:
    """Have every point run by the launcher that was chosen; a single one runs here.

    Args:
        plan: what was composed.
        points: of it.
        task: runs the point whose number Hydra's job has.
    """
    context = HydraContext(
        config_loader=cast("ConfigLoader", points), callbacks=cast("Any", _NoCallbacks())
    )
    if not plan.multirun:
        done = run_job(
            task,
            config=copy.deepcopy(points[0].composed),
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
