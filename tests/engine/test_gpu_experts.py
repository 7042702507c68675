"""On a GPU: mixtures of experts in bfloat16, by residence, format and batch."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import TinyModels
from tests.tiny import greedy, make_prompt, open_llm

pytestmark = pytest.mark.gpu

PROMPTS = [make_prompt(length, seed=6) for length in (1, 5, 33, 70, 200, 600)]
SIZES = {"hidden_size": 128, "moe_intermediate_size": 64, "num_experts": 16}
"""Sizes that fill the tiles of the kernel for few tokens."""
WAYS: dict[str, dict[str, Any]] = {
    "uva": {"cpu_offload_gb": 1.0},
    "uva_experts": {"cpu_offload_gb": 1.0, "cpu_offload_params": {"experts"}},
    "prefetch_experts": {"offload_group_size": 1, "offload_params": {"experts"}},
    "on_demand": {"reference": True},
    "lossless": {"weight_format": "lossless"},
    "lossless_uva": {"weight_format": "lossless", "cpu_offload_gb": 1.0},
}


@pytest.fixture(params=["qwen3_moe", "qwen2_moe"])
def folder(request: pytest.FixtureRequest, tiny: TinyModels) -> Path:
    return tiny.folder(request.param, **SIZES)


@pytest.mark.parametrize("way", WAYS)
def test_tokens_do_not_depend_on_place_or_format(folder: Path, way: str) -> None:
    given = {"device": "cuda", "dtype": "bfloat16", "max_num_batched_tokens": 256}
    llm = open_llm(folder, **given)
    expected = greedy(llm, PROMPTS, 12)
    llm.close()
    llm = open_llm(folder, **given, **WAYS[way])
    assert greedy(llm, PROMPTS, 12) == expected
    assert (llm.stats()["graph_steps"] > 0) is ("reference" not in WAYS[way])
    llm.close()


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_rounded_experts_in_place_give_the_tokens_of_resident_ones(
    folder: Path, quantize: str
) -> None:
    given = {"device": "cuda", "dtype": "bfloat16", "quantize": quantize}
    tokens = []
    for way in ({}, WAYS["uva_experts"]):
        llm = open_llm(folder, **given, **way)
        tokens.append(greedy(llm, PROMPTS, 12))
        llm.close()
    assert tokens[0] == tokens[1]


def test_a_sequence_has_its_tokens_in_every_batch_of_decodes(folder: Path) -> None:
    llm = open_llm(folder, device="cuda", dtype="bfloat16", max_num_seqs=16)
    prompts = [make_prompt(length, seed=7) for length in range(3, 19)]
    together = greedy(llm, prompts, 24)
    assert greedy(llm, prompts[:7], 24) == together[:7]
    llm.close()
