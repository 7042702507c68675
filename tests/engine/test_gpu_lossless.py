"""On a GPU: weights in codes give the tokens of plain ones: graphs, batches, placements, memory."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine import LLM
from engine.plan import planner
from engine.plan.units import PREFETCH, UVA
from engine.weights import reader
from tests.engine import growth
from tests.engine.coded import Checkpoints, change_checkpoint, check_weights, corrupt
from tests.engine.growth import GRAPHS, LAYERS, Growth, check_composition, grow, some_eager
from tests.engine.placements import check_decode_bytes
from tests.engine.switches import PREFIX, SWITCHES, check_fallbacks
from tests.engine.test_gpu_equality import ALL_UVA, PLACEMENTS, captured
from tests.engine.test_gpu_memory import LARGE
from tests.engine.test_lossless import FINITE, OTHER, put_bits
from tests.engine.test_mixed_placements import patchwork
from tests.tiny import FAMILIES, make_prompt, open_llm

pytestmark = pytest.mark.gpu

PLACES = [
    "resident, eager",
    "uva of some",
    "uva",
    "uva, eager",
    "uva, never staged",
    "uva, staged",
    "uva, staged from 3 tokens on",
    "uva of products, staged from 9 tokens on",
    "embedding, head, norms and more in place",
    "prefetch",
    "prefetch, eager",
    "prefetch, two ahead",
    "prefetch, two of three",
    "prefetch of layers of different sizes",
]
FEW = ("resident, eager", "uva", "uva, never staged", "prefetch, two ahead")
WAVES = (1, 1, 2, 4, 8, 16, 16, 22)
"""Requests that arrive together, 70 in all."""
ARRIVALS = [wave for wave, count in enumerate(WAVES) for _ in range(count)]
TOKENS = [50 + (70 - at) // 4 - growth.STEPS * wave for at, wave in enumerate(ARRIVALS)]
"""So that some end in every step once all 70 run."""
LENGTHS = [1 + 11 * at % 60 for at in range(70)]
MANY: dict[str, Any] = {"max_num_seqs": 70, "max_num_batched_tokens": 256}
LIMITS = growth.LIMITS | {"dtype": "bfloat16", "device": "cuda"}


def prompts_of(lengths: Sequence[int], vocab: int = 151) -> list[list[int]]:
    return [make_prompt(length, seed=40 + at, vocab=vocab) for at, length in enumerate(lengths)]


class Loads:
    """Engines on a GPU with models of five layers, and what resident plain weights give."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._expected: dict[str, Growth] = {}
        self.prompts = prompts_of(growth.LENGTHS)

    def folder(self, family: str = "llama") -> Path:
        return self._checkpoints.folder(family, num_hidden_layers=LAYERS)

    def open(self, family: str = "llama", **keywords: Any) -> LLM:
        return self._checkpoints.open(self.folder(family), **keywords)

    def expected(self, family: str = "llama") -> Growth:
        """What plain weights on the GPU give."""
        if family not in self._expected:
            llm = self.open(family, weight_format="checkpoint")
            assert not llm.plan.formats.others
            found = grow(llm, self.prompts)
            check_composition(found, GRAPHS)
            assert len({token for tokens in found.tokens for token in tokens}) > 10
            llm.close()
            self._expected[family] = found
        return self._expected[family]


@pytest.fixture(scope="module")
def loads(single_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Loads:
    return Loads(Checkpoints(tmp_path_factory.mktemp("coded"), **LIMITS))


@pytest.mark.parametrize("place", ["resident", *PLACES])
def test_tokens_are_those_of_plain_weights(loads: Loads, place: str) -> None:
    """In graphs, in eager steps among them, and with a control: one wrong escape."""
    expected, keywords = loads.expected(), PLACEMENTS.get(place, {})
    llm = loads.open(**keywords)
    graphs = llm.effective()["graphs"]
    assert graphs == captured(keywords)
    assert llm.plan.formats.others
    check_weights(llm, loads.folder())
    check_decode_bytes(llm, make_prompt(5))
    found = grow(llm, loads.prompts)
    assert found.tokens == expected.tokens
    check_composition(found, graphs)
    if graphs:
        with some_eager(llm, 0.5):
            found = grow(llm, loads.prompts)
        assert found.tokens == expected.tokens
        assert found.num_graphs > 0
        assert found.num_eager > 0
    memory = llm.memory()
    assert memory["gpu_peak_bytes"] <= memory["gpu_budget_bytes"]
    assert memory["host_pinned_bytes"] == llm.plan.host_items["pinned_weights"]
    corrupt(llm)
    assert grow(llm, loads.prompts).tokens != expected.tokens
    llm.close()


@pytest.mark.parametrize("family", [*FAMILIES, "llama_biases", "llama_odd_sizes"])
def test_every_family(loads: Loads, family: str) -> None:
    expected = loads.expected(family).tokens
    for place in ("resident", *FEW):
        llm = loads.open(family, **PLACEMENTS.get(place, {}))
        assert llm.plan.formats.others
        check_weights(llm, loads.folder(family))
        with some_eager(llm, 0.3):
            assert grow(llm, loads.prompts).tokens == expected, place
        llm.close()


@pytest.mark.parametrize("stage_tokens", [9, 97], ids=["staged", "never staged"])
def test_a_layer_holds_units_of_every_residence(
    loads: Loads, monkeypatch: pytest.MonkeyPatch, stage_tokens: int
) -> None:
    expected = loads.expected().tokens
    monkeypatch.setattr(planner, "assign", lambda spec, *_: patchwork(spec))
    llm = loads.open(uva_stage_tokens=stage_tokens)
    for num_tokens in (1, 64):
        check_weights(llm, loads.folder(), num_tokens)
    for share in (0.0, 0.5):
        with some_eager(llm, share):
            assert grow(llm, loads.prompts).tokens == expected, share
    llm.close()


@pytest.mark.parametrize("place", ["uva", "prefetch"])
@pytest.mark.parametrize("switches", SWITCHES[1:], ids=str)
def test_switches_of_host_memory(
    loads: Loads, monkeypatch: pytest.MonkeyPatch, switches: tuple[str, ...], place: str
) -> None:
    expected = loads.expected().tokens
    for switch in switches:
        monkeypatch.setenv(f"{PREFIX}{switch}", "1")
    llm = loads.open(**PLACEMENTS[place])
    lost = {UVA if place == "uva" else PREFETCH}
    if switches == ("UVA",):
        lost -= {PREFETCH}
    check_fallbacks(llm.effective()["fallbacks"], switches, lost)
    graphs = llm.effective()["graphs"]
    assert graphs == ([] if "PIN_MEMORY" in switches else GRAPHS)
    check_weights(llm, loads.folder())
    for share in (0.0, 0.5) if graphs else (0.0,):
        with some_eager(llm, share):
            assert grow(llm, loads.prompts).tokens == expected, share
    assert llm.stats()["in_place_bytes"] == 0
    corrupt(llm)
    assert grow(llm, loads.prompts).tokens != expected
    llm.close()


@pytest.mark.parametrize("place", ["resident", *FEW])
def test_weights_of_every_kind_are_restored_to_the_bit(
    loads: Loads, tmp_path: Path, place: str
) -> None:
    change = put_bits(FINITE + OTHER)
    folder = change_checkpoint(loads.folder(), tmp_path / "every", change)
    llm = open_llm(folder, **LIMITS | {"weight_format": "lossless"} | PLACEMENTS.get(place, {}))
    for num_tokens in (1, 64):
        check_weights(llm, folder, num_tokens)
    llm.close()


# Batches of 1 to 70, products of every shape.


def surge(llm: LLM, vocab: int) -> Growth:
    found = grow(llm, prompts_of(LENGTHS, vocab), TOKENS, WAVES)
    assert found.batches >= {1, 2, 4, 8, 16, 32, 70}
    assert len([size for size in found.batches if size > 32]) > 3
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_batches_of_1_to_70(loads: Loads, family: str) -> None:
    """The head too restores its weight in one call for more than 64 sequences."""
    expected = None
    for place in ("plain", "resident", *FEW):
        keywords = PLACEMENTS.get(place, {}) | MANY
        weight_format = "checkpoint" if place == "plain" else "lossless"
        llm = loads.open(family, weight_format=weight_format, **keywords)
        assert bool(llm.plan.formats.others) is (place != "plain")
        for share in (0.0, 0.3) if llm.effective()["graphs"] else (0.0,):
            with some_eager(llm, share):
                tokens = surge(llm, 151).tokens
            expected = expected or tokens
            assert tokens == expected, (place, share)
        if place == "resident":
            corrupt(llm)
            assert surge(llm, 151).tokens != expected
        llm.close()


SIZES = {
    128: {"intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 512},
    256: {"intermediate_size": 832, "num_attention_heads": 4, "vocab_size": 1024},
    1024: {"intermediate_size": 5120, "num_attention_heads": 8, "vocab_size": 32000},
}
"""The last has products of few rows and of many, which take other kernels on Hopper."""


@pytest.mark.parametrize("hidden_size", SIZES)
def test_larger_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden_size: int) -> None:
    monkeypatch.setattr(reader, "DUMMY_STD", 0.1)
    sizes: dict[str, Any] = LARGE | {"hidden_size": hidden_size, "num_hidden_layers": 4}
    sizes |= SIZES[hidden_size]
    sizes["num_key_value_heads"] = sizes["num_attention_heads"] // 2
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    expected, vocab = None, sizes["vocab_size"]  # one layer more than slots: each is copied anew
    for place in ("plain", "resident", *FEW):
        keywords = LIMITS | MANY | PLACEMENTS.get(place, {}) | {"load_format": "dummy"}
        weight_format = "checkpoint" if place == "plain" else "lossless"
        llm = open_llm(tmp_path, weight_format=weight_format, **keywords)
        tokens = surge(llm, vocab).tokens
        if expected is None:
            assert len({token for each in tokens for token in each}) > 20
        expected = expected or tokens
        assert tokens == expected, place
        if place != "plain" and hidden_size == max(SIZES):  # normal weights: escapes are rare
            corrupt(llm)
            assert surge(llm, vocab).tokens != expected, place
        llm.close()


def test_two_engines_in_one_process(loads: Loads) -> None:
    first, second = loads.open(**ALL_UVA), loads.open("qwen2", offload_group_size=1)
    for llm, family in ((first, "llama"), (second, "qwen2"), (first, "llama")):
        assert grow(llm, loads.prompts).tokens == loads.expected(family).tokens
    first.close()
    assert grow(second, loads.prompts).tokens == loads.expected("qwen2").tokens
    second.close()
