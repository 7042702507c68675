"""EngineCore: one step after another, from scheduler to runner to sampler and back."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

from engine.asked.request import SampledToken, TokenEvent
from engine.device.base import Mark
from engine.kv.mover import BlockMover, Transfers
from engine.kv.sequences import BlockGroups
from engine.plan.memory import MemoryPlan
from engine.run.executor import ModelRunner
from engine.run.sampler import PendingTokens, Sampler, SampleRow
from engine.schedule.scheduler import Scheduler, SchedulerConfig
from engine.schedule.step import StepPlan

LONG_STEP_S: Final = 0.02
"""Of steps as long as this the keys of a prompt take little: 0.1 ms for 1,000 tokens (2 cores of a
Xeon)."""


@dataclass(frozen=True)
class StepStats:
    """What one step did."""

    num_prefill_tokens: int
    num_decode_tokens: int
    num_prefills: int
    num_decodes: int
    h2d_bytes: int
    """Weight bytes copied to the GPU."""
    in_place_bytes: int
    """Weight bytes read in place from host memory."""
    kv_in_place_bytes: int
    """Keys and values that decodes read in place from host memory."""
    used_graph: bool
    duration_s: float
    """To its tokens on the host, as the host found them there, from its own plan or from the end of
    the step before, whichever was later: where steps overlap, the time that it adds."""
    is_overlapped: bool
    """Whether it was planned and launched before the step before it was collected."""
    launch_s: float
    """Host time from its plan to the last of its work enqueued."""
    wait_s: float
    """Host time until its tokens came, what the host did meanwhile included; zero where they were
    there before the step behind it was launched, and on a CPU, which computes as it launches."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that is launched and not collected."""

    plan: StepPlan
    pending: PendingTokens | None
    """Its tokens; None where it samples none."""
    mark: Mark
    """Behind all its work."""
    begin_s: float
    launched_s: float
    h2d_bytes: int
    in_place_bytes: int
    kv_in_place_bytes: int
    used_graph: bool
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

    Args:
        plan: The memory plan in force.
        runner: Runs batches.
        sampler: Chooses tokens.
        seed: Keys the draws of requests without a seed.
        eos_token_ids: The model's end-of-sequence tokens.
        movers: Move blocks of each group of layers; none where there is no host tier.
        identity: What the values in a KV block depend on beside tokens.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        runner: ModelRunner,
        sampler: Sampler,
        *,
        seed: int,
        eos_token_ids: frozenset[int],
        movers: Sequence[BlockMover] = (),
        identity: tuple[str, ...] = (),
    ) -> None:
        groups = BlockGroups.planned(plan, identity)
        self.pools = groups.pools
        """Blocks of each group of layers."""
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=plan.max_num_seqs,
                max_num_batched_tokens=plan.max_num_batched_tokens,
                max_model_len=plan.max_model_len,
                block_size=plan.block_size,
            ),
            groups,
        )
        self.transfers = Transfers(self.scheduler, movers)
        self.runner = runner
        self.eos_token_ids = eos_token_ids
        self.last_step: StepStats | None = None
        """The newest step whose tokens were read."""
        self.num_steps = 0
        """Steps whose tokens were read."""
        self.overlapped_steps = 0
        """Those of them that were launched before the step before them was collected."""
        self.overlap = True
        """Launch a step before the one before it is collected; may change between steps."""
        self._sampler, self._seed = sampler, seed
        self._flight: _Flight | None = None
        self._is_torn = False
        self._end_s = 0.0

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

    def _launch(self, make_plan: Callable[[], StepPlan | None]) -> _Flight | None:
        """Plan a step and enqueue all of it; None if nothing is to be planned."""
        runner, begin_s = self.runner, perf_counter()
        before = (
            runner.copied_bytes,
            runner.in_place_bytes,
            runner.graph_steps,
            runner.kv_in_place_bytes,
        )
        num_planned = len(self.scheduler.planned)
        try:
            plan = make_plan()
            self.transfers.submit()
            if plan is None:
                return None
            logits = runner.execute(runner.prepare(plan, self._sampler.tokens))
            pending = None
            if plan.sampling:
                rows = self._rows(plan)
                pending = self._sampler.enqueue(logits[: len(rows)], rows)
            return _Flight(
                plan=plan,
                pending=pending,
                mark=runner.mark(),
                begin_s=begin_s,
                launched_s=perf_counter(),
                h2d_bytes=runner.copied_bytes - before[0],
                in_place_bytes=runner.in_place_bytes - before[1],
                kv_in_place_bytes=runner.kv_in_place_bytes - before[3],
                used_graph=runner.graph_steps > before[2],
                is_overlapped=num_planned > 0,
            )
        except BaseException:
            self._discard(num_planned)
            raise

    def _rows(self, plan: StepPlan) -> list[SampleRow]:
        return [
            SampleRow.of(
                item.sequence,
                self._seed,
                self.eos_token_ids,
                num_unknown=int(item.token_row is not None),
            )
            for item in plan.sampling
        ]

    def _collect(self, flight: _Flight, behind: _Flight | None) -> list[TokenEvent]:
        """Wait for the step in flight and commit it; `behind` is in flight then."""
        begin_s = perf_counter()
        try:
            self.transfers.enqueue_until(flight.mark)
            while not flight.mark.is_done() and self.scheduler.prepare():
                pass
            flight.mark.wait()
            end_s = flight.mark.passed_s
            assert end_s is not None
            sampled = self._read(flight)
            events = self.scheduler.commit(flight.plan, sampled, self.eos_token_ids)
        except BaseException:
            self._flight = None
            self._discard(0)
            raise
        self._flight, self._is_torn = behind, False
        for event in events:
            event.time_s = end_s
        self.num_steps += 1
        self.overlapped_steps += flight.is_overlapped
        self.last_step = StepStats(
            num_prefill_tokens=sum(item.num_tokens for item in flight.plan.prefills),
            num_decode_tokens=len(flight.plan.decodes),
            num_prefills=len(flight.plan.prefills),
            num_decodes=len(flight.plan.decodes),
            h2d_bytes=flight.h2d_bytes,
            in_place_bytes=flight.in_place_bytes,
            kv_in_place_bytes=flight.kv_in_place_bytes,
            used_graph=flight.used_graph,
            duration_s=end_s - max(flight.begin_s, self._end_s),
            is_overlapped=flight.is_overlapped,
            launch_s=flight.launched_s - flight.begin_s,
            wait_s=max(0.0, end_s - begin_s),
        )
        self._end_s = end_s
        return events

    def _read(self, flight: _Flight) -> dict[int, SampledToken | None]:
        """Return the tokens of a step that ran, by seq_id; None where the logits were unusable."""
        if flight.pending is None:
            return {}
        sequences = [item.sequence for item in flight.plan.sampling]
        tokens = self._sampler.collect(flight.pending)
        return {s.seq_id: token for s, token in zip(sequences, tokens, strict=True)}

    def _discard(self, num_kept: int) -> None:
        """Forget the newest plans but for `num_kept`, and wait for what is enqueued of them."""
        for plan in reversed(self.scheduler.planned[num_kept:]):
            self.scheduler.discard(plan)
        # What was forgotten may have taken the place of the tokens of the step in flight.
        self._is_torn = num_kept > 0
        # The next step fills an input buffer again; what is enqueued must have read it.
        with contextlib.suppress(Exception):
            self.runner.mark().wait()
