"""Mixtures of experts: names of checkpoints, residences, batches; tokens as transformers has."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError
from engine.model.spec import W2, W13, ModelSpec
from tests.engine.conftest import TinyModels
from tests.slow import mostly_slow
from tests.tiny import (
    EXPERT_FAMILIES,
    greedy,
    make_prompt,
    open_llm,
)

PROMPTS = [make_prompt(length, seed=5) for length in (1, 2, 15, 16, 17, 40, 70)]
MAX_TOKENS = 8


@pytest.mark.parametrize(
    "offload",
    [
        {"cpu_offload_gb": 1.0},
        {"cpu_offload_gb": 1.0, "cpu_offload_params": {"experts"}},
        {"offload_group_size": 1, "offload_params": {"experts"}},
        {"offload_group_size": 2},
    ],
    ids=["uva", "uva_experts", "prefetch_experts", "prefetch"],
)
@pytest.mark.parametrize("family", mostly_slow(EXPERT_FAMILIES, lambda x: x == "qwen3_moe"))
def test_tokens_do_not_depend_on_where_experts_lie(
    tiny: TinyModels, family: str, offload: dict[str, Any]
) -> None:
    llm = open_llm(tiny.folder(family), max_num_batched_tokens=24, **offload)
    assert greedy(llm, PROMPTS, MAX_TOKENS) == tiny.greedy(family, PROMPTS, MAX_TOKENS)
    counters = llm.engine.store.expert_counters
    missed = 0 if counters is None else int(counters[:, 1].sum())  # or read in place
    assert llm.stats()["h2d_bytes"] + llm.stats()["in_place_bytes"] + missed > 0
    llm.close()


def fused(folder: Path, target: Path, spec: ModelSpec, *, renames: bool) -> Path:
    """Copy a checkpoint whose experts are those of a layer in one tensor."""
    names = spec.architecture.experts
    assert names is not None
    tensors = load_file(folder / "model.safetensors")
    for layer in filter(spec.has_experts, range(spec.num_hidden_layers)):
        prefix = f"model.layers.{layer}."

        def take(name: str, prefix: str = prefix) -> torch.Tensor:
            return torch.stack(
                [
                    tensors.pop(f"{prefix}{name.format(expert)}.weight")
                    for expert in range(spec.num_experts)
                ]
            )

        module = prefix + ("mlp" if renames else names.router.removesuffix(".gate"))
        tensors[f"{module}.gate.weight"] = tensors.pop(f"{prefix}{names.router}.weight")
        gates_and_ups = torch.cat([take(name) for name in names.gates], 1)
        tensors[f"{module}.experts.gate_up_proj"] = gates_and_ups
        tensors[f"{module}.experts.down_proj"] = take(names.down)
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text((folder / "config.json").read_text())
    return target


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_of_a_layer_in_one_tensor(tiny: TinyModels, tmp_path: Path, family: str) -> None:
    folder = tiny.folder(family)
    spec = ModelSpec.from_hf_config(json.loads((folder / "config.json").read_text()))
    copy = fused(folder, tmp_path / "fused", spec, renames=True)
    llm = open_llm(copy)
    assert greedy(llm, PROMPTS[:4], 4) == tiny.greedy(family, PROMPTS[:4], 4)
    llm.close()


def test_experts_of_a_layer_in_one_tensor_of_another_number_are_refused(
    tiny: TinyModels, tmp_path: Path
) -> None:
    folder = tiny.folder("mixtral")
    spec = ModelSpec.from_hf_config(json.loads((folder / "config.json").read_text()))
    copy = fused(folder, tmp_path / "fused", spec, renames=False)
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.experts.down_proj"
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 tensors are missing, .*experts\.4\.w2\.weight"):
        open_llm(copy)


def test_layers_with_experts_and_dense_ones(tiny: TinyModels) -> None:
    folder = tiny.folder("qwen3_moe")
    spec = ModelSpec.from_hf_config(json.loads((folder / "config.json").read_text()))
    assert [spec.has_experts(layer) for layer in range(3)] == [True, False, True]
    names = [{name.split(".", 3)[3] for name in layer} for layer in spec.layer_names]
    assert {W13, W2, "mlp.gate.weight"} <= names[0]
    assert names[0] == names[2]
    assert {"mlp.gate_up_proj.weight", "mlp.down_proj.weight"} <= names[1]
    assert not {W13, W2, "mlp.gate.weight"} & names[1]
    stored = load_file(folder / "model.safetensors")
    assert spec.num_parameters == sum(tensor.numel() for tensor in stored.values())
    assert spec.weight_bytes() == 4 * spec.num_parameters


def test_dummy_weights_of_experts(tiny: TinyModels) -> None:
    folder = tiny.folder("qwen2_moe")
    runs = []
    for offload in ({}, {"offload_group_size": 1, "offload_params": {"experts"}}):
        llm = open_llm(folder, load_format="dummy", **offload)
        runs.append(greedy(llm, PROMPTS[:3], 8))
        llm.close()
    assert runs[0] == runs[1]
