"""Which points of a sweep run again: by settings, files, code, card and versions."""

import hashlib
import os
import time
from dataclasses import replace

import pytest

from harness.config.schema import LatencyScenario, TrackingConfig
from harness.point.point import run_point
from harness.point.rerun import TAKEN_FROM, FinishedPoints, fingerprint, input_hashes
from reports.record.record import RESULT_NAME, RunRecord
from tests.harness.cases import fake_command, run_config, scenario
from tests.harness.fakes import Script

pytestmark = pytest.mark.usefixtures("forked_workers")

ENVIRONMENT = {
    "gpu": {"name": "card", "memory_bytes": 16, "uuid": "GPU-1"},
    "driver": "1",
    "git": {"sha": "ab", "dirty": False, "changes": None},
    "packages": {"torch": "2"},
    "cpu": {"name": "cpu", "num_usable_cores": 4},
    "host": "here",
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("harness.point.point.build_report", lambda folder: [])
    monkeypatch.setattr("harness.observe.environment.git_state", lambda folder: None)
    return tmp_path / "home"


def run(tmp_path, name, rerun, **script):
    command = fake_command(tmp_path, Script(**script))
    config = run_config(rerun=rerun)
    return run_point(config, tmp_path / name, [f"name={name}"], command=command)


def hashed(config, environment):
    return fingerprint(config, environment, input_hashes(config))


def test_what_changes_no_result_is_not_in_the_hash():
    key = hashed(run_config(), ENVIRONMENT)
    other = run_config(
        rerun="none",
        fail_fast=True,
        monotone_stop=False,
        timeout_s=5.0,
        tracking=TrackingConfig(experiment="other"),
    )
    assert hashed(other, ENVIRONMENT) == key
    moved = ENVIRONMENT | {"host": "there", "gpu": ENVIRONMENT["gpu"] | {"uuid": "GPU-2"}}
    assert hashed(run_config(), moved) == key


@pytest.mark.parametrize(
    "changes",
    [
        {"git": {"sha": "cd", "dirty": False, "changes": None}},
        {"git": {"sha": "ab", "dirty": True, "changes": "1"}},
        {"gpu": {"name": "card", "memory_bytes": 24}},
        {"gpu": None},
        {"driver": "2"},
        {"packages": {"torch": "3"}},
        {"switches": {"TIGHTFIT_DISABLE_UVA": "1"}},
    ],
)
def test_code_card_and_versions_are_in_the_hash(changes):
    key = hashed(run_config(), ENVIRONMENT)
    assert hashed(run_config(), ENVIRONMENT | changes) != key


def test_settings_and_the_content_of_files_are_in_the_hash(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    latency = LatencyScenario(num_requests=11, prompts_file=str(prompts))
    config = run_config(scenario=scenario(latency=latency))
    key = hashed(config, ENVIRONMENT)
    assert key != hashed(run_config(), ENVIRONMENT)
    prompts.write_text('{"prompt": "b"}\n')
    assert hashed(config, ENVIRONMENT) != key
    model = tmp_path / "model"
    model.mkdir()
    local = run_config(model=replace(config.model, path=str(model)))
    empty = hashed(local, ENVIRONMENT)
    (model / "a.safetensors").write_text("x")
    assert hashed(local, ENVIRONMENT) != empty


def test_the_record_names_the_content_of_files_which_is_read_once(tmp_path, monkeypatch):
    read = []
    digest_of = hashlib.file_digest
    monkeypatch.setattr(
        hashlib, "file_digest", lambda file, name: read.append(file.name) or digest_of(file, name)
    )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(b'{"prompt": 3}')
    latency = LatencyScenario(num_requests=1, prompts_file=str(prompts))
    record = run_point(run_config(scenario=scenario(latency=latency)), tmp_path / "run")
    digest = hashlib.sha256(b'{"prompt": 3}').hexdigest()
    assert record.effective["inputs"] == {"latency.prompts_file": digest}
    assert read.count(str(prompts)) == 1


def test_a_point_that_ended_ok_is_taken_over(tmp_path, capsys):
    first = run(tmp_path, "first", "failed")
    second = run(tmp_path, "second", "failed", fail_at="build", failure="crash")
    assert second.status == "ok"
    assert (second.run_id, second.metrics) == (first.run_id, first.metrics)
    assert second.effective[TAKEN_FROM] == str(tmp_path / "first")
    assert second.overrides == ["name=second"]
    assert RunRecord.read(tmp_path / "second" / RESULT_NAME) == second
    kept = (tmp_path / "second" / "worker.log").read_text()
    assert kept == (tmp_path / "first" / "worker.log").read_text()
    assert "rerun=all runs it again" in capsys.readouterr().out
    third = run(tmp_path, "third", "none")
    assert third.effective[TAKEN_FROM] == str(tmp_path / "first")
    assert run(tmp_path, "fourth", "all").run_id != first.run_id


@pytest.mark.thorough
def test_a_point_that_failed_runs_again_unless_none_shall(tmp_path):
    failed = run(tmp_path, "first", "failed", fail_at="build", failure="crash")
    assert failed.status == "failed"
    assert run(tmp_path, "second", "none").status == "failed"
    assert run(tmp_path, "third", "failed").status == "ok"
    assert run(tmp_path, "fourth", "none").status == "ok"


def test_the_record_must_still_be_there(tmp_path, home):
    points = FinishedPoints(home)
    record = RunRecord(run_id="a", name="a", status="ok")
    folder = tmp_path / "a"
    folder.mkdir()
    points.note("key", folder, record)
    assert points.find("key", "failed") is None
    record.write(folder / RESULT_NAME)
    assert points.find("key", "failed").record == record
    assert points.find("key", "all") is None
    assert points.find("key", "failed", before_s=0.0) is None
    assert points.find("key", "failed", before_s=time.time() + 1) is not None
    replace(record, run_id="b").write(folder / RESULT_NAME)
    assert points.find("key", "failed") is None


@pytest.mark.parametrize(
    ("status", "error"),
    [("skipped", {"type": "Skipped", "message": ""}), ("killed", {"type": "Interrupted"})],
)
def test_points_that_did_not_end_by_themselves_are_not_noted(tmp_path, home, status, error):
    record = RunRecord(run_id="a", name="a", status=status, error=error)
    FinishedPoints(home).note("key", tmp_path, record)
    assert not (home / "points").exists()


def test_a_file_that_cannot_be_read_fails_the_point_alone(tmp_path, monkeypatch):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(b'{"prompt": 3}')

    def refuse(self, *_, **__):
        raise PermissionError(f"not yours: {self}")

    monkeypatch.setattr(type(prompts), "open", refuse)
    config = run_config(
        scenario=scenario(latency=LatencyScenario(num_requests=1, prompts_file=str(prompts)))
    )
    assert input_hashes(config) == {"latency.prompts_file": None}


@pytest.mark.thorough
def test_a_point_that_is_not_valid_runs_again_where_that_is_asked(tmp_path):
    first = run(tmp_path, "0", "all", refuse=["latency-0"])
    assert (first.status, first.valid) == ("ok", False)
    assert run(tmp_path, "1", "failed").run_id == first.run_id
    again = run(tmp_path, "2", "invalid")
    assert (again.valid, again.run_id == first.run_id) == (True, False)
    assert run(tmp_path, "3", "invalid").run_id == again.run_id


@pytest.mark.thorough
def test_the_page_of_a_point_taken_over_under_its_own_name_is_not_drawn_again(tmp_path):
    command = fake_command(tmp_path, Script())
    first = tmp_path / "0"
    run_point(run_config(), first, [], command=command)
    (first / "report.html").write_text("page")
    os.utime(first / "report.html", (1, 1))
    for name, overrides, is_new in (("1", [], True), ("2", ["offload=none"], False)):
        folder = tmp_path / name
        record = run_point(run_config(rerun="failed"), folder, overrides, command=command)
        assert record.effective[TAKEN_FROM]
        ages = [(folder / file).stat().st_mtime_ns for file in ("report.html", RESULT_NAME)]
        assert (ages[0] >= ages[1]) == is_new
