"""Choices: what fits is left alone; else the embedding first, then as few bytes as are needed."""

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from catalogue.files import CONF
from engine.asked.config import EngineConfig, GPUConfig, PlannerConfig
from engine.asked.offload import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from engine.errors import CapacityError, ConfigError
from engine.model.spec import ModelSpec
from engine.plan.cards import DeviceFacts
from engine.plan.memory import MemoryPlan
from engine.plan.planner import plan_memory
from engine.plan.policy import spread_layers
from engine.plan.units import ON_DEMAND, PREFETCH, RESIDENT, UVA
from tests.engine.specs import (
    CPU,
    GIB,
    H200,
    NO_PIN,
    NO_UVA,
    OLMO_7B,
    advised,
    check_plan,
    configuration,
    model_specs,
    prefetch,
    small_spec,
    uva,
)
from tests.slow import slow

EMBED = "model.embed_tokens.weight"


def conf_spec(name: str) -> ModelSpec:
    """Sizes of a model of conf/."""
    return ModelSpec(**yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text())["spec"])


def ask(
    spec: ModelSpec,
    memory_gib: float,
    *,
    objective: str = "latency",
    kv_tokens: int | None = None,
    auto_fields: tuple[str, ...] = (),
    **changes: Any,
) -> EngineConfig:
    """Return a configuration in which every placement is chosen."""
    config = configuration(spec, memory_gib=memory_gib, **changes)
    planner = PlannerConfig(
        choose=True, objective=objective, kv_tokens=kv_tokens, auto_fields=list(auto_fields)
    )
    return replace(config, planner=planner)


def choose(
    spec: ModelSpec, memory_gib: float, facts: DeviceFacts = H200, **changes: Any
) -> MemoryPlan:
    plan = plan_memory(ask(spec, memory_gib, **changes), spec, facts)
    check_plan(plan, spec)
    assert plan.choice is not None
    assert plan.predicted is not None
    return plan


def step_ms(plan: MemoryPlan) -> float:
    assert plan.predicted is not None
    return float(plan.predicted["decode_step_ms"])


OLMO = {"gpu_memory_utilization": 0.85, "max_model_len": 4096}


def test_a_model_that_fits_stays_on_the_gpu() -> None:
    plan = choose(conf_spec("smollm2_135m"), 10)
    assert plan.offloaded_layers == ()
    assert plan.outer_offloaded.num_bytes == 0
    assert plan.choice == {
        "objective": "latency",
        "chosen": "everything in GPU memory",
        "why": "it fits the GPU budget",
        "candidates": [],
    }


def test_olmo_7b_on_16_gib_takes_less_of_the_link_than_uva_for_the_same_kv() -> None:
    offload = configuration(OLMO_7B, memory_gib=16, offload=uva(8), **OLMO)
    by_hand = plan_memory(offload, OLMO_7B, H200)
    assert 5.5 * GIB < by_hand.gpu_items["kv_cache"] < 7.2 * GIB
    plan = choose(OLMO_7B, 16, kv_tokens=by_hand.kv_tokens, **OLMO)
    assert plan.kv_tokens >= by_hand.kv_tokens
    assert plan.bytes_per_step() < by_hand.bytes_per_step()
    assert plan.placements[EMBED] is UVA
    assert step_ms(plan) < 0.95 * float((by_hand.predicted or {})["decode_step_ms"])


def test_the_freed_room_of_the_table_makes_a_step_shorter_in_the_same_bytes() -> None:
    facts = replace(H200, name="NVIDIA H200")
    probe = {"h2d_gb_s": 55.5, "in_place_gb_s": 51.0, "hbm_copy_gb_s": 4257.0}
    changes = OLMO | {"max_num_batched_tokens": 8192}
    config = configuration(OLMO_7B, memory_gib=16, offload=prefetch(8, 5, 1), **changes)
    groups = plan_memory(replace(config, measured_rates=probe), OLMO_7B, facts)
    asked = ask(OLMO_7B, 16, kv_tokens=groups.kv_tokens, **changes)
    plan = plan_memory(replace(asked, measured_rates=probe), OLMO_7B, facts)
    assert plan.gpu_total_bytes <= groups.gpu_budget_bytes
    assert plan.kv_tokens >= groups.kv_tokens
    assert step_ms(plan) < 0.88 * 155.5


@pytest.mark.thorough
def test_room_for_kv_that_is_asked_for() -> None:
    plan = choose(OLMO_7B, 16, kv_tokens=10_000, **OLMO)
    assert 10_000 <= plan.kv_tokens < 10_400
    assert plan.bytes_per_step() > choose(OLMO_7B, 16, **OLMO).bytes_per_step()
    assert choose(OLMO_7B, 20, kv_tokens=16_000, **OLMO).offloaded_layers
    with pytest.raises(ConfigError, match=r"planner\.kv_tokens: .*at most the 8192 tokens"):
        choose(OLMO_7B, 16, kv_tokens=10_000, max_num_seqs=2, **OLMO)
    with pytest.raises(CapacityError, match=r"of KV for planner\.kv_tokens=99999") as error:
        choose(OLMO_7B, 16, kv_tokens=99_999, **OLMO)
    [advice] = advised(error.value)
    assert advice.startswith("planner.kv_tokens=")
    less = int(advice.split("=")[1])
    assert choose(OLMO_7B, 16, kv_tokens=less, **OLMO).kv_tokens >= less
    with pytest.raises(ConfigError, match=r"expected planner\.choose=true"):
        PlannerConfig(kv_tokens=10)


def test_olmo_7b_for_one_sequence() -> None:
    plan = choose(OLMO_7B, 16, **OLMO)
    assert plan.placements[EMBED] is UVA
    assert plan.placements["lm_head.weight"] is RESIDENT
    assert 4096 <= plan.kv_tokens < 4096 + 400
    layers = [layer.index for layer in plan.offloaded_layers]
    gaps = [b - a for a, b in pairwise(layers)]
    assert layers[0] == 0
    assert max(gaps) - min(gaps) <= 1
    assert plan.bytes_per_step() < 3 * GIB
    assert plan.choice is not None
    rows = plan.choice["candidates"]
    assert rows[0]["label"] == plan.choice["chosen"]
    assert 1 < len(rows) <= 5
    assert rows == sorted(rows, key=lambda row: round(row["decode_step_ms"], 1))
    assert plan.to_dict()["choice"] == plan.choice


@pytest.mark.thorough
def test_candidates_that_lack_host_memory_are_not_among_those_that_fit() -> None:
    counts = []
    for size in (9, 200):
        facts = replace(H200, host_available_bytes=size * GIB)
        plan = choose(OLMO_7B, 16, facts, objective="throughput", **OLMO)
        assert plan.choice is not None
        (count,) = re.findall(r"of (\d+) placements that fit", plan.choice["why"])
        counts.append(int(count))
    assert counts == sorted(set(counts))


@pytest.mark.thorough
def test_a_candidates_figures_are_those_of_its_plan() -> None:
    for facts in (H200, replace(H200, **NO_UVA), replace(H200, **NO_PIN), CPU):
        plan = choose(OLMO_7B, 15, facts, dtype="bfloat16", max_model_len=2048)
        assert plan.choice is not None
        row = plan.choice["candidates"][0]
        assert row["decode_step_ms"] == step_ms(plan)
        assert row["kv_tokens"] == plan.kv_tokens
        offloaded = sum(layer.offloaded_bytes for layer in plan.layers)
        assert row["host_gib"] * GIB == offloaded + plan.outer_offloaded.num_bytes


@pytest.mark.thorough
def test_a_deep_queue_wants_room_for_kv() -> None:
    latency = choose(OLMO_7B, 16, **OLMO)
    queue = choose(OLMO_7B, 16, objective="throughput", **OLMO)
    assert queue.kv_tokens > 1.5 * latency.kv_tokens
    assert step_ms(queue) > step_ms(latency)
    rates = [(plan.predicted or {})["queue"]["output_tokens_s"] for plan in (latency, queue)]
    assert rates[1] > rates[0]


@pytest.mark.thorough
def test_a_queue_is_not_slower_than_uva_by_hand() -> None:
    spec = conf_spec("gemma3_4b")
    limits = {"max_model_len": 128, "gpu_memory_utilization": 0.9, "max_num_batched_tokens": 512}
    config = configuration(spec, memory_gib=4.346, offload=uva(5.8), **limits)
    by_hand = plan_memory(config, spec, H200)
    chosen = choose(spec, 4.346, objective="throughput", **limits)
    total_s = [(plan.predicted or {})["queue"]["total_s"] for plan in (by_hand, chosen)]
    assert total_s[1] < total_s[0]


@pytest.mark.thorough
def test_the_longest_sequence() -> None:
    spec = conf_spec("llama31_8b")
    with pytest.raises(CapacityError) as error:
        choose(spec, 16, max_model_len=131_072)
    advice = next(words for words in advised(error.value) if words.startswith("engine.max_model"))
    plan = choose(spec, 16, objective="context")
    assert plan.max_model_len >= int(advice.split("=")[1])
    assert 80_000 < plan.max_model_len <= plan.kv_tokens < plan.max_model_len + 16
    assert any(f"max_model_len={plan.max_model_len}" in note for note in plan.notes)
    assert choose(spec, 16, objective="context", max_model_len=3000).max_model_len == 3000


def test_llama2_7b_in_10_gib() -> None:
    plan = choose(conf_spec("llama2_7b"), 10, max_model_len=4096)
    assert plan.kv_tokens >= 4096
    assert plan.gpu_total_bytes <= 9 * GIB


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["olmo2_13b", slow("qwen3_14b")])
def test_over_20_gb_on_4_gb_run_with_nearly_all_off_or_are_refused_with_reasons(name: str) -> None:
    spec = conf_spec(name)
    assert spec.weight_bytes() > 20e9
    plan = choose(spec, 4, max_model_len=512, max_num_seqs=4)
    assert len(plan.offloaded_layers) >= 38
    assert plan.placements["lm_head.weight"] is UVA
    with pytest.raises(CapacityError) as error:
        choose(spec, 2, max_model_len=512, max_num_seqs=4)
    assert re.search(r" short \(needs .*, has -2\d\.\d\d GiB\)", str(error.value))
    least = float(advised(error.value)[-1].removeprefix("gpu.memory_gib="))
    assert least < 4
    choose(spec, least, max_model_len=512, max_num_seqs=4)
    with pytest.raises(CapacityError):
        choose(spec, least - 0.02, max_model_len=512, max_num_seqs=4)


def test_a_tied_table_stays_on_the_gpu() -> None:
    spec = conf_spec("llama32_3b")
    assert spec.tie_word_embeddings
    plan = choose(spec, 6, max_model_len=4096)
    assert plan.placements[EMBED] is RESIDENT
    assert plan.offloaded_layers


def test_machines_without_in_place_reads_or_pinning() -> None:
    no_uva = choose(OLMO_7B, 15, replace(H200, **NO_UVA), max_model_len=2048)
    assert no_uva.placements[EMBED] is RESIDENT
    assert {unit.residence for layer in no_uva.layers for unit in layer.units} == {PREFETCH}
    no_pin = choose(OLMO_7B, 15, replace(H200, **NO_PIN), max_model_len=2048)
    assert {unit.residence for layer in no_pin.layers for unit in layer.units} == {ON_DEMAND}
    assert not no_pin.use_graphs
    for plan in (no_uva, no_pin):
        assert any(note.startswith("fallback: ") for note in plan.notes)


@pytest.mark.thorough
def test_host_memory_bounds_the_choice() -> None:
    short = replace(H200, host_available_bytes=6 * GIB)
    assert choose(OLMO_7B, 16, short, **OLMO).host_total_bytes <= 5 * GIB
    with pytest.raises(CapacityError) as error:
        choose(OLMO_7B, 16, replace(H200, host_available_bytes=5 * GIB), **OLMO)
    assert re.search(r"It would fit with 3\.\d\d GiB of weights in host memory", str(error.value))
    assert "GiB are available for them" in str(error.value)


def test_refusals_advise_auto() -> None:
    config = configuration(OLMO_7B, memory_gib=16, **OLMO)
    with pytest.raises(CapacityError) as error:
        plan_memory(config, OLMO_7B, H200)
    assert advised(error.value)[0] == "offload=auto"
    assert any("offload.uva.cpu_offload_gb=3." in words for words in advised(error.value))


@settings(max_examples=10, deadline=None)
@given(
    spec=model_specs(),
    share=st.floats(0.05, 1.1),
    kind=st.sampled_from(["cpu", "cuda"]),
    gaps=st.sampled_from([{}, NO_UVA, NO_PIN]),
    objective=st.sampled_from(["latency", "throughput", "context"]),
)
def test_every_choice_fits_and_beats_what_is_set_by_hand(
    spec: ModelSpec, share: float, kind: str, gaps: dict[str, Any], objective: str
) -> None:
    weights = spec.weight_bytes() / GIB
    facts = replace(H200 if kind == "cuda" else CPU, host_available_bytes=2**50, **gaps)
    # Without pinned memory what is moved runs without graphs, whose memory a split by hand saves.
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "enforce_eager": gaps is NO_PIN}
    memory = weights * share + 1.2
    half = PrefetchOffloadConfig(offload_group_size=1)
    config = configuration(spec, memory_gib=memory, offload=OffloadConfig(prefetch=half), **limits)
    try:
        plan = choose(spec, memory, facts, objective=objective, **limits)
    except CapacityError:
        with pytest.raises(CapacityError):
            plan_memory(config, spec, facts)
        return
    if objective == "latency":
        try:
            by_hand = plan_memory(config, spec, facts)
        except CapacityError:
            return
        assert step_ms(plan) <= step_ms(by_hand) * 1.01


def test_layers_are_spread_from_the_first_on() -> None:
    assert spread_layers(8, 0) == []
    assert spread_layers(8, 3) == [0, 3, 6]
    assert spread_layers(8, 8) == list(range(8))
    for count in range(1, 33):
        assert len(spread_layers(32, count)) == count


# Settings.


@pytest.mark.parametrize(
    "offload",
    [uva(4), prefetch(4, 1), OffloadConfig(offload_backend="uva", uva=UVAOffloadConfig())],
)
def test_explicit_offloads_are_not_overridden(offload: OffloadConfig) -> None:
    with pytest.raises(ConfigError, match=r"planner\.choose .*not overridden"):
        replace(ask(OLMO_7B, 16), offload=offload)


def test_auto_fields_alone() -> None:
    planner = PlannerConfig(auto_fields=["cpu_offload_gb"])
    config = replace(configuration(OLMO_7B, memory_gib=16, offload=uva(8), **OLMO), planner=planner)
    plan = plan_memory(config, OLMO_7B, H200)
    [note] = [note for note in plan.notes if note.startswith("planner.auto_fields")]
    least = float(note.split("cpu_offload_gb=")[1].rstrip("."))
    assert 3 < least < 5
    assert plan.placed_bytes()["uva"] >= least * GIB
    with pytest.raises(CapacityError):
        plan_memory(
            configuration(OLMO_7B, memory_gib=16, offload=uva(least - 0.1), **OLMO), OLMO_7B, H200
        )
    fits = plan_memory(replace(config, gpu=GPUConfig(memory_gib=40)), OLMO_7B, H200)
    assert fits.placed_bytes()["uva"] == 0


def test_auto_fields_lower_length_and_sequences_to_what_fits() -> None:
    fields = ["max_model_len", "max_num_seqs"]
    config = configuration(OLMO_7B, memory_gib=18, max_num_seqs=32)
    plan = plan_memory(replace(config, planner=PlannerConfig(auto_fields=fields)), OLMO_7B, H200)
    assert plan.offloaded_layers == ()
    assert plan.max_model_len <= plan.kv_tokens
    more = replace(config.engine, max_model_len=plan.max_model_len)
    more = replace(more, max_num_seqs=2 * plan.max_num_seqs)
    if plan.max_num_seqs < 32:
        with pytest.raises(CapacityError):
            plan_memory(replace(config, engine=more), OLMO_7B, H200)
    longer = replace(config.engine, max_model_len=plan.max_model_len + 16, max_num_seqs=1)
    if plan.max_model_len + 16 <= 4096:
        with pytest.raises(CapacityError):
            plan_memory(replace(config, engine=longer), OLMO_7B, H200)
    roomy = replace(config, gpu=GPUConfig(memory_gib=60), planner=PlannerConfig(auto_fields=fields))
    found = plan_memory(roomy, OLMO_7B, H200)
    assert found.max_model_len == 4096
    assert found.max_num_seqs == 32  # all of them: no field is lowered where it fits


def test_auto_fields_that_contradict_are_refused() -> None:
    with pytest.raises(ConfigError, match="chooses every placement"):
        ask(OLMO_7B, 16, auto_fields=("cpu_offload_gb",))
    planner = PlannerConfig(auto_fields=["cpu_offload_gb"])
    with pytest.raises(ConfigError, match="expected the uva backend"):
        replace(configuration(OLMO_7B, offload=prefetch(4)), planner=planner)


def test_auto_fields_that_cannot_fit_are_refused_with_figures() -> None:
    planner = PlannerConfig(auto_fields=["max_model_len"])
    config = replace(configuration(OLMO_7B, memory_gib=10), planner=planner)
    with pytest.raises(CapacityError, match="does not fit H200"):
        plan_memory(config, OLMO_7B, H200)


def test_a_reference_ignores_what_is_chosen() -> None:
    spec = small_spec()
    config = ask(spec, 1.0, max_model_len=64, auto_fields=("max_num_seqs",))
    plan = plan_memory(config, spec, CPU, reference=True)
    assert plan.choice is None
    assert len(plan.offloaded_layers) == 8


def test_an_offload_that_is_not_needed_states_its_cost() -> None:
    config = configuration(OLMO_7B, memory_gib=40, offload=prefetch(8, 5, 2))
    plan = plan_memory(config, OLMO_7B, replace(H200, name="NVIDIA H200"))
    [note] = [note for note in plan.notes if "not needed" in note]
    assert re.search(r"takes about 1\d\d ms more than 3\.\d+ ms at batch 1", note)
    assert "sheet of NVIDIA H200" in note


def test_a_queue_may_take_all_the_room_that_moving_every_layer_leaves() -> None:
    plan = choose(OLMO_7B, 4.5, objective="throughput", max_model_len=512, max_num_seqs=64)
    assert len(plan.offloaded_layers) == 32
    assert {layer.resident.num_bytes for layer in plan.layers} == {0}
