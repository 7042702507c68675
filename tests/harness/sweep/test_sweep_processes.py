"""Whole sweeps of model=fake in processes of their own: launchers, Ctrl-C and kill -9."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from catalogue.files import read_json
from harness.observe.host import process_memory
from harness.sweep.launch import BegunPoints
from reports.record.record import RESULT_NAME, RunRecord
from tests.harness.cases import quoted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 240
POINT = (
    "-m",
    "model=fake",
    "gpu=cpu",
    "scenario=latency",
    "scenario.latency.num_requests=1",
    "scenario.latency.warmup_requests=0",
    "scenario.correctness.enabled=false",
)


def needs_plugin(name):
    """Skip where the plugin of a launcher is not installed."""
    if name == "basic":
        return
    package = f"hydra_plugins.hydra_{name.split('_')[0]}_launcher"
    try:
        is_there = importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        pytest.skip(f"{package} is not installed")


@pytest.fixture
def environ(tmp_path):
    """A home of its own, and no commit: the checkout may change while a test runs."""
    home = {"TIGHTFIT_HOME": str(tmp_path / "home"), "GIT_DIR": str(tmp_path / "none")}
    return {**os.environ, **home, "OMP_NUM_THREADS": "1"}


def command(*words):
    return [sys.executable, "-m", "harness", *POINT, *words]


def run(environ, *words):
    return subprocess.run(
        command(*words),
        check=False,
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def start(environ, tmp_path, *words):
    with (tmp_path / "output").open("w") as output:
        return subprocess.Popen(
            command(*words), cwd=ROOT, env=environ, stdout=output, stderr=output
        )


def wait_for(condition, process):
    """Return when a condition holds; fail where the process ends before, or it takes long."""
    limit_s = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None, "the sweep ended too early"
        assert time.monotonic() < limit_s
        time.sleep(0.1)


def records(folder):
    found = sorted(folder.glob(f"*/{RESULT_NAME}"))
    return {path.parent.name: RunRecord.read(path) for path in found}


def statuses(folder):
    return {name: record.status for name, record in records(folder).items()}


def wait_for_end(pid):
    """Return when a process is gone, or is a zombie that its parent has yet to collect."""
    limit_s = time.monotonic() + LIMIT_S
    while process_memory(pid)["rss_bytes"] is not None:
        assert time.monotonic() < limit_s, f"process {pid} goes on"
        time.sleep(0.05)


def hanging_worker(run_dir):
    """Return the pid of a worker that times requests, None before."""
    state = read_json(run_dir / "state.json")
    return state.get("pid") if state.get("phase") == "latency" else None


@pytest.mark.parametrize("launcher", ["submitit_local", "joblib"])
def test_points_run_through_a_launcher(environ, tmp_path, launcher):
    needs_plugin(launcher)
    folder = tmp_path / "it's a sweep"
    words = ["tracking=none", f"hydra/launcher={launcher}", f'hydra.sweep.dir="{folder}"']
    done = run(environ, "model.fake.fail=none,sigkill,no_fit", *words)
    assert done.returncode == 3, done.stderr
    assert statuses(folder) == {"0": "ok", "1": "killed", "2": "no_fit"}
    assert "3 of 3 points" in done.stdout
    assert (folder / "sweep.csv").is_file()


@pytest.mark.parametrize("launcher", ["basic", "submitit_local"])
def test_ctrl_c_keeps_what_is_done_and_leaves_no_worker(environ, tmp_path, launcher):
    needs_plugin(launcher)
    folder = tmp_path / "sweep"
    words = [f"hydra/launcher={launcher}", f"hydra.sweep.dir={quoted(folder)}", "tracking=none"]
    process = start(environ, tmp_path, "model.fake.fail=none,hang", *words)
    # A launcher starts both points, and either may have the device first; then the other waits.
    is_basic = launcher == "basic"
    wait_for(
        lambda: hanging_worker(folder / "1") and ("0" in records(folder) or not is_basic), process
    )
    worker = hanging_worker(folder / "1")
    owner = BegunPoints(folder).owner(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 130
    found = statuses(folder)
    assert found["1"] == "killed"
    assert found.get("0", "killed") in ({"ok"} if is_basic else {"ok", "killed"})
    assert records(folder)["1"].error["type"] == "Interrupted"
    assert "killed" in (folder / "sweep.csv").read_text()
    wait_for_end(worker)
    assert owner is not None
    assert not owner.is_alive


def test_what_a_killed_sweep_leaves_is_mended_and_not_run_again(environ, tmp_path):
    from mlflow import MlflowClient

    first = tmp_path / "first"
    words = ["model.fake.fail=none,hang", "tracking=mlflow"]
    process = start(environ, tmp_path, *words, f"hydra.sweep.dir={quoted(first)}")
    wait_for(lambda: hanging_worker(first / "1"), process)
    worker = hanging_worker(first / "1")
    process.kill()
    process.wait()
    second = tmp_path / "second"
    done = run(environ, *words, "timeout_s=1", f"hydra.sweep.dir={quoted(second)}")
    assert done.returncode == 3, done.stderr
    wait_for_end(worker)
    assert statuses(first) == {"0": "ok"}
    assert statuses(second) == {"0": "ok", "1": "timeout"}
    assert f"as it ended in {first}/0" in done.stdout
    client = MlflowClient(tracking_uri=f"sqlite:///{environ['TIGHTFIT_HOME']}/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "tightfit"]
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
    assert [run.info.status for run in runs] == [
        *["KILLED", "FINISHED", "KILLED"],  # the first sweep, its points
        *["FAILED", "FAILED"],  # the second; the point that it takes over is shown as one of both
    ]
    ids = runs[1].data.tags["harness.sweep_ids"]
    assert all(folder.name in ids for folder in (first, second))
    held = {file.path for file in client.list_artifacts(runs[3].info.run_id)}
    assert {"sweep.csv", "sweep.md", "failures.md", "figures"} <= held
