"""A config.json from the sizes of a model, for systems that build it from one."""

from pathlib import Path
from typing import Any, Final

from engine.asked.config import ModelConfig
from engine.errors import ConfigError
from engine.model.checkpoint import read_folder
from engine.model.families import FULL, WINDOW
from engine.model.spec import ModelSpec

CLASSES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
_SAME: Final = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "sliding_window",
    "dtype",
)


def model_spec(model: ModelConfig) -> ModelSpec:
    """Return the sizes of a model, from its folder where it has one.

    Raises:
        CheckpointError: There is no config.json, or it is of no supported family.
        ConfigError: There are neither sizes nor a folder.
    """
    if model.path is None:
        if model.spec is None:
            raise ConfigError(f"model {model.name!r}: expected sizes or a folder, got neither.")
        return model.spec
    return read_folder(Path(model.path)).spec


def config_json(spec: ModelSpec) -> dict[str, Any]:
    """Return the content of a config.json with these sizes.

    Args:
        spec: of any supported family.
    """
    found: dict[str, Any] = {name: getattr(spec, name) for name in _SAME}
    found["architectures"] = [CLASSES[spec.model_type]]
    full: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    full |= spec.rope_scaling
    default = spec.architecture.local_theta_default
    if default is None:
        found["rope_parameters"] = full
    else:
        local = {"rope_type": "default", "rope_theta": spec.rope_local_base_freq or default}
        found["rope_parameters"] = {FULL: full, WINDOW: local}
    if (scalar := spec.query_pre_attn_scalar) is not None:
        # transformers takes whole numbers alone here.
        found["query_pre_attn_scalar"] = int(scalar) if scalar == int(scalar) else scalar
    if spec.sliding_window is not None:
        layers = spec.num_hidden_layers
        found |= {"layer_types": spec.layer_types or [WINDOW] * layers, "use_sliding_window": True}
        found["max_window_layers"] = 0
    return found
