"""Plans: every byte is counted, what is planned fits, refusals carry figures and sound advice."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig, GPUConfig
from engine.errors import CapacityError, ConfigError
from engine.plan import DeviceFacts, MemoryPlan, align
from engine.planner import plan_memory, resolve_dtype
from engine.spec import DTYPE_BYTES, ModelSpec
from tests.engine.specs import (
    CPU,
    GIB,
    H200,
    OLMO_7B,
    configuration,
    model_specs,
    prefetch,
    small_spec,
    uva,
)

NO_PIN = {"can_pin": False, "can_uva": False, "reason": "tests say so"}
NO_UVA = {"can_uva": False, "reason": "tests say so"}


def plan_small(facts: DeviceFacts = CPU, **changes: Any) -> MemoryPlan:
    """Plan the small model with little beside weights and KV cache."""
    asked: dict[str, Any] = {
        "memory_gib": 0.03,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 64,
        "dtype": "float32",
        **changes,
    }
    return plan_memory(configuration(asked.pop("spec", small_spec()), **asked), small_spec(), facts)


# The 7B model on a card of 16 GB.


def plan_olmo(memory_gib: float = 15.99, **changes: Any) -> MemoryPlan:
    asked = {"memory_gib": memory_gib, "gpu_memory_utilization": 0.9, **changes}
    return plan_memory(configuration(OLMO_7B, **asked), OLMO_7B, H200)


def test_olmo_7b_resident_is_refused_on_16_gb() -> None:
    with pytest.raises(CapacityError) as error:
        plan_olmo()
    text = str(error.value)
    found = re.search(r"available KV cache memory: (-?[\d.]+) GiB", text)
    assert found
    assert float(found[1]) < 2.0
    assert "one sequence of max_model_len=4096 needs 2.00 GiB" in text
    assert "GPU budget 14.39 GiB" in text
    assert "weights 13.5" in text
    assert "offload.uva.cpu_offload_gb=" in text
    assert "offload.prefetch.offload_group_size=8" in text
    assert error.value.plan is not None
    assert error.value.plan["placements"]["resident"] == OLMO_7B.weight_bytes()  # type: ignore[index]


@pytest.mark.parametrize("offload", [uva(8), prefetch(8, 5, 2)], ids=["uva", "prefetch"])
def test_olmo_7b_offloaded_fits_16_gb(offload: Any) -> None:
    plan = plan_olmo(offload=offload)
    assert plan.gpu_total_bytes <= plan.gpu_budget_bytes == int(int(15.99 * GIB) * 0.9)
    assert plan.kv_tokens >= 4096
    assert not any("not needed" in note for note in plan.notes)
    placed = plan.placed_bytes()
    assert sum(placed.values()) == OLMO_7B.weight_bytes()


def test_olmo_7b_prefetch_moves_twenty_layers_a_step() -> None:
    plan = plan_olmo(offload=prefetch(8, 5, 2))
    layers = [layer.index for layer in plan.offloaded_layers]
    assert layers == [i for i in range(32) if i % 8 >= 3]
    layer_bytes = plan.layers[3].offloaded.num_bytes
    assert (plan.num_slots, plan.slot_bytes) == (3, layer_bytes)
    assert plan.bytes_per_step() == 20 * layer_bytes


# Figures and advice.


def alternatives(text: str) -> list[str]:
    """Return what a refusal says would fit."""
    found = re.search(r"Fits with: (.*?)\.(?: |$)", text)
    return found[1].split("; or ") if found else []


def follow(config: EngineConfig, advice: str) -> EngineConfig:
    """Apply one alternative of a refusal."""
    fields = dict(part.split("=", 1) for part in advice.split())
    if "engine.max_model_len" in fields:
        length = int(fields["engine.max_model_len"])
        return replace(config, engine=replace(config.engine, max_model_len=length))
    if "gpu.memory_gib" in fields:
        return replace(config, gpu=GPUConfig(memory_gib=float(fields["gpu.memory_gib"])))
    if fields["offload"] == "uva":
        return replace(config, offload=uva(float(fields["offload.uva.cpu_offload_gb"])))
    names = ("offload_group_size", "offload_num_in_group", "offload_prefetch_step")
    return replace(
        config, offload=prefetch(*(int(fields[f"offload.prefetch.{name}"]) for name in names))
    )


@settings(max_examples=60, deadline=None)
@given(
    spec=model_specs(),
    share=st.floats(0.05, 1.3),
    kind=st.sampled_from(["cpu", "cuda"]),
    gaps=st.sampled_from([{}, NO_UVA, NO_PIN]),
    host_share=st.sampled_from([0.3, 1.0, 5.0]),
    swap_space=st.sampled_from([0.0, 0.0, 0.5]),
    block_size=st.sampled_from([8, 16, 128]),
)
def test_advice_fits_when_it_is_followed(
    spec: ModelSpec,
    share: float,
    kind: str,
    gaps: dict[str, Any],
    host_share: float,
    swap_space: float,
    block_size: int,
) -> None:
    weights = spec.weight_bytes() / GIB
    facts = replace(
        H200 if kind == "cuda" else CPU,
        host_available_bytes=int((3 + 2 * weights) * host_share * GIB),
    )
    facts = replace(facts, **gaps)
    config = configuration(
        spec,
        memory_gib=weights * share + 1.2,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        kv={"swap_space": swap_space, "block_size": block_size},
    )
    try:
        plan = plan_memory(config, spec, facts)
    except CapacityError as error:
        for advice in alternatives(str(error)):
            check_plan(plan_memory(follow(config, advice), spec, facts), spec)
    else:
        check_plan(plan, spec)


def check_plan(plan: MemoryPlan, spec: ModelSpec) -> None:
    """Every tensor has a place, every byte is counted once, and all of it fits."""
    assert set(plan.placements) == {tensor.name for tensor in spec.tensors()}
    slabs = [slab for layer in plan.layers for slab in (layer.resident, layer.offloaded)]
    slabs += [plan.outer_resident, plan.outer_offloaded]
    names = [tensor.name for slab in slabs for tensor in slab.tensors]
    assert sorted(names) == sorted(plan.placements)
    size = DTYPE_BYTES[plan.dtype]
    for slab in slabs:
        end = 0
        for tensor, offset in zip(slab.tensors, slab.offsets, strict=True):
            assert offset == end
            end = align(offset + tensor.numel * size)
        assert slab.num_bytes == end
    assert sum(plan.placed_bytes().values()) == spec.weight_bytes(plan.dtype)
    assert plan.gpu_total_bytes == sum(plan.gpu_items.values()) <= plan.gpu_budget_bytes
    assert plan.host_total_bytes == sum(plan.host_items.values()) <= plan.host_limit_bytes
    assert plan.kv_tokens >= plan.max_model_len
    assert plan.gpu_items["kv_cache"] == plan.num_gpu_blocks * plan.block_bytes
    resident = sum(layer.resident.num_bytes for layer in plan.layers)
    assert plan.gpu_items["weights"] == resident + plan.outer_resident.num_bytes
    slots = plan.num_slots * plan.slot_bytes + plan.outer_slot_bytes
    assert plan.gpu_items["prefetch_slots"] + plan.gpu_items["staging_slots"] == slots
    offloaded = sum(layer.offloaded.num_bytes for layer in plan.layers)
    name = "pinned_weights" if plan.pin else "pageable_weights"
    assert plan.host_items[name] == offloaded + plan.outer_offloaded.num_bytes
    assert plan.slot_bytes == max((x.offloaded.num_bytes for x in plan.layers), default=0) or (
        plan.num_slots == 0
    )


@settings(max_examples=60, deadline=None)
@given(
    spec=model_specs(),
    step=st.integers(1, 50),
    group=st.integers(1, 40),
    data=st.data(),
    gaps=st.sampled_from([{}, NO_UVA, NO_PIN]),
)
def test_plans_of_every_placement_account_for_all(
    spec: ModelSpec, step: int, group: int, data: st.DataObject, gaps: dict[str, Any]
) -> None:
    group = min(group, spec.num_hidden_layers)
    num = data.draw(st.integers(1, group))
    offload = data.draw(
        st.sampled_from([None, uva(0.01), uva(1000), uva(1000, "mlp"), prefetch(group, num, step)])
    )
    facts = replace(CPU, host_available_bytes=2**50, **gaps)
    config = configuration(
        spec, offload=offload, memory_gib=2.0**20, max_num_seqs=4, max_num_batched_tokens=300
    )
    plan = plan_memory(config, spec, facts)
    check_plan(plan, spec)
    num_moved = len(plan.offloaded_layers)
    kind = plan.offloaded_layers[0].placement.value if num_moved else "resident"
    expected = {
        "resident": 0,
        "uva": min(2, num_moved),
        "prefetch": min(step + 1, num_moved),
        "on_demand": 1,
    }
    assert plan.num_slots == expected[kind]
    assert {layer.placement.value for layer in plan.offloaded_layers} <= {kind}


def test_a_refusal_gives_negative_room_and_every_part() -> None:
    with pytest.raises(CapacityError) as error:
        plan_olmo(memory_gib=10)
    text = str(error.value)
    found = re.search(r"available KV cache memory: (-[\d.]+) GiB", text)
    assert found
    parts = re.search(r"GPU budget ([\d.]+) GiB, taken by (.*) \(GiB\)", text)
    assert parts
    taken = sum(float(part.split()[1]) for part in parts[2].split(", "))
    assert float(found[1]) == pytest.approx(float(parts[1]) - taken, abs=0.05)
    assert error.value.plan is not None
    assert error.value.plan["gpu"]["free_bytes"] < 0  # type: ignore[index]
    assert error.value.plan["kv"]["num_gpu_blocks"] == 0  # type: ignore[index]


def test_a_shorter_length_is_advised_where_it_fits() -> None:
    with pytest.raises(CapacityError) as error:
        plan_olmo(memory_gib=17)
    [length] = [a for a in alternatives(str(error.value)) if a.startswith("engine.max_model_len")]
    assert 16 <= int(length.split("=")[1]) < 4096


def test_a_larger_card_is_advised_where_nothing_else_helps() -> None:
    spec = replace(OLMO_7B, num_hidden_layers=1)
    config = configuration(spec, memory_gib=1.0)
    with pytest.raises(CapacityError) as error:
        plan_memory(config, spec, H200)
    [advice] = alternatives(str(error.value))
    assert advice.startswith("gpu.memory_gib=")
    smaller = replace(H200, free_bytes=2 * GIB)
    with pytest.raises(CapacityError, match=r"No offload makes it fit: lower .*use a card of"):
        plan_memory(config, spec, smaller)


def test_kv_room_of_exactly_one_sequence_is_enough_and_a_byte_less_is_not() -> None:
    plan = plan_small()
    need = 4 * plan.block_bytes
    budget = plan.gpu_total_bytes - plan.gpu_items["kv_cache"] + need
    exact = plan_small(memory_gib=budget / GIB, gpu_memory_utilization=1.0)
    assert (exact.num_gpu_blocks, exact.gpu_total_bytes) == (4, budget)
    with pytest.raises(CapacityError, match="available KV cache memory"):
        plan_small(memory_gib=(budget - 1) / GIB, gpu_memory_utilization=1.0)


def test_kv_takes_no_more_than_all_sequences_can_use() -> None:
    plan = plan_small(memory_gib=1.0)
    assert plan.num_gpu_blocks == 4 * 4
    assert plan_small(memory_gib=1.0, max_model_len=65).num_gpu_blocks == 4 * 5


def test_a_budget_above_what_is_free_is_refused() -> None:
    facts = replace(H200, free_bytes=20 * GIB)
    config = configuration(OLMO_7B, memory_gib=40, gpu_memory_utilization=0.9)
    with pytest.raises(CapacityError) as error:
        plan_memory(config, OLMO_7B, facts)
    for part in ("20.00 GiB", "36.00 GiB", "H200", "gpu.memory_gib"):
        assert part in str(error.value)


def test_without_memory_gib_the_card_is_the_budget() -> None:
    plan = plan_memory(configuration(OLMO_7B), OLMO_7B, H200)
    assert plan.gpu_budget_bytes == int(H200.total_bytes * 0.9)


def test_an_offload_that_is_not_needed_is_noted() -> None:
    for offload in (uva(0.001), prefetch(2)):
        notes = plan_small(memory_gib=0.1, offload=offload).notes
        assert any("is not needed" in note and "offload=none" in note for note in notes)


# Host memory.


@pytest.mark.parametrize("facts", [CPU, H200], ids=["cpu", "cuda"])
def test_a_plan_beyond_host_memory_is_refused(facts: DeviceFacts) -> None:
    weights = OLMO_7B.weight_bytes() / GIB
    config = configuration(OLMO_7B, memory_gib=15, offload=uva(100), dtype="bfloat16")
    plan = plan_memory(config, OLMO_7B, facts)
    assert plan.host_items["pinned_weights"] > 0.8 * OLMO_7B.weight_bytes()
    short = replace(facts, host_available_bytes=int(weights * 0.8 * GIB))
    with pytest.raises(CapacityError) as error:
        plan_memory(config, OLMO_7B, short)
    text = str(error.value)
    assert text.startswith("host memory: ")
    assert f"{plan.host_total_bytes / GIB:.2f} GiB are needed" in text
    assert f"{weights * 0.8 - 1:.2f} GiB are available after a reserve of 1 GiB" in text
    assert ("gpu.memory_gib" in text) is facts.emulated


def test_an_emulated_card_counts_as_host_memory() -> None:
    plan = plan_small()
    assert plan.host_items["emulated_gpu"] == plan.gpu_total_bytes
    assert plan.facts.emulated
    assert plan.graph_sizes == ()
    assert "emulated_gpu" not in plan_olmo(offload=uva(8)).host_items


def test_host_reserve_is_kept_free() -> None:
    plan = plan_small()
    tight = replace(CPU, host_available_bytes=plan.host_total_bytes + GIB)
    assert plan_small(tight).host_total_bytes == plan.host_limit_bytes - (
        plan.host_limit_bytes - plan.host_total_bytes
    )
    with pytest.raises(CapacityError, match="host memory"):
        plan_small(replace(tight, host_available_bytes=tight.host_available_bytes - 1))
    assert plan_small(
        replace(tight, host_available_bytes=plan.host_total_bytes), host_reserve_gib=0
    )


# swap_space.


def test_swap_space_moves_as_few_layers_as_fit() -> None:
    plan = plan_olmo(kv={"swap_space": 10})
    count = len(plan.offloaded_layers)
    assert 0 < count < 32
    assert plan.num_slots == 2
    data = plan.to_dict()["swap_space"]
    assert data["asked_bytes"] == 10 * GIB
    assert 0 < data["weights_bytes"] <= 10 * GIB
    assert data["kv_bytes"] == 0
    assert any(f"{count} of 32 layers" in note for note in plan.notes)
    check_plan(plan, OLMO_7B)
    layer = plan.slot_bytes
    room = plan.gpu_budget_bytes - plan.gpu_total_bytes + plan.gpu_items["kv_cache"]
    assert room - layer < 4096 * 512 * 1024


def test_swap_space_that_is_too_small_is_refused_with_what_is_needed() -> None:
    with pytest.raises(CapacityError) as error:
        plan_olmo(kv={"swap_space": 0.5})
    found = re.search(
        r"swap_space=0\.5 GiB is not enough: (\d+) of 32 layers, ([\d.]+) GiB", str(error.value)
    )
    assert found
    enough = plan_olmo(kv={"swap_space": float(found[2]) + 0.001})
    assert len(enough.offloaded_layers) == int(found[1])
    with pytest.raises(CapacityError, match="does not help"):
        plan_olmo(memory_gib=2, kv={"swap_space": 50})


def test_swap_space_of_a_model_that_fits_moves_nothing() -> None:
    plan = plan_olmo(memory_gib=30, kv={"swap_space": 10})
    assert plan.offloaded_layers == ()
    assert plan.num_slots == 0


def test_swap_space_beside_an_offload_backend_is_said_to_be_unused() -> None:
    plan = plan_olmo(offload=uva(8), kv={"swap_space": 4})
    assert any("swap_space=4 GiB is not used" in note for note in plan.notes)
    assert plan.to_dict()["swap_space"]["asked_bytes"] == 0


# Limits, windows, dtypes.


@pytest.mark.parametrize("length", [1, 257])
def test_max_model_len_out_of_bounds_is_refused(length: int) -> None:
    with pytest.raises(ConfigError, match=rf"at least 2 .*256 positions, got {length}"):
        plan_small(max_model_len=length)
    assert plan_small(max_model_len=2).max_model_len == 2
    assert plan_small(max_model_len=256).max_model_len == 256
    assert plan_small(max_model_len=None).max_model_len == 256


def test_a_sliding_window_is_refused_unless_disabled() -> None:
    spec = small_spec(model_type="mistral", sliding_window=32)
    with pytest.raises(ConfigError, match=r"window of 32 tokens.*kv\.disable_sliding_window=true"):
        plan_memory(configuration(spec, memory_gib=1), spec, CPU)
    config = configuration(spec, memory_gib=1, kv={"disable_sliding_window": True})
    assert plan_memory(config, spec, CPU).max_model_len == 256


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_auto_is_the_checkpoints_on_a_gpu_and_float32_on_a_cpu(dtype: str) -> None:
    spec = small_spec(dtype=dtype)
    config = configuration(spec)
    assert resolve_dtype(config, spec, "cuda") == dtype
    assert resolve_dtype(config, spec, "cpu") == "float32"
    asked = configuration(spec, dtype="float16")
    assert resolve_dtype(asked, spec, "cpu") == resolve_dtype(asked, spec, "cuda") == "float16"


def test_selectors_without_a_size_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cpu_offload_params set.*nothing would move"):
        plan_small(offload=uva(0, "mlp"))


def test_staging_slots_exist_only_where_a_step_can_be_large_enough() -> None:
    asked: dict[str, Any] = {"offload": uva(1), "memory_gib": 0.1}
    small = plan_small(**asked)
    assert (small.stage_tokens, small.num_slots) == (None, 0)
    large = plan_small(**asked, uva_stage_tokens=32)
    assert (large.stage_tokens, large.num_slots) == (32, 2)
    assert large.gpu_items["staging_slots"] == 2 * large.slot_bytes
    assert large.gpu_items["prefetch_slots"] == 0


def test_weights_in_pageable_memory_rule_out_graphs() -> None:
    unpinned = replace(H200, **NO_PIN)
    for facts, offload, expected in (
        (H200, None, True),
        (H200, uva(1), True),
        (replace(H200, **NO_UVA), uva(1), True),
        (unpinned, None, True),
        (unpinned, uva(1), False),
        (unpinned, prefetch(2), False),
        (unpinned, uva(1, "lm_head"), False),
    ):
        plan = plan_small(facts, memory_gib=2, offload=offload)
        assert plan.can_capture is expected
        assert plan.graph_sizes == (1, 2, 4)
        assert (plan.gpu_items["graphs"] > 0) is expected
        assert any("without graphs" in note for note in plan.notes) is not expected


@pytest.mark.parametrize("layers", [1, 3])
def test_on_demand_copies_every_layer_of_every_step(layers: int) -> None:
    spec = small_spec(num_hidden_layers=layers)
    config = configuration(spec, memory_gib=0.1, offload=uva(1), max_model_len=64)
    plan = plan_memory(config, spec, replace(CPU, **NO_UVA))
    layer = sum(align(tensor.numel * 4) for tensor in spec.layer_tensors(0))
    assert plan.bytes_per_step() == layers * layer


def test_a_layer_with_a_slot_to_itself_is_not_copied_again() -> None:
    plan = plan_small(memory_gib=0.1, offload=prefetch(8, 5, 2))
    assert plan.num_slots == 3
    assert plan.bytes_per_step() == 4 * plan.slot_bytes
    assert plan_small(memory_gib=0.1, offload=prefetch(8, 5, 4)).bytes_per_step() == 0
    assert plan_small(memory_gib=0.1, offload=prefetch(8, 5, 9)).num_slots == 5


def test_a_plan_becomes_plain_data() -> None:
    import json

    data = plan_olmo(offload=prefetch(8, 5, 2)).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["gpu"]["free_bytes"] == data["gpu"]["budget_bytes"] - data["gpu"]["total_bytes"]
    assert data["kv"]["tokens"] == data["kv"]["num_gpu_blocks"] * data["kv"]["block_size"]
    assert data["offloaded_layers"][:3] == [3, 4, 5]
