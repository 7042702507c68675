"""Metrics that the harness produces and definitions in the reports are the same names."""

import re
from dataclasses import replace

import pytest

from engine.config import EngineConfig, ModelConfig
from engine.probe import probe_link
from harness.job import WorkerJob
from harness.measure.latency import latency_pools
from harness.scenarios.load import summarise_loads
from harness.scenarios.predicted import differences, predicted_times
from harness.schema import LatencyScenario, ThroughputScenario
from harness.telemetry.summary import peak_metrics, window_metrics
from harness.telemetry.window import Span, Window
from harness.traffic.settings import Arrivals, Objectives, PeakSearch
from harness.worker import Work
from reports.record.metrics import METRIC_DEFINITIONS, STATISTIC_DEFINITIONS, definition
from reports.record.record import summarise
from reports.record.telemetry import COLUMNS
from tests.contracts.project import python_files
from tests.engine.specs import plan_small, small_spec
from tests.harness.cases import SPEC, load_only, scenario
from tests.harness.fakes import FakeClock, Script, fake_door
from tests.harness.telemetry.cases import table
from tests.harness.traffic.cases import serve

SEARCH = serve(
    arrivals=Arrivals(),
    slo=Objectives(e2e_ms=1e9),
    search=PeakSearch(low_per_s=1, high_per_s=2, duration_s=1),
)


FROM_THE_RUN = ("telemetry/cpu_pct", "link/nvml_h2d_gb_s")
"""Metrics that need a sampler and a worker beside it; tests/harness/telemetry has them."""


BOTH_SLABS = {"touch", "pin"}
"""Phases of memory for weights and for KV blocks, which the engine adds up in a loop."""


def engine_names(call: str) -> set[str]:
    """The names that the engine's sources give to phases or busy times."""
    text = "".join(path.read_text(encoding="utf-8") for path in python_files("engine"))
    return set(re.findall(rf'\.{call}\("(\w+)"', text))


def job(kind: str) -> WorkerJob:
    model = ModelConfig(name="tiny", load_format="dummy", spec=SPEC)
    several = ThroughputScenario(num_requests=4, prompt_tokens=8, output_tokens=5, repeats=2)
    twice = LatencyScenario(num_requests=3, prompt_tokens=8, output_tokens=5, repeats=2)
    timed = scenario(serve=SEARCH, throughput=several, latency=twice)
    parts = load_only() if kind == "load" else timed
    return WorkerJob(name=kind, kind=kind, engine=EngineConfig(model=model), scenario=parts)


@pytest.fixture(scope="module")
def produced(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Every metric of a point that measures all there is."""
    folder = tmp_path_factory.mktemp("run")
    names = engine_names("phase") | engine_names("part") | BOTH_SLABS
    door, _ = fake_door(Script(phases=dict.fromkeys(names, 1.0)), FakeClock())
    small = plan_small(memory_gib=1)
    door = replace(
        door,
        probe=lambda config: probe_link("cpu"),
        predict=lambda plan, spec, scenario: predicted_times(small, small_spec(), scenario),
    )
    results = {
        kind: Work(job(kind), folder, door, spawned_s=0.0).run() for kind in ("measure", "load")
    }
    assert [result["error"] for result in results.values()] == [None, None]
    (row,) = results["load"]["samples"]["load"]
    row |= {"busy": dict.fromkeys(engine_names("add_busy"), 1.0)}
    starts = [{**row, "start": str(is_cold), "is_cold": is_cold} for is_cold in (False, True)]
    gpu_and_host = {name: 2**30 for name in COLUMNS if name.endswith("_bytes")}
    rows = table(job=lambda k: "measure" if k else None, **gpu_and_host)  # first no worker
    span = Span(part="serve", job="measure", begin_s=100.0, end_s=104.0)
    return {
        *results["measure"]["metrics"],
        *results["load"]["metrics"],
        *differences({"predicted/load_s": 1.0, "load/total_s": 2.0}),
        "predicted/load_s",  # of the parent
        *summarise_loads(starts).metrics,
        *peak_metrics(rows),
        *window_metrics(Window(rows, span)),
        *FROM_THE_RUN,
    }


def key_of(metric: str) -> str:
    """The name under which a metric is defined."""
    area, quantity, *_ = metric.replace("/cold_", "/").split("/")
    return f"{area}/{quantity}"


def test_every_metric_that_is_produced_has_a_definition(produced: set[str]) -> None:
    assert len(produced) > 60
    assert {metric for metric in produced if not definition(metric)} == set()


def test_nothing_is_defined_that_is_not_produced(produced: set[str]) -> None:
    assert {key_of(metric) for metric in produced} == set(METRIC_DEFINITIONS)
    single = {m.split("/")[2] for m in produced if re.match(r"latency/\w+_ms/", m)}
    repeated = {m.split("/")[2] for m in produced if re.match("throughput/\\w+/", m)}
    assert single == {*summarise([1.0]), "repeat_std", "ci95_low", "ci95_high"}
    assert repeated == {"std", "ci95_low", "ci95_high"}
    assert single | repeated == set(STATISTIC_DEFINITIONS)
    assert set(latency_pools([])) <= set(METRIC_DEFINITIONS)


def test_names_in_the_sources_are_defined() -> None:
    """Names that harness and reports choose by, such as those of the summary."""
    areas = "|".join({name.split("/")[0] for name in METRIC_DEFINITIONS})
    found = {
        match
        for path in python_files("harness", "reports")
        for match in re.findall(rf'"((?:{areas})/\w+)["/]', path.read_text(encoding="utf-8"))
    }
    assert len(found) > 30
    assert {name for name in found if definition(name) is None} == {"load/cold_"}  # a prefix
