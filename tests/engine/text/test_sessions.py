"""Requests that are refused while others are being queued."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.errors import ConfigError, RequestError
from tests.engine.conftest import TinyModels
from tests.tiny import greedy_params, make_prompt, open_llm, tokens_of

PROMPTS = [make_prompt(length, seed=3) for length in (1, 12, 30)]


def test_sampling_params_of_another_type_fail_alone(llm: LLM, tiny: TinyModels) -> None:
    wrong: list[Any] = [greedy_params(4), {"temperature": 0}, greedy_params(4)]
    outputs = llm.generate(PROMPTS, wrong)
    assert tokens_of(outputs[::2]) == tiny.greedy("llama", PROMPTS[::2], 4)
    assert "expected SamplingParams, got {'temperature': 0}" in str(outputs[1].error)
    with pytest.raises(RequestError, match="expected SamplingParams, got 5"):
        llm.add_request(PROMPTS[0], 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompts", [{"prompt_token_ids": [1, 2]}, b"text", None, 5])
def test_prompts_that_cannot_be_meant_are_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(ConfigError, match=f"prompts: .* got {type(prompts).__name__}"):
        llm.generate(prompts, greedy_params(4))


@pytest.mark.parametrize("params", [{"temperature": 0}, 5])
def test_params_that_cannot_be_meant_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(ConfigError, match=f"sampling_params: .* got {type(params).__name__}"):
        llm.generate(PROMPTS[:1], params)


@pytest.mark.parametrize("name", [5, "", b"a"])
def test_names_that_are_no_text_are_refused(llm: LLM, name: Any) -> None:
    with pytest.raises(RequestError, match="request_id: expected a string"):
        llm.add_request(PROMPTS[0], greedy_params(1), name)


def test_token_ids_of_numpy_are_token_ids(llm: LLM, tiny: TinyModels) -> None:
    outputs = llm.generate(np.array(PROMPTS[1]), greedy_params(4))  # type: ignore[arg-type]
    assert tokens_of(outputs) == tiny.greedy("llama", PROMPTS[1:2], 4)


def test_what_was_queued_is_dropped_when_queueing_fails(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, calls = llm._sessions.add, []

    def fail_at_third(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("tests say so")
        return add(*args)

    monkeypatch.setattr(llm._sessions, "add", fail_at_third)
    with pytest.raises(RuntimeError, match="tests say so"):
        llm.generate(PROMPTS, greedy_params(4))
    assert not llm.has_unfinished()
    assert llm._sessions._open == {}


def test_a_special_token_as_stop_string_ends_the_output(
    tiny: TinyModels, text_folder: Path, tmp_path: Path
) -> None:
    (tokens,) = tiny.greedy("llama", PROMPTS[1:2], 9)
    special = tokens[4]
    folder = tmp_path / "llama"
    shutil.copytree(text_folder, folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    [text] = [word for word, i in content["model"]["vocab"].items() if i == special]
    one = content["added_tokens"][0] | {"id": special, "content": text, "special": True}
    file.write_text(json.dumps(content | {"added_tokens": [*content["added_tokens"], one]}))
    llm = open_llm(folder)
    assert special not in tokens[:4]
    (shown,) = llm.generate([PROMPTS[1]], greedy_params(4))
    last = shown.outputs[0].text[-1]
    for stop, kept in ((text, len(shown.outputs[0].text)), (last + text, -1)):
        (output,) = llm.generate([PROMPTS[1]], greedy_params(9, stop=["never", stop]))
        (answer,) = output.outputs
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        assert answer.token_ids == tokens[:5]
        assert answer.text == shown.outputs[0].text[:kept]
    llm.close()


def test_answers_that_end_in_one_step_are_decoded_each(text_folder: Path) -> None:
    llm = open_llm(text_folder)
    (whole,) = llm.generate([PROMPTS[1]], greedy_params(9))
    text = whole.outputs[0].text
    params = SamplingParams(n=3, temperature=0, max_tokens=9, ignore_eos=True)
    (output,) = llm.generate([PROMPTS[1]], params)
    assert [answer.text for answer in output.outputs] == [text] * 3
    stop = text[-1]
    params = SamplingParams(n=3, temperature=0, max_tokens=9, ignore_eos=True, stop=stop)
    (output,) = llm.generate([PROMPTS[1]], params)
    assert {(a.text, a.finish_reason, a.stop_reason) for a in output.outputs} == {
        (text[: text.index(stop)], "stop", stop)
    }
    assert llm._sessions._open == {}
    llm.close()
