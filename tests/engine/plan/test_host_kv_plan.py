"""Plans with a host tier of KV blocks: bytes of both sides, what one sequence reaches, refusals."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import CapacityError
from engine.model.spec import ModelSpec
from engine.plan.memory import MemoryPlan
from engine.plan.planner import plan_memory
from engine.plan.sizes import NUM_STAGES, STAGING_BYTES, ids_bytes
from tests.engine.specs import (
    CPU,
    GIB,
    H200,
    MIB,
    NO_PIN,
    NO_UVA,
    OLMO_7B,
    advised,
    check_plan,
    configuration,
    model_specs,
    plan_llama,
    plan_olmo,
    plan_small,
    prefetch,
    small_spec,
    uva,
)
from tests.slow import slow

FULL, WINDOW = "full_attention", "sliding_attention"


# The published case: conversations of 52,000 tokens on a card of 24 GB.


def test_the_published_case() -> None:
    with pytest.raises(CapacityError, match=r"needs 6\.35 GiB of KV for 52,000 tokens"):
        plan_llama(52_000)
    on_gpu = plan_llama(32_000)
    assert on_gpu.host_kv is None
    assert 36_000 < on_gpu.kv_tokens < 45_000
    plan = plan_llama(52_000, kv={"cpu_gib": 16})
    assert plan.host_kv is not None
    assert plan.block_bytes == 2 * MIB
    [group] = plan.kv.groups
    assert (group.num_pinned, group.num_pageable, group.num_host_blocks) == (8192, 0, 8192)
    assert group.in_place
    assert group.num_in_place == 8192
    assert plan.host_items["pinned_kv"] == 16 * GIB
    assert 36_000 < plan.kv_tokens < 52_000
    assert plan.max_concurrency == plan.max_kept
    assert plan.max_kept == pytest.approx((plan.kv_tokens + 131_072) / 52_000)
    assert plan.longest_tokens == 131_072
    same = plan_llama(52_000, kv={"num_cpu_blocks": 8192})
    assert (same.host_kv, same.kv) == (plan.host_kv, plan.kv)
    assert plan_llama(131_072, kv={"cpu_gib": 16}).holds_one


def test_no_more_sequences_run_at_once_than_may() -> None:
    """A prefix cache takes more GPU blocks than all that run can use."""
    kv: dict[str, Any] = {"cpu_gib": 8, "enable_prefix_caching": True}
    plan = plan_llama(512, kv=kv)
    assert plan.kv_tokens > 80 * 512
    assert plan.max_concurrency == plan.max_num_seqs == 8
    assert plan.max_kept > 200


@pytest.mark.thorough
def test_the_longest_sequence_is_that_of_both_tiers() -> None:
    kv: dict[str, Any] = {"num_cpu_blocks": 1000}
    # Longer sequences take more of other bytes: the same longest one, whatever is asked.
    longest, *others = {plan_llama(n, kv=kv).longest_tokens for n in (2000, 52_000)}
    assert not others
    assert longest % 16 == 0
    at_limit = plan_llama(longest, kv=kv)
    assert at_limit.longest_tokens == at_limit.kv_tokens + 16_000 == longest
    for more in (16, 30_000):
        with pytest.raises(CapacityError) as error:
            plan_llama(longest + more, kv=kv)
        assert f"engine.max_model_len={longest}" in advised(error.value)


TIERS = (None, {"num_cpu_blocks": 40}, {"swap_space": 0.001})


@pytest.mark.thorough_but("kv4")
@pytest.mark.parametrize(
    ("kv", "memory_gib"),
    [
        (kv, memory_gib) if at == other else slow(kv, memory_gib)
        for at, kv in enumerate(TIERS)
        for other, memory_gib in enumerate((0.003, 0.0036, 0.005))
    ],
)
def test_an_advised_length_is_the_longest_that_planning_takes(
    kv: dict[str, Any] | None, memory_gib: float
) -> None:
    """Where other bytes than those of blocks grow with it as well."""
    spec = small_spec(max_position_embeddings=4096)
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "kv": kv}

    def plan(length: int) -> MemoryPlan:
        asked = configuration(spec, memory_gib=memory_gib, max_model_len=length, **sizes)
        return plan_memory(asked, spec, CPU)

    with pytest.raises(CapacityError) as error:
        plan(4096)
    found = re.search(r"engine\.max_model_len=(\d+)", " ".join(advised(error.value)))
    assert found is not None
    longest = int(found[1])
    assert plan(longest).longest_tokens >= longest
    with pytest.raises(CapacityError):
        plan(longest + 1)


# Bytes.


def test_stages_and_numbers_of_moves_are_counted_where_they_are_needed() -> None:
    gpu, parked, long = (
        plan_llama(length, kv=kv)
        for length, kv in ((8000, None), (8000, {"cpu_gib": 16}), (52_000, {"cpu_gib": 16}))
    )
    assert not {"kv_stages", "kv_moves"} & gpu.gpu_items.keys()
    assert not {"pinned_kv", "pageable_kv", "kv_staging"} & gpu.host_items.keys()
    # A sequence of max_model_len fits the GPU: none is split, so nothing is staged.
    assert parked.host_kv is not None
    assert not parked.kv.groups[0].in_place
    assert "kv_stages" not in parked.gpu_items
    assert parked.host_kv.stage_blocks == 0
    assert 0 <= gpu.kv_tokens - parked.kv_tokens < 256
    assert parked.longest_tokens == 131_072
    assert long.host_kv is not None
    layer_bytes, state_bytes = 64 * 1024, 2048 * 32 * (128 + 2) * 4
    buffers = NUM_STAGES * long.host_kv.stage_blocks * layer_bytes
    assert 85 * MIB <= buffers <= 86 * MIB
    assert buffers + state_bytes <= long.gpu_items["kv_stages"] < buffers + state_bytes + MIB
    # Decodes of up to 8 sequences have a second graph where they read host blocks in place.
    assert gpu.gpu_items["graphs"] == parked.gpu_items["graphs"]
    assert long.gpu_items["graphs"] - gpu.gpu_items["graphs"] == 4 * 32 * MIB // 16
    # Blocks of 2 MiB go by DMA and need no numbers; smaller ones do.
    assert long.gpu_items["kv_moves"] == 0
    card = replace(H200, name="NVIDIA H200")
    small = plan_llama(52_000, card, kv={"cpu_gib": 16, "block_size": 8})
    assert (
        small.gpu_items["kv_moves"] == ids_bytes(MIB, 2 * MIB) == small.host_items["kv_staging"] > 0
    )


@pytest.mark.thorough_but("500-8", "600-128", "5000-16")
@pytest.mark.parametrize(
    ("blocks", "block_size"),
    [
        (blocks, block_size) if (at + other) % 3 == 0 else slow(blocks, block_size)
        for at, blocks in enumerate((1, 3, 8, 500, 600, 5000))
        for other, block_size in enumerate((8, 16, 128))
    ],
)
def test_a_stage_holds_no_more_than_the_tier_and_no_less_than_a_tile(
    blocks: int, block_size: int
) -> None:
    tier = {"num_cpu_blocks": blocks, "block_size": block_size}
    on_gpu = plan_llama(8000, kv=tier)
    length = on_gpu.kv.longest(on_gpu.gpu_items["kv_cache"]) + 1000
    try:
        plan = plan_llama(length, kv=tier)
    except CapacityError:
        assert blocks * block_size < 3000  # so few do not make up for the stages
        return
    assert plan.host_kv is not None
    stage = plan.host_kv.stage_blocks
    assert min(blocks, 128 // block_size) <= stage <= blocks
    assert stage * 4096 * block_size <= 64 * MIB


@pytest.mark.thorough
def test_a_pin_limit_leaves_the_rest_pageable_and_is_recorded() -> None:
    plan = plan_llama(52_000, kv={"cpu_gib": 16, "pin_limit_gib": 10})
    assert plan.host_kv is not None
    [group] = plan.kv.groups
    assert (group.num_pinned, group.num_pageable, group.num_in_place) == (5120, 3072, 5120)
    assert (plan.host_items["pinned_kv"], plan.host_items["pageable_kv"]) == (10 * GIB, 6 * GIB)
    assert plan.host_items["kv_staging"] == STAGING_BYTES
    assert 0 <= plan.kv_tokens + 5120 * 16 - plan.longest_tokens < 1600
    [note] = plan.notes
    assert "kv.pin_limit_gib=10: 5120 KV blocks in host memory are pinned; 3072 are page" in note
    data = plan.to_dict()["kv"]["host"]
    assert (data["pinned_bytes"], data["pageable_bytes"]) == (10 * GIB, 6 * GIB)
    none = plan_llama(30_000, kv={"cpu_gib": 16, "pin_limit_gib": 0})
    assert none.host_kv is not None
    assert (none.kv.groups[0].num_pinned, none.kv.groups[0].in_place) == (0, False)
    with pytest.raises(CapacityError, match="of KV for 52,000 tokens"):
        plan_llama(52_000, kv={"cpu_gib": 16, "pin_limit_gib": 0})


@pytest.mark.thorough_but("no pin")
@pytest.mark.parametrize(
    ("gaps", "pinned"), [(NO_PIN, 0), (NO_UVA, 8192)], ids=["no pin", "no uva"]
)
def test_no_sequence_is_split_where_compute_reaches_no_host_memory(
    gaps: dict[str, Any], pinned: int
) -> None:
    facts = replace(H200, **gaps)
    plan = plan_llama(30_000, facts, kv={"cpu_gib": 16})
    assert plan.host_kv is not None
    [group] = plan.kv.groups
    assert (group.num_pinned, group.num_host_blocks) == (pinned, 8192)
    assert not group.in_place
    assert plan.gpu_items["kv_moves"] == 0
    assert any(note.startswith("fallback: KV blocks in host memory") for note in plan.notes)
    with pytest.raises(CapacityError, match="of KV for 52,000 tokens"):
        plan_llama(52_000, facts, kv={"cpu_gib": 16})


def test_a_second_group_has_as_many_host_blocks_and_stays_on_the_gpu() -> None:
    spec = small_spec(
        sliding_window=32,
        layer_types=[*[FULL] * 3, WINDOW] * 2,
        max_position_embeddings=4096,
    )

    def plan(length: int, memory_gib: float, **kv: Any) -> MemoryPlan:
        asked: dict[str, Any] = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 32,
            "max_model_len": length,
            "dtype": "float32",
            "gpu_memory_utilization": 1.0,
        }
        found = plan_memory(configuration(spec, memory_gib=memory_gib, kv=kv, **asked), spec, CPU)
        check_plan(found, spec)
        return found

    roomy = plan(4096, 1.0, num_cpu_blocks=120)
    assert roomy.host_kv is not None
    assert not roomy.kv.groups[0].in_place
    fixed = roomy.gpu_total_bytes - roomy.gpu_items["kv_cache"]
    room = roomy.kv.num_bytes((200, roomy.kv.blocks(4096)[1]))  # of 256 blocks; some are stages
    with pytest.raises(CapacityError):
        plan(4096, (fixed + room) / GIB)
    split = plan(4096, (fixed + room) / GIB, num_cpu_blocks=120)
    assert split.host_kv is not None
    assert [group.num_pinned for group in split.kv.groups] == [120, 120]
    assert [group.in_place for group in split.kv.groups] == [True, False]
    assert split.reach == (split.kv.pools[0] + 120, split.kv.pools[1])
    assert 136 <= split.kv.pools[0] < 200
    assert split.kv.pools[1] >= split.kv.blocks(4096)[1]
    assert split.host_items["pinned_kv"] == 120 * sum(split.kv.block_bytes)


def test_zero_blocks_are_no_tier() -> None:
    for kv in ({"num_cpu_blocks": 0}, {"cpu_gib": 0.0}):
        plan = plan_small(kv={**kv, "enable_prefix_caching": True})
        assert plan.host_kv is None
        assert plan.prefix_caching
    assert not plan_small().prefix_caching


# swap_space.


def test_swap_space_goes_to_weights_that_do_not_fit_and_then_to_kv() -> None:
    plan = plan_olmo(kv={"swap_space": 12})
    data = plan.to_dict()["swap_space"]
    assert data["weights_bytes"] == plan.host_items["pinned_weights"] > 0
    assert plan.kv_tokens >= 2048  # a step's
    assert 0 <= 12 * GIB - data["weights_bytes"] - data["kv_bytes"] < plan.block_bytes
    [note] = [note for note in plan.notes if "swap_space" in note]
    assert f"{len(plan.offloaded_layers)} of 32 layers" in note
    assert plan.host_kv is not None
    assert f"holds {plan.kv.host_blocks[0]} KV blocks" in note
    fits = plan_llama(100_000, kv={"swap_space": 16})
    assert fits.offloaded_layers == ()
    assert fits.to_dict()["swap_space"]["kv_bytes"] == 16 * GIB


# What is expected of moves.


def test_moves_are_expected_at_the_rates_of_link_and_pageable_memory() -> None:
    rates, token_s = [], 0.0
    for limit in (0, 8, None):
        host = plan_llama(30_000, kv={"cpu_gib": 16, "pin_limit_gib": limit}).host_kv
        assert host is not None
        assert host.costs.swap_rates is not None
        rates.append(host.costs.swap_rates.load_bytes_s)
        token_s = host.costs.recompute_token_s
    slow, mixed, fast = rates
    assert slow < mixed < fast
    assert mixed < 2.1 * slow
    # A prompt token takes tens of microseconds, its 128 KiB some.
    assert token_s > 5 * 2**17 / fast


# Anything.


@pytest.mark.thorough
@settings(max_examples=25, deadline=None)
@given(
    spec=model_specs(),
    share=st.floats(1.0, 1.5),
    blocks=st.integers(0, 3000),
    pin=st.none() | st.floats(0, 0.2),
    block_size=st.sampled_from([8, 16, 128]),
    offload=st.sampled_from([None, uva(0.01), prefetch(1)]),
    gaps=st.sampled_from([{}, NO_UVA, NO_PIN]),
    kind=st.sampled_from(["cpu", "cuda"]),
)
def test_plans_account_for_all_and_hold_what_they_say(
    spec: ModelSpec,
    share: float,
    blocks: int,
    pin: float | None,
    block_size: int,
    offload: Any,
    gaps: dict[str, Any],
    kind: str,
) -> None:
    facts = replace(CPU if kind == "cpu" else H200, host_available_bytes=2**50, **gaps)
    kv = {
        "num_cpu_blocks": blocks,
        "block_size": block_size,
        "pin_limit_gib": pin if blocks else None,
    }
    config = configuration(
        spec,
        kv=kv,
        offload=offload,
        memory_gib=spec.weight_bytes() / GIB * share + 1.3,
        max_num_seqs=4,
        max_num_batched_tokens=300,
    )
    try:
        plan = plan_memory(config, spec, facts)
    except CapacityError:
        return
    check_plan(plan, spec)
    host = plan.host_kv
    assert (host is None) == (blocks == 0)
    assert plan.longest_tokens >= plan.max_model_len
    if host is None:
        return
    assert set(plan.kv.host_blocks) == {blocks}
    in_host = plan.host_items["pinned_kv"] + plan.host_items["pageable_kv"]
    assert in_host == blocks * sum(plan.kv.block_bytes)
    if pin is not None:
        assert plan.host_items["pinned_kv"] <= pin * GIB
    fits_gpu = plan.kv.blocks(plan.max_model_len)[0] <= plan.kv.pools[0]
    first = plan.kv.groups[0]
    assert first.in_place == (not fits_gpu)
    if first.in_place:
        assert facts.can_pin
        assert facts.can_uva
        assert 0 < host.stage_blocks <= first.num_pinned
    assert plan.predicted is not None
    assert plan.predicted["host_kv"]["decode_step_ms"] > 0


def test_olmo_without_a_tier_is_planned_as_before() -> None:
    assert plan_olmo(offload=uva(8)).longest_tokens == OLMO_7B.max_position_embeddings
