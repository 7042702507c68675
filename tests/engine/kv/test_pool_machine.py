"""Any sequence of requests, aborts, swaps, resets and late moves keeps the promises of the pool."""

import random
from collections import Counter
from dataclasses import asdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.engine.kv.driver import WEIGHTS, Driver
from tests.engine.kv.world import World

NAMES = list(WEIGHTS)


class Requests(RuleBasedStateMachine):
    """The driver, with Hypothesis choosing."""

    @initialize(data=st.data(), num_gpu=st.integers(1, 6), num_cpu=st.integers(0, 8))
    def make(self, data, num_gpu, num_cpu):
        in_place = data.draw(st.sampled_from([num_cpu, num_cpu, 0, num_cpu // 2]))
        self.driver = Driver(World(num_gpu, num_cpu, in_place), None)

    @rule(data=st.data(), names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=8))
    def operate(self, data, names):
        self.driver.choose = lambda options: data.draw(st.sampled_from(options))
        for name in names:
            getattr(self.driver, name)()
            self.driver.check()

    @invariant()
    def holds(self):
        if hasattr(self, "driver"):
            self.driver.check()

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.end()


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)


@pytest.mark.thorough
def test_long_runs_reach_everything():
    """Seeded and long, as short examples seldom fill both tiers."""
    weights, reached = list(WEIGHTS.values()), Counter()
    for seed in range(75):
        rng = random.Random(seed)
        num_cpu = rng.choice((0, 1, 3, 6, 12))
        in_place = rng.choice((num_cpu, num_cpu, 0, num_cpu // 2))
        world = World(rng.choice((1, 3, 5, 8)), num_cpu, in_place)
        driver = Driver(world, rng.choice)
        for name in rng.choices(NAMES, weights, k=200):
            getattr(driver, name)()
            driver.check()
        driver.end()
        reached.update(asdict(driver.pool.stats))
    for name in ("hits_unseen_gpu", "hits_unseen_cpu"):  # counted by who knows windows
        del reached[name]
    assert all(count > 12 for count in reached.values()), reached
