"""Keys of blocks are made ahead of need; no running sequence waits for those of a long prompt."""

from engine.kv import prefix, sequences
from engine.schedule.admission import LONG_BLOCKS
from tests.engine.schedule.test_scheduler_swaps import run, world_of


def test_running_sequences_do_not_wait_for_the_keys_of_a_long_prompt(monkeypatch):
    world = world_of(block_size=1, max_len=100, tokens=200, num_gpu=400)
    world.add(length=4, max_tokens=20)
    world.step()
    made = []
    keys = prefix.block_keys
    monkeypatch.setattr(prefix, "block_keys", lambda *a: made.append(len(a[1])) or keys(*a))
    long = [world.add(length=LONG_BLOCKS + 9, max_tokens=2) for _ in range(3)]
    assert long[0] in world.scheduler.waiting
    assert not made
    world.step()  # plans, then commits the step before
    assert long[0] in world.scheduler.waiting
    assert made.count(LONG_BLOCKS + 9) == 1
    assert world.scheduler.prepare()
    world.step()
    assert world.scheduler.running[1:] == long[:2]
    run(world)
    assert made.count(LONG_BLOCKS + 9) == 3
    assert not world.scheduler.prepare()
    world.end()


def test_keys_of_a_very_long_prompt_are_made_in_parts(monkeypatch):
    monkeypatch.setattr(sequences, "PREPARE_TOKENS", 40)
    world = world_of(block_size=1, max_len=100, tokens=200, num_gpu=400)
    world.add(length=4, max_tokens=20)
    world.step()
    long = world.add(length=90, max_tokens=2)
    made = []
    keys = prefix.block_keys
    monkeypatch.setattr(prefix, "block_keys", lambda *a: made.append(len(a[1])) or keys(*a))
    while world.scheduler.prepare():
        assert long in world.scheduler.waiting
    assert made == [40, 40, 10]
    run(world)
    world.end()


def test_a_long_prompt_begins_at_once_where_nothing_runs():
    world = world_of(block_size=1, max_len=100, tokens=200, num_gpu=400)
    long = [world.add(length=LONG_BLOCKS + 9, max_tokens=2) for _ in range(2)]
    world.scheduler.plan_step()
    assert world.scheduler.running == list(long)


def test_without_prefix_caching_no_keys_are_made():
    world = world_of(num_gpu=40, prefix_caching=False)
    world.add(length=20, max_tokens=1)
    assert not world.scheduler.prepare()
    run(world)
    world.end()
