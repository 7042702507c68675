"""The metric table holds what runs produce, and nothing else lists metrics."""

import ast
import json
import re
from dataclasses import replace
from hashlib import sha256
from typing import Any, get_args

import pytest

from engine.asked.config import EngineConfig, ModelConfig
from engine.asked.request import TokenEvent
from harness.config.schema import LatencyScenario, QualityScenario, ThroughputScenario
from harness.config.serve import Arrivals, Objectives, PeakSearch
from harness.observe.probe import probe_link
from harness.observe.student import t_table
from harness.observe.window import Span, Window, peak_metrics, window_metrics
from harness.point.process import WorkerJob
from harness.work.load import summarise_loads
from harness.work.predicted import differences, predicted_times
from harness.work.quality import Yardstick, measure_quality
from harness.work.times import latency_pools
from harness.worker import Work
from reports.record.metrics import (
    METRICS,
    STATISTIC_DEFINITIONS,
    TOTAL,
    Place,
    definition,
    metric_of,
)
from reports.record.record import summarise
from reports.record.rows import TELEMETRY_COLUMNS
from tests.contracts.project import python_files, relative
from tests.engine.specs import plan_small, small_spec
from tests.harness.cases import SPEC, load_only, scenario
from tests.harness.fakes import FakeClock, Script, fake_door
from tests.harness.observe.telemetry.cases import table
from tests.harness.work.traffic.cases import serve

SEARCH = serve(
    arrivals=Arrivals(),
    slo=Objectives(e2e_ms=1e9),
    search=PeakSearch(low_per_s=1, high_per_s=2, duration_s=1),
)


FROM_THE_RUN = ("telemetry/cpu_pct", "link/nvml_h2d_gb_s")
"""Metrics that need a sampler and a worker beside it; tests/harness/observe has them."""


BOTH_SLABS = {"touch", "pin"}
"""Phases of memory for weights and for KV blocks, which the engine adds up in a loop."""


def engine_names(call: str) -> set[str]:
    """The names that the engine's sources give to phases or busy times."""
    text = "".join(path.read_text(encoding="utf-8") for path in python_files("engine"))
    return set(re.findall(rf'\.{call}\("(\w+)"', text))


class Certain:
    """An engine that finds every token of a prompt the most probable."""

    def __init__(self) -> None:
        self._events = list[TokenEvent]()

    def tokenizer(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def add_request(self, prompt: list[int], _: object, name: str) -> None:
        self._events = [
            TokenEvent(
                request_id=name,
                token_id=0,
                position=len(prompt),
                finish_reason="length",
                prompt_logprobs=[None, *({token: 0.0} for token in prompt[1:])],
            )
        ]

    def has_unfinished(self) -> bool:
        return bool(self._events)

    def step(self) -> list[TokenEvent]:
        found, self._events = self._events, []
        return found


def quality_metrics() -> set[str]:
    """What the part quality produces."""
    llm: Any = Certain()
    text = "one of two"
    text_hash = sha256(json.dumps(list(text.encode())).encode()).hexdigest()
    made = Yardstick(prompts=[[1, 2]], tokens=[[3, 4]], text_hash=text_hash)
    found, _ = measure_quality(llm, QualityScenario(), text, made, on_progress=lambda *_: None)
    assert set(found.values()) == {1.0, 2.0}
    return set(found)


def job(kind: str) -> WorkerJob:
    model = ModelConfig(name="tiny", load_format="dummy", spec=SPEC)
    several = ThroughputScenario(num_requests=4, prompt_tokens=8, output_tokens=5, repeats=2)
    twice = LatencyScenario(num_requests=3, prompt_tokens=8, output_tokens=5, repeats=2)
    timed = scenario(serve=SEARCH, throughput=several, latency=twice)
    parts = load_only() if kind == "load" else timed
    return WorkerJob(
        name=kind, kind=kind, engine=EngineConfig(model=model), scenario=parts, t=t_table(2, 9)
    )


@pytest.fixture(scope="module")
def produced(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Every metric of a point that measures all there is."""
    folder = tmp_path_factory.mktemp("run")
    names = engine_names("phase") | engine_names("part") | BOTH_SLABS
    phases = dict.fromkeys(names, 1.0)
    door, _ = fake_door(Script(phases=phases, experts=(3, 1, 400)), FakeClock())
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
    gpu_and_host = {name: 2**30 for name in TELEMETRY_COLUMNS if name.endswith("_bytes")}
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
        *quality_metrics(),
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
    on_gpus = {"predicted/gpu_peak_gib_difference_pct"}  # of an emulated one it says nothing
    assert {key_of(metric) for metric in produced} | on_gpus == {key_of(name) for name in METRICS}
    single = {m.split("/")[2] for m in produced if re.match(r"latency/\w+_ms/", m)}
    repeated = {m.split("/")[2] for m in produced if re.match("throughput/\\w+/", m)}
    assert single == {*summarise([1.0]), "repeat_std", "ci95_low", "ci95_high"}
    assert repeated == {"std", "ci95_low", "ci95_high"}
    assert single | repeated == set(STATISTIC_DEFINITIONS)
    assert set(latency_pools([])) <= set(METRICS)


def test_names_in_the_sources_are_defined() -> None:
    """Names that harness and reports choose by, such as those of the summary."""
    areas = "|".join({name.split("/")[0] for name in METRICS})
    found = {
        match
        for path in python_files("harness", "reports")
        for match in re.findall(rf'"((?:{areas})/\w+)["/]', path.read_text(encoding="utf-8"))
    }
    assert len(found) > 30
    assert {name for name in found if definition(name) is None} == {"load/cold_"}  # a prefix


def test_what_is_shown_has_words_and_a_direction() -> None:
    for metric in (*METRICS.values(), TOTAL):
        assert set(metric.shown) <= set(get_args(Place)), metric.name
        assert bool(metric.shown) <= bool(metric.label), metric.name
        if {"ab", "summary"} & set(metric.shown):
            assert metric.words, metric.name
        if {"best", "compare", "ab"} & set(metric.shown):
            assert metric.better != "none", metric.name
        assert not metric.needs or metric.needs in METRICS


LISTS_APART = {"LINK_RATES"}
"""Lists of metrics that are read to work something out, not shown: rates of the probes."""


def is_metric(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=str() as text):
            return "/" in text and metric_of(text) is not None
        case _:
            return False


def is_title(node: ast.expr) -> bool:
    """A label, words or a direction, as the table has them."""
    match node:
        case ast.Constant(value=bool()):
            return True
        case ast.Constant(value=str() as text):
            return " " in text or text in {metric.label for metric in METRICS.values()}
        case _:
            return False


def lists_of_metrics(source: str) -> list[str]:
    """The literals that list metrics beside the table: names with titles, or names for all to use.

    Names that a function reads to work something out are no list.
    """
    tree, found = ast.parse(source), []
    shared = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    shared += [
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign)
        and node.value is not None
        and ast.unparse(node.target) not in LISTS_APART
    ]
    found += [
        [item for item in node.elts if is_metric(item)]
        for value in shared
        for node in ast.walk(value)
        if isinstance(node, ast.Tuple | ast.List | ast.Set)
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            rows = [
                [key, *(value.elts if isinstance(value, ast.Tuple) else [value])]
                for key, value in zip(node.keys, node.values, strict=True)
                if key is not None
            ]
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            rows = [item.elts for item in node.elts if isinstance(item, ast.Tuple)]
        else:
            continue
        found.append([row for row in rows if any(map(is_metric, row)) and any(map(is_title, row))])
    return [f"{len(names)} metrics" for names in found if len(names) >= 3]


@pytest.mark.thorough
def test_no_other_list_of_metrics_exists() -> None:
    files = {relative(path): path for path in python_files("harness", "reports")}
    listed = files.pop("reports/record/listed.py")
    assert lists_of_metrics(listed.read_text(encoding="utf-8"))
    found = {name: lists_of_metrics(path.read_text("utf-8")) for name, path in files.items()}
    assert {name: lists for name, lists in found.items() if lists} == {}


def test_a_list_of_metrics_is_found() -> None:
    names = ("latency/ttft_ms", "load/total_s", "memory/gpu_peak_gib")
    pairs = ", ".join(f"({name!r}, 'TTFT')" for name in names)
    assert lists_of_metrics(f"SHOWN = ({pairs})")
    assert lists_of_metrics(f"def f():\n    return [{pairs}]")
    assert lists_of_metrics(f"X: Final = {dict.fromkeys(names, ('a label', True))}")
    assert lists_of_metrics(f"X: Final = {list(names)}")
    assert not lists_of_metrics(f"def f(run):\n    return sum(run[name] for name in {names})")
    assert not lists_of_metrics(f"found = {dict.fromkeys(names, 1.0)}")
