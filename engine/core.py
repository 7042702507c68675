"""EngineCore: one step after another, from scheduler to runner to sampler and back."""

import contextlib
from dataclasses import dataclass
from time import perf_counter

from engine.kv.blocks import BlockPool
from engine.plan import MemoryPlan
from engine.request import SampledToken, TokenEvent
from engine.runner import ModelRunner
from engine.sampler import Sampler, SampleRow
from engine.scheduler import Scheduler
from engine.scheduler_config import SchedulerConfig
from engine.step_plan import StepPlan


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
    used_graph: bool
    duration_s: float
    """From the plan to the tokens on the host."""


class EngineCore:
    """Schedules, runs and samples; knows nothing of text.

    Args:
        plan: The memory plan in force.
        runner: Runs batches.
        sampler: Chooses tokens.
        seed: Keys the draws of requests without a seed.
        eos_token_ids: The model's end-of-sequence tokens.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        runner: ModelRunner,
        sampler: Sampler,
        *,
        seed: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.pool = BlockPool(plan.num_gpu_blocks, plan.block_size)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=plan.max_num_seqs,
                max_num_batched_tokens=plan.max_num_batched_tokens,
                max_model_len=plan.max_model_len,
                block_size=plan.block_size,
            ),
            self.pool,
        )
        self.runner = runner
        self.eos_token_ids = eos_token_ids
        self.last_step: StepStats | None = None
        self.num_steps = 0
        self._sampler, self._seed = sampler, seed

    def step(self) -> list[TokenEvent]:
        """Run one step; return its tokens, none where nothing was to run or no prompt is complete.

        A step that raises leaves every sequence with the tokens that it had before.
        """
        begin = perf_counter()
        plan = self.scheduler.plan_step()
        if plan is None:
            return []
        runner = self.runner
        before = runner.copied_bytes, runner.in_place_bytes, runner.graph_steps
        try:
            sampled = self._run(plan)
        except BaseException:
            self.scheduler.discard(plan)
            # The next step fills the input buffers again; what is enqueued must have read them.
            with contextlib.suppress(Exception):
                runner.wait()
            raise
        now = perf_counter()
        events = self.scheduler.commit(plan, sampled, self.eos_token_ids)
        for event in events:
            event.time_s = now
        self.num_steps += 1
        self.last_step = self._stats(plan, before, now - begin)
        return events

    def _run(self, plan: StepPlan) -> dict[int, SampledToken]:
        """Run a plan; return the sampled tokens by seq_id, once they are on the host."""
        logits = self.runner.execute(self.runner.prepare(plan))
        wanted = plan.sampling
        rows = [SampleRow.of(item.sequence, self._seed, self.eos_token_ids) for item in wanted]
        if not rows:
            self.runner.wait()
            return {}
        tokens = self._sampler.sample(logits[: len(rows)], rows)
        return {item.sequence.seq_id: token for item, token in zip(wanted, tokens, strict=True)}

    def _stats(self, plan: StepPlan, before: tuple[int, int, int], duration_s: float) -> StepStats:
        copied, read, graphs = before
        return StepStats(
            num_prefill_tokens=sum(item.num_tokens for item in plan.prefills),
            num_decode_tokens=len(plan.decodes),
            num_prefills=len(plan.prefills),
            num_decodes=len(plan.decodes),
            h2d_bytes=self.runner.copied_bytes - copied,
            in_place_bytes=self.runner.in_place_bytes - read,
            used_graph=self.runner.graph_steps > graphs,
            duration_s=duration_s,
        )
