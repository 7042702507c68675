"""Quantised checkpoints: weights to the last bit, tokens of transformers, residences, refusals."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError, ConfigError
from engine.model.checkpoint import read_folder
from engine.model.quant_config import read_quantization
from engine.model.quantised import Quantisation
from engine.model.spec import ModelSpec
from tests.engine.placements import check_decode_bytes
from tests.engine.quantised import (
    COMPRESSED,
    WAYS,
    Way,
    awq,
    change_config,
    float8,
    gptq,
    packed,
    read_back,
    write,
)
from tests.slow import mostly_slow, slow
from tests.tiny import greedy, greedy_of_transformers, make_prompt, open_llm

PROMPTS = [make_prompt(length, seed=4) for length in (70, 9, 1)]
LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 40, "max_model_len": 128}
PLACES: dict[str, dict[str, Any]] = {
    "resident": {},
    "uva": {"cpu_offload_gb": 1},
    "uva, staged": {"cpu_offload_gb": 1, "uva_stage_tokens": 1},
    "uva, staged from 3 tokens on": {"cpu_offload_gb": 1, "uva_stage_tokens": 3},
    "uva of products": {"cpu_offload_gb": 1, "cpu_offload_params": ["mlp.down_proj", "q_proj"]},
    "uva of products, staged": {
        "cpu_offload_gb": 1,
        "cpu_offload_params": ["mlp.down_proj", "q_proj"],
        "uva_stage_tokens": 1,
    },
    "prefetch": {"offload_group_size": 1},
    "prefetch of products": {"offload_group_size": 1, "offload_params": ["gate_proj", "o_proj"]},
}


FAST = ("awq, groups of 32", "gptq 4, v2, in order of activations", "fp8 of blocks")

SOME = (
    *FAST,
    *("nf4, nested", "gptq 8, v2", "packed 4, zero points, float16", "int8", "float8 of rows"),
)
"""One of each layout, which `make test` runs."""


@pytest.fixture(scope="module")
def folders(single_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that gives a checkpoint by the name of its way and a variant."""
    known: dict[Any, Any] = {}

    def made(name: str, variant: str = "llama", **changes: Any) -> Any:
        key = name, variant, str(changes)
        if key not in known:
            folder = tmp_path_factory.mktemp("quantised")
            known[key] = write(folder, WAYS[name], variant, **changes)
        return known[key]

    return made


@pytest.mark.thorough_but("int8", "awq, groups of 32")
@pytest.mark.parametrize("name", mostly_slow(WAYS, lambda name: name in SOME))
def test_weights_are_those_of_the_format_and_tokens_those_of_transformers(name, folders):
    folder, plain, meant = folders(name)
    llm = open_llm(folder, dtype="float32", **LIMITS)
    check_weights(llm, meant)
    if name in FAST:  # of the others in every residence, which are slow
        assert greedy(llm, PROMPTS, 12) == greedy_of_transformers(plain, PROMPTS, 12)
    llm.close()


@pytest.mark.thorough_but("awq, groups of 32-float16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", mostly_slow(WAYS, lambda name: name in FAST[:2]))
def test_weights_are_those_of_the_format_in_halves(name, dtype, folders):
    folder, _, meant = folders(name)
    llm = open_llm(folder, dtype=dtype, **LIMITS)
    check_weights(llm, meant)
    llm.close()


def check_weights(llm, meant):
    found = read_back(llm)
    assert found.keys() == meant.keys()
    for parameter, weight in found.items():
        assert torch.equal(weight, meant[parameter].to(weight.dtype)), parameter


@pytest.mark.thorough_but("fp8 of blocks")
@pytest.mark.parametrize(
    ("name", "place"),
    [
        (name, place)
        if (name, place) in {(FAST[1], "uva, staged"), (FAST[2], "prefetch of products")}
        else slow(name, place)
        for name in WAYS
        for place in PLACES
    ],
)
def test_every_residence_has_the_same_weights_and_tokens(name, place, folders):
    folder, plain, meant = folders(name)
    llm = open_llm(folder, **LIMITS, **PLACES[place])
    placed = llm.plan.placed_bytes()
    assert place == "resident" or placed["resident"] < sum(placed.values())
    assert greedy(llm, PROMPTS, 12) == greedy_of_transformers(plain, PROMPTS, 12)
    for num_tokens in (1, 100):
        for parameter, weight in read_back(llm, num_tokens).items():
            assert torch.equal(weight, meant[parameter].float()), parameter
    llm.close()


@pytest.mark.parametrize(
    ("name", "stage_tokens"), [("awq, groups of 32", 1), ("int8", None)], ids=str
)
def test_formats_that_are_read_slowly_in_place_are_staged_in_every_step(
    name, stage_tokens, folders
):
    """As the rates of a card say; its link is slow, so that bytes of a tiny layer take time."""
    folder, plain, _ = folders(name, num_hidden_layers=4)
    llm = open_llm(folder, **LIMITS, cpu_offload_gb=1, link_gb_s=0.01, hbm_gb_s=100.0)
    assert llm.plan.stage_tokens == llm.effective()["stage_tokens"] == stage_tokens
    assert greedy(llm, PROMPTS, 12) == greedy_of_transformers(plain, PROMPTS, 12)
    check_decode_bytes(llm, PROMPTS[1])
    assert (llm.stats()["in_place_bytes"] == 0) == (stage_tokens == 1)
    llm.close()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("variant", "name", "changes"),
    [
        ("qwen2", FAST[0], {}),
        slow("qwen3_biases", FAST[1], {}),
        ("gemma3", FAST[0], {"num_hidden_layers": 4}),
        slow("mistral_window", FAST[1], {}),
        ("olmo2_biases", FAST[1], {}),
    ],
    ids=str,
)
def test_every_family_has_the_tokens_of_transformers(variant, name, changes, folders):
    folder, plain, _ = folders(name, variant, **changes)
    llm = open_llm(folder, **LIMITS, offload_group_size=2)
    assert llm.plan.formats.others
    assert greedy(llm, PROMPTS, 12) == greedy_of_transformers(plain, PROMPTS, 12)
    llm.close()


@pytest.mark.thorough
def test_modules_that_are_not_quantised_stay_plain(tmp_path):
    kept = ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj")
    way = awq(32)
    names = {"modules_to_not_convert": ["0.self_attn.k_proj", "layers.1.mlp.down"]}
    named = Way(way.config | names, way.make)
    folder, plain, _ = write(tmp_path, named, keep=kept)
    expected = greedy_of_transformers(plain, PROMPTS, 12)
    for config in (named.config, way.config):  # the files say it where config.json does not
        change_config(folder, quantization_config=config)
        llm = open_llm(folder, **LIMITS, offload_group_size=1)
        formats = llm.plan.formats.to_dict()
        assert formats["model.layers.0.self_attn.qkv_proj.weight"] == "mixed"
        assert "model.layers.1.mlp.down_proj.weight" not in formats
        assert formats["model.layers.1.self_attn.qkv_proj.weight"] == "awq4"
        assert greedy(llm, PROMPTS, 12) == expected
        llm.close()


@pytest.mark.thorough
def test_matrices_that_do_not_fill_tiles_of_rows_are_joined(tmp_path):
    folder, plain, meant = write(tmp_path, packed(8, -1, symmetric=False), head_dim=20)
    llm = open_llm(folder, **LIMITS, offload_group_size=1)
    formats = llm.plan.formats.to_dict()
    assert formats["model.layers.0.self_attn.qkv_proj.weight"] == "mixed"
    assert formats["model.layers.0.mlp.gate_up_proj.weight"] == "pack-quantized8"
    for parameter, weight in read_back(llm).items():
        assert torch.equal(weight, meant[parameter].float()), parameter
    assert greedy(llm, PROMPTS, 12) == greedy_of_transformers(plain, PROMPTS, 12)
    llm.close()


def test_float16_stays_and_scales_may_have_another_dtype(tmp_path):
    way = gptq(4, 32, dtype=torch.bfloat16)
    folder, _, _ = write(tmp_path, way, dtype="float16")
    spec = read_folder(folder).spec
    assert spec.dtype == "float16"
    assert spec.quantization == {
        "method": "gptq",
        "schemes": [
            {
                "layout": "gptq",
                "bits": 4,
                "group": 32,
                "scale_dtype": "bfloat16",
                "zeros_from_one": True,
            }
        ],
        "ignore": ["lm_head"],
    }


@pytest.mark.thorough
def test_random_weights_have_the_size_and_spread_of_real_ones(folders):
    folder, _, _ = folders(FAST[1])
    real, dummy = (open_llm(folder, load_format=x, **LIMITS) for x in ("auto", "dummy"))
    assert real.plan.placed_bytes() == dummy.plan.placed_bytes()
    for parameter, weight in read_back(dummy).items():
        assert 0.015 < weight.std() < 0.025, parameter
        assert abs(weight.mean()) < 0.005
    again = open_llm(folder, load_format="dummy", **LIMITS)
    assert greedy(again, PROMPTS, 8) == greedy(dummy, PROMPTS, 8)


def test_plans_count_quantised_bytes(folders):
    folder, _, _ = folders(FAST[0])
    llm = open_llm(folder, **LIMITS, cpu_offload_gb=1, cpu_offload_params=["down_proj.qweight"])
    assert llm.plan.placed_bytes()["uva"] == llm.plan.formats.total_bytes(
        tensor for tensor in llm.spec.tensors() if "down_proj" in tensor.name
    )
    down = llm.spec.layer_tensors(0)[-3]
    assert down.shape == (128, 192)
    assert llm.plan.formats.num_bytes(down) == 12288 + 1536 + 128 * 6
    assert llm.plan.gpu_items.get("restore", 0) == 0
    assert llm.plan.predicted is not None
    llm.close()


def compressed_of(
    weights: dict[str, Any] | None = None, targets: list[str] | None = None, **changes: Any
) -> dict[str, Any]:
    """Return a config of pack-quantized with changes."""
    config = dict(WAYS["packed 4, groups of 64"].config)
    group = dict(config["config_groups"]["group_0"])
    group["weights"] = group["weights"] | (weights or {})
    group["targets"] = targets or group["targets"]
    return config | {"config_groups": {"group_0": group}} | changes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "hqq"}, "quant_method='hqq'.*Supported: AWQ"),
        ({"quant_method": "awq", "version": "gemv"}, "version='gemv', expected gemm"),
        ({"quant_method": "awq", "format": "gemv"}, "version='gemv', expected gemm"),
        ({"quant_method": "awq", "format": "gemv", "version": "gemm"}, "format='gemv' beside"),
        ({"quant_method": "awq", "bits": 3}, "AWQ with 3 bits, expected 4"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point=false"),
        ({"quant_method": "awq", "group_size": "128"}, "whole number for group_size, got '128'"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ with 3 bits, expected 4 or 8"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({"quant_method": "gptq", "dynamic": {"a": {"bits": 3}}}, "GPTQ with 3 bits, expected"),
        ({"quant_method": "gptq", "dynamic": {"a": {"adapter": 1}}}, "the dynamic rule 'a'.*bits"),
        ({"quant_method": "gptq", "dynamic": {"-:(": {}}}, "dynamic: .* is no regular expression"),
        ({"quant_method": "gptq", "dynamic": ["a"]}, r"dynamic=\['a'\], expected an object"),
        ({"quant_method": "gptq", "group_size": 48}, "groups of 16, 32, a multiple of 64"),
        ({"quant_method": "awq", "group_size": -64}, "groups of 16, 32.* got -64"),
        ({"quant_method": "awq", "group_size": 128}, "groups of 128 that divide its columns"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2', expected e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"got \[128\]"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "without load_in_4bit"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bnb_4bit_quant_type='fp4'"),
        (compressed_of(format="nvfp4-pack-quantized"), "format='nvfp4-pack-quantized'"),
        (compressed_of(quantization_status="frozen_"), "quantization_status='frozen_'"),
        (compressed_of(sparsity_config={"format": "sparse-24"}), "sparsity_config"),
        (compressed_of(weights={"num_bits": 2}), "pack-quantized with int2, expected 4 or 8"),
        (compressed_of(weights={"strategy": "tensor_group"}), "strategy='tensor_group'"),
        (compressed_of(targets=["Embedding"]), "the target 'Embedding'"),
        (compressed_of(ignore="lm_head"), "a list of names for ignore, got 'lm_head'"),
        (compressed_of(ignore=["re:("]), "ignore: 're:\\(' is no regular expression"),
        (compressed_of(config_groups={"a": 1}), "an object with weights in config_groups.a"),
        ({"quant_method": "awq", "modules_to_not_convert": [1]}, r"modules_to_not_convert, got"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(config, message, folders, tmp_path):
    folder, _, _ = folders(FAST[0])
    usual = {"bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    change_config(tmp_path, quantization_config=usual | config)
    with pytest.raises(CheckpointError, match=message):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"g_idx": None}, "tensors are missing, the first is .*g_idx"),
        ({"scales": lambda x: x[:1]}, r"scales has shape \[1, 128\], config.json says \[3, 128\]"),
        ({"qweight": lambda x: x.float()}, "qweight is stored in float32, expected int32"),
        ({"scales": lambda x: x.int()}, "scales is stored in int32, expected bfloat16"),
        ({"g_idx": lambda x: x.flip(0)}, "desc_act=false"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_damaged_checkpoints_are_refused_by_name(change, message, folders, tmp_path):
    folder, _, _ = folders("gptq 4, groups of 64")
    damage(folder, tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        open_llm(tmp_path, **LIMITS)


def damage(folder: Path, target: Path, change: dict[str, Any]) -> None:
    """Copy a checkpoint with some arrays of one module changed, or left out."""
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    for suffix, how in change.items():
        name = f"model.layers.1.mlp.down_proj.{suffix}"
        found = tensors.pop(name)
        if how is not None:
            tensors[name] = how(found).contiguous()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("byte", [127, 255])
@pytest.mark.parametrize("name", ["fp8 of blocks", "float8 of rows"])
def test_float8_values_that_are_nan_are_refused(name, byte, folders, tmp_path):
    folder, _, _ = folders(name)

    def changed(weight: torch.Tensor) -> torch.Tensor:
        values = weight.view(torch.uint8).clone()
        values[-1, 3] = byte
        return values.view(weight.dtype)

    damage(folder, tmp_path, {"weight": changed})
    with pytest.raises(CheckpointError, match=r"down_proj.weight: expected finite weights, got"):
        open_llm(tmp_path, **LIMITS)


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        *(("awq, groups of 32", "scales"), ("gptq 4, groups of 64", "scales")),
        *(("packed 4, zero points, float16", "weight_scale"), ("int8", "weight_scale")),
        *(("fp8 of blocks", "weight_scale_inv"), ("nf4", "weight.absmax")),
        ("nf4, nested", "weight.nested_absmax"),
    ],
)
def test_scales_that_are_not_finite_are_refused(name, suffix, folders, tmp_path):
    folder, _, _ = folders(name)
    for value in (torch.nan, torch.inf):
        damage(
            folder,
            tmp_path,
            {
                suffix: lambda x, value=value: (
                    x.flatten().index_fill(0, torch.tensor([x.numel() - 1]), value).view(x.shape)
                )
            },
        )
        with pytest.raises(CheckpointError, match=r"down_proj.*expected finite scales"):
            open_llm(tmp_path, **LIMITS)


def test_what_config_json_says_may_stand_under_other_keys_or_in_a_file_of_its_own(
    folders, tmp_path
):
    """GPTQ's version under `format`, as newer quantisers have it; files of older ones."""
    for name, file, changes in (
        ("gptq 8, v2", "config.json", {"format": "gptq_v2", "checkpoint_format": None}),
        ("gptq 8, v2", "quantize_config.json", {"quant_method": None}),
        (
            "awq, groups of 32",
            "quant_config.json",
            {"quant_method": None, "bits": None, "w_bit": 4},
        ),
    ):
        folder, _, _ = folders(name)
        known = read_folder(folder).spec.quantization
        damage(folder, tmp_path, {})
        config = {k: v for k, v in {**WAYS[name].config, **changes}.items() if v is not None}
        if file == "config.json":
            change_config(tmp_path, quantization_config=config)
        else:
            change_config(tmp_path, quantization_config=None)
            (tmp_path / file).write_text(json.dumps(config))
        assert read_folder(tmp_path).spec.quantization == known
        (tmp_path / file).unlink()


def test_a_header_of_many_levels_is_refused(folders, tmp_path):
    damage(folders(FAST[0])[0], tmp_path, {})
    header = b"[" * 200_000
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_folder(tmp_path)


def renamed(folder: Path, target: Path, change: Callable[[str], str]) -> dict[str, torch.Tensor]:
    """Copy a checkpoint with other names, and return its tensors."""
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = {change(k): x for k, x in load_file(folder / "model.safetensors").items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (
            "fp8 of matrices",
            ("weight_scale", "input_scale"),
            ("weight_scale_inv", "activation_scale"),
        ),
        ("fp8 of matrices", ("input_scale",), ("kv_scale",)),
        ("float8 of rows", ("input_scale",), ("input_zero_point",)),
    ],
)
def test_scales_have_the_names_of_every_quantiser(name, old, new, folders, tmp_path):
    folder, _, meant = folders(name)

    def change(full: str) -> str:
        module, _, suffix = full.rpartition(".")
        return f"{module}.{dict(zip(old, new, strict=True)).get(suffix, suffix)}"

    assert any(full.endswith(new) for full in renamed(folder, tmp_path, change))
    llm = open_llm(tmp_path, dtype="float32", **LIMITS)
    check_weights(llm, meant)
    llm.close()


def test_a_scale_under_both_of_its_names_is_refused(folders, tmp_path):
    folder, _, _ = folders("fp8 of matrices")
    tensors = renamed(folder, tmp_path, lambda full: full)
    first = next(full for full in tensors if full.endswith("weight_scale"))
    both = tensors | {f"{first}_inv": tensors[first].clone()}
    save_file(both, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{first}: expected it or {first}_inv.*got both"):
        open_llm(tmp_path, **LIMITS)


def test_experts_have_the_names_of_every_quantiser(tmp_path):
    """Mixtral's as llm-compressor names them, and scales of all experts in one tensor."""
    folder, _, meant = write(tmp_path, float8("block", method="fp8"), "mixtral")
    ours = {".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}

    def change(name: str) -> str:
        for before, after in ours.items():
            name = name.replace(before, after)
        return name

    target = tmp_path / "renamed"
    target.mkdir()
    tensors = renamed(folder, target, change)
    _check_experts(target, meant)
    for layer in range(2):
        start = f"model.layers.{layer}.block_sparse_moe.experts."
        scales = {
            part: torch.stack(
                [tensors.pop(f"{start}{n}.{part}_proj.weight_scale_inv") for n in range(5)]
            )
            for part in ("gate", "up", "down")
        }
        start = start.replace("block_sparse_moe", "mlp")
        both = torch.cat([scales["gate"], scales["up"]], 1)
        tensors |= {
            f"{start}gate_up_proj_scale_inv": both,
            f"{start}down_proj_scale_inv": scales["down"],
        }
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    _check_experts(target, meant)


def _check_experts(folder: Path, meant: dict[str, torch.Tensor]) -> None:
    llm = open_llm(folder, dtype="float32", **LIMITS)
    check_weights(llm, meant)
    llm.close()


def test_a_router_that_stays_plain_says_nothing_of_gates(tmp_path):
    way = awq(32)
    folder, _, _ = write(
        tmp_path,
        Way(way.config | {"modules_to_not_convert": ["gate"]}, way.make),
        "qwen3_moe",
        moe_intermediate_size=128,
    )
    found = read_folder(folder).spec.quantisation
    assert found.scheme_of("model.layers.0.mlp.gate") is None
    assert found.scheme_of("model.layers.0.mlp.experts.0.gate_proj") is not None


def test_a_tensor_in_two_files_is_refused(folders, tmp_path):
    damage(folders(FAST[0])[0], tmp_path, {})
    file = tmp_path / "model.safetensors"
    (tmp_path / "a.safetensors").write_bytes(file.read_bytes())
    file.rename(tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"b\.safetensors: expected .* in one file.* in a\."):
        open_llm(tmp_path, **LIMITS)


def index_as(folder: Path, target: Path, dtype: torch.dtype | None) -> None:
    """Copy a checkpoint with g_idx in another dtype; None: without."""
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("g_idx")]:
        index = tensors.pop(name)
        if dtype is not None:
            tensors[name] = index.to(dtype)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gptq 4, groups of 64", None),
        ("gptq 4, groups of 64", torch.int64),
        ("gptq 4, v2, in order of activations", torch.int64),
    ],
    ids=str,
)
def test_g_idx_may_be_absent_or_of_64_bits(name, dtype, folders, tmp_path):
    folder, _, meant = folders(name)
    index_as(folder, tmp_path, dtype)
    llm = open_llm(tmp_path, dtype="float32", **LIMITS)
    check_weights(llm, meant)
    llm.close()


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (None, "tensors are missing, the first is .*g_idx"),
        (torch.float32, "g_idx is stored in float32, expected int32"),
    ],
    ids=str,
)
def test_an_order_of_columns_takes_a_g_idx(dtype, message, folders, tmp_path):
    folder, _, _ = folders("gptq 4, v2, in order of activations")
    index_as(folder, tmp_path, dtype)
    with pytest.raises(CheckpointError, match=message):
        open_llm(tmp_path, **LIMITS)


def test_columns_of_whole_rows_have_no_order(folders):
    """Whatever desc_act says: then experts can be read too."""
    folder, _, _ = folders("gptq 4, symmetric, whole rows")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    spec = ModelSpec.from_hf_config(config)
    assert spec.formats("float32") == read_folder(folder).spec.formats("float32")


def test_a_file_that_is_cut_short_is_refused(folders, tmp_path):
    folder, _, _ = folders(FAST[0])
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    data = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match="cut short"):
        open_llm(tmp_path, **LIMITS)


def test_a_spec_of_an_unknown_layout_is_refused(folders):
    spec = read_folder(folders(FAST[0])[0]).spec
    for change, message in (
        ({"schemes": [{"layout": "hqq", "bits": 4}]}, "layout=hqq"),
        ({"schemes": [{"layout": "awq", "bits": 8}]}, "bits=8"),
        ({"schemes": [{"layout": "awq", "bits": 4, "groups": 2}]}, "expected method, schemes"),
        ({"modules": []}, "got modules"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(spec, quantization={**spec.quantization, **change})


@pytest.mark.thorough
def test_lossless_codes_leave_quantised_weights_alone(tmp_path):
    folder, _, _ = write(tmp_path, awq(32), "llama", dtype="bfloat16", vocab_size=2048)
    with_codes = open_llm(folder, dtype="bfloat16", weight_format="lossless", **LIMITS)
    formats = with_codes.plan.formats.to_dict()
    assert formats["lm_head.weight"] == "lossless12"
    assert formats["model.layers.0.mlp.down_proj.weight"] == "awq4"
    plain = open_llm(folder, dtype="bfloat16", **LIMITS)
    assert greedy(with_codes, PROMPTS, 8) == greedy(plain, PROMPTS, 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in COMPRESSED if "activations" not in name])
def test_weights_are_those_that_compressed_tensors_reads(name, folders):
    """Without column orders (g_idx), which its current versions do not read."""
    pytest.importorskip("compressed_tensors", reason="a second reader, where it is installed")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    folder, _, meant = folders(name)
    config = COMPRESSED[name].config
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    reader = BaseCompressor.get_value_from_registry(config["format"])
    stored = load_file(folder / "model.safetensors")
    # It multiplies in the dtype of the scales.
    llm = open_llm(folder, dtype="float16" if "float16" in name else "bfloat16", **LIMITS)
    found = read_back(llm)
    assert found.keys() == meant.keys()
    for parameter, weight in found.items():
        module = parameter.removesuffix("weight")
        arrays = {n.removeprefix(module): x for n, x in stored.items() if n.startswith(module)}
        theirs = reader.decompress(arrays, scheme)["weight"]
        assert torch.equal(weight, theirs.to(weight.dtype)), parameter
    llm.close()


@pytest.mark.thorough
def test_groups_of_one_checkpoint_may_differ(tmp_path):
    ways = {"down_proj": packed(8, 64, symmetric=False), "": packed(4, 32)}

    def make(weight: torch.Tensor, rng: torch.Generator) -> Any:
        return ways["down_proj" if weight.shape[1] == 192 else ""].make(weight, rng)

    groups = [way.config["config_groups"]["group_0"] for way in ways.values()]
    groups[0] = groups[0] | {"targets": ["re:.*down_proj$"], "format": "pack-quantized"}
    config = ways[""].config | {
        "format": "mixed-precision",
        "config_groups": {"a": groups[1] | {"format": "pack-quantized"}, "b": groups[0]},
    }
    folder, plain, _ = write(tmp_path, Way(config, make))
    llm = open_llm(folder, **LIMITS, offload_group_size=1)
    formats = llm.plan.formats.to_dict()
    assert formats["model.layers.0.mlp.down_proj.weight"] == "pack-quantized8"
    assert formats["model.layers.0.mlp.gate_up_proj.weight"] == "pack-quantized4"
    assert greedy(llm, PROMPTS, 12) == greedy_of_transformers(plain, PROMPTS, 12)
    llm.close()


def test_rules_of_gptq_keep_modules_plain_or_change_how_they_are_stored(tmp_path):
    kept = ("model.layers.1.self_attn.o_proj", "model.layers.0.mlp.gate_proj")
    ways = {192: gptq(8, 64, version="gptq_v2", ordered=True), 128: gptq(4, 32, version="gptq_v2")}

    def make(weight: torch.Tensor, rng: torch.Generator) -> Any:
        return ways[weight.shape[1]].make(weight, rng)

    rules = {
        r"-:model\.layers\.1\.self_attn\.o_proj|lm_head": {},
        r"+:.*\.down_proj": {"bits": 8, "group_size": 64, "desc_act": True},
        r"-:.*\.0\.mlp\.(gate|down)_proj": {},  # of down_proj, the rule before counts
    }
    way = Way(ways[128].config | {"dynamic": rules}, make)
    folder, plain, meant = write(tmp_path, way, keep=kept)
    read = read_quantization(json.loads((folder / "config.json").read_text()), "float32")
    found = Quantisation.of(read)
    assert [name for name in (*kept, "lm_head") if found.scheme_of(name)] == []
    assert {n for n in meant if found.scheme_of(n.removesuffix(".weight")) is None} == set()
    llm = open_llm(folder, dtype="float32", **LIMITS)
    formats = llm.plan.formats.to_dict()
    assert formats["model.layers.0.mlp.down_proj.weight"] == "gptq8"
    assert formats["model.layers.0.mlp.gate_up_proj.weight"] == "mixed"
    assert "model.layers.1.self_attn.o_proj.weight" not in formats
    back = read_back(llm)
    assert all(torch.equal(back[name], weight.float()) for name, weight in meant.items())
    assert greedy(llm, PROMPTS, 12) == greedy_of_transformers(plain, PROMPTS, 12)
    llm.close()


@pytest.mark.parametrize("method", ["", "gptq 4, groups of 64", "fp8 of blocks"])
def test_fused_matrices_and_unknown_families_are_refused_by_name(method, folders, tmp_path):
    folder, plain, _ = folders(method or "gptq 4, groups of 64")
    if not method:
        folder = plain
    renamed(folder, tmp_path, lambda name: name.replace("q_proj", "qkv_proj"))
    message = r"missing, the first is .*\.q_proj\..* there is .*\.qkv_proj\..* llama model has not"
    with pytest.raises(CheckpointError, match=message):
        open_llm(tmp_path, **LIMITS)
    change_config(tmp_path, model_type="phi3")
    with pytest.raises(CheckpointError, match=r"model_type among llama.* got 'phi3'"):
        open_llm(tmp_path, **LIMITS)


@pytest.mark.thorough
def test_biases_of_zeros_beside_gptq_are_left_out_and_others_refused(folders, tmp_path):
    folder, plain, _ = folders("gptq 8, v2")
    for value in (0.0, 0.5):
        damage(folder, tmp_path, {})
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["model.layers.0.mlp.up_proj.bias"] = torch.full((192,), value)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        if value:
            with pytest.raises(CheckpointError, match="do not belong"):
                open_llm(tmp_path, **LIMITS)
        else:
            llm = open_llm(tmp_path, **LIMITS)
            assert greedy(llm, PROMPTS, 8) == greedy_of_transformers(plain, PROMPTS, 8)
            llm.close()


def test_activations_that_are_not_quantised_here_are_noted(folders, tmp_path):
    folder, _, _ = folders("int8")
    damage(folder, tmp_path, {})
    config = WAYS["int8"].config
    group = config["config_groups"]["group_0"] | {"input_activations": {"num_bits": 8}}
    changed = config | {"config_groups": {"group_0": group}, "kv_cache_scheme": {"num_bits": 8}}
    change_config(tmp_path, quantization_config=changed)
    [note] = read_folder(tmp_path).notes
    assert "activations, keys and values are not quantised here" in note
    assert not read_folder(folder).notes


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
def test_nf4_is_what_bitsandbytes_writes_and_reads(nested, tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional", reason="a second reader")

    def make(weight: torch.Tensor, _: torch.Generator) -> Any:
        values, state = functional.quantize_4bit(
            weight, blocksize=64, compress_statistics=nested, quant_type="nf4"
        )
        arrays = {f"weight.{name}": x for name, x in state.as_dict(packed=True).items()}
        return arrays | {"weight": values}, functional.dequantize_4bit(values, state)

    way = Way(WAYS["nf4, nested" if nested else "nf4"].config, make)
    folder, plain, meant = write(tmp_path, way)
    llm = open_llm(folder, **LIMITS, cpu_offload_gb=1)
    for parameter, weight in read_back(llm).items():
        assert torch.equal(weight, meant[parameter]), parameter
    assert greedy(llm, PROMPTS, 12) == greedy_of_transformers(plain, PROMPTS, 12)
    llm.close()


def test_nf4_of_another_block_or_table_is_refused(folders, tmp_path):
    folder, _, _ = folders("nf4")
    state = "weight.quant_state.bitsandbytes__nf4"
    other = torch.frombuffer(
        bytearray(b'{"quant_type": "nf4", "blocksize": 128}'), dtype=torch.uint8
    )
    for change, message in (
        ({state: lambda _: other.clone()}, "blocksize.: 128"),
        ({state: lambda x: x[:20]}, "quant_state cannot be read"),
        ({"weight.quant_map": lambda x: x + 1}, "expected the values of nf4"),
    ):
        damage(folder, tmp_path, change)
        with pytest.raises(CheckpointError, match=message):
            open_llm(tmp_path, **LIMITS)
