"""EngineCore: one step after another, from scheduler to executor and back."""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Final

from engine.asked.request import TokenEvent
from engine.clock import StepStats
from engine.errors import EngineError
from engine.kv.sequences import BlockGroups
from engine.plan.memory import MemoryPlan
from engine.schedule.scheduler import Scheduler, SchedulerConfig
from engine.schedule.step import StepPlan

if TYPE_CHECKING:
    from engine.kv.memory import BlockMover
    from engine.run.executor import DeviceExecutor, DeviceFlight

RECENT_STEPS: Final = 32
"""Steps over which the use of the host link is told."""
LONG_STEP_S: Final = 0.02
"""Length of steps beside which a prompt's keys take little: 0.1 ms for 1,000 tokens (2 cores of a
Xeon)."""


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What crossed the host link to the GPU while steps ran."""

    bytes_per_step: float
    bytes_per_s: float

    @classmethod
    def of(cls, steps: Sequence[tuple[int, float]]) -> "LinkUse":
        """Return that of steps, given their bytes and seconds; zeros where there are none."""
        num_bytes, seconds = sum(step[0] for step in steps), sum(step[1] for step in steps)
        return cls(num_bytes / max(1, len(steps)), num_bytes / seconds if seconds > 0 else 0.0)


class Transfers:
    """Hands the moves that a scheduler decides to the movers, and tells it what is done.

    There is one mover for each group of layers; none where there is no host tier.
    """

    def __init__(self, source: Scheduler, movers: Sequence["BlockMover"]) -> None:
        self._source, self._movers = source, tuple(movers)
        self._is_cut_short = False

    @property
    def num_under_way(self) -> int:
        """Moves that were submitted and are not known to be done."""
        return sum(mover.num_under_way for mover in self._movers)

    @property
    def loaded_bytes(self) -> int:
        """Bytes of KV blocks that were moved to the GPU so far."""
        return sum(mover.stats.loaded_bytes for mover in self._movers)

    def submit(self) -> None:
        """Hand on all moves decided so far, and let what follows wait for those that it must.

        Each call enqueues at least one piece of what is left to each mover, so that all are
        enqueued in the end. The source keeps them until all are submitted: where it raises, the
        next call goes on where it stopped.

        Raises:
            EngineError: Blocks were to be moved where there is no host tier.

        Stream: behind what is enqueued on the current stream, which waits.
        """
        self._is_cut_short = True
        ledgers = [pool.ledger for pool in self._source.pools]
        batches = [ledger.decided_moves() for ledger in ledgers]
        if not self._movers and any(batches):
            counts = [len(batch.moves) for batch in batches]
            raise EngineError(f"moves: expected none where there is no host tier, got {counts}.")
        for mover, batch in zip(self._movers, batches, strict=True) if self._movers else ():
            if batch:
                mover.submit(batch)
            if not batch.moves:
                mover.enqueue_more()
        for ledger in ledgers:
            ledger.note_taken()
        self._is_cut_short = False

    def enqueue_until(self, work: "DeviceFlight") -> None:
        """Enqueue what is left while the device works, until a step is done.

        So a load of many blocks takes host time that would be spent waiting.

        Stream: behind what was enqueued on the current stream when the moves were submitted.
        """
        for mover in self._movers:
            while mover.num_queued and not work.is_done():
                mover.enqueue_more()

    def poll(self) -> None:
        """Tell the source what is done; waits for nothing."""
        if self._is_cut_short:  # the last submission; before anything else is done about it
            self.submit()
        for group, mover in enumerate(self._movers):
            if mover.num_under_way:
                self._source.complete_moves(group, mover.poll())

    def wait_next(self) -> None:
        """Block until moves are done that were not, and tell the source.

        Raises:
            EngineError: None is under way.
        """
        if not self.num_under_way:
            raise EngineError(
                "moves: expected one under way that sequences wait for, got none. This is a fault "
                "of the scheduler."
            )
        busy = [mover for mover in self._movers if mover.num_under_way]
        for mover in [mover for mover in busy if mover.is_loading] or busy:
            mover.wait_next()
        self.poll()

    def drain(self) -> None:
        """Enqueue all moves, block until they are done, and tell the source."""
        self.submit()
        while self.num_under_way:
            self.wait_next()


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that is launched and not collected."""

    plan: StepPlan
    flight: "DeviceFlight"
    begin_s: float
    launched_s: float
    is_overlapped: bool


class EngineCore:
    """Schedules, runs and samples; knows nothing of text.

    Between calls of `step` at most one step is in flight: launched on the device, its tokens not
    read. A call plans and launches the step behind it, as if it had been committed, and then
    collects it; so the device goes on while the host collects, commits, and decodes text between
    calls. The tokens that the step behind needs are read on the device. Within a call two steps
    are in flight, and a request that is added between calls waits for one: the step in flight.

    Moves of blocks between the tiers, which a plan decides, run behind the step before it. Those
    that the plan's own work waits for are enqueued before it, many others while the host waits for
    tokens. A call begins by telling the scheduler which moves are done. Where all
    sequences wait for loads, a call waits for one piece of them, and returns no tokens if nothing
    can run then either.

    There is a mover for each group of layers, none where there is no host tier. `identity` and
    `is_routed` say what the values in a KV block depend on beside tokens, as KVPolicy has them.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        executor: "DeviceExecutor",
        *,
        eos_token_ids: frozenset[int],
        movers: Sequence["BlockMover"] = (),
        identity: tuple[str, ...] = (),
        is_routed: bool = False,
    ) -> None:
        groups = BlockGroups.planned(plan, identity, is_routed=is_routed)
        self.pools = groups.pools
        """Blocks of each group of layers."""
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=plan.max_num_seqs,
                max_num_batched_tokens=plan.max_num_batched_tokens,
                max_model_len=plan.max_model_len,
                yields=executor.yields,
            ),
            groups,
        )
        self.transfers = Transfers(self.scheduler, movers)
        self.executor = executor
        self.eos_token_ids = eos_token_ids
        self.last_step: StepStats | None = None
        """The newest step whose tokens were read."""
        self.num_steps = 0
        """Steps whose tokens were read."""
        self.step_s = 0.0
        """Seconds that they took."""
        self.recent: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)
        """Bytes that crossed the host link to the GPU in each of the last steps, but for host
        blocks that prefills stage, and its seconds."""
        self.overlapped_steps = 0
        """Number of them that were launched before the step before them was collected."""
        self.overlap = True
        """Launch a step before the one before it is collected; may change between steps."""
        self._flight: _Launched | None = None
        self._is_torn = False
        self._end_s = 0.0
        self._loaded_bytes = 0

    def step(self) -> list[TokenEvent]:
        """Return the tokens of one step, none where nothing was to run or no prompt is complete.

        A step that raises leaves every sequence with the tokens that it had before. Where the
        launch of the step behind fails, the step in flight stays so and the next call returns its
        tokens; where a step fails later, it and the step behind it are forgotten and planned anew.
        """
        self.transfers.poll()
        num_flying = int(self._flight is not None)
        if len(self.scheduler.planned) > num_flying:
            self._discard(num_flying)  # an interrupt came between a launch and its result
        if self._flight is not None and self._flight.plan.is_dead:
            # All its sequences ended while it was in flight; nobody waits for it.
            self._collect(self._flight, None)
        if self._flight is None:
            self._flight = self._launch(self.scheduler.plan_step)
        if self._flight is None and self.scheduler.has_unfinished:
            self.transfers.wait_next()
            self._flight = self._launch(self.scheduler.plan_step)
        if self._flight is None:
            return []
        behind = None
        if self.overlap and not self._is_torn:
            if self.last_step is not None and self.last_step.duration_s >= LONG_STEP_S:
                while self.scheduler.prepare():  # a prompt that came is not to miss this step
                    pass
            behind = self._launch(self.scheduler.plan_ahead)
        return self._collect(self._flight, behind)

    def _launch(self, make_plan: Callable[[], StepPlan | None]) -> _Launched | None:
        """Plan a step and enqueue all of it; None if nothing is to be planned."""
        begin_s, num_planned = perf_counter(), len(self.scheduler.planned)
        try:
            plan = make_plan()
            self.transfers.submit()
            if plan is None:
                return None
            flight = self.executor.launch(plan)
            return _Launched(plan, flight, begin_s, perf_counter(), num_planned > 0)
        except BaseException:
            self._discard(num_planned)
            raise

    def _collect(self, step: _Launched, behind: _Launched | None) -> list[TokenEvent]:
        """Wait for the step in flight and commit it; `behind` is in flight then."""
        begin_s, plan, flight = perf_counter(), step.plan, step.flight
        try:
            self.transfers.enqueue_until(flight)
            while not flight.is_done() and self.scheduler.prepare():
                pass
            end_s = flight.wait()
            for item in plan.prefills:
                if item.sequence.begin_s is None:
                    item.sequence.begin_s = step.begin_s
            events = self.scheduler.commit(plan, flight.collect(), self.eos_token_ids)
        except BaseException:
            self._flight = None
            self._discard(0)
            raise
        self._flight, self._is_torn = behind, False
        for event in events:
            event.time_s = end_s
        hits, misses, expert_bytes = flight.expert_counts()
        self.num_steps += 1
        self.overlapped_steps += step.is_overlapped
        self.last_step = StepStats(
            num_prefill_tokens=sum(item.num_tokens for item in plan.prefills),
            num_decode_tokens=len(plan.decodes),
            **vars(flight.moved),
            used_graph=flight.used_graph,
            duration_s=end_s - max(step.begin_s, self._end_s),
            is_overlapped=step.is_overlapped,
            launch_s=step.launched_s - step.begin_s,
            wait_s=max(0.0, end_s - begin_s),
            expert_hits=hits,
            expert_misses=misses,
            expert_bytes=expert_bytes,
        )
        self._end_s = end_s
        self.step_s += self.last_step.duration_s
        loaded, before = self.transfers.loaded_bytes, self._loaded_bytes
        moved = sum(vars(flight.moved).values()) + expert_bytes + loaded - before
        self.recent.append((moved, self.last_step.duration_s))
        self._loaded_bytes = loaded
        return events

    def _discard(self, num_kept: int) -> None:
        """Forget the newest plans but for `num_kept`, and wait for what is enqueued of them."""
        for plan in reversed(self.scheduler.planned[num_kept:]):
            self.scheduler.discard(plan)
        # What was forgotten may have taken the place of the tokens of the step in flight.
        self._is_torn = num_kept > 0
        # The next step fills an input buffer again; what is enqueued must have read it.
        with contextlib.suppress(Exception):
            self.executor.settle()
