"""What sequences take of the KV cache, and how bytes are shared out over groups of layers."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.errors import CapacityError
from engine.model.spec import ModelSpec
from engine.plan.memory import MemoryPlan
from engine.plan.planner import plan_memory
from engine.plan.sizes import KVGroup, KVSizes
from tests.engine.specs import CPU, GIB, H200, advised, check_plan, configuration, small_spec

FULL, WINDOW = "full_attention", "sliding_attention"
MIXED = {"sliding_window": 32, "layer_types": [FULL, *[WINDOW] * 3] * 2}


def groups(*sizes: tuple[int, int | None]) -> tuple[KVGroup, ...]:
    """Return groups of so many layers with such windows, 100 bytes a layer."""
    return tuple(
        KVGroup(layers=tuple(range(count)), window=window, block_bytes=100 * count)
        for count, window in sizes
    )


@st.composite
def sizes(draw: st.DrawFn) -> KVSizes:
    some = draw(st.lists(st.integers(1, 60), max_size=3, unique=True))
    windows: list[int | None] = sorted(some, reverse=True)  # type: ignore[assignment]
    if not windows or draw(st.booleans()):
        windows = [None, *windows]
    layers = [draw(st.integers(1, 5)) for _ in windows]
    return KVSizes(
        groups=groups(*zip(layers, windows, strict=True)),
        block_size=draw(st.sampled_from([1, 4, 16])),
        max_model_len=draw(st.integers(2, 300)),
        max_num_seqs=draw(st.integers(1, 6)),
        step_tokens=draw(st.integers(6, 64)),
        keeps_idle=draw(st.booleans()),
    )


TWO_TOKENS = KVSizes(
    groups=groups((1, None), (4, 1)),
    block_size=1,
    max_model_len=2,
    max_num_seqs=2,
    step_tokens=6,
)


@pytest.mark.thorough
@settings(max_examples=150, deadline=None)
@example(kv=TWO_TOKENS, room=300)  # less than a sequence takes, and yet more than it needs of one
@given(kv=sizes(), room=st.integers(0, 400_000))
def test_bytes_are_shared_out(kv: KVSizes, room: int) -> None:
    pools, need = kv.fit(room), kv.blocks(kv.max_model_len)
    assert kv.num_bytes(pools) <= room
    holds_one = all(n >= least for n, least in zip(pools, need, strict=True))
    assert holds_one == (kv.sequence_bytes(kv.max_model_len) <= room)
    assert (kv.sequences(pools, kv.max_model_len) >= 1) == holds_one
    assert all(0 <= n <= most for n, most in zip(pools, kv.most, strict=True))
    more = kv.fit(room + 2 * sum(kv.block_bytes))
    assert all(n >= before for n, before in zip(more, pools, strict=True))
    if kv.sequence_bytes(kv.max_model_len) <= room and pools != kv.most:
        # What is left is less than one block of each group.
        assert room - kv.num_bytes(pools) < sum(kv.block_bytes) or pools[0] == kv.most[0]


@settings(max_examples=100, deadline=None)
@given(kv=sizes(), data=st.data())
def test_room_is_the_inverse_of_fit(kv: KVSizes, data: st.DataObject) -> None:
    least = kv.blocks(kv.max_model_len)[0]
    count = data.draw(st.integers(least, max(least, kv.useful[0])))
    room = kv.room(count)
    assert kv.fit(room)[0] >= count
    assert kv.num_bytes(kv.fit(room)) <= room
    assert kv.fit(room - 1)[0] < count or count == least


@settings(max_examples=100, deadline=None)
@given(kv=sizes(), room=st.integers(0, 60_000))
def test_the_longest_sequence(kv: KVSizes, room: int) -> None:
    length = kv.longest(room)
    assert length == 0 or kv.sequence_bytes(length) <= room
    if length < kv.max_model_len:
        assert kv.sequence_bytes(length + kv.block_size) > room


def test_kept_prefixes_have_a_use_for_every_block_and_a_limit_of_sequences_caps_nothing() -> None:
    spec = small_spec()
    asked: dict[str, Any] = {"memory_gib": 0.5, "max_num_seqs": 2, "max_model_len": 256}
    kept, bare = (
        plan_memory(configuration(spec, kv={"enable_prefix_caching": value}, **asked), spec, CPU)
        for value in (True, False)
    )
    assert bare.num_gpu_blocks == 2 * 256 / 16
    assert kept.gpu_budget_bytes - kept.gpu_total_bytes < kept.block_bytes
    mixed = plan_mixed(kv={"enable_prefix_caching": True})
    assert mixed.gpu_budget_bytes - mixed.gpu_total_bytes < sum(mixed.kv.block_bytes)


def plan_mixed(memory_gib: float = 1.0, **changes: Any) -> MemoryPlan:
    spec = small_spec(**MIXED)
    asked: dict[str, Any] = {
        "memory_gib": memory_gib,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 256,
        "dtype": "float32",
        **changes,
    }
    plan = plan_memory(configuration(spec, **asked), spec, CPU)
    check_plan(plan, spec)
    return plan


def test_figures_of_a_plan_with_two_groups() -> None:
    plan = plan_mixed()
    kv = plan.to_dict()["kv"]
    whole, some = kv["groups"]
    assert (whole["layers"], whole["window"], some["layers"], some["window"]) == (2, None, 6, 32)
    assert some["block_bytes"] == 3 * whole["block_bytes"]
    # 4 sequences of 256 tokens; of windows 3 blocks each, and 2 steps of 32 tokens.
    assert (whole["num_blocks"], some["num_blocks"]) == (64, 16)
    assert kv["tokens"] == plan.kv_tokens == 64 * 16
    # A sequence of one step: 31 tokens before 32, from any offset, in blocks of 16.
    assert plan.kv.blocks(256) == (16, 5)
    assert kv["max_concurrency"] == pytest.approx(16 / 5)
    disabled = plan_mixed(kv={"disable_sliding_window": True})
    assert len(disabled.to_dict()["kv"]["groups"]) == 1
    assert disabled.gpu_items["kv_cache"] > 2 * plan.gpu_items["kv_cache"]


def test_figures_of_a_plan_with_three_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelSpec, "windows", (None, 32, 96, 32, 32, 300, 96, None))
    plan = plan_mixed()
    assert [group.layers for group in plan.kv.groups] == [(0, 5, 7), (2, 6), (1, 3, 4)]
    assert plan.kv.windows == (None, 96, 32)  # 300 is never left
    assert plan.window == 96
    assert plan.kv.blocks(256) == (16, 9, 5)
    # 4 sequences of 256 tokens; of windows 7 and 3 blocks each, and 2 steps of 32 tokens.
    assert plan.kv.pools == (64, 4 * 7 + 4, 4 * 3 + 4)
    fixed = plan.gpu_total_bytes - plan.gpu_items["kv_cache"]
    need = plan.kv.sequence_bytes(256)
    exact = plan_mixed((fixed + need) / GIB, gpu_memory_utilization=1.0)
    assert exact.kv.pools == plan.kv.blocks(256)
    more = need + 3 * sum(plan.kv.block_bytes)
    assert plan_mixed((fixed + more) / GIB, gpu_memory_utilization=1.0).kv.pools == (19, 12, 8)
    # One layer more in the first group: what it has in the host tier exceeds the stage buffers.
    monkeypatch.setattr(ModelSpec, "windows", (None, 32, None, 32, 32, 300, 96, None))
    few = {"max_num_seqs": 1, "max_num_batched_tokens": 1}
    plan = plan_mixed(**few)
    fixed = plan.gpu_total_bytes - plan.gpu_items["kv_cache"]
    need = plan.kv.sequence_bytes(256)
    long = plan_mixed(
        (fixed + need - 4000) / GIB, gpu_memory_utilization=1.0, kv={"num_cpu_blocks": 15}, **few
    )
    assert [group.num_pinned for group in long.kv.groups] == [15, 15, 15]
    assert [group.in_place for group in long.kv.groups] == [True, False, False]


def test_one_sequence_fits_to_the_byte_and_a_refusal_says_what_is_needed() -> None:
    plan = plan_mixed()
    fixed = plan.gpu_total_bytes - plan.gpu_items["kv_cache"]
    need = plan.kv.sequence_bytes(256)
    exact = plan_mixed((fixed + need) / GIB, gpu_memory_utilization=1.0)
    assert exact.kv.pools == (16, 5)
    assert exact.max_concurrency == 1
    with pytest.raises(CapacityError, match=r"1\.00 KiB short \(needs .* of KV for 256 tokens"):
        plan_mixed((fixed + need - 1024) / GIB, gpu_memory_utilization=1.0)
    alone = small_spec(sliding_window=32)
    plan = plan_memory(configuration(alone, memory_gib=1, max_num_seqs=4), alone, CPU)
    assert plan.kv.windows == (32,)
    check_plan(plan, alone)


@pytest.mark.thorough_but("context")
@pytest.mark.parametrize("objective", ["latency", "throughput", "context"])
def test_a_placement_is_chosen_for_a_model_with_windows(objective: str) -> None:
    spec = small_spec(**MIXED, max_position_embeddings=4096)
    roomy = plan_memory(configuration(spec, memory_gib=4, max_model_len=4096), spec, H200)
    fixed = roomy.gpu_total_bytes - roomy.gpu_items["kv_cache"]
    layer = roomy.layers[0].resident.num_bytes
    budget = fixed + roomy.kv.sequence_bytes(4096) - layer
    config = configuration(
        spec, memory_gib=budget / GIB, gpu_memory_utilization=1.0, max_model_len=4096
    )
    with pytest.raises(CapacityError) as error:
        plan_memory(config, spec, H200)
    assert any(words.startswith("offload=") for words in advised(error.value))
    planner = replace(config.planner, choose=True, objective=objective)
    plan = plan_memory(replace(config, planner=planner), spec, H200)
    check_plan(plan, spec)
    assert plan.choice is not None
    assert plan.bytes_per_step() > 0
