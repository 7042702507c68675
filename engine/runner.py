"""ModelRunner: a StepPlan becomes a Batch of device tensors, and the Batch becomes logits."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from engine.batch import Batch
from engine.device.base import Device, Graph
from engine.models.decoder import Decoder
from engine.plan import MemoryPlan
from engine.sizes import pad_batch
from engine.step_plan import ScheduledSequence, StepPlan


@dataclass
class _Upload:
    """One input of a step: a host tensor, its NumPy view, and its place on the device."""

    host: torch.Tensor
    array: np.ndarray
    device: torch.Tensor

    @classmethod
    def of(cls, device: Device, shape: tuple[int, ...], dtype: torch.dtype) -> "_Upload":
        host = device.upload_buffer(shape, dtype)
        return cls(host, host.numpy(), torch.zeros(shape, dtype=dtype, device=device.torch_device))

    def send(self, count: int) -> torch.Tensor:
        """Copy the first `count` rows on the compute stream; return them on the device."""
        target = self.device[:count]
        target.copy_(self.host[:count], non_blocking=True)
        return target


class ModelRunner:
    """Owns the input buffers and the graphs; decides nothing.

    Host buffers are reused by the next step, so its results must have been read before.
    """

    def __init__(self, plan: MemoryPlan, decoder: Decoder, device: Device) -> None:
        self._plan, self._decoder, self._device = plan, decoder, device
        tokens = max(plan.max_num_batched_tokens, pad_batch(plan.max_num_seqs))
        rows = pad_batch(plan.max_num_seqs)
        width = -(-plan.max_model_len // plan.block_size)
        self._ids = _Upload.of(device, (tokens,), torch.int64)
        self._positions = _Upload.of(device, (tokens,), torch.int64)
        self._slots = _Upload.of(device, (tokens,), torch.int64)
        self._tables = _Upload.of(device, (rows, width), torch.int32)
        self._lens = _Upload.of(device, (rows,), torch.int32)
        self._starts = _Upload.of(device, (rows + 1,), torch.int32)
        self._logits_rows = _Upload.of(device, (rows,), torch.int64)
        self._rows: list[tuple[int, int, int]] = [(-1, 0, 0)] * rows
        self._graphs: dict[int, tuple[Graph, int, int]] = {}
        self.graph_steps = 0
        self._replayed_copies = 0
        self._replayed_reads = 0

    def prepare(self, plan: StepPlan) -> Batch:
        """Fill the input buffers and enqueue their upload."""
        if not plan.prefills:
            return self._prepare_decodes(plan.decodes)
        at = self._fill_decodes(plan.decodes)
        starts, longest = [0], 0
        for row, item in enumerate(plan.prefills, start=len(plan.decodes)):
            stop = at + item.num_tokens
            self._ids.array[at:stop] = item.token_ids
            positions = np.arange(item.start, item.stop)
            self._positions.array[at:stop] = positions
            table = np.asarray(item.sequence.block_table, dtype=np.int64)
            size = self._plan.block_size
            self._slots.array[at:stop] = table[positions // size] * size + positions % size
            self._lens.array[row] = item.stop
            self._fill_table(row, item)
            starts.append(starts[-1] + item.num_tokens)
            longest = max(longest, item.num_tokens)
            at = stop
        self._starts.array[: len(starts)] = starts
        wanted = self._wanted_rows(plan)
        rows = len(plan.decodes) + len(plan.prefills)
        return Batch(
            input_ids=self._ids.send(at),
            positions=self._positions.send(at),
            slots=self._slots.send(at),
            block_tables=self._tables.send(rows),
            seq_lens=self._lens.send(rows),
            num_decodes=len(plan.decodes),
            max_decode_len=max((item.stop for item in plan.decodes), default=0),
            prefill_starts=self._starts.send(len(starts)),
            max_prefill_tokens=longest,
            logits_rows=self._logits_rows.send(wanted),
        )

    def _prepare_decodes(self, decodes: SequenceOf[ScheduledSequence]) -> Batch:
        """A batch of decodes, padded to a captured size."""
        count = self._fill_decodes(decodes)
        size = pad_batch(count) if self._plan.graph_sizes else count
        self._ids.array[count:size] = 0
        self._positions.array[count:size] = 0
        self._slots.array[count:size] = -1
        self._lens.array[count:size] = 0
        self._ids.send(size)
        self._positions.send(size)
        self._slots.send(size)
        self._tables.send(size)
        self._lens.send(size)
        return self._decode_batch(size, max(item.stop for item in decodes))

    def _decode_batch(self, size: int, max_len: int) -> Batch:
        return Batch(
            input_ids=self._ids.device[:size],
            positions=self._positions.device[:size],
            slots=self._slots.device[:size],
            block_tables=self._tables.device[:size],
            seq_lens=self._lens.device[:size],
            num_decodes=size,
            max_decode_len=max_len,
            prefill_starts=None,
            max_prefill_tokens=0,
            logits_rows=None,
        )

    def _fill_decodes(self, decodes: SequenceOf[ScheduledSequence]) -> int:
        size = self._plan.block_size
        for row, item in enumerate(decodes):
            position = item.start
            self._ids.array[row] = item.sequence.last_token_id
            self._positions.array[row] = position
            block = item.sequence.block_table[position // size]
            self._slots.array[row] = block * size + position % size
            self._lens.array[row] = position + 1
            self._fill_table(row, item)
        return len(decodes)

    def _fill_table(self, row: int, item: ScheduledSequence) -> None:
        """Write a row of the block table; only what is new where the row held the same sequence."""
        sequence = item.sequence
        seq_id, preemptions, written = self._rows[row]
        if seq_id != sequence.seq_id or preemptions != sequence.num_preemptions:
            written = 0
        blocks = sequence.block_table
        self._tables.array[row, written : len(blocks)] = blocks[written:]
        self._rows[row] = (sequence.seq_id, sequence.num_preemptions, len(blocks))

    def _wanted_rows(self, plan: StepPlan) -> int:
        """Fill the tokens whose logits are wanted, in the order of plan.sampling."""
        wanted, at = list(range(len(plan.decodes))), len(plan.decodes)
        for item in plan.prefills:
            at += item.num_tokens
            if item.samples:
                wanted.append(at - 1)
        self._logits_rows.array[: len(wanted)] = wanted
        return len(wanted)

    def execute(self, batch: Batch) -> torch.Tensor:
        """Run a batch; return float32 logits [R, V], one row per wanted token, then padding.

        Stream: enqueued on the current stream. The tensor may be overwritten by the next step.
        """
        captured = self._graphs.get(batch.num_tokens) if batch.prefill_starts is None else None
        if captured is None:
            return self._decoder.forward(batch)
        graph, copied, read = captured
        # A step that failed amid its layers left other layers in the slots than the graph expects.
        store = self._decoder.weights
        store.begin_step(batch.num_tokens)
        store.end_step()
        graph.replay()
        self.graph_steps += 1
        self._replayed_copies += copied
        self._replayed_reads += read
        return self._decoder.logits[: batch.num_tokens]

    def wait(self) -> None:
        """Wait until the step's inputs have been read, where no token is read back."""
        self._device.wait_compute()

    def capture(self) -> None:
        """Capture decode at every planned size, the largest first."""
        for size in sorted(self._plan.graph_sizes, reverse=True):
            stage = self._plan.stage_tokens
            if stage is not None and size >= stage:
                continue
            self._slots.array[:size] = -1
            self._lens.array[:size] = 0
            self._ids.array[:size] = 0
            self._positions.array[:size] = 0
            for upload in (self._slots, self._lens, self._ids, self._positions):
                upload.send(size)
            run = partial(self._decoder.forward, self._decode_batch(size, self._plan.max_model_len))
            run()
            self._device.synchronize()
            store = self._decoder.weights
            copied, read = store.copied_bytes, store.in_place_bytes
            graph = self._device.new_graph(run)
            counts = store.copied_bytes - copied, store.in_place_bytes - read
            self._graphs[size] = (graph, *counts)
            # Capturing counted the bytes, but moved none.
            self._replayed_copies -= counts[0]
            self._replayed_reads -= counts[1]

    def warm_up(self, num_tokens: int) -> None:
        """Run a prefill of padding and a decode, so that kernels are compiled and loaded.

        Args:
            num_tokens: Of the prefill, in as many sequences as it takes.
        """
        plan = self._plan
        num_tokens = min(num_tokens, plan.max_num_batched_tokens)
        longest = min(num_tokens, plan.max_model_len)
        rows = min(num_tokens // longest, plan.max_num_seqs)
        count = rows * longest
        self._ids.array[:count] = 0
        self._positions.array[:count] = 0
        self._slots.array[:count] = -1
        self._lens.array[:rows] = longest
        self._tables.array[:rows] = 0
        self._starts.array[: rows + 1] = np.arange(rows + 1) * longest
        self._logits_rows.array[:rows] = np.arange(1, rows + 1) * longest - 1
        batch = Batch(
            input_ids=self._ids.send(count),
            positions=self._positions.send(count),
            slots=self._slots.send(count),
            block_tables=self._tables.send(rows),
            seq_lens=self._lens.send(rows),
            num_decodes=0,
            max_decode_len=0,
            prefill_starts=self._starts.send(rows + 1),
            max_prefill_tokens=longest,
            logits_rows=self._logits_rows.send(rows),
        )
        self._decoder.forward(batch)
        self._device.synchronize()  # the inputs have been read and may be written again
        self._lens.array[0] = 0
        self._lens.send(1)
        self._decoder.forward(self._decode_batch(1, plan.max_model_len))
        self._device.synchronize()

    @property
    def captured_sizes(self) -> list[int]:
        """Decode batch sizes that run as graphs."""
        return sorted(self._graphs)

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
