"""Plans: host memory, swap_space, lengths, windows, dtypes, slots."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from engine.asked.config import EngineConfig, GPUConfig, ModelConfig, PlannerConfig
from engine.asked.offload import OffloadConfig
from engine.errors import CapacityError, ConfigError
from engine.model.formats import align
from engine.model.spec import ModelSpec
from engine.plan.cards import DeviceFacts, resolve_dtype
from engine.plan.planner import plan_memory
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
    plan_olmo,
    plan_small,
    prefetch,
    small_spec,
    uva,
)

# Host memory.


@pytest.mark.thorough
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
    assert text.startswith("test does not fit: ")
    assert f"{plan.host_total_bytes / GIB:.2f} GiB of host memory are needed" in text
    assert f"{weights * 0.8 - 1:.2f} GiB are available after a reserve of 1 GiB" in text
    assert ("gpu.memory_gib" in text) is facts.emulated
    assert ("takes as much RAM" in text) is facts.emulated


def test_an_emulated_gpu_has_no_room_for_kv_that_no_request_can_use() -> None:
    asked = configuration(OLMO_7B, memory_gib=24, dtype="bfloat16")
    config = replace(asked, emulated_kv_tokens=6000)
    whole = plan_memory(replace(config, emulated_kv_tokens=None), OLMO_7B, CPU)
    plan = plan_memory(config, OLMO_7B, CPU)
    check_plan(plan, OLMO_7B)
    assert plan.num_gpu_blocks == 375
    saved = (whole.num_gpu_blocks - 375) * plan.block_bytes
    assert whole.host_total_bytes - plan.host_total_bytes == saved
    assert "375 blocks, as many as the requests can use; the budget would allow" in " ".join(
        plan.notes
    )
    least = plan_memory(replace(config, emulated_kv_tokens=1), OLMO_7B, CPU)
    assert least.kv_tokens == least.max_model_len
    on_gpu = plan_memory(replace(config, emulated_kv_tokens=1), OLMO_7B, H200)
    assert on_gpu.num_gpu_blocks == plan_memory(config, OLMO_7B, H200).num_gpu_blocks


def test_a_refusal_on_a_cpu_says_what_emulation_takes() -> None:
    config = configuration(OLMO_7B, memory_gib=24, dtype="bfloat16")
    with pytest.raises(CapacityError, match=r"Without a GPU, emulating 21\.\d\d GiB of GPU memory"):
        plan_memory(config, OLMO_7B, replace(CPU, host_available_bytes=8 * GIB))


@pytest.mark.thorough
def test_a_refusal_names_offloads_that_only_host_memory_rules_out() -> None:
    config = configuration(OLMO_7B, memory_gib=15, dtype="bfloat16")
    with pytest.raises(CapacityError) as error:
        plan_memory(config, OLMO_7B, H200)
    assert advised(error.value)[0] == "offload=auto"
    assert any("offload.uva.cpu_offload_gb=" in words for words in advised(error.value))
    short = replace(H200, host_available_bytes=3 * GIB, free_bytes=14 * GIB)
    with pytest.raises(CapacityError) as error:
        plan_memory(config, OLMO_7B, short)
    text = " ".join(str(error.value).split())
    assert "It would fit with offload=auto; or offload.uva.cpu_offload_gb=" in text
    assert "not in the 2.00 GiB of host memory" in text


def test_small_lacks_are_seen_in_the_figures() -> None:
    with pytest.raises(CapacityError) as error:
        plan_small(memory_gib=0.0018)
    found = re.search(r"needs ([\d.]+) MiB of KV .* has ([\d.]+) KiB", str(error.value))
    assert found is not None
    assert 0 < float(found[2]) < 1024 * float(found[1])


def test_an_emulated_card_counts_as_host_memory() -> None:
    plan = plan_small()
    assert plan.host_items["emulated_gpu"] == plan.gpu_total_bytes
    assert plan.facts.emulated
    assert plan.graph_sizes == ()
    assert "emulated_gpu" not in plan_olmo(offload=uva(8)).host_items


def test_host_reserve_is_kept_free() -> None:
    plan = plan_small()
    tight = replace(CPU, host_available_bytes=plan.host_total_bytes + GIB)
    assert plan_small(tight).host_limit_bytes == plan.host_total_bytes
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
    assert data["weights_bytes"] == plan.host_items["pinned_weights"]
    assert 0 <= 10 * GIB - data["weights_bytes"] - data["kv_bytes"] < plan.block_bytes
    assert data["kv_bytes"] == plan.host_items["pinned_kv"]
    assert any(f"{count} of 32 layers" in note for note in plan.notes)
    check_plan(plan, OLMO_7B)
    layer = plan.slot_bytes
    room = plan.gpu_budget_bytes - plan.gpu_total_bytes + plan.gpu_items["kv_cache"]
    assert room - layer < 4096 * 512 * 1024


@pytest.mark.thorough
def test_swap_space_that_is_too_small_is_refused_with_what_is_needed() -> None:
    with pytest.raises(CapacityError) as error:
        plan_olmo(kv={"swap_space": 0.5})
    found = re.search(
        r"swap_space=0\.5 GiB is not enough\. ([\d.]+) GiB would hold (\d+) of 32 layers",
        str(error.value),
    )
    assert found
    least = float(found[1])
    enough = plan_olmo(kv={"swap_space": least})
    assert len(enough.offloaded_layers) == int(found[2]) > 0
    with pytest.raises(CapacityError):
        plan_olmo(kv={"swap_space": least - 0.01})
    with pytest.raises(CapacityError, match="does not help"):
        plan_olmo(memory_gib=2, kv={"swap_space": 50})


def test_swap_space_of_a_model_that_fits_moves_nothing() -> None:
    plan = plan_olmo(memory_gib=30, kv={"swap_space": 10})
    assert plan.offloaded_layers == ()
    assert plan.num_slots == 0


@pytest.mark.parametrize("offload", [uva(8), prefetch(8, 5, 2)], ids=["uva", "prefetch"])
def test_swap_space_beside_an_offload_backend_is_all_for_kv_blocks(offload: OffloadConfig) -> None:
    plan = plan_olmo(offload=offload, kv={"swap_space": 4})
    data = plan.to_dict()["swap_space"]
    assert data == {"asked_bytes": 4 * GIB, "weights_bytes": 0, "kv_bytes": 4 * GIB}
    assert plan.host_kv is not None
    assert plan.kv.groups[0].num_pinned == 4 * GIB // plan.block_bytes


# Limits, windows, dtypes.


@pytest.mark.parametrize("length", [1, 257])
def test_max_model_len_out_of_bounds_is_refused(length: int) -> None:
    with pytest.raises(ConfigError, match=rf"at least 2 .*256 positions, got {length}"):
        plan_small(max_model_len=length)
    assert plan_small(max_model_len=2).max_model_len == 2
    assert plan_small(max_model_len=256).max_model_len == 256
    assert plan_small(max_model_len=None).max_model_len == 256


@pytest.mark.parametrize(
    ("length", "is_disabled", "window", "words"),
    [
        (256, False, 32, None),
        (256, True, None, "8 of 8 layers attend to the whole context instead of 32 tokens"),
        (33, False, 32, None),
        (32, False, None, None),
        (32, True, None, None),
    ],
)
def test_a_window_is_in_force_unless_disabled_or_too_large_to_matter(
    length: int, is_disabled: bool, window: int | None, words: str | None
) -> None:
    spec = small_spec(model_type="mistral", sliding_window=32)
    kv = {"disable_sliding_window": is_disabled}
    config = configuration(spec, memory_gib=1, max_model_len=length, kv=kv)
    plan = plan_memory(config, spec, CPU)
    assert (plan.max_model_len, plan.window) == (length, window)
    assert plan.to_dict()["kv"]["window"] == window
    assert [words in note for note in plan.notes] == ([True] if words else [])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_auto_is_the_checkpoints_on_a_gpu_and_float32_on_a_cpu(dtype: str) -> None:
    spec = small_spec(dtype=dtype)
    config = configuration(spec)
    assert resolve_dtype(config, spec, "cuda") == dtype
    assert resolve_dtype(config, spec, "cpu") == "float32"
    asked = configuration(spec, dtype="float16")
    assert resolve_dtype(asked, spec, "cpu") == resolve_dtype(asked, spec, "cuda") == "float16"
    old = "float16" if dtype == "bfloat16" else dtype
    assert resolve_dtype(config, spec, "cuda", (7, 5)) == old
    assert resolve_dtype(config, spec, "cuda", (8, 0)) == dtype


@pytest.mark.parametrize(("version", "num_notes"), [(8.0, 0), (7.5, 1), (7.0, 2)])
def test_a_card_without_bfloat16_is_planned_in_float16_with_plain_weights(
    version: float, num_notes: int
) -> None:
    gpu = GPUConfig(name="old", memory_gib=40, compute_capability=version)
    config = replace(configuration(OLMO_7B), gpu=gpu, planner=PlannerConfig(choose=True))
    plan = plan_memory(config, OLMO_7B, DeviceFacts.of_card(gpu))
    assert plan.dtype == ("bfloat16" if num_notes == 0 else "float16")
    if num_notes:
        assert not plan.formats.others
    notes = [note for note in plan.notes if "compute capability" in note]
    assert len(notes) == num_notes
    assert all(f"compute capability {version} (old)" in note for note in notes)
    if num_notes == 2:
        assert "it can be planned, not run" in notes[1]


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


def test_disabling_a_window_that_is_not_there_is_noted() -> None:
    plan = plan_small(kv={"disable_sliding_window": True})
    assert any("this model has no window" in note for note in plan.notes)
    assert not plan_small().notes


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
        assert plan.use_graphs is expected
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
    data = plan_olmo(offload=prefetch(8, 5, 2)).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["gpu"]["free_bytes"] == data["gpu"]["budget_bytes"] - data["gpu"]["total_bytes"]
    assert data["kv"]["tokens"] == data["kv"]["num_gpu_blocks"] * data["kv"]["block_size"]
    assert data["offloaded_layers"][:3] == [3, 4, 5]


def test_files_take_buffers_of_the_threads_that_read_them_and_a_tokenizer() -> None:
    config = configuration(OLMO_7B, memory_gib=20, offload=uva(8), max_model_len=512)
    files = replace(config, model=ModelConfig(name="test", path=".", spec=OLMO_7B))

    def host(asked: EngineConfig, spec: ModelSpec, threads: int) -> dict[str, int]:
        return plan_memory(asked, spec, replace(H200, num_threads=threads)).host_items

    made = host(config, OLMO_7B, 16)
    assert made["load_staging"] == made["tokenizer"] == 0
    assert host(files, OLMO_7B, 16)["load_staging"] == 256 * MIB
    assert host(files, OLMO_7B, 2)["load_staging"] == 32 * MIB
    assert 0.12 * GIB < host(files, OLMO_7B, 2)["tokenizer"] < 0.2 * GIB


def test_a_number_of_blocks_is_advised_to_its_last_digit() -> None:
    with pytest.raises(CapacityError) as error:
        plan_small(kv={"num_cpu_blocks": 10**9})
    found = re.fullmatch(r"kv\.num_cpu_blocks=(\d{7})", advised(error.value)[0])
    assert found is not None
    plan = plan_small(kv={"num_cpu_blocks": int(found[1])})
    assert plan.host_limit_bytes - plan.host_total_bytes < 2**16


def test_a_length_is_chosen_with_which_swap_space_is_enough() -> None:
    config = configuration(OLMO_7B, memory_gib=14.987, max_num_seqs=1, kv={"swap_space": 1})
    engine = replace(config.engine, gpu_memory_utilization=0.99, max_model_len=4096)
    planner = PlannerConfig(auto_fields=["max_model_len"])
    plan = plan_memory(replace(config, engine=engine, planner=planner), OLMO_7B, H200)
    assert 16 <= plan.max_model_len < 2048
    assert plan.holds_one
