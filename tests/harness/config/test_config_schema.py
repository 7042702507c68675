"""RunConfig and its parts: what is refused, and with which words."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from catalogue.entry import ModelSource
from engine.asked.config import EngineSettings, PlannerConfig
from engine.asked.kv import KVConfig
from engine.asked.offload import OffloadConfig, UVAOffloadConfig
from engine.errors import ConfigError
from engine.model.spec import ModelSpec
from harness.config.engine import check_settings, engine_config, reference_config
from harness.config.schema import (
    CorrectnessConfig,
    LatencyScenario,
    LoadScenario,
    ModelNode,
    RunConfig,
    ScenarioConfig,
    SystemConfig,
    ThroughputScenario,
    TrackingConfig,
)
from harness.config.serve import Arrivals, ServeScenario, TraceSource

SPEC = ModelSpec(
    model_type="llama",
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
)
HUB = ModelSource(kind="hub", repo="a/b", revision="main")


HTTP: dict[str, Any] = {"kind": "http", "base_url": "http://localhost:8000/v1"}


def run_config(**changes: Any) -> RunConfig:
    """A valid configuration with changes."""
    parts: dict[str, Any] = {
        "model": ModelNode(name="m", source=HUB, spec=SPEC),
        "scenario": ScenarioConfig(name="s", load=LoadScenario()),
    }
    return RunConfig(**(parts | changes))


def latency(**changes: Any) -> ScenarioConfig:
    """A scenario of one part."""
    return ScenarioConfig(name="s", latency=LatencyScenario(**changes))


def traced(path: str) -> ScenarioConfig:
    """A scenario that sends a trace again."""
    arrivals = Arrivals(process="trace")
    part = ServeScenario(num_requests=None, arrivals=arrivals, trace=TraceSource(path=path))
    return ScenarioConfig(name="s", serve=part)


@pytest.mark.parametrize(
    ("node", "settings", "words"),
    [
        (ModelSource, {"kind": "disk"}, ["model.source.kind", "hub, package, folder", "'disk'"]),
        (ModelSource, {"kind": "hub", "repo": "a/b"}, ["model.source.revision", "kind=hub"]),
        (ModelSource, {"kind": "package", "package": "p"}, ["model.source.version"]),
        (ModelSource, {"repo": "a/b"}, ["model.source.repo", "kind=folder", "'a/b'"]),
        (ModelNode, {"name": "a b", "spec": SPEC, "source": HUB}, ["model.name", "'a b'"]),
        (ModelNode, {"name": "m", "source": HUB}, ["model.spec", "model.path"]),
        (ModelNode, {"name": "m", "spec": SPEC}, ["model.path", "load_format=dummy"]),
        (
            ModelNode,
            {"name": "m", "spec": SPEC, "source": HUB, "load_format": "gguf"},
            ["model.load_format", "'gguf'"],
        ),
        (LoadScenario, {"warm_starts": 0}, ["scenario.load", "cold_starts=0 and warm_starts=0"]),
        (LoadScenario, {"cold_starts": -1}, ["scenario.load.cold_starts", "-1"]),
        (ThroughputScenario, {"num_requests": 0}, ["scenario.throughput.num_requests", ">= 1"]),
        (
            ThroughputScenario,
            {"num_requests": 10**11},
            ["num_requests", "<= 1e+06", "100000000000"],
        ),
        (LatencyScenario, {"num_requests": 10**6, "repeats": 2}, ["at most 1,000,000 requests"]),
        (
            LatencyScenario,
            {"num_requests": 10**5, "prompt_tokens": 2501},
            ["scenario.latency: expected at most 250,000,000 prompt tokens", "got 250,100,000"],
        ),
        (CorrectnessConfig, {"num_prompts": 10**11}, ["scenario.correctness.num_prompts"]),
        (LoadScenario, {"warm_starts": 10**11}, ["scenario.load.warm_starts"]),
        (LatencyScenario, {"output_tokens": 0}, ["scenario.latency.output_tokens", ">= 1"]),
        (LatencyScenario, {"max_duration_s": 0}, ["scenario.latency.max_duration_s", "> 0"]),
        (LatencyScenario, {"prompts_file": " "}, ["scenario.latency.prompts_file"]),
        (CorrectnessConfig, {"num_prompts": 0}, ["scenario.correctness.num_prompts"]),
        (ScenarioConfig, {"name": "s"}, ["scenario", "latency and serve"]),
        (TrackingConfig, {"backend": "wandb"}, ["tracking.backend", "mlflow, none", "'wandb'"]),
        (TrackingConfig, {"backend": "none", "uri": "x"}, ["tracking.uri", "tracking=mlflow"]),
        (TrackingConfig, {"experiment": ""}, ["tracking.experiment"]),
        (PlannerConfig, {"choose": "yes"}, ["planner.choose", "true or false"]),
        (PlannerConfig, {"objective": "x"}, ["planner.objective", "latency, throughput", "'x'"]),
        (PlannerConfig, {"objective": "context"}, ["planner.objective", "no effect"]),
        (PlannerConfig, {"auto_fields": ["x"]}, ["planner.auto_fields", "max_num_seqs", "'x'"]),
        (PlannerConfig, {"auto_fields": "max_model_len"}, ["planner.auto_fields", "a list"]),
        (PlannerConfig, {"auto_fields": ["max_model_len"] * 2}, ["planner.auto_fields", "once"]),
        (run_config, {"mode": "x"}, ["mode", "run, plan", "'x'"]),
        (SystemConfig, {"kind": "other"}, ["system.kind", "native", "'other'"]),
        (
            SystemConfig,
            {"kind": "vllm", "base_url": "x"},
            ["system.base_url", "vllm", "system=http"],
        ),
        (SystemConfig, {"kind": "http"}, ["system.base_url", "http://", "None"]),
        (SystemConfig, {**HTTP, "base_url": "localhost:1"}, ["system.base_url", "'localhost:1'"]),
        (SystemConfig, {**HTTP, "prompts": "x"}, ["system.prompts", "text", "'x'"]),
        (SystemConfig, {**HTTP, "request_timeout_s": 0}, ["system.request_timeout_s", "> 0"]),
        (run_config, {"rerun": "never"}, ["rerun", "all, invalid, failed, none", "'never'"]),
        (run_config, {"timeout_s": 0}, ["timeout_s", "> 0"]),
        (run_config, {"scenario": latency(prompt_tokens=128)}, ["scenario.latency", "128", "192"]),
        (
            run_config,
            {
                "scenario": latency(prompt_tokens=32, output_tokens=16),
                "engine": EngineSettings(max_model_len=40),
            },
            ["scenario.latency", "engine.max_model_len", "40", "48"],
        ),
    ],
)
def test_refusals_name_the_key_and_the_value(
    node: Any, settings: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        node(**settings)
    for word in words:
        assert word in str(caught.value)


def test_a_part_of_exactly_the_context_fits_and_a_file_has_its_own_lengths() -> None:
    fits = latency(prompt_tokens=112, output_tokens=16)
    assert run_config(scenario=fits).scenario.longest_tokens()["latency"] == 128
    own = latency(prompt_tokens=1000, prompts_file="p.jsonl")
    assert "latency" not in run_config(scenario=own).scenario.longest_tokens()


def uva(**settings: Any) -> OffloadConfig:
    """An OffloadConfig of the uva backend."""
    return OffloadConfig(offload_backend="uva", uva=UVAOffloadConfig(**settings))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"offload": uva(cpu_offload_gb=0)}, ["cpu_offload_gb", "nothing would move"]),
        (
            {"offload": uva(cpu_offload_gb=1, cpu_offload_params=["w2"])},
            ["cpu_offload_params", "w2"],
        ),
        ({"engine": EngineSettings(max_model_len=129)}, ["engine.max_model_len", "128", "129"]),
        ({"scenario": latency(prompts_file="nosuch.jsonl")}, ["prompts_file", "nosuch.jsonl"]),
        ({"scenario": traced("nosuch.txt")}, ["trace.path", "found none at", "nosuch.txt"]),
        ({"scenario": traced(__file__)}, ["trace.format", "expected azure or mooncake"]),
    ],
)
def test_what_depends_on_the_model_is_refused_before_anything_loads(
    changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_settings(run_config(**changes))
    for word in words:
        assert word in str(caught.value)


def test_engine_and_reference_configurations(tmp_path: Path) -> None:
    config = run_config(offload=uva(cpu_offload_gb=1))
    check_settings(config)
    built = engine_config(config, tmp_path)
    assert built.model.path == str(tmp_path)
    assert built.offload is config.offload
    assert built.kv is config.kv
    reference = reference_config(config, tmp_path)
    assert reference.offload.backend == "none"
    assert reference.engine.enforce_eager
    other = reference_config(replace(config, offload=OffloadConfig()), tmp_path)
    assert reference == other


def test_the_reference_has_no_host_tier_and_room_for_its_prompts_alone(tmp_path: Path) -> None:
    kv = KVConfig(cpu_gib=1.0, pin_limit_gib=0.5, enable_prefix_caching=True, block_size=32)
    config = run_config(kv=kv, engine=EngineSettings(max_model_len=100))
    reference = reference_config(config, tmp_path)
    assert reference.kv == KVConfig(block_size=32)
    assert reference.engine.max_model_len == 16 + 16
    assert reference_config(replace(config, kv=KVConfig()), tmp_path).engine.max_model_len == 100
