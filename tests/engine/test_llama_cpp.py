"""GGUF files in llama.cpp and here: the same log-probabilities, up to how each of them rounds."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from engine import SamplingParams
from tests.engine.gguf_files import WIDE, Kind, write_gguf
from tests.engine.test_gguf import GEMMA_SIZES, SCALED, mix, with_words
from tests.tiny import open_llm

NUM_WORDS = 104
"""Tokens of the vocabulary that `with_words` writes."""
LENGTHS = (3, 30)
NUM_TOKENS = 12
pytestmark = pytest.mark.slow


def answers_of_llama_cpp(file: Path, prompts: list[list[int]]) -> list[list[dict[str, Any]]]:
    """Return greedy tokens with their log-probabilities; keys and values are float32."""
    library = pytest.importorskip("xllamacpp", reason="llama.cpp, where it is installed")
    params = library.CommonParams()
    params.model.path, params.n_ctx, params.cpuparams.n_threads = str(file), 256, 1
    params.flash_attn_type = library.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = library.ggml_type.GGML_TYPE_F32
    server = library.Server(params)
    found = []
    for prompt in prompts:
        asked = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": 1}
        answer = server.handle_completions(asked | {"ignore_eos": True})
        found.append(answer["choices"][0]["logprobs"]["content"])
    return found


def differences(file: Path) -> list[float]:
    """Return how far log-probabilities of llama.cpp's tokens are from those here."""
    prompts = [[3 + (7 * at * at + length) % 96 for at in range(length)] for length in LENGTHS]
    theirs = answers_of_llama_cpp(file, prompts)
    found = []
    with open_llm(file, dtype="float32", max_model_len=128) as llm:
        for prompt, answer in zip(prompts, theirs, strict=True):
            tokens = [each["id"] for each in answer]
            assert len(tokens) == NUM_TOKENS
            params = SamplingParams(max_tokens=1, prompt_logprobs=0)
            [output] = llm.generate([[*prompt, *tokens]], params)
            assert output.prompt_logprobs is not None
            for each, here in zip(answer, output.prompt_logprobs[len(prompt) :], strict=True):
                assert here is not None
                found.append(abs(here[each["id"]] - each["logprob"]))
    return found


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("llama", {}),
        ("llama_biases", {}),
        ("llama_llama3_rope", {"rope_parameters": SCALED}),
        ("llama_linear_rope", {}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("gemma3", GEMMA_SIZES),
    ],
    ids=str,
)
def test_every_family_in_float32(variant: str, changes: dict[str, Any], tmp_path: Path) -> None:
    sizes = changes | {"vocab_size": NUM_WORDS}
    file, _, _ = write_gguf(tmp_path, variant, lambda _: Kind.F32, change=with_words(), **sizes)
    assert max(differences(file)) < 2e-3


@pytest.mark.parametrize(
    "kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]
)
def test_every_type_up_to_activations_of_8_bits(kind: Kind, tmp_path: Path) -> None:
    """llama.cpp rounds the inputs of products with quantised weights to 8 bits."""
    sizes = WIDE | {"vocab_size": NUM_WORDS}
    file, _, _ = write_gguf(tmp_path, "llama", lambda _: kind, change=with_words(), **sizes)
    assert fmean(differences(file)) < 0.1


def test_a_mix_of_types(tmp_path: Path) -> None:
    sizes = WIDE | {"vocab_size": NUM_WORDS}
    file, _, _ = write_gguf(tmp_path, "llama", mix, change=with_words(), **sizes)
    assert fmean(differences(file)) < 0.1
