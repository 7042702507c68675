from dataclasses import replace

import pytest

from engine.errors import ConfigError
from harness.config.schema import LatencyScenario
from harness.search import judge
from harness.studies.search_request import check_measured, parse_constraint, parse_goal
from reports.record.record import RunRecord
from tests.harness.cases import load_only, scenario

GOAL = parse_goal(
    "throughput/output_tok_s", None, ["latency/ttft_ms/p50<=500", "memory/host_pinned_gib >= 1"]
)
METRICS = {
    "throughput/output_tok_s": 40.0,
    "latency/ttft_ms/p50": 510.0,
    "memory/host_pinned_gib": 3.0,
}


def record(**changes):
    fields = {"run_id": "a", "name": "a", "status": "ok", "valid": True, "metrics": METRICS}
    return RunRecord(**(fields | changes))


def test_what_is_beyond_a_bound_is_above_zero():
    assert GOAL.excesses(METRICS) == [10.0, -2.0]
    assert GOAL.broken(METRICS) == ["latency/ttft_ms/p50<=500"]
    assert parse_goal(None, "latency/itl_ms/p50", []).is_maximum is False


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("latency/ttft_ms/p50<500", "METRIC<=NUMBER"),
        ("latency/ttft_ms/p50<=fast", "METRIC<=NUMBER"),
        ("latency/ttft_ms/p50<=nan", "METRIC<=NUMBER"),
        ("latency/ttft<=5", "no metric 'latency/ttft'"),
        ("output_tok_s<=5", "Did you mean throughput/output_tok_s or serve/output_tok_s?"),
        ("latency/ttft_ms<=5", "such as latency/ttft_ms/p50"),
        ("latency/ttft_ms/p55<=5", "expected a statistic of latency/ttft_ms"),
    ],
)
def test_constraints_of_another_form_are_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_constraint(text)


@pytest.mark.parametrize(
    ("maximize", "minimize"), [(None, None), ("latency/e2e_ms/p50", "load/total_s")]
)
def test_one_objective_is_needed(maximize, minimize):
    with pytest.raises(ConfigError, match="one objective"):
        parse_goal(maximize, minimize, [])


def test_the_scenario_must_measure_it():
    check_measured(GOAL, scenario())
    with pytest.raises(ConfigError, match=r"scenario\.throughput is null"):
        check_measured(GOAL, load_only())


def test_a_percentile_needs_its_requests():
    goal = parse_goal(None, "latency/itl_ms/p90", ["latency/ttft_ms/p90<=1"])
    few, enough = (
        replace(scenario(), latency=LatencyScenario(num_requests=num)) for num in (63, 64)
    )
    check_measured(goal, enough)
    with pytest.raises(ConfigError, match=r"latency/ttft_ms/p90: .*latency\.num_requests=64"):
        check_measured(goal, few)


def test_a_record_with_all_metrics_has_a_value(tmp_path):
    found = judge(record(), GOAL, tmp_path)
    assert (found.value, found.reason, found.folder) == (40.0, None, tmp_path)
    assert found.excesses == (10.0, -2.0)
    assert found.broken == ("latency/ttft_ms/p50<=500",)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"status": "no_fit", "error": {"type": "CapacityError", "message": "GPU: 3"}}, "no_fit: "),
        ({"valid": False, "reasons": ["drift"]}, "not valid: drift"),
        ({"metrics": METRICS | {"latency/ttft_ms/p50": None}}, "no value of latency/ttft_ms/p50"),
    ],
)
def test_other_records_are_failed_trials(tmp_path, changes, words):
    found = judge(record(**changes), GOAL, tmp_path)
    assert found.value is None
    assert words in (found.reason or "")
