"""EngineConfig and its parts: defaults hold, bounds are refused by name."""

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.asked.config import EngineConfig, EngineSettings, GPUConfig, ModelConfig
from engine.asked.kv import KVConfig, KVTransferConfig
from engine.asked.offload import OffloadConfig, UVAOffloadConfig
from engine.errors import ConfigError
from engine.model.spec import ModelSpec


def tiny_spec(**changes: Any) -> ModelSpec:
    """Sizes of a small llama."""
    sizes: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
    }
    return ModelSpec(**(sizes | changes))


@pytest.mark.parametrize(
    ("node", "settings", "words"),
    [
        (GPUConfig, {"device": "tpu"}, ["gpu.device", "auto, cuda, cpu", "'tpu'"]),
        (GPUConfig, {"memory_gib": 0}, ["gpu.memory_gib", "> 0", "0"]),
        (GPUConfig, {"memory_gib": -1.5}, ["gpu.memory_gib", "-1.5"]),
        (GPUConfig, {"link_gb_s": 0}, ["gpu.link_gb_s"]),
        (GPUConfig, {"hbm_gb_s": float("inf")}, ["gpu.hbm_gb_s"]),
        (GPUConfig, {"bf16_tflops": "a"}, ["gpu.bf16_tflops"]),
        (KVConfig, {"block_size": 12}, ["kv.block_size", "8, 16, 32, 64 or 128", "12"]),
        (KVConfig, {"block_size": 16.0}, ["kv.block_size", "got 16.0"]),
        (KVConfig, {"block_size": [16]}, ["kv.block_size", "[16]"]),
        (KVConfig, {"disable_sliding_window": "no"}, ["disable_sliding_window", "got 'no'"]),
        (KVConfig, {"enable_prefix_caching": None}, ["enable_prefix_caching", "got None"]),
        (KVConfig, {"swap_space": 10**400}, ["kv.swap_space", "expected a finite number >= 0"]),
        (KVConfig, {"swap_space": -1}, ["kv.swap_space", ">= 0", "-1"]),
        (KVConfig, {"num_cpu_blocks": -1}, ["kv.num_cpu_blocks", "an integer >= 0", "-1"]),
        (KVConfig, {"num_cpu_blocks": 4.0}, ["kv.num_cpu_blocks", "an integer", "4.0"]),
        (KVConfig, {"cpu_gib": "8"}, ["kv.cpu_gib", "a number >= 0", "'8'"]),
        (KVConfig, {"cpu_gib": 8, "pin_limit_gib": -1}, ["kv.pin_limit_gib", ">= 0", "-1"]),
        (KVConfig, {"pin_limit_gib": 10}, ["host tier", "kv.cpu_gib"]),
        (KVConfig, {"pin_limit_gib": 10, "cpu_gib": 0}, ["kv.pin_limit_gib", "host tier"]),
        (KVConfig, {"cpu_gib": 8, "num_cpu_blocks": 9}, ["kv.cpu_gib=8", "kv.num_cpu_blocks=9"]),
        (KVConfig, {"cpu_gib": 8, "swap_space": 4}, ["kv.cpu_gib=8", "kv.swap_space=4"]),
        (KVConfig, {"num_cpu_blocks": 7, "swap_space": 4}, ["num_cpu_blocks=7", "swap_space=4"]),
        (KVTransferConfig, {}, ["kv_connector", "OffloadingConnector", "None"]),
        (KVTransferConfig, {"kv_connector": "NixlConnector"}, ["kv_connector", "'NixlConnector'"]),
        (
            KVTransferConfig,
            {"kv_connector": "OffloadingConnector", "kv_role": "kv_producer"},
            ["kv_role", "kv_both", "'kv_producer'"],
        ),
        (EngineSettings, {"gpu_memory_utilization": 0}, ["gpu_memory_utilization", "> 0"]),
        (EngineSettings, {"gpu_memory_utilization": 1.01}, ["gpu_memory_utilization", "<= 1"]),
        (EngineSettings, {"max_model_len": 0}, ["engine.max_model_len", ">= 1"]),
        (EngineSettings, {"max_num_seqs": 0}, ["engine.max_num_seqs", ">= 1"]),
        (EngineSettings, {"max_num_seqs": 2.0}, ["engine.max_num_seqs", "integer"]),
        (
            EngineSettings,
            {"max_num_seqs": 8, "max_num_batched_tokens": 4},
            ["max_num_batched_tokens", "max_num_seqs=8", "got 4"],
        ),
        (EngineSettings, {"enforce_eager": "false"}, ["engine.enforce_eager", "got 'false'"]),
        (EngineSettings, {"dtype": "int8"}, ["engine.dtype", "'int8'"]),
        (EngineSettings, {"seed": -1}, ["engine.seed", "-1"]),
        (EngineSettings, {"host_reserve_gib": -1}, ["engine.host_reserve_gib", "-1"]),
        (EngineSettings, {"uva_stage_tokens": 0}, ["engine.uva_stage_tokens"]),
        (ModelConfig, {"name": "m"}, ["model 'm'", "path", "spec"]),
        (ModelConfig, {"name": "m", "spec": tiny_spec()}, ["path", "load_format=dummy"]),
        (ModelConfig, {"name": "m", "path": "p", "load_format": "gguf"}, ["load_format", "'gguf'"]),
    ],
)
def test_bounds_are_refused_by_name(node: type, settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        node(**settings)
    for word in words:
        assert word in str(caught.value)


def test_parts_have_defaults_that_hold() -> None:
    config = EngineConfig(model=ModelConfig(name="m", spec=tiny_spec(), load_format="dummy"))
    assert config.offload == OffloadConfig()
    assert config.to_dict()["kv"]["block_size"] == 16
    assert config.to_dict()["model"]["spec"]["num_hidden_layers"] == 2


def test_lists_and_dicts_of_a_configuration_are_sealed() -> None:
    names = ["mlp", "o_proj"]
    config = replace(
        EngineConfig(
            model=ModelConfig(name="x", path="/x"),
            offload=OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=1, cpu_offload_params=names)),
        ),
        measured_rates={"h2d_gb_s": 50.0},
    )
    names.append("q_proj")
    held, rates = config.offload.uva.cpu_offload_params, config.measured_rates
    changes: list[Callable[[], Any]] = [
        lambda: held.append("q_proj"),
        lambda: held.__setitem__(0, "q_proj"),
        lambda: held.extend(["q_proj"]),
        lambda: rates.update(h2d_gb_s=1.0),
        lambda: rates.__setitem__("h2d_gb_s", 1.0),
    ]
    for copied in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert copied == config
        for change in changes:
            with pytest.raises(TypeError, match="sealed configuration; cannot change"):
                change()
        held, rates = copied.offload.uva.cpu_offload_params, copied.measured_rates
    assert held == ["mlp", "o_proj"]
    assert json.loads(json.dumps(config.to_dict()))["measured_rates"] == {"h2d_gb_s": 50.0}


def test_is_sealed_copied_with_replace_and_pickled() -> None:
    config = EngineConfig(model=ModelConfig(name="m", path="p"))
    with pytest.raises(AttributeError, match="sealed"):
        config.kv = KVConfig()
    changed = replace(config, offload=OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=1)))
    assert changed.offload.backend == "uva"
    assert config.offload.backend == "none"
    again = pickle.loads(pickle.dumps(changed))
    assert again == changed
    with pytest.raises(AttributeError, match="sealed"):
        again.kv = KVConfig()
