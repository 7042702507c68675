"""On a GPU: families against transformers, sizes of chunks and blocks, dtypes."""

from typing import Any

import pytest

from engine import LLM
from tests.engine.conftest import TinyModels
from tests.tiny import VARIANTS, greedy, greedy_params, make_prompt, open_llm, tokens_of

pytestmark = pytest.mark.gpu

PROMPTS = [make_prompt(length) for length in (1, 7, 33, 250, 1000)]
SHORT = [make_prompt(length, seed=4) for length in (1, 5, 19, 34, 70)]
MAX_TOKENS = 10


def open_gpu(folder: Any, **keywords: Any) -> LLM:
    return open_llm(folder, **({"device": "cuda"} | keywords))


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_tokens_equal_transformers_on_the_cpu(tiny: TinyModels, variant: str) -> None:
    expected = tiny.greedy(variant, PROMPTS, MAX_TOKENS)
    llm = open_gpu(tiny.folder(variant))
    assert llm.effective()["emulated"] is False
    assert llm.effective()["graphs"] == [1, 2, 4, 8]
    assert greedy(llm, PROMPTS, MAX_TOKENS) == expected
    assert [greedy(llm, [prompt], MAX_TOKENS)[0] for prompt in PROMPTS] == expected
    assert llm.stats()["graph_steps"] > 0
    llm.close()


def test_chunks_and_block_sizes(tiny: TinyModels) -> None:
    prompts = [*SHORT, PROMPTS[4]]
    expected = tiny.greedy("olmo2", prompts, 6)
    for block_size, num_tokens in ((8, 40), (32, 100), (128, 512)):
        llm = open_gpu(
            tiny.folder("olmo2"), block_size=block_size, max_num_batched_tokens=num_tokens
        )
        assert greedy(llm, prompts, 6) == expected, (block_size, num_tokens)
        llm.close()


def test_the_dtype_of_the_checkpoint_is_used(tiny: TinyModels) -> None:
    llm = open_gpu(tiny.folder("qwen2"), dtype="auto")
    assert llm.effective()["dtype"] == "float32"
    llm.close()
    for dtype in ("bfloat16", "float16"):
        llm = open_gpu(tiny.folder("qwen2"), dtype=dtype)
        first = tokens_of(llm.generate(SHORT, greedy_params(5)))
        assert tokens_of(llm.generate(SHORT, greedy_params(5))) == first
        llm.close()
