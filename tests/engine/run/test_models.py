"""Greedy tokens equal transformers' for every family, length, batch, chunk and block size."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM
from engine.model.spec import ModelSpec
from tests.engine.conftest import TinyModels
from tests.engine.groups import with_blocks
from tests.slow import mostly_slow, slow
from tests.tiny import (
    COMMON,
    EXPERT_FAMILIES,
    FAMILIES,
    VARIANTS,
    greedy,
    greedy_of_transformers,
    greedy_params,
    hf_model,
    make_prompt,
    open_llm,
    save,
    tokens_of,
    write_config,
)

PROMPTS = [make_prompt(length) for length in (1, 7, 33, 250, 1000)]
SHORT = [make_prompt(length, seed=1) for length in (1, 2, 15, 16, 17, 40, 64, 65)]
MAX_TOKENS = 6


@pytest.mark.thorough_but("llama", "gemma3", "qwen3_moe")
@pytest.mark.parametrize(
    "variant",
    mostly_slow(
        VARIANTS,
        lambda x: x in (*FAMILIES, *EXPERT_FAMILIES, "llama_biases", "llama_odd_sizes"),
    ),
)
def test_tokens_equal_transformers_alone_and_together(tiny: TinyModels, variant: str) -> None:
    """Those with windows have a file of their own, and below rotary tables of all kinds run."""
    prompts = PROMPTS if variant in {"llama", "gemma3"} else PROMPTS[1:4]
    expected = tiny.greedy(variant, prompts, MAX_TOKENS)
    llm = open_llm(tiny.folder(variant))
    assert greedy(llm, prompts, MAX_TOKENS) == expected
    assert [greedy(llm, [prompt], MAX_TOKENS)[0] for prompt in prompts[1:3]] == expected[1:3]
    llm.close()


@pytest.mark.thorough_but("qwen2")
@pytest.mark.parametrize("family", mostly_slow(FAMILIES, lambda x: x in {"qwen2", "gemma3"}))
def test_bfloat16_log_probabilities_are_near_those_of_transformers(
    tiny: TinyModels, family: str
) -> None:
    llm = open_llm(tiny.folder(family), dtype="bfloat16")
    [output] = llm.generate(PROMPTS[3], greedy_params(16, logprobs=20))
    llm.close()
    [answer] = output.outputs
    ids = torch.tensor([PROMPTS[3] + answer.token_ids])
    model = copy.deepcopy(tiny.model(family)).bfloat16()
    with torch.no_grad():
        theirs = model(ids).logits[0, len(PROMPTS[3]) - 1 : -1].float().log_softmax(-1)
        exact = tiny.model(family)(ids).logits[0, len(PROMPTS[3]) - 1 : -1].log_softmax(-1)
    assert answer.logprobs is not None
    ours, rounded = [], []
    for row, other, top in zip(exact, theirs, answer.logprobs, strict=True):
        ours += [abs(row[token].item() - value) for token, value in top.items()]
        rounded += [abs(row[token].item() - other[token].item()) for token in top]
    # As far from float32 as transformers' own bfloat16 is.
    assert sum(ours) < 1.5 * sum(rounded) + 1e-3
    assert max(ours) < 3 * max(rounded) + 1e-3


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 4.0}
BY_HAND: list[tuple[str, dict[str, Any]]] = [
    ("olmo2", {"rope_scaling": LINEAR}),
    ("llama", {"rope_scaling": YARN}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4}}),
    ("llama", {"rope_scaling": LLAMA3}),
    ("llama", {"rope_scaling": LLAMA3, "original_max_position_embeddings": 100}),
    ("llama", {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 100}}),
    ("gemma3", {"rope_scaling": LLAMA3}),
    ("qwen3", {"rope_scaling": YARN | {"attention_factor": 1.5, "beta_fast": 8, "beta_slow": 2}}),
    ("qwen3", {"rope_scaling": YARN | {"mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False}}),
    ("gemma3", {"rope_scaling": YARN | {"truncate": False}}),
    ("mistral", {"rope_scaling": {"type": "yarn", "factor": 2.0}}),
    ("olmo2", {"rope_parameters": None, "rope_theta": 500.0}),
    ("olmo2", {"rope_parameters": {"rope_type": "default"}, "rope_theta": 500.0}),
    ("olmo2", {"rope_parameters": {"rope_theta": 200.0}, "rope_theta": 500.0}),
    ("qwen2", {"rope_parameters": YARN | {"rope_theta": 500.0}}),
    ("gemma3", {"rope_parameters": None, "rope_theta": 5e5, "rope_local_base_freq": 50.0}),
    ("gemma3", {"rope_parameters": {"full_attention": YARN}, "rope_local_base_freq": 50.0}),
    ("gemma3", {"layer_types": None, "_sliding_window_pattern": 2}),
    ("gemma3", {"layer_types": None, "sliding_window_pattern": 2, "_sliding_window_pattern": 3}),
]
"""What people write into a config.json that transformers has saved."""
NEAR_OTHERS = (4, 8, 10, 14)
"""Places of those whose keys another one has too."""


@pytest.mark.thorough_but("qwen3")
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *(slow(*case) if at in NEAR_OTHERS else case for at, case in enumerate(BY_HAND)),
        *(
            slow(family, {"rope_scaling": scaling})
            for family in FAMILIES
            for scaling in (YARN, LINEAR)
            if (family, {"rope_scaling": scaling}) not in BY_HAND
        ),
    ],
)
def test_a_config_json_that_was_changed_by_hand_is_read_as_transformers_reads_it(
    tiny: TinyModels, tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    folder = Path(shutil.copytree(tiny.folder(family), tmp_path / family))
    write_config(folder, **changes)
    prompts = [make_prompt(7), make_prompt(150)]
    llm = open_llm(folder, max_model_len=200)
    assert greedy(llm, prompts, 4) == greedy_of_transformers(folder, prompts, 4)
    llm.close()


def test_yarn_stretches_the_positions_that_a_model_was_trained_for() -> None:
    sizes = {name: value for name, value in COMMON.items() if value is not None}
    sizes |= {"model_type": "qwen3", "rope_scaling": YARN}
    for positions, expected in ((64, 256), (600, 600)):
        spec = ModelSpec.from_hf_config(sizes | {"max_position_embeddings": positions})
        assert spec.max_position_embeddings == expected


LIMITS = ((8, 7, 3), (32, 16, 8), (128, 50, 1))
"""Tokens of a block, tokens of a step, sequences at once; llama gets all, the others one each."""


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, lambda x: x in {"llama", "gemma3"}))
@pytest.mark.thorough
def test_tokens_do_not_depend_on_chunks_batch_limits_or_block_size(
    tiny: TinyModels, family: str
) -> None:
    expected = tiny.greedy(family, SHORT, MAX_TOKENS)
    one = FAMILIES.index(family) % len(LIMITS)
    for block_size, num_tokens, num_seqs in LIMITS if family == "llama" else LIMITS[one : one + 1]:
        llm = open_llm(
            tiny.folder(family),
            block_size=block_size,
            max_num_batched_tokens=num_tokens,
            max_num_seqs=num_seqs,
        )
        assert greedy(llm, SHORT, MAX_TOKENS) == expected
        llm.close()


@pytest.mark.thorough
def test_requests_that_arrive_while_others_decode(tiny: TinyModels) -> None:
    expected = tiny.greedy("olmo2", SHORT, MAX_TOKENS)
    llm = open_llm(tiny.folder("olmo2"), max_num_batched_tokens=24)
    waiting = list(enumerate(SHORT))
    tokens: dict[str, list[int]] = {}
    while waiting or llm.has_unfinished():
        if waiting:
            index, prompt = waiting.pop(0)
            llm.add_request(prompt, greedy_params(MAX_TOKENS), str(index))
        for _ in range(2):
            for event in llm.step():
                tokens.setdefault(event.request_id, []).append(event.token_id)
    assert [tokens[str(index)] for index in range(len(SHORT))] == expected
    llm.close()


@pytest.mark.thorough
@pytest.mark.parametrize("offload", [slow({}), {"offload_group_size": 2}])
def test_tokens_do_not_depend_on_preemption(
    tiny: TinyModels,
    monkeypatch: pytest.MonkeyPatch,
    pool_is_full: Callable[[LLM], bool],
    offload: dict[str, int],
) -> None:
    prompts = [make_prompt(length, seed=2) for length in (30, 50, 41, 60)]
    expected = tiny.greedy("qwen3", prompts, 30)
    with_blocks(monkeypatch, 14)
    llm = open_llm(
        tiny.folder("qwen3"), max_model_len=100, block_size=8, max_num_batched_tokens=64, **offload
    )
    assert greedy(llm, prompts, 30) == expected
    assert llm.stats()["preemptions"] > 0
    assert llm.stats()["recomputed_tokens"] > 0
    assert pool_is_full(llm)
    llm.close()


def test_prompt_and_output_may_fill_max_model_len(tiny: TinyModels) -> None:
    prompt = make_prompt(90)
    expected = tiny.greedy("llama", [prompt], 10)
    llm = open_llm(tiny.folder("llama"), max_model_len=100)
    [output] = llm.generate([prompt], greedy_params(50))
    assert tokens_of([output]) == expected
    assert output.outputs[0].finish_reason == "length"
    llm.close()


def test_end_tokens_of_the_model_end_the_output(tiny: TinyModels, tmp_path: Any) -> None:
    prompt = make_prompt(20)
    [expected] = tiny.greedy("llama", [prompt], 10)
    folder = save(hf_model("llama"), tmp_path)
    end = next(token for token in expected[2:] if token not in expected[:2])
    place = expected.index(end)
    write_config(folder, eos_token_id=end)
    (folder / "generation_config.json").unlink()
    llm = open_llm(folder)
    params = greedy_params(10)
    params.ignore_eos = False
    [output] = llm.generate(prompt, params)
    assert output.outputs[0].token_ids == expected[: place + 1]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    assert greedy(llm, [prompt], 10) == [expected]
    llm.close()
