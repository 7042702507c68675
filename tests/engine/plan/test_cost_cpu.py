"""The time model where a CPU stands in for a GPU."""

from dataclasses import replace
from typing import Any

import pytest

from engine.plan.rates import cpu_rates
from engine.plan.times import PACKED_READS, shape_of, step_s
from tests.engine.specs import CPU, at, plan_small, planned, prefetch, small_spec


@pytest.mark.parametrize("offload", [prefetch(8, 5, 2), prefetch(8, 3, 2)])
def test_copies_of_a_cpu_take_their_time_beside_compute(offload: Any) -> None:
    plan = plan_small(CPU, offload=offload, memory_gib=1)
    rates = replace(cpu_rates(), copy_overhead_s=0.0)
    shape = shape_of(plan, small_spec(), rates)
    free = replace(rates, h2d_gb_s=1e9)
    slots = plan.num_slots
    moved = [layer.offloaded_bytes for layer in plan.offloaded_layers]
    again = sum(n for k, n in enumerate(moved) if k % slots + slots < len(moved))
    assert (again == 0) == (len(moved) == 3)  # which have a slot each, and stay there
    for tokens in (1, 70):
        found = step_s(shape, prefill=tokens) - step_s(at(shape, free), prefill=tokens)
        assert found == pytest.approx(again / 8e9, abs=1e-12)


def test_a_cpu_s_products_of_several_float32_rows_lay_their_weight_out_anew() -> None:
    small = shape_of(plan_small(CPU, memory_gib=1), small_spec(), cpu_rates())
    for dtype, expected in (("float32", PACKED_READS), ("bfloat16", 1.0)):
        shape = replace(planned(small, dtype=dtype), kv_layer_bytes=0)
        rates = replace(cpu_rates(), float32_tflops=1e9, bf16_tflops=1e9, sequence_overhead_s=0.0)
        bare = replace(rates, hbm_gb_s=1e9)
        read = [step_s(at(shape, r), decodes=n) for n in (1, 2) for r in (rates, bare)]
        assert (read[2] - read[3]) / (read[0] - read[1]) == pytest.approx(expected, rel=1e-3)
