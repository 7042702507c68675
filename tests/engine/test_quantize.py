"""model.quantize: weights that a load rounds, to the last bit of a slow reference; refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError, ConfigError
from engine.model.formats import EMBEDDING, HEAD
from tests.engine.quantised import SIZES, WAYS, change_config, read_back, write
from tests.slow import mostly_slow, slow
from tests.tiny import greedy, greedy_of_transformers, hf_model, make_prompt, open_llm, save

PROMPTS = [make_prompt(length, seed=4) for length in (70, 9, 1)]
LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 40, "max_model_len": 128}
PLACES: dict[str, dict[str, Any]] = {
    "resident": {},
    "uva": {"cpu_offload_gb": 1},
    "uva of products": {"cpu_offload_gb": 1, "cpu_offload_params": ["mlp.down_proj", "q_proj"]},
    "prefetch": {"offload_group_size": 1},
}


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Return what integers of groups of 128 columns mean, group after group, in float64."""
    most, found = np.float32(2**bits - 1), torch.empty(weight.shape, dtype=torch.float64)
    for row, values in enumerate(weight):
        for first in range(0, len(values), 128):
            group = values[first : first + 128].float().numpy()
            low, high = min(np.float32(0), group.min()), max(np.float32(0), group.max())
            scale = torch.tensor((high - low) / most).to(weight.dtype)
            step = np.float32(scale.float().item()) or np.float32(1)
            zero = min(most, np.rint(-low / step))
            whole = np.clip(np.rint(group / step) + zero, 0, most)
            found[row, first : first + 128] = torch.tensor(whole - zero).double() * scale.item()
    return found


@pytest.fixture(scope="module")
def made(single_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that writes a checkpoint in a dtype, and its rounded weights in plain."""
    known: dict[Any, Any] = {}

    def checkpoint(dtype: str, bits: int, variant: str = "llama") -> tuple[Path, Path, Any]:
        if (key := (dtype, bits, variant)) in known:
            return known[key]  # type: ignore[no-any-return]
        folder = tmp_path_factory.mktemp("rounded")
        plain = save(hf_model(variant, **SIZES, tie_word_embeddings=False), folder / "plain")
        tensors = load_file(plain / "model.safetensors")
        stored = {name: each.to(getattr(torch, dtype)) for name, each in tensors.items()}
        meant = {}
        for name, weight in stored.items():
            if weight.dim() == 2 and name not in {EMBEDDING, HEAD}:
                if "layers.0.mlp.gate" in name:
                    weight[0] = 0  # a group without a range
                    weight[1, :] = 0.5  # and groups of one sign
                    weight[2, 5] = 30.0
                    weight[3] = -weight[3].abs()
                meant[name] = rounded(weight, bits)
        for name, part in (("stored", stored), ("plain", {**stored, **meant})):
            (folder / name).mkdir(exist_ok=True)
            save_file(
                {n: x if name == "stored" else x.float() for n, x in part.items()},
                folder / name / "model.safetensors",
                metadata={"format": "pt"},
            )
        (folder / "stored" / "config.json").write_bytes((plain / "config.json").read_bytes())
        change_config(folder / "stored", dtype=dtype)
        known[key] = folder / "stored", plain, meant
        return known[key]  # type: ignore[no-any-return]

    return checkpoint


@pytest.mark.thorough_but("float16-8")
@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        ("bfloat16", 4),
        ("float16", 8),
        slow("float32", 4),
        slow("bfloat16", 8),
        slow("float16", 4),
        slow("float32", 8),
    ],
)
def test_weights_are_those_of_a_slow_reference(dtype, bits, made):
    folder, plain, meant = made(dtype, bits)
    for computed in ("float32", "bfloat16", "float16"):
        llm = open_llm(folder, dtype=computed, quantize=f"int{bits}", **LIMITS)
        found = read_back(llm)
        assert found.keys() == meant.keys()
        for parameter, weight in found.items():
            expected = meant[parameter].float().to(weight.dtype)
            assert torch.equal(weight, expected), parameter
        if computed == "float32":
            assert greedy(llm, PROMPTS, 12) == greedy_of_transformers(plain, PROMPTS, 12)
        llm.close()


@pytest.mark.thorough
@pytest.mark.parametrize("place", mostly_slow(PLACES, "uva of products".__eq__))
def test_every_residence_has_the_same_weights_and_tokens(place, made):
    folder, plain, meant = made("bfloat16", 4)
    llm = open_llm(folder, dtype="float32", quantize="int4", **LIMITS, **PLACES[place])
    placed = llm.plan.placed_bytes()
    assert place == "resident" or placed["resident"] < sum(placed.values())
    assert greedy(llm, PROMPTS, 12) == greedy_of_transformers(plain, PROMPTS, 12)
    for parameter, weight in read_back(llm, 100).items():
        assert torch.equal(weight, meant[parameter].float()), parameter
    llm.close()


@pytest.mark.thorough
def test_rows_are_rounded_some_at_a_time(made, monkeypatch):
    folder, _, meant = made("bfloat16", 8)
    monkeypatch.setattr("engine.model.quantised._BLOCK_ELEMENTS", 1000)  # 7 rows of 128, 5 of 192
    monkeypatch.setattr("engine.weights.reader.PACK_BATCH_BYTES", 4096)
    monkeypatch.setattr("engine.model.formats.PACK_BATCH_BYTES", 4096)
    llm = open_llm(folder, dtype="float32", quantize="int8", **LIMITS)
    for parameter, weight in read_back(llm).items():
        assert torch.equal(weight, meant[parameter].float()), parameter
    llm.close()


@pytest.mark.thorough
def test_plans_records_and_random_weights_have_the_size_of_rounded_ones(made):
    folder, _, _ = made("bfloat16", 4)
    real = open_llm(folder, quantize="int4", **LIMITS)
    assert real.effective()["quantize"] == "int4 (round to nearest, group 128)"
    assert real.plan.to_dict()["quantize"] == "int4 (round to nearest, group 128)"
    formats = real.plan.formats.to_dict()
    assert formats["model.layers.0.mlp.down_proj.weight"] == "int4"
    assert not {EMBEDDING, HEAD} & formats.keys()
    down = real.spec.layer_tensors(0)[-3]
    assert down.shape == (128, 192)
    # Values of 192 columns, then two groups' scales in bfloat16 and zero points.
    assert real.plan.formats.num_bytes(down) == 128 * 96 + 128 * 2 * 2 + 128 * 2
    dummy = open_llm(folder, load_format="dummy", quantize="int4", **LIMITS)
    assert dummy.plan.placed_bytes() == real.plan.placed_bytes()
    for parameter, weight in read_back(dummy).items():
        assert 0.015 < weight.std() < 0.025, parameter
    plain = open_llm(folder, **LIMITS)
    assert "quantize" not in plain.effective()
    assert sum(plain.plan.placed_bytes().values()) > sum(real.plan.placed_bytes().values())


def test_what_cannot_be_rounded_is_refused(made, tmp_path):
    folder, _, _ = made("bfloat16", 4)
    with pytest.raises(ConfigError, match=r"quantize: expected one of int8, int4, got 'int3'"):
        open_llm(folder, quantize="int3", **LIMITS)
    for word in ("lossless", "auto"):
        with pytest.raises(ConfigError, match=f"model.quantize=int4, got {word}: rounded"):
            open_llm(folder, quantize="int4", weight_format=word, **LIMITS)
    quantised, _, _ = write(tmp_path / "awq", WAYS["awq, groups of 32"])
    with pytest.raises(ConfigError, match=r"expected a checkpoint of plain weights.*\(awq\)"):
        open_llm(quantised, quantize="int8", **LIMITS)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 7] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight: expected finite"):
        open_llm(tmp_path, quantize="int4", **LIMITS)


def test_placements_are_chosen_for_rounded_weights(made):
    folder, _, _ = made("bfloat16", 4)
    llm = open_llm(folder, quantize="int4", choose=True, **LIMITS)
    assert llm.plan.weight_format is None
    assert set(llm.plan.formats.to_dict().values()) == {"int4"}
    llm.close()
