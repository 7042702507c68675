"""Jobs whose engine follows a FakeScript, run in this process."""

import json
from pathlib import Path
from typing import Any

from engine.asked.config import EngineConfig, EngineSettings, GPUConfig, ModelConfig
from harness.config.schema import (
    CorrectnessConfig,
    FakeScript,
    LatencyScenario,
    ScenarioConfig,
    ThroughputScenario,
)
from harness.config.serve import ServeScenario
from harness.observe.student import t_table
from harness.point.process import WorkerJob
from harness.work.prompts import PromptRow
from harness.worker import Work, door_for
from tests.harness.cases import SPEC

UNCHECKED = CorrectnessConfig(enabled=False)


def latency(num: int, output: int = 4, **changes: Any) -> LatencyScenario:
    fields = {"num_requests": num, "output_tokens": output, "prompt_tokens": 8}
    return LatencyScenario(**({"warmup_requests": 0} | fields | changes))


def throughput(num: int, output: int = 5, **changes: Any) -> ThroughputScenario:
    fields = {"num_requests": num, "output_tokens": output, "prompt_tokens": 8}
    return ThroughputScenario(**({"warmup_requests": 0} | fields | changes))


def served(**changes: Any) -> ServeScenario:
    return ServeScenario(**({"warmup_requests": 0, "drain_s": 60.0} | changes))


def job(
    part: Any,
    script: FakeScript,
    *,
    engine: EngineSettings | None = None,
    gpu: GPUConfig | None = None,
    prompts: dict[str, list[PromptRow]] | None = None,
    **changes: Any,
) -> WorkerJob:
    """A job that measures one part of the scenario."""
    parts = {} if part is None else {part.part: part}
    scenario = ScenarioConfig(name="test", correctness=UNCHECKED, **(parts or {"load": changes}))
    fields: dict[str, Any] = {
        "name": "measure",
        "kind": "measure",
        "engine": EngineConfig(
            model=ModelConfig(name="fake", load_format="dummy", spec=SPEC),
            gpu=gpu or GPUConfig(),
            engine=engine or EngineSettings(),
        ),
        "scenario": scenario,
        "fake": script,
        "prompts": prompts or {},
        "t": t_table(10, 3000),
    }
    return WorkerJob(**(fields | changes))


def run(folder: Path, task: WorkerJob, *, spawned_ago_s: float = 0.0) -> dict[str, Any]:
    """The result of a job."""
    door = door_for(task)
    spawned_s = door.clock_zero_s + door.clock() - spawned_ago_s
    result = Work(task, folder, door, spawned_s=spawned_s).run()
    json.dumps(result, allow_nan=False)
    return result


def figures(result: dict[str, Any], area: str, quantity: str) -> dict[str, float | None]:
    """The statistics of one quantity."""
    prefix = f"{area}/{quantity}/"
    found = {
        k.removeprefix(prefix): v for k, v in result["metrics"].items() if k.startswith(prefix)
    }
    assert found
    return found
