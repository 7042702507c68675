"""From how many tokens on uva weights are staged, by the rates at which their formats are read."""

from dataclasses import replace
from typing import Any

import pytest

from engine.asked.config import PlannerConfig
from engine.model.spec import ModelSpec
from engine.plan.cards import DeviceFacts
from engine.plan.memory import MemoryPlan
from engine.plan.planner import plan_memory
from engine.plan.rates import STAGE_GAIN, Rates
from engine.plan.times import decode_step_s, shape_of
from engine.plan.weight_times import IN_PLACE_SHARES, RESTORING_WORK, Packed
from tests.engine.plan.test_choose import conf_spec
from tests.engine.specs import CPU, GIB, H200, configuration, uva

PROBE = {"h2d_gb_s": 55.0, "in_place_gb_s": 50.6, "hbm_copy_gb_s": 4130.0}
"""What an H200 gave beside the steps that IN_PLACE_SHARES are from."""
AWQ = conf_spec("llama2_7b_awq")
NEVER = 2**20
ALL = uva(1024, "layers")


def scheme(layout: str, bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"layout": layout, "bits": bits, "group": group, **more}


def in_schemes(method: str, *schemes: dict[str, Any], ignore: tuple[str, ...] = ()) -> ModelSpec:
    """Return the shape of Llama 2 7B in other formats; `ignore` stays plain."""
    found = {"method": method, "schemes": list(schemes), "ignore": ["lm_head", *ignore]}
    return replace(AWQ, quantization=found)


Q4_K, Q6_K = scheme("gguf-q4_k", 4, 256), scheme("gguf-q6_k", 6, 256)
INT8 = scheme("int-quantized", 8, 0, symmetric=True)
FP8 = scheme("float-quantized", 8, 0, rows=1, symmetric=True)
INT4 = scheme("awq", 4, 128)
MLP, ATTENTION = r"re:.*\.mlp\..*", r"re:.*\.self_attn\..*"
SPECS: dict[str, tuple[ModelSpec, bool]] = {
    "16 bits": (conf_spec("llama2_7b"), False),
    "int4": (AWQ, True),
    "Q4_K": (in_schemes("gguf", Q4_K), True),
    "Q4_K and Q6_K": (in_schemes("gguf", {**Q6_K, "targets": [r"re:.*down_proj"]}, Q4_K), True),
    "int8": (in_schemes("compressed-tensors", INT8), False),
    "fp8": (in_schemes("compressed-tensors", FP8), False),
    "int4, attention plain": (in_schemes("awq", INT4, ignore=(ATTENTION,)), True),
    "int4, mlp plain": (in_schemes("awq", INT4, ignore=(MLP,)), False),
}


def planned(
    spec: ModelSpec,
    facts: DeviceFacts = H200,
    probe: dict[str, float] | None = PROBE,
    **settings: Any,
) -> MemoryPlan:
    asked: dict[str, Any] = {"memory_gib": 16, "max_model_len": 4096, "offload": ALL} | settings
    config = replace(configuration(spec, **asked), measured_rates=probe)
    return plan_memory(config, spec, facts)


def step_s(plan: MemoryPlan, spec: ModelSpec, batch: int = 1) -> float:
    assert plan.predicted is not None
    rates = Rates(**plan.predicted["rates"])
    return decode_step_s(shape_of(plan, spec, rates), batch, 100)


def without(record: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: each for name, each in record.items() if name not in {"predicted", *names}}


@pytest.mark.parametrize("probe", [PROBE, None], ids=["probe", "sheet"])
@pytest.mark.parametrize("name", SPECS)
def test_formats_that_are_read_slowly_in_place_are_staged(
    name: str, probe: dict[str, float] | None
) -> None:
    """In every step, where steps are predicted to be STAGE_GAIN shorter; all else stays equal."""
    spec, is_slow = SPECS[name]
    plan, in_place = (planned(spec, probe=probe, **s) for s in ({}, {"uva_stage_tokens": 65}))
    assert plan.stage_tokens == plan.to_dict()["stage_tokens"] == (1 if is_slow else 65)
    assert plan.always_staged is is_slow
    assert all(plan.is_captured(size) for size in plan.graph_sizes if size <= 64)
    assert (plan.gpu_items, plan.host_items) == (in_place.gpu_items, in_place.host_items)
    assert [slots.wraps for slots in plan.slots] == [is_slow]
    always = planned(spec, probe=probe, uva_stage_tokens=1)
    gain = step_s(in_place, spec) / step_s(always, spec)
    assert (gain >= STAGE_GAIN) is is_slow
    if is_slow:
        assert plan.moved_per_step()[1] == 0
        assert plan.to_dict() == always.to_dict()
    else:
        assert plan.to_dict() == in_place.to_dict()


def test_lossless_codes_are_read_in_place() -> None:
    spec = replace(conf_spec("llama2_7b"), dtype="bfloat16")
    plan = planned(spec, weight_format="lossless")
    assert plan.formats.others
    assert plan.stage_tokens == 65


@pytest.mark.parametrize(("batch", "measured_ms"), [(1, 86.6), (16, 90.3)])
def test_steps_that_read_int4_in_place_take_as_long_as_measured(
    batch: int, measured_ms: float
) -> None:
    plan = planned(AWQ, uva_stage_tokens=NEVER)
    assert plan.moved_per_step(batch) == (0, pytest.approx(3.39e9, rel=1e-3))
    assert step_s(plan, AWQ, batch) * 1e3 == pytest.approx(measured_ms, rel=0.02)
    staged = planned(AWQ)
    # Measured: 61.4 ms at either batch.
    assert step_s(staged, AWQ, batch) * 1e3 == pytest.approx(61.4, rel=0.03)


@pytest.mark.parametrize("tokens", [1, 3, 40, 65, 300])
def test_a_threshold_that_is_set_is_taken(tokens: int) -> None:
    plan = planned(AWQ, uva_stage_tokens=tokens)
    assert plan.stage_tokens == tokens
    sizes = [size for size in plan.graph_sizes if plan.is_captured(size)]
    assert sizes == [size for size in plan.graph_sizes if tokens == 1 or size < tokens]


@pytest.mark.parametrize(
    ("probe", "expected"),
    [
        ({"in_place_gb_s": 55.0}, 1),
        ({"in_place_gb_s": 65.0}, 65),  # 65 x 0.78 is 0.92 of what copies carry
        ({"h2d_gb_s": 42.0}, 65),
        ({"copy_overhead_s": 0.001}, 65),  # a layer takes 1.9 ms
        ({"copy_overhead_s": 0.0001}, 1),
    ],
    ids=str,
)
def test_the_choice_follows_the_rates(probe: dict[str, float], expected: int) -> None:
    assert planned(AWQ, probe=PROBE | probe).stage_tokens == expected


def test_layers_that_take_little_are_not_worth_a_copy() -> None:
    small = replace(AWQ, hidden_size=256, intermediate_size=512, head_dim=16, vocab_size=1024)
    plan = planned(small, memory_gib=4)
    assert plan.formats.others
    assert plan.stage_tokens == 65


def test_experts_are_not_staged_for_their_format() -> None:
    spec = conf_spec("qwen3_coder_30b_a3b_awq")
    assert planned(spec, memory_gib=24, offload=uva(1024, "experts")).stage_tokens == 65
    assert planned(spec, memory_gib=80, offload=uva(1024, "self_attn")).stage_tokens == 1


def test_a_cpu_copies_as_it_computes() -> None:
    assert planned(AWQ, CPU, None, memory_gib=16).stage_tokens == 65


def test_slots_that_leave_no_room_are_left_out_and_the_plan_says_so() -> None:
    """Where steps are too small for anything but the format to be a reason for slots."""
    few: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "max_model_len": 2048}
    wide, in_place = planned(AWQ, **few), planned(AWQ, **few, uva_stage_tokens=NEVER)
    assert (wide.stage_tokens, in_place.stage_tokens) == (1, None)
    slots = wide.gpu_items["staging_slots"]
    assert slots > 0 == in_place.gpu_items["staging_slots"]
    blocks = in_place.kv.blocks(2048)[0]
    least = in_place.gpu_total_bytes - in_place.gpu_items["kv_cache"]
    least += blocks * in_place.block_bytes
    for room, is_staged in ((slots // 2, False), (2 * slots, True)):
        share = (least + room) / GIB
        plan = planned(AWQ, **few, memory_gib=share, gpu_memory_utilization=1.0)
        assert (plan.stage_tokens == 1) is is_staged
        assert plan.holds_one
        notes = [note for note in plan.notes if "leave no room" in note]
        assert len(notes) == (not is_staged)
        if notes:
            assert notes[0].startswith("fallback: uva weights are read in place")
            assert f"{slots / GIB:.2f} GiB" in notes[0]
            assert plan.num_slots == 0


def test_auto_lists_no_layers_in_place_that_every_step_stages() -> None:
    found, probe = {}, PROBE | {"in_place_gb_s": 56.0}
    for name, memory_gib in (("llama2_7b", 12), ("llama2_7b_awq", 6)):
        spec = conf_spec(name)
        config = replace(
            configuration(spec, memory_gib=memory_gib),
            planner=PlannerConfig(choose=True),
            measured_rates=probe,
        )
        choice = plan_memory(config, spec, H200).choice
        assert choice is not None
        found[name] = [row["label"].split("; ")[-1] for row in choice["candidates"]]
    assert any("read in place" in label for label in found["llama2_7b"])
    assert all("copied ahead" in label for label in found["llama2_7b_awq"])


def test_shares_are_of_kinds_that_are_known() -> None:
    assert IN_PLACE_SHARES.keys() <= RESTORING_WORK.keys()
    assert all(0 < more <= few <= 1 for few, more in IN_PLACE_SHARES.values())


def test_bytes_in_place_are_counted_by_kind() -> None:
    spec, plan = AWQ, planned(AWQ)
    tensors = [t for t in spec.layer_tensors(0) if t.name.endswith("down_proj.weight")]
    packed = Packed.among(tensors, plan.formats)
    assert packed.stored == plan.formats.num_bytes(tensors[0])
    few, more = IN_PLACE_SHARES["uint4"]
    assert packed.in_place(1) == packed.in_place(8) == pytest.approx(packed.stored / few, abs=1)
    assert packed.in_place(9) == packed.in_place(64) == pytest.approx(packed.stored / more, abs=1)
    assert packed.in_place(65) == packed.stored
