"""The harness's own cost: figures are there, and how large they are is the machine's."""

import pytest

from engine.asked.config import EngineConfig, EngineSettings, ModelConfig
from engine.errors import ConfigError
from harness.config.schema import FakeScript
from harness.config.study import OverheadScenario
from harness.observe.student import t_table
from harness.point.process import WorkerJob
from harness.studies.table import Result
from harness.studies.validate import judge_overhead as judge
from harness.systems.fake import fake_door
from harness.work.overhead import BARE
from harness.worker import Work
from tests.harness.cases import SPEC, run_config, scenario
from tests.harness.studies.examples import record


def test_a_worker_measures_every_part_against_its_bare_loop(tmp_path):
    script = FakeScript(clock="real", load_s=0.0, prefill_ms=[0.0], decode_ms=[0.0])
    asked = OverheadScenario(num_requests=4, prompt_tokens=4, output_tokens=3, repeats=2)
    job = WorkerJob(
        name="measure",
        kind="measure",
        engine=EngineConfig(
            model=ModelConfig(name="fake", load_format="dummy", spec=SPEC),
            engine=EngineSettings(max_num_seqs=4),
        ),
        scenario=scenario(latency=None, throughput=None, overhead=asked),
        fake=script,
        t=t_table(2, 4),
    )
    result = Work(job, tmp_path, fake_door(script), spawned_s=0.0).run()
    assert result["error"] is None
    found = result["samples"]["overhead"]
    assert set(found["parts"]) == {*BARE, *BARE.values()}
    assert set(found["own"]) == set(BARE)
    assert all(part["request_us"]["mean"] > 0 for part in found["parts"].values())
    text = "\n".join(
        judge(
            {"cost": Result(title="cost", record=record(result["samples"]))},
            card=None,
            is_default=True,
        ).tables
    )
    assert "4 requests of 3 tokens" in text
    assert "| bare, in turn | " in text
    assert "| serve | " in text


def test_metrics_of_a_known_rate_are_listed():
    known = record({}, metrics={"latency/tpot_ms/mean": 5.25})
    lines = judge({"known": Result(title="5 ms", record=known)}, card=None, is_default=True).tables
    assert "| latency/tpot_ms/mean | 5.25 |" in lines
    assert "| serve/sent_requests_s | n/a |" in lines


def test_another_engine_is_refused():
    with pytest.raises(ConfigError, match=r"scenario\.overhead: expected model=fake"):
        run_config(scenario=scenario(overhead=OverheadScenario()))
