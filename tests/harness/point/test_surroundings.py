"""The device lock, names and hashes, the reference, the display, the summary and the report."""

import io
import json
import multiprocessing
import os
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from engine.asked.config import EngineConfig, ModelConfig
from harness.config.schema import (
    CorrectnessConfig,
    LatencyScenario,
    ScenarioConfig,
    SweepContext,
    TrackingConfig,
)
from harness.point.describe import config_hash, flat_params, point_name, tags
from harness.point.devices import device_lock_path, hold_one
from harness.point.progress import (
    LineDisplay,
    RichDisplay,
    _span,
    describe,
    memory_text,
    open_display,
)
from harness.point.show import build_report, summary_lines
from harness.sweep import track as sweep
from harness.work.correctness import WrongTokensError, compare_tokens, reference_key
from reports.record.record import RunRecord
from tests.harness.cases import SPEC, run_config


def test_a_lock_is_free_again_when_its_holder_ended(tmp_path):
    path = tmp_path / "locks" / "gpu.lock"
    code = (
        "import sys; from pathlib import Path; from harness.point.devices import hold_one\n"
        "with hold_one([Path(sys.argv[1])], owner='the first', say=print):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    root = Path(__file__).resolve().parents[3]
    first = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdout.readline() == "held\n"
    said = []

    def say(text):
        said.append(text)
        first.kill()  # it holds the lock no longer

    with hold_one([path], owner="the second", say=say):
        assert json.loads(path.read_text())["run"] == "the second"
    first.communicate()
    assert said == [f"waiting for gpu: in use by process {first.pid} (the first)."]


def test_a_free_lock_is_taken_without_a_word(tmp_path):
    said = []
    with hold_one([tmp_path / "a.lock"], owner="me", say=said.append) as taken:
        assert taken == (0, 0)
    assert said == []


def test_other_users_may_lock_the_same_gpu(tmp_path):
    before = os.umask(0o077)
    try:
        with hold_one([tmp_path / "locks" / "gpu.lock"], owner="me", say=print):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "locks").stat().st_mode & 0o7777 == 0o1777
    assert (tmp_path / "locks" / "gpu.lock").stat().st_mode & 0o777 == 0o666


def test_lock_files_by_gpu_and_for_the_cpu(tmp_path):
    assert device_lock_path("GPU-1", tmp_path).name == "GPU-1.lock"
    assert device_lock_path("GPU-1", tmp_path).parent != tmp_path / "locks"
    assert device_lock_path(None, tmp_path) == tmp_path / "locks" / "cpu.lock"


def test_config_hash_ignores_what_changes_no_result():
    base = run_config().to_dict()
    assert config_hash(base) == config_hash(run_config(timeout_s=5.0, fail_fast=True).to_dict())
    tracked = run_config(tracking=TrackingConfig(experiment="other"))
    assert config_hash(base) == config_hash(tracked.to_dict())
    changed = run_config().to_dict()
    changed["engine"]["seed"] = 1
    assert config_hash(base) != config_hash(changed)


def test_params_are_flat_and_few():
    params = flat_params(run_config())
    assert len(params) <= 50
    assert not any(isinstance(value, dict) for value in params.values())
    assert params["scenario.latency.num_requests"] == 11
    assert "scenario.latency.prompts_file" not in params
    scenario = ScenarioConfig(name="rows", latency=LatencyScenario(prompts_file="rows.jsonl"))
    params = flat_params(run_config(scenario=scenario))
    assert params["scenario.latency.prompts_file"] == "rows.jsonl"
    assert len(params) <= 50


def test_a_setting_that_was_typed_is_a_parameter_whatever_it_is():
    typed = ["+model=tiny", "++planner.objective=context", "timeout_s=5", "offload=none", "gpu=cpu"]
    config = run_config(timeout_s=5.0)
    added = {"planner.objective": config.planner.objective, "timeout_s": 5.0}
    assert flat_params(config, typed) == flat_params(config) | added


def test_names_say_what_varies():
    sweep = SweepContext(sweep_id="s", folder=Path(), index=0, total=2, shared=("+model=tiny",))
    overrides = ["+model=tiny", "offload=uva", "+engine.seed=1"]
    assert point_name(run_config(), overrides, sweep) == "offload=uva,engine.seed=1"
    assert point_name(run_config(), ["+model=tiny"], sweep) == "tiny-none-cpu-test"
    assert point_name(run_config(), ["+model=tiny"], None) == "tiny-none-cpu-test"


def test_tags_leave_out_what_is_unknown():
    found = tags(run_config(), {"gpu": None, "git": {"sha": "ab", "dirty": True}, "host": "here"})
    assert (found["git.sha"], found["git.dirty"], found["host"]) == ("ab", "true", "here")
    assert "gpu.name" not in found
    assert all(isinstance(value, str) for value in found.values())


def key(environment=None, check=None, **changes):
    model = ModelConfig(name="tiny", load_format="dummy", spec=SPEC)
    config = EngineConfig(model=model, **changes)
    facts = environment or {"cpu": {"name": "a"}, "torch": "2"}
    return reference_key(config, asdict(check or CorrectnessConfig()), facts)


def test_the_reference_key_holds_what_may_change_tokens():
    from engine.asked.config import EngineSettings, GPUConfig
    from engine.asked.offload import OffloadConfig, UVAOffloadConfig

    base = key()
    assert key() == base
    assert key(gpu=GPUConfig(memory_gib=3.0)) == base
    assert key(engine=EngineSettings(gpu_memory_utilization=0.5)) == base
    assert key(offload=OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=1))) == base
    assert key(engine=EngineSettings(seed=1)) != base
    assert key(engine=EngineSettings(dtype="bfloat16")) != base
    assert key(check=CorrectnessConfig(output_tokens=3)) != base
    assert key(environment={"cpu": {"name": "b"}, "torch": "2"}) != base
    assert key(environment={"gpu": {"name": "x"}, "torch": "2"}) != base


def test_the_first_difference_is_named():
    compare_tokens([[1, 2], [3, 4]], [[1, 2], [3, 4]])
    with pytest.raises(WrongTokensError, match="expected token 4 at position 1 of prompt 1"):
        compare_tokens([[1, 2], [3, 4]], [[1, 2], [3, 5]])


LOADING = {
    "job": "measure",
    "phase": "load:read",
    "updated_at": 10.0,
    "progress": {"done_bytes": 2**30, "total_bytes": 4 * 2**30},
}
RUNNING = {
    "job": "measure",
    "phase": "throughput",
    "updated_at": 20.0,
    "progress": {
        "requests_done": 3,
        "requests_total": 4,
        "output_tokens": 60,
        "tokens_s": 12.5,
    },
}


def test_states_in_words():
    assert describe(LOADING) == ("load: read", 0.25, "1.00/4.00 GiB")
    assert describe(RUNNING) == ("throughput", 0.75, "3/4 requests, 60 tokens, 12.5 tokens/s")
    with_experts = {**RUNNING, "progress": {**RUNNING["progress"], "expert_hit_share": 0.837}}
    assert describe(with_experts)[2].endswith("tokens/s, 84% of experts found on the GPU")
    together = RUNNING["progress"] | {"output_tokens_total": 240, "requests_done": 0}
    assert describe({**RUNNING, "progress": together})[1] == 0.25
    assert describe({"job": "reference", "phase": "build"}) == ("reference: build", None, "")
    unknown = {"phase": "load:load", "progress": {"done_bytes": 0, "total_bytes": 0}}
    assert describe({**unknown, "job": "load-warm-1"}) == ("load-warm-1: load", None, "")


def test_plain_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    display = open_display(stream)
    assert isinstance(display, LineDisplay)
    later = {
        **LOADING,
        "updated_at": 12.0,
        "progress": {"done_bytes": 3e9, "total_bytes": 4 * 2**30},
    }
    for state in (LOADING, later, RUNNING, RUNNING):
        display.update(state)
    display.say("a line")
    display.close()
    assert stream.getvalue().splitlines() == [
        "[load: read] 1.00/4.00 GiB",
        "[throughput] 3/4 requests, 60 tokens, 12.5 tokens/s",
        "a line",
    ]


def test_the_time_left_follows_from_the_progress_seen():
    stream = io.StringIO()
    display = LineDisplay(stream)
    state = {"job": "measure", "phase": "latency"}
    for seconds, done in ((100.0, 0), (110.0, 4)):
        progress = {"requests_done": done, "requests_total": 16, "output_tokens": 9 * done}
        display._due_s = 0.0
        display.update({**state, "updated_at": seconds, "progress": progress})
    assert stream.getvalue().splitlines() == [
        "[latency] 0/16 requests, 0 tokens",
        "[latency] 30 s left, 4/16 requests, 36 tokens",
    ]


def test_memory_stands_against_the_budget():
    gib = 2**30
    now = {"gpu_used_bytes": 12.5 * gib, "rss_bytes": 8.6 * gib, "host_available_bytes": 118 * gib}
    assert memory_text({"now": now, "gpu_budget_bytes": 13.6 * gib}) == (
        "GPU 12.5/13.6 GiB, host 8.6 GiB (118 free)"
    )
    assert memory_text({"now": {"rss_bytes": gib}}) == "host 1.0 GiB"
    assert memory_text({}) == ""


@pytest.mark.parametrize(
    ("seconds", "words"), [(90, "90 s"), (600, "10 min"), (9000, "2 h 30 min")]
)
def test_spans_of_time_are_short(seconds, words):
    assert _span(seconds) == words


def test_a_bar_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    display = open_display(stream)
    assert isinstance(display, RichDisplay)
    half = {"updated_at": 13.0, "progress": {"done_bytes": 2 * 2**30, "total_bytes": 4 * 2**30}}
    for state in (LOADING, {**LOADING, **half}, RUNNING):
        display.update(state)
    display.say("a line with [brackets]")
    display.close()
    text = stream.getvalue()
    assert "load: read" in text
    assert "3/4 requests, 60 tokens" in text
    assert "a line with [brackets]" in text
    lines = [line for line in text.splitlines() if " left" in line]
    assert lines
    assert not any("throughput" in line for line in lines)  # it was of the load


def record(**changes):
    fields = {
        "run_id": "1",
        "name": "tiny",
        "status": "ok",
        "valid": True,
        "environment": {"emulated": True},
        "metrics": {"latency/ttft_ms/p50": 12.34, "latency/ttft_ms/p90": None, "load/total_s": 0.0},
    }
    return RunRecord(**(fields | changes))


def test_the_summary_shows_figures_folder_and_command(tmp_path):
    (tmp_path / "report.html").touch()
    lines = summary_lines(record(), tmp_path, view_command="mlflow ui --x")
    text = "\n".join(lines)
    assert "tiny: ok, valid" in text
    assert "emulated on the CPU" in text
    assert "TTFT p50  12.3  ms  time to first token, median" in text
    assert f"run folder  {tmp_path}" in text
    assert f"report      {tmp_path / 'report.html'}" in text
    assert "compare     mlflow ui --x" in text


def test_a_few_served_requests_show_their_means(tmp_path):
    metrics = {f"serve/{name}_ms/mean": 12.0 for name in ("ttft", "tpot", "e2e")}
    found = summary_lines(record(metrics=metrics), tmp_path, view_command=None)
    assert sum("  12.0  ms  " in line for line in found) == 3


def test_the_summary_names_fallbacks_and_warnings(tmp_path):
    effective = {"fallbacks": ["fallback: uva is not possible"], "warnings": ["not needed"]}
    effective["notes"] = ["the peak may lie above"]
    lines = summary_lines(record(effective=effective), tmp_path, view_command=None)
    assert "  fallback: uva is not possible" in lines
    assert "  warning: not needed" in lines
    assert "  note: the peak may lie above" in lines


def test_the_summary_says_what_was_chosen_and_predicted(tmp_path):
    rates = {"source": "sheet of X"}
    predicted = {"decode_step_ms": 50.0, "prefill_tokens": 9, "prefill_ms": 70.0, "rates": rates}
    plan = {"choice": {"chosen": "2 layers", "why": "shortest"}, "predicted": predicted}
    lines = summary_lines(record(plan=plan), tmp_path, view_command=None)
    assert "  chosen: 2 layers (shortest)" in lines
    words = " ".join(" ".join(lines).split())
    assert "predicted: 50.0 ms a token at batch 1" in words
    assert "sheet of X" in words


def test_the_summary_of_a_bad_point_is_short(tmp_path):
    error = {
        "type": "CapacityError",
        "message": "need 3 GiB, have 2 GiB.\nSet offload=uva.",
        "phase": "build",
        "traceback": "long",
    }
    bad = record(status="no_fit", valid=None, error=error, metrics={})
    lines = summary_lines(bad, tmp_path, view_command=None)
    assert lines[1] == "tiny: no_fit"
    assert "  need 3 GiB, have 2 GiB." in lines
    assert "  Set offload=uva." in lines
    assert not any("long" in line for line in lines)


def test_a_report_without_a_record_is_a_warning(tmp_path):
    (warning,) = build_report(tmp_path)
    assert warning.startswith("report: not made: ")
    assert f"tightfit open {shlex.quote(str(tmp_path))}" in warning


@pytest.mark.thorough
def test_the_report_of_a_record_is_made(tmp_path):
    record().write(tmp_path / "result.json")
    assert build_report(tmp_path) == []
    assert (tmp_path / "report.html").is_file()


def test_the_report_of_a_sweep_that_was_interrupted_is_made(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(sweep, "build_report", lambda folder: made.append(folder) or [])
    context = SweepContext(sweep_id="s", folder=tmp_path, index=0, total=2)
    none = TrackingConfig(backend="none")
    assert sweep.finish_sweep(none, context, [record(status="killed")], interrupted=True)[0] == []
    assert made == [tmp_path]


@pytest.mark.thorough
def test_a_lock_is_exclusive_within_a_machine(tmp_path):
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    path = tmp_path / "a.lock"
    with hold_one([path], owner="parent", say=print):
        child = context.Process(target=_hold_and_tell, args=(path, queue))
        child.start()
        assert "in use by process" in queue.get()
    assert queue.get() == "held"
    child.join()
    assert child.exitcode == 0


def _hold_and_tell(path, queue):
    with hold_one([path], owner="child", say=queue.put):
        queue.put("held")


def test_what_the_report_prints_may_be_spelled_otherwise(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nprintf '\\377\\n'\n", encoding="ascii")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    assert build_report(tmp_path) == []
