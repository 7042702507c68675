"""Points that are skipped because one that asks for less had no room."""

from dataclasses import replace

import pytest

from engine.asked.config import EngineSettings, GPUConfig, PlannerConfig
from engine.asked.offload import OffloadConfig, UVAOffloadConfig
from harness.config.schema import FakeScript, ModelNode
from harness.forecast.skip import certain_not_to_fit, planned_shortage
from reports.record.record import RunRecord
from tests.harness.cases import SPEC, run_config

SCRIPT = FakeScript(weights_gib=8.0, kv_gib=1.0)
FAKE = ModelNode(name="fake", load_format="dummy", spec=SPEC, fake=SCRIPT)


def point(memory_gib=8.0, offload_gb=0.0, model=FAKE, **engine):
    return run_config(
        model=model,
        gpu=GPUConfig(name=f"card{memory_gib}", device="cpu", memory_gib=memory_gib),
        offload=OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=offload_gb)),
        engine=EngineSettings(**engine),
    )


def ended(config, status="no_fit", kind="CapacityError"):
    error = {"type": kind, "message": "GPU: too small"}
    return RunRecord(run_id="a", name="easy", status=status, error=error, config=config.to_dict())


@pytest.mark.parametrize(
    ("easy", "hard", "words"),
    [
        (point(8.0), point(6.0), "gpu.memory_gib=6.0 (8.0)"),
        (point(8.0, 2.0), point(8.0, 1.0), "offload.uva.cpu_offload_gb=1.0 (2.0)"),
        (point(8.0, 1.0), point(8.0), "offload.uva.cpu_offload_gb=0.0 (1.0)"),
        (point(8.0), point(8.0, max_model_len=64), None),
        (
            point(8.0, max_model_len=32),
            point(8.0, max_model_len=64),
            "engine.max_model_len=64 (32)",
        ),
        (point(8.0), point(9.0), None),
        (point(8.0), point(6.0, 1.0), None),
        (point(8.0), point(8.0, dtype="float32"), None),
        (point(8.0), point(8.0), None),
    ],
)
def test_less_room_is_skipped_and_the_proof_is_named(easy, hard, words):
    reason = certain_not_to_fit(hard, [ended(easy)])
    if words is None:
        assert reason is None
        return
    assert reason is not None
    assert "easy had status no_fit" in reason
    assert words in reason
    assert "The plan: GPU: need" in reason


def test_what_the_planner_found_no_room_for_has_none_by_hand():
    auto = replace(point(0.5), planner=PlannerConfig(choose=True))
    assert "planner.choose=False (True)" in (
        certain_not_to_fit(point(0.5, 2.0), [ended(auto)]) or ""
    )


def test_a_plan_that_fits_is_believed():
    assert planned_shortage(point(16.0)) is None
    assert certain_not_to_fit(point(16.0), [ended(point(17.0))]) is None


def test_out_of_memory_proves_less_memory_only():
    easy = ended(point(16.0), "oom", "OutOfMemoryError")
    assert "status oom" in (certain_not_to_fit(point(15.0), [easy]) or "")
    assert certain_not_to_fit(point(16.0, 1.0), [easy]) is None
    assert certain_not_to_fit(point(15.0), [ended(point(16.0), "oom", "HostOutOfMemory")]) is None
    assert certain_not_to_fit(point(15.0), [ended(point(16.0), "failed")]) is None


@pytest.mark.parametrize("offload_gb", [0.0, 0.0001])
def test_the_engine_s_own_plan_says_what_is_short(offload_gb):
    tiny = ModelNode(name="tiny", load_format="dummy", spec=SPEC)
    shortage = planned_shortage(point(0.0001, offload_gb, model=tiny))
    assert shortage is not None
    assert "tiny does not fit CPU: " in str(shortage)
    assert "Budget     94.37 KiB of GPU memory: " in str(shortage)
    assert planned_shortage(point(1.0, offload_gb, model=tiny)) is None


def test_without_a_gpu_a_card_s_points_are_planned_for_the_cpu_that_stands_in(monkeypatch):
    monkeypatch.setattr("engine.device.machine.open_gpu", lambda: None)
    tiny = ModelNode(name="tiny", load_format="dummy", spec=SPEC)
    card = replace(point(model=tiny), gpu=GPUConfig(name="card", memory_gib=0.4))
    assert planned_shortage(card) is None  # a CUDA context alone would take more
