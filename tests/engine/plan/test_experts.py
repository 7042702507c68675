"""Banks of experts: slots by what the budget leaves, expected hits, and what steps take."""

import os
import random
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.asked.config import EngineConfig, EngineSettings, GPUConfig, ModelConfig, PlannerConfig
from engine.asked.offload import (
    ExpertOffloadConfig,
    OffloadConfig,
    PrefetchOffloadConfig,
    UVAOffloadConfig,
)
from engine.errors import CapacityError, ConfigError
from engine.model.formats import FORMATS, ParamSpec, TensorFormats, TensorSpec
from engine.model.lossless import LOSSLESS
from engine.model.routing import WINDOW_TOKENS, ExpertSizes, RoutingTrace, write_trace
from engine.model.spec import W2, W13, ModelSpec
from engine.plan.experts import BankLayout, ExpertPlan, bank_bytes, expected_reuse
from engine.plan.memory import MemoryPlan
from engine.plan.planner import plan_memory
from engine.plan.rates import Rates
from engine.plan.times import shape_of, step_s
from engine.plan.units import CACHED, UVA
from engine.run.routing import synthetic_ids
from kernels.sizes import expert_cache_bytes
from tests.engine.specs import GIB, H200
from tests.slow import slow

A3B = ModelSpec(
    model_type="qwen3_moe",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    max_position_embeddings=40960,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
)
EXPERT_BYTES = 3 * 2048 * 768 * 2


def asked(
    gib: float = 24.0,
    *,
    length: int | None = 4096,
    spec: ModelSpec = A3B,
    choose: bool = False,
    load_format: str = "dummy",
    **offload: Any,
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(name="a3b", load_format=load_format, spec=spec, path="/nowhere"),
        gpu=GPUConfig(memory_gib=gib),
        offload=OffloadConfig(**offload),
        engine=EngineSettings(max_model_len=length, weight_format="checkpoint"),
        planner=PlannerConfig(choose=choose),
    )


def planned(gib: float = 24.0, **settings: Any) -> MemoryPlan:
    return plan_memory(asked(gib, **settings), settings.get("spec", A3B), H200)


def experts_of(plan: MemoryPlan) -> ExpertPlan:
    assert plan.experts is not None
    return plan.experts


@pytest.mark.thorough
@pytest.mark.parametrize("length", [4096, 40960])
@pytest.mark.parametrize("gib", [12, 16, 24, 48])
def test_banks_get_what_is_left_beside_one_sequence(gib: float, length: int) -> None:
    plan = planned(gib, length=length, offload_backend="experts")
    experts = experts_of(plan)
    assert set(plan.placements.values()) == {CACHED, *plan.placements.values()}
    cached = {name for name, place in plan.placements.items() if place is CACHED}
    assert cached == {t.name for t in A3B.tensors() if t.num_experts}
    assert plan.holds_one
    assert plan.gpu_total_bytes <= plan.gpu_budget_bytes
    least, most = min(experts.slots), max(experts.slots)
    assert most - least <= 1
    assert len(experts.slots) == 48
    # Not one slot more has room.
    spare = plan.gpu_budget_bytes - plan.gpu_total_bytes
    spare += plan.gpu_items["kv_cache"] - plan.kv.room(plan.kv.blocks(length)[0])
    assert spare < EXPERT_BYTES + 4096 or least == 128
    per_slot = (sum(experts.slots) + 1) * EXPERT_BYTES
    assert plan.gpu_items["expert_banks"] <= per_slot


@pytest.mark.thorough
def test_four_bits_and_52000_tokens_fit_24_gib() -> None:
    """Steps of 1024 tokens restore a few experts at a time, so that all weights stay resident."""
    quantization = {
        "method": "awq",
        "schemes": [{"layout": "awq", "bits": 4, "group": 128}],
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
    }
    changes = {"max_position_embeddings": 262144, "dtype": "float16"}
    spec = replace(A3B, quantization=quantization, **changes)
    config = asked(24.0, length=52_000, spec=spec)
    config = replace(
        config, engine=replace(config.engine, max_num_seqs=1, max_num_batched_tokens=1024)
    )
    plan = plan_memory(config, spec, H200)
    assert plan.holds_one
    assert not plan.offloaded_layers
    assert plan.kv.host_blocks == (0,)
    assert plan.gpu_items["restore"] == 21 * 2048 * 768 * 2  # experts of the second product
    assert plan.gpu_total_bytes <= plan.gpu_budget_bytes <= 21.6 * GIB


def test_slots_that_are_set_leave_the_rest_to_kv() -> None:
    few, many = (
        planned(offload_backend="experts", experts=ExpertOffloadConfig(expert_slots=count))
        for count in (8, 30)
    )
    assert set(experts_of(few).slots) == {8}
    freed = few.gpu_items["kv_cache"] - many.gpu_items["kv_cache"]
    assert freed == pytest.approx(22 * 48 * EXPERT_BYTES, rel=0.01)


def test_all_experts_have_slots_where_there_is_room() -> None:
    plan = planned(100, offload_backend="experts")
    experts = experts_of(plan)
    assert set(experts.slots) == {128}
    assert experts.mean_hit_share == 1
    assert experts.bytes_per_step() == 0


def test_a_length_that_is_not_set_is_cut_before_the_banks() -> None:
    spec = replace(A3B, max_position_embeddings=262144)
    plan = planned(spec=spec, length=None, offload_backend="experts")
    assert plan.max_model_len == 8192
    assert min(experts_of(plan).slots) > 30


def test_layers_differ_in_having_experts() -> None:
    spec = replace(A3B, mlp_only_layers=[0, 47], decoder_sparse_step=1)
    experts = experts_of(planned(spec=spec, offload_backend="experts"))
    assert [layer.index for layer in experts.layers] == list(range(1, 47))
    assert len(experts.slots) == 46
    chosen = planned(spec=spec, choose=True, load_format="auto")
    assert "experts cached" in (chosen.choice or {})["chosen"]


def test_a_bank_has_the_arrays_of_experts_and_what_belongs_to_none() -> None:
    w13 = TensorSpec(f"model.layers.0.{W13}", (ParamSpec("x", (4 * 64, 128)),), 4)
    w2 = TensorSpec(f"model.layers.0.{W2}", (ParamSpec("y", (4 * 128, 64)),), 4)
    formats = TensorFormats(FORMATS["bfloat16"], {w13.name: LOSSLESS})
    layout = BankLayout.of((w13, w2), formats, 4, 3)
    names = [(array.tensor.name[-10:-7], array.place.name) for array in layout.arrays]
    assert [name for _, name in names] == ["bytes", "codes", "first", "offsets", "table", ""]
    for array in layout.arrays:
        rows = array.source.shape[0]
        assert array.place.shape[0] == (rows if array.is_whole else rows * 3 // 4)
        assert array.place.offset % 256 == 0
    assert [array.place.name for array in layout.arrays if array.is_whole] == ["table"]
    state = -(-expert_cache_bytes(4, 3) // 256) * 256
    assert bank_bytes((w13, w2), formats, 4, 3) == layout.num_bytes + state
    with pytest.raises(ConfigError, match=r"expected equal parts for each of 5 experts, got 16 "):
        BankLayout.of((w13,), formats, 5, 3)


def expected(reuse: float | None, num_experts: int = 128, top_k: int = 8) -> ExpertPlan:
    return ExpertPlan(
        num_experts=num_experts,
        top_k=top_k,
        layers=(),
        bank_bytes=0,
        reuse=reuse,
        routing="",
    )


def picked_by(
    recent: deque[set[int]], reuse: float | None, sizes: tuple[int, int], rng
) -> set[int]:
    """Experts of a sequence's next token, which becomes the newest of its recent ones."""
    (num_experts, top_k), old = sizes, set().union(*recent)
    picked: set[int] = set()
    while len(picked) < top_k:
        others = set(range(num_experts)) - picked
        pool = others
        if reuse is not None and old:
            repeats, fresh = old - picked, others - old
            pool = repeats if (rng.random() < reuse and repeats) or not fresh else fresh
        picked.add(rng.choice(sorted(pool)))
    recent.append(picked)
    return picked


def simulated_hits(
    reuse: float | None, num_slots: int, sizes: tuple[int, int], num_sequences: int
) -> float:
    """Hits of a bank, least recently used first out, over picks that repeat recent ones."""
    rng = random.Random(5)
    recent = [deque[set[int]](maxlen=WINDOW_TOKENS) for _ in range(num_sequences)]
    used: dict[int, int] = {}
    hits = picks = 0
    for step in range(3000 // num_sequences):
        picked = set().union(*(picked_by(each, reuse, sizes, rng) for each in recent))
        if step >= 300 // num_sequences:
            hits, picks = hits + len(picked & set(used)), picks + len(picked)
        used |= dict.fromkeys(picked, step)
        newest = sorted(used, key=lambda expert: (used[expert], rng.random()))[-num_slots:]
        used = {expert: used[expert] for expert in newest}
    return hits / picks


@pytest.mark.thorough_but("None-8-16-4", "0.9-40-64-6")
@pytest.mark.parametrize(
    ("reuse", "num_slots", "num_experts", "top_k", "num_sequences"),
    [
        slow(None, 42, 128, 8, 1),
        (None, 8, 16, 4, 1),
        slow(0.8, 42, 128, 8, 1),
        slow(0.8, 90, 128, 8, 1),
        (0.5, 80, 128, 8, 1),
        (0.9, 40, 64, 6, 1),
        slow(0.8, 42, 128, 8, 4),
        (0.8, 42, 128, 8, 16),
        slow(0.5, 20, 64, 4, 3),
        (0.8, 95, 128, 8, 16),
        (0.05, 31, 32, 4, 1),  # nearly all are recent, and picks beside them run out
    ],
)
def test_hits_are_those_of_a_simulated_bank(
    reuse: float | None, num_slots: int, num_experts: int, top_k: int, num_sequences: int
) -> None:
    plan = expected(reuse, num_experts, top_k)
    found = simulated_hits(reuse, num_slots, (num_experts, top_k), num_sequences)
    assert plan.hit_share(num_slots, num_sequences) == pytest.approx(found, abs=0.05)


def test_hits_rise_with_slots_and_reuse_and_end_at_all() -> None:
    for reuse in (None, 0.0, 0.5, 0.8, 1.0):
        plan = expected(reuse)
        shares = [plan.hit_share(slots, sequences) for slots in range(1, 129) for sequences in (1,)]
        assert shares == sorted(shares)
        assert shares[-1] == 1
        if reuse != 0:  # then the experts of others are all that is hit
            assert plan.hit_share(40, 16) <= plan.hit_share(40, 1) + 1e-9
    for num_experts, top_k in ((128, 8), (64, 8), (32, 4), (8, 2)):
        plans = [expected(tenths / 10, num_experts, top_k) for tenths in range(11)]
        shares = [plan.hit_share(num_experts // 2) for plan in plans]
        assert shares == pytest.approx(sorted(shares))


def test_distinct_experts_of_a_step() -> None:
    plan = expected(None)
    assert plan.distinct(1) == pytest.approx(8)
    assert plan.distinct(16) == pytest.approx(128 * (1 - (15 / 16) ** 16))
    assert plan.missed(42, 1) == pytest.approx(8 * (1 - 42 / 128))
    assert expected(None, 8, 8).distinct(3) == 8


def test_a_step_takes_the_link_s_time_for_what_is_missed() -> None:
    """Of a bank, of experts in place, and of layers that are copied whole."""
    plans = {
        "cached": planned(offload_backend="experts"),
        "in place": planned(
            offload_backend="uva",
            uva=UVAOffloadConfig(cpu_offload_gb=54, cpu_offload_params=["experts"]),
        ),
        "copied": planned(
            offload_backend="prefetch",
            prefetch=PrefetchOffloadConfig(offload_group_size=4, offload_num_in_group=3),
        ),
    }
    times = {name: (plan.predicted or {})["decode_step_ms"] for name, plan in plans.items()}
    rate = (plans["cached"].predicted or {})["rates"]["in_place_gb_s"] * 1e6
    experts = experts_of(plans["cached"])
    link_ms = experts.bytes_per_step() / rate
    assert link_ms < times["cached"] < 1.3 * link_ms
    everywhere = experts_of(plans["in place"])
    assert everywhere.bytes_per_step() == pytest.approx(48 * 8 * EXPERT_BYTES)
    assert set(plans["in place"].placed_bytes()) >= {"uva", "cached"}
    assert plans["in place"].moved_per_step() == (0, 0)  # experts stand apart
    assert everywhere.bytes_per_step() / rate < times["in place"]
    assert times["cached"] < times["in place"] < times["copied"] / 5
    assert experts_of(plans["copied"]).bytes_per_step() == 0
    assert plans["copied"].bytes_per_step() > 30 * GIB


def test_a_resident_step_reads_the_routed_experts_alone() -> None:
    plan = planned(100)
    shape = shape_of(plan, A3B, rates_of(plan))
    one, many = (step_s(shape, decodes=count, context=256) for count in (1, 64))
    routed_s = 48 * 8 * EXPERT_BYTES / (shape.rates.hbm_gb_s * 1e9)
    every_s = 48 * 128 * EXPERT_BYTES / (shape.rates.hbm_gb_s * 1e9)
    assert routed_s < one < every_s
    assert many > every_s


def rates_of(plan: MemoryPlan) -> Rates:
    return Rates(**(plan.predicted or {})["rates"])


def test_auto_takes_banks_and_lists_the_other_ways() -> None:
    plan = planned(choose=True, load_format="auto")
    choice = plan.choice or {}
    assert "experts cached, " in choice["chosen"]
    labels = [row["label"] for row in choice["candidates"]]
    assert any("experts of " in label and "read in place" in label for label in labels)
    assert any("copied ahead" in label for label in labels)
    assert planned(100, choose=True).choice == {
        "objective": "latency",
        "chosen": "everything in GPU memory",
        "why": "it fits the GPU budget",
        "candidates": [],
    }


@pytest.mark.parametrize("first", [False, True])
def test_the_least_uva_that_is_printed_fits(*, first: bool) -> None:
    """In the place of banks, and with experts first where they were."""
    uva = UVAOffloadConfig(cpu_offload_gb=30, experts_first=True)
    banks = {"experts": ExpertOffloadConfig(expert_slots=120)}
    leave = "Leave out other offload settings beside offload=auto"
    with pytest.raises(CapacityError, match=leave) as error:
        planned(12, **({"uva": uva} if first else banks))
    ways: Any = (error.value.plan or {})["ways"]
    [way] = [each for each in ways if "cpu_offload_gb" in each["settings"][-1]]
    *others, size = way["settings"]
    assert others == ([] if first else ["offload=uva"])
    again = UVAOffloadConfig(cpu_offload_gb=float(size.partition("=")[2]), experts_first=first)
    assert planned(12, uva=again).host_total_bytes == way["host_total_bytes"]
    free = [each["settings"] for each in ways if "expert_slots" in each["settings"][0]]
    assert free == ([] if first else [["offload.experts.expert_slots=null", "offload=experts"]])


def test_real_weights_are_assumed_to_repeat_experts() -> None:
    real, dummy = (
        experts_of(planned(offload_backend="experts", load_format=name))
        for name in ("auto", "dummy")
    )
    assert (real.reuse, dummy.reuse) == (0.5, None)
    assert "assumed" in real.routing
    real_share, dummy_share = real.mean_hit_share, dummy.mean_hit_share
    assert real_share is not None
    assert dummy_share is not None
    assert dummy_share == pytest.approx(sum(dummy.slots) / 48 / 128)
    assert real_share > dummy_share


def test_a_stated_reuse_counts() -> None:
    found = {}
    for routing in ("synthetic:0.8", "synthetic:0.2", "dummy"):
        config = asked(offload_backend="experts")
        config = replace(config, model=replace(config.model, routing=routing))
        plan = plan_memory(config, A3B, H200)
        found[routing] = (plan.predicted or {})["decode_step_ms"]
        assert experts_of(plan).routing.startswith(routing)
    assert found["synthetic:0.8"] < found["dummy"]
    assert found["synthetic:0.8"] < found["synthetic:0.2"]


def test_the_reuse_of_a_trace_counts(tmp_path: Path) -> None:
    spec, sizes = replace(A3B, num_hidden_layers=2), ExpertSizes((0, 1), 128, 8)
    file = tmp_path / "a b [c].parquet"
    cached = asked(spec=spec, offload_backend="experts")
    model = replace(cached.model, routing=f"trace:{file}")
    found, shares = [], []
    for num_tokens, reuse in ((60, 0.9), (61, 0.3), (8, 0.3)):
        write_trace(file, RoutingTrace("a", sizes, synthetic_ids(sizes, reuse, 1, num_tokens)))
        os.utime(file, ns=(num_tokens, num_tokens))
        found.append(expected_reuse(model)[0])
        plan = plan_memory(replace(cached, model=model), spec, H200)
        shares.append(experts_of(plan).hit_share(40))
    assert found[:2] == pytest.approx([0.9, 0.3], abs=0.04)
    assert found[2] is None  # too few rows to tell, yet they have a replay
    assert shares[0] > shares[1] + 0.2
    assert shares[2] > shares[1]  # its eight rows come again and again
    with pytest.raises(ConfigError, match="expected a trace with 7 experts a token, as the model"):
        plan_memory(replace(cached, model=model), replace(spec, num_experts_per_tok=7), H200)
    file.unlink()
    with pytest.raises(ConfigError, match=r"expected a trace, found no file at .*a b \[c\]"):
        expected_reuse(model)


def test_a_table_that_only_repeats_has_the_same_experts_for_all_sequences() -> None:
    ids = np.sort(synthetic_ids(ExpertSizes((0,), 128, 8), 1.0, 0, 50))
    assert (ids == ids[0]).all()
    config = asked(offload_backend="experts")
    config = replace(config, model=replace(config.model, routing="synthetic:1"))
    plan = plan_memory(config, A3B, H200)
    experts = experts_of(plan)
    assert experts.distinct(16) == experts.distinct(2048) == 8
    assert experts.hit_share(8, 16) == experts.hit_share(8) == pytest.approx(1)
    assert experts.missed(41, 2048) == pytest.approx(0, abs=1e-6)
    shape = shape_of(plan, A3B, rates_of(plan))
    one, many = (step_s(shape, decodes=count, context=256) for count in (1, 16))
    assert many < 1.3 * one


def test_experts_first_and_both_orders_in_the_record() -> None:
    first = planned(
        offload_backend="uva", uva=UVAOffloadConfig(cpu_offload_gb=40, experts_first=True)
    )
    moved = [name for name, place in first.placements.items() if place is UVA]
    assert all("experts" in name for name in moved)
    layers = planned(offload_backend="uva", uva=UVAOffloadConfig(cpu_offload_gb=40))
    assert any("self_attn" in name for name, place in layers.placements.items() if place is UVA)
    orders = [(plan.predicted or {})["orders"] for plan in (layers, first)]
    assert orders[0] == orders[1]
    for name, plan in (("layers", layers), ("experts_first", first)):
        predicted = plan.predicted or {}
        assert orders[0][name]["decode_step_ms"] == pytest.approx(predicted["decode_step_ms"])
    assert orders[0]["experts_first"]["decode_step_ms"] < orders[0]["layers"]["decode_step_ms"]
    assert "orders" not in (planned(offload_backend="experts").predicted or {})


@pytest.mark.thorough_but("experts", "mlp.experts")
@pytest.mark.parametrize(
    ("selector", "taken"),
    [
        ("experts", {W13, W2}),
        ("w13_weight", {W13}),
        ("experts.w2_weight", {W2}),
        ("w13_weight_scale", {W13}),
        ("w2_weight_packed", {W2}),
        ("mlp.experts", {W13, W2}),
    ],
)
def test_published_names_of_experts_select_them(selector: str, taken: set[str]) -> None:
    plan = planned(
        100,
        offload_backend="uva",
        uva=UVAOffloadConfig(cpu_offload_gb=60, cpu_offload_params=[selector]),
    )
    moved = {name.split(".", 3)[3] for name, place in plan.placements.items() if place is UVA}
    assert moved == taken


def test_the_record_says_slots_hits_and_bytes() -> None:
    plan = planned(offload_backend="experts")
    found = plan.to_dict()["experts"]
    assert found["num_experts"] == 128
    assert found["top_k"] == 8
    assert found["slots"] == list(experts_of(plan).slots)
    assert set(found["expert_bytes"]) == {EXPERT_BYTES}
    share = found["hit_share"]
    assert found["bytes_per_step"] == pytest.approx(48 * 8 * (1 - share) * EXPERT_BYTES)
    assert "experts" not in plan_memory(asked_dense(), DENSE, H200).to_dict()


DENSE = ModelSpec(
    model_type="llama",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    max_position_embeddings=512,
)


def asked_dense() -> EngineConfig:
    return asked(spec=DENSE, length=256)
