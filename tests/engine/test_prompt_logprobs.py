"""Log-probabilities of prompts: those of transformers, however the prompt is cut and kept."""

import pytest
import torch

from engine import SamplingParams
from engine.asked.request import RequestOutput
from tests.engine.conftest import TinyModels
from tests.engine.groups import with_blocks
from tests.slow import mostly_slow
from tests.tiny import FAMILIES, greedy_params, make_prompt, open_llm

PROMPTS = [make_prompt(length, seed=4) for length in (1, 2, 37, 90)]
ASKED = greedy_params(4, prompt_logprobs=3)


def check(tiny: TinyModels, family: str, output: RequestOutput, width: int = 3) -> None:
    """Compare an output's log-probabilities with those of transformers."""
    prompt = output.prompt_token_ids
    with torch.inference_mode():
        logits = tiny.model(family)(torch.tensor([prompt])).logits[0]
    expected = torch.log_softmax(logits.double(), dim=-1)
    assert output.prompt_logprobs is not None
    first, *rest = output.prompt_logprobs
    assert first is None
    assert len(rest) == len(prompt) - 1
    for row, token_id, found in zip(expected, prompt[1:], rest, strict=False):
        assert found is not None
        assert next(iter(found)) == token_id
        top = torch.topk(row, width).indices.tolist()
        assert list(found)[1:] == [each for each in top if each != token_id]
        for each, value in found.items():
            assert value == pytest.approx(float(row[each]), abs=2e-4)


@pytest.mark.thorough_but("qwen2")
@pytest.mark.parametrize("family", mostly_slow(FAMILIES, lambda x: x in {"qwen2", "gemma3"}))
def test_they_are_those_of_transformers(tiny: TinyModels, family: str) -> None:
    """In parts of 16 tokens, beside prompts that do not ask, and with every layer offloaded."""
    sizes = {"max_num_batched_tokens": 16, "max_num_seqs": 3, "offload_group_size": 1}
    with open_llm(tiny.folder(family), **sizes) as llm:
        params = [ASKED, ASKED, ASKED, ASKED, greedy_params(4)]
        *asked, plain = llm.generate([*PROMPTS, PROMPTS[2]], params)
    for output in asked:
        check(tiny, family, output)
    assert plain.prompt_logprobs is None
    assert plain.outputs[0].token_ids == asked[2].outputs[0].token_ids


def test_a_prefix_in_the_cache_is_computed_again(tiny: TinyModels) -> None:
    with open_llm(tiny.folder("llama"), enable_prefix_caching=True) as llm:
        prompt = PROMPTS[3]
        [first] = llm.generate([prompt], greedy_params(4))
        [second] = llm.generate([prompt], ASKED)
        [third] = llm.generate([prompt], greedy_params(4))
    check(tiny, "llama", second)
    assert (second.num_cached_tokens, third.num_cached_tokens) == (0, 80)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_answers_of_one_prompt_share_them(tiny: TinyModels) -> None:
    params = SamplingParams(n=3, max_tokens=4, prompt_logprobs=0)
    with open_llm(tiny.folder("llama"), max_num_seqs=2) as llm:
        [output] = llm.generate([PROMPTS[2]], params)
    check(tiny, "llama", output, width=0)
    assert [len(answer.token_ids) for answer in output.outputs] == [4, 4, 4]


@pytest.mark.thorough
def test_a_preempted_prompt_has_each_once(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks for little more than one sequence: a prompt is computed more than once."""
    with_blocks(monkeypatch, 11)
    sizes = {"max_num_batched_tokens": 16, "max_num_seqs": 2, "max_model_len": 160}
    with open_llm(tiny.folder("llama"), **sizes) as llm:
        params = greedy_params(90, prompt_logprobs=3)
        outputs = llm.generate([PROMPTS[2], make_prompt(40, seed=5)], params)
        assert llm.snapshot().preemptions > 0
    for output in outputs:
        check(tiny, "llama", output)
