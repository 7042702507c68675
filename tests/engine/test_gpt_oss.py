"""gpt_oss: sinks, windows and experts in MXFP4, whose weights and tokens are transformers'."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.errors import CheckpointError, ConfigError
from engine.model.checkpoint import read_folder
from engine.model.formats import align
from engine.model.lossless import why_plain
from engine.model.quantised import sources_of
from engine.model.schemes import MXFP4, Scheme
from engine.model.spec import W2, W2_BIAS, W13, W13_BIAS, ModelSpec
from engine.weights import layouts
from kernels.ops import quantised
from tests.engine.conftest import TinyModels
from tests.slow import slow
from tests.tiny import greedy, hf_greedy, make_prompt, open_llm, write_config

PROMPTS = [make_prompt(length, seed=6) for length in (1, 39, 41, 90)]
LONG = [make_prompt(length, seed=7) for length in (1, 2, 127, 128, 129, 200, 300)]
TOKENS = 8
PLACES: dict[str, dict[str, Any]] = {
    "resident": {},
    "uva": {"cpu_offload_gb": 1},
    "uva, staged": {"cpu_offload_gb": 1, "uva_stage_tokens": 1},
    "uva, experts": {"cpu_offload_gb": 1, "cpu_offload_params": ["experts"]},
    "prefetch": {"offload_group_size": 1},
    "prefetch, experts": {"offload_group_size": 2, "offload_params": ["w13_weight", "w2_weight"]},
    "cached, 1 slot": {"offload_backend": "experts", "expert_slots": 1},
    "cached, 4 slots": {"offload_backend": "experts", "expert_slots": 4},
}
Tensors = dict[str, torch.Tensor]
Packed = tuple[Path, Any]
"""A checkpoint, and transformers' model of the weights that it dequantises."""


def pack(folder: Path, target: Path, model: Any) -> Packed:
    """Copy a checkpoint with random experts in MXFP4."""
    generator = torch.Generator().manual_seed(3)
    tensors, twin = load_file(folder / "model.safetensors"), copy.deepcopy(model)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, size_in, size_out = tensors.pop(name).shape
        shape = (experts, size_out, size_in // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        dense = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        twin.get_parameter(name).data.copy_(dense)
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text((folder / "config.json").read_text())
    write_config(target, quantization_config={"quant_method": "mxfp4"})
    return target, twin


@pytest.fixture(scope="module")
def packed(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Packed]:
    """Return a function that gives a checkpoint in MXFP4 with changed sizes."""
    known: dict[str, Packed] = {}

    def made(**changes: Any) -> Packed:
        key = str(changes)
        if key not in known:
            target = tmp_path_factory.mktemp("mxfp4") / "model"
            folder, model = (f("gpt_oss", **changes) for f in (tiny.folder, tiny.model))
            known[key] = pack(folder, target, model)
        return known[key]

    return made


def in_order(rows: torch.Tensor) -> torch.Tensor:
    """Put gates and ups of an expert, which are in turn, one behind the other."""
    return torch.cat([rows[0::2], rows[1::2]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_restored_weights_are_those_of_transformers(dtype: torch.dtype) -> None:
    """Of every value and scale, gates and ups in turn; a float16 may be infinite."""
    generator = torch.Generator().manual_seed(1)
    rows, columns = 192, 288
    blocks = torch.randint(0, 256, (1, rows, 9, 16), generator=generator, dtype=torch.uint8)
    scales = torch.arange(rows * 9).remainder(255).to(torch.uint8).view(1, rows, 9)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].T.to(dtype)
    spec = ModelSpec(**SIZES | {"hidden_size": columns, "moe_intermediate_size": rows // 2})
    [tensor] = [t for t in spec.layer_tensors(0) if t.name.endswith(W13)]
    form = spec.formats(str(dtype).removeprefix("torch."))[tensor.name]
    views: Tensors = {}
    for view in form.views(tensor):
        views[view.name] = torch.zeros(view.shape, dtype=getattr(torch, view.dtype))
    scheme = Scheme(MXFP4, 4, 32, "uint8", symmetric=True)
    [source] = sources_of(scheme, tensor.parts[0], 0)
    layouts.make(source, {"blocks": blocks[0], "scales": scales[0]}, views)
    from engine.weights.store import OPERATORS

    operand = form.operand(tensor, views, OPERATORS)
    assert torch.equal(quantised.restore(operand), in_order(expected))


SIZES: dict[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 151,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1200,
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 96,
    "attention_bias": True,
    "quantization": {
        "method": "mxfp4",
        "schemes": [
            {
                "layout": "mxfp4",
                "bits": 4,
                "group": 32,
                "scale_dtype": "uint8",
                "symmetric": True,
                "targets": ["re:.*\\.experts\\."],
            }
        ],
    },
}


@pytest.mark.thorough
@pytest.mark.parametrize("place", [x if x == "uva, experts" else slow(x) for x in PLACES])
def test_experts_in_mxfp4_wherever_they_lie(packed: Callable[..., Packed], place: str) -> None:
    folder, twin = packed()
    expected = [hf_greedy(twin, prompt, TOKENS) for prompt in PROMPTS]
    llm = open_llm(folder, max_num_batched_tokens=64, **PLACES[place])
    assert greedy(llm, PROMPTS, TOKENS) == expected
    assert [greedy(llm, [prompt], TOKENS)[0] for prompt in PROMPTS[1:]] == expected[1:]
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_window_of_128_and_plain_experts_wherever_they_lie(tiny: TinyModels, place: str) -> None:
    sizes = {"sliding_window": 128, "num_hidden_layers": 4, "num_experts_per_tok": 4}
    expected = tiny.greedy("gpt_oss", LONG, TOKENS, **sizes)
    llm = open_llm(tiny.folder("gpt_oss", **sizes), max_num_batched_tokens=96, **PLACES[place])
    assert greedy(llm, LONG, TOKENS) == expected
    assert [greedy(llm, [prompt], TOKENS)[0] for prompt in LONG] == expected
    llm.close()


@pytest.mark.slow
def test_sinks_and_biases_count(tiny: TinyModels, tmp_path: Path) -> None:
    """The negative control: without any of them tokens differ."""
    folder = tiny.folder("gpt_oss")
    expected = tiny.greedy("gpt_oss", PROMPTS, TOKENS)
    for at, ending in enumerate(
        ("sinks", "gate_up_proj_bias", "down_proj_bias", "router.bias", "o_proj.bias")
    ):
        tensors = load_file(folder / "model.safetensors")
        for name in [name for name in tensors if name.endswith(ending)]:
            tensors[name] = torch.full_like(tensors[name], -1e4 if ending == "sinks" else 0.0)
        target = tmp_path / str(at)
        target.mkdir()
        save_file(tensors, target / "model.safetensors")
        (target / "config.json").write_text((folder / "config.json").read_text())
        llm = open_llm(target)
        assert greedy(llm, PROMPTS, TOKENS) != expected, ending
        llm.close()


@pytest.mark.thorough
def test_dummy_experts_in_mxfp4(packed: Callable[..., Packed]) -> None:
    folder, _ = packed()
    runs = []
    for place in ({}, PLACES["cached, 4 slots"]):
        llm = open_llm(folder, load_format="dummy", **place)
        runs.append(greedy(llm, PROMPTS[:2], 4))
        weights = llm.engine.store.acquire(0)
        deviation = quantised.restore(weights[W13]).std()
        llm.close()
    assert runs[0] == runs[1]
    assert 0.015 < deviation < 0.03


def test_sizes_are_those_of_the_files(packed: Callable[..., Packed]) -> None:
    folder, _ = packed()
    spec = read_folder(folder).spec
    tensors = {tensor.name: tensor for tensor in spec.layer_tensors(0)}
    for name, shape in ((W13, (6 * 192, 64)), (W2, (6 * 64, 96))):
        tensor = tensors[f"model.layers.0.{name}"]
        assert tensor.shape == shape
        # 4 bits a value, of whole tiles of 64 columns, and 8 a block of 32.
        columns = -(-shape[1] // 64) * 64
        size = spec.formats("float32")[tensor.name].num_bytes(tensor)
        assert size == shape[0] * columns // 2 + align(shape[0] * shape[1] // 32) + 64
    assert tensors[f"model.layers.0.{W13_BIAS}"].shape == (6 * 192,)
    assert tensors[f"model.layers.0.{W2_BIAS}"].shape == (6 * 64,)


def test_what_is_not_supported_is_refused(packed: Callable[..., Packed], tiny: TinyModels) -> None:
    folder, _ = packed()
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"expected swiglu_limit 7\.0, got 5"):
        ModelSpec.from_hf_config(config | {"swiglu_limit": 5})
    other = config | {"model_type": "mixtral", "swiglu_limit": None}
    with pytest.raises(CheckpointError, match=r"quant_method='mxfp4' with model_type='mixtral'"):
        ModelSpec.from_hf_config(other)
    plain = read_folder(tiny.folder("gpt_oss")).spec
    experts = [tensor for tensor in plain.tensors() if tensor.name.endswith(W13)]
    assert {why_plain(tensor, plain) for tensor in experts} == {"in another order there"}
    with pytest.raises(ConfigError, match=r"quantize=int4: expected matrices row after row"):
        open_llm(tiny.folder("gpt_oss"), quantize="int4")
