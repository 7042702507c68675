"""Scenario part quality: perplexity and agreement with plain weights, of every system."""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM
from engine.asked.config import ModelConfig
from engine.errors import ConfigError, RequestError
from harness.config.engine import check_settings, engine_config, yardstick_config
from harness.config.schema import ModelNode, QualityScenario, ScenarioConfig, SystemConfig
from harness.point.process import WorkerJob
from harness.systems.door import engine_door
from harness.systems.http_engine import HTTPEngine
from harness.work.prompts import PromptError
from harness.work.quality import (
    Yardstick,
    make_yardstick,
    measure_quality,
    quality_text,
    read_yardstick,
    score,
    windows,
    write_yardstick,
)
from harness.worker import Work
from tests.engine.quantised import SIZES
from tests.harness.cases import SPEC, run_config, scenario
from tests.harness.systems import test_accelerate, test_http, test_vllm
from tests.harness.systems.server import Script, Server
from tests.server.launch import VOCAB, write_model
from tests.tiny import greedy_of_transformers, hf_model, make_prompt, open_llm, save

TEXT = "The cat sat on the mat, and then it went out to see what the rain was doing. " * 4
CONFIG = QualityScenario(
    window_tokens=24, stride_tokens=10, num_windows=6, num_prompts=3, prompt_tokens=8,
    output_tokens=6,
)  # fmt: skip
HOW: dict[str, Any] = {"on_progress": lambda *_: None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with weights and a tokenizer of bytes."""
    found = tmp_path_factory.mktemp("quality")
    model = hf_model("llama", **SIZES | {"vocab_size": VOCAB}, tie_word_embeddings=False)
    path = save(model, found)
    config = json.loads((path / "config.json").read_text())
    write_model(path)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder, max_model_len=64) as found:
        yield found


def logprobs(folder: Path, prompt: list[int]) -> torch.Tensor:
    """Return what transformers says of the tokens that follow each of a prompt, [T, V]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)


def test_every_token_of_a_text_but_the_first_counts_once() -> None:
    for length in (2, 23, 24, 25, 60, 101):
        for window, stride in ((24, 10), (24, 23), (5, 1), (200, 3)):
            config = QualityScenario(
                window_tokens=window, stride_tokens=stride, num_windows=None, num_prompts=0
            )
            found = windows(length, config)
            counted = [at for each in found for at in range(each.first, each.stop)]
            assert counted == list(range(1, length)), (length, window, stride)
            assert all(each.stop - each.start <= window for each in found)
    assert windows(1, CONFIG) == []
    assert len(windows(1000, CONFIG)) == 6


@pytest.mark.thorough
def test_perplexity_is_that_of_transformers(folder: Path, llm: LLM) -> None:
    ids = llm.tokenizer(TEXT)["input_ids"]  # type: ignore[misc]
    metrics, samples = measure_quality(llm, CONFIG, TEXT, None, **HOW)
    losses = []
    for start in range(0, 60, 10):
        part = ids[start : start + 24]
        rows = logprobs(folder, part)
        first = 1 if start == 0 else 14
        losses += [-rows[at - 1, part[at]].item() for at in range(first, len(part))]
    expected = math.exp(sum(losses) / len(losses))
    assert metrics == {"quality/perplexity": pytest.approx(expected, rel=1e-4)}
    assert samples["nats"] == pytest.approx(losses, abs=1e-3)
    assert samples["num_tokens"] == 23 + 5 * 10


@pytest.mark.thorough
def test_agreement_is_that_of_greedy_tokens_each_given_those_before(
    folder: Path, llm: LLM, tmp_path: Path
) -> None:
    made = make_yardstick(llm, CONFIG, TEXT, clock=time.perf_counter, **HOW)
    assert made.tokens == greedy_of_transformers(folder, made.prompts, 6)
    write_yardstick(tmp_path / "a" / "b.json", made)
    assert read_yardstick(tmp_path / "a" / "b.json") == made
    metrics, samples = measure_quality(llm, CONFIG, TEXT, made, **HOW)
    assert metrics["quality/equal_share"] == 1
    assert metrics["quality/first_difference_tokens"] == 6
    (tmp_path / "result.json").write_text(json.dumps({"samples": {"quality": samples}}))
    assert read_yardstick(tmp_path) == made  # that of a run

    other = tmp_path / "other"
    write_model(other)
    (other / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    for name, weight in tensors.items():
        if "down_proj" in name:
            tensors[name] = weight * 0.3
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with open_llm(other, max_model_len=64) as changed:
        metrics, samples = measure_quality(changed, CONFIG, TEXT, made, **HOW)
    equal, leading = 0, []
    for prompt, tokens in zip(made.prompts, made.tokens, strict=True):
        best = logprobs(other, [*prompt, *tokens]).argmax(-1)[len(prompt) - 1 : -1].tolist()
        same = [a == b for a, b in zip(best, tokens, strict=True)]
        equal += sum(same)
        leading.append([*same, False].index(False))
    assert 0 < equal < 18
    assert metrics["quality/equal_share"] == equal / 18
    assert metrics["quality/first_difference_tokens"] == sum(leading) / 3
    assert samples["leading_equal"] == leading


@pytest.mark.filterwarnings("ignore::engine.asked.offload.OffloadWarning")
def test_workers_make_the_yardstick_and_hold_rounded_weights_against_it(
    folder: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    quality = replace(CONFIG, text_file=str(text))
    model = ModelNode(name="q", path=str(folder), quantize="int8")
    config = run_config(model=model, scenario=ScenarioConfig(name="q", quality=quality))
    plain = yardstick_config(config, ModelConfig(name="q", path=str(folder)))
    tested = engine_config(config, folder)
    door = replace(engine_door(), probe=lambda _: {}, machine=lambda _: {})
    common: dict[str, Any] = {"scenario": config.scenario, "yardstick": tmp_path / "made.json"}
    result: dict[str, Any] = {}
    for kind, engine in (("yardstick", plain), ("measure", tested)):
        job = WorkerJob(name=kind, kind=kind, engine=engine, **common)
        result = Work(job, tmp_path, door, spawned_s=0).run()
        assert result["error"] is None
    assert result["measured"] == ["quality"]
    assert result["effective"]["quantize"] == "int8 (round to nearest, group 128)"
    assert 0 < result["metrics"]["quality/equal_share"] <= 1
    assert result["samples"]["quality"]["yardstick"]["prompts"]


def test_what_cannot_be_compared_is_refused(llm: LLM, tmp_path: Path) -> None:
    made = make_yardstick(llm, CONFIG, TEXT, clock=time.perf_counter, **HOW)
    with pytest.raises(PromptError, match="expected the same text and tokenizer"):
        measure_quality(llm, CONFIG, TEXT + "!", made, **HOW)
    with pytest.raises(PromptError, match="at least 3 x 8 tokens"):
        make_yardstick(llm, CONFIG, "short", clock=time.perf_counter, **HOW)
    with pytest.raises(PromptError, match="at least 2 tokens, got 1"):
        measure_quality(llm, CONFIG, "a", None, **HOW)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(PromptError, match=r"text_file .*bytes: expected text in UTF-8"):
        quality_text(tmp_path / "bytes")
    assert read_yardstick(tmp_path / "none.json") is None
    assert read_yardstick(tmp_path) is None
    assert Yardstick.of({"prompts": []}) is None
    assert len(quality_text(None)) > 100_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stride_tokens": 24}, "stride_tokens: expected less than window_tokens=24, got 24"),
        ({"num_prompts": 0, "reference": "a"}, "reference: expected null with num_prompts=0"),
        ({"text_file": " "}, "text_file: expected a path or null"),
        ({"window_tokens": 1}, "window_tokens"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    fields = {"window_tokens": 24, "stride_tokens": 10} | changes
    with pytest.raises(ConfigError, match=message):
        QualityScenario(**fields)


def test_weights_that_say_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"got model\.load_format=dummy"):
        run_config(scenario=ScenarioConfig(name="q", quality=CONFIG))
    assert scenario(quality=CONFIG).longest_tokens()["quality"] == 25
    assert "quality" in scenario(quality=CONFIG).part_names()


def test_a_quantised_checkpoint_needs_a_reference(tmp_path: Path) -> None:
    quantised = {"method": "awq", "schemes": [{"layout": "awq", "bits": 4}]}
    node = ModelNode(name="q", path=str(tmp_path), spec=replace(SPEC, quantization=quantised))
    config = run_config(model=node, scenario=ScenarioConfig(name="q", quality=CONFIG))
    with pytest.raises(ConfigError, match=r"got null: the checkpoint is quantised \(awq\)"):
        check_settings(config)
    for changes in ({"reference": "glass"}, {"num_prompts": 0}):
        quality = replace(CONFIG, **changes)
        check_settings(replace(config, scenario=ScenarioConfig(name="q", quality=quality)))


def test_vllm_tells_log_probabilities_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    test_vllm.install(monkeypatch)
    engine = test_vllm.open_engine()
    found = score(engine, [5, 6, 7, 8], "a")
    assert [each.logprob for each in found] == [pytest.approx(math.log(0.5))] * 3
    assert [each.is_first for each in found] == [True, False, True]


def test_a_server_tells_them_with_an_echo() -> None:
    told = {
        "token_logprobs": [None, -0.5, -2.0, -0.1],
        "top_logprobs": [None, {"a": -0.5}, {"b": -1.0}, {"c": -0.1}],
    }
    for logprobs, ok in ((told, True), (None, False), ({"token_logprobs": [None]}, False)):
        with Server(Script(logprobs=logprobs)) as server:
            llm = HTTPEngine(
                test_http.config(), SystemConfig(kind="http", base_url=server.base_url)
            )
            try:
                if not ok:
                    with pytest.raises(RequestError, match="no log-probabilities of the prompt"):
                        score(llm, [1, 2, 3], "a")
                    continue
                found = score(llm, [1, 2, 3], "a")
                assert found == [(-0.5, True), (-2.0, False)]
                body = server.script.bodies[0]
                assert (body["echo"], body["logprobs"], body["stream"]) == (True, 1, False)
            finally:
                llm.close()


def test_accelerate_computes_them() -> None:
    llm = test_accelerate.open_engine()
    prompt = make_prompt(9, seed=3)
    found = score(llm, prompt, "a")
    with torch.inference_mode():
        rows = llm._placed.model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    for at, each in enumerate(found):
        assert each.logprob == pytest.approx(rows[at, prompt[at + 1]].item(), abs=1e-4)
        assert each.is_first == (rows[at].argmax().item() == prompt[at + 1])
    llm.close()
