"""RunConfigs and folders for the tests of runs."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from engine.asked.config import GPUConfig
from engine.model.spec import ModelSpec
from harness.config.schema import (
    CorrectnessConfig,
    LatencyScenario,
    LoadScenario,
    ModelNode,
    RunConfig,
    ScenarioConfig,
    ThroughputScenario,
    TrackingConfig,
)

SPEC = ModelSpec(
    model_type="llama",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
)


def scenario(**changes):
    sizes = {"prompt_tokens": 8, "output_tokens": 5, "warmup_requests": 1}
    fields = {
        "name": "test",
        "latency": LatencyScenario(num_requests=11, **sizes),
        "throughput": ThroughputScenario(num_requests=4, **sizes),
    }
    return ScenarioConfig(**(fields | changes))


def run_config(**changes):
    fields = {
        "model": ModelNode(name="tiny", load_format="dummy", spec=SPEC),
        "gpu": GPUConfig(name="cpu", device="cpu"),
        "scenario": scenario(),
        "tracking": TrackingConfig(backend="none"),
    }
    return RunConfig(**(fields | changes))


def attempt(config):
    """An attempt at a point that runs no worker."""
    from harness.config.engine import engine_config
    from harness.point.point import Attempt, Findings, Inputs

    unused = dict.fromkeys(("run_dir", "home", "gpu", "telemetry", "view"))
    facts = {
        "environment": {},
        "command": (),
        "inputs": Inputs(engine=engine_config(config, Path("weights"))),
    }
    return Attempt(config=config, findings=Findings(), **facts, **unused)


def load_only(**starts):
    return ScenarioConfig(
        name="load",
        load=LoadScenario(**starts),
        correctness=CorrectnessConfig(enabled=False),
    )


def fake_command(tmp_path, script):
    """The command of a worker whose engine follows the script."""
    path = tmp_path / "script.json"
    path.write_text(json.dumps(asdict(script)), encoding="utf-8")
    return (sys.executable, "-m", "tests.harness.fakes", str(path))


def quoted(value: object) -> str:
    """A value as Hydra's parser takes it literally, whatever its characters."""
    escaped = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
