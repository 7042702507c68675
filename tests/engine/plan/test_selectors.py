"""Selectors: whole dotted segments, aliases, fused products, and selectors without effect."""

import pytest

from engine.errors import ConfigError
from engine.plan.policy import check_selectors, matches, selected, widened
from tests.engine.specs import moe_spec, small_spec

LAYER = small_spec().layer_tensors(3)


@pytest.mark.parametrize(
    ("selector", "name", "expected"),
    [
        ("experts.w2_weight", "mlp.experts.w2_weight", True),
        ("experts.w2_weight", "mlp.experts.w2_weight_scale", False),
        ("w2", "mlp.experts.w2_weight", False),
        ("w2_weight", "mlp.experts.w2_weight", True),
        ("mlp", "model.layers.0.mlp.down_proj.weight", True),
        ("mlp.down_proj", "model.layers.0.mlp.down_proj.weight", True),
        ("mlp.weight", "model.layers.0.mlp.down_proj.weight", False),
        ("down_proj.weight", "model.layers.0.mlp.down_proj.weight", True),
        ("layers.1", "model.layers.1.mlp.down_proj.weight", True),
        ("layers.1", "model.layers.11.mlp.down_proj.weight", False),
        ("model.layers.0.mlp.down_proj.weight.x", "model.layers.0.mlp.down_proj.weight", False),
    ],
)
def test_whole_adjacent_segments_match(selector: str, name: str, expected: bool) -> None:
    assert matches(selector, name) is expected


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("qkv_proj", ["self_attn.qkv_proj"]),
        ("q_proj", ["self_attn.qkv_proj"]),
        ("self_attn.v_proj", ["self_attn.qkv_proj"]),
        ("gate_up_proj", ["mlp.gate_up_proj"]),
        ("up_proj.weight", ["mlp.gate_up_proj"]),
        ("self_attn", ["self_attn.qkv_proj", "self_attn.o_proj"]),
        ("mlp", ["mlp.gate_up_proj", "mlp.down_proj"]),
        ("input_layernorm", ["input_layernorm"]),
        ("layers.3.mlp.down_proj", ["mlp.down_proj"]),
        ("layers.2", []),
    ],
)
def test_parts_and_aliases_select_the_product(selector: str, names: list[str]) -> None:
    found = [tensor.name for tensor in LAYER if selected(tensor, [selector])]
    assert found == [f"model.layers.3.{name}.weight" for name in names]


def test_biases_are_selected_with_their_product() -> None:
    layer = small_spec(model_type="qwen2").layer_tensors(0)
    found = [tensor.name for tensor in layer if selected(tensor, ["k_proj"])]
    assert found == [f"model.layers.0.self_attn.qkv_proj.{kind}" for kind in ("weight", "bias")]
    found = [tensor.name for tensor in layer if selected(tensor, ["k_proj.bias"])]
    assert found == ["model.layers.0.self_attn.qkv_proj.bias"]


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("experts", ["w13_weight", "w2_weight", "w13_bias", "w2_bias"]),
        ("w13_weight_scale", ["w13_weight"]),
        ("experts.w2_qweight", ["w2_weight"]),
        ("w2_weight_packed", ["w2_weight"]),
        ("w13_bias", ["w13_bias"]),
        ("w13_wieght", []),
        ("w2", []),
    ],
)
def test_published_names_select_matrices_of_experts(selector: str, names: list[str]) -> None:
    of_gpt_oss = {"model_type": "gpt_oss", "decoder_sparse_step": 1, "attention_bias": True}
    layer = moe_spec(**of_gpt_oss).layer_tensors(0)
    found = [tensor.name for tensor in layer if selected(tensor, [selector])]
    assert found == [f"model.layers.0.mlp.experts.{name}" for name in names]


def test_a_selector_that_takes_a_product_whole_is_named() -> None:
    prefix = "model.layers.3."
    assert widened(LAYER, ["q_proj"]) == [prefix + "self_attn.qkv_proj.weight"]
    assert widened(LAYER, ["up_proj"]) == [prefix + "mlp.gate_up_proj.weight"]
    for whole in (["qkv_proj"], ["self_attn"], ["gate_proj", "up_proj"], ["down_proj"], ["mlp"]):
        assert widened(LAYER, whole) == []


def test_a_selector_that_matches_nothing_is_refused_with_the_segments() -> None:
    with pytest.raises(ConfigError) as error:
        check_selectors("offload.uva.cpu_offload_params", ["mlp", "w2"], LAYER)
    text = str(error.value)
    assert text.startswith("offload.uva.cpu_offload_params: ")
    assert "got 'w2'" in text
    for segment in ("down_proj", "q_proj", "self_attn", "input_layernorm", "gate_up_proj"):
        assert segment in text
    check_selectors("offload.uva.cpu_offload_params", ["mlp", "q_proj"], LAYER)
