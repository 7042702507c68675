import errno
import json

import pytest

from engine.asked.config import EngineConfig, ModelConfig
from engine.device.gpu import Gpu
from harness.config.schema import CorrectnessConfig, LatencyScenario, LoadScenario, ScenarioConfig
from harness.folders import plain
from harness.observe.student import t_table
from harness.point.process import WorkerJob, read_job
from harness.work.correctness import read_reference
from harness.work.prompts import PromptRow
from harness.worker import StateWriter, Work
from tests.harness.cases import SPEC, load_only, scenario
from tests.harness.fakes import GIB, PLAN, FakeClock, Script, fake_door

# ruff: noqa: N802  some names are NVML's


pytestmark = pytest.mark.usefixtures("clock_start_s")


def job(**changes):
    model = ModelConfig(name="tiny", load_format="dummy", spec=SPEC)
    fields = {
        "name": "measure",
        "kind": "measure",
        "engine": EngineConfig(model=model),
        "scenario": scenario(),
        "t": t_table(10, 200),
    }
    return WorkerJob(**(fields | changes))


def work(tmp_path, task, **script):
    clock = FakeClock()
    door, factory = fake_door(Script(**script), clock)
    result = Work(task, tmp_path, door, spawned_s=clock() - 1.0).run()
    json.dumps(result, allow_nan=False)
    return result, factory


def make_reference(tmp_path, **script):
    path = tmp_path / "references" / "key.json"
    result, _ = work(tmp_path, job(name="reference", kind="reference", reference=path), **script)
    assert result["status"] == "ok"
    return path


def test_measure_takes_latency_and_throughput_of_known_times(tmp_path):
    result, factory = work(tmp_path, job(), prefill_s=0.5, decode_s=0.125)
    assert result["status"] == "ok"
    assert result["error"] is None
    metrics = result["metrics"]
    assert metrics["latency/ttft_ms/p50"] == pytest.approx(500)
    assert metrics["latency/tpot_ms/mean"] == pytest.approx(125)
    assert metrics["throughput/output_tok_s"] == pytest.approx(20)
    assert metrics["link/h2d_gb_s"] == 0.00002
    assert metrics["offload/bytes_per_step"] == 1500
    assert metrics["offload/planned_bytes_per_step"] == 1500
    assert metrics["offload/in_place_bytes_per_step"] == 500
    assert metrics["link/share"] == pytest.approx((1500 / 0.125) / 20e3)
    assert metrics["link/h2d_after_gb_s"] == 0.00002
    assert [window["part"] for window in result["windows"]] == ["latency", "throughput"]
    lengths = [window["end_s"] - window["begin_s"] for window in result["windows"]]
    assert lengths == pytest.approx([11, 1])
    assert result["link_factor"] is None
    assert result["reasons"] == []
    assert metrics["memory/gpu_peak_gib"] == 1
    assert metrics["memory/budget_margin_gib"] == 1
    assert metrics["memory/host_pinned_gib"] == 1
    assert metrics["memory/host_rss_peak_gib"] > 0
    assert metrics["energy/j_per_token"] is None
    assert metrics["predicted/tpot_ms"] == 250
    assert metrics["predicted/tpot_ms_difference_pct"] == pytest.approx(100)
    assert result["plan"] == PLAN
    assert result["effective"]["emulated"] is True
    assert len(result["samples"]["latency"]) == 11
    assert result["samples"]["throughput"]["num_requests"] == 4
    assert factory.built[0].closed


def test_bytes_that_the_plan_does_not_know_are_a_reason(tmp_path):
    result, _ = work(tmp_path, job(), planned_bytes=(1000, 0))
    [reason] = result["reasons"]
    assert "counted 1,500 bytes" in reason


def test_a_part_without_any_completed_request_fails_the_point(tmp_path):
    result, _ = work(tmp_path, job(), refuse=[f"latency-{index}" for index in range(11)])
    assert result["status"] == "failed"
    assert result["error"]["type"] == "RequestError"
    assert "nothing was measured. latency: 11 of 11 requests" in result["error"]["message"]
    assert result["error"]["traceback"] is None
    assert result["metrics"]["latency/ttft_ms/mean"] is None
    assert len(result["samples"]["latency"]) == 11


def test_warm_up_is_not_timed_and_shares_no_prompt(tmp_path):
    result, factory = work(tmp_path, job())
    sent = factory.built[0].prompts
    warm = {tuple(prompt) for name, prompt in sent if "warm-up" in name}
    timed = [tuple(prompt) for name, prompt in sent if "warm-up" not in name]
    assert len(warm) == 2  # one for each part
    assert len(timed) == len(set(timed)) == 15
    assert not warm & set(timed)
    assert all(token not in {0, 1} for prompt in timed for token in prompt)
    assert result["samples"]["latency"][0]["request_id"] == "latency-0"


def test_a_warm_up_that_fails_is_a_reason(tmp_path):
    result, _ = work(tmp_path, job(), refuse=["latency-warm-up-0"])
    assert result["status"] == "ok"
    [reason] = result["reasons"]
    assert reason.startswith("latency warm-up: 1 of 1 requests failed; latency-warm-up-0: ")


def test_prompts_of_a_file_are_encoded_and_counted_in_tokens(tmp_path):
    rows = [PromptRow(1, text="abc"), PromptRow(2, token_ids=(7, 8))]
    part = LatencyScenario(
        num_requests=2, warmup_requests=0, output_tokens=2, prompts_file="unused.jsonl"
    )
    task = job(scenario=scenario(latency=part, throughput=None), prompts={"latency": rows})
    result, factory = work(tmp_path, task)
    assert [row["num_prompt_tokens"] for row in result["samples"]["latency"]] == [3, 2]
    assert factory.built[0].prompts[0] == ("latency-0", [102, 103, 104])


def test_the_point_is_planned_before_its_reference_is_built(tmp_path):
    asked = job().engine
    task = job(name="reference", kind="reference", reference=tmp_path / "key", under_test=asked)
    result, factory = work(tmp_path, task, fail_at="plan", failure="no_fit")
    assert (result["status"], result["plan"]) == ("no_fit", PLAN)
    assert factory.planned == [asked]
    assert factory.built == []
    assert not (tmp_path / "key").exists()
    result, factory = work(tmp_path, task)
    assert (result["status"], result["plan"]) == ("ok", None)
    assert (len(factory.planned), len(factory.built)) == (1, 1)


def test_equal_tokens_pass_the_check(tmp_path):
    path = make_reference(tmp_path)
    reference = read_reference(path)
    assert [len(prompt) for prompt in reference["prompts"]] == [16, 16]
    assert [len(tokens) for tokens in reference["tokens"]] == [16, 16]
    result, _ = work(tmp_path, job(reference=path))
    assert result["status"] == "ok"
    assert result["effective"]["correctness"] == {
        "checked": True,
        "num_prompts": 2,
        "num_tokens": 32,
        "reference": "key.json",
    }


def test_wrong_tokens_fail_before_anything_is_timed(tmp_path):
    path = make_reference(tmp_path)
    result, _ = work(tmp_path, job(reference=path), wrong_token_at=3)
    assert result["status"] == "failed"
    assert result["error"]["type"] == "WrongTokens"
    assert "at position 3 of prompt 0" in result["error"]["message"]
    assert result["error"]["traceback"] is None
    assert result["samples"] == {}
    assert not [name for name in result["metrics"] if name.startswith(("latency", "throughput"))]


def test_load_counts_from_the_start_of_the_process(tmp_path):
    result, _ = work(tmp_path, job(kind="load", scenario=load_only()), prefill_s=0.5)
    (row,) = result["samples"]["load"]
    assert row["phases"] == pytest.approx(
        {"import": 1.0, "read": 2.0, "copy": 1.0, "build": 0.0, "first_token": 0.5}
    )
    assert row["total_s"] == pytest.approx(4.5)
    assert row["rss_peak_bytes"] > 0


@pytest.mark.parametrize(
    ("failure", "status", "kind", "has_traceback"),
    [
        ("no_fit", "no_fit", "CapacityError", False),
        ("checkpoint", "failed", "CheckpointError", False),
        ("oom", "oom", "OutOfMemoryError", True),
        ("memory_error", "oom", "MemoryError", True),
        ("crash", "failed", "ValueError", True),
    ],
)
def test_exceptions_become_statuses(tmp_path, failure, status, kind, has_traceback):
    result, _ = work(tmp_path, job(), fail_at="build", failure=failure)
    assert result["status"] == status
    assert result["error"]["type"] == kind
    assert result["error"]["message"]
    assert result["error"]["phase"] == "load:copy"
    assert (result["error"]["traceback"] is not None) is has_traceback


def test_no_fit_keeps_the_plan(tmp_path):
    result, _ = work(tmp_path, job(), fail_at="build", failure="no_fit")
    assert result["plan"] == PLAN


def test_a_late_failure_keeps_the_parts_that_ended(tmp_path):
    # 1 + 11 latency requests of 5 steps, then throughput strikes.
    result, _ = work(tmp_path, job(), fail_at="step", failure="oom", after_steps=60)
    assert result["status"] == "oom"
    assert result["error"]["phase"] == "throughput warm-up"
    assert result["metrics"]["latency/ttft_ms/mean"] == pytest.approx(500)
    assert "throughput/output_tok_s" not in result["metrics"]


def test_a_peak_over_the_budget_is_a_reason(tmp_path):
    result, _ = work(tmp_path, job(), gpu_peak_bytes=3 * GIB)
    assert result["metrics"]["memory/budget_margin_gib"] == -1
    assert "the GPU peak of 3.000 GiB is over the budget of 2.000 GiB" in result["reasons"][0]


def test_state_and_samples_say_what_the_worker_did(tmp_path):
    work(tmp_path, job())
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["job"] == "measure"
    assert state["phase"] == "close"
    assert state["memory"]["rss_bytes"] > 0
    assert state["pinned_bytes"] is None  # the engine is closed
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    last = {row["phase"]: row for row in rows}
    assert last["latency"]["requests_done"] == 11
    assert last["latency"]["output_tokens"] == 55
    assert last["throughput"]["requests_done"] == 4


def test_a_state_that_cannot_be_written_ends_the_worker(tmp_path, monkeypatch):
    put = StateWriter._put

    def refuse(self, state, sample):
        if state["phase"] == "latency":
            raise OSError(errno.ENOSPC, "No space left on device")
        put(self, state, sample)

    monkeypatch.setattr(StateWriter, "_put", refuse)
    result, factory = work(tmp_path, job())
    assert (result["status"], result["error"]["type"]) == ("failed", "OSError")
    assert "No space left" in result["error"]["message"]
    assert result["error"]["phase"] == "latency"
    assert factory.built[0].closed


def test_a_last_state_that_cannot_be_written_is_noted(tmp_path, monkeypatch):
    def refuse(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(StateWriter, "close", refuse)
    result, _ = work(tmp_path, job())
    assert result["status"] == "ok"
    [note] = [note for note in result["notes"] if "No space left" in note]
    assert note.startswith("writing the last state: OSError: ")


class Meter:
    """NVML with one GPU of constant power; with watts None it raises, as without a counter."""

    def __init__(self, clock, watts):
        self.clock, self.watts = clock, watts

    def nvmlDeviceGetUUID(self, handle):
        return "GPU-1"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return int(1e3 * self.watts * self.clock())


@pytest.mark.parametrize(
    ("parts", "watts", "total_j", "j_per_token"),
    [
        # 4 requests at once: 0.5 s of prefill and 4 decodes of 0.125 s for 20 tokens.
        ({}, 100, 100, 5),
        # 11 requests in turn: 1 s and 5 tokens each.
        ({"throughput": None}, 100, 1100, 20),
        ({}, None, None, None),
        ({}, -100, None, None),  # a counter that went back was started anew
    ],
)
def test_energy_is_that_of_the_last_part_without_its_warm_up(
    tmp_path, monkeypatch, parts, watts, total_j, j_per_token
):
    clock = FakeClock()
    door, _ = fake_door(Script(prefill_s=0.5, decode_s=0.125), clock)
    opened = []

    def open_gpu(uuid):
        opened.append(uuid)
        return Gpu(Meter(clock, watts), 0)

    monkeypatch.setattr("harness.worker.open_gpu", open_gpu)
    task = job(scenario=scenario(**parts), gpu_uuid="GPU-1")
    metrics = Work(task, tmp_path, door, spawned_s=0.0).run()["metrics"]
    assert set(opened) == {"GPU-1"}
    assert metrics["energy/total_j"] == pytest.approx(total_j)
    assert metrics["energy/j_per_token"] == pytest.approx(j_per_token)


def test_a_job_survives_the_way_to_the_worker(tmp_path):
    load = ScenarioConfig(
        name="load", load=LoadScenario(), correctness=CorrectnessConfig(enabled=False)
    )
    task = job(name="load-warm-1", kind="load", scenario=load, gpu_uuid="GPU-1")
    task.write(tmp_path)
    assert read_job(tmp_path, "load-warm-1") == task


def test_plain_leaves_no_number_that_json_lacks(tmp_path):
    value = {1: (float("nan"), float("inf"), 1.5), "path": tmp_path, "set": {"b", "a"}}
    assert plain(value) == {"1": [None, None, 1.5], "path": str(tmp_path), "set": ["a", "b"]}
