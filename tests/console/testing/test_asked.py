"""What the harness is asked is what the engine of a profile would be given."""

from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from console.registry.checks import config_of, spec_of
from console.registry.models import Models
from console.testing import asked
from engine.errors import ConfigError
from harness.config.compose import Composer

PROFILES: list[dict[str, Any]] = [
    {},
    {"offload": "none", "max_model_len": 64, "max_num_seqs": 3},
    {"offload": "uva", "cpu_offload_gb": 4.0, "cpu_offload_params": ["mlp", "self_attn.q_proj"]},
    {"cpu_offload_gb": 2},
    {"offload": "prefetch", "offload_group_size": 4, "offload_num_in_group": 2},
    {"offload": "auto", "objective": "throughput", "weight_format": "lossless"},
    {"quantize": "int4", "offload": "none"},
    {"kv_cpu_gib": 1.5, "enable_prefix_caching": True, "device": "cpu", "gpu_memory_gib": 0.5},
]
NODES = ("offload.uva", "offload.prefetch", "kv", "engine", "planner")


@pytest.mark.thorough
def test_profiles_mean_the_same_to_the_harness(models: Models, tmp_path: Path) -> None:
    model = models.get("toy")
    profiles = {f"p.{number}": asked.asked_of(each, model) for number, each in enumerate(PROFILES)}
    words = asked.sweep_command(["model=glass"], profiles, tmp_path / "s")
    files = Path(words[words.index("--config-dir") + 1])
    points = Composer(files).plan(words[3:], multirun=True).points
    uva = Composer().plan(["model=glass", *profiles["p.2"].overrides()]).points
    settings = [*PROFILES, PROFILES[2]]
    for point, each in zip([*points, *uva], settings, strict=True):
        config, wanted = point.config, config_of(each, spec_of(model))
        for node in NODES:
            read = attrgetter(node)
            assert asdict(read(config)) == asdict(read(wanted))
        assert config.offload.backend == wanted.offload.backend
        assert config.model.quantize == wanted.model.quantize
        assert config.gpu.device == wanted.gpu.device
        assert config.gpu.memory_gib == wanted.gpu.memory_gib


@pytest.mark.thorough
def test_sides_of_an_ab_differ_in_what_the_profiles_do(models: Models, tmp_path: Path) -> None:
    model = models.get("toy")
    a = asked.asked_of({"max_num_seqs": 4}, model)
    b = asked.asked_of({"max_num_seqs": 4, "offload": "uva", "cpu_offload_gb": 4.0}, model)
    words = asked.ab_command(["model=glass"], [a, b], tmp_path / "x=1, [y]", pairs=2, aa_pairs=0)
    [point] = Composer().plan(words).points
    assert point.config.ab is not None
    assert point.config.ab.a == ["offload=none"]
    assert point.config.ab.b == ["offload=uva", "offload.uva.cpu_offload_gb=4.0"]
    assert point.config.engine.max_num_seqs == 4
    assert point.composed.hydra.run.dir == str(tmp_path / "x=1, [y]")


@pytest.mark.parametrize(
    "text",
    ["plain", "a b", "it's", "back\\", "back\\'s", "\\\\'", '"x"', "[1,2]", "null", "\u00fc", ""],
)
def test_texts_arrive_as_they_are(text: str) -> None:
    parser = OverridesParser.create()
    found: Any = parser.parse_override(f"x={asked.as_hydra(text)}").value()
    assert found == text
    listed: Any = parser.parse_override(f"x={asked.as_hydra([text, text])}").value()
    assert listed == [text, text]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "null"), (True, "true"), (4, "4"), (0.1, "0.1"), ([1, 2], "[1,2]")]
)
def test_values_as_hydra_writes_them(value: Any, text: str) -> None:
    assert asked.as_hydra(value) == text


def test_references_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"texts without \$\{"):
        asked.as_hydra("${oc.env:HOME}")


def test_a_prompt_and_its_answer_are_half_of_the_longest_sequence() -> None:
    found = asked.sizes_of("test", 1, 100)
    assert found["scenario.throughput.num_requests"] == 1
    assert found["scenario.latency.num_requests"] == 1
    assert found["scenario.throughput.prompt_tokens"] == 25
    found = asked.sizes_of("ab", 5000, 100_000)
    assert found["scenario.throughput.num_requests"] == 5000
    assert found["scenario.latency.num_requests"] == asked.MOST_LATENCY_AB
    assert found["scenario.latency.output_tokens"] == asked.MOST_TOKENS


def test_models_are_found_by_name_or_folder(models: Models) -> None:
    model = models.get("toy")
    assert asked.model_of(model, [{}]).overrides() == ["model=glass"]
    model.path = None
    with pytest.raises(ConfigError, match="weights are on this machine, got toy, which is untest"):
        asked.model_of(model, [{}, {"load_format": "dummy"}])
    assert asked.model_of(model, [{"load_format": "dummy"}]).overrides() == ["model=glass"]
    model.kind, model.source, model.path = "folder", "/a b", "/a b"
    assert asked.model_of(model, [{}]).overrides() == [
        "model=local",
        "model.name='toy'",
        "model.path='/a b'",
    ]
