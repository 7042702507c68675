"""What the bookkeeping of a long prefix costs, in calls of Python functions."""

import sys
from contextlib import contextmanager

from engine.asked.request import Request, SampledToken, Sequence
from engine.asked.sampling import SamplingParams
from engine.kv.pool import TieredBlockPool
from engine.kv.prefix import KVPolicy
from engine.kv.sequences import BlockGroups
from engine.schedule.scheduler import Scheduler, SchedulerConfig
from tests.engine.kv.world import take

NUM_BLOCKS, SIZE = 512, 16


@contextmanager
def counted():
    """Yield a list with the number of calls of Python functions so far."""
    calls, before = [0], sys.getprofile()

    def note(_frame, event, _arg):
        calls[0] += event == "call"

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def sequence(seq_id, tokens):
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    request = Request(request_id=str(seq_id), prompt_token_ids=tokens, params=params)
    return Sequence(seq_id=seq_id, request=request)


def run(scheduler):
    """Plan and commit a step, with all its moves."""
    plan = scheduler.plan_step()
    complete(scheduler, take(scheduler))
    if plan is not None:
        tokens = {item.sequence.seq_id: [SampledToken(7, 0.0)] for item in plan.sampling}
        scheduler.commit(plan, tokens, ())


def complete(scheduler, batches):
    for group, batch in enumerate(batches):
        scheduler.complete_moves(group, [move.move_id for move in batch.moves])


def test_a_long_prefix_in_the_host_tier_costs_few_calls_a_block():
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=2048, max_model_len=9000)
    pool = TieredBlockPool(600, 1200, SIZE)
    scheduler = Scheduler(config, BlockGroups([pool], 2048, KVPolicy(prefix_caching=True)))
    prefix = list(range(NUM_BLOCKS * SIZE))
    scheduler.add(sequence(0, [*prefix, 1]))
    while scheduler.has_unfinished:
        run(scheduler)
    scheduler.evict_gpu_cache()
    complete(scheduler, take(scheduler))
    scheduler.add(sequence(1, [*prefix, 2]))
    with counted() as calls:
        assert scheduler.plan_step() is None
        batches = take(scheduler)
        assert calls[0] < 2 * NUM_BLOCKS
    assert [move.kind for move in batches[0].moves] == ["load"] * NUM_BLOCKS
    with counted() as calls:
        complete(scheduler, batches)
        assert calls[0] < 5 * NUM_BLOCKS
    run(scheduler)
    assert scheduler.stats.num_prefill_tokens == NUM_BLOCKS * SIZE + 2


def test_a_long_sequence_is_swapped_out_with_few_calls_a_block():
    pool = TieredBlockPool(NUM_BLOCKS, NUM_BLOCKS, SIZE)
    table = pool.allocate(NUM_BLOCKS)
    keys = [place.to_bytes(32, "big") for place in range(NUM_BLOCKS)]
    for block_id, key in zip(table, keys, strict=True):
        pool.register(block_id, key)
    with counted() as calls:
        assert pool.swap_out(table, keys) == NUM_BLOCKS
        assert calls[0] < 6 * NUM_BLOCKS
    assert len(take(pool).moves) == NUM_BLOCKS
