"""Dummy weights: of the exact shape, the same in every placement, changed by seed and name."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.formats import DUMMY_POOL_SIZE as POOL_SIZE
from engine.model.formats import DUMMY_STD as STD
from engine.model.formats import ParamSpec
from engine.weights.reader import DummyWeights
from tests.engine.conftest import TinyModels
from tests.tiny import greedy, make_prompt, open_llm, write_config

PROMPTS = [make_prompt(length) for length in (5, 40)]
PLACEMENTS: list[dict[str, Any]] = [
    {},
    {"cpu_offload_gb": 1},
    {"cpu_offload_gb": 100_000 / 2**30, "uva_stage_tokens": 1},
    {"offload_group_size": 2},
    {"offload_group_size": 1, "offload_params": ["mlp"]},
]


def make(name: str, shape: tuple[int, ...], seed: int = 0, dtype: str = "float32") -> torch.Tensor:
    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    DummyWeights(seed, lambda _: None).fill([(ParamSpec(name, shape), tensor)])
    return tensor


def weights(llm: Any) -> dict[str, torch.Tensor]:
    return {part.name: tensor.clone() for part, tensor in llm._engine.store.parameters()}


@pytest.fixture
def folder(tiny: TinyModels, tmp_path: Path) -> Path:
    """Sizes of the tiny Qwen3, without weights."""
    source = tiny.folder("qwen3")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    write_config(tmp_path, attention_bias=True)
    return tmp_path


@pytest.mark.thorough
def test_placements_do_not_change_weights_or_tokens(folder: Path) -> None:
    resident = open_llm(folder, load_format="dummy")
    expected, tokens = weights(resident), greedy(resident, PROMPTS, 6)
    resident.close()
    shapes = {part.name: part.shape for t in resident_spec(folder).tensors() for part in t.parts}
    assert {name: tuple(tensor.shape) for name, tensor in expected.items()} == shapes
    for keywords in PLACEMENTS[1:]:
        llm = open_llm(folder, load_format="dummy", **keywords)
        found = weights(llm)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert greedy(llm, PROMPTS, 6) == tokens
        llm.close()


def resident_spec(folder: Path) -> Any:
    import json

    from engine.model.spec import ModelSpec

    return ModelSpec.from_hf_config(json.loads((folder / "config.json").read_text()))


@pytest.mark.thorough
def test_every_dtype_rounds_the_same_values(folder: Path) -> None:
    exact = open_llm(folder, load_format="dummy")
    expected = weights(exact)
    exact.close()
    for dtype in ("bfloat16", "float16"):
        llm = open_llm(folder, load_format="dummy", dtype=dtype, offload_group_size=2)
        for name, tensor in weights(llm).items():
            assert torch.equal(tensor, expected[name].to(tensor.dtype))
        llm.close()


def test_seed_and_name_change_every_value() -> None:
    shape = (64, 32)
    base = make("model.layers.0.mlp.down_proj.weight", shape)
    assert torch.equal(base, make("model.layers.0.mlp.down_proj.weight", shape))
    for other in (
        make("model.layers.1.mlp.down_proj.weight", shape),
        make("model.layers.0.mlp.down_proj.weight", shape, seed=1),
    ):
        assert (other != base).float().mean() > 0.99


@pytest.mark.thorough
def test_the_engines_seed_is_used(folder: Path) -> None:
    tokens = []
    for seed in (0, 7):
        llm = open_llm(folder, load_format="dummy", seed=seed)
        tokens.append(greedy(llm, PROMPTS, 6))
        llm.close()
    assert tokens[0] != tokens[1]


def test_norms_are_near_one_and_weights_near_zero() -> None:
    for name in ("model.norm.weight", "model.layers.0.self_attn.q_norm.weight"):
        values = make(name, (4096,))
        assert values.mean().item() == pytest.approx(1.0, abs=0.01)
        assert values.std().item() == pytest.approx(STD, rel=0.1)
    values = make("lm_head.weight", (512, 64))
    assert values.mean().item() == pytest.approx(0.0, abs=0.002)
    assert values.std().item() == pytest.approx(STD, rel=0.05)


def test_a_parameter_larger_than_the_pool_is_filled_to_its_end() -> None:
    values = make("lm_head.weight", (POOL_SIZE + 1000,), dtype="float16")
    assert torch.equal(values[:1000], values[POOL_SIZE:])
    assert torch.isfinite(values).all()
    assert values.float().std().item() == pytest.approx(STD, rel=0.05)


def test_dummy_tokens_vary(folder: Path) -> None:
    """Random weights must not repeat one token, or equality checks would see nothing."""
    llm = open_llm(folder, load_format="dummy")
    found = greedy(llm, [make_prompt(20)], 30)[0]
    assert len(set(found)) > 3
    llm.close()


def test_norms_and_embedding_follow_the_family() -> None:
    names = ("model.norm.weight", "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight")
    parts = [(ParamSpec(name, (4000,)), torch.empty(4000)) for name in names]
    DummyWeights(0, lambda _: None, 0.0, 8.0).fill(parts)
    norm, embedding, other = (tensor for _, tensor in parts)
    assert norm.mean().abs() < 0.01
    assert embedding.std().item() == pytest.approx(other.std().item() / 8, rel=0.1)
    DummyWeights(0, lambda _: None).fill(parts)
    assert norm.mean().item() == pytest.approx(1, abs=0.01)
    assert embedding.std().item() == pytest.approx(other.std().item(), rel=0.1)
