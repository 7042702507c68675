"""The sampler's process: it writes as it goes, costs no run, and never stays behind."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness.config.schema import CorrectnessConfig
from harness.observe import run as process
from harness.observe.run import Sampler
from harness.point import point
from harness.point.point import run_point
from reports.record.record import RunRecord
from reports.record.rows import TELEMETRY_PARQUET, TELEMETRY_SPOOL, read_spool, read_telemetry
from tests.harness.cases import fake_command, run_config, scenario
from tests.harness.fakes import Script
from tests.harness.observe.telemetry.cases import install, samplers, wait_until
from tests.harness.observe.telemetry.pynvml_stand_in import UUID
from tests.slow import slow

ROOT = Path(__file__).resolve().parents[4]
UNCHECKED = scenario(correctness=CorrectnessConfig(enabled=False))


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(point, "build_report", lambda folder: [])


def run(tmp_path, config=None, **script):
    command = fake_command(tmp_path, Script(**script))
    record = run_point(config or run_config(scenario=UNCHECKED), tmp_path / "run", command=command)
    assert samplers(tmp_path / "run") == []
    return record


def rows_of(folder):
    return (folder / TELEMETRY_SPOOL).read_bytes().count(b"\n") if folder.is_dir() else 0


@pytest.mark.thorough
def test_ten_rows_a_second_of_a_process_and_a_gpu(tmp_path, monkeypatch):
    install(tmp_path / "nvml", pids=[os.getpid(), 1], sm_mhz=None)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "nvml"))
    sampler = Sampler(tmp_path, UUID)
    sampler.watch(os.getpid(), "measure")
    wait_until(lambda: (tmp_path / TELEMETRY_SPOOL).exists() and rows_of(tmp_path) >= 8)
    sampler.close()
    assert sampler.warnings == []
    assert samplers(tmp_path) == []
    found = read_telemetry(tmp_path)
    clock = found["clock_s"]
    gaps = [after - before for before, after in itertools.pairwise(clock)]
    assert sorted(gaps)[len(gaps) // 2] == pytest.approx(0.1, abs=0.02)
    assert found["job"][-1] == "measure"
    assert found["rss_bytes"][-1] > 2**20
    assert found["gpu_used_bytes"] == [5 * 2**30] * len(clock)
    assert found["gpu_num_own_processes"][-1] == 1
    assert set(found["gpu_sm_clock_mhz"]) == {None}
    assert not (tmp_path / TELEMETRY_SPOOL).exists()
    sampler.close()  # does nothing


def test_a_machine_without_nvml_has_rows_of_the_host(tmp_path, monkeypatch):
    folder = tmp_path / "nvml"
    folder.mkdir()
    (folder / "pynvml.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    sampler = Sampler(tmp_path, UUID)
    wait_until(lambda: (tmp_path / TELEMETRY_SPOOL).exists() and rows_of(tmp_path) >= 1)
    sampler.close()
    assert sampler.warnings == []
    found = read_telemetry(tmp_path)
    assert found["host_available_bytes"][0] > 0
    assert set(found["gpu_power_w"]) == {None}


def test_a_killed_sampler_leaves_its_rows_and_a_warning(tmp_path):
    sampler = Sampler(tmp_path, None)
    wait_until(lambda: (tmp_path / TELEMETRY_SPOOL).exists() and rows_of(tmp_path) >= 2)
    os.kill(sampler.pid, signal.SIGKILL)
    wait_until(lambda: samplers(tmp_path) == [])
    sampler.watch(os.getpid(), "measure")  # goes nowhere
    sampler.close()
    [warning] = sampler.warnings
    assert warning.startswith("telemetry: the sampler ended with exit code -9")
    assert len(read_telemetry(tmp_path)["clock_s"]) >= 2


def test_a_sampler_that_cannot_write_says_why(tmp_path):
    (tmp_path / TELEMETRY_SPOOL).mkdir()
    sampler = Sampler(tmp_path, None)
    wait_until(lambda: samplers(tmp_path) == [])
    sampler.close()
    assert "IsADirectoryError" in sampler.warnings[0]
    assert "wrote no row" in sampler.warnings[1]


def test_a_driver_that_hangs_costs_the_grace_and_the_sampler(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "GRACE_S", 0.3)
    install(tmp_path / "nvml")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "nvml"))
    sampler = Sampler(tmp_path, UUID)
    wait_until(lambda: (tmp_path / TELEMETRY_SPOOL).exists() and rows_of(tmp_path) >= 1)
    install(tmp_path / "nvml", hang=True)
    sampler.close()
    assert ["did not end within 0.3 s" in text for text in sampler.warnings] == [True]
    assert samplers(tmp_path) == []


def test_a_sampler_that_does_not_start_is_a_warning(tmp_path):
    sampler = Sampler(tmp_path, None, command=(str(tmp_path / "absent"),))
    sampler.watch(1, "measure")
    sampler.close()
    assert sampler.pid is None
    assert "did not start" in sampler.warnings[0]


def test_a_whole_run_has_telemetry(tmp_path):
    record = run(tmp_path)
    found = read_telemetry(tmp_path / "run")
    told = record.effective["telemetry"]
    assert (record.status, told["file"]) == ("ok", TELEMETRY_PARQUET)
    assert told["rows"] == len(found["clock_s"])
    assert [window["part"] for window in told["windows"]] == ["latency", "throughput"]
    assert "measure" in found["job"]
    assert "gpu_power_w" in told["null_columns"]
    assert "rss_bytes" not in told["null_columns"]
    assert record.metrics["memory/host_tree_peak_gib"] > 0
    assert record.metrics["gpu/power_w"] is None
    assert not (tmp_path / "run" / TELEMETRY_SPOOL).exists()
    assert record.effective["warnings"] == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("failure", "status"), [slow("crash", "failed"), ("sigkill", "killed"), slow("exit", "failed")]
)
def test_a_worker_that_ends_badly_leaves_its_telemetry(tmp_path, failure, status):
    record = run(tmp_path, fail_at="step", failure=failure, after_steps=3)
    assert record.status == status
    found = read_telemetry(tmp_path / "run")
    assert len(found["clock_s"]) == record.effective["telemetry"]["rows"] >= 1
    assert "measure" in found["job"]


@pytest.mark.slow
def test_a_timeout_leaves_no_sampler(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.point.process.GRACE_S", 0.1)
    config = run_config(scenario=UNCHECKED, timeout_s=3)
    assert run(tmp_path, config, fail_at="step", failure="hang").status == "timeout"
    assert len(read_telemetry(tmp_path / "run")["clock_s"]) >= 2


@pytest.mark.thorough
def test_ctrl_c_leaves_no_sampler_and_its_rows(tmp_path):
    mark = tmp_path / "hanging"

    def interrupt():
        wait_until(mark.exists)
        os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, fail_at="step", failure="hang", touch=str(mark))
    watcher.join()
    assert samplers(tmp_path / "run") == []
    assert RunRecord.read(tmp_path / "run" / "result.json").status == "killed"
    assert "measure" in read_telemetry(tmp_path / "run")["job"]


PARENT = """
import sys
from pathlib import Path
from harness.point.point import run_point
from tests.harness.cases import fake_command, run_config, scenario
from tests.harness.fakes import Script
from harness.config.schema import CorrectnessConfig
folder = Path(sys.argv[1])
script = Script(fail_at="step", failure="hang", touch=str(folder / "hanging"))
config = run_config(scenario=scenario(correctness=CorrectnessConfig(enabled=False)))
run_point(config, folder / "run", command=fake_command(folder, script))
"""


@pytest.mark.thorough
def test_a_killed_harness_leaves_no_sampler_and_a_readable_spool(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], cwd=ROOT)
    wait_until((tmp_path / "hanging").exists)
    assert len(samplers(tmp_path / "run")) == 1
    wait_until(lambda: "measure" in read_spool(tmp_path / "run" / TELEMETRY_SPOOL)["job"])
    parent.kill()
    parent.wait()
    wait_until(lambda: samplers(tmp_path / "run") == [])
    found = read_telemetry(tmp_path / "run")
    assert len(found["clock_s"]) >= 1
    assert json.loads((tmp_path / "run" / "state.json").read_text())["job"] == "measure"
