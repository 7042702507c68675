"""On a GPU: weights of 4 bits in every place have the tokens of a resident engine."""

from pathlib import Path
from typing import Any

import pytest

from engine import LLM
from tests.engine.growth import (
    GRAPHS,
    LIMITS,
    Growth,
    check_composition,
    grow,
    make_prompts,
    some_eager,
)
from tests.engine.placements import check_decode_bytes
from tests.engine.quantised import SIZES, awq, write
from tests.engine.test_gpu_equality import ALL_UVA, captured
from tests.tiny import make_prompt, open_llm

pytestmark = pytest.mark.gpu

LAYERS = 5
PLACES: dict[str, dict[str, Any]] = {
    "uva": ALL_UVA,
    "uva, never staged": ALL_UVA | {"uva_stage_tokens": 97},
    "uva, staged": ALL_UVA | {"uva_stage_tokens": 1},
    "uva, staged, eager": ALL_UVA | {"uva_stage_tokens": 1, "enforce_eager": True},
    "uva, staged from 3 tokens on": ALL_UVA | {"uva_stage_tokens": 3},
    "uva of products, staged": ALL_UVA
    | {"cpu_offload_params": ["mlp.down_proj", "q_proj"], "uva_stage_tokens": 1},
    "uva of two layers, staged": ALL_UVA
    | {"cpu_offload_params": ["layers.1", "layers.3"], "uva_stage_tokens": 1},
    "prefetch": {"offload_group_size": 1},
}
PROMPTS = make_prompts(SIZES["vocab_size"])


class Quantised:
    """Engines with a checkpoint of AWQ, and what the resident one gives."""

    def __init__(self, folder: Path) -> None:
        sizes = {"num_hidden_layers": LAYERS, "initializer_range": 0.15}
        self._folder = write(folder, awq(64), dtype="float16", **sizes)[0]
        llm = self.open()
        assert llm.plan.formats.others
        self.expected: Growth = grow(llm, PROMPTS)
        check_composition(self.expected, GRAPHS)
        assert len({token for tokens in self.expected.tokens for token in tokens}) > 10
        llm.close()

    def open(self, **keywords: Any) -> LLM:
        return open_llm(
            self._folder, **({"device": "cuda", "dtype": "float16"} | LIMITS | keywords)
        )


@pytest.fixture(scope="module")
def engines(single_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Quantised:
    return Quantised(tmp_path_factory.mktemp("awq"))


@pytest.mark.parametrize("place", PLACES)
def test_tokens_are_those_of_everything_resident(engines: Quantised, place: str) -> None:
    """Also with every second graph replaced by eager steps, and with a control: other weights."""
    keywords = PLACES[place]
    llm = engines.open(**keywords)
    graphs = llm.effective()["graphs"]
    assert graphs == captured(keywords)
    check_decode_bytes(llm, make_prompt(5, vocab=SIZES["vocab_size"]))
    found = grow(llm, PROMPTS)
    assert found.tokens == engines.expected.tokens
    check_composition(found, graphs)
    if graphs:
        with some_eager(llm, 0.5):
            found = grow(llm, PROMPTS)
        assert found.tokens == engines.expected.tokens
        assert found.num_eager > 0
    assert (llm.stats()["in_place_bytes"] == 0) == (
        "staged" in place.split(", ")[1:] or place == "prefetch"
    )
    assert llm._engine is not None
    llm._engine.store._host_buffer.tensor.zero_()
    changed = grow(llm, PROMPTS).tokens != engines.expected.tokens
    assert changed == (place != "uva of two layers, staged")  # whose slots hold them for good
    llm.close()
