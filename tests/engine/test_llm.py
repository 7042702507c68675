"""The LLM door: prompts of every form, requests that fail alone, seeds, ends."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.errors import ConfigError, EngineError, RequestError
from tests.engine.conftest import TinyModels
from tests.tiny import VOCAB, greedy_params, make_prompt, open_llm, tokens_of, unchecked

GIB = 2**30
TEXTS = ["Hello, my name is", "The capital of France is", "x"]
PROMPTS = [make_prompt(length, seed=3) for length in (1, 12, 30)]


# Prompts.


def test_text_prompts(llm: LLM, tiny: TinyModels) -> None:
    outputs = llm.generate(TEXTS, greedy_params(8))
    ids = [llm.tokenizer(text)["input_ids"] for text in TEXTS]  # type: ignore[misc]
    assert [output.prompt for output in outputs] == TEXTS
    assert [output.prompt_token_ids for output in outputs] == ids
    assert tokens_of(outputs) == tiny.greedy("llama", ids, 8)
    for output in outputs:
        [answer] = output.outputs
        text = llm.tokenizer.decode(answer.token_ids, skip_special_tokens=True)  # type: ignore[union-attr]
        assert answer.text == text
        assert output.finished
        assert answer.finish_reason == "length"
    [alone] = llm.generate(TEXTS[1], greedy_params(8))
    assert alone.outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_prompts_of_ids_and_mixed_ones(llm: LLM, tiny: TinyModels) -> None:
    expected = tiny.greedy("llama", PROMPTS, 5)
    assert tokens_of(llm.generate(PROMPTS[1], greedy_params(5))) == [expected[1]]
    assert tokens_of(llm.generate(tuple(PROMPTS), greedy_params(5))) == expected
    mixed = llm.generate([PROMPTS[2], TEXTS[0], PROMPTS[0]], greedy_params(5))
    assert [output.prompt for output in mixed] == [None, TEXTS[0], None]
    assert tokens_of(mixed)[::2] == [expected[2], expected[0]]
    assert llm.generate([], greedy_params(5)) == []


def test_a_prompt_is_copied(llm: LLM, tiny: TinyModels) -> None:
    prompt = list(PROMPTS[1])
    llm.add_request(prompt, greedy_params(5), "copied")
    prompt.clear()
    tokens = []
    while llm.has_unfinished():
        tokens += [event.token_id for event in llm.step()]
    assert [tokens] == tiny.greedy("llama", PROMPTS[1:2], 5)


def test_a_folder_without_tokenizer_takes_ids_only(tiny: TinyModels) -> None:
    llm = open_llm(tiny.folder("llama"))
    assert llm.tokenizer is None
    [text, ids] = llm.generate(["text", PROMPTS[0]], greedy_params(3))
    assert "no tokenizer" in str(text.error)
    assert ids.error is None
    assert ids.outputs[0].text == ""
    [stop] = llm.generate([PROMPTS[0]], SamplingParams(stop="x"))
    assert "stop_token_ids" in str(stop.error)
    llm.close()


BAD: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "at least one token"),
    ("", {}, "at least one token"),
    (make_prompt(200), {}, "at most 199 tokens"),
    ([5, VOCAB], {}, f"got {VOCAB} at position 1"),
    ([-1], {}, "got -1"),
    ([1.5], {}, "1.5"),
    (None, {}, "NoneType"),
    ({"prompt": "x"}, {}, "dict"),
    ("\ud800", {}, "prompt"),
    ([5], {"temperature": -1}, "temperature"),
    ([5], {"top_p": 0.0}, "top_p"),
    ([5], {"n": 0}, "n:"),
    ([5], {"max_tokens": 0}, "max_tokens"),
    ([5], {"stop_token_ids": [VOCAB]}, "stop_token_ids"),
    ([5], {"stop": [""]}, "stop"),
    ([5], {"logprobs": 1000}, "logprobs"),
]


def test_requests_that_cannot_be_served_fail_alone(llm: LLM, tiny: TinyModels) -> None:
    prompts = [PROMPTS[1], *(prompt for prompt, _, _ in BAD), PROMPTS[2]]
    params = [unchecked(**changes) for _, changes, _ in BAD]
    outputs = llm.generate(prompts, [greedy_params(5), *params, greedy_params(5)])
    assert tokens_of([outputs[0], outputs[-1]]) == tiny.greedy("llama", PROMPTS[1:], 5)
    for output, (_, _, reason) in zip(outputs[1:-1], BAD, strict=True):
        assert reason in str(output.error)
        assert output.finished
        assert [answer.finish_reason for answer in output.outputs] == ["error"]
    for prompt, changes, reason in BAD:
        with pytest.raises(RequestError, match=reason.replace(":", "")):
            llm.add_request(prompt, unchecked(**changes))


def test_the_longest_prompt_gets_one_token(llm: LLM) -> None:
    [output] = llm.generate([make_prompt(199)], greedy_params(5))
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"


def test_params_must_match_prompts(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="each of 2 prompts, got 3"):
        llm.generate(PROMPTS[:2], [greedy_params(1)] * 3)


def test_a_request_id_is_used_once_at_a_time(llm: LLM) -> None:
    assert llm.add_request([5], greedy_params(2), "a") == "a"
    with pytest.raises(RequestError, match="'a'"):
        llm.add_request([5], greedy_params(2), "a")
    while llm.has_unfinished():
        llm.step()
    assert llm.add_request([5], greedy_params(1), "a") == "a"
    assert [event.finish_reason for event in llm.step()] == ["length"]


# Sampling.


def test_several_answers(llm: LLM) -> None:
    [output] = llm.generate([PROMPTS[1]], SamplingParams(n=4, seed=1, max_tokens=8, temperature=2))
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]
    tokens = [tuple(answer.token_ids) for answer in output.outputs]
    assert len(set(tokens)) == 4
    [again] = llm.generate([PROMPTS[1]], SamplingParams(n=2, seed=1, max_tokens=8, temperature=2))
    assert [tuple(answer.token_ids) for answer in again.outputs] == tokens[:2]
    [same] = llm.generate([PROMPTS[1]], greedy_params(4, n=3))
    assert len({tuple(answer.token_ids) for answer in same.outputs}) == 1


def test_a_seed_decides_whatever_else_runs(llm: LLM) -> None:
    params = SamplingParams(seed=5, max_tokens=10)
    [alone] = llm.generate([PROMPTS[1]], params)
    together = llm.generate([*PROMPTS, PROMPTS[1]], [SamplingParams()] * 3 + [params])
    assert together[-1].outputs[0].token_ids == alone.outputs[0].token_ids
    other = llm.generate([PROMPTS[1]], SamplingParams(seed=6, max_tokens=10))
    assert other[0].outputs[0].token_ids != alone.outputs[0].token_ids


def test_engines_of_one_seed_repeat_each_other(tiny: TinyModels) -> None:
    found = []
    for seed, offload in ((0, {}), (0, {"cpu_offload_gb": 1}), (1, {})):
        llm = open_llm(tiny.folder("llama"), seed=seed, **offload)
        params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8)
        found.append(tokens_of(llm.generate([PROMPTS[1]] * 3, params)))
        llm.close()
    assert found[0] == found[1] != found[2]
    assert len({tuple(tokens) for tokens in found[0]}) == 3


def test_log_probabilities_are_those_of_transformers(llm: LLM, tiny: TinyModels) -> None:
    [output] = llm.generate([PROMPTS[2]], greedy_params(4, logprobs=3))
    [answer] = output.outputs
    ids = torch.tensor([PROMPTS[2] + answer.token_ids])
    with torch.no_grad():
        logits = tiny.model("llama")(ids).logits[0, len(PROMPTS[2]) - 1 : -1]
    expected = logits.double().log_softmax(-1)
    assert answer.logprobs is not None
    for row, token, top in zip(expected, answer.token_ids, answer.logprobs, strict=True):
        assert list(top) == row.topk(3).indices.tolist()
        assert top[token] == pytest.approx(row[token].item(), abs=1e-3)
    total = sum(row[token].item() for row, token in zip(expected, answer.token_ids, strict=True))
    assert answer.cumulative_logprob == pytest.approx(total, abs=1e-3)


# Ends.


def test_stop_strings_end_the_text_before_them(llm: LLM) -> None:
    [free] = llm.generate(TEXTS[0], greedy_params(24))
    text = free.outputs[0].text
    stop = text[6:8]
    place = text.index(stop)
    [output] = llm.generate(TEXTS[0], greedy_params(24, stop=[stop, "\n\n"]))
    [answer] = output.outputs
    assert answer.text == text[:place]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert len(answer.token_ids) < 24
    assert answer.token_ids == free.outputs[0].token_ids[: len(answer.token_ids)]
    [late] = llm.generate(TEXTS[0], greedy_params(24, stop=[stop], min_tokens=20))
    assert len(late.outputs[0].token_ids) >= 20


def test_a_stop_string_that_only_the_end_completes(llm: LLM) -> None:
    """A stop string in the text that `finish` releases still counts."""
    [free] = llm.generate(TEXTS[0], greedy_params(9))
    text = free.outputs[0].text
    [output] = llm.generate(TEXTS[0], greedy_params(9, stop=[text[-1], text[-1] + "never"]))
    assert output.outputs[0].finish_reason == "stop"
    [held] = llm.generate(TEXTS[0], greedy_params(9, stop=[text[-1] + "never"]))
    assert (held.outputs[0].text, held.outputs[0].finish_reason) == (text, "length")


def test_stop_tokens(llm: LLM, tiny: TinyModels) -> None:
    [expected] = tiny.greedy("llama", PROMPTS[1:2], 10)
    stop = next(token for token in expected[3:] if token not in expected[:3])
    place = expected.index(stop)
    [output] = llm.generate(PROMPTS[1], greedy_params(10, stop_token_ids=[stop]))
    [answer] = output.outputs
    assert answer.token_ids == expected[: place + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


def test_max_tokens_none_goes_on_to_max_model_len(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    [output] = llm.generate(make_prompt(180), params)
    assert len(output.outputs[0].token_ids) == 200 - 180


def test_answers_of_a_seed_are_those_of_the_seeds_behind_it(tiny: TinyModels) -> None:
    llm = open_llm(tiny.folder("llama"), enable_prefix_caching=True)
    params = [SamplingParams(seed=seed, max_tokens=6) for seed in (5, 6, 7)]
    together = llm.generate(PROMPTS[2], SamplingParams(seed=5, n=3, max_tokens=6))
    alone = tokens_of(llm.generate([PROMPTS[2]] * 3, params))
    assert [x.token_ids for x in together[0].outputs] == alone
    assert len({tuple(tokens) for tokens in alone}) == 3
    assert llm.stats()["kv"]["prefix"]["hits_gpu_tokens"] > 0
    llm.close()


def test_ranks_come_with_log_probabilities(llm: LLM) -> None:
    params = SamplingParams(logprobs=3, temperature=3, seed=1, max_tokens=8)
    [output] = llm.generate(PROMPTS[1], params)
    [answer] = output.outputs
    assert answer.logprobs is not None
    assert answer.ranks is not None
    assert max(answer.ranks) > 3
    for token_id, top, rank in zip(answer.token_ids, answer.logprobs, answer.ranks, strict=True):
        best = sorted(top, key=lambda each: -top[each])
        assert best.index(token_id) == min(rank - 1, 3)
        assert len(top) == (3 if rank <= 3 else 4)
    [plain] = llm.generate(PROMPTS[1], greedy_params(3))
    assert plain.outputs[0].ranks is None


def test_it_is_closed_behind_with_and_shows_what_it_is(
    tiny: TinyModels, logged: list[logging.LogRecord]
) -> None:
    with open_llm(tiny.folder("llama"), offload_params=[], cpu_offload_gb=1e-4) as llm:
        (line,) = [item.getMessage() for item in logged if item.name == "tightfit"]
        assert repr(llm) == f"LLM({line})"
    assert repr(llm) == "LLM(closed)"
    assert " GiB of weights off the GPU (uva 0.0" in line
    assert " tokens of KV on the GPU; " in line
    with pytest.raises(EngineError, match="it was closed"):
        llm.generate([[1]])


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
MESSAGES = [{"role": "user", "content": "the sea"}]


def test_conversations_are_written_by_the_template(text_folder: Path) -> None:
    with open_llm(text_folder) as llm:
        with pytest.raises(RequestError, match="expected a model with a chat template"):
            llm.chat(MESSAGES)
        written = llm.tokenizer("user: the sea\na:", add_special_tokens=False)["input_ids"]
        params = greedy_params(3)
        expected = tokens_of(llm.generate([written], params))
        assert tokens_of(llm.chat(MESSAGES, params, chat_template=TEMPLATE)) == expected
        several = llm.chat([MESSAGES, MESSAGES], params, chat_template=TEMPLATE)
        assert tokens_of(several) == expected * 2
        parts = [{"role": "user", "content": [{"type": "text", "text": "the sea"}]}]
        assert tokens_of(llm.chat(parts, params, chat_template=TEMPLATE)) == expected
        [bare] = llm.chat(MESSAGES, params, chat_template=TEMPLATE, add_generation_prompt=False)
        assert len(bare.prompt_token_ids) < len(written)
        for messages, words in (
            ([], "expected a list of dicts"),
            ([{"content": "x"}], "expected dicts with role and content, got {'content': 'x'}"),
            ("hello", "expected a list of dicts with role and content, got 'hello'"),
            (
                [*parts, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
                "messages.1.content.0: expected a part with type text and a text (this model takes "
                "no other), got 'image_url'",
            ),
            ([{"role": "user", "content": 5}], "messages.0.content.0: expected a part"),
        ):
            with pytest.raises(RequestError) as caught:
                llm.chat(messages, chat_template=TEMPLATE)
            assert words in str(caught.value)
        with pytest.raises(RequestError, match=r"refuses them \(TemplateError: no"):
            llm.chat(MESSAGES, chat_template="{{ raise_exception('no') }}")


def test_a_model_without_a_tokenizer_has_no_conversations(tiny: TinyModels) -> None:
    with (
        open_llm(tiny.folder("llama")) as llm,
        pytest.raises(RequestError, match="expected a model with a tokenizer"),
    ):
        llm.chat(MESSAGES)


@pytest.mark.parametrize("priority", [1.0, None, True, 2**63])
def test_a_priority_is_an_integer(llm: LLM, priority: Any) -> None:
    with pytest.raises(RequestError, match="priority: expected an integer") as caught:
        llm.add_request(PROMPTS[0], priority=priority)
    assert caught.value.param == "priority"
