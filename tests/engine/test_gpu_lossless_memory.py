"""On a GPU: what steps with weights in codes take of its memory. Run in a process of their own."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM
from tests.engine.test_gpu_memory import GIB, LARGE, MIB
from tests.tiny import greedy, make_prompt, open_llm

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


@pytest.fixture(scope="module")
def large(single_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes of a model of which one matrix is 64 MiB, restored."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(LARGE))
    return folder


def open_large(folder: Path, weight_format: str = "lossless", **keywords: Any) -> LLM:
    asked = {"device": "cuda", "dtype": "bfloat16", "load_format": "dummy", "max_num_seqs": 8}
    asked |= {"max_num_batched_tokens": 1024, "max_model_len": 1100, "gpu_memory_gib": 6.0}
    return open_llm(folder, weight_format=weight_format, **asked | keywords)


LONG = [make_prompt(length, seed=7, vocab=32000) for length in (65, 200, 1000)]
HOST: list[dict[str, Any]] = [
    {},
    {"enforce_eager": True},
    {"cpu_offload_gb": 2},
    {"cpu_offload_gb": 2, "uva_stage_tokens": 2000},
    {"offload_group_size": 1},
    {"offload_group_size": 1, "offload_prefetch_step": 3},
]


def grown_bytes(llm: LLM, prompt: list[int]) -> int:
    """Return the most memory that a request takes beside what is there before."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    greedy(llm, [prompt], 3)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("keywords", HOST, ids=str)
def test_restored_prefills_stay_within_the_plan(large: Path, keywords: dict[str, Any]) -> None:
    """Nothing is left beside the plan, and no step allocates more than with plain weights."""
    llm = open_large(large, "checkpoint", **keywords)
    expected = [greedy(llm, [prompt], 8) for prompt in LONG]
    plain_bytes = [grown_bytes(llm, prompt) for prompt in LONG]
    llm.close()
    llm = open_large(large, **keywords)
    planned, share = llm.plan.gpu_total_bytes, llm.memory()["gpu_budget_bytes"] / (6 * GIB)
    assert llm.plan.gpu_items["restore"] >= 64 * MIB
    llm.close()
    llm = open_large(large, **keywords, gpu_memory_gib=(planned + MIB) / GIB / share)
    for prompt, tokens in zip(LONG, expected, strict=True):
        assert greedy(llm, [prompt], 8) == tokens
    greedy(llm, [prompt[:300] for prompt in LONG], 8)
    memory = llm.memory()
    assert memory["gpu_peak_bytes"] <= memory["gpu_budget_bytes"]
    for prompt, most in zip(LONG, plain_bytes, strict=True):
        assert grown_bytes(llm, prompt) <= most + MIB
    llm.close()


def test_only_steps_of_more_than_64_tokens_restore(large: Path) -> None:
    llm = open_large(large)
    restored = llm._engine.store._restored
    assert restored is not None
    assert restored.numel() == llm.plan.gpu_items["restore"]
    restored.zero_()
    greedy(llm, [LONG[0][:16]], 3)  # padded to 16 prompt tokens beside 8 that decode
    assert int(restored.count_nonzero()) == 0
    greedy(llm, LONG[:1], 1)
    assert int(restored.count_nonzero()) > MIB
    llm.close()


def test_engines_that_follow_each_other_give_all_back(large: Path) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    expected = None
    for weight_format, keywords in (
        ("checkpoint", {}),
        ("lossless", {}),
        ("lossless", {"offload_group_size": 2}),
        ("lossless", {"cpu_offload_gb": 2}),
        ("checkpoint", {}),
    ):
        llm = open_large(large, weight_format, **keywords)
        tokens = greedy(llm, LONG, 4)
        expected = expected or tokens
        assert tokens == expected
        assert torch.cuda.memory_allocated() > before + 250 * MIB
        llm.close()
        del llm
        gc.collect()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() <= before + 128 * MIB
        assert torch.cuda.mem_get_info()[0] >= free - 512 * MIB
