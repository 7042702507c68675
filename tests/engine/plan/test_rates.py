"""Thresholds that follow from the rates of a card, as a probe finds them."""

from dataclasses import replace
from typing import Any

import pytest

from engine.asked.config import GPUConfig
from engine.plan.cards import CARDS
from engine.plan.memory import MemoryPlan
from engine.plan.planner import plan_memory
from engine.plan.rates import Rates, cpu_rates, dma_run_bytes, rates_for, sheet_rates, stage_tokens
from tests.engine.specs import H200, MIB, configuration, llama, uva

PROBED = {"h2d_gb_s": 55.1, "in_place_gb_s": 50.7, "in_place_many_gb_s": 44.8}


def probed(**rates: float) -> Rates:
    return rates_for(GPUConfig(), H200, PROBED | rates)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({}, 65),
        ({"in_place_gb_s": 47.9}, 1),
        ({"in_place_many_gb_s": 47.9}, 65),
        ({"in_place_many_gb_s": 48.0}, 257),
        ({"in_place_gb_s": 400.0, "in_place_many_gb_s": 100.0}, 513),
        ({"h2d_gb_s": 450.0, "in_place_gb_s": 420.0, "in_place_many_gb_s": 350.0}, 65),
    ],
)
def test_weights_are_staged_where_reading_them_in_place_takes_longer(
    rates: dict[str, float], expected: int
) -> None:
    found = probed(**rates)
    assert stage_tokens(found) == expected

    def in_place_s(tokens: int) -> float:
        if tokens <= 64:
            return 1 / found.in_place_gb_s
        return -(-tokens // 256) / found.in_place_many_gb_s

    worse = [in_place_s(tokens) >= 1.15 / found.h2d_gb_s for tokens in range(1, expected + 1)]
    assert worse == [False] * (expected - 1) + [True]


def test_blocks_go_by_dma_where_a_kernel_takes_longer() -> None:
    measured = probed(h2d_gb_s=54.9, blocks_gb_s=51.0, block_overhead_s=3.7e-6)
    assert dma_run_bytes(measured) == 2 * MIB
    assert dma_run_bytes(replace(measured, block_overhead_s=30e-6)) == 16 * MIB
    assert dma_run_bytes(replace(measured, blocks_gb_s=40.0)) == MIB // 2
    assert dma_run_bytes(replace(measured, blocks_gb_s=55.0)) == 2**30
    assert dma_run_bytes(replace(measured, block_overhead_s=0.0)) == 1
    size = 3.7e-6 / (1 / 51.0e9 - 1 / 54.9e9)
    assert size / 51.0e9 == pytest.approx(3.7e-6 + size / 54.9e9)
    assert 0.5 < dma_run_bytes(measured) / size < 2**0.5


@pytest.mark.parametrize("name", sorted(CARDS))
def test_cards_that_were_not_probed_have_the_same_threshold_of_weights(name: str) -> None:
    rates = sheet_rates(CARDS[name], name)
    assert stage_tokens(rates) == 65
    assert dma_run_bytes(rates) == 2 * MIB * CARDS[name].link_gb_s / 64.0


def test_a_cpu_has_those_of_no_measured_rate() -> None:
    """Its copies run as it computes, whatever a probe says of them."""
    for probe in ({}, {"h2d_gb_s": 3.0, "in_place_gb_s": 40.0}, {"h2d_gb_s": 40.0}):
        assert stage_tokens(cpu_rates().measured(probe)) == 65


def planned(probe: dict[str, float | None], **settings: Any) -> MemoryPlan:
    asked = configuration(
        llama(), memory_gib=24, kv={"cpu_gib": 4}, max_model_len=8192, offload=uva(2), **settings
    )
    return plan_memory(replace(asked, measured_rates=probe), llama(), H200)


def test_plan_and_record_have_the_thresholds() -> None:
    slow: dict[str, float | None] = {**PROBED, "in_place_gb_s": 30.0, "blocks_gb_s": 40.0}
    for probe, tokens, run_bytes in ((PROBED, 65, 2 * MIB), (slow, 1, MIB // 2), ({}, 65, MIB)):
        plan = planned({**probe})
        record = plan.to_dict()
        assert plan.host_kv is not None
        assert plan.host_kv.dma_run_bytes == run_bytes == record["kv"]["host"]["dma_run_bytes"]
        assert plan.stage_tokens == tokens == record["stage_tokens"]
        assert record["predicted"]["rates"]["in_place_many_gb_s"] > 0
        assert planned({**probe}).to_dict() == record
        assert (plan.gpu_items["kv_moves"] > 0) is (plan.block_bytes < run_bytes)
    assert planned(slow, uva_stage_tokens=300).stage_tokens == 300
    never = planned({**PROBED, "in_place_gb_s": 400.0, "in_place_many_gb_s": 300.0})
    assert (never.stage_tokens, never.num_slots) == (1537, 2)


def test_predicted_moves_take_the_rate_of_the_kernel() -> None:
    plan, slow = planned({**PROBED}), planned({**PROBED, "blocks_gb_s": 20.0})
    assert plan.host_kv is not None
    assert slow.host_kv is not None
    assert plan.host_kv.costs.swap_rates is not None
    assert slow.host_kv.costs.swap_rates is not None
    assert plan.host_kv.costs.swap_rates.load_bytes_s == pytest.approx(0.90 * 55.1e9)
    assert slow.host_kv.costs.swap_rates.load_bytes_s == pytest.approx(20e9)


def test_an_overhead_that_a_probe_cannot_tell_from_none_is_none() -> None:
    card = sheet_rates(next(iter(CARDS.values())), "sheet")
    found = card.measured({"block_overhead_s": 0.0, "rows_overhead_s": None, "h2d_gb_s": 0.0})
    assert (found.block_overhead_s, dma_run_bytes(found)) == (0.0, 1)
    assert (found.rows_overhead_s, found.h2d_gb_s) == (card.rows_overhead_s, card.h2d_gb_s)
