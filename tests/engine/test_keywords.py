"""One declaration of a setting: a field of a class is a keyword and a key, with type and help."""

import inspect
from dataclasses import MISSING, dataclass, field
from typing import Any

import pytest

from engine.asked.config import EngineConfig, EngineSettings, GPUConfig, ModelConfig, PlannerConfig
from engine.asked.keyword_types import Keywords
from engine.asked.keywords import (
    COMBINED,
    NOT_SUPPORTED,
    as_keywords,
    config_from_keywords,
    describe_keywords,
    in_keywords,
    keyword_types,
    keywords_of,
)
from engine.asked.kv import KVConfig
from engine.asked.offload import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from engine.errors import ConfigError
from engine.llm import LLM
from engine.model.spec import ModelSpec
from engine.sealed import key_types, settings
from harness.config.schema import RunConfig
from tests.contracts.project import ROOT
from tests.engine.specs import small_spec

CLASSES = (
    EngineSettings,
    GPUConfig,
    KVConfig,
    ModelConfig,
    OffloadConfig,
    PlannerConfig,
    PrefetchOffloadConfig,
    UVAOffloadConfig,
)
OTHER: dict[str, Any] = {
    "gpu_name": "mine",
    "device": "cpu",
    "gpu_memory_gib": 3.0,
    "host_gib": 4.0,
    "link_gb_s": 5.0,
    "hbm_gb_s": 6.0,
    "bf16_tflops": 7.0,
    "compute_capability": 7.5,
    "request_tokens": 1000,
    "offload_backend": "uva",
    "cpu_offload_gb": 2.0,
    "cpu_offload_params": ["mlp"],
    "experts_first": True,
    "expert_slots": 4,
    "offload_group_size": 4,
    "offload_num_in_group": 2,
    "offload_prefetch_step": 3,
    "offload_params": ["self_attn"],
    "block_size": 32,
    "enable_prefix_caching": True,
    "num_cpu_blocks": 9,
    "cpu_gib": 1.0,
    "swap_space": 2.0,
    "disable_sliding_window": True,
    "pin_limit_gib": 1.5,
    "gpu_memory_utilization": 0.5,
    "max_model_len": 77,
    "max_num_seqs": 5,
    "max_num_batched_tokens": 99,
    "enforce_eager": True,
    "dtype": "float16",
    "seed": 3,
    "host_reserve_gib": 0.25,
    "uva_stage_tokens": 2,
    "choose": True,
    "objective": "throughput",
    "kv_tokens": 11,
    "auto_fields": ["max_model_len"],
    "referee": True,
    "weight_format": "auto",
    "measured_rates": {"h2d_gb_s": 1.0},
    "emulated_kv_tokens": 320,
    "facts_folder": "facts",
    "kept_folder": "kept",
    "model_name": "called",
    "load_format": "dummy",
    "keep_lossless": True,
    "quantize": "int4",
    "routing": "synthetic:0.5",
    "record_routing": True,
    "spec": small_spec(),
}
"""A value of each keyword that is not its default."""
NEEDED: dict[str, dict[str, Any]] = {
    "pin_limit_gib": {"cpu_gib": 2.0},
    "objective": {"choose": True},
    "kv_tokens": {"choose": True},
    "referee": {"choose": True},
    "keep_lossless": {"weight_format": "lossless", "kept_folder": "kept"},
    "offload_num_in_group": {"offload_group_size": 4},
    "routing": {"load_format": "dummy"},
}
"""Keywords that have no effect alone -> what stands beside them."""


def test_every_field_is_a_keyword() -> None:
    assert set(keywords_of()) - {"model"} == set(OTHER)
    fields_of = {found.owner: set[str]() for found in keywords_of().values()}
    for found in keywords_of().values():
        fields_of[found.owner].add(found.field.name)
    for kind in CLASSES:
        own = {found.path for found in settings(kind, whole=(ModelSpec,)) if "." not in found.path}
        assert fields_of[kind] == own - {"uva", "prefetch", "experts"}


@pytest.mark.parametrize("name", sorted(OTHER))
def test_a_keyword_sets_its_field(name: str) -> None:
    found = config_from_keywords("folder", {name: OTHER[name], **NEEDED.get(name, {})})
    value: Any = found
    setting = keywords_of()[name]
    for part in setting.path.split("."):
        value = getattr(value, part)
    assert value == OTHER[name]
    if setting.default is not MISSING:
        assert value != setting.default


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_cpu_blocks": 5, "cpu_gib": 1}, "expected one size of the host tier"),
        ({"offload_config": {}, "uva_stage_tokens": 1, "cpu_offload_gb": 1}, "both"),
        ({"kv_tokens": 4}, "expected planner.choose=true"),
        ({"choose": True, "cpu_offload_gb": 1}, "expected no offload settings beside it"),
        ({"pin_limit_gib": 1}, "without a host tier"),
    ],
)
def test_conflicts_are_told(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_keywords("folder", given)


@dataclass(kw_only=True)
class MoreSettings(EngineSettings):
    """Settings with one more."""

    new_limit: int = field(default=7)
    """Something new,
    in two lines."""


@dataclass(kw_only=True)
class MoreConfig(EngineConfig):
    """A configuration with these."""

    engine: MoreSettings = field(default_factory=MoreSettings)
    """Limits and switches of the engine."""


def test_a_new_field_is_a_keyword_and_a_key_at_once() -> None:
    assert keywords_of(MoreConfig)["new_limit"].help == "Something new, in two lines."
    assert keywords_of(MoreConfig)["max_num_seqs"].help == "Sequences that run at once."
    found = config_from_keywords("folder", {"new_limit": 3, "max_num_seqs": 2}, MoreConfig)
    assert isinstance(found, MoreConfig)
    assert (found.engine.new_limit, found.engine.max_num_seqs) == (3, 2)
    with pytest.raises(ConfigError, match="unknown keyword 'new_limit'"):
        config_from_keywords("folder", {"new_limit": 3})
    assert dict(key_types(MoreConfig))["engine.new_limit"] is int


def test_the_harness_has_the_engine_s_classes_as_its_schema() -> None:
    keys = dict(key_types(RunConfig))
    own = {found.path for found in settings(EngineConfig)}
    given = {
        "measured_rates",
        "emulated_kv_tokens",
        "request_tokens",
        "facts_folder",
        "kept_folder",
        "record_routing",
    }
    assert own - given <= set(keys)


@pytest.mark.parametrize("name", ["request_tokens", "emulated_kv_tokens"])
@pytest.mark.parametrize("value", [0, -3, 1.5, "many", True])
def test_numbers_of_no_section_have_bounds_too(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: expected an integer >= 1, got {value!r}"):
        config_from_keywords("folder", {name: value})


def test_a_model_s_fields_are_replaced_by_keywords() -> None:
    model = ModelConfig(name="a", load_format="dummy", spec=small_spec())
    found = config_from_keywords(model, {"model_name": "b"})
    assert (found.model.name, found.model.spec) == ("b", model.spec)


def test_the_list_of_keywords_says_all_of_them() -> None:
    lines = LLM.keywords().splitlines()
    assert lines == describe_keywords().splitlines()
    named = {line.partition(":")[0].partition("=")[0] for line in lines}
    assert named == set(keywords_of()) | set(COMBINED)
    assert (
        "uva_stage_tokens=None: an integer or None. From this many tokens in a step on"
        in "\n".join(lines)
    )


def test_the_types_are_made_from_the_fields() -> None:
    """`python -m engine.asked.keywords > engine/asked/keyword_types.py` writes them anew."""
    file = ROOT / "engine" / "asked" / "keyword_types.py"
    assert file.read_text(encoding="utf-8") == keyword_types()
    assert set(Keywords.__annotations__) == {*keywords_of(), *COMBINED} - {"model"}


def test_the_signature_names_every_keyword_with_its_default() -> None:
    found = inspect.signature(LLM.__init__).parameters
    assert set(found) == {"self", *keywords_of(), *COMBINED}
    assert found["max_num_seqs"].default == 64
    assert found["cpu_offload_gb"].annotation is float
    assert found["tensor_parallel_size"].default == 1
    assert "max_num_seqs=64: an integer. Sequences that run at once." in str(LLM.__init__.__doc__)


def test_keywords_of_other_engines_are_refused_with_the_reason() -> None:
    assert not NOT_SUPPORTED.keys() & {*keywords_of(), *COMBINED}
    for name, (inert, why) in NOT_SUPPORTED.items():
        for value in inert:
            assert config_from_keywords("x", {name: value}) == config_from_keywords("x", {})
        if why:
            with pytest.raises(ConfigError) as caught:
                config_from_keywords("x", {name: "other"})
            assert str(caught.value) == f"{name}='other': not supported: {why}"
    with pytest.raises(ConfigError, match="unknown keyword 'quantisation'"):
        config_from_keywords("x", {"quantisation": None})
    with pytest.raises(ConfigError, match=r"keyword 'gpu'\. A budget is gpu_memory_gib=16\. tight"):
        config_from_keywords("x", {"gpu": "rtx4080_16gb"})
    for value, words in (
        ("uva", "Did you mean offload_backend='uva'?"),
        ("auto", "Did you mean choose=True?"),
        ("none", "Remove it: "),
        (None, "Remove it: "),
        ("half", "Did you mean choose=True or offload_backend='uva' or .*='experts'?"),
        ({}, "Did you mean choose=True or "),
    ):
        with pytest.raises(ConfigError, match=f"keyword 'offload'. {words}"):
            config_from_keywords("x", {"offload": value})
    with pytest.raises(ConfigError, match=r"trust_remote_code=True: not supported: no code of"):
        config_from_keywords("x", {"trust_remote_code": True})


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("engine.max_num_seqs: expected", "max_num_seqs: expected"),
        ("Set offload.uva.cpu_offload_gb=3.", "Set cpu_offload_gb=3."),
        ("Set offload=auto (in Python choose=True), or", "Set choose=True, or"),
        ("got choose=false: Set gpu.memory_gib=2", "got choose=False: Set gpu_memory_gib=2"),
        ("with: offload=auto kv.cpu_gib=9.", "with: choose=True, cpu_gib=9."),
        ("engine.dtype=float16 or model.path=X", "dtype='float16' or model=X"),
        ("A  kv.cpu_gib=1  x\n   offload=auto   y", "A  cpu_gib=1     x\n   choose=True    y"),
        ("expected true or false, got 'no'", "expected True or False, got 'no'"),
        ("kv.pin_limit_gib: expected null", "pin_limit_gib: expected None"),
        ("offload=uva needs engine.seed_x", "offload_backend='uva' needs engine.seed_x"),
        ("Set offload=experts.", "Set offload_backend='experts'."),
        ("/home/engine.seed/x and the truth", "/home/engine.seed/x and the truth"),
    ],
)  # fmt: skip
def test_messages_speak_of_keywords(message: str, said: str) -> None:
    assert as_keywords(message) == said
    with pytest.raises(ConfigError) as caught, in_keywords():
        raise ConfigError(message)
    assert str(caught.value) == said


def test_nodes_of_an_offload_may_be_dicts() -> None:
    found = OffloadConfig(uva={"cpu_offload_gb": 2}, prefetch={"offload_group_size": 0})  # type: ignore[arg-type]
    assert found == OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=2))
    assert config_from_keywords("x", {"offload_config": found}).offload == found
    with pytest.raises(ConfigError, match=r"offload\.uva\.cpu_offload: there is no such key"):
        OffloadConfig(uva={"cpu_offload": 2})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="UVAOffloadConfig or a dict of its fields, got 2"):
        OffloadConfig(uva=2)  # type: ignore[arg-type]
