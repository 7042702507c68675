"""Choices for a queue where everything fits the GPU: more room for KV may be worth a copy."""

from dataclasses import replace

import pytest

from engine.model.spec import ModelSpec
from engine.plan.cards import DeviceFacts
from engine.plan.choose import GAIN, NOTHING
from engine.plan.memory import MemoryPlan
from engine.plan.planner import plan_candidates, plan_memory
from engine.plan.queue import QUEUE_REQUESTS
from tests.engine.plan.test_choose import ask, choose, conf_spec
from tests.engine.specs import CPU, H200, NO_PIN, NO_UVA, configuration
from tests.slow import slow

pytestmark = pytest.mark.thorough

QUEUE = {"max_model_len": 1024, "max_num_seqs": 64}


def resident(spec: ModelSpec, memory_gib: float) -> MemoryPlan:
    return plan_memory(configuration(spec, memory_gib=memory_gib, **QUEUE), spec, H200)


def queue_s(plan: MemoryPlan) -> float:
    assert plan.predicted is not None
    return float(plan.predicted["queue"]["total_s"])


def test_a_card_that_the_weights_nearly_fill_gives_room_to_a_queue() -> None:
    spec = conf_spec("mistral_7b")
    plan, without = choose(spec, 17, objective="throughput", **QUEUE), resident(spec, 17)
    assert plan.num_gpu_blocks > 2 * without.num_gpu_blocks
    assert queue_s(without) > 1.5 * queue_s(plan)
    assert choose(spec, 17, **QUEUE).outer_offloaded.num_bytes == 0  # one sequence gains nothing


@pytest.mark.parametrize("memory_gib", [20, 40])
def test_where_kv_has_room_nothing_is_moved_for_little(memory_gib: float) -> None:
    spec = conf_spec("mistral_7b")
    plan = choose(spec, memory_gib, objective="throughput", **QUEUE)
    assert plan.offloaded_layers == ()
    assert plan.outer_offloaded.num_bytes == 0
    choice = plan.choice or {}
    assert choice["chosen"] == choice["candidates"][0]["label"] == NOTHING
    assert choice["why"].startswith("it fits, and none of ")
    tokens_s = [row["queue_output_tokens_s"] for row in choice["candidates"]]
    assert max(tokens_s) < GAIN * tokens_s[0]
    assert tokens_s[0] == pytest.approx(QUEUE_REQUESTS * 128 / queue_s(plan))


@pytest.mark.parametrize("name", ["gemma3_4b", *map(slow, ("olmo7b", "qwen3_4b", "smollm2_135m"))])
def test_what_is_moved_is_worth_it(name: str) -> None:
    spec, moved = conf_spec(name), 0
    weights_gib = spec.weight_bytes() / 2**30
    for share in (1.15, 1.4, 2.0):
        gib = weights_gib * share + 2
        config = ask(spec, gib, objective="throughput", **QUEUE)
        plan, without = plan_memory(config, spec, H200), resident(spec, gib)
        if plan.placements == without.placements:
            continue
        moved += 1
        assert queue_s(plan) * GAIN <= queue_s(without)
        assert plan.kv_tokens > without.kv_tokens
    assert moved < 3  # with twice the weights' memory there is nothing to gain


def test_the_referee_is_given_what_moves_nothing_too() -> None:
    spec = conf_spec("mistral_7b")
    plans = plan_candidates(ask(spec, 19, objective="throughput", **QUEUE), spec, H200, 12)
    labels = [(plan.choice or {})["chosen"] for plan in plans]
    assert len(set(labels)) == len(labels) > 1
    assert NOTHING in labels
    assert "" not in labels
    assert len(plan_candidates(ask(spec, 17.6, **QUEUE), spec, H200, 2)) == 1


@pytest.mark.parametrize(
    "facts", [replace(H200, **NO_UVA), slow(replace(H200, **NO_PIN)), slow(CPU)], ids=range(3)
)
def test_machines_that_cannot_pin_or_read_in_place(facts: DeviceFacts) -> None:
    spec = conf_spec("mistral_7b")
    plan = choose(spec, 17, facts, objective="throughput", dtype="bfloat16", **QUEUE)
    rows = (plan.choice or {})["candidates"]
    assert rows[0]["kv_tokens"] == plan.kv_tokens


def test_what_moves_nothing_is_counted_as_its_plan() -> None:
    spec = conf_spec("olmo7b")
    plan = choose(spec, 40, objective="throughput", **QUEUE)
    assert plan.placements == resident(spec, 40).placements
    assert queue_s(plan) == queue_s(resident(spec, 40))
