import dataclasses
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from engine.asked.config import (
    EngineConfig,
    EngineSettings,
    GPUConfig,
    ModelConfig,
    PlannerConfig,
)
from engine.asked.offload import OffloadConfig, UVAOffloadConfig
from engine.asked.sampling import SamplingParams
from engine.errors import CapacityError, EngineError, RequestError
from harness.config.schema import SystemConfig
from harness.systems.accelerate_engine import (
    AccelerateEngine,
    BatchRow,
    Sizes,
    StaticBatch,
    described,
    host_layers,
    load_code,
)
from harness.systems.door import peer_door
from harness.work.drive import run_requests
from harness.worker import Work
from tests.harness.cases import SPEC
from tests.harness.test_worker import job

AUTO = PlannerConfig(choose=True)
PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13], [21, 22, 23, 24]]


def config(gib=1.0, **changes):
    model = ModelConfig(name="tiny", load_format="dummy", spec=SPEC)
    fields = {
        "model": model,
        "gpu": GPUConfig(device="cpu", memory_gib=gib),
        "offload": OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=1e-4)),
        "engine": EngineSettings(max_model_len=64, dtype="float32", seed=1),
    }
    return EngineConfig(**(fields | changes))


def open_engine(**changes):
    pytest.importorskip("accelerate", reason="the extra accelerate is not installed")
    return AccelerateEngine.from_config(config(**changes), progress=lambda phase, done, total: None)


def test_weights_in_host_memory_change_no_token():
    found = []
    for offload in (OffloadConfig(), OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=1))):
        llm = open_engine(offload=offload)
        requests, _ = run_requests(llm, PROMPTS, 6, clock=time.perf_counter, prefix="r")
        found.append([request.token_ids for request in requests])
        layers = llm.effective()["offloaded_layers"]
        llm.close()
        assert layers == ([] if offload.backend == "none" else [0, 1])
    assert found[0] == found[1]
    assert all(len(tokens) == 6 for tokens in found[0])


def test_a_padded_batch_gives_the_tokens_of_single_requests():
    llm = open_engine()
    alone, _ = run_requests(llm, PROMPTS, 6, clock=time.perf_counter, prefix="a")
    together, totals = run_requests(
        llm, PROMPTS, 6, clock=time.perf_counter, at_once=True, prefix="b"
    )
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert (totals.num_steps, totals.num_decode_steps) == (6, 5)
    assert llm.stats()["largest_batch"] == 3
    assert llm.memory()["gpu_budget_bytes"] == int(0.9 * 2**30)
    llm.close()


def test_bytes_in_host_memory_are_counted_from_the_modules():
    llm = open_engine()
    placed = llm.effective()["placement_bytes"]
    layer = sum(tensor.numel for tensor in SPEC.layer_tensors(0)) * 4
    assert placed["copied"] == layer
    assert placed["resident"] == SPEC.weight_bytes("float32") - layer
    llm.close()


def test_the_record_has_the_device_map_and_what_a_step_copies():
    llm = open_engine(offload=OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=1e-4)))
    found = llm.effective()
    layers, num_host = SPEC.num_hidden_layers, len(found["offloaded_layers"])
    assert 0 < num_host < layers
    split = layers - num_host
    assert found["device_map"]["cpu"] == [
        f"model.layers.{split}" + (f"-{layers - 1}" if num_host > 1 else "")
    ]
    assert found["device_map"]["gpu"][0] == "model.embed_tokens"
    assert found["device_map"]["gpu"][-1] == "lm_head"
    copies = found["host_copies"]
    assert copies["num_bytes"] == found["placement_bytes"]["copied"]
    assert copies["num_tensors"] == num_host * 9  # 7 projections, 2 norms
    assert (copies["is_pinned"], copies["seconds"]) == (False, None)
    assert llm.load_report.phases["warm_up"] > 0
    assert llm.stats()["steps"] == 0  # warming up counts as none
    llm.close()


def test_a_device_map_in_words():
    layers = [f"model.layers.{number}" for number in range(5)]
    assert described(["model.embed_tokens", *layers, "lm_head"], layers[2:]) == {
        "gpu": ["model.embed_tokens", "model.layers.0-1", "lm_head"],
        "cpu": ["model.layers.2-4"],
    }
    assert described([""], []) == {"gpu": ["all"]}


def test_what_does_not_fit_and_what_is_not_greedy_is_refused():
    with pytest.raises(CapacityError, match="accelerate: expected room"):
        open_engine(gib=1e-4)
    llm = open_engine()
    with pytest.raises(RequestError, match="temperature=0"):
        llm.add_request([1, 2], SamplingParams(temperature=1.0, ignore_eos=True))
    with pytest.raises(RequestError, match="at most 63 tokens"):
        llm.add_request([1] * 64, greedy(2))
    llm.close()


def test_what_is_advised_is_what_would_fit():
    sizes = Sizes(
        spec=SPEC, dtype="float32", max_model_len=64, max_num_seqs=1, kv_tokens=64, room_bytes=0
    )
    least = sizes.outer_bytes + sizes.copy_bytes
    few = dataclasses.replace(sizes, room_bytes=least + sizes.sequence_bytes(20))
    with pytest.raises(CapacityError, match=r"offload=auto with engine\.max_model_len=20\.$"):
        host_layers(few, config())
    assert (
        host_layers(
            dataclasses.replace(few, kv_tokens=20), config(planner=AUTO, offload=OffloadConfig())
        )
        == 2
    )
    with pytest.raises(CapacityError, match=r"not enough for the requests either"):
        host_layers(few, config(request_tokens=40))
    enough = dataclasses.replace(sizes, room_bytes=least + sizes.sequence_bytes(64))
    with pytest.raises(CapacityError, match="Choose offload=auto, or a larger cpu_offload_gb"):
        host_layers(enough, config())


def greedy(num):
    return SamplingParams(temperature=0.0, max_tokens=num, ignore_eos=True)


def test_an_aborted_request_gives_no_more_tokens():
    llm = open_engine()
    names = [llm.add_request(prompt, greedy(4)) for prompt in PROMPTS]
    assert {event.request_id for event in llm.step()} == set(names)
    llm.abort(names[0])
    left = [event.request_id for _ in range(3) for event in llm.step()]
    assert set(left) == set(names[1:])
    assert not llm.has_unfinished()
    llm.close()


def test_a_worker_measures_accelerate(tmp_path):
    pytest.importorskip("accelerate", reason="the extra accelerate is not installed")
    door = dataclasses.replace(peer_door(load_code), probe=lambda config: {})
    task = job(system=SystemConfig(kind="accelerate"), engine=config())
    result = Work(task, tmp_path, door, spawned_s=time.perf_counter()).run()
    assert result["status"] == "ok", result["error"]
    assert result["metrics"]["latency/tpot_ms/mean"] > 0
    assert "transformers" in result["effective"]["system_version"]
    assert result["reasons"] == []


def test_an_absent_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(EngineError, match=r"\[accelerate\]"):
        load_code()


class Echo:
    """A model whose next token is the last one plus its position."""

    config = None

    def forward(self, *, input_ids, attention_mask, position_ids, cache, **_):
        self.mask, self.positions = attention_mask, position_ids
        token = input_ids[:, -1] + position_ids[:, -1]
        logits = torch.nn.functional.one_hot(token, 100).float()[:, None]
        return SimpleNamespace(logits=logits)

    __call__ = forward


def test_positions_and_mask_of_a_padded_batch():
    from engine.asked.request import Request

    model = Echo()
    rows = [
        BatchRow(request=Request(request_id=str(i), prompt_token_ids=prompt, params=greedy(num)))
        for i, (prompt, num) in enumerate([([3], 1), ([1, 2, 3], 3)])
    ]
    batch = StaticBatch(model, rows, "cpu")
    assert [row.output[-1] for row in batch.step()] == [3, 5]
    assert model.mask.tolist() == [[0, 0, 1], [1, 1, 1]]
    assert model.positions.tolist() == [[0, 0, 0], [0, 1, 2]]
    assert batch.num_open == 1
    assert [row.output[-1] for row in batch.step()] == [8]
    assert model.positions.tolist() == [[1], [3]]
    batch.step()
    assert batch.is_done
    assert rows[0].finish_reason == rows[1].finish_reason == "length"
