"""ModelRunner: a StepPlan becomes a Batch of device tensors, and the Batch becomes logits."""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from engine.batch import Batch
from engine.device.base import Device, Graph, Mark
from engine.errors import EngineError
from engine.inputs import NO_HOST_TIER, Field, StepInputs
from engine.kv.pieces import PIECE_KEYS
from engine.models.decoder import Decoder
from engine.plan import MemoryPlan
from engine.sizes import PREFILL_SEQUENCES, pad_batch
from engine.step_plan import ScheduledSequence, StepPlan
from engine.tiered_inputs import StagedItem, TieredInputs
from kernels.sizes import MAX_SMALL_TOKENS


class ModelRunner:
    """Owns the input buffers and the graphs; decides nothing.

    Everything is only enqueued. A step may be prepared and executed while the one before it still
    runs; the results of the one before that must have been waited for (`mark`).
    """

    def __init__(self, plan: MemoryPlan, decoder: Decoder, device: Device) -> None:
        self._plan, self._decoder, self._device = plan, decoder, device
        rows = pad_batch(plan.max_num_seqs)
        tokens = max(plan.max_num_batched_tokens, rows)
        rows += PREFILL_SEQUENCES
        width = -(-plan.max_model_len // plan.block_size)
        self._tiered = TieredInputs.of(plan)
        self._inputs = StepInputs(
            device,
            tokens,
            rows,
            width,
            len(plan.kv.windows),
            num_gpu=NO_HOST_TIER if self._tiered is None else self._tiered.num_gpu,
            num_host=0 if self._tiered is None else self._tiered.width,
        )
        self.kv_in_place_bytes = 0
        """Keys and values that decodes read in the host tier so far."""
        self._graphs: dict[tuple[int, int], tuple[Graph, int, int]] = {}
        self._shape: tuple[int, int] | None = None
        """Decode rows and tokens of prompts of the newest inputs; None: of no such size."""
        self.graph_steps = 0
        self._replayed_copies = 0
        self._replayed_reads = 0

    def prepare(self, plan: StepPlan, tokens: torch.Tensor | None = None) -> Batch:
        """Fill the input buffers and enqueue their upload.

        Args:
            plan: What runs.
            tokens: int64 on the device, the tokens of the step before by row of its `sampling`;
                needed where the plan was made ahead. They are read on the device, behind the
                sampling of that step, and not here.

        Returns:
            The inputs on the device.
        """
        self._shape = None
        if plan.prefills:
            if self._tiered is not None:
                plain, staged = self._tiered.split(plan.prefills)
                if staged:
                    return self._prepare_staged(self._tiered, plan, plain, staged, tokens)
            return self._prepare_prefills(plan, tokens)
        size = len(plan.decodes)
        if self._plan.graph_sizes:
            size = pad_batch(size)
        self._inputs.begin(size, size)
        self._fill_decodes(plan.decodes, size)
        self._inputs.send(tokens)
        self._shape = size, 0
        return self._decode_batch(size, max(item.stop for item in plan.decodes))

    def _prepare_prefills(self, plan: StepPlan, tokens: torch.Tensor | None) -> Batch:
        """Prompts beside decodes; padded where a graph holds so many."""
        inputs, prefills = self._inputs, plan.prefills
        rows, num_tokens = len(plan.decodes), sum(item.num_tokens for item in prefills)
        num_prefills, most_tokens = len(prefills), max(item.num_tokens for item in prefills)
        num_wanted = len(plan.sampling)
        self._shape = self._prefill_shape(rows, num_tokens, num_prefills)
        if self._shape is not None:
            rows, num_tokens = self._shape
            num_prefills, most_tokens = PREFILL_SEQUENCES, num_tokens
            num_wanted = self._num_wanted(rows)
        inputs.begin(rows + num_tokens, rows + num_prefills)
        self._fill_decodes(plan.decodes, rows)
        starts = self._fill_prefills(prefills, rows)
        self._fill_padding(rows + starts[-1], rows + num_tokens)
        inputs.lens.host[rows + len(prefills) :] = 0
        starts += starts[-1:] * (num_prefills - len(prefills))
        wanted = _wanted_tokens(plan, rows)
        wanted += [0] * (num_wanted - len(wanted))
        longest = max((item.stop for item in plan.decodes), default=0)
        batch = self._prefill_batch(rows, starts, wanted, most_tokens, longest)
        inputs.send(tokens)
        return batch

    def _prepare_staged(
        self,
        tiered: TieredInputs,
        plan: StepPlan,
        plain: SequenceOf[ScheduledSequence],
        staged: SequenceOf[StagedItem],
        tokens: torch.Tensor | None,
    ) -> Batch:
        """Prompts beside decodes, some of them over blocks of both tiers; not padded."""
        inputs, rows = self._inputs, len(plan.decodes)
        order = [*plain, *(item for item, _ in staged)]
        inputs.begin(rows + sum(item.num_tokens for item in order), rows + len(order))
        self._fill_decodes(plan.decodes, rows)
        starts = self._fill_prefills(order, rows)
        last = {id(item): rows + end - 1 for item, end in zip(order, starts[1:], strict=True)}
        wanted = [*range(rows), *(last[id(item)] for item in plan.prefills if item.samples)]
        longest = max((item.stop for item in plan.decodes), default=0)
        most_tokens = max((item.num_tokens for item in plain), default=0)
        batch = self._prefill_batch(rows, starts, wanted, most_tokens, longest)
        num_plain = len(plain)
        parts = enumerate(zip(staged, starts[num_plain:], strict=False), start=rows + num_plain)
        batch = replace(
            batch,
            prefill_starts=inputs.add(starts[: num_plain + 1], torch.int32) if plain else None,
            staged=tuple(
                tiered.stage(inputs, row, rows + start, item, places)
                for row, ((item, places), start) in parts
            ),
        )
        inputs.send(tokens)
        return batch

    def _prefill_shape(
        self, num_decodes: int, num_tokens: int, num_prefills: int
    ) -> tuple[int, int] | None:
        """Return what a step is padded to, the same in every placement; None: nothing."""
        if num_prefills > PREFILL_SEQUENCES:
            return None
        holding = (
            size
            for size in self._plan.prefill_sizes
            if size[0] >= num_decodes and size[1] >= num_tokens
        )
        return min(holding, default=None)

    def _num_wanted(self, decodes: int) -> int:
        """Rows of logits of a captured step with prompts."""
        return min(decodes + PREFILL_SEQUENCES, pad_batch(self._plan.max_num_seqs))

    def _prefill_batch(
        self,
        decodes: int,
        starts: SequenceOf[int],
        wanted: SequenceOf[int],
        most_tokens: int,
        longest: int,
    ) -> Batch:
        """The batch of what is in the input buffers, prompts among it; `send` follows."""
        inputs, rows = self._inputs, decodes + len(starts) - 1
        window_slots, window_tables = self._window_part(rows)
        return Batch(
            input_ids=inputs.ids.device,
            positions=inputs.positions.device,
            slots=inputs.slots.device,
            block_tables=inputs.tables[:rows],
            window_slots=window_slots,
            window_tables=window_tables,
            seq_lens=inputs.lens.device,
            num_decodes=decodes,
            max_decode_len=longest,
            prefill_starts=inputs.add(starts, torch.int32),
            max_prefill_tokens=most_tokens,
            logits_rows=inputs.add(wanted, torch.int64),
        )

    def _window_part(self, rows: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Slots and block tables of layers with a window, where they are a group of their own."""
        slots, tables = self._inputs.window_slots, self._inputs.window_tables
        if slots is None or tables is None:
            return None, None
        return slots.device, tables[:rows]

    def _decode_batch(self, size: int, max_len: int) -> Batch:
        inputs = self._inputs
        window_slots, window_tables = self._window_part(size)
        return Batch(
            input_ids=inputs.ids.device,
            positions=inputs.positions.device,
            slots=inputs.slots.device,
            block_tables=inputs.tables[:size],
            window_slots=window_slots,
            window_tables=window_tables,
            seq_lens=inputs.lens.device,
            num_decodes=size,
            max_decode_len=max_len,
            prefill_starts=None,
            max_prefill_tokens=0,
            logits_rows=None,
        )

    def _fill_decodes(self, decodes: SequenceOf[ScheduledSequence], size: int) -> None:
        """Write the rows of decodes, then padding up to `size` rows."""
        inputs, block_size = self._inputs, self._plan.block_size
        positions: list[int] = []
        for row, item in enumerate(decodes):
            sequence, position = item.sequence, item.start
            if item.token_row is None:
                inputs.ids.host[row] = sequence.last_token_id
            else:
                inputs.set_unknown(row, item.token_row)
            positions.append(position)
            inputs.set_table(row, sequence)
        count = len(decodes)
        self._fill_padding(count, size)
        inputs.lens.host[count:size] = 0
        inputs.positions.host[:count] = positions
        for field, group in self._slot_fields():
            field.host[:count] = [
                item.sequence.block_tables[group][item.start // block_size] * block_size
                + item.start % block_size
                for item in decodes
            ]
        inputs.lens.host[:count] = inputs.positions.host[:count] + 1
        if self._tiered is not None:
            self.kv_in_place_bytes += self._tiered.read_bytes(inputs, decodes)

    def _slot_fields(self) -> list[tuple[Field, int]]:
        """Where the slots of each group of layers are written."""
        fields = [(self._inputs.slots, 0)]
        if self._inputs.window_slots is not None:
            fields.append((self._inputs.window_slots, 1))
        return fields

    def _fill_padding(self, start: int, stop: int) -> None:
        """Write tokens that go nowhere."""
        inputs = self._inputs
        inputs.ids.host[start:stop] = 0
        inputs.positions.host[start:stop] = 0
        for field, _ in self._slot_fields():
            field.host[start:stop] = -1

    def _fill_prefills(self, prefills: SequenceOf[ScheduledSequence], at: int) -> list[int]:
        """Write the prefills' tokens behind `at` decodes; return where each starts and the end."""
        inputs, block_size = self._inputs, self._plan.block_size
        starts = [0]
        first = at
        for row, item in enumerate(prefills, start=at):
            stop = first + item.num_tokens
            inputs.ids.host[first:stop] = item.token_ids
            positions = np.arange(item.start, item.stop)
            inputs.positions.host[first:stop] = positions
            for field, group in self._slot_fields():
                table = np.asarray(item.sequence.block_tables[group], dtype=np.int64)
                blocks = table[positions // block_size]
                field.host[first:stop] = blocks * block_size + positions % block_size
            inputs.lens.host[row] = item.stop
            inputs.set_table(row, item.sequence)
            starts.append(stop - at)
            first = stop
        return starts

    def execute(self, batch: Batch) -> torch.Tensor:
        """Run the newest batch; return float32 logits [R, V], a row per wanted token, then padding.

        Stream: enqueued on the current stream. The tensor may be overwritten by the next step.
        """
        captured = None if self._shape is None else self._graphs.get(self._shape)
        if captured is None:
            return self._decoder.forward(batch)
        self._replay(batch.num_tokens, captured)
        self.graph_steps += 1
        rows = batch.num_tokens if batch.logits_rows is None else batch.logits_rows.shape[0]
        return self._decoder.logits[:rows]

    def _replay(self, size: int, captured: tuple[Graph, int, int]) -> None:
        graph, copied, read = captured
        # A step that failed amid its layers left other layers in the slots than the graph expects.
        store = self._decoder.weights
        store.begin_step(size)
        store.end_step()
        graph.replay()
        self._replayed_copies += copied
        self._replayed_reads += read

    def replay_only(self, size: int) -> None:
        """Enqueue the graph of `size` rows once more, on the newest step's inputs.

        For measuring what a step costs beside its graph. It computes the newest step's keys,
        values and logits again and changes no sequence; it counts as moved bytes, not as a step.

        Args:
            size: Rows of the newest step, padding included.

        Raises:
            EngineError: No graph of that size was captured, or the newest step was another one.

        Stream: Enqueued on the current stream; nothing is waited for.
        """
        captured = self._graphs.get((size, 0))
        if captured is None:
            raise EngineError(
                f"replay: expected a captured size, one of {self.captured_sizes}, got {size}."
            )
        if self._shape != (size, 0):
            decodes, prefill = self._shape or (0, 1)
            newest = "one with a prefill, or none" if prefill else decodes
            raise EngineError(
                f"replay: expected the newest step to be a decode of {size} rows, got {newest}. "
                "Step until it is."
            )
        self._replay(size, captured)

    def mark(self) -> Mark:
        """Return a point behind everything that is enqueued so far."""
        return self._device.mark()

    def capture(self) -> None:
        """Capture every planned step, the largest first."""
        stage = self._plan.stage_tokens
        for size in sorted(self._plan.graph_sizes, reverse=True):
            if stage is None or size < stage:
                self._capture((size, 0), self._padding_decode(size))
        for decodes, tokens in sorted(self._plan.captured_prefills, reverse=True):
            self._capture((decodes, tokens), self._padding_prefill(decodes, tokens))

    def _capture(self, shape: tuple[int, int], batch: Batch) -> None:
        run, store = partial(self._decoder.forward, batch), self._decoder.weights
        run()
        self._device.synchronize()
        copied, read = store.copied_bytes, store.in_place_bytes
        graph = self._device.new_graph(run)
        counts = store.copied_bytes - copied, store.in_place_bytes - read
        self._graphs[shape] = (graph, *counts)
        # Capturing counted the bytes, but moved none.
        self._replayed_copies -= counts[0]
        self._replayed_reads -= counts[1]

    def _padding_decode(self, size: int) -> Batch:
        """A captured decode in which no row is a sequence."""
        self._inputs.begin(size, size)
        self._fill_padding(0, size)
        self._inputs.lens.host[:] = 0
        self._inputs.send(None)
        return self._decode_batch(size, self._plan.max_model_len)

    def _padding_prefill(self, decodes: int, tokens: int) -> Batch:
        """A captured step with prompts in which no token is one of a sequence."""
        inputs = self._inputs
        inputs.begin(decodes + tokens, decodes + PREFILL_SEQUENCES)
        self._fill_padding(0, decodes + tokens)
        inputs.lens.host[:] = 0
        starts, wanted = [0] * (PREFILL_SEQUENCES + 1), [0] * self._num_wanted(decodes)
        batch = self._prefill_batch(decodes, starts, wanted, tokens, self._plan.max_model_len)
        inputs.send(None)
        return batch

    def warm_up(self, num_tokens: int) -> None:
        """Run prefills of padding and a decode, so that kernels are compiled and loaded.

        Args:
            num_tokens: Of the largest prefill, in as many sequences as it takes.
        """
        plan = self._plan
        # Products of few tokens have kernels of their own for up to 16, 32 and 64 of them.
        few = () if plan.facts.emulated else (16, 32, MAX_SMALL_TOKENS)
        for size in sorted({num_tokens, *few}, reverse=True):
            self._warm_up_prefill(min(size, plan.max_num_batched_tokens))
        inputs = self._inputs
        inputs.begin(1, 1)
        self._fill_padding(0, 1)
        inputs.lens.host[:] = 0
        inputs.set_unknown(0, 0)
        inputs.send(torch.zeros(1, dtype=torch.int64, device=self._device.torch_device))
        self._decoder.forward(self._decode_batch(1, plan.max_model_len))
        self._device.synchronize()
        if self._tiered is not None:
            self._warm_up_staged(self._tiered)

    def _warm_up_prefill(self, num_tokens: int) -> None:
        plan = self._plan
        longest = min(num_tokens, plan.max_model_len)
        rows = min(num_tokens // longest, plan.max_num_seqs)
        count = rows * longest
        inputs = self._inputs
        inputs.begin(count, rows)
        self._fill_padding(0, count)
        inputs.lens.host[:] = longest
        starts, wanted = range(0, count + 1, longest), range(longest - 1, count, longest)
        batch = self._prefill_batch(0, starts, wanted, longest, 0)
        inputs.send(None)
        self._decoder.forward(batch)
        self._device.synchronize()

    def _warm_up_staged(self, tiered: TieredInputs) -> None:
        """Run a prefill of padding whose keys lie in the host tier, in as many pieces as differ."""
        longest = min(3 * PIECE_KEYS, self._plan.max_model_len)
        inputs, count = self._inputs, min(2, longest)
        inputs.begin(count, 1)
        self._fill_padding(0, count)
        inputs.lens.host[:] = longest
        batch = self._prefill_batch(0, [0, count], [count - 1], 0, 0)
        staged = tiered.padding(inputs, count, longest)
        inputs.send(None)
        self._decoder.forward(replace(batch, prefill_starts=None, staged=(staged,)))
        inputs.tables.zero_()  # padding of later steps names blocks that are there
        self._device.synchronize()
        if self._decoder.stages is not None:
            self._decoder.stages.staged_bytes = 0

    @property
    def is_tiered(self) -> bool:
        """Whether sequences may own blocks of the host tier, which compute reads in place."""
        return self._tiered is not None

    @property
    def staged_prefill_bytes(self) -> int:
        """Keys and values copied from the host tier for prefills so far."""
        stages = self._decoder.stages
        return 0 if stages is None else stages.staged_bytes

    @property
    def captured_sizes(self) -> list[int]:
        """Decode batch sizes that run as graphs."""
        return sorted(decodes for decodes, tokens in self._graphs if not tokens)

    @property
    def captured_prefills(self) -> list[tuple[int, int]]:
        """Decode rows and tokens of prompts of steps with prompts that run as graphs."""
        return sorted(shape for shape in self._graphs if shape[1])

    @property
    def copied_bytes(self) -> int:
        """Weight bytes copied host to device since the load, replayed ones included."""
        return self._decoder.weights.copied_bytes + self._replayed_copies

    @property
    def in_place_bytes(self) -> int:
        """Weight bytes read in place since the load, replayed ones included."""
        return self._decoder.weights.in_place_bytes + self._replayed_reads

    def close(self) -> None:
        """Release graphs before the buffers that they use."""
        self._graphs.clear()


def _wanted_tokens(plan: StepPlan, decodes: int) -> list[int]:
    """Return the tokens whose logits are wanted, in the order of plan.sampling.

    Args:
        plan: What runs.
        decodes: Decode rows, padding included; prompts follow them.
    """
    wanted, at = list(range(len(plan.decodes))), decodes
    for item in plan.prefills:
        at += item.num_tokens
        if item.samples:
            wanted.append(at - 1)
    return wanted
