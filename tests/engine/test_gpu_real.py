"""On a GPU: real checkpoints in every placement, in batches that grow and shrink."""

from pathlib import Path
from typing import Any

import pytest

from catalogue.files import models_folder
from engine import LLM
from tests.engine.growth import LIMITS, Growth, check_composition, grow, some_eager
from tests.engine.test_gpu_equality import PLACEMENTS, captured
from tests.engine.test_real_models import TEXTS, hf_tokens
from tests.tiny import greedy, open_llm

pytestmark = pytest.mark.gpu

NAMES = (
    "resident, eager",
    "on demand, eager",
    "uva",
    "uva, staged from 3 tokens on",
    "embedding in place",
    "prefetch",
    "prefetch, two ahead",
    "prefetch, two of three",
    "uva of products, staged from 9 tokens on",
)


def open_real(folder: Path, dtype: str, **keywords: Any) -> LLM:
    sizes: dict[str, Any] = LIMITS | {"max_model_len": 128}
    return open_llm(folder, device="cuda", dtype=dtype, **(sizes | keywords))


def real_prompts(llm: LLM) -> list[list[int]]:
    """Seventeen prompts of 1 to 78 tokens, cut from the texts."""
    whole = [token for text in TEXTS * 8 for token in llm.tokenizer(text)["input_ids"]]  # type: ignore[misc]
    lengths = (5, 78, 3, 40, 1, 17, 33, 64, 9, 20, 31, 7, 25, 2, 16, 48, 11)
    return [whole[11 * at : 11 * at + length] for at, length in enumerate(lengths)]


def check_placements(folder: Path, dtype: str) -> Growth:
    """Every placement gives the tokens of everything resident; return these."""
    llm = open_real(folder, dtype)
    prompts, graphs = real_prompts(llm), llm.effective()["graphs"]
    expected = grow(llm, prompts)
    check_composition(expected, graphs)
    is_tied = llm.spec.tie_word_embeddings
    llm.close()
    for name in NAMES:
        if is_tied and name == "embedding in place":  # refused
            continue
        llm = open_real(folder, dtype, **PLACEMENTS[name])
        assert llm.effective()["graphs"] == captured(PLACEMENTS[name])
        assert grow(llm, prompts).tokens == expected.tokens, name
        with some_eager(llm, 0.5):
            assert grow(llm, prompts).tokens == expected.tokens, name
        if llm.plan.bytes_per_step() and name != "embedding in place":
            llm._engine.store._host_buffer.tensor.zero_()
            assert grow(llm, prompts).tokens != expected.tokens, name
        llm.close()
    return expected


def test_glass_in_float32_and_transformers(glass_model_dir: Path, single_thread: None) -> None:
    expected = check_placements(glass_model_dir, "float32")
    llm = open_real(glass_model_dir, "float32", offload_group_size=1)
    prompts = real_prompts(llm)
    for at in (0, 1, 8):
        count = len(expected.tokens[at])
        assert greedy(llm, [prompts[at]], count) == [expected.tokens[at]]
        assert hf_tokens(glass_model_dir, [prompts[at]], count) == [expected.tokens[at]]
    llm.close()


def test_glass_in_bfloat16(glass_model_dir: Path) -> None:
    check_placements(glass_model_dir, "bfloat16")


@pytest.mark.weights
@pytest.mark.skipif(
    not (models_folder() / "smollm2_135m" / "provenance.json").is_file(),
    reason="SmolLM2 is not on this machine",
)
def test_smollm2_in_bfloat16(smollm2_model_dir: Path) -> None:
    check_placements(smollm2_model_dir, "bfloat16")
