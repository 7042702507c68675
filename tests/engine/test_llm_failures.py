"""The LLM door: aborts, exceptions, refused keywords, models too large for the budget."""

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, OffloadConfig, SamplingParams
from engine.asked.offload import OffloadWarning, UVAOffloadConfig
from engine.errors import CapacityError, ConfigError
from engine.run.inputs import StepShape
from tests.engine.conftest import TinyModels
from tests.engine.feeds import only_feed
from tests.slow import slow
from tests.tiny import add_tokenizer, greedy, greedy_params, make_prompt, open_llm, write_config

GIB = 2**30
TEXTS = ["Hello, my name is", "The capital of France is", "x"]
PROMPTS = [make_prompt(length, seed=3) for length in (1, 12, 30)]


# Aborts and exceptions.


def test_aborted_requests_free_their_blocks(llm: LLM, tiny: TinyModels) -> None:
    for index, prompt in enumerate(PROMPTS):
        llm.add_request(prompt, greedy_params(12), f"r{index}")
    for _ in range(3):
        llm.step()
    llm.abort("r1")
    llm.abort("r1")
    llm.abort("unknown")
    tokens: dict[str, list[int]] = {}
    while llm.has_unfinished():
        for event in llm.step():
            tokens.setdefault(event.request_id, []).append(event.token_id)
    assert "r1" not in tokens
    assert tokens["r0"] == tiny.greedy("llama", PROMPTS[:1], 12)[0][-len(tokens["r0"]) :]
    llm.abort("r0")
    assert llm.step() == []


def test_an_abort_from_outside_ends_generate(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm.step
    calls = []

    def step_and_abort() -> Any:
        calls.append(1)
        if len(calls) == 3:
            for name in list(llm._sessions._open)[:1]:
                llm.abort(name)
        return step()

    monkeypatch.setattr(llm, "step", step_and_abort)
    aborted, other = llm.generate(PROMPTS[1:], greedy_params(6))
    assert aborted.outputs[0].finish_reason == "abort"
    assert len(aborted.outputs[0].token_ids) < 6
    assert other.outputs[0].finish_reason == "length"


@pytest.mark.thorough_but("RuntimeError-execute")
@pytest.mark.parametrize(
    ("kind", "where"),
    [
        (RuntimeError, "execute"),
        (KeyboardInterrupt, "prepare"),
        (RuntimeError, "enqueue"),
        (KeyboardInterrupt, "collect"),
        slow(KeyboardInterrupt, "execute"),
        slow(RuntimeError, "prepare"),
        slow(KeyboardInterrupt, "enqueue"),
        slow(RuntimeError, "collect"),
    ],
)
def test_generate_works_after_an_exception(
    llm: LLM, tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, where: str, kind: type
) -> None:
    core = llm._engine.core
    owner = core.executor if where in {"execute", "prepare"} else core.executor.sampler
    method, calls = getattr(owner, where), []

    def fail_once(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise kind("tests say so")
        return method(*args)

    with monkeypatch.context() as patched:
        patched.setattr(owner, where, fail_once)
        with pytest.raises(kind, match="tests say so"):
            llm.generate(PROMPTS, greedy_params(6))
    assert not llm.has_unfinished()
    assert greedy(llm, PROMPTS, 6) == tiny.greedy("llama", PROMPTS, 6)


def test_a_failure_amid_the_layers_leaves_the_slots_usable(
    llm: LLM, tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = llm._engine.store
    acquire = store.acquire

    def fail_at_last(layer: int) -> Any:
        if layer == 2:
            raise RuntimeError("tests say so")
        return acquire(layer)

    with monkeypatch.context() as patched:
        patched.setattr(store, "acquire", fail_at_last)
        with pytest.raises(RuntimeError, match="tests say so"):
            llm.generate(PROMPTS, greedy_params(6))
    assert greedy(llm, PROMPTS, 6) == tiny.greedy("llama", PROMPTS, 6)


def test_a_graph_finds_its_layers_after_a_failure(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph cannot repair the slots itself: it begins with layer s in slot s."""
    engine = open_llm(tiny.folder("llama"), offload_group_size=1)
    runner, store = engine._engine.executor, engine._engine.store
    feed, held = only_feed(store), []

    def replay() -> None:
        held.append((list(feed._held), list(feed._pending)))

    acquire, calls = store.acquire, []

    def fail_once(layer: int) -> Any:
        calls.append(layer)
        if len(calls) == 6:
            raise RuntimeError("tests say so")
        return acquire(layer)

    engine.add_request(PROMPTS[1], greedy_params(4))
    engine.step()
    monkeypatch.setattr(store, "acquire", fail_once)
    calls += [0, 0, 0, 0]
    with pytest.raises(RuntimeError, match="tests say so"):
        engine.step()
    assert feed._held != [0, 1]
    runner._graphs[StepShape(1)] = (replay, 0, 0)
    engine.step()  # the tokens of the step in flight
    engine.step()
    assert held == [([0, 1], [None, None])] * 2
    engine.close()


def test_a_step_that_fails_can_be_repeated(
    llm: LLM, tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    for prompt in PROMPTS:
        llm.add_request(prompt, greedy_params(6))
    tokens: dict[str, list[int]] = {}
    runner = llm._engine.core.executor
    execute = runner.execute
    for _ in range(5):
        with monkeypatch.context() as patched:
            patched.setattr(runner, "execute", lambda batch: execute(batch) / 0 / "no")
            with pytest.raises(TypeError):
                llm.step()
        for event in llm.step():
            tokens.setdefault(event.request_id, []).append(event.token_id)
    while llm.has_unfinished():
        for event in llm.step():
            tokens.setdefault(event.request_id, []).append(event.token_id)
    assert list(tokens.values()) == tiny.greedy("llama", PROMPTS, 6)


def test_bad_weights_are_reported_and_not_sampled(tiny: TinyModels) -> None:
    llm = open_llm(tiny.folder("llama"))
    llm._engine.store.outer("lm_head.weight").fill_(math.nan)
    for output in llm.generate(PROMPTS, greedy_params(2)):
        assert output.error is not None
        assert "NaN" in output.error
        assert output.outputs[0].finish_reason == "error"
        assert output.outputs[0].token_ids == []
    assert not llm.has_unfinished()
    llm.close()


# Keywords.


@pytest.mark.parametrize(
    ("keywords", "parts"),
    [
        ({"max_model_length": 10}, ["max_model_length", "Did you mean max_model_len?"]),
        ({"cpu_ofload_gb": 1}, ["Did you mean cpu_offload_gb?"]),
        ({"zzz": 1}, ["zzz", "Known:", "swap_space"]),
        ({"tensor_parallel_size": 2}, ["tensor_parallel_size", "got 2"]),
        ({"num_cpu_blocks": 5, "cpu_gib": 1}, ["num_cpu_blocks=5", "cpu_gib=1"]),
        ({"pin_limit_gib": 5}, ["pin_limit_gib", "host tier"]),
        ({"kv_transfer_config": {"kv_connector": "X"}}, ["kv_transfer_config", "'X'"]),
        ({"kv_transfer_config": "X"}, ["kv_transfer_config", "'X'"]),
        ({"block_size": 15}, ["block_size", "15"]),
        ({"dtype": "int8"}, ["dtype", "int8"]),
        ({"load_format": "gguf"}, ["load_format", "gguf"]),
        ({"gpu_memory_utilization": 1.5}, ["gpu_memory_utilization", "1.5"]),
        ({"device": "tpu"}, ["device", "tpu"]),
        ({"offload_config": OffloadConfig(), "cpu_offload_gb": 1}, ["both", "cpu_offload_gb"]),
        ({"offload_config": {"uvva": {}}}, ["offload_config", "uvva"]),
        ({"offload_config": {"uva": {"gb": 1}}}, ["offload_config", "gb"]),
        ({"offload_config": 3}, ["offload_config", "3"]),
        ({"offload_config": {"uva": 3}}, ["offload.uva: expected UVAOffloadConfig", "3"]),
    ],
)
def test_keywords_that_are_refused(tiny: TinyModels, keywords: Any, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        LLM(str(tiny.folder("llama")), **keywords)
    assert all(part in str(error.value) for part in parts)


def test_offload_config_may_be_given_whole(tiny: TinyModels) -> None:
    node = OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=1))
    for given in (node, {"uva": {"cpu_offload_gb": 1}}):
        llm = open_llm(tiny.folder("llama"), offload_config=given)
        assert llm.effective()["backend"] == "uva"
        assert llm.plan.placed_bytes()["uva"] > 0
        llm.close()


def test_notes_of_the_plan_are_warned_of(tiny: TinyModels) -> None:
    with pytest.warns(OffloadWarning, match="is not needed"):
        LLM(str(tiny.folder("llama")), device="cpu", gpu_memory_gib=0.5, cpu_offload_gb=1).close()


# Refusals and the well-known script.


def test_no_room_for_kv_is_refused_with_figures(tiny: TinyModels) -> None:
    plan = open_llm(tiny.folder("llama"), max_num_seqs=1).plan
    fixed = plan.gpu_total_bytes - plan.gpu_items["kv_cache"]
    for room in (-100_000, 0, plan.block_bytes):
        with pytest.raises(CapacityError) as error:
            open_llm(
                tiny.folder("llama"),
                max_num_seqs=1,
                gpu_memory_gib=(fixed + room) / GIB,
                gpu_memory_utilization=1.0,
            )
        assert re.search(r" short \(needs .* of KV for \d", str(error.value))
        assert "\nBest fix   " in str(error.value)
        assert error.value.plan is not None


@pytest.mark.thorough
def test_the_well_known_script(tiny: TinyModels, tmp_path: Path) -> None:
    """Too large for the budget: refused; with swap_space the same script answers."""
    shutil.copytree(tiny.folder("mistral", num_hidden_layers=7), tmp_path / "model")
    model = tmp_path / "model"
    write_config(model, sliding_window=64)
    add_tokenizer(model)
    roomy = open_llm(model, disable_sliding_window=True, max_num_seqs=4, max_model_len=64)
    plan = roomy.plan
    expected = greedy(roomy, PROMPTS, 5)
    roomy.close()
    budget = plan.gpu_total_bytes - plan.gpu_items["kv_cache"] - plan.layers[0].resident.num_bytes
    script: dict[str, Any] = {
        "device": "cpu",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "max_model_len": 64,
        "gpu_memory_gib": budget / GIB / 0.9,
        "gpu_memory_utilization": 0.9,
    }
    with pytest.raises(CapacityError, match=r"short \(needs .* has -\d"):
        LLM(model=str(model), disable_sliding_window=True, **script)
    with pytest.warns(OffloadWarning) as warned:
        llm = LLM(model=str(model), swap_space=0.01, disable_sliding_window=True, **script)
    said = [str(warning.message) for warning in warned]
    assert any(re.match(r"swap_space=0\.01 GiB: \d of 7 layers", text) for text in said)
    outputs = llm.generate(TEXTS, SamplingParams(temperature=0.7, top_p=0.9))
    assert [output.error for output in outputs] == [None] * 3
    for output in outputs:
        [answer] = output.outputs
        assert answer.text
        assert 1 <= len(answer.token_ids) <= 16
    assert llm.plan.placed_bytes()["prefetch"] > 0
    assert llm.memory()["host_pinned_bytes"] > 0
    assert llm.memory()["gpu_peak_bytes"] <= llm.memory()["gpu_budget_bytes"]
    assert greedy(llm, PROMPTS, 5) == expected
    llm.close()
