"""A value that another engine calls otherwise, or that has a unit: all doors say what is meant."""

from typing import Any

import pytest

from engine.asked.keywords import config_from_keywords
from engine.errors import ConfigError, did_you_mean
from harness.config.compose import Composer
from server.flags import parse


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


VALUES = [
    ("engine.dtype", "half", "Did you mean float16?"),
    ("engine.dtype", "bf16", "Did you mean bfloat16?"),
    ("engine.weight_format", "losless", "Did you mean lossless?"),
    ("model.quantize", "4bit", "Did you mean int4?"),
    ("offload.offload_backend", "stream", "Did you mean prefetch?"),
    ("planner.objective", "throughputs", "Did you mean throughput?"),
    ("gpu.memory_gib", "16GB", "Write the number alone: 16."),
    ("engine.max_model_len", "8k", "Write it out, such as 8192."),
    ("kv.swap_space", "500 MB", "Write the number without a unit"),
]


@pytest.mark.parametrize(("key", "value", "said"), VALUES)
def test_every_door_says_what_is_meant(key: str, value: str, said: str, composer: Composer) -> None:
    keyword = "gpu_memory_gib" if key == "gpu.memory_gib" else key.rpartition(".")[2]
    given: dict[str, Any] = {keyword: value}
    with pytest.raises(ConfigError) as error:
        composer.plan(["model=glass", f"{key}={value}"])
    assert said in str(error.value)
    with pytest.raises(ConfigError) as error:
        config_from_keywords("folder", given)
    assert said in str(error.value)
    with pytest.raises(ConfigError) as error:
        parse(["folder", f"--{keyword.replace('_', '-')}", value])
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("offload=off", "Did you mean none?"),
        ("offload=false", "Did you mean none?"),
        ("kv=host", "Did you mean cpu?"),
        ("tracking=off", "Did you mean none?"),
        ("system=transformers", "Did you mean accelerate?"),
        ("system.kind=vlm", "Did you mean vllm?"),
        ("gpu.device=gpu", "Did you mean cuda?"),
        ("model.dtype=half", "Did you mean engine.dtype?"),
        ("engine.quantization=awq", "there is no such key: how a checkpoint is quantised is read"),
        ("plan.reported_kv_gib=-3.44GiB", "Write the number alone: -3.44."),
        ("kv_cache_dtype=fp8", "there is no such key: KV is kept in the model's dtype."),
    ],
)
def test_a_configuration_says_what_is_meant(typed: str, said: str, composer: Composer) -> None:
    with pytest.raises(ConfigError) as error:
        composer.plan(["model=glass", typed])
    assert said in str(error.value)


def test_a_word_that_is_a_choice_itself_stays() -> None:
    assert did_you_mean("cpu", ["uva", "cpu"]) == " Did you mean cpu?"
    assert did_you_mean("cpu", ["uva", "none"]) == " Did you mean uva?"
    assert did_you_mean("zzz", ["uva", "none"]) == ""
