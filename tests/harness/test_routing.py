"""Routing through the harness: its settings, what is refused, and a worker that records a trace."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.asked.offload import OffloadWarning
from engine.errors import ConfigError
from engine.model.routing import ExpertSizes, RoutingTrace, read_trace, write_trace
from harness.config.engine import check_settings, check_system, engine_config, reference_config
from harness.config.schema import (
    CorrectnessConfig,
    LatencyScenario,
    LoadScenario,
    ModelNode,
    RunConfig,
    ScenarioConfig,
    SystemConfig,
)
from harness.point.process import WorkerJob
from harness.systems.door import engine_door
from harness.worker import ROUTING_NAME, Work
from tests.engine.specs import moe_spec
from tests.harness.cases import SPEC, run_config, scenario

SYNTHETIC = "synthetic:0.5"


def config(spec: Any = None, routing: str | None = SYNTHETIC, **changes: Any) -> RunConfig:
    node = ModelNode(name="tiny", load_format="dummy", spec=spec or moe_spec(), routing=routing)
    found: RunConfig = run_config(model=node, **changes)
    return found


def test_the_reference_is_routed_alike_and_not_recorded() -> None:
    asked = config(scenario=scenario(record_routing=True))
    check_settings(asked)
    under_test, reference = engine_config(asked, None), reference_config(asked, None)
    assert under_test.model.routing == reference.model.routing == SYNTHETIC
    assert under_test.record_routing
    assert not reference.record_routing


def test_what_has_no_experts_or_no_such_trace_is_refused_before_anything_loads(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"model.routing: expected null for a model without"):
        check_settings(config(SPEC))
    with pytest.raises(ConfigError, match="record_routing: expected a model with experts"):
        check_settings(config(SPEC, None, scenario=scenario(record_routing=True)))
    with pytest.raises(ConfigError, match="expected a trace, found no file"):
        check_settings(config(routing=f"trace:{tmp_path / 'none'}"))
    path, sizes = tmp_path / "trace.parquet", ExpertSizes((0, 1), 4, 1)
    write_trace(path, RoutingTrace("other", sizes, np.zeros((1, 2, 1), dtype=np.int16)))
    with pytest.raises(ConfigError, match=r"expected a trace with 16 experts, .* \(of other\)"):
        check_settings(config(routing=f"trace:{path}"))


def test_a_peer_routes_by_itself() -> None:
    system = SystemConfig(kind="accelerate")
    with pytest.raises(ConfigError, match=r"model.routing: expected null with system=accelerate"):
        check_system(config(system=system))
    with pytest.raises(ConfigError, match=r"record_routing: expected false, got true: only"):
        config(routing=None, system=system, scenario=scenario(record_routing=True))


def test_a_record_of_routing_needs_requests() -> None:
    with pytest.raises(ConfigError, match="expected latency, throughput or serve beside it"):
        ScenarioConfig(name="load", load=LoadScenario(), record_routing=True)


@pytest.mark.thorough
def test_a_worker_records_the_experts_of_the_last_part(tmp_path: Path) -> None:
    sizes = LatencyScenario(num_requests=2, warmup_requests=1, prompt_tokens=20, output_tokens=5)
    parts = ScenarioConfig(
        name="test",
        latency=sizes,
        correctness=CorrectnessConfig(enabled=False),
        record_routing=True,
    )
    asked = config(scenario=parts)
    job = WorkerJob(
        name="measure", kind="measure", engine=engine_config(asked, None), scenario=parts
    )
    door = replace(engine_door(), probe=lambda _: {}, machine=lambda _: {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)
        result = Work(job, tmp_path, door, spawned_s=0.0).run()
    assert result["error"] is None
    assert result["effective"]["routing"]["kind"] == "synthetic"
    trace = read_trace(tmp_path / ROUTING_NAME)
    assert trace.model == "tiny"
    # Prompts and all but the last tokens of two answers; those of warming up are not there.
    assert len(trace.ids) == 2 * (20 + 5 - 1)
