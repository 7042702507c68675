"""On a GPU: placements x graphs and eager steps x batches that grow and shrink: the same tokens."""

from typing import Any

import pytest
import torch

from engine.plan import planner
from engine.plan.units import UVA
from engine.run.executor import DeviceExecutor
from engine.weights import reader
from tests.engine.conftest import TinyModels
from tests.engine.groups import with_blocks
from tests.engine.growth import GRAPHS, TOKENS, Growths, check_composition, grow, some_eager
from tests.engine.placements import GIB, check_decode_bytes
from tests.engine.test_mixed_placements import EMBED, HEAD, mixed
from tests.tiny import FAMILIES, greedy, make_prompt

pytestmark = pytest.mark.gpu

DTYPES = ["float32", "bfloat16"]
ALL_UVA = {"cpu_offload_gb": 1}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "resident, eager": {"enforce_eager": True},
    "on demand, eager": {"reference": True},
    "uva of some": {"cpu_offload_gb": 150_000 / GIB},
    "uva": ALL_UVA,
    "uva, eager": ALL_UVA | {"enforce_eager": True},
    "uva, never staged": ALL_UVA | {"uva_stage_tokens": 97},
    "uva, staged": ALL_UVA | {"uva_stage_tokens": 1},
    "uva, staged from 3 tokens on": ALL_UVA | {"uva_stage_tokens": 3},
    "uva of products, staged from 9 tokens on": {
        "cpu_offload_gb": 1,
        "cpu_offload_params": ["mlp.down_proj", "q_proj", "input_layernorm"],
        "uva_stage_tokens": 9,
    },
    "embedding in place": ALL_UVA | {"cpu_offload_params": ["embed_tokens"]},
    "embedding, head, norms and more in place": ALL_UVA
    | {"cpu_offload_params": ["embed_tokens", "lm_head", "norm", "layers.1", "o_proj"]},
    "prefetch": {"offload_group_size": 1},
    "prefetch, eager": {"offload_group_size": 1, "enforce_eager": True},
    "prefetch, two ahead": {"offload_group_size": 1, "offload_prefetch_step": 2},
    "prefetch, more ahead than layers": {"offload_group_size": 1, "offload_prefetch_step": 7},
    "prefetch, two of three": {
        "offload_group_size": 3,
        "offload_num_in_group": 2,
        "offload_prefetch_step": 1,
    },
    "prefetch, a group larger than the model": {
        "offload_group_size": 9,
        "offload_num_in_group": 8,
        "offload_prefetch_step": 3,
    },
    "prefetch of layers of different sizes": {
        "offload_group_size": 1,
        "offload_params": ["layers.0.mlp", "layers.2.self_attn.o_proj", "layers.3", "layers.4.mlp"],
    },
}
FEW = (
    "uva",
    "uva, staged from 3 tokens on",
    "prefetch, two ahead",
    "prefetch of layers of different sizes",
)


@pytest.fixture(scope="module")
def growths(tiny: TinyModels) -> Growths:
    return Growths(tiny)


def captured(keywords: dict[str, Any]) -> list[int]:
    """Return the batches that must run as graphs."""
    if keywords.get("enforce_eager") or keywords.get("reference"):
        return []
    staged_from = keywords.get("uva_stage_tokens", 65)
    return [size for size in GRAPHS if staged_from == 1 or size < staged_from]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PLACEMENTS)
def test_tokens_are_those_of_everything_resident(growths: Growths, name: str, dtype: str) -> None:
    """Where a step has a graph, also with every second one of them replaced by eager steps."""
    expected, keywords = growths.expected(dtype=dtype), PLACEMENTS[name]
    llm = growths.open(dtype=dtype, **keywords)
    graphs = llm.effective()["graphs"]
    assert graphs == captured(keywords)
    check_decode_bytes(llm, make_prompt(5))
    found = grow(llm, growths.prompts)
    assert found.tokens == expected.tokens
    check_composition(found, graphs)
    if graphs:
        with some_eager(llm, 0.5):
            found = grow(llm, growths.prompts)
        assert found.tokens == expected.tokens
        assert found.num_graphs > 0
        assert found.num_eager > 0
    llm.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outer", "count", "lookahead"), [((EMBED,), 4, 1), ((EMBED, HEAD), 5, 2)])
def test_an_embedding_in_place_beside_copied_layers(
    growths: Growths,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    outer: tuple[str, ...],
    count: int,
    lookahead: int,
) -> None:
    expected = growths.expected(dtype=dtype)
    monkeypatch.setattr(planner, "assign", lambda spec, *_: mixed(spec, outer, count, lookahead))
    llm = growths.open(dtype=dtype)
    assert all(llm.plan.placements[name] is UVA for name in outer)
    assert llm.plan.placed_bytes()["prefetch"] > 0
    for share in (0.0, 0.5):
        with some_eager(llm, share):
            assert grow(llm, growths.prompts).tokens == expected.tokens
    llm.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_of_every_family(
    growths: Growths, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str
) -> None:
    """And a control: other weights in host memory give other tokens."""
    # As small as usual, layers this narrow add so little that a tied table repeats its token.
    monkeypatch.setattr(reader, "DUMMY_STD", 0.15)
    sizes = {"dtype": dtype, "load_format": "dummy"}
    expected = growths.expected(family, **sizes).tokens
    assert len({token for tokens in expected for token in tokens}) > 20
    for name in FEW:
        llm = growths.open(family, **sizes, **PLACEMENTS[name])
        with some_eager(llm, 0.3):
            assert grow(llm, growths.prompts).tokens == expected, name
        llm._engine.store._host_buffer.tensor.zero_()
        assert grow(llm, growths.prompts).tokens != expected, name
        llm.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_preemption_by_a_small_pool(
    growths: Growths, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """In float32 the tokens are those of requests alone."""
    prompts = [prompt[:12] for prompt in growths.prompts]
    resident = growths.open(dtype=dtype)
    alone = [greedy(resident, [prompts[at]], TOKENS[at])[0] for at in range(17)]
    resident.close()
    with_blocks(monkeypatch, 30)
    expected = alone if dtype == "float32" else None
    for keywords in ({}, *(PLACEMENTS[name] for name in FEW)):
        llm = growths.open(dtype=dtype, block_size=8, **keywords)
        for share in (0.0, 0.5):
            with some_eager(llm, share):
                tokens = grow(llm, prompts).tokens
            expected = expected or tokens
            assert tokens == expected, keywords
        assert llm.stats()["preemptions"] >= 4
        llm.close()


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["graph", "eager"])
def test_control_blocks_in_the_wrong_order_change_tokens(
    growths: Growths, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    expected, execute = growths.expected(dtype="float32"), DeviceExecutor.execute

    def swap(self: DeviceExecutor, batch: Any) -> torch.Tensor:
        if batch.prefill_starts is None:
            [table] = batch.block_tables
            table[:, :2] = table[:, :2].flip(1)
        return execute(self, batch)

    llm = growths.open(dtype="float32")
    llm._engine.cache.tensor.zero_()  # a wrong block may hold what nothing was written to
    monkeypatch.setattr(DeviceExecutor, "execute", swap)
    with some_eager(llm, share):
        assert grow(llm, growths.prompts).tokens != expected.tokens
    llm.close()
