import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from catalogue.checkpoint import unavailable
from catalogue.entry import ModelSource
from engine.asked.config import GPUConfig
from harness.config.schema import (
    CorrectnessConfig,
    LatencyScenario,
    LoadScenario,
    ModelNode,
    SystemConfig,
)
from harness.point import point
from harness.point.point import PointEndedError, run_point, skip_point
from harness.tracking.base import GuardedTracker, Tracker
from reports.record import judging
from reports.record.record import RunRecord
from tests.harness.cases import SPEC, attempt, fake_command, load_only, run_config, scenario
from tests.harness.fakes import PLAN, Script
from tests.slow import slow

UNCHECKED = CorrectnessConfig(enabled=False)
pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    monkeypatch.setenv("TIGHTFIT_HOME", str(folder))
    return folder


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    """Drawing takes seconds and has tests of its own."""
    monkeypatch.setattr(point, "build_report", lambda folder: [])


def run(tmp_path, config=None, name="run", **script):
    folder = tmp_path / name
    config = config or run_config(scenario=scenario(correctness=UNCHECKED))
    record = run_point(config, folder, command=fake_command(tmp_path, Script(**script)))
    assert RunRecord.read(folder / "result.json") == record
    return record


@pytest.mark.thorough
def test_a_whole_point(interpreted_workers, tmp_path, capsys):
    parts = scenario(load=LoadScenario(cold_starts=1, warm_starts=2))
    record = run(tmp_path, run_config(scenario=parts), prefill_s=0.5, decode_s=0.125)
    assert record.status == "ok"
    assert record.error is None
    assert record.valid is True
    assert record.metrics["latency/ttft_ms/p50"] == pytest.approx(500)
    assert record.metrics["throughput/output_tok_s"] == pytest.approx(20)
    assert record.metrics["load/read_s"] == 2.0
    assert record.metrics["load/total_s"] == pytest.approx(
        sum(record.samples["load"][0]["phases"].values())
    )
    assert [row["start"] for row in record.samples["load"]] == ["warm 1", "warm 2"]
    assert record.environment["emulated"] is True
    assert record.environment["cpu"]["num_cores"] == os.cpu_count()
    assert record.environment["git"] is None or len(record.environment["git"]["sha"]) == 40
    assert record.plan == PLAN
    assert record.effective["correctness"]["checked"] is True
    assert record.effective["model"] == {"source": "random", "path": None}
    notes = " ".join(record.effective["notes"])
    assert "dummy weights are made in memory, so there is no cold start" in notes
    assert "p90 needs" not in notes
    folder = tmp_path / "run"
    assert "tiny" in (folder / "config.yaml").read_text()
    assert (folder / "overrides.yaml").read_text() == "[]\n"
    assert json.loads((folder / "state.json").read_text())["status"] == "ok"
    assert "--- measure" in (folder / "worker.log").read_text()
    assert not (folder / "jobs").exists()
    shown = capsys.readouterr().out
    assert "tiny-none-cpu-test: ok, valid" in shown
    assert "time to first token, median" in shown
    assert str(folder) in shown


@pytest.mark.thorough
def test_the_reference_is_made_once(tmp_path, home):
    config = run_config(scenario=scenario(throughput=None))
    run(tmp_path, config, name="first")
    run(tmp_path, config, name="second")
    assert len(list((home / "references").glob("*.json"))) == 1
    assert "--- reference" in (tmp_path / "first" / "worker.log").read_text()
    assert "--- reference" not in (tmp_path / "second" / "worker.log").read_text()


def test_a_point_that_does_not_fit_ends_before_a_reference_is_made(tmp_path, home):
    record = run(tmp_path, run_config(), fail_at="plan", failure="no_fit")
    assert (record.status, record.valid, record.reasons) == ("no_fit", None, [])
    assert (record.error["type"], record.error["phase"]) == ("CapacityError", "plan")
    assert record.plan == PLAN
    log = (tmp_path / "run" / "worker.log").read_text()
    assert [line for line in log.splitlines() if line.startswith("---")] == ["--- reference"]
    assert not (home / "references").exists()


def test_wrong_tokens_are_not_timed(tmp_path):
    record = run(tmp_path, run_config(), wrong_token_at=2)
    assert (record.status, record.valid) == ("failed", False)
    assert record.error["type"] == "WrongTokens"
    assert "position 2 of prompt 0" in record.error["message"]
    assert "latency/ttft_ms/mean" not in record.metrics


@pytest.mark.thorough
def test_a_rate_that_no_link_carries_makes_the_point_invalid(tmp_path, monkeypatch):
    monkeypatch.setattr(judging, "impossible_rate", lambda record: f"{record.status}: too fast")
    record = run(tmp_path, run_config())
    assert (record.status, record.valid, record.reasons) == ("ok", False, ["ok: too fast"])


@pytest.mark.thorough
def test_without_a_reference_the_point_runs_and_is_not_valid(tmp_path):
    record = run(tmp_path, run_config(), fail_at="reference", failure="no_fit")
    assert (record.status, record.valid) == ("ok", False)
    assert (
        "the reference (every layer copied on demand, eager) could not be made"
        in (record.reasons[0])
    )
    assert record.metrics["latency/ttft_ms/p50"] == pytest.approx(500)


def test_a_point_that_ends_badly_is_not_judged_for_want_of_a_reference(tmp_path):
    failing = Script(fail_at="step", failure="crash", fail_reference="no_fit")
    command = fake_command(tmp_path, failing)
    record = run_point(run_config(), tmp_path / "run", command=command)
    assert (record.status, record.valid, record.reasons) == ("failed", None, [])


def test_unchecked_tokens_are_neither_valid_nor_invalid(tmp_path):
    assert run(tmp_path).valid is None


def test_failed_requests_make_the_point_invalid(tmp_path):
    record = run(tmp_path, run_config(), refuse=["latency-0"])
    assert (record.status, record.valid) == ("ok", False)
    assert record.reasons[0].startswith("latency: 1 of 11 requests failed; latency-0: prompt:")


@pytest.mark.thorough_but("no_fit", "sigkill")
@pytest.mark.parametrize(
    ("failure", "fail_at", "status", "kind"),
    [
        ("no_fit", "build", "no_fit", "CapacityError"),
        ("oom", "step", "oom", "OutOfMemoryError"),
        slow("memory_error", "build", "oom", "MemoryError"),
        ("crash", "step", "failed", "ValueError"),
        slow("checkpoint", "build", "failed", "CheckpointError"),
        ("exit", "step", "failed", "WorkerExit"),
        ("sigkill", "step", "killed", "SIGKILL"),
        slow("sigsegv", "build", "killed", "SIGSEGV"),
    ],
)
def test_what_ends_a_worker_becomes_a_status(tmp_path, failure, fail_at, status, kind):
    record = run(tmp_path, fail_at=fail_at, failure=failure)
    assert record.status == status
    assert record.error["type"] == kind
    assert record.error["message"]
    assert record.valid is None
    if failure == "no_fit":
        assert record.plan == PLAN
        assert record.error["traceback"] is None
    if failure == "exit":
        assert "exit code 7" in record.error["message"]


@pytest.mark.thorough
def test_a_run_that_failed_on_a_server_is_not_called_emulated(tmp_path):
    config = run_config(
        scenario=scenario(correctness=UNCHECKED, load=None),
        system=SystemConfig(kind="http", base_url="http://localhost:1/v1"),
    )
    record = run(tmp_path, config, fail_at="build", failure="checkpoint")
    assert record.status == "failed"
    assert record.environment["emulated"] is None
    assert run(tmp_path, name="own").environment["emulated"] is True


def test_a_killed_worker_leaves_the_parts_that_it_ended(tmp_path):
    # 1 warm-up and 11 latency requests of 5 steps, then throughput is killed.
    record = run(tmp_path, fail_at="step", failure="sigkill", after_steps=60)
    assert (record.status, record.error["phase"]) == ("partial", "throughput warm-up")
    assert (record.error["status"], record.error["type"]) == ("killed", "SIGKILL")
    assert (record.error["measured"], record.error["missing"]) == (["latency"], ["throughput"])
    assert record.error["message"].startswith("throughput could not be measured (killed): worker")
    assert record.plan == PLAN
    assert record.metrics["latency/ttft_ms/mean"] == pytest.approx(500)
    assert len(record.samples["latency"]) == 11
    assert "throughput/output_tok_s" not in record.metrics


@pytest.mark.parametrize("failure", ["oom", slow("crash")])
def test_a_part_that_fails_costs_no_figure_of_the_others(tmp_path, capsys, failure):
    parts = scenario(load=LoadScenario())
    script = {"fail_at": "step", "failure": failure, "after_steps": 94}
    record = run(tmp_path, run_config(scenario=parts), prefill_s=0.5, **script)
    assert (record.status, record.valid) == ("partial", True)
    assert (record.error["measured"], record.error["missing"]) == (
        ["latency"],
        ["throughput", "load"],
    )
    assert record.error["phase"].startswith("throughput")
    assert record.metrics["latency/ttft_ms/p50"] == pytest.approx(500)
    assert "memory/gpu_peak_gib" in record.metrics
    assert "tiny-none-cpu-test: partial, valid" in capsys.readouterr().out


def test_starts_before_one_that_failed_have_figures(monkeypatch):
    trial = attempt(run_config(scenario=load_only(warm_starts=2)))
    trial.findings.measured.append("latency")
    row = {"total_s": 3.0, "build_s": 2.0, "phases": {"read": 2.0}, "busy": {}, "moved": {}}

    def take(job, **_):
        if job.name.endswith("2"):
            trial.findings.fail("oom", {"type": "MemoryError", "message": "m"})
            raise PointEndedError
        return {"samples": {"load": [row]}}

    monkeypatch.setattr(trial, "_job", lambda name, kind, *_: SimpleNamespace(name=name))
    monkeypatch.setattr(trial, "_take", take)
    with pytest.raises(PointEndedError):
        trial.run()
    assert trial.findings.status == "partial"
    assert trial.findings.error["missing"] == ["load"]
    assert [found["start"] for found in trial.findings.samples["load"]] == ["warm 1"]


def test_a_sigkill_with_a_raised_counter_is_oom(tmp_path, monkeypatch):
    counts = iter([{"cgroup": 3, "vmstat": 9}, {"cgroup": 4, "vmstat": 9}])
    monkeypatch.setattr("harness.point.point.oom_kills", lambda: next(counts))
    record = run(tmp_path, fail_at="step", failure="sigkill")
    assert (record.status, record.error["type"]) == ("oom", "HostOutOfMemory")
    assert "resident set had reached" in record.error["message"]


@pytest.mark.thorough
def test_a_worker_that_hangs_times_out_and_leaves_its_stack(interpreted_workers, tmp_path):
    config = run_config(scenario=scenario(correctness=UNCHECKED), timeout_s=4)
    record = run(tmp_path, config, fail_at="step", failure="hang")
    assert (record.status, record.error["type"]) == ("timeout", "Timeout")
    assert "timeout_s=4 s" in record.error["message"]
    assert "in _hang" in record.error["traceback"]
    assert not _alive(tmp_path / "run")


@pytest.mark.thorough
def test_a_worker_that_does_nothing_is_stopped_without_a_limit_for_the_point(
    interpreted_workers, tmp_path
):
    config = run_config(scenario=scenario(correctness=UNCHECKED), silence_s=3)
    record = run(tmp_path, config, fail_at="step", failure="hang")
    assert (record.status, record.error["type"]) == ("timeout", "Silence")
    assert "nothing was done for silence_s=3 s" in record.error["message"]
    assert "in _hang" in record.error["traceback"]


@pytest.mark.thorough
def test_one_bad_point_does_not_change_the_next(tmp_path):
    assert run(tmp_path, name="0", fail_at="step", failure="sigkill").status == "killed"
    assert run(tmp_path, name="1").status == "ok"


def run_until_interrupted(tmp_path, number, **script):
    """Run a point whose worker hangs at a step; send the signal once it does."""
    mark = tmp_path / "hanging"
    hanging = Script(fail_at="step", failure="hang", touch=str(mark), **script)
    watcher = threading.Thread(target=_interrupt_when, args=(mark, number))
    watcher.start()
    config = run_config(scenario=scenario(correctness=UNCHECKED))
    with pytest.raises(KeyboardInterrupt):
        run_point(config, tmp_path / "run", command=fake_command(tmp_path, hanging))
    watcher.join()
    record = RunRecord.read(tmp_path / "run" / "result.json")
    assert (record.status, record.error["type"]) == ("killed", "Interrupted")
    return record


@pytest.mark.parametrize("number", [signal.SIGINT, slow(signal.SIGTERM)])
def test_ctrl_c_ends_the_worker_and_writes_the_record(tmp_path, number):
    record = run_until_interrupted(tmp_path, number)
    assert record.error["phase"] == "latency warm-up"
    assert record.plan is not None
    assert not _alive(tmp_path / "run")


def test_parts_that_ended_before_ctrl_c_stay_in_the_record(tmp_path):
    latency_steps = 12 * 5  # a warm-up and 11 requests
    record = run_until_interrupted(tmp_path, signal.SIGINT, after_steps=latency_steps)
    assert record.error["phase"] == "throughput warm-up"
    assert record.metrics["latency/ttft_ms/mean"] == 500
    assert not any(name.startswith("throughput/") for name in record.metrics)
    assert "latency" in record.samples
    assert "throughput" not in record.samples


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
def test_no_worker_survives_a_killed_parent(tmp_path):
    root = Path(__file__).resolve().parents[3]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], cwd=root)
    _wait_for(tmp_path / "hanging")
    worker = json.loads((tmp_path / "run" / "state.json").read_text())["pid"]
    assert Path(f"/proc/{worker}").exists()
    parent.kill()
    parent.wait()
    _wait_until(lambda: not Path(f"/proc/{worker}").exists() or _is_zombie(worker))


def test_absent_weights_are_a_clean_failure(tmp_path, monkeypatch):
    def refuse(model, report):
        raise unavailable(model.name, "no checkpoint here and no network")

    def wait(*_, **__):
        raise AssertionError("a device was waited for")

    monkeypatch.setattr("harness.point.point.fetch", refuse)
    monkeypatch.setattr("harness.point.point.own_device", wait)
    source = ModelSource(kind="hub", repo="a/b", revision="main")
    config = run_config(model=ModelNode(name="big", source=source, spec=SPEC))
    record = run(tmp_path, config)
    assert (record.status, record.error["type"]) == ("failed", "ModelUnavailableError")
    assert "model.load_format=dummy" in record.error["message"]
    assert record.error["traceback"] is None
    assert not (tmp_path / "run" / "worker.log").exists()


def test_the_record_names_the_commit_that_was_loaded(tmp_path, monkeypatch):
    folder = tmp_path / "models--a--b" / "snapshots" / ("0" * 39 + "1")
    folder.mkdir(parents=True)
    monkeypatch.setattr("harness.point.point.fetch", lambda model, report: folder)
    source = ModelSource(kind="hub", repo="a/b", revision="main")
    record = run(
        tmp_path,
        run_config(
            model=ModelNode(name="big", source=source, spec=SPEC),
            scenario=load_only(cold_starts=0, warm_starts=1),
        ),
    )
    assert record.status == "ok"
    assert record.config["model"]["source"]["revision"] == "main"
    assert record.effective["model"] == {
        "source": "hub",
        "path": str(folder),
        "repo": "a/b",
        "revision": folder.name,
    }


def test_a_folder_that_is_absent_is_not_passed_over_for_random_weights(tmp_path):
    model = ModelNode(name="tiny", path=str(tmp_path / "none"), load_format="dummy", spec=SPEC)
    record = run(tmp_path, run_config(model=model))
    assert (record.status, record.error["type"]) == ("failed", "ModelUnavailableError")
    assert f"found none at {tmp_path / 'none'}" in record.error["message"]


def test_malformed_prompts_end_the_point_before_a_worker_starts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n{"prompt": 3}\n')
    part = LatencyScenario(num_requests=1, prompts_file=str(path))
    record = run(tmp_path, run_config(scenario=scenario(latency=part)))
    assert (record.status, record.error["type"]) == ("failed", "PromptError")
    assert "line 2" in record.error["message"]
    assert not (tmp_path / "run" / "worker.log").exists()


def test_cold_starts_drop_the_page_cache_and_record_it(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(1 << 20))
    config = run_config(
        model=ModelNode(name="tiny", path=str(model), spec=SPEC),
        scenario=load_only(cold_starts=1, warm_starts=1),
    )
    record = run(tmp_path, config)
    assert record.status == "ok"
    assert [row["start"] for row in record.samples["load"]] == ["cold", "warm"]
    cold, warm = record.samples["load"]
    notes = record.effective["notes"]
    assert cold["cached_share"] == 0 or any("page cache" in note for note in notes)
    assert record.metrics["load/cold_total_s"] == pytest.approx(cold["total_s"])
    assert record.metrics["load/total_s"] == pytest.approx(warm["total_s"])


def test_a_skipped_point_has_a_record(tmp_path):
    why = {"reason": "fail_fast=true", "config_dir": "/mine"}
    record = skip_point(run_config(), tmp_path / "run", ["offload=uva"], **why)
    assert RunRecord.read(tmp_path / "run" / "result.json") == record
    assert (record.status, record.valid) == ("skipped", None)
    assert record.error["message"] == "fail_fast=true"
    assert record.overrides == ["offload=uva"]
    assert record.effective["config_dir"] == "/mine"


def test_a_folder_with_a_record_is_refused(tmp_path):
    skip_point(run_config(), tmp_path / "run", reason="first")
    with pytest.raises(FileExistsError, match="found the record of another"):
        run(tmp_path)


def test_a_report_that_fails_is_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(point, "build_report", lambda folder: ["report: not made: no module"])
    record = run(tmp_path)
    assert record.status == "ok"
    assert record.effective["warnings"] == ["report: not made: no module"]
    assert "warning: report: not made" in capsys.readouterr().out


class Copying(Tracker):
    """Cannot log samples; takes a copy of the record's file at the end."""

    copy = b""

    def log_samples(self, rows):
        raise RuntimeError("no room for samples")

    def finish_point(self, record, run_dir):
        self.copy = (run_dir / "result.json").read_bytes()


class Failing(Tracker):
    def finish_point(self, record, run_dir):
        raise RuntimeError("no room for figures")


def test_the_tracker_gets_the_record_with_every_warning(tmp_path, monkeypatch):
    tracker = Copying()
    monkeypatch.setattr(point, "open_tracker", lambda config, home: GuardedTracker(tracker))
    monkeypatch.setattr(point, "build_report", lambda folder: ["report: not made: no module"])
    warnings = run(tmp_path).effective["warnings"]
    assert "log_samples failed: RuntimeError: no room for samples" in warnings[0]
    assert warnings[-1] == "report: not made: no module"
    assert tracker.copy == (tmp_path / "run" / "result.json").read_bytes()


def test_a_tracker_that_fails_at_the_end_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(point, "open_tracker", lambda config, home: GuardedTracker(Failing()))
    [warning] = run(tmp_path).effective["warnings"]
    assert "finish_point failed: RuntimeError: no room for figures" in warning


@pytest.mark.thorough
def test_gpu_cpu_takes_no_gpu(tmp_path):
    config = run_config(gpu=GPUConfig(name="cpu", device="cpu"))
    assert run(tmp_path, config).environment["gpu"] is None


def _alive(folder):
    pid = json.loads((folder / "state.json").read_text())["pid"]
    return Path(f"/proc/{pid}").exists()


def _is_zombie(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    except OSError:
        return True


def _wait_until(condition, limit_s=30.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def _wait_for(path):
    _wait_until(path.exists)


def _interrupt_when(path, number):
    _wait_for(path)
    os.kill(os.getpid(), number)
