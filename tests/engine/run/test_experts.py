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
from tests.engine.gguf_files import Kind, write_gguf
from tests.engine.quantised import WAYS, read_back, write
from tests.slow import mostly_slow, slow
from tests.tiny import (
    EXPERT_FAMILIES,
    greedy,
    greedy_of_transformers,
    make_prompt,
    open_llm,
)

WIDE = {"moe_intermediate_size": 64, "norm_topk_prob": True}
"""Sizes that groups divide; weights of a GGUF file of qwen3moe are always divided by their sum."""
QUANTISED = [
    slow("qwen3_moe", "awq, groups of 32", WIDE),
    ("mixtral", "gptq 4, groups of 64", {}),
    slow("qwen2_moe", "packed 4", WIDE | {"shared_expert_intermediate_size": 128}),
    slow("olmoe", "int8", {}),
    slow("qwen3_moe", "fp8 of blocks", WIDE),
]
PROMPTS = [make_prompt(length, seed=5) for length in (1, 2, 15, 16, 17, 40, 70)]
MAX_TOKENS = 8


@pytest.mark.thorough_but("prefetch_experts")
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


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_dummy_weights_of_experts(tiny: TinyModels) -> None:
    folder = tiny.folder("qwen2_moe")
    runs = []
    for offload in ({}, {"offload_group_size": 1, "offload_params": {"experts"}}):
        llm = open_llm(folder, load_format="dummy", **offload)
        runs.append(greedy(llm, PROMPTS[:3], 8))
        llm.close()
    assert runs[0] == runs[1]


@pytest.mark.thorough
@pytest.mark.parametrize(("variant", "way", "changes"), QUANTISED, ids=str)
def test_quantised_experts(variant: str, way: str, changes: dict[str, Any], tmp_path: Path) -> None:
    name = next(name for name in WAYS if name.startswith(way))
    folder, plain, meant = write(tmp_path, WAYS[name], variant, **changes)
    expected = greedy_of_transformers(plain, PROMPTS[:5], 6)
    for offload in ({}, {"cpu_offload_gb": 1.0, "cpu_offload_params": {"experts"}}):
        llm = open_llm(folder, **offload)
        formats = llm.plan.formats.to_dict()
        assert formats[f"model.layers.0.{W13}"] == formats[f"model.layers.0.{W2}"]
        assert "model.layers.0.mlp.gate.weight" not in formats
        assert greedy(llm, PROMPTS[:5], 6) == expected
        found = read_back(llm)
        assert found.keys() == meant.keys()
        for parameter, weight in found.items():
            assert torch.equal(weight, meant[parameter].float()), parameter
        llm.close()


def test_experts_whose_columns_have_an_order_of_their_own_are_refused(tmp_path: Path) -> None:
    folder, *_ = write(tmp_path, WAYS["gptq 8, v1, in order of activations"], "mixtral")
    with pytest.raises(
        CheckpointError, match=r"w13_weight: expected all experts in one format, .*"
    ):
        open_llm(folder)


@pytest.mark.thorough
@pytest.mark.parametrize("variant", ["qwen2_moe", slow("qwen3_moe"), slow("mixtral")])
def test_experts_of_gguf_files(variant: str, tmp_path: Path) -> None:
    changes = {} if variant == "mixtral" else WIDE | {"mlp_only_layers": []}
    if variant == "qwen2_moe":
        changes |= {"shared_expert_intermediate_size": 128, "norm_topk_prob": False}

    def type_of(name: str) -> Kind:
        is_second = "layers.1" in name and name.endswith(("down_proj.weight", "w2.weight"))
        return Kind.Q8_0 if is_second else Kind.Q4_0

    file, plain, meant = write_gguf(tmp_path, variant, type_of, **changes)
    llm = open_llm(file)
    assert llm.plan.formats.to_dict()[f"model.layers.1.{W2}"] == "gguf-q8_0"
    assert greedy(llm, PROMPTS[:5], 6) == greedy_of_transformers(plain, PROMPTS[:5], 6)
    found = read_back(llm)
    assert found.keys() == meant.keys()
    for parameter, weight in found.items():
        assert torch.equal(weight, meant[parameter].float()), parameter
    llm.close()


def as_mixtral(source: Path, folder: Path, *, num_experts: int, top_k: int) -> Path:
    """Write a model of one MLP a layer as one whose experts are all that MLP."""
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    ours = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    generator = torch.Generator().manual_seed(1)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, short in ours.items():
            weight = tensors.pop(f"{prefix}mlp.{name}.weight")
            for expert in range(num_experts):
                tensors[f"{prefix}block_sparse_moe.experts.{expert}.{short}.weight"] = (
                    weight.clone()
                )
        router = torch.randn((num_experts, config["hidden_size"]), generator=generator)
        tensors[f"{prefix}block_sparse_moe.gate.weight"] = router
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    config |= {"num_local_experts": num_experts, "num_experts_per_tok": top_k}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("num_experts", "top_k"), [slow(1, 1), (4, 2)])
def test_glass_whose_experts_are_all_its_own_mlp_has_the_tokens_of_glass(
    glass_model_dir: Path, tmp_path: Path, num_experts: int, top_k: int
) -> None:
    prompts = [make_prompt(length, seed=8, vocab=1024) for length in (1, 9, 40)]
    llm = open_llm(glass_model_dir, max_model_len=96)
    expected = greedy(llm, prompts, 12)
    llm.close()
    folder = as_mixtral(glass_model_dir, tmp_path / "mixtral", num_experts=num_experts, top_k=top_k)
    llm = open_llm(folder, max_model_len=96)
    assert greedy(llm, prompts, 12) == expected
    llm.close()
