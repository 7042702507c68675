"""On a GPU: families against transformers, placements against resident, graphs against eager."""

from typing import Any

import pytest

from engine import LLM
from tests.engine.conftest import TinyModels
from tests.engine.placements import OFFLOADS, check_decode_bytes
from tests.tiny import (
    VARIANTS,
    greedy,
    greedy_params,
    make_prompt,
    open_llm,
    tokens_of,
)

pytestmark = pytest.mark.gpu

PROMPTS = [make_prompt(length) for length in (1, 7, 33, 250, 1000)]
SHORT = [make_prompt(length, seed=4) for length in (1, 5, 19, 34, 70)]
MAX_TOKENS = 10
FEW = ("uva of some, staged", "uva of products", "prefetch of products")


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_placement_equals_resident(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    folder = tiny.folder("llama", num_hidden_layers=5)
    resident = open_gpu(folder, dtype=dtype)
    expected = greedy(resident, SHORT, MAX_TOKENS)
    resident.close()
    for name, keywords in OFFLOADS.items():
        llm = open_gpu(folder, dtype=dtype, **keywords)
        assert greedy(llm, SHORT, MAX_TOKENS) == expected, name
        check_decode_bytes(llm, SHORT[1])
        assert greedy(llm, SHORT, MAX_TOKENS) == expected, name
        llm.close()
    reference = open_gpu(folder, dtype=dtype, reference=True, offload_group_size=2)
    assert greedy(reference, SHORT, MAX_TOKENS) == expected
    assert reference.stats()["graph_steps"] == 0
    reference.close()
    for switch, memory in (("UVA", "pinned"), ("PIN_MEMORY", "pageable")):
        monkeypatch.setenv(f"TIGHTFIT_DISABLE_{switch}", "1")
        for params in ([], ["mlp", "embed_tokens", "lm_head", "model.norm"]):
            llm = open_gpu(folder, dtype=dtype, cpu_offload_gb=1, cpu_offload_params=params)
            assert llm.effective()["fallbacks"]
            assert llm.effective()["graphs"] == ([1, 2, 4, 8] if switch == "UVA" else [])
            assert llm.memory()[f"host_{memory}_bytes"] > 0
            assert greedy(llm, SHORT, MAX_TOKENS) == expected, switch
            check_decode_bytes(llm, SHORT[1])
            assert llm.stats()["in_place_bytes"] == 0
            llm.close()


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "olmo2"])
def test_placements_of_other_families_in_bfloat16(tiny: TinyModels, family: str) -> None:
    folder = tiny.folder(family)
    resident = open_gpu(folder, dtype="bfloat16")
    expected = greedy(resident, SHORT, MAX_TOKENS)
    resident.close()
    for name in FEW:
        llm = open_gpu(folder, dtype="bfloat16", **OFFLOADS[name])
        assert greedy(llm, SHORT, MAX_TOKENS) == expected, name
        llm.close()


def test_outer_tensors_are_read_in_place(tiny: TinyModels) -> None:
    folder = tiny.folder("llama", num_hidden_layers=5)
    outer = ["embed_tokens", "lm_head", "model.norm"]
    llm = open_gpu(folder, cpu_offload_gb=1, cpu_offload_params=outer)
    assert greedy(llm, SHORT, 5) == tiny.greedy("llama", SHORT, 5, num_hidden_layers=5)
    check_decode_bytes(llm, SHORT[0])
    llm.close()


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 7])
def test_prefetch_with_odd_splits(tiny: TinyModels, layers: int) -> None:
    """Groups, numbers and steps that do not divide each other, in graphs and in eager steps."""
    folder = tiny.folder("llama", num_hidden_layers=layers)
    expected = tiny.greedy("llama", SHORT[1:3], 6, num_hidden_layers=layers)
    group = min(3, layers)
    for number, (size, num, step) in enumerate(
        ((1, 1, 1), (1, 1, 2), (1, 1, layers + 2), (group, max(1, group - 1), 1), (layers, 1, 3))
    ):
        llm = open_gpu(
            folder,
            max_num_seqs=2,
            offload_group_size=size,
            offload_num_in_group=num,
            offload_prefetch_step=step,
            enforce_eager=number % 2 == 1,
        )
        assert greedy(llm, SHORT[1:3], 6) == expected, (size, num, step)
        check_decode_bytes(llm, SHORT[0])
        assert greedy(llm, SHORT[1:3], 6) == expected, (size, num, step)
        llm.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("keywords", [{}, {"offload_group_size": 1}, {"cpu_offload_gb": 1}])
def test_graph_and_eager_agree_at_every_batch_size(
    tiny: TinyModels, keywords: dict[str, Any], dtype: str
) -> None:
    """Eleven sequences end one after the other, so that steps cross all captured sizes."""
    prompts = [make_prompt(length, seed=5) for length in range(3, 36, 3)]
    params = [greedy_params(count) for count in range(2, 24, 2)]
    found, sizes = [], set()
    for eager in (False, True):
        llm = open_gpu(
            tiny.folder("qwen3"), dtype=dtype, max_num_seqs=11, enforce_eager=eager, **keywords
        )
        assert llm.effective()["graphs"] == ([] if eager else [1, 2, 4, 8, 16])
        for prompt, each in zip(prompts, params, strict=True):
            llm.add_request(prompt, each)
        tokens: dict[str, list[int]] = {}
        while llm.has_unfinished():
            for event in llm.step():
                tokens.setdefault(event.request_id, []).append(event.token_id)
            step = llm.last_step
            assert step is not None
            assert step.used_graph is (not eager and step.num_prefills == 0)
            if step.num_prefills == 0:
                sizes.add(step.num_decodes)
        found.append(list(tokens.values()))
        llm.close()
    assert found[0] == found[1]
    assert sizes >= {1, 2, 4, 5, 8, 9, 10}
    if dtype == "float32":
        expected = tiny.greedy("qwen3", prompts, 22)
        assert found[0] == [e[: len(f)] for e, f in zip(expected, found[0], strict=True)]


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
