"""Real checkpoints: greedy tokens equal transformers' in every placement, alone and together."""

from pathlib import Path
from typing import Any

import pytest

from tests.tiny import greedy, greedy_params, hf_greedy, open_llm, tokens_of

TEXTS = [
    "Alice was beginning to",
    "The Queen said,\n\n'Off  with",
    "x",
    "It was the White Rabbit, trotting slowly back again, and looking anxiously about as it went, "
    "as if it had lost something; and she heard it muttering to itself",
]
PLACEMENTS: list[dict[str, Any]] = [
    {},
    {"cpu_offload_gb": 0.001},
    {"cpu_offload_gb": 1, "uva_stage_tokens": 1},
    {"offload_group_size": 3, "offload_num_in_group": 2, "offload_prefetch_step": 2},
    {"offload_group_size": 1, "offload_params": ["mlp"]},
]


def hf_tokens(folder: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return [hf_greedy(model, prompt, max_tokens) for prompt in prompts]


@pytest.mark.thorough
def test_glass_in_every_placement(glass_model_dir: Path, single_thread: None) -> None:
    llm = open_llm(glass_model_dir)
    assert llm.max_model_len == 128
    prompts = [llm.tokenizer(text)["input_ids"] for text in TEXTS]  # type: ignore[misc]
    expected = hf_tokens(glass_model_dir, prompts, 10)
    llm.close()
    for keywords in PLACEMENTS:
        llm = open_llm(glass_model_dir, **keywords)
        outputs = llm.generate(TEXTS, greedy_params(10))
        assert [output.prompt_token_ids for output in outputs] == prompts
        assert tokens_of(outputs) == expected
        texts = [llm.tokenizer.decode(tokens) for tokens in expected]  # type: ignore[union-attr]
        assert [output.outputs[0].text for output in outputs] == texts
        assert greedy(llm, prompts[3:], 10) == expected[3:]
        llm.close()


@pytest.mark.slow
def test_glass_up_to_its_context(glass_model_dir: Path, single_thread: None) -> None:
    llm = open_llm(glass_model_dir, offload_group_size=1)
    prompts = [[5 + i % 1000 for i in range(length)] for length in (127, 120, 64)]
    outputs = llm.generate(prompts, greedy_params(200))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 8, 64]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    for prompt, tokens in zip(prompts, tokens_of(outputs), strict=True):
        assert [tokens] == hf_tokens(glass_model_dir, [prompt], len(tokens))
    [refused] = llm.generate([list(range(128))], greedy_params(1))
    assert "at most 127 tokens" in str(refused.error)
    llm.close()


@pytest.mark.weights
def test_smollm2_in_every_placement(smollm2_model_dir: Path, single_thread: None) -> None:
    sizes = {"gpu_memory_gib": 2.0, "max_model_len": 256, "max_num_batched_tokens": 128}
    llm = open_llm(smollm2_model_dir, **sizes)
    prompts = [llm.tokenizer(text)["input_ids"] for text in TEXTS]  # type: ignore[misc]
    expected = hf_tokens(smollm2_model_dir, prompts, 12)
    assert greedy(llm, prompts, 12) == expected
    llm.close()
    for keywords in PLACEMENTS[1:]:
        llm = open_llm(smollm2_model_dir, **sizes, **keywords)
        assert greedy(llm, prompts, 12) == expected
        llm.close()
