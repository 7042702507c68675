"""Times of KV blocks in host memory: read in place, staged, sharing the link with weights."""

from dataclasses import replace
from typing import Any

import pytest

from engine.plan.times import decode_step_s, load_s, prefill_s, shape_of, step_s
from tests.engine.plan.test_cost import RATES
from tests.engine.specs import OLMO_7B, at, plan_olmo, planned, prefetch


def long_shape(offload: Any = None, **kv: Any) -> Any:
    plan = plan_olmo(
        memory_gib=18,
        offload=offload,
        kv={"cpu_gib": 4, **kv},
        max_model_len=4096,
        max_num_batched_tokens=512,
    )
    return plan, shape_of(plan, OLMO_7B, RATES)


def test_a_step_beyond_the_gpu_takes_the_resident_part_and_the_bytes_read_in_place() -> None:
    plan, shape = long_shape()
    assert plan.host_kv is not None
    assert plan.kv.groups[0].in_place
    assert plan.kv_tokens < 4000
    at_limit = decode_step_s(shape, 1, plan.kv_tokens)
    for context in (plan.kv_tokens + 16, 4000):
        far_bytes = (context - plan.kv_tokens) * 2**19  # of a token, all layers
        expected = at_limit + far_bytes / 50.7e9
        assert decode_step_s(shape, 1, context) == pytest.approx(expected)
    below = planned(shape, kv=shape.plan.kv.with_host(0, 0, in_place=False))
    assert decode_step_s(below, 1, plan.kv_tokens) == at_limit
    assert decode_step_s(below, 1, 4000) < decode_step_s(shape, 1, 4000)


def test_a_prefill_beyond_the_gpu_stages_host_blocks_once_a_layer_and_chunk() -> None:
    plan, shape = long_shape()
    slow = replace(RATES, in_place_gb_s=0.1)
    below = planned(shape, kv=shape.plan.kv.with_host(0, 0, in_place=False))
    start = 3584
    staged = (start + 512 - plan.kv_tokens) * 2**19 / 0.1e9
    more = step_s(at(shape, slow), prefill=512, before=start) - step_s(
        at(below, slow), prefill=512, before=start
    )
    assert 0.95 * staged < more <= staged  # the attention beside it hides a part
    assert step_s(at(shape, slow), prefill=512) == step_s(at(below, slow), prefill=512)
    assert prefill_s(at(shape, slow), 4000) > prefill_s(at(below, slow), 4000)


def test_weights_and_keys_share_the_link() -> None:
    offload = prefetch(8, 1, 1)
    plan, shape = long_shape(offload)
    bare = planned(shape, kv=shape.plan.kv.with_host(0, 0, in_place=False))
    context = 4000
    copied, _ = plan.moved_per_step()
    tight = planned(shape, kv=shape.plan.kv.with_pools((64,)).with_host(1024, 0, in_place=True))
    far_bytes = tight.beyond_gpu(context) * 2**19
    least = copied / 54.8e9 + far_bytes / 50.7e9
    assert decode_step_s(tight, 1, context) >= least
    assert decode_step_s(bare, 1, context) < least


def test_predicted_figures_of_a_host_tier() -> None:
    plan, shape = long_shape()
    assert plan.predicted is not None
    found = plan.predicted["host_kv"]
    assert found["context_tokens"] == 4096
    assert found["host_bytes"] == (4096 - plan.kv_tokens) * 2**19
    assert found["prefix_load_ms"] < found["prefix_compute_ms"]
    assert plan.host_kv.costs.recompute_token_s > 0
    alone = plan_olmo(memory_gib=30)
    assert alone.predicted is not None
    assert alone.predicted["host_kv"] is None
    pinned = load_s(shape) - load_s(planned(shape, host_items={}))
    assert pinned == pytest.approx(4 * 2**30 / (RATES.pin_gb_s * 1e9))
