"""The scheduler over two tiers: any load, with moves of any delay, is served with right content."""

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.asked.request import SequenceStatus
from engine.kv import sequences
from engine.kv.prefix import num_expired
from engine.plan import host_times
from engine.plan.sizes import ReadRates, SwapRates
from engine.schedule import admission as rounds
from tests.engine.tiers_world import STEMS, Tiers, World

pytestmark = pytest.mark.slow

RATES = SwapRates(store_bytes_s=1.0, load_bytes_s=1.0)
TURNS = ReadRates(step_s=1.0, read_bytes_s=1.0)
TOGETHER = ReadRates(step_s=100.0, read_bytes_s=1.0)
WEIGHTS = {
    "add": 3,
    "step": 14,
    "complete": 5,
    "execute": 2,
    "complete_all": 1,
    "abort": 0.7,
    "launch_fails": 0.4,
    "collect_fails": 0.3,
    "step_alone": 0.7,
    "reset": 0.2,
    "evict": 0.3,
    "truncate": 0.7,
}
YIELDS = ((1, 1), (1, 1), (1, 1), (0, 1), (0, 3), (1, 3), (2, 2))


def draw_long(choose):
    """Sizes with which several sequences are longer than the GPU's room."""
    size = choose((1, 2, 4))
    on_gpu = choose((4, 7, 10, 20))
    windows = choose(((), (), (), (11,)))
    return Tiers(
        block_size=size,
        max_len=size * on_gpu * choose((2, 3)),
        seqs=choose((3, 6, 9)),
        tokens=choose((10, 20, 40)),
        windows=(None, *windows),
        num_gpu=on_gpu,
        window_extra=40,
        num_in_place=on_gpu * choose((3, 5, 9)),
        num_other=choose((0, 0, 4)),
        window_host=choose((0, 40)),
        prefix_caching=choose((True, True, False)),
        swap_rates=RATES,
        recompute_token_s=2.0,
        read_rates=choose((None, TURNS, TURNS, TOGETHER)),
        yields=choose(YIELDS),
    )


def draw_tiers(choose):
    """Sizes, of which many leave hardly any room."""
    size = choose((1, 2, 3, 4, 8))
    seqs = choose((1, 2, 3, 5, 8))
    windows = choose(((), (), (1,), (3,), (6,), (11,), (6, 3), (11, 6, 3)))
    whole = (None,) if not windows or choose((False, True)) else ()
    return Tiers(
        block_size=size,
        max_len=choose((6, 16, 30, 40)),
        seqs=seqs,
        tokens=choose((seqs, seqs + 3, 12, 20)),
        windows=(*whole, *windows),
        extra=choose((0, 1, 3, 8, 20)),
        window_extra=choose((0, 2, 5)),
        num_in_place=choose((0, 0, 1, 3, 6, 30)),
        num_other=choose((0, 0, 1, 4, 30)),
        window_host=choose((0, 1, 4, 20, 40)),
        prefix_caching=choose((True, True, False)),
        swap_rates=choose((None, None, RATES)),
        recompute_token_s=choose((0.5, 2.0)),
        read_rates=choose((None, TURNS, TURNS, TOGETHER)),
        yields=choose(YIELDS),
    )


class Driver:
    """Chooses what happens."""

    def __init__(self, world, choose):
        self.world, self.choose = world, choose
        most = world.tiers.max_len
        self.lengths = [n for n in (1, 2, 5, 5, 9, 14, 20, 29, 39) if n < most]
        if most > 40 or world.tiers.num_gpu:
            self.lengths += [most // 2, most * 2 // 3, most - 7, most - 3]

    def add(self):
        if len(self.world.sequences) < 40:
            self.world.add(
                stem=self.choose(range(STEMS)),
                length=self.choose(self.lengths),
                own=self.choose((0, 0, 1, 4)),
                max_tokens=self.choose((None, None, 1, 2, 6, 12, 25)),
                n=self.choose((1, 1, 2)),
                eos_after=self.choose((None, None, None, 1, 4)),
                salt=self.choose((None, None, None, "a", "b")),
            )

    def step(self):
        self.world.step()

    def step_alone(self):
        self.world.step(ahead=False)

    def launch_fails(self):
        self.world.step(frozenset({"launch fails"}))

    def collect_fails(self):
        self.world.step(frozenset({"collect fails"}))

    def complete(self):
        moves = self.world.moves()
        if moves:
            count = self.choose((1, 1, 2, 5))
            self.world.complete([self.choose(moves)] if count == 1 else moves[:count])

    def complete_all(self):
        self.world.complete(self.world.moves())

    def execute(self):
        moves = self.world.moves()
        if moves:
            self.world.execute(*self.choose(moves))

    def abort(self):
        if self.world.sequences:
            sequence = self.choose(self.world.sequences)
            self.world.scheduler.abort(sequence.request.request_id)

    def truncate(self):
        """Take tokens back of a sequence, with no step on its way that runs it."""
        world = self.world
        world.step(ahead=False)
        running = [s for s in world.scheduler.running if s.status is SequenceStatus.RUNNING]
        if running:
            sequence = self.choose(running)
            less = self.choose((0, 1, 1, 2, 3, 5, 9, 30))
            world.truncate(sequence, max(0, sequence.num_computed - less))

    def reset(self):
        self.world.scheduler.reset_cache(self.choose((None, "gpu", "cpu")))

    def evict(self):
        self.world.scheduler.evict_gpu_cache()


class Loads(RuleBasedStateMachine):
    """The driver, with Hypothesis choosing."""

    @initialize(data=st.data())
    def make(self, data):
        def choose(options):
            return data.draw(st.sampled_from(options))

        self.driver = Driver(World(draw_tiers(choose)), None)

    @rule(data=st.data(), names=st.lists(st.sampled_from(sorted(WEIGHTS)), min_size=1, max_size=8))
    def operate(self, data, names):
        self.driver.choose = lambda options: data.draw(st.sampled_from(options))
        for name in names:
            getattr(self.driver, name)()
            self.driver.world.check()

    @invariant()
    def holds(self):
        if hasattr(self, "driver"):
            self.driver.world.check()

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.world.finish()


TestLoads = Loads.TestCase
TestLoads.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch):
    """Let few steps lie between two changes of places."""
    monkeypatch.setattr(rounds, "ROUND_STEPS", 3)
    monkeypatch.setattr(host_times, "LEAST_TURN", 2)
    monkeypatch.setattr(host_times, "MOST_TURN", 4)


def play(seed, length=150, draw=draw_tiers):
    """One long load; return the world behind its end."""
    rng = random.Random(seed)
    world = World(draw(rng.choice))
    driver = Driver(world, rng.choice)
    for name in rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=length):
        getattr(driver, name)()
        world.check()
    world.finish()
    return world


def test_long_loads_reach_everything():
    """Seeded and long, as short examples seldom fill both tiers."""
    reached = play_all(100)
    assert all(count >= 3 for count in reached.values()), reached


@pytest.mark.parametrize("seeds", [range(60), range(60, 120)], ids=str)
def test_loads_of_long_sequences(seeds):
    """Several sequences beyond the GPU's room, in turns and together, short ones beside them."""
    reached = Counter()
    for seed in seeds:
        world = play(seed, 200, draw_long)
        stats, kv = world.scheduler.stats, world.scheduler.kv_stats()
        reached.update({name: kv[name] for name in ("swaps_out", "long_turns")})
        reached.update({name: kv["pool"][name] for name in ("demoted", "promoted")})
        reached.update(overtaken=stats.num_overtaken, most=kv["long_waited_steps"])
    assert all(count >= 20 for count in reached.values()), reached


def play_all(count):
    """Play many loads; return how often what was met."""
    reached = Counter()
    for seed in range(count):
        world = play(seed)
        kv = world.scheduler.kv_stats()
        reached.update(world.seen)
        reached.update(kv["pool"])
        reached.update({name: kv[name] for name in ("swaps_out", "swaps_in", "recomputes")})
        stats = world.scheduler.stats
        reached.update(stalls=stats.num_stalls, turns=stats.num_turns)
        reached.update(overtaken=stats.num_overtaken)
    return reached


@pytest.mark.parametrize("windows", [(None,), (None, 64), (None, 128, 64)], ids=str)
def test_a_storm_of_requests_leaves_nothing_behind(windows):
    """Many requests with few prefixes, some aborted, on tiers that hold few of them."""
    rng = random.Random(5)
    world = World(
        Tiers(
            block_size=16,
            max_len=512,
            seqs=48,
            tokens=512,
            windows=windows,
            num_gpu=110,
            window_extra=60,
            num_in_place=64,
            num_other=150,
            window_host=100,
        )
    )
    world.stride = 16
    for _ in range(2000 if windows == (None,) else 800):
        world.add(
            stem=rng.randrange(20),
            length=rng.randrange(4, 200),
            own=rng.choice((0, 16, 150)),
            max_tokens=rng.choice((1, 4, 20, 90)),
        )
    steps = 0
    while world.scheduler.has_unfinished:
        ran = world.step()
        moves = world.moves()
        if moves and (not ran or rng.random() < 0.5):
            world.complete(moves[: rng.randrange(1, 200)])
        if rng.random() < 0.1:
            world.scheduler.abort(str(rng.randrange(world.num_requests)))
        steps += 1
        assert steps < 20_000, "no progress"
    world.check()
    kv = world.scheduler.kv_stats()
    assert kv["swaps_out"] > 3
    assert kv["prefix"]["hits_cpu_tokens"] > 1000
    world.finish()


def spoiled(monkeypatch, fault):
    """Let one rule be broken."""
    if fault == "a step does not wait for moves":
        monkeypatch.setattr(World, "execute_all", lambda *_: None)
    if fault == "a prefix is read before it has come":
        monkeypatch.setattr(sequences.BlockGroups, "is_pending", lambda *_: False)
    if fault == "a salt is ignored":
        monkeypatch.setattr(sequences, "root_key", lambda *_: b"")
    if fault == "blocks behind a window are given back too early":
        monkeypatch.setattr(sequences, "num_expired", lambda *a: num_expired(*a) + 1)


@pytest.mark.parametrize(
    "fault",
    [
        "a step does not wait for moves",
        "a prefix is read before it has come",
        "a salt is ignored",
        "blocks behind a window are given back too early",
    ],
)
def test_negative_control(monkeypatch, fault):
    """What the checks are for is found by them."""
    spoiled(monkeypatch, fault)
    with pytest.raises(AssertionError):
        play_all(60)
