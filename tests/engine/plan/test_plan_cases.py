"""Cases whose figures are known, and budgets walked down until a refusal."""

import re
from dataclasses import replace
from typing import Any

import pytest

from engine import LLM
from engine.asked.config import EngineConfig, PlannerConfig
from engine.asked.offload import OffloadConfig
from engine.errors import CapacityError
from engine.model.spec import ModelSpec
from engine.plan.memory import MemoryPlan
from engine.plan.planner import plan_memory
from harness.forecast.choosing import spec_of
from tests.engine.specs import CPU, GIB, H200, advised, configuration, prefetch, small_spec, uva
from tests.slow import mostly_slow
from tests.tiny import greedy_params, make_prompt

OLMO = spec_of("olmo7b")
AUTO = PlannerConfig(choose=True)
NEVER = 2**20


def plan_of(
    spec: ModelSpec,
    memory_gib: float,
    offload: OffloadConfig | None = None,
    planner: PlannerConfig | None = None,
    share: float = 0.85,
    **settings: Any,
) -> MemoryPlan:
    config = configuration(
        spec,
        memory_gib=memory_gib,
        offload=offload,
        gpu_memory_utilization=share,
        **({"max_model_len": 4096} | settings),
    )
    return plan_memory(replace(config, planner=planner or PlannerConfig()), spec, H200)


@pytest.mark.thorough
def test_olmo7b_on_16_gib_lacks_kv_and_says_the_least_offload() -> None:
    with pytest.raises(CapacityError) as caught:
        plan_of(OLMO, 16)
    text = str(caught.value)
    found = re.search(r"needs 2\.00 GiB of KV for 4,096 tokens, has (-[\d.]+) GiB", text)
    assert found is not None
    assert -2 < float(found[1]) < -1
    assert " of GPU memory: weights 13.59 GiB, " in text
    [least] = [words for words in advised(caught.value) if "cpu_offload_gb" in words]
    size = float(least.split("=")[1])
    assert plan_of(OLMO, 16, uva(size)).kv_tokens >= 4096
    with pytest.raises(CapacityError):
        plan_of(OLMO, 16, uva(size - 0.41))  # a layer less


def test_olmo7b_with_8_gib_of_uva_has_the_rest_as_kv() -> None:
    plan = plan_of(OLMO, 16, uva(8), uva_stage_tokens=NEVER)
    assert plan.gpu_items["kv_cache"] / GIB == pytest.approx(6.9, abs=0.35)
    staged = plan_of(OLMO, 16, uva(8))
    slots = staged.gpu_items["staging_slots"]
    assert slots == 2 * staged.slot_bytes
    lost = plan.gpu_items["kv_cache"] - staged.gpu_items["kv_cache"]
    assert lost == pytest.approx(slots, abs=plan.block_bytes)


def test_auto_moves_less_over_the_link_than_uva_for_the_same_kv() -> None:
    by_hand = plan_of(OLMO, 16, uva(8))
    planner = replace(AUTO, kv_tokens=by_hand.kv_tokens)
    chosen = plan_of(OLMO, 16, planner=planner)
    assert chosen.kv_tokens >= by_hand.kv_tokens
    embed = OLMO.vocab_size * OLMO.hidden_size * 2
    assert chosen.placements["model.embed_tokens.weight"].name == "uva"
    assert chosen.bytes_per_step() < by_hand.bytes_per_step() - 0.9 * embed


def test_a_model_that_fits_is_not_moved() -> None:
    plan = plan_of(spec_of("smollm2_135m"), 10, planner=AUTO, max_model_len=None)
    assert (plan.choice or {})["chosen"] == "everything in GPU memory"
    assert plan.bytes_per_step() == 0


def test_llama2_7b_runs_in_10_gib() -> None:
    spec = spec_of("llama2_7b")
    with pytest.raises(CapacityError, match=r"does not fit H200: .*, has -\d"):
        plan_of(spec, 10)
    assert plan_of(spec, 10, planner=AUTO).kv_tokens >= 4096


@pytest.mark.thorough
@pytest.mark.parametrize("length", [256, 1024, 2048, 4096])
def test_20_gb_on_4_gb_runs_or_is_refused_with_reasons(length: int) -> None:
    spec = replace(spec_of("olmo2_13b"), num_hidden_layers=28, dtype="bfloat16")
    assert 18e9 < spec.weight_bytes() < 22e9
    try:
        plan = plan_of(spec, 4, planner=AUTO, share=0.9, max_model_len=length, max_num_seqs=8)
    except CapacityError as error:
        [found] = [x for x in advised(error) if x.startswith("engine.max_model_len=")]
        shorter = int(found.split("=")[1])
        assert shorter < length
        plan_of(spec, 4, planner=AUTO, share=0.9, max_model_len=shorter, max_num_seqs=8)
        return
    assert plan.kv_tokens >= length
    assert plan.gpu_total_bytes <= plan.gpu_budget_bytes
    placed = plan.placed_bytes()
    assert sum(placed.values()) - placed["resident"] > 0.8 * spec.weight_bytes()


SPLITS = {
    "none": (OffloadConfig(), PlannerConfig()),
    "uva": (uva(0.0004), PlannerConfig()),
    "prefetch": (prefetch(2, 1), PlannerConfig()),
    "auto": (OffloadConfig(), AUTO),
}


def walk_config(spec: ModelSpec, name: str, memory_gib: float) -> EngineConfig:
    offload, planner = SPLITS[name]
    config = configuration(
        spec,
        memory_gib=memory_gib,
        offload=offload,
        gpu_memory_utilization=1.0,
        max_model_len=48,
        max_num_seqs=3,
        max_num_batched_tokens=32,
    )
    return replace(config, planner=planner)


@pytest.mark.thorough_but("uva-2")
@pytest.mark.filterwarnings("ignore::engine.asked.offload.OffloadWarning")
@pytest.mark.parametrize("num_layers", [2, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", mostly_slow(SPLITS, lambda x: x in {"uva", "auto"}))
def test_a_budget_walked_down_keeps_its_plan_until_it_is_refused(
    name: str, num_layers: int
) -> None:
    spec = small_spec(num_hidden_layers=num_layers)
    roomy = plan_memory(walk_config(spec, name, 1), spec, CPU)
    budget, step = roomy.gpu_total_bytes, roomy.gpu_total_bytes // 12
    held: list[int] = []
    refused = None
    for _ in range(12):
        config = walk_config(spec, name, budget / GIB)
        try:
            llm = LLM.from_config(config)
        except CapacityError as error:
            refused = error
            break
        llm.generate([make_prompt(30), make_prompt(17)], greedy_params(5))
        peak, planned = llm.memory()["gpu_peak_bytes"], llm.plan.gpu_total_bytes
        held.append(llm.plan.kv_tokens)
        llm.close()
        assert peak <= budget
        assert peak == pytest.approx(planned, rel=0.03)
        budget -= step
    assert advised(refused) or "No single change makes it fit" in str(refused)
    assert held
    assert held == sorted(held, reverse=True) or name == "auto"
