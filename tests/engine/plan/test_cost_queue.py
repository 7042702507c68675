"""Predicted steps of a queue against those that the scheduler makes."""

from dataclasses import replace

import pytest

from engine.plan.queue import queue_s, queue_steps
from engine.plan.times import decode_step_s, prefill_s, shape_of
from tests.engine.plan.test_cost import RATES
from tests.engine.schedule.test_scheduler import make_scheduler, make_sequence, step
from tests.engine.specs import OLMO_7B, plan_olmo, planned

LIMITS = {"max_model_len": 512, "max_num_seqs": 64}


def scheduled(num: int, prompt: int, output: int, **limits: int) -> tuple[int, int]:
    """Steps of the scheduler for a queue of equal requests, and tokens of prompts in them."""
    scheduler = make_scheduler(**limits)
    for index in range(num):
        scheduler.add(make_sequence(index, prompt, max_tokens=output, ignore_eos=True))
    steps = tokens = 0
    while scheduler.has_unfinished:
        plan, _ = step(scheduler)
        steps += 1
        tokens += sum(item.num_tokens for item in plan.prefills)
    return steps, tokens


@pytest.mark.thorough_but("40-200-16-160", "12-1300-40-700", "9-700-100-90")
@pytest.mark.parametrize(
    ("num", "prompt", "output", "blocks"),
    [
        (40, 64, 64, 5000),
        (60, 64, 64, 316),
        (60, 64, 64, 100),
        (40, 16, 100, 80),
        (40, 200, 16, 160),
        (20, 100, 100, 14),
        (70, 300, 1, 5000),
        (12, 1300, 40, 700),
        (9, 700, 100, 90),
        (5, 30, 40, 5),
        (1, 8, 9, 3),
    ],
)
def test_steps_are_those_of_the_scheduler(num: int, prompt: int, output: int, blocks: int) -> None:
    limits = {"seqs": 64, "tokens": 512, "max_len": prompt + output, "block_size": 16}
    steps, tokens = scheduled(num, prompt, output, num_blocks=blocks, **limits)
    shape = shape_of(plan_olmo(memory_gib=24, **LIMITS), OLMO_7B, RATES)
    kv = replace(shape.plan.kv, step_tokens=512)
    shape = planned(shape, kv=kv.with_pools((blocks,)), max_num_batched_tokens=512)
    found = list(queue_steps(shape, num, prompt, output))
    assert sum(stretch.steps for stretch in found) == pytest.approx(steps, rel=0.1, abs=1)
    prompts = sum(stretch.steps * stretch.prefill for stretch in found)
    assert prompts == pytest.approx(tokens, rel=0.2)


def test_the_last_of_a_queue_take_as_many_steps_as_the_others() -> None:
    plan = plan_olmo(memory_gib=24, max_model_len=512, max_num_seqs=8)
    shape = shape_of(plan, OLMO_7B, RATES)
    two, three = (queue_s(shape, count, 32, 64) for count in (16, 17))
    alone = prefill_s(shape, 32) + 63 * decode_step_s(shape, 1, 64)
    assert three == pytest.approx(two + alone)


def test_a_queue_that_the_kv_cache_bounds_takes_longer() -> None:
    """200 requests of 64 and 64 tokens in 5,056 tokens of KV ran for 330 of a lone step's time."""
    shape = shape_of(plan_olmo(memory_gib=24, **LIMITS), OLMO_7B, RATES)
    shape = planned(shape, kv=shape.plan.kv.with_pools((316,)))
    steps = sum(stretch.steps for stretch in queue_steps(shape, 200, 64, 64))
    assert 310 <= steps <= 335


def test_sequences_that_exceed_the_gpu_run_one_after_another() -> None:
    shape = shape_of(plan_olmo(memory_gib=24, **LIMITS), OLMO_7B, RATES)
    found = list(queue_steps(planned(shape, kv=shape.plan.kv.with_pools((3,))), 4, 64, 32))
    assert {stretch.decodes for stretch in found} == {0, 1}
    assert sum(stretch.steps for stretch in found) == 4 * 32
