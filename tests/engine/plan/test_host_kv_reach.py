"""What a plan over two tiers promises, pools of those sizes hold, and its refusals are right."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import CapacityError
from engine.kv.sequences import BlockGroups
from engine.model.spec import ModelSpec
from engine.plan.planner import plan_memory
from engine.run.inputs import cut_pieces, host_places
from tests.engine.specs import CPU, GIB, check_plan, configuration, model_specs

pytestmark = pytest.mark.thorough

LIMITS = {"max_num_seqs": 4, "gpu_memory_utilization": 1.0}


@settings(max_examples=10, deadline=None)
@given(
    spec=model_specs(),
    on_gpu=st.floats(0.05, 1.2),
    in_host=st.floats(0.0, 1.5),
    block_size=st.sampled_from([8, 16, 128]),
    tokens=st.sampled_from([4, 300, 2048]),
)
def test_pools_hold_what_is_planned(
    spec: ModelSpec, on_gpu: float, in_host: float, block_size: int, tokens: int
) -> None:
    """A sequence of max_model_len runs with some of it on the GPU, the rest in the host tier."""
    facts = replace(CPU, host_available_bytes=2**50, total_bytes=2**50, free_bytes=2**50)
    limits = {**LIMITS, "max_num_batched_tokens": tokens}
    whole = plan_memory(configuration(spec, kv={"block_size": block_size}, **limits), spec, facts)
    need = whole.kv.blocks(whole.max_model_len)
    fixed = whole.gpu_total_bytes - whole.gpu_items["kv_cache"]
    room = int(on_gpu * whole.kv.num_bytes(need)) + 2**20
    kv = {"block_size": block_size, "num_cpu_blocks": int(in_host * need[0])}
    config = configuration(spec, kv=kv, memory_gib=(fixed + room) / GIB, **limits)
    try:
        plan = plan_memory(config, spec, facts)
    except CapacityError as error:
        for words in re.findall(r"kv\.num_cpu_blocks=(\d+)", str(error)):
            more = replace(config.kv, num_cpu_blocks=int(words))
            check_plan(plan_memory(replace(config, kv=more), spec, facts), spec)
        return
    check_plan(plan, spec)
    BlockGroups.planned(plan).check(plan.max_model_len)
    host = plan.host_kv
    if host is None or not plan.kv.groups[0].in_place:
        assert plan.kv.pools[0] >= need[0]
        return
    # All that the GPU lacks lies in the host tier: each stage buffer takes some of it.
    first = plan.num_gpu_blocks
    places = host_places(range(need[0]), plan.max_model_len, block_size, first)
    pieces = cut_pieces(places, plan.max_model_len, block_size, host.stage_blocks)
    assert sum(piece.num_hosts for piece in pieces) == len(places) == need[0] - first
    assert len(places) <= plan.kv.groups[0].num_in_place
