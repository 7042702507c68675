"""Predictions and auto held against measured times, and the points of both studies."""

import pytest

from engine.plan.planner import plan_memory
from engine.plan.policy import assign
from harness.config.compose import Composer
from harness.config.engine import engine_config
from harness.studies.run import compose_points
from harness.studies.table import Result
from harness.studies.validate import judge, judge_grid
from tests.engine.specs import H200
from tests.harness.studies.examples import GIB, case, decode, failed, record


def rows(found):
    return {row.what: row for row in judge(found, card=None, is_default=True).rows}


@pytest.mark.parametrize(
    ("predicted_s", "is_met"), [(0.085, True), (0.114, True), (0.084, False), (0.116, False)]
)
def test_decode_steps_have_to_be_within_the_tolerance(predicted_s, is_met):
    got = rows({"auto": case("auto", {16: decode(0.1, predicted_s=predicted_s)})})
    row = got["auto, decode step at batch 16: predicted / measured"]
    assert (row.share, row.is_met) == (pytest.approx(predicted_s / 0.1), is_met)
    assert row.figure == f"{predicted_s * 1e3:.2f} against 100.00 ms"


def test_prefills_are_shown_and_what_was_not_predicted_is_not_met():
    point = case("auto", {1: decode(0.1, predicted_s=None)}, prefills={"16": 0.2})
    point.record.samples["steps"]["prefill"]["16"]["predicted_s"] = 0.3
    got = rows({"auto": point})
    assert got["auto, prefill of 16: predicted / measured"].share == pytest.approx(1.5)
    assert got["auto, prefill of 16: predicted / measured"].target == ""
    assert got["auto, decode step at batch 1: predicted / measured"].is_met is None


def test_memory_is_shown_beside_what_was_planned():
    plan = {"gpu": {"total_bytes": 4 * GIB}, "host": {"total_bytes": 2 * GIB}}
    metrics = {"memory/gpu_peak_gib": 3.5, "memory/host_rss_peak_gib": None}
    found = {"a": Result(title="a", record=record({}, plan=plan, metrics=metrics))}
    assert judge(found, card=None, is_default=True).tables[-1] == "| a | 4.00 | 3.50 | 2.00 | n/a |"


def queued(title, step_s, wall_s, *, num_cancelled=0):
    point = case(title, {1: decode(step_s)})
    point.record.samples["throughput"] = {"wall_s": wall_s, "num_cancelled": num_cancelled}
    return point


def grid(**points):
    found = {
        "auto_throughput": queued("auto throughput", 0.2, 10.0),
        "auto_latency": case("auto latency", {1: decode(0.1)}),
    }
    return judge_grid(found | points, card=None, is_default=True)


@pytest.mark.parametrize(("hand_s", "is_met"), [(0.0951, True), (0.0949, False), (0.2, True)])
def test_auto_has_to_reach_a_share_of_the_best(hand_s, is_met):
    judged = grid(hand_1=queued("one", 0.3, 9.6), hand_2=queued("two", hand_s, 12.0))
    step, queue = judged.rows
    assert (step.is_met, queue.is_met) == (is_met, True)
    assert queue.share == pytest.approx(0.96)
    assert queue.figure == "9.6 s (one) against 10 s"
    assert "| two | " in "\n".join(judged.tables)


def test_queues_that_were_given_up_are_none_to_be_beaten():
    judged = grid(
        hand_1=queued("one", 0.3, 12.5, num_cancelled=7),
        hand_2=failed("two"),
        hand_3=failed("3", "oom"),
    )
    _, queue = judged.rows
    assert (queue.figure, queue.is_met) == (
        "10 s; all manual splits that fit were stopped early",
        True,
    )
    table = "\n".join(judged.tables)
    assert "| one | 300 | given up |" in table
    assert "| two (no_fit: no_fit it is) | - | - |" in table
    assert judged.lacks == ["3: no figures: oom: oom it is"]  # what does not fit is a result
    assert grid().rows[1].figure == "not measured: no manual split has figures"


def test_auto_without_figures_is_not_measured():
    judged = grid(auto_latency=failed("auto latency"), hand_1=queued("one", 0.3, 9.0))
    assert judged.rows[0].figure == "not measured: auto has no figures"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["validate", "validate_grid"])
def test_points_fit_their_budgets_and_move_something(name):
    (found,) = Composer().plan([f"study={name}"]).points
    points = compose_points(found.config, found.overrides)
    points.pop("rates")
    assert len(points) == {"validate": 12, "validate_grid": 14}[name]
    placed = {}
    for point, planned in points.items():
        config = engine_config(planned.config, None)
        plan = plan_memory(config, config.model.spec, H200)
        placed[point] = plan.placed_bytes()
        assert plan.kv_tokens >= 128
        if config.offload.backend != "none":
            assign(config.model.spec, config.offload, plan.formats)
    for point, places in placed.items():
        moved = sum(size for place, size in places.items() if place != "resident")
        assert (moved > 0) == ("resident" not in point and point != "full_qwen3")
    assert len({str(places) for places in placed.values()}) >= len(placed) - 3
