"""From a command line to records and an exit code, with points that end as a test says."""

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.__main__ import main
from harness.config import engine
from harness.config.compose import Composer
from harness.config.schema import RunConfig, SweepContext
from harness.point import point
from harness.sweep import app
from harness.sweep import track as sweep
from harness.sweep.launch import BegunPoints
from reports.record.folders import SweepNote, read_planned
from reports.record.record import RunRecord
from tests.slow import slow

pytestmark = pytest.mark.thorough_but(
    "test_a_sweep_in_one_folder_with_one_context",
    "test_points_that_are_not_ok_leave_the_others_and_exit_code_3",
    "test_one_point_in_a_folder_of_its_own",
    "test_no_model_is_said_in_one_line",
    "test_a_mistake_in_any_point_runs_none",
    "test_a_single_point_that_is_not_ok_is_exit_code_3",
)


class FakePoints:
    """Stands in for run_point and skip_point; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[RunConfig, Path, list[str], SweepContext | None]] = []
        self.statuses: dict[int, Any] = {}
        self.reasons: list[str] = []
        self.folders: list[str | None] = []
        """The user's folder of configurations, of each point that ran."""
        self.finished: list[tuple[list[str], bool]] = []

    def run(
        self,
        config: RunConfig,
        run_dir: Path,
        overrides: list[str],
        context: SweepContext | None,
        config_dir: str | None,
    ) -> RunRecord:
        self.folders.append(config_dir)
        outcome = self.statuses.get(len(self.asked), "ok")
        self.asked.append((config, run_dir, overrides, context))
        status = outcome if isinstance(outcome, str) else "killed"
        name = f"point {len(self.asked)}"
        record = RunRecord(
            run_id="r", name=name, status=status, overrides=overrides, config=config.to_dict()
        )
        if not isinstance(outcome, Exception):
            record.write(run_dir / "result.json")
        if not isinstance(outcome, str):
            raise outcome
        return record

    def skip(
        self,
        config: RunConfig,
        run_dir: Path,
        overrides: list[str],
        context: SweepContext | None,
        *,
        reason: str,
        config_dir: str | None,
    ) -> RunRecord:
        self.asked.append((config, run_dir, overrides, context))
        error = {"type": "Skipped", "message": reason}
        self.reasons.append(reason)
        return RunRecord(run_id="r", name="skipped", status="skipped", error=error)

    def finish(
        self,
        tracking: object,
        context: SweepContext,
        records: list[RunRecord],
        *,
        interrupted: bool = False,
    ) -> tuple[list[str], None]:
        self.finished.append(([record.status for record in records], interrupted))
        return [], None


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> FakePoints:
    fake = FakePoints()
    monkeypatch.setattr(point, "run_point", fake.run)
    monkeypatch.setattr(point, "skip_point", fake.skip)
    monkeypatch.setattr(sweep, "finish_sweep", fake.finish)
    return fake


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logging_as_before: None) -> Path:
    folder = tmp_path / "home"
    monkeypatch.setenv("TIGHTFIT_HOME", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


STAMP = r"\d{8}-\d{6}-\d{6}-[0-9a-f]{6}"


def test_one_point_in_a_folder_of_its_own(
    points: FakePoints, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["+model=glass", "offload=uva", "timeout_s=5"]) == 0
    ((config, folder, overrides, context),) = points.asked
    assert config.model.name == "glass"
    assert config.timeout_s == 5
    assert overrides == ["+model=glass", "offload=uva", "timeout_s=5"]
    assert context is None
    assert folder.parent == home / "runs"
    assert re.fullmatch(STAMP, folder.name)
    kept = yaml.safe_load((folder / ".hydra" / "config.yaml").read_text())
    assert kept["offload"]["offload_backend"] == "uva"
    assert {path.name for path in tmp_path.iterdir()} == {"home"}
    assert points.finished == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["a?b", slow("50%"), slow("a${b}")])
def test_a_home_that_an_address_cannot_hold_is_refused(
    name: str,
    points: FakePoints,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TIGHTFIT_HOME", str(home / name))
    assert main(["+model=glass"]) == 2
    assert "TIGHTFIT_HOME: expected a path without" in capsys.readouterr().err


def test_an_address_of_no_store_is_refused_before_anything_runs(
    points: FakePoints, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["+model=glass", "tracking=mlflow", "tracking.uri=runs.db"]) == 2
    assert "tracking.uri: expected an address such as sqlite:" in capsys.readouterr().err
    assert not points.asked
    assert main(["+model=glass", "tracking=none"]) == 0
    assert len(points.asked) == 1


def test_a_full_disk_is_told_before_anything_runs(
    points: FakePoints, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(Path.cwd())._replace(free=3 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: usage)
    assert main(["+model=glass"]) == 3
    assert "expected 16 MiB free on its disk" in capsys.readouterr().err
    assert points.asked == []


def test_a_disk_that_fills_ends_the_sweep_and_keeps_what_ended(
    points: FakePoints, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(home / "result.json")
    points.statuses[1] = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)
    assert main(["+model=glass", "-m", "engine.seed=1,2,3"]) == 3
    assert len(points.asked) == 2
    assert points.finished == [(["ok"], False)]
    found = capsys.readouterr()
    assert "1 of 3 points" in found.out
    (line,) = found.err.splitlines()
    assert line.startswith(f"error: {target}: No space left on device, ")


def test_runs_in_the_same_second_do_not_share_a_folder(points: FakePoints) -> None:
    for _ in range(2):
        assert main(["+model=glass"]) == 0
    assert points.asked[0][1] != points.asked[1][1]


@pytest.mark.parametrize("words", [slow(["hydra.run.dir=mine"]), ["-m", "hydra.sweep.dir=mine"]])
def test_a_folder_with_records_is_refused_before_anything_runs(
    words: list[str], points: FakePoints, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["+model=glass", *words]) == 0
    assert main(["+model=glass", *words]) == 2
    assert len(points.asked) == 1
    assert "expected a folder without records" in capsys.readouterr().err


@pytest.mark.slow
def test_sweeps_in_folders_of_the_same_name_have_ids_of_their_own(
    points: FakePoints, tmp_path: Path
) -> None:
    for parent in ("a", "b"):
        folder = tmp_path / parent / "it's"
        words = ["-m", "engine.seed=1", f'hydra.sweep.dir="{folder}"']
        assert main(["+model=glass", *words]) == 0
    ids = [asked[3].sweep_id for asked in points.asked if asked[3]]
    assert len(ids) == len(set(ids)) == 2
    assert all(re.fullmatch(r"it_s-[0-9a-f]{6}", sweep_id) for sweep_id in ids)


@pytest.mark.slow
def test_no_record_is_written_over_another(points: FakePoints, tmp_path: Path) -> None:
    points.statuses[1] = FileExistsError("the record of another")
    words = [f"hydra.sweep.dir='{tmp_path}/mine'", "hydra.sweep.subdir=same"]
    assert main(["+model=glass", "-m", "engine.seed=1,2", *words]) == 3
    assert RunRecord.read(tmp_path / "mine" / "same" / "result.json").status == "ok"
    assert points.finished == [(["ok", "failed"], False)]


def test_no_model_is_said_in_one_line(
    points: FakePoints, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([]) == 0
    assert points.asked[0][0].model.name == "smollm2_135m"
    (line,) = capsys.readouterr().err.splitlines()
    assert "demo model smollm2_135m" in line


def test_a_sweep_in_one_folder_with_one_context(
    points: FakePoints, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["+model=glass", "-m", "offload=none,uva", "engine.seed=1,2"]) == 0
    folders = [asked[1] for asked in points.asked]
    (parent,) = {folder.parent for folder in folders}
    assert [folder.name for folder in folders] == ["0", "1", "2", "3"]
    assert parent.parent == home / "runs"
    assert [(a[3].index, a[3].total, a[3].folder, a[3].sweep_id) for a in points.asked if a[3]] == [
        (index, 4, parent, parent.name) for index in range(4)
    ]
    assert [(a[0].offload.backend, a[0].engine.seed) for a in points.asked] == [
        ("none", 1),
        ("none", 2),
        ("uva", 1),
        ("uva", 2),
    ]
    assert points.finished == [(["ok"] * 4, False)]
    out = capsys.readouterr().out
    assert "4 of 4 points" in out
    again = "tightfit sweep +model=glass offload=none,uva engine.seed=1,2"
    assert read_planned(parent) == SweepNote(
        num_points=4, command=again, title="glass: offload x seed, 4 points"
    )
    assert "offload=uva engine.seed=2" in out
    assert str(parent) in out


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "scenario.serve.trace.path",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,12,x\n",
            "line 2: GeneratedTokens: expected a whole number from 1, got 'x'",
        ),
        ("scenario.latency.prompts_file", "{\n", "line 1"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_before_any_point(
    points: FakePoints,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    text: str,
    words: str,
) -> None:
    path = tmp_path / "rows"
    path.write_text(text)
    scenario = "quick" if "latency" in name else "serve_trace"
    asked = ["-m", "model=fake", f"scenario={scenario}", "gpu.memory_gib=3,4", f"{name}='{path}'"]
    assert main([*asked, *(["scenario.serve.trace.format=azure"] if "trace" in name else [])]) == 2
    assert points.asked == []
    assert words in capsys.readouterr().err


def test_points_that_are_not_ok_leave_the_others_and_exit_code_3(points: FakePoints) -> None:
    points.statuses |= {0: "no_fit", 1: "killed"}
    assert main(["+model=glass", "-m", "engine.seed=1,2,3"]) == 3
    assert points.finished == [(["no_fit", "killed", "ok"], False)]


def test_a_single_point_that_is_not_ok_is_exit_code_3(points: FakePoints) -> None:
    points.statuses[0] = "no_fit"
    assert main(["+model=glass"]) == 3


def test_a_defect_of_the_harness_is_a_record_too(
    points: FakePoints, capsys: pytest.CaptureFixture[str]
) -> None:
    points.statuses[0] = ZeroDivisionError("a defect")
    assert main(["+model=glass", "-m", "engine.seed=1,2"]) == 3
    assert points.finished == [(["failed", "ok"], False)]
    record = RunRecord.read(points.asked[0][1] / "result.json")
    assert record.error is not None
    assert record.error["type"] == "ZeroDivisionError"
    assert "a defect" in capsys.readouterr().err


def test_a_job_that_its_launcher_killed_on_ctrl_c_is_told_as_interrupted(tmp_path: Path) -> None:
    typed = ["model=fake", "engine.seed=1,2", f"hydra.sweep.dir='{tmp_path}'"]
    session = app._Session(Composer().plan(typed, multirun=True), {}, None)
    begun, sweep_plan = BegunPoints(tmp_path), session._task.sweep
    assert sweep_plan is not None
    begun.begin(0, tmp_path / "0")
    begun.stop()
    _, record = session._collect(begun, sweep_plan, 0)
    assert record.error is not None
    assert "was interrupted and ended without a record" in record.error["message"]


def test_fail_fast_skips_what_follows(points: FakePoints) -> None:
    points.statuses[0] = "failed"
    assert main(["+model=glass", "-m", "engine.seed=1,2,3", "fail_fast=true"]) == 3
    assert points.finished == [(["failed", "skipped", "skipped"], False)]
    assert len(points.asked) == 3


def test_points_of_a_system_that_is_not_installed_are_skipped(
    points: FakePoints, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "find_spec", lambda name: None)
    asked = ["+model=glass", "-m"]
    assert main([*asked, "system=native,accelerate"]) == 3
    assert points.finished == [(["ok", "skipped"], False)]
    [reason] = points.reasons
    assert "pip install" in reason
    assert f"warning: {reason} Its points are skipped." in capsys.readouterr().err
    assert main([*asked, "system=vllm,accelerate"]) == 2
    assert "expected the package vllm, found none" in capsys.readouterr().err


def test_an_interrupt_keeps_what_is_there(
    points: FakePoints, capsys: pytest.CaptureFixture[str]
) -> None:
    points.statuses[1] = KeyboardInterrupt()
    assert main(["+model=glass", "-m", "engine.seed=1,2,3"]) == 130
    assert len(points.asked) == 2
    assert points.finished == [(["ok", "killed"], True)]
    assert "2 of 3 points" in capsys.readouterr().out


def test_a_mistake_in_any_point_runs_none(
    points: FakePoints, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["+model=glass", "-m", "offload.uva.cpu_offload_gb=1,-1"]) == 2
    assert points.asked == []
    assert not home.exists()
    assert "point 1 of the sweep" in capsys.readouterr().err


def test_warnings_are_said_once_a_sweep(
    points: FakePoints, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["+model=glass", "offload=uva", "offload.prefetch.offload_group_size=2"]
    assert main([*words, "-m", "engine.seed=1,2"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: offload.prefetch")


def test_an_experiment_and_a_user_s_folder(points: FakePoints, tmp_path: Path) -> None:
    mine = tmp_path / "mine" / "experiment"
    mine.mkdir(parents=True)
    (mine / "two.yaml").write_text(
        "# @package _global_\ndefaults:\n  - /model: glass\n"
        "hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      engine.seed: 1,2\n"
    )
    assert main(["experiment=two", "--config-dir", "mine"]) == 0
    assert [asked[0].engine.seed for asked in points.asked] == [1, 2]
    points.asked.clear()
    assert main(["+experiment=two", "engine.seed=5", "model=olmo7b", "--config-dir", "mine"]) == 0
    assert [(a[0].engine.seed, a[0].model.name) for a in points.asked] == [(5, "olmo7b")]
    assert main(["+model=glass"]) == 0
    assert points.folders == [*[str(tmp_path / "mine")] * 3, None]


def test_an_interrupt_while_composing_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **settings: object) -> Callable[[], None]:
        raise KeyboardInterrupt

    monkeypatch.setattr(app.Composer, "plan", interrupt)
    assert main(["+model=glass"]) == 130


def test_a_sweep_runs_what_failed_again_and_a_single_point_always(points: FakePoints) -> None:
    assert main(["+model=glass", "-m", "engine.seed=1"]) == 0
    assert main(["+model=glass", "-m", "engine.seed=1", "rerun=all"]) == 0
    assert main(["+model=glass"]) == 0
    assert [asked[0].rerun for asked in points.asked] == ["failed", "all", None]


@pytest.mark.parametrize(("stop", "skipped"), [("true", 1), slow("false", 0)])
def test_points_that_ask_for_more_than_one_without_room_are_skipped(
    points: FakePoints, stop: str, skipped: int, home: Path
) -> None:
    points.statuses[0] = "no_fit"
    words = ["+model=fake", "gpu=cpu", "-m", "gpu.memory_gib=3,2,4", f"monotone_stop={stop}"]
    assert main(words) == 3
    assert len(points.reasons) == skipped
    assert all("point 1 had status no_fit" in reason for reason in points.reasons)
    (folder,) = (home / "runs").iterdir()
    assert sorted(path.name for path in (folder / ".points").iterdir()) == [
        f"{index}.json" for index in range(3)
    ]


def test_what_a_sweep_that_was_cut_short_left_does_not_stop_the_next(
    points: FakePoints, tmp_path: Path
) -> None:
    (tmp_path / "mine" / ".points").mkdir(parents=True)
    (tmp_path / "mine" / ".points" / "stop").touch()
    words = ["+model=glass", "-m", "engine.seed=1", "hydra.sweep.dir=mine"]
    assert main(words) == 0
    assert len(points.asked) == 1


def test_a_launcher_is_for_sweeps(
    points: FakePoints, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.config.launchers._is_installed", lambda module: False)
    assert main(["+model=glass", "-m", "engine.seed=1,2", "hydra/launcher=submitit_local"]) == 2
    assert "[submitit]" in capsys.readouterr().err
    assert points.asked == []


def test_ctrl_c_before_a_launcher_began_a_point_ends_the_sweep_in_the_tracker(
    points: FakePoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(session: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "BASIC", "another")  # so that Hydra's own counts as a launcher
    monkeypatch.setattr(sweep, "begin_sweep", lambda *_: [])
    monkeypatch.setattr(app._Session, "_launch", interrupt)
    assert main(["+model=glass", "-m", "engine.seed=1,2"]) == 130
    assert points.finished == [([], True)]


def test_a_launcher_has_no_effect_on_plans(
    points: FakePoints, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    words = ["+model=glass", "-m", "engine.seed=1,2", "hydra/launcher=joblib", "mode=plan"]
    assert main(words) == 2
    assert "no effect with mode=plan" in capsys.readouterr().err
