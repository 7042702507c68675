"""BatchBuilder: a StepPlan becomes a Batch of device tensors."""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np
import torch

from engine.batch import Batch
from engine.device.base import Device
from engine.inputs import NO_HOST_TIER, StepInputs
from engine.kv.pieces import PIECE_KEYS
from engine.plan import MemoryPlan
from engine.sizes import PREFILL_SEQUENCES, pad_batch, padded_prefill
from engine.step_graphs import StepShape
from engine.step_plan import ScheduledSequence, StepPlan
from engine.tiered_inputs import StagedItem, TieredInputs


class BatchBuilder:
    """Owns the input buffers; pads steps to sizes that graphs have.

    Everything is only enqueued, on the current stream. Batches of padding hold no sequence; they
    are for warming up and capturing.

    Args:
        plan: The memory plan in force.
        device: Where the inputs go.
    """

    def __init__(self, plan: MemoryPlan, device: Device) -> None:
        self._plan, self._device = plan, device
        rows = pad_batch(plan.max_num_seqs)
        tokens = max(plan.max_num_batched_tokens, rows)
        rows += PREFILL_SEQUENCES
        width = -(-plan.max_model_len // plan.block_size)
        self.tiered = TieredInputs.of(plan)
        """None where sequences own no blocks of the host tier."""
        self.inputs = StepInputs(
            device,
            tokens,
            rows,
            width,
            len(plan.kv.groups),
            num_gpu=NO_HOST_TIER if self.tiered is None else self.tiered.num_gpu,
            num_host=0 if self.tiered is None else self.tiered.width,
            beside_moves=plan.host_kv is not None,
        )
        self.shape: StepShape | None = None
        """Of the newest batch; None: padded to none."""
        self.kv_in_place_bytes = 0
        """Keys and values that decodes read in the host tier so far."""

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
        self.shape = None
        if plan.prefills:
            if self.tiered is not None:
                plain, staged = self.tiered.split(plan.prefills)
                if staged:
                    return self._prepare_staged(self.tiered, plan, plain, staged, tokens)
            return self._prepare_prefills(plan, tokens)
        size = len(plan.decodes)
        if self._plan.graph_sizes:
            size = pad_batch(size)
        self.inputs.begin(size, size)
        reads_host = self._fill_decodes(plan.decodes, size)
        self.inputs.send(tokens)
        self.shape = StepShape(size, 0, reads_host)
        longest = max(item.stop for item in plan.decodes)
        return self._decode_batch(size, longest, reads_host=reads_host)

    def _prepare_prefills(self, plan: StepPlan, tokens: torch.Tensor | None) -> Batch:
        """Prompts beside decodes; padded where a graph holds so many."""
        inputs, prefills = self.inputs, plan.prefills
        rows, num_tokens = len(plan.decodes), sum(item.num_tokens for item in prefills)
        num_prefills, most_tokens = len(prefills), max(item.num_tokens for item in prefills)
        num_wanted = len(plan.sampling)
        # The same in every placement.
        padded = padded_prefill(self._plan.prefill_sizes, rows, num_tokens, num_prefills)
        if padded is not None:
            rows, num_tokens = padded
            num_prefills, most_tokens = PREFILL_SEQUENCES, num_tokens
            num_wanted = self._num_wanted(rows)
        inputs.begin(rows + num_tokens, rows + num_prefills)
        reads_host = self._fill_decodes(plan.decodes, rows)
        starts = self._fill_prefills(prefills, rows)
        self._fill_padding(rows + starts[-1], rows + num_tokens)
        inputs.lens.host[rows + len(prefills) :] = 0
        starts += starts[-1:] * (num_prefills - len(prefills))
        wanted = _wanted_tokens(plan, rows)
        wanted += [0] * (num_wanted - len(wanted))
        longest = max((item.stop for item in plan.decodes), default=0)
        batch = self._prefill_batch(
            rows, starts, wanted, most_tokens, longest, reads_host=reads_host
        )
        inputs.send(tokens)
        if padded is not None:
            self.shape = StepShape(*padded, reads_host)
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
        inputs, rows = self.inputs, len(plan.decodes)
        order = [*plain, *(item for item, _ in staged)]
        inputs.begin(rows + sum(item.num_tokens for item in order), rows + len(order))
        reads_host = self._fill_decodes(plan.decodes, rows)
        starts = self._fill_prefills(order, rows)
        last = {id(item): rows + end - 1 for item, end in zip(order, starts[1:], strict=True)}
        wanted = [*range(rows), *(last[id(item)] for item in plan.prefills if item.samples)]
        longest = max((item.stop for item in plan.decodes), default=0)
        most_tokens = max((item.num_tokens for item in plain), default=0)
        batch = self._prefill_batch(
            rows, starts, wanted, most_tokens, longest, reads_host=reads_host
        )
        num_plain = len(plain)
        parts = enumerate(zip(staged, starts[num_plain:-1], strict=True), start=rows + num_plain)
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
        *,
        reads_host: bool = False,
    ) -> Batch:
        """The batch of what is in the input buffers, prompts among it; `send` follows."""
        return replace(
            self._batch(decodes, decodes + len(starts) - 1, longest, reads_host=reads_host),
            prefill_starts=self.inputs.add(starts, torch.int32),
            max_prefill_tokens=most_tokens,
            logits_rows=self.inputs.add(wanted, torch.int64),
        )

    def _batch(self, decodes: int, rows: int, max_len: int, *, reads_host: bool) -> Batch:
        inputs = self.inputs
        return Batch(
            input_ids=inputs.ids.device,
            positions=inputs.positions.device,
            slots=tuple(slots.device for slots in inputs.slots),
            block_tables=tuple(table[:rows] for table in inputs.tables),
            seq_lens=inputs.lens.device,
            num_decodes=decodes,
            max_decode_len=max_len,
            prefill_starts=None,
            max_prefill_tokens=0,
            logits_rows=None,
            reads_host=reads_host,
        )

    def _decode_batch(self, size: int, max_len: int, *, reads_host: bool) -> Batch:
        """The batch of decodes alone that is in the input buffers."""
        return self._batch(size, size, max_len, reads_host=reads_host)

    def _fill_decodes(self, decodes: SequenceOf[ScheduledSequence], size: int) -> bool:
        """Write the rows of decodes, then padding up to `size` rows.

        Returns:
            Whether one of them reads blocks in the host tier.
        """
        inputs, block_size = self.inputs, self._plan.block_size
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
        for group, field in enumerate(inputs.slots):
            field.host[:count] = [
                item.sequence.block_tables[group][item.start // block_size] * block_size
                + item.start % block_size
                for item in decodes
            ]
        inputs.lens.host[:count] = inputs.positions.host[:count] + 1
        read_bytes = 0 if self.tiered is None else self.tiered.read_bytes(inputs, decodes)
        self.kv_in_place_bytes += read_bytes
        return read_bytes > 0

    def _fill_padding(self, start: int, stop: int) -> None:
        """Write tokens that go nowhere."""
        inputs = self.inputs
        inputs.ids.host[start:stop] = 0
        inputs.positions.host[start:stop] = 0
        for field in inputs.slots:
            field.host[start:stop] = -1

    def _fill_prefills(self, prefills: SequenceOf[ScheduledSequence], at: int) -> list[int]:
        """Write the prefills' tokens behind `at` decodes; return where each starts and the end."""
        inputs, block_size = self.inputs, self._plan.block_size
        starts = [0]
        first = at
        for row, item in enumerate(prefills, start=at):
            stop = first + item.num_tokens
            inputs.ids.host[first:stop] = item.token_ids
            positions = np.arange(item.start, item.stop)
            inputs.positions.host[first:stop] = positions
            for group, field in enumerate(inputs.slots):
                table = np.asarray(item.sequence.block_tables[group], dtype=np.int64)
                blocks = table[positions // block_size]
                field.host[first:stop] = blocks * block_size + positions % block_size
            inputs.lens.host[row] = item.stop
            inputs.set_table(row, item.sequence)
            starts.append(stop - at)
            first = stop
        return starts

    def padding_decode(self, size: int, *, reads_host: bool = False) -> Batch:
        """Return a captured decode of padding."""
        self.inputs.begin(size, size)
        self._fill_padding(0, size)
        self.inputs.lens.host[:] = 0
        self.inputs.send(None)
        return self._decode_batch(size, self._plan.max_model_len, reads_host=reads_host)

    def padding_prefill(self, decodes: int, tokens: int) -> Batch:
        """Return a captured step with prompts, all padding."""
        inputs = self.inputs
        inputs.begin(decodes + tokens, decodes + PREFILL_SEQUENCES)
        self._fill_padding(0, decodes + tokens)
        inputs.lens.host[:] = 0
        starts, wanted = [0] * (PREFILL_SEQUENCES + 1), [0] * self._num_wanted(decodes)
        batch = self._prefill_batch(decodes, starts, wanted, tokens, self._plan.max_model_len)
        inputs.send(None)
        return batch

    def padding_prompts(self, num_tokens: int) -> Batch:
        """Return prompts of padding of so many tokens, in as many sequences as it takes."""
        plan = self._plan
        longest = min(num_tokens, plan.max_model_len)
        rows = min(num_tokens // longest, plan.max_num_seqs)
        count = rows * longest
        inputs = self.inputs
        inputs.begin(count, rows)
        self._fill_padding(0, count)
        inputs.lens.host[:] = longest
        starts, wanted = range(0, count + 1, longest), range(longest - 1, count, longest)
        batch = self._prefill_batch(0, starts, wanted, longest, 0)
        inputs.send(None)
        return batch

    def padding_staged(self, tiered: TieredInputs) -> Batch:
        """Return a prompt of padding with keys in the host tier, in as many pieces as differ.

        Block tables name its blocks until `forget_tables`.
        """
        longest = min(3 * PIECE_KEYS, self._plan.max_model_len)
        inputs, count = self.inputs, min(2, longest)
        inputs.begin(count, 1)
        self._fill_padding(0, count)
        inputs.lens.host[:] = longest
        batch = self._prefill_batch(0, [0, count], [count - 1], 0, 0)
        staged = tiered.padding(inputs, count, longest)
        inputs.send(None)
        return replace(batch, prefill_starts=None, staged=(staged,))

    def forget_tables(self) -> None:
        """Let padding of later steps name blocks that are there.

        Stream: enqueued on the current stream.
        """
        self.inputs.tables[0].zero_()

    def padding_unknown(self, *, reads_host: bool) -> Batch:
        """Return a decode of one row of padding whose token is read on the device."""
        inputs = self.inputs
        inputs.begin(1, 1)
        self._fill_padding(0, 1)
        inputs.lens.host[:] = 0
        inputs.set_unknown(0, 0)
        inputs.send(torch.zeros(1, dtype=torch.int64, device=self._device.torch_device))
        return self._decode_batch(1, self._plan.max_model_len, reads_host=reads_host)


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
