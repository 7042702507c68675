"""From where on decodes' host blocks are copied ahead, by the rates of the card."""

from dataclasses import replace
from typing import Final

import pytest

from engine.plan.host_times import copy_ahead
from engine.plan.memory import MemoryPlan
from engine.plan.planner import plan_memory
from engine.plan.rates import Rates
from engine.plan.sizes import HostKVPlan
from engine.plan.times import decode_step_s, shape_of
from tests.engine.plan.test_cost import RATES
from tests.engine.specs import H200, configuration, llama, plan_llama

CARD: Final = replace(
    RATES, h2d_gb_s=55.1, in_place_gb_s=50.9, rows_gb_s=55.0, eager_layer_overhead_s=0.73e-3
)


@pytest.fixture(scope="module")
def plan() -> MemoryPlan:
    return plan_llama(131072, kv={"cpu_gib": 16})


def host_kv(plan: MemoryPlan) -> HostKVPlan:
    assert plan.host_kv is not None
    return plan.host_kv


def in_place_s(plan: MemoryPlan, context: float) -> float:
    return decode_step_s(shape_of(plan, llama(), replace(CARD, rows_gb_s=50.0)), 1, context)


def test_a_step_takes_the_faster_way_and_the_threshold_is_where_both_are_equal(
    plan: MemoryPlan,
) -> None:
    shape = shape_of(plan, llama(), CARD)
    found = copy_ahead(shape)
    assert found is not None
    token_bytes = shape.kv_layer_bytes * 32
    edge = plan.kv_tokens + found.step_bytes // token_bytes
    assert decode_step_s(shape, 1, edge - 1) == in_place_s(plan, edge - 1)
    assert decode_step_s(shape, 1, edge) < in_place_s(plan, edge)
    # The launches of all layers and pieces, less what the GPU takes for the rest, at the in-place
    # rate.
    assert 1.0e9 < found.step_bytes < 32 * 0.73e-3 * 4 * 50.9e9
    # 3 us beside a copy's bytes are what it gains of as many bytes.
    gain_s = 1 / 50.9e9 - 1 / 55.0e9
    assert found.run_bytes == pytest.approx(3e-6 / gain_s, abs=1)
    longest = plan.max_model_len
    bound_s = (longest - plan.kv_tokens) * token_bytes / 55.1e9
    assert bound_s < decode_step_s(shape, 1, longest) < 1.05 * bound_s


@pytest.mark.parametrize(
    ("rates", "changes"),
    [
        (replace(CARD, rows_gb_s=50.9), {}),
        (replace(CARD, is_cpu=True), {}),
        (replace(CARD, eager_layer_overhead_s=1.0), {}),
        (CARD, {"host_kv": HostKVPlan(stage_blocks=15, dma_run_bytes=2**21)}),
    ],
    ids=["copies are slower", "a CPU", "launches take longer", "no split fits a buffer"],
)
def test_where_copies_are_no_sooner_there_are_none(
    plan: MemoryPlan, rates: Rates, changes: dict[str, HostKVPlan]
) -> None:
    assert copy_ahead(shape_of(replace(plan, **changes), llama(), rates)) is None


def test_short_rows_are_read_in_place() -> None:
    for block_size, is_copied in ((16, True), (8, False)):
        plan = plan_llama(131072, kv={"cpu_gib": 16, "block_size": block_size})
        assert plan.kv.groups[0].layer_bytes == block_size * 2**12
        assert (copy_ahead(shape_of(plan, llama(), CARD)) is not None) is is_copied


def test_layers_with_a_window_read_in_place() -> None:
    """Parts of keys are attended to one by one only where all keys are seen."""
    spec = replace(llama(), sliding_window=65536)
    asked = configuration(
        spec, memory_gib=19.5, kv={"cpu_gib": 16}, max_model_len=131072, max_num_batched_tokens=4096
    )
    probe = {"in_place_gb_s": 50.9, "rows_gb_s": 55.0, "h2d_gb_s": 55.1}
    plan = plan_memory(replace(asked, measured_rates={**probe}), spec, H200)
    assert (plan.kv.groups[0].window, plan.kv.groups[0].in_place) == (65536, True)
    assert host_kv(plan).copy_ahead is None


def test_steps_without_graphs_make_up_for_the_launches_of_pieces_alone(plan: MemoryPlan) -> None:
    shape = shape_of(replace(plan, use_graphs=False), llama(), CARD)
    found, graphed = copy_ahead(shape), copy_ahead(shape_of(plan, llama(), CARD))
    assert found is not None
    assert graphed is not None
    assert found.step_bytes < graphed.step_bytes


def test_the_record_has_the_thresholds(plan: MemoryPlan) -> None:
    found = host_kv(plan).copy_ahead
    assert found is not None
    assert plan.to_dict()["kv"]["host"]["copy_ahead"] == {
        "step_bytes": found.step_bytes,
        "run_bytes": found.run_bytes,
    }
    assert plan.predicted is not None
    assert plan.predicted["host_kv"]["is_copied"]
    probe: dict[str, float | None] = {"in_place_gb_s": 55.0, "rows_gb_s": 54.0, "h2d_gb_s": 55.1}
    asked = configuration(llama(), memory_gib=24, kv={"cpu_gib": 16}, max_model_len=131072)
    slow = plan_memory(replace(asked, measured_rates=probe), llama(), H200)
    assert host_kv(slow).copy_ahead is None
    assert slow.to_dict()["kv"]["host"]["copy_ahead"] is None
    assert slow.predicted is not None
    assert not slow.predicted["host_kv"]["is_copied"]
