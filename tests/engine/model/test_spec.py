"""ModelSpec: its tensors are those of transformers' models, and config.json is read right."""

from typing import Any

import pytest
from transformers import AutoConfig

from engine.errors import CheckpointError, ConfigError
from engine.model.families import ARCHITECTURES
from engine.model.spec import ModelSpec

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
SCALING = {"rope_type": "linear", "factor": 8.0}
FAMILIES = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"head_dim": 32}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True, "head_dim": 24, "tie_word_embeddings": True}),
    ("olmo2", {}),
    ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    ("gemma3_text", {}),
    ("gemma3_text", {"attention_bias": True, "head_dim": 24}),
]


def hf_config(model_type: str, changes: dict[str, Any]) -> Any:
    """A transformers config of a small model."""
    from transformers import AutoConfig

    settings = SIZES | changes
    if model_type in {"qwen2", "olmo2"}:
        settings.pop("head_dim")
    return AutoConfig.for_model(model_type, **settings)


LINEAR = {"rope_type": "linear", "factor": 4.0}
WINDOW, FULL = "sliding_attention", "full_attention"
QWEN = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 7}
GEMMA = {"model_type": "gemma3_text", "sliding_window": 7}


@pytest.mark.parametrize(("model_type", "changes"), FAMILIES)
def test_tensors_are_those_of_transformers(model_type: str, changes: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    config = hf_config(model_type, changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(value.shape) for name, value in model.named_parameters()}
    spec = ModelSpec.from_hf_config(config.to_dict())
    parts = [part for tensor in spec.tensors() for part in tensor.parts]
    assert {part.name: part.shape for part in parts} == expected
    assert len(parts) == len(expected)
    assert spec.num_parameters == sum(value.numel() for value in model.parameters())


def test_sizes_are_read_from_a_config() -> None:
    config = SIZES | {
        "model_type": "llama",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "rope_theta": 5e5,
        "torch_dtype": "bfloat16",
    }
    spec = ModelSpec.from_hf_config(config)
    assert (spec.rope_theta, spec.dtype, spec.q_size, spec.kv_size) == (5e5, "bfloat16", 64, 32)
    assert spec.rope_scaling["factor"] == 8.0
    newer = {key: value for key, value in config.items() if not key.startswith(("rope", "torch"))}
    newer |= {"dtype": "bfloat16", "rope_parameters": config["rope_scaling"] | {"rope_theta": 5e5}}
    assert ModelSpec.from_hf_config(newer) == spec
    newer["rope_parameters"] |= {"attention_factor": None}
    assert ModelSpec.from_hf_config(newer) == spec


def test_bytes_follow_the_dtype() -> None:
    spec = ModelSpec(model_type="llama", **SIZES)
    assert spec.weight_bytes() == 2 * spec.num_parameters
    assert spec.weight_bytes("float32") == 4 * spec.num_parameters
    assert spec.kv_bytes_per_token() == 2 * 3 * 2 * 16 * 2
    assert spec.kv_bytes_per_token("float32") == 2 * spec.kv_bytes_per_token()


def test_products_that_run_as_one_are_one_tensor() -> None:
    tensors = {t.name: t for t in ModelSpec(model_type="llama", **SIZES).layer_tensors(1)}
    qkv = tensors["model.layers.1.self_attn.qkv_proj.weight"]
    assert [part.name.split(".")[-2] for part in qkv.parts] == ["q_proj", "k_proj", "v_proj"]
    assert qkv.shape == (64 + 32 + 32, 64)
    assert tensors["model.layers.1.mlp.gate_up_proj.weight"].shape == (224, 64)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, 64),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, None),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}, None),
        ({"model_type": "llama", "sliding_window": 64}, None),
    ],
)
def test_sliding_window(changes: dict[str, Any], window: int | None) -> None:
    assert ModelSpec.from_hf_config(SIZES | changes).sliding_window == window


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, ["model_type", "gpt2", "llama"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"quantization_config": {"quant_method": "hqq"}}, ["quantization_config", "hqq", "AWQ"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["rotary", "dynamic"]),
        ({"rope_scaling": {"type": "longrope"}}, ["rotary", "longrope"]),
        ({"compression_config": {"quant_method": "x"}}, ["quantization_config", "'x'"]),
        (
            {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": LINEAR},
            ["one rope_theta", "1000000.0 in rope_parameters", "10000.0 for rope_scaling"],
        ),
        ({"rope_parameters": {FULL: LINEAR, WINDOW: {}}}, ["all layers", FULL]),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["0.5"]),
        ({"rope_parameters": {"rope_theta": None}}, ["wrong kind"]),
        ({"num_attention_heads": 3}, ["num_attention_heads", "hidden_size=64", "3"]),
        ({"model_type": "qwen2", "num_attention_heads": 3, "head_dim": None}, ["hidden_size=64"]),
        (GEMMA | {"rope_parameters": LINEAR}, ["full_attention", "does not read"]),
        (GEMMA | {"rope_scaling": {"type": "linear", "factor": 8.0}}, ["rope_type", "Rename"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor", "None"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"vocab_size": "64"}, ["vocab_size", "an integer", "'64'"]),
        ({"hidden_size": 64.5}, ["hidden_size", "an integer", "64.5"]),
        ({"num_attention_heads": 0}, ["num_attention_heads", ">= 1"]),
        ({"num_hidden_layers": 10**12} | GEMMA, ["num_hidden_layers", "at most 1024"]),
        ({"rms_norm_eps": "x"}, ["wrong kind", "'x'"]),
        ({"rope_scaling": "x"}, ["wrong kind"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3"]),
        ({"head_dim": 12}, ["head_dim", "12"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["dtype", "float8_e4m3fn"]),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], words: list[str]) -> None:
    config = {"model_type": "llama"} | SIZES | changes
    config = {key: value for key, value in config.items() if value is not None}
    with pytest.raises(CheckpointError) as caught:
        ModelSpec.from_hf_config(config)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("kind", list(ARCHITECTURES))
def test_an_epsilon_that_is_left_out_is_that_of_transformers(kind: str) -> None:
    config = {key: value for key, value in SIZES.items() if key != "rms_norm_eps"}
    expected = AutoConfig.for_model(kind).rms_norm_eps
    assert ModelSpec.from_hf_config(config | {"model_type": kind}).rms_norm_eps == expected


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_sizes_that_are_left_out_are_those_of_transformers(kind: str) -> None:
    """Of a config.json without the key, not of one where it is null."""
    sizes = {k: SIZES[k] for k in ("vocab_size", "intermediate_size", "num_hidden_layers")}
    sizes |= {"hidden_size": 4096, "num_attention_heads": 32}
    theirs = AutoConfig.for_model(kind, **sizes)
    ours = ModelSpec.from_hf_config({"model_type": kind} | sizes)
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 4096 // 32)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    nulls = {"num_key_value_heads": None, "head_dim": None}
    null = ModelSpec.from_hf_config({"model_type": kind} | sizes | nulls)
    assert (null.num_key_value_heads, null.head_dim) == (32, 128)


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_every_key_that_is_left_out_means_what_it_means_to_transformers(kind: str) -> None:
    whole = AutoConfig.for_model(kind).to_dict()
    used = {name: value for name, value in whole.items() if name != "model_type"}
    for left_out in [{name} for name in used] + [set(used)]:
        kept = {name: value for name, value in used.items() if name not in left_out}
        theirs = AutoConfig.for_model(kind, **kept).to_dict()
        ours = ModelSpec.from_hf_config({"model_type": kind} | kept)
        assert ours == ModelSpec.from_hf_config(theirs), left_out


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_attention_heads"])
def test_a_size_that_is_null_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name}: expected an integer, got None"):
        ModelSpec.from_hf_config({"model_type": "llama"} | SIZES | {name: None})


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "sliding_window": 7},
        QWEN | {"max_window_layers": 2},
        QWEN | {"max_window_layers": 0},
        QWEN | {"num_hidden_layers": 30},
        QWEN | {"layer_types": [FULL, WINDOW, FULL]},
        GEMMA | {"num_hidden_layers": 13},
        GEMMA | {"sliding_window_pattern": 2},
        GEMMA | {"layer_types": [FULL, WINDOW, FULL]},
    ],
)
def test_layers_with_a_window_are_those_of_transformers(changes: dict[str, Any]) -> None:
    theirs = AutoConfig.for_model(**(SIZES | changes))
    for config in (theirs.to_dict(), SIZES | changes):
        spec = ModelSpec.from_hf_config(config)
        types = getattr(theirs, "layer_types", None) or [WINDOW] * spec.num_hidden_layers
        expected = [index for index, kind in enumerate(types) if kind == WINDOW]
        windows = [7 if index in expected else None for index in range(len(types))]
        assert list(spec.windows) == windows
        assert spec.sliding_window == 7
        assert bool(spec.layer_types) == (FULL in types)


def test_a_gemma_without_a_layer_of_full_attention_or_of_a_window() -> None:
    config = SIZES | GEMMA
    assert ModelSpec.from_hf_config(config).layer_types == []
    spec = ModelSpec.from_hf_config(config | {"layer_types": [FULL] * 3})
    assert spec.windows == (None,) * 3
    assert (spec.sliding_window, spec.rope_local_base_freq) == (None, None)
    with pytest.raises(CheckpointError, match="sliding_window for its layers"):
        ModelSpec.from_hf_config(config | {"sliding_window": None})


def test_the_rotary_bases_of_gemma() -> None:
    old = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": SCALING}
    new = {
        "rope_parameters": {
            FULL: {"rope_theta": 5e5} | SCALING,
            WINDOW: {"rope_type": "default", "rope_theta": 2e4},
        }
    }
    for changes in (old, new):
        spec = ModelSpec.from_hf_config(SIZES | GEMMA | changes)
        assert (spec.rope_theta, spec.rope_local_base_freq) == (5e5, 2e4)
        assert spec.rope_scaling == SCALING
    spec = ModelSpec.from_hf_config(SIZES | GEMMA)
    assert (spec.rope_theta, spec.rope_local_base_freq, spec.rope_scaling) == (1e6, 1e4, {})
    new["rope_parameters"][WINDOW] |= SCALING
    with pytest.raises(CheckpointError, match="no rotary scaling in layers with a window"):
        ModelSpec.from_hf_config(SIZES | GEMMA | new)


def test_the_text_part_of_a_model_of_text_and_images() -> None:
    text = {k: SIZES[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    text |= {"model_type": "gemma3_text", "sliding_window": 7, "rope_scaling": SCALING}
    outer = {"model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 3}}
    spec = ModelSpec.from_hf_config(outer | {"text_config": text})
    theirs = AutoConfig.for_model(**text)
    for name in ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        assert getattr(spec, name) == getattr(theirs, name)
    assert spec.query_pre_attn_scalar == theirs.query_pre_attn_scalar
    assert spec.tie_word_embeddings == theirs.tie_word_embeddings
    assert (spec.model_type, spec.dtype) == ("gemma3_text", "bfloat16")
    with pytest.raises(CheckpointError, match="text_config"):
        ModelSpec.from_hf_config(outer)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_activation": "gelu"}, ["hidden_activation gelu_pytorch_tanh", "'gelu'"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping", "30.0"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0"]),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention", "True"]),
        ({"layer_types": [FULL, WINDOW]}, ["layer_types", "each of 3 layers"]),
        ({"layer_types": [WINDOW] * 2}, ["layer_types", "each of 3 layers"]),
        ({"layer_types": ["chunked_attention"] * 3}, ["layer_types", "chunked_attention"]),
        ({"layer_types": WINDOW}, ["layer_types", f"got '{WINDOW}'"]),
        ({"tie_word_embeddings": "false"}, ["tie_word_embeddings", "true or false", "'false'"]),
        ({"attention_bias": "no"}, ["attention_bias", "true or false", "'no'"]),
        ({"layer_types": [FULL, "chunked_attention", WINDOW]}, ["chunked_attention"]),
        ({"query_pre_attn_scalar": 0}, ["query_pre_attn_scalar", "0"]),
    ],
)
def test_what_gemma_does_not_support_is_refused(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelSpec.from_hf_config(SIZES | GEMMA | changes)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("content", [[], None, {"model_type": ["llama"]}])
def test_a_config_that_is_none_is_refused(content: Any) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: expected"):
        ModelSpec.from_hf_config(content)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 0}, ["hidden_size", ">= 1"]),
        ({"head_dim": 17}, ["head_dim", "17"]),
        ({"rope_theta": 0.0}, ["rope_theta"]),
        ({"sliding_window": 0}, ["sliding_window"]),
        ({"rope_scaling": {"factor": 2.0}}, ["rope_type", "factor"]),
        ({"num_hidden_layers": 10**12}, ["num_hidden_layers", "<= 1024"]),
        ({"layer_types": ["full_attention"] * 3}, ["layer_types", "a sliding_window beside"]),
        ({"rope_local_base_freq": 1e4}, ["rope_local_base_freq", "a sliding_window beside"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, ["factor", "'x'"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "typo": 1}}, ["only", "typo"]),
    ],
)
def test_wrong_sizes_are_refused(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelSpec(model_type="llama", **(SIZES | changes))
    for word in words:
        assert word in str(caught.value)
