"""DeviceExecutor: a StepPlan becomes a batch of device tensors, logits and tokens on the host."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import torch

from engine.asked.request import NoToken, SampledToken, Sequence
from engine.clock import StepBytes
from engine.device.base import Device, Mark
from engine.errors import ConfigError
from engine.plan.memory import MemoryPlan
from engine.plan.sizes import HOST_DECODES, pad_batch
from engine.run.decoder import Decoder
from engine.run.inputs import Batch, BatchBuilder, StepShape
from engine.run.routing import ExpertMeter, Recorded, RecordedPart
from engine.run.sampler import PendingTokens, Sampler, SampleRow
from engine.schedule.step import StepPlan
from kernels.sizes import MAX_SMALL_TOKENS


@dataclass(slots=True)
class ScoredPart:
    """A part of a prompt whose tokens' log-probabilities are asked for.

    The logits of a token say how probable the next one is: those of the last one are not wanted.
    """

    sequence: Sequence
    start: int
    """Position of its first token."""
    rows: range
    """Tokens of the step."""
    width: int
    """Most probable tokens that are asked for, at most as many as there are."""
    sampler: Sampler
    tables: list[torch.Tensor] = field(default_factory=list)
    """What `Sampler.score` returned, in order."""
    num_scored: int = 0

    def take(self, logits: torch.Tensor) -> None:
        """Score the next tokens by the logits of those before them.

        Stream: enqueued on the current stream; waits for nothing.
        """
        first = self.start + self.num_scored + 1
        self.num_scored += len(logits)
        token_ids = self.sequence.tokens(first, first + len(logits))
        self.tables.append(self.sampler.score(logits, token_ids, self.width))

    def collect(self) -> None:
        """Hand the sequence its log-probabilities; waits for all that is enqueued."""
        lines = torch.cat(self.tables).tolist()
        token_ids = self.sequence.tokens(self.start + 1, self.start + 1 + len(lines))
        found = []
        for token_id, (logprob, _, *top) in zip(token_ids, lines, strict=True):
            ids, values = top[: self.width], top[self.width :]
            others = {int(each): value for each, value in zip(ids, values, strict=True)}
            found.append({token_id: logprob} | others)
        self.sequence.prompt_logprobs[self.start :] = found


@dataclass(frozen=True, slots=True)
class DeviceFlight:
    """A step that is enqueued on a device."""

    seq_ids: tuple[int, ...]
    """Sequences that sample."""
    pending: PendingTokens | None
    """Their tokens; None where none samples."""
    mark: Mark
    """Behind all its work."""
    sampler: Sampler
    moved: StepBytes
    used_graph: bool
    scored: tuple[ScoredPart, ...] = ()
    recorded: Recorded | None = None
    """Experts of its tokens, where they are recorded."""
    metered: tuple[ExpertMeter, torch.Tensor] | None = None
    """What counts experts, and the copy of its counters behind the step; None: nothing does."""

    def is_done(self) -> bool:
        """Return whether its tokens are on the host."""
        return self.mark.is_done()

    def wait(self) -> float:
        """Block until they are; return when the host first knew that."""
        return self.mark.wait()

    def collect(self) -> dict[int, SequenceOf[SampledToken] | NoToken]:
        """Return its tokens by seq_id, once they are there."""
        for part in self.scored:
            part.collect()
        if self.recorded is not None:
            self.recorded.collect()
        if self.pending is None:
            return {}
        tokens = self.sampler.collect(self.pending)
        return {
            seq_id: token if isinstance(token, NoToken) else (token,)
            for seq_id, token in zip(self.seq_ids, tokens, strict=True)
        }

    def expert_counts(self) -> tuple[int, int, int]:
        """Return hits, misses and bytes of experts since the step before; to be called once."""
        if self.metered is None:
            return 0, 0, 0
        meter, sent = self.metered
        return meter.collect(sent).totals


class DeviceExecutor:
    """Executes steps on a device: owns the input buffers, the graphs and the sampler.

    Everything is only enqueued. A step may be launched while the one before it still runs; the one
    before that must have been waited for and collected.

    `ranks` are the device and the plan of each rank that a step runs on: one. `seed` keys the draws
    of requests without one.

    Raises:
        ConfigError: There is not exactly one device.
    """

    yields: Final = (1, 1)
    """The least and the most tokens that come of a sequence that samples."""

    def __init__(
        self,
        ranks: SequenceOf[tuple[Device, MemoryPlan]],
        decoder: Decoder,
        sampler: Sampler,
        *,
        seed: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        if len(ranks) != 1:
            raise ConfigError(
                f"executor: expected one device, got {len(ranks)}: a model is not split over "
                "devices. Set tensor_parallel_size=1."
            )
        [(self._device, self._plan)] = ranks
        self._decoder, self.sampler = decoder, sampler
        self._seed, self._eos_token_ids = seed, eos_token_ids
        table = decoder.routers.table
        self._batches = BatchBuilder(
            self._plan, self._device, None if table is None else table.num_rows
        )
        counters, sizes = decoder.weights.expert_counters, decoder.weights.expert_bytes
        self.meter: ExpertMeter | None = None
        """Counts experts that are not resident; None: there are none."""
        if counters is not None and sizes is not None:
            self.meter = ExpertMeter(counters, sizes, self._device)
        self._graphs: dict[StepShape, tuple[Callable[[], None], int, int]] = {}
        """What replays a captured step, and the weight bytes that it copies and reads in place."""
        self.graph_steps = 0
        """Steps that ran as graphs."""
        self._replayed_copies = self._replayed_reads = 0
        """Weight bytes that replays moved, less those counted while capturing."""
        self._newest: Mark | None = None

    def launch(self, plan: StepPlan) -> DeviceFlight:
        """Enqueue all of a step behind what was launched before.

        Stream: enqueued on the current stream; waits for nothing.
        """
        before, graph_steps = self.moved, self.graph_steps
        batch = self.prepare(plan, self.sampler.tokens)
        scored = self._scored(plan)
        if scored:
            batch = replace(batch, scored=tuple((part.rows, part.take) for part in scored))
        logits = self.execute(batch)
        # Copies to the host come before the mark that says that they are done.
        recorded = self._recorded(plan, batch.num_tokens)
        metered = None if self.meter is None else (self.meter, self.meter.send())
        sampling, pending = plan.sampling, None
        if sampling:
            seed, eos_ids = self._seed, self._eos_token_ids
            rows = [
                SampleRow.of(item.sequence, seed, eos_ids, token_rows=item.token_rows)
                for item in sampling
            ]
            pending = self.sampler.enqueue(logits[: len(rows)], rows)
        return DeviceFlight(
            seq_ids=tuple([item.sequence.seq_id for item in sampling]),
            pending=pending,
            mark=self.mark(),
            sampler=self.sampler,
            moved=self.moved - before,
            used_graph=self.graph_steps > graph_steps,
            scored=scored,
            recorded=recorded,
            metered=metered,
        )

    def _recorded(self, plan: StepPlan, num_tokens: int) -> Recorded | None:
        """Enqueue the copy of the experts of a step that was enqueued; None: none are recorded."""
        recorder = self._decoder.routers.recorder
        if recorder is None:
            return None
        rows = [(item, row) for row, item in enumerate(plan.decodes)]
        rows += [(item, self._batches.first_rows[item.sequence.seq_id]) for item in plan.prefills]
        parts = [
            RecordedPart(item.sequence.seq_id, item.start, row, item.num_tokens)
            for item, row in rows
        ]
        return Recorded(recorder, recorder.send(num_tokens), tuple(parts))

    def _scored(self, plan: StepPlan) -> tuple[ScoredPart, ...]:
        """Return the parts of prompts in the newest batch whose tokens are to be scored."""
        found = []
        for item in plan.prefills:
            sequence, width = item.sequence, item.sequence.params.prompt_logprobs
            count = min(item.stop, sequence.num_prompt_tokens - 1) - item.start
            if width is None or count < 1 or not sequence.lacks_prompt_logprobs:
                continue
            first = self._batches.first_rows[sequence.seq_id]
            rows, width = range(first, first + count), min(width, self.sampler.vocab_size)
            found.append(ScoredPart(sequence, item.start, rows, width, self.sampler))
        return tuple(found)

    def settle(self) -> None:
        """Block until all that is enqueued is done, also of a launch that failed."""
        self.mark().wait()
        if self._decoder.stages is not None:
            self._decoder.stages.settle()

    def prepare(self, plan: StepPlan, tokens: torch.Tensor | None = None) -> Batch:
        """Fill the input buffers and enqueue their upload, as `BatchBuilder.prepare`."""
        return self._batches.prepare(plan, tokens)

    def execute(self, batch: Batch) -> torch.Tensor:
        """Run the newest batch; return float32 logits [R, V], a row per wanted token, then padding.

        Where that takes the host longer than the device needs for the step before, the end of that
        is noted on the way, so that its tokens do not count as later for what comes behind them.

        Stream: enqueued on the current stream. The tensor may be overwritten by the next step.
        """
        look = None if self._newest is None else self._newest.is_done
        if look is not None:
            look()
        shape = self._batches.shape
        if not self._replay(shape, batch.num_tokens):
            return self._decoder.forward(batch, look)
        self.graph_steps += 1
        return self._decoder.logits[: batch.num_logits]

    def replay_newest(self, size: int) -> bool:
        """Enqueue the newest step once more if it was a decode of `size` rows with a graph.

        For measuring what a step costs beside its graph. It computes the newest step's keys,
        values and logits again and changes no sequence; it counts as moved bytes, not as a step.

        Stream: enqueued on the current stream; waits for nothing.
        """
        shape = self._batches.shape
        return shape is not None and shape[:2] == (size, 0) and self._replay(shape, size)

    def _replay(self, shape: StepShape | None, num_tokens: int) -> bool:
        """Run the graph of a shape on what the input buffers hold; return whether there is one.

        Stream: enqueued on the current stream.
        """
        found = None if shape is None else self._graphs.get(shape)
        if found is None:
            return False
        replay, copied, read = found
        # A step that failed amid its layers left other layers in the slots than the graph expects.
        store = self._decoder.weights
        store.begin_step(num_tokens)
        store.end_step()
        replay()
        self._replayed_copies += copied
        self._replayed_reads += read
        return True

    def mark(self) -> Mark:
        """Return a point behind everything that is enqueued so far, the end of the newest step."""
        self._newest = self._device.mark()
        return self._newest

    def capture(self) -> None:
        """Capture every planned step, the largest first."""
        plan, batches = self._plan, self._batches
        for size in sorted(plan.graph_sizes, reverse=True):
            if not plan.is_captured(size):
                continue
            self._capture(StepShape(size), batches.padding_decode(size))
            if self.is_tiered and size <= HOST_DECODES:
                batch = batches.padding_decode(size, reads_host=True)
                self._capture(StepShape(size, reads_host=True), batch)
        for decodes, tokens in sorted(plan.captured_prefills, reverse=True):
            batch = batches.padding_prefill(decodes, tokens)
            self._capture(StepShape(decodes, tokens), batch)

    def _capture(self, shape: StepShape, batch: Batch) -> None:
        """Run a batch of padding once, and capture it.

        Stream: waits for the device.
        """
        self._run(batch)
        before = self.moved
        replay = self._device.new_graph(partial(self._decoder.forward, batch))
        moved = self.moved - before
        copied, read = moved.h2d_bytes, moved.in_place_bytes
        self._graphs[shape] = replay, copied, read
        # Capturing counted the bytes, but moved none.
        self._replayed_copies -= copied
        self._replayed_reads -= read

    def warm_up(self, num_tokens: int) -> None:
        """Run prefills of `num_tokens` and fewer of padding, and decodes: kernels are compiled."""
        plan, batches = self._plan, self._batches
        self.sampler.warm_up()
        # Products of few tokens have kernels of their own for up to 8, 16, 32 and 64 of them.
        few = () if plan.facts.emulated else (16, 32, MAX_SMALL_TOKENS)
        for size in sorted({num_tokens, *few}, reverse=True):
            self._run(batches.padding_prompts(min(size, plan.max_num_batched_tokens)))
        most = pad_batch(plan.max_num_seqs)
        for size in sorted({min(size, most) for size in few}, reverse=True):
            if not plan.is_captured(size):  # a capture runs first; the head has a row a sequence
                self._run(batches.padding_decode(size))
        self._run(batches.padding_unknown(reads_host=False))
        if batches.tiered is None:
            return
        self._run(batches.padding_unknown(reads_host=True))
        for is_mixed in (False, True):  # pieces with blocks of both tiers have their own kernel
            self._run(batches.padding_staged(batches.tiered, is_mixed=is_mixed))
        if batches.tiered.copies_ahead:
            self._run(batches.padding_ahead())
        batches.forget_tables()
        if self._decoder.stages is not None:
            self._decoder.stages.staged_bytes = 0

    def _run(self, batch: Batch) -> None:
        self._decoder.forward(batch)
        self._device.synchronize()

    @property
    def is_tiered(self) -> bool:
        """Whether sequences may own blocks of the host tier, which compute reads in place."""
        return self._batches.tiered is not None

    @property
    def moved(self) -> StepBytes:
        """What steps brought to the GPU since the load, replayed ones included."""
        weights, batches = self._decoder.weights, self._batches
        return StepBytes(
            h2d_bytes=weights.copied_bytes + self._replayed_copies,
            in_place_bytes=weights.in_place_bytes + self._replayed_reads,
            kv_in_place_bytes=batches.kv_in_place_bytes,
            kv_copied_bytes=batches.kv_copied_bytes,
        )

    @property
    def staged_prefill_bytes(self) -> int:
        """Keys and values copied from the host tier for prefills so far."""
        stages = self._decoder.stages
        return 0 if stages is None else stages.staged_bytes

    @property
    def captured(self) -> Iterable[StepShape]:
        """Shapes of steps that run as graphs."""
        return self._graphs.keys()

    def close(self) -> None:
        """Release graphs before the buffers that they use."""
        self._graphs.clear()
