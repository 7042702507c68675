"""Each point is composed once, and that is what is checked, run, and handed to launchers."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_loader import ConfigLoader
from omegaconf import OmegaConf

from harness.__main__ import main
from harness.config.compose import Composer, Plan
from harness.point import point
from harness.sweep import track
from harness.sweep.launch import ComposedPoints
from reports.record.record import RunRecord

REFERS = [
    "model=glass",
    "tracking=none",
    "kv=cpu",
    "offload=uva",
    "offload.uva.cpu_offload_gb=0.001,0.002",
    "kv.cpu_gib=${offload.uva.cpu_offload_gb}",
    "hydra.sweep.subdir=p${hydra.job.num}",
]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logging_as_before: None) -> None:
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[str, ...]]]:
    """What Hydra composed: the mode and the overrides."""
    found: list[tuple[str, tuple[str, ...]]] = []
    plain: Any = type(Composer()._loader).load_configuration

    def load(self: ConfigLoader, *args: Any, **options: Any) -> Any:
        found.append((options["run_mode"].name, tuple(options["overrides"])))
        return plain(self, *args, **options)

    monkeypatch.setattr(type(Composer()._loader), "load_configuration", load)
    return found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Configurations and folders of the points that ran."""
    found: list[Any] = []

    def run(
        config: Any, folder: Path, overrides: list[str], context: Any, config_dir: None
    ) -> RunRecord:
        found.append((config, folder, overrides, context))
        record = RunRecord(run_id="r", name="n", status="ok", config=config.to_dict())
        record.write(folder / "result.json")
        return record

    monkeypatch.setattr(point, "run_point", run)
    monkeypatch.setattr(track, "finish_sweep", lambda *args, **options: ([], None))
    return found


@pytest.mark.thorough
def test_every_point_is_composed_once(
    composed: list[tuple[str, tuple[str, ...]]], asked: list[Any]
) -> None:
    assert main(["model=glass", "tracking=none", "engine.seed=1,2,3", "-m"]) == 0
    points = [overrides for mode, overrides in composed if mode == "RUN"]
    assert len(points) == len(set(points)) == len(asked) == 3
    assert len(composed) == 4  # and what the launcher is configured by
    composed.clear()
    assert main(["model=glass", "tracking=none"]) == 0
    assert [mode for mode, _ in composed] == ["RUN"]


@pytest.mark.thorough
def test_references_hold_in_plan_and_run_alike(asked: list[Any]) -> None:
    plan = Composer().plan(REFERS, multirun=True)
    assert [found.config.kv.cpu_gib for found in plan.points] == [0.001, 0.002]
    assert main([*REFERS, "-m"]) == 0
    assert [config.kv.cpu_gib for config, *_ in asked] == [0.001, 0.002]
    assert [folder.name for _, folder, *_ in asked] == ["p0", "p1"]
    assert len({folder.parent for _, folder, *_ in asked}) == 1
    assert "kv.cpu_gib=${offload.uva.cpu_offload_gb}" in asked[0][2]


def test_what_runs_is_what_was_checked(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []
    plain = Composer.plan

    def note(self: Composer, *args: Any, **options: Any) -> Plan:
        plans.append(plain(self, *args, **options))
        return plans[-1]

    monkeypatch.setattr(Composer, "plan", note)
    assert main(["model=glass", "tracking=none"]) == 0
    assert asked[0][0] is plans[0].points[0].config


@pytest.mark.thorough
def test_points_arrive_in_processes_that_a_launcher_starts(tmp_path: Path) -> None:
    plan = Composer().plan(REFERS, multirun=True)
    points = ComposedPoints(points=plan.points)
    points.save(tmp_path / "points")
    sent = pickle.dumps(points)
    assert len(sent) < len(pickle.dumps(plan.points)) / 4
    there = pickle.loads(sent)
    for number, found in enumerate(plan.points):
        assert there[number].config == found.config
        handed = there.load_sweep_config(plan.master, list(found.overrides))
        assert handed == found.composed
        OmegaConf.update(handed, "engine.seed", 5)  # of its own
        assert there.load_sweep_config(plan.master, list(found.overrides)).engine.seed == 0


@pytest.mark.thorough
def test_points_with_the_same_overrides_are_counted_apart(asked: list[Any]) -> None:
    line = ["model=glass", "tracking=none", "rerun=all", "engine.seed=1,1", "-m"]
    assert main(line) == 0
    assert [context.index for *_, context in asked] == [0, 1]


@pytest.mark.thorough
def test_batches_of_a_sweep(asked: list[Any], tmp_path: Path) -> None:
    line = ["model=glass", "tracking=none", "engine.seed=1,2,3", "hydra.sweeper.max_batch_size=2"]
    assert main([*line, f"hydra.sweep.dir='{tmp_path / 's'}'", "-m"]) == 0
    assert [context.index for *_, context in asked] == [0, 1, 2]
    assert (tmp_path / "s" / "multirun.yaml").is_file()
