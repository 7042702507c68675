"""Every way in which a run can end, in real worker processes, against its status."""

import signal
import subprocess
import sys
import time

import pytest

from engine.asked.config import GPUConfig
from harness.config.schema import FakeScript, LoadScenario, ModelNode, ScenarioConfig
from harness.point import point
from harness.point.point import run_point, skip_point
from reports.record.record import STATUSES, RunRecord
from tests.harness.cases import SPEC, quoted, run_config
from tests.harness.systems.fake.cases import UNCHECKED, latency, throughput

pytestmark = pytest.mark.slow

SMALL = {"load_s": 0.0}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(point, "build_report", lambda folder: [])


def config(script, **changes):
    parts = {"latency": latency(2), "correctness": UNCHECKED}
    fields = {
        "model": ModelNode(name="fake", load_format="dummy", spec=SPEC, fake=script),
        "scenario": ScenarioConfig(name="test", **(parts | changes.pop("parts", {}))),
    }
    return run_config(**(fields | changes))


def end(tmp_path, script, **changes):
    record = run_point(config(script, **changes), tmp_path / "run")
    assert RunRecord.read(tmp_path / "run" / "result.json") == record
    assert record.status in STATUSES
    return record


def test_ok_with_the_tokens_compared_and_a_start_of_its_own(tmp_path):
    parts = {"load": LoadScenario(), "throughput": throughput(2)}
    whole = ScenarioConfig(name="test", **parts)
    record = end(tmp_path, FakeScript(**SMALL), scenario=whole)
    assert (record.status, record.valid, record.error) == ("ok", True, None)
    assert record.effective["correctness"]["checked"] is True
    assert record.effective["model"] == {"source": "fake", "path": None}
    assert any("Nothing was computed" in text for text in record.effective["warnings"])
    assert record.environment["emulated"] is True
    assert record.metrics["throughput/output_tok_s"] == pytest.approx(10 / 0.04)


@pytest.mark.parametrize(
    ("script", "status", "kind", "is_clean"),
    [
        ({"fail": "no_fit", "fail_at": "build"}, "no_fit", "CapacityError", True),
        ({"fail": "oom", "fail_after_steps": 3}, "oom", "OutOfMemoryError", False),
        ({"fail": "host_oom", "fail_at": "build"}, "oom", "MemoryError", False),
        ({"fail": "error"}, "failed", "RuntimeError", False),
        ({"fail": "exit"}, "failed", "WorkerExit", True),
        ({"fail": "sigkill", "fail_after_steps": 2}, "killed", "SIGKILL", True),
        ({"fail": "sigsegv"}, "killed", "SIGSEGV", False),
    ],
)
def test_each_failure_has_its_status(tmp_path, script, status, kind, is_clean):
    record = end(tmp_path, FakeScript(**SMALL, **script))
    assert (record.status, record.error["type"]) == (status, kind)
    assert record.valid is None
    assert (record.error["traceback"] is None) == is_clean
    assert record.error["phase"] in {"build", "load:read", "latency"}
    assert "latency/ttft_ms/mean" not in record.metrics


def test_a_budget_too_small_is_told_before_the_reference_is_built(tmp_path):
    record = end(
        tmp_path,
        FakeScript(),
        parts={"correctness": type(UNCHECKED)()},
        gpu=GPUConfig(memory_gib=2),
    )
    assert (record.status, record.error["phase"]) == ("no_fit", "plan")
    assert record.plan["gpu"]["total_bytes"] == 3 * 2**30


def test_wrong_tokens_fail_and_nothing_is_timed(tmp_path):
    record = end(
        tmp_path, FakeScript(wrong_token_at=0, **SMALL), parts={"correctness": type(UNCHECKED)()}
    )
    assert (record.status, record.valid, record.error["type"]) == ("failed", False, "WrongTokens")
    assert "latency" not in record.samples


def test_a_reference_that_is_kept_does_not_hide_its_scripted_failure(tmp_path):
    parts = {"correctness": type(UNCHECKED)()}
    assert run_point(config(FakeScript(**SMALL), parts=parts), tmp_path / "first").status == "ok"
    record = end(tmp_path, FakeScript(fail="error", fail_at="reference", **SMALL), parts=parts)
    assert (record.status, record.error["message"]) == (
        "failed",
        "scripted: the engine broke down",
    )


def test_a_hang_ends_with_timeout(tmp_path):
    record = end(tmp_path, FakeScript(fail="hang", **SMALL), timeout_s=3.0)
    assert (record.status, record.error["type"]) == ("timeout", "Timeout")
    assert record.duration_s < 30


def test_what_was_measured_before_a_failure_stays(tmp_path):
    """Two requests of four tokens are eight steps; the ninth is of throughput."""
    script = FakeScript(fail="sigkill", fail_after_steps=8, **SMALL)
    record = end(tmp_path, script, parts={"throughput": throughput(2)})
    assert (record.status, record.error["status"]) == ("partial", "killed")
    assert record.metrics["latency/ttft_ms/mean"] == pytest.approx(20)
    assert "throughput/output_tok_s" not in record.metrics


def test_skipped(tmp_path):
    record = skip_point(config(FakeScript()), tmp_path / "run", reason="fail_fast=true")
    assert (record.status, record.error["message"]) == ("skipped", "fail_fast=true")


@pytest.mark.parametrize("is_moved", [False, True])
def test_an_interrupted_command_leaves_a_killed_record_and_no_worker(tmp_path, is_moved):
    """Also where the point's folder was moved away, so that its end cannot be written there."""
    folder = tmp_path / "sweep"
    command = [sys.executable, "-m", "harness", "-m", "model=fake", "tracking=none"]
    command += ["scenario=latency", "scenario.correctness.enabled=false", "model.fake.load_s=0"]
    command += ["model.fake.fail=hang", "offload=none,uva", f"hydra.sweep.dir={quoted(folder)}"]
    harness = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    state = folder / "0" / "state.json"
    deadline_s = time.monotonic() + 60
    try:
        while not (state.is_file() and '"latency' in state.read_text(encoding="utf-8")):
            assert harness.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        if is_moved:
            (folder / "0").rename(tmp_path / "away")
        harness.send_signal(signal.SIGINT)
        output, _ = harness.communicate(timeout=60)
    finally:
        harness.kill()  # no effect once it has ended
    assert harness.returncode == 130, output
    assert not (folder / "1").exists()
    if not is_moved:
        record = RunRecord.read(folder / "0" / "result.json")
        assert (record.status, record.error["type"]) == ("killed", "Interrupted")
    listed = subprocess.run(
        ["ps", "-eo", "args"], capture_output=True, text=True, check=True, encoding="utf-8"
    )
    assert str(folder) not in listed.stdout
