"""Choices beside a host tier of KV blocks: fewer weights move, contexts grow."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import CapacityError
from engine.model.spec import ModelSpec
from engine.plan.planner import plan_memory
from tests.engine.plan.test_choose import ask, choose, conf_spec, step_ms
from tests.engine.specs import GIB, H200, NO_PIN, NO_UVA, OLMO_7B, check_plan, model_specs

pytestmark = pytest.mark.thorough_but("test_kv_leaves_the_gpu_where_weights_in_its_place_cost_more")


@settings(max_examples=10, deadline=None)
@given(
    spec=model_specs(),
    share=st.floats(0.3, 1.1),
    blocks=st.integers(0, 2000),
    objective=st.sampled_from(["latency", "throughput", "context"]),
    gaps=st.sampled_from([{}, {}, NO_UVA, NO_PIN]),
)
def test_choices_beside_a_host_tier_are_planned_as_they_were_ranked(
    spec: ModelSpec, share: float, blocks: int, objective: str, gaps: dict[str, Any]
) -> None:
    config = ask(
        spec,
        spec.weight_bytes() / GIB * share + 1.3,
        objective=objective,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        kv={"num_cpu_blocks": blocks},
    )
    try:
        plan = plan_memory(config, spec, replace(H200, host_available_bytes=2**50, **gaps))
    except CapacityError:
        return
    check_plan(plan, spec)
    assert plan.choice is not None
    if plan.choice["candidates"]:
        assert plan.choice["candidates"][0]["kv_tokens"] == plan.kv_tokens
        assert plan.choice["candidates"][0]["label"] == plan.choice["chosen"]
    # Of a sequence the GPU holds 256 tokens, or all.
    assert plan.kv_tokens >= min(plan.max_model_len, 256)


def test_a_host_tier_spares_weights_from_moving_and_lengthens_contexts() -> None:
    alone = choose(OLMO_7B, 15.99)
    beside = choose(OLMO_7B, 15.99, kv={"cpu_gib": 8})
    assert beside.bytes_per_step() < alone.bytes_per_step()
    assert step_ms(beside) < step_ms(alone)
    spec = conf_spec("llama31_8b")
    lengths = [
        choose(spec, 16, objective="context", kv=kv).max_model_len
        for kv in ({}, {"cpu_gib": 1}, {"cpu_gib": 2})
    ]
    assert lengths == sorted(lengths)
    assert 6900 < lengths[1] - lengths[0] <= 8192
    assert 14_800 < lengths[2] - lengths[0] <= 16_384


def test_kv_leaves_the_gpu_where_weights_in_its_place_cost_more() -> None:
    """A step's KV on the GPU would take a sequence of 256 tokens 1.6 times as long."""
    kv = {"cpu_gib": 8}
    chosen = choose(OLMO_7B, 14.5, kv=kv)
    wanted = choose(OLMO_7B, 14.5, kv=kv, kv_tokens=2048)  # what is asked for stays
    assert 256 < chosen.kv_tokens < 512
    assert wanted.kv_tokens >= 2048
    assert step_ms(wanted) > 1.5 * step_ms(chosen)
