"""BatchBuilder: turn a StepPlan into device tensors, sent from pinned memory in one copy."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.asked.request import Sequence
from engine.device.base import Device
from engine.errors import EngineError
from engine.plan.memory import MemoryPlan
from engine.plan.sizes import PREFILL_SEQUENCES, pad_batch, padded_prefill
from engine.run.batch import PIECE_KEYS, Batch, PrefillPiece, StagedPrefill, cut_pieces, host_places
from engine.run.graphs import StepShape
from engine.schedule.step import ScheduledSequence, StepPlan

ALIGN_BYTES = 64
NO_HOST_TIER = 2**31 - 1
"""No block has a number as large."""


@dataclass(frozen=True, slots=True)
class Field:
    """One input: where the host writes it, and where the device reads it."""

    host: np.ndarray
    device: torch.Tensor


@dataclass(frozen=True, slots=True)
class Upload:
    """The device's part of sending a step's inputs."""

    host: torch.Tensor
    """uint8; in pinned memory, or that as kernels reach it."""
    device: torch.Tensor
    tables: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """int32 [rows in use, columns in use], in `device`, and where they belong."""
    ids: torch.Tensor
    """int64, in `device`."""
    places: torch.Tensor
    """int64, in `device`: ids that are unknown to the host."""
    token_rows: torch.Tensor
    """int64, in `device`: where they are among `tokens`."""
    tokens: torch.Tensor | None

    def run(self) -> None:
        """Enqueue the copy, spread the block tables, fill in unknown ids."""
        if self.host.is_cuda:
            words = self.host.view(torch.int64), self.device.view(torch.int64)
            torch.bitwise_or(words[0], 0, out=words[1])  # a kernel; `copy_` takes a copy engine
        else:
            self.device.copy_(self.host, non_blocking=True)
        for table, place in self.tables:
            if table.numel():
                place.copy_(table)
        if self.tokens is not None and self.places.numel():
            self.ids.index_copy_(0, self.places, self.tokens.index_select(0, self.token_rows))


class _Table:
    """The block tables of one group of layers: on the host as last written, and on the device."""

    def __init__(self, rows: int, width: int, device: torch.device, num_gpu: int) -> None:
        self.device = torch.zeros((rows, width), dtype=torch.int32, device=device)
        self.host = np.zeros((rows, width), dtype=np.int32)
        self.num_hosts = [0] * rows
        """Entries of each row that lie in the host tier."""
        self._num_gpu = num_gpu
        self._rows: list[tuple[int, int, int]] = [(-1, 0, 0)] * rows

    def write(self, row: int, sequence: Sequence, blocks: SequenceOf[int]) -> None:
        """Write a row; only what is new where it held the same sequence."""
        seq_id, version, written = self._rows[row]
        if seq_id != sequence.seq_id or version != sequence.table_version:
            written = self.num_hosts[row] = 0
        if written < len(blocks):
            new = self.host[row, written : len(blocks)]
            new[:] = blocks[written:]
            self.num_hosts[row] += int(np.count_nonzero(new >= self._num_gpu))
        self._rows[row] = (sequence.seq_id, sequence.table_version, len(blocks))

    def write_once(self, row: int, blocks: np.ndarray) -> None:
        """Write a row that is no sequence's table; whoever is next writes it whole."""
        self.host[row, : blocks.shape[0]] = blocks
        self._rows[row] = (-1, 0, 0)


class StepInputs:
    """The inputs of one step after the other.

    Between `begin` and `send` the host writes the fields of a step. Two host buffers are used in
    turn, because the copy of a step may wait on the device for the step before it: the buffer of a
    step is written again by the step after next, and before that the results of the first must
    have been waited for. On the device there is one buffer, because there steps run in order. The
    first fields lie where the step's numbers of tokens and rows put them, so that a graph finds
    the inputs of every step of its size.

    Block tables have a place of their own on the device, as wide as the longest sequence allows;
    the columns in use are sent with the rest and spread there.

    Args:
        device: Where the inputs go.
        tokens: Most tokens of a step.
        rows: Most sequences of a step.
        width: Most blocks of a sequence.
        num_groups: Groups of layers, each with slots and block tables of its own.
        num_gpu: Blocks of the first group with smaller numbers lie on the GPU.
        num_host: Most blocks of a sequence that lie in the host tier.
        beside_moves: Copy engines also move KV blocks; inputs go by a kernel where it can reach.
    """

    def __init__(
        self,
        device: Device,
        tokens: int,
        rows: int,
        width: int,
        num_groups: int = 1,
        *,
        num_gpu: int = NO_HOST_TIER,
        num_host: int = 0,
        beside_moves: bool = False,
    ) -> None:
        self.ids: Field
        """int64 [tokens]."""
        self.positions: Field
        """int64 [tokens]."""
        self.slots: tuple[Field, ...]
        """int64 [tokens] for each group."""
        self.lens: Field
        """int32 [rows]."""
        num_bytes = tokens * (2 + num_groups) * 8 + (8 + 2 * num_groups) * ALIGN_BYTES
        num_bytes += rows * (num_groups * width * 4 + 4 + 4 + 8 + 8 + 8)
        if num_host:
            num_bytes += rows * (num_host * 8 + 8 + 4 + 2 * ALIGN_BYTES) + 2 * ALIGN_BYTES
        self._hosts = [device.upload_buffer((num_bytes,), torch.uint8) for _ in range(2)]
        self._arrays = [host.numpy() for host in self._hosts]
        reached = [device.reach(host) if beside_moves else None for host in self._hosts]
        self._sources = [
            host if view is None else view for host, view in zip(self._hosts, reached, strict=True)
        ]
        at = device.torch_device
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=at)
        limits = (num_gpu, *[NO_HOST_TIER] * (num_groups - 1))
        self._tables = [_Table(rows, width, at, limit) for limit in limits]
        self._turn = self._at = 0
        self._used_rows = self._used_width = 0
        self._unknown: list[tuple[int, int]] = []

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """int32 [rows, width] on the device for each group; what is beyond a table is old."""
        return tuple(table.device for table in self._tables)

    def begin(self, num_tokens: int, num_rows: int) -> None:
        """Start the inputs of another step; its first fields may be written then."""
        self._turn = (self._turn + 1) % len(self._hosts)
        self._at = self._used_rows = self._used_width = 0
        self._unknown = []
        self.ids = self._take(num_tokens, torch.int64)
        self.positions = self._take(num_tokens, torch.int64)
        self.slots = tuple(self._take(num_tokens, torch.int64) for _ in self._tables)
        self.lens = self._take(num_rows, torch.int32)

    def _take(self, count: int, dtype: torch.dtype) -> Field:
        start, stop = self._at, self._at + count * dtype.itemsize
        self._at = -(-stop // ALIGN_BYTES) * ALIGN_BYTES
        device = self._device[start:stop].view(dtype)
        kind = np.int64 if dtype is torch.int64 else np.int32
        return Field(self._arrays[self._turn][start:stop].view(kind), device)

    def add(self, values: SequenceOf[int] | np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        """Append one more input, int64 or int32; return it on the device, valid after `send`."""
        field = self._take(len(values), dtype)
        field.host[:] = values
        return field.device

    def set_table(self, row: int, sequence: Sequence) -> None:
        """Write a row of the block tables; only what is new where it held the same sequence."""
        self._used_rows = max(self._used_rows, row + 1)
        self._used_width = max(self._used_width, len(sequence.block_table))
        for table, blocks in zip(self._tables, sequence.block_tables, strict=True):
            table.write(row, sequence, blocks)

    def set_staged_table(self, row: int, blocks: np.ndarray) -> None:
        """Write a row of the first group for one step only; `set_table` writes it anew.

        Args:
            row: The row.
            blocks: int64.
        """
        self._used_rows = max(self._used_rows, row + 1)
        self._used_width = max(self._used_width, blocks.shape[0])
        self._tables[0].write_once(row, blocks)

    def num_hosts(self, row: int) -> int:
        """Return how many blocks of a row's sequence lie in the host tier; of `set_table` only."""
        return self._tables[0].num_hosts[row]

    def set_unknown(self, place: int, token_row: int) -> None:
        """Let the id at `place` be the token that the step before samples in `token_row`."""
        self.ids.host[place] = 0
        self._unknown.append((place, token_row))

    def send(self, tokens: torch.Tensor | None) -> None:
        """Enqueue the copy of everything that was written, and fill in unknown ids.

        Args:
            tokens: int64 on the device, the newest step's sampled tokens by row; needed where an
                id is unknown.

        Raises:
            EngineError: An id is unknown and there are no tokens.

        Stream: Everything is enqueued on the current stream, where the step before samples.
        """
        if self._unknown and tokens is None:
            raise EngineError(
                f"inputs: expected the tokens that the step before samples, got none for "
                f"{len(self._unknown)} rows. A step planned ahead runs behind another."
            )
        rows, width = self._used_rows, self._used_width
        tables = []
        for each in self._tables:
            table = self._take(rows * width, torch.int32)
            table.host.reshape(rows, width)[:] = each.host[:rows, :width]
            tables.append((table.device.view(rows, width), each.device[:rows, :width]))
        places = self.add([place for place, _ in self._unknown], torch.int64)
        token_rows = self.add([row for _, row in self._unknown], torch.int64)
        Upload(
            host=self._sources[self._turn][: self._at],
            device=self._device[: self._at],
            tables=tuple(tables),
            ids=self.ids.device,
            places=places,
            token_rows=token_rows,
            tokens=tokens,
        ).run()


StagedItem = tuple[ScheduledSequence, np.ndarray]
"""A prefill, and the places of its host blocks in its block table."""


@dataclass(frozen=True)
class TieredInputs:
    """What a step needs to know of blocks that lie in the host tier.

    Blocks are those of the first group of layers; live blocks of the others all lie on the GPU.
    """

    num_gpu: int
    """Blocks on the GPU; those of the host tier have the numbers from it on."""
    block_size: int
    block_bytes: int
    stage_blocks: int
    """Blocks that a staging buffer holds."""
    width: int
    """Most blocks of a sequence in the host tier."""

    @classmethod
    def of(cls, plan: MemoryPlan) -> "TieredInputs | None":
        """Return what a plan gives; None where sequences own no blocks in the host tier."""
        host, group = plan.host_kv, plan.kv.groups[0]
        if host is None or not group.num_in_place:
            return None
        longest = -(-plan.max_model_len // plan.block_size)
        return cls(
            num_gpu=group.num_gpu_blocks,
            block_size=plan.block_size,
            block_bytes=group.block_bytes,
            stage_blocks=host.stage_blocks,
            width=min(longest, group.num_in_place),
        )

    def split(
        self, prefills: SequenceOf[ScheduledSequence]
    ) -> tuple[list[ScheduledSequence], list[StagedItem]]:
        """Part prefills whose keys all lie on the GPU from others.

        Returns:
            Those, and the others with the places of their host blocks in the table.
        """
        plain, staged = [], []
        for item in prefills:
            table = item.sequence.block_table
            places = host_places(table, item.stop, self.block_size, self.num_gpu)
            if places.size:
                staged.append((item, places))
            else:
                plain.append(item)
        return plain, staged

    def stage(
        self,
        inputs: StepInputs,
        row: int,
        first: int,
        item: ScheduledSequence,
        places: np.ndarray,
    ) -> StagedPrefill:
        """Write what one of the others needs beside its tokens, between `begin` and `send`.

        Args:
            inputs: Of the step.
            row: Its row of the block tables.
            first: Its first token among the step's.
            item: What runs.
            places: From `split`.
        """
        count = -(-item.stop // self.block_size)
        table = np.asarray(item.sequence.block_table[:count], dtype=np.int64)
        host_ids = table[places] - self.num_gpu
        table[places] = self._slots(places.size)
        inputs.set_staged_table(row, table)
        pieces = cut_pieces(places, item.stop, self.block_size, self.stage_blocks)
        return self._part(inputs, row, first, item.num_tokens, host_ids, pieces)

    def padding(self, inputs: StepInputs, num_tokens: int, num_keys: int) -> StagedPrefill:
        """Return the same for tokens of padding in row 0, with a piece for each PIECE_KEYS keys."""
        each = min(PIECE_KEYS // self.block_size, self.stage_blocks, self.width)
        table = np.zeros(-(-num_keys // self.block_size), dtype=np.int64)
        pieces = []
        for begin in range(0, num_keys, PIECE_KEYS):
            part = table[begin // self.block_size :][:each]
            part[:] = self._slots(len(part))
            end = min(num_keys, begin + PIECE_KEYS)
            pieces.append(PrefillPiece(begin, end, 0, len(part)))
        inputs.set_staged_table(0, table)
        host_ids = np.arange(each)
        return self._part(inputs, 0, 0, num_tokens, host_ids, tuple(pieces))

    def _slots(self, count: int) -> np.ndarray:
        """Return the numbers of blocks in staging buffers, the same whichever piece stages one."""
        return self.num_gpu + np.arange(count) % self.stage_blocks

    def _part(
        self,
        inputs: StepInputs,
        row: int,
        first: int,
        num_tokens: int,
        host_ids: np.ndarray,
        pieces: tuple[PrefillPiece, ...],
    ) -> StagedPrefill:
        return StagedPrefill(
            first=first,
            stop=first + num_tokens,
            table=inputs.tables[0][row : row + 1],
            starts=inputs.add([0, num_tokens], torch.int32),
            seq_len=inputs.lens.device[row : row + 1],
            host_ids=inputs.add(host_ids, torch.int64),
            pieces=pieces,
        )

    def read_bytes(self, inputs: StepInputs, decodes: SequenceOf[ScheduledSequence]) -> int:
        """Return the bytes that decodes read in the host tier, their tables being written."""
        size, tokens = self.block_size, 0
        for row, item in enumerate(decodes):
            count = inputs.num_hosts(row)
            if not count:
                continue
            table, need = item.sequence.block_table, -(-item.stop // size)
            unused = sum(block >= self.num_gpu for block in table[need:])
            lack = need * size - item.stop if table[need - 1] >= self.num_gpu else 0
            tokens += (count - unused) * size - lack
        return tokens * (self.block_bytes // size)


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
        """Shape of the newest batch; None: padded to none."""
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
            if item.token_rows:
                inputs.set_unknown(row, item.token_rows[0])
            else:
                inputs.ids.host[row] = sequence.last_token_id
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
