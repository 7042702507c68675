import dataclasses
import time

import pytest

from engine.asked.config import EngineConfig, GPUConfig, ModelConfig
from engine.asked.offload import OffloadConfig, UVAOffloadConfig
from engine.errors import CapacityError, ConfigError, EngineError
from harness.config.schema import SystemConfig
from harness.systems.door import peer_door
from harness.systems.vllm_engine import VLLMEngine, load_code
from harness.work.drive import run_requests
from harness.work.offline import measure_throughput
from harness.worker import Work
from tests.harness.cases import SPEC
from tests.harness.systems.server import next_token
from tests.harness.systems.test_mapping import PREFETCH
from tests.harness.systems.vllm_stand_in import (
    EngineArgs,
    LLMEngine,
    NoopOffloader,
    PrefetchOffloader,
    UVAOffloader,
    install,
)
from tests.harness.test_worker import job

UVA = OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=1.0))


def config(**changes):
    model = ModelConfig(name="tiny", load_format="dummy", spec=SPEC)
    fields = {"model": model, "gpu": GPUConfig(device="cpu", memory_gib=1)}
    return EngineConfig(**(fields | changes))


def open_engine(**changes):
    return VLLMEngine.from_config(config(**changes), progress=lambda phase, done, total: None)


def test_tokens_times_and_steps(monkeypatch):
    install(monkeypatch)
    llm = open_engine()
    requests, totals = run_requests(
        llm, [[1, 2], [3, 4, 5]], 4, clock=time.perf_counter, at_once=True, prefix="r"
    )
    for request, prompt in zip(requests, [[1, 2], [3, 4, 5]], strict=True):
        assert request.is_complete
        assert request.token_ids == [next_token(prompt, index) for index in range(4)]
    assert (totals.num_steps, totals.num_decode_steps, totals.num_decode_tokens) == (5, 3, 6)
    assert totals.decode_moved_bytes == 0
    llm.close()
    assert LLMEngine.opened[0].is_shut


def test_prefixes_are_found_within_a_salt_and_counted(monkeypatch):
    install(monkeypatch)
    llm = open_engine()
    shares = [
        measure_throughput(llm, [[1] * 9, [2] * 9], 3, clock=time.perf_counter, salt=salt)[0]
        for salt in ("first", "second", "second")
    ]
    llm.close()
    assert [outcome.metrics["throughput/hit_share"] for outcome in shares] == [0, 0, 1]
    assert [len(outcome.reasons) for outcome in shares] == [0, 0, 1]


@pytest.mark.parametrize(
    ("offload", "offloader", "moved"),
    [(UVA, UVAOffloader(), (0, 3_000_000)), (PREFETCH, PrefetchOffloader(), (5_000_000, 0))],
)
def test_bytes_of_an_offload_are_those_that_vllm_tells(monkeypatch, offload, offloader, moved):
    install(monkeypatch, offloader)
    llm = open_engine(offload=offload)
    assert llm.plan.moved_per_step(3) == moved
    assert llm.effective()["offloader"] == type(offloader).__name__
    assert llm.effective()["system_version"] == "vllm 0.33.0"
    assert llm.memory()["host_pinned_bytes"] == sum(moved)
    llm.close()


def test_an_offload_that_did_not_take_place_is_an_error(monkeypatch):
    install(monkeypatch, NoopOffloader())
    with pytest.raises(EngineError, match="NoopOffloader put no weights in host memory"):
        open_engine(offload=UVA)


@pytest.mark.parametrize(
    ("offload", "asked", "runner", "named"),
    [
        (UVA, None, "0", "VLLM_USE_V2_MODEL_RUNNER=0, set for offload=uva"),
        (UVA, "1", "1", "VLLM_USE_V2_MODEL_RUNNER=1, as the environment sets it"),
        (OffloadConfig(), None, None, "as vLLM chooses"),
    ],
)
def test_the_runner_that_honours_an_offload_is_chosen(monkeypatch, offload, asked, runner, named):
    install(monkeypatch, UVAOffloader(), runner=asked)
    llm = open_engine(offload=offload)
    assert LLMEngine.runner == runner
    assert llm.effective()["model_runner"] == named
    llm.close()


NO_BLOCKS = ValueError("No available memory for the cache blocks. Try increasing ...")


@pytest.mark.parametrize(
    ("offload", "offloader", "runner", "says"),
    [
        (OffloadConfig(), None, None, "keeps all weights on the GPU. Set offload=uva"),
        (UVA, NoopOffloader(), "1", "no effect: vLLM's NoopOffloader put no weights .*RUNNER=0"),
        (UVA, UVAOffloader(), None, "put 0.00 GiB .*larger offload.uva.cpu_offload_gb, lower"),
        (PREFETCH, PrefetchOffloader(), None, "larger offload.prefetch.offload_num_in_group"),
    ],
)
def test_no_room_for_blocks_says_why_and_what_to_set(monkeypatch, offload, offloader, runner, says):
    install(monkeypatch, offloader, fails_with=NO_BLOCKS, runner=runner)
    with pytest.raises(CapacityError, match=f"No available memory for the cache blocks.*{says}"):
        open_engine(offload=offload)


def test_another_error_of_vllm_is_passed_on(monkeypatch):
    install(monkeypatch, fails_with=ValueError("no such dtype"))
    with pytest.raises(ValueError, match="no such dtype") as error:
        open_engine()
    assert not isinstance(error.value, EngineError)


def test_an_offload_that_cannot_be_checked_is_an_error(monkeypatch):
    install(monkeypatch)
    with pytest.raises(EngineError, match="does not tell what it offloaded"):
        open_engine(offload=UVA)


def test_an_older_vllm_lacks_settings_by_name(monkeypatch):
    fields = [(f.name, f.type, f) for f in dataclasses.fields(EngineArgs)]
    older = [item for item in fields if not item[0].startswith("offload_")]
    install(monkeypatch, PrefetchOffloader(), dataclasses.make_dataclass("EngineArgs", older))
    with pytest.raises(ConfigError, match="offload_backend, offload_group_size"):
        open_engine(offload=PREFETCH)


def test_a_worker_measures_vllm(monkeypatch, tmp_path):
    install(monkeypatch)
    door = dataclasses.replace(peer_door(load_code), probe=lambda config: {})
    task = job(system=SystemConfig(kind="vllm"), engine=config())
    result = Work(task, tmp_path, door, spawned_s=0.0).run()
    assert result["status"] == "ok", result["error"]
    assert result["metrics"]["throughput/output_tok_s"] > 0
    assert result["effective"]["system"] == "vllm"
    assert result["plan"]["arguments"]["skip_tokenizer_init"] is True


def test_a_long_prompt_and_an_aborted_request_end_alone(monkeypatch):
    install(monkeypatch)
    llm = open_engine()
    (long,), _ = run_requests(
        llm, [[1] * 600], 2, clock=time.perf_counter, at_once=True, prefix="r"
    )
    assert "longer than the maximum" in long.error
    name = llm.add_request([1], params())
    llm.abort(name)
    assert not llm.has_unfinished()
    llm.close()


def params():
    from engine.asked.sampling import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


def test_an_absent_package_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineError, match="expected the package vllm"):
        load_code()
