"""Does what EngineCore does, on a device made of lists: moves run late, and all reads are checked.

Steps run when they are launched. A move runs when a step must wait for it, when another names it,
or when it is told to. What attention would read is compared with what the tokens say.
"""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from engine.asked.request import Request, SampledToken, Sequence, SequenceStatus
from engine.asked.sampling import SamplingParams
from engine.kv.pool import TieredBlockPool
from engine.kv.prefix import KVPolicy, num_expired
from engine.kv.sequences import GONE, BlockGroups
from engine.plan.sizes import ReadRates, SwapRates, TierCosts, num_held
from engine.schedule.scheduler import Scheduler, SchedulerConfig
from tests.engine.kv.world import take

EOS = 1
STEMS = 3


@dataclass(kw_only=True)
class Tiers:
    """Sizes of everything; pools are as small as they may be but for the blocks given here."""

    block_size: int = 4
    max_len: int = 32
    seqs: int = 4
    tokens: int = 16
    windows: tuple[int | None, ...] = (None,)
    """Of each group of layers; None: it attends to all."""
    extra: int = 4
    """Blocks of the first group beyond one longest sequence, on both tiers; those on the GPU."""
    num_gpu: int | None = None
    """Blocks of the first group on the GPU, instead."""
    window_extra: int = 2
    num_in_place: int = 0
    """Host blocks that compute reaches; so many fewer are needed on the GPU."""
    num_other: int = 0
    """Host blocks that it does not."""
    window_host: int = 0
    prefix_caching: bool = True
    swap_rates: SwapRates | None = None
    recompute_token_s: float = 0.0
    read_rates: ReadRates | None = None
    yields: tuple[int, int] = (1, 1)

    def make(self, *, exact: bool = False) -> Scheduler:
        """Return a scheduler of these sizes; unless exact with room for one sequence at least."""
        windows = self.windows
        least = [num_held(self.max_len, w, self.tokens, self.block_size) for w in windows]
        on_gpu = self.num_gpu or max(1, least[0] + self.extra - self.num_in_place)
        in_place = self.num_in_place if exact else max(self.num_in_place, least[0] - on_gpu)
        pools = [
            TieredBlockPool(
                on_gpu,
                in_place + self.num_other,
                self.block_size,
                num_in_place=in_place,
                window=windows[0],
            )
        ]
        for window, need in zip(windows[1:], least[1:], strict=True):
            some, host = need + self.window_extra, self.window_host
            pools.append(
                TieredBlockPool(some, host, self.block_size, num_in_place=0, window=window)
            )
        config = SchedulerConfig(
            max_num_seqs=self.seqs,
            max_num_batched_tokens=self.tokens,
            max_model_len=self.max_len,
            yields=self.yields,
        )
        costs = TierCosts(
            swap_rates=self.swap_rates,
            recompute_token_s=self.recompute_token_s,
            read_rates=self.read_rates,
        )
        policy = KVPolicy(prefix_caching=self.prefix_caching, costs=costs)
        return Scheduler(config, BlockGroups(pools, self.tokens, policy))


@dataclass
class Launched:
    """A step that ran."""

    plan: Any
    sampled: list[list[int]]


class World:
    """A scheduler, a device, and the checks between."""

    def __init__(self, tiers: Tiers) -> None:
        self.tiers, self.size = tiers, tiers.block_size
        self.scheduler = tiers.make()
        self.groups = self.scheduler.groups
        self.pools = self.groups.pools
        self.memory = [[[None] * self.size for _ in range(p.num_blocks)] for p in self.pools]
        self.queued: list[dict[int, Any]] = [{} for _ in self.pools]
        self.executed: list[set[int]] = [set() for _ in self.pools]
        self.num_requests = 0
        self.sequences: list[Sequence] = []
        self.specs: dict[int, dict[str, Any]] = {}
        self.prefixes: dict[int, list[int]] = {}
        self.tables: dict[tuple[int, int, int], list[int]] = {}
        self.in_flight: Launched | None = None
        self.seen = Counter()
        self.chance = random.Random(0)
        self.truncated: set[int] = set()
        """Sequences whose computed tokens were taken back."""
        self.stride = 1
        """Of the positions that a step reads, one in so many is checked."""

    # Requests

    def add(self, **spec: Any) -> Sequence:
        """Queue a request: stem, length, max_tokens, n, eos_after, own, salt.

        Prompts of one stem begin alike; their last `own` tokens are their own.
        """
        number = self.num_requests
        self.num_requests += 1
        spec = {"stem": number, "n": 1} | spec
        params = SamplingParams(
            n=spec["n"],
            max_tokens=spec["max_tokens"],
            cache_salt=spec.get("salt"),
        )
        # The token of a stem at a place; the last ones may be a request's own.
        own = spec.get("own", 0)
        length = min(spec["length"], self.tiers.max_len - 1)
        prompt = [10 + 1000 * spec["stem"] + i for i in range(length)]
        prompt[len(prompt) - own :] = [50_000 + 100 * number + i for i in range(own)][:length]
        prompt = prompt[:length]
        request = Request(request_id=str(number), prompt_token_ids=prompt, params=params)
        for index in range(spec["n"]):
            sequence = Sequence(seq_id=len(self.sequences), request=request, index=index)
            self.sequences.append(sequence)
            self.specs[sequence.seq_id] = spec
            self.scheduler.add(sequence)
        return self.sequences[-1]

    def token(self, sequence: Sequence, position: int) -> int:
        """What is sampled at a position."""
        number = position - sequence.num_prompt_tokens
        after = self.specs[sequence.seq_id].get("eos_after")
        return EOS if after is not None and number + 1 >= after else 2 + number

    def expected(self, sequence: Sequence, position: int) -> int:
        """The token at a position."""
        if position < sequence.num_prompt_tokens:
            return sequence.prompt_token_ids[position]
        return self.token(sequence, position)

    def value(self, sequence: Sequence, position: int) -> int:
        """What the cache must hold at a position: a digest of all tokens up to it."""
        known = self.prefixes.setdefault(sequence.seq_id, [])
        while len(known) <= position:
            before = known[-1] if known else hash(self.specs[sequence.seq_id].get("salt"))
            known.append(hash((before, self.expected(sequence, len(known)))))
        return known[position]

    # Moves

    def submit(self) -> None:
        """Take the moves, and run those that the next step waits for."""
        for group, batch in enumerate(take(self.scheduler)):
            for move in batch.moves:
                assert all(before < move.move_id for before in move.after)
                assert (move.src < self.pools[group].num_gpu_blocks) is (move.kind == "store")
                assert (move.dst < self.pools[group].num_gpu_blocks) is (move.kind == "load")
                self.queued[group][move.move_id] = move
                self.seen[move.kind] += 1
            self.execute_all(group, batch.waits)

    def execute_all(self, group: int, move_ids: Iterable[int]) -> None:
        """Run moves."""
        for move_id in sorted(move_ids):
            self.execute(group, move_id)

    def execute(self, group: int, move_id: int) -> None:
        """Run a move, after those that it names."""
        move = self.queued[group].pop(move_id, None)
        if move is not None:
            for before in move.after:
                self.execute(group, before)
            memory = self.memory[group]
            memory[move.dst] = list(memory[move.src])
            self.executed[group].add(move_id)

    def moves(self) -> list[tuple[int, int]]:
        """Return group and id of all that are taken and not complete."""
        return [
            (group, move_id)
            for group in range(len(self.pools))
            for move_id in sorted([*self.queued[group], *self.executed[group]])
        ]

    def complete(self, moves: list[tuple[int, int]]) -> None:
        """Run moves and say that they are done."""
        for group, move_id in moves:
            self.execute(group, move_id)
            self.executed[group].discard(move_id)
            self.scheduler.complete_moves(group, [move_id])

    # Steps

    def step(self, happenings: frozenset[str] = frozenset(), *, ahead: bool = True) -> bool:
        """Do what EngineCore.step does; return whether anything ran or ended."""
        scheduler = self.scheduler
        if self.in_flight is not None and self.in_flight.plan.is_dead:
            self.seen["dead"] += 1
            self.collect()
        if self.in_flight is None:
            plan = scheduler.plan_step()
            self.submit()
            if plan is None:
                if scheduler.has_unfinished:
                    self.seen["blocked"] += 1
                    assert self.moves(), "nothing to wait for"
                return False
            self.in_flight = self.launch(plan, None)
        behind = None
        plan = scheduler.plan_ahead() if ahead else None
        if ahead:
            self.submit()
        if plan is not None:
            self.seen["ahead"] += 1
            if "launch fails" in happenings:
                scheduler.discard(plan)
            else:
                behind = self.launch(plan, self.in_flight)
        if "collect fails" in happenings:
            for each in reversed(scheduler.planned):
                scheduler.discard(each)
            self.in_flight = None
            return True
        self.collect()
        self.in_flight = behind
        return True

    def collect(self) -> None:
        """Commit the step in flight."""
        flight, self.in_flight = self.in_flight, None
        sampled = {
            item.sequence.seq_id: [
                SampledToken(token, -1.0)
                for token in tokens[: self.chance.randint(*self.tiers.yields)]
            ]
            for item, tokens in zip(flight.plan.sampling, flight.sampled, strict=True)
        }
        self.scheduler.commit(flight.plan, sampled, {EOS})

    def launch(self, plan: Any, before: Launched | None) -> Launched:
        """Write what the step computes, and check all that it reads."""
        self.check_plan(plan, before)
        for group, window in enumerate(self.tiers.windows):
            for item in plan.scheduled:
                for position in range(item.start, item.stop):
                    block, offset = self.place(group, item.sequence, position)
                    self.memory[group][block][offset] = self.value(item.sequence, position)
            for item in plan.scheduled:
                first = 0 if window is None else max(0, item.start - window + 1)
                for position in range(first, item.stop, self.stride):
                    block, offset = self.place(group, item.sequence, position)
                    held = self.memory[group][block][offset]
                    assert held == self.value(item.sequence, position), (
                        f"group {group}: position {position} of sequence {item.sequence.seq_id}"
                    )
        most = self.tiers.yields[1]
        return Launched(
            plan,
            [[self.token(i.sequence, i.stop + n) for n in range(most)] for i in plan.sampling],
        )

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Take computed tokens back of a sequence that is in no plan."""
        before = sequence.num_computed
        stays = self.groups.truncate(sequence, num_tokens)
        assert stays == sequence.num_computed <= num_tokens <= before
        assert {len(table) for table in sequence.block_tables} == {-(-stays // self.size)}
        self.truncated.add(sequence.seq_id)
        self.seen["truncated"] += 1

    def place(self, group: int, sequence: Sequence, position: int) -> tuple[int, int]:
        """Return block and offset of a position."""
        block = sequence.block_tables[group][position // self.size]
        assert block != GONE
        return block, position % self.size

    # Checks

    def check_plan(self, plan: Any, before: Launched | None) -> None:
        items, tiers = plan.scheduled, self.tiers
        assert 1 <= plan.num_tokens == sum(i.num_tokens for i in items) <= tiers.tokens
        assert len({i.sequence.seq_id for i in items}) == len(items) <= tiers.seqs
        assert all(i.sequence.status is SequenceStatus.RUNNING for i in items)
        assert all(i.num_tokens == 1 and i.samples for i in plan.decodes)
        earlier = {} if before is None else {i.sequence.seq_id: i for i in before.plan.scheduled}
        for item in items:
            s, part = item.sequence, earlier.get(item.sequence.seq_id)
            assert item.start == (s.num_computed if part is None else part.stop)
            known = s.num_tokens
            if part is not None and part.samples:
                assert tiers.yields[0] == tiers.yields[1]
                known += tiers.yields[1]
            assert item.samples is (item.stop == known)
            assert item.stop <= min(known, s.max_length(tiers.max_len) - 1)
            assert bool(item.token_rows) is (part is not None and part.samples)
            if item.token_rows:
                width = tiers.yields[1]
                assert {before.plan.sampling[row // width].sequence for row in item.token_rows} == {
                    s
                }
            elif self.stride == 1:
                assert item.token_ids == [self.expected(s, p) for p in range(item.start, item.stop)]

    def check(self) -> None:
        """Owners are the tables; blocks are shared by content alone; tables keep their entries."""
        running, waiting = tuple(self.scheduler.running), tuple(self.scheduler.waiting)
        assert len(running) <= self.tiers.seqs
        order = [s.seq_id for s in running + waiting]
        has_long = any(map(self.groups.is_long, self.sequences))
        if not self.scheduler.stats.num_turns and not has_long:
            assert order == sorted(order), "served in order of arrival"
        for s in waiting:
            assert s.status is SequenceStatus.WAITING
            assert (s.block_tables, s.num_gone, s.num_computed) == ([], [], 0)
        ended = tuple(s for s in self.sequences if s.is_finished and s.block_tables)
        assert not ended or running or waiting, "no step may follow that gives blocks back"
        for group, pool in enumerate(self.pools):
            self.check_group(group, pool, running + ended)
        kv = self.scheduler.kv_stats()
        for part in (kv, *kv["groups"]):
            gpu, cpu = part["gpu"], part["cpu"]
            assert gpu["owned"] + gpu["cached"] + gpu["free"] == gpu["blocks"]
            assert (
                sum(cpu[name] for name in ("owned", "cached", "free", "in_transit"))
                == cpu["blocks"]
            )
        assert kv["preemptions"] == kv["swaps_out"] + kv["recomputes"]
        assert kv["preemptions"] == sum(s.num_preemptions for s in self.sequences)
        assert kv["swaps_in"] <= kv["swaps_out"]

    def check_group(self, group: int, pool: TieredBlockPool, owning: tuple[Sequence, ...]) -> None:
        most = pool.num_gpu_blocks + pool.num_in_place
        owners: Counter[int] = Counter()
        contents: dict[int, set[tuple[int, int]]] = {}
        for s in owning:
            table = s.block_tables[group]
            live = [block for block in table if block != GONE]
            assert len(set(live)) == len(live)
            assert all(block < most for block in live)
            owners.update(live)
            for place, block in enumerate(table):
                last = (place + 1) * self.size - 1
                contents.setdefault(block, set()).add((place, self.value(s, last)))
            start = s.num_computed - s.num_computed % self.size
            gone = min(len(table), num_expired(start, pool.window, self.size))
            if s.seq_id in self.truncated and pool.window is not None:
                # What was behind the window stays so, but nothing that it sees again.
                gone = s.num_gone[group]
                assert gone <= num_expired(s.num_computed, pool.window, self.size)
            assert table == [GONE] * gone + live
            assert s.num_gone[group] == gone
            key = s.seq_id, s.table_version, group
            before = self.tables.get(key, [])
            now = table[: len(before)]
            assert all(new in {GONE, old} for old, new in zip(before, now, strict=True))
            self.tables[key] = list(table)
        assert [pool.states.owners[b] for b in range(pool.num_blocks)] == [
            owners[b] for b in range(pool.num_blocks)
        ]
        assert all(len(contents[block]) == 1 for block in owners), "shared by content alone"
        assert self.tiers.prefix_caching or set(owners.values()) <= {1}
        self.seen["host blocks of sequences"] += any(b >= pool.num_gpu_blocks for b in owners)
        self.seen["shared"] += any(count > 1 for count in owners.values())

    def finish(self, most_steps: int = 3000) -> None:
        """Step until all ended, moves done only when nothing runs; then every count is back."""
        for _ in range(most_steps):
            if not self.scheduler.has_unfinished:
                break
            if not self.step():
                self.complete(self.moves())
        assert not self.scheduler.has_unfinished, "no progress"
        if self.in_flight is not None:
            self.collect()
        self.end()

    def end(self) -> None:
        """All ended: nothing is owned, nothing moves, and what was sampled is right."""
        self.submit()
        self.complete(self.moves())
        for pool in self.pools:
            assert pool.ledger.num_in_flight == 0
            gpu, cpu = pool.use("gpu"), pool.use("cpu")
            assert gpu["owned"] == cpu["owned"] == cpu["in_transit"] == 0
            if not self.tiers.prefix_caching:
                assert gpu["cached"] == cpu["cached"] == 0, "forgotten"
            pool.reset()
            assert pool.use("gpu")["free"] == pool.num_gpu_blocks
            assert pool.use("cpu")["free"] == pool.num_cpu_blocks
        assert self.scheduler.stats.num_finished == len(self.sequences)
        assert self.groups.num_named == 0
        for s in self.sequences:
            wanted = [self.token(s, s.num_prompt_tokens + i) for i in range(s.num_output_tokens)]
            assert s.output_token_ids == wanted
            if s.finish_reason != "abort":
                full = s.max_length(self.tiers.max_len) - s.num_prompt_tokens
                after = self.specs[s.seq_id].get("eos_after")
                assert len(wanted) == min(full, after or full)
