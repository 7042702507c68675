"""A StepPlan becomes a Batch: device tensors, sent from pinned memory in one copy."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from engine.asked.request import Sequence
from engine.device.base import Device
from engine.errors import EngineError
from engine.model.routing import first_row
from engine.plan.memory import MemoryPlan
from engine.plan.sizes import (
    PREFILL_SEQUENCES,
    HostKVPlan,
    KVGroup,
    pad_batch,
    padded_prefill,
)
from engine.run.stages import (
    PIECE_KEYS,
    AheadDecode,
    DecodePiece,
    PrefillPiece,
    StagedPrefill,
    cut_ahead,
    cut_pieces,
    host_places,
    with_runs,
)
from engine.schedule.step import ScheduledSequence, StepPlan
from kernels.sizes import DECODE_SPLIT_TOKENS

ALIGN_BYTES = 64
NO_HOST_TIER = 2**31 - 1
"""No block has a number as large."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of a step, packed: one per decode, then the prefills' parts, staged ones last.

    T tokens, S sequences (rows of the block table: decodes, then prefills), M blocks a sequence.
    Padded decode rows have slot -1 and length 0.
    """

    input_ids: torch.Tensor
    """int64 [T]."""
    positions: torch.Tensor
    """int64 [T]."""
    slots: tuple[torch.Tensor, ...]
    """int64 [T] for each group of layers: where a token's key and value go, block * block_size +
    offset; -1: nowhere."""
    block_tables: tuple[torch.Tensor, ...]
    """int32 [S, M] for each group; entries before its window are not valid."""
    seq_lens: torch.Tensor
    """int32 [S]: tokens in the cache once this step's are written."""
    num_decodes: int
    """Decode rows, padding included."""
    max_decode_len: int
    """Upper bound of the decodes' lengths; sizes the grid only."""
    prefill_starts: torch.Tensor | None
    """int32 [prefills + 1]: first token of each prefill, counted from the first prefill's; without
    those that are staged, None where there are no others."""
    max_prefill_tokens: int
    """Most tokens of one prefill."""
    logits_rows: torch.Tensor | None
    """int64 [R]: tokens whose logits are wanted; None: all."""
    staged: tuple[StagedPrefill, ...] = ()
    """Prefills over blocks of both tiers."""
    reads_host: bool = False
    """Whether a decode reads blocks in the host tier."""
    routes: torch.Tensor | None = None
    """int64 [T]: rows of the table of experts; None: the routers choose."""
    chosen: torch.Tensor | None = None
    """int32 [L, T, k]: what the table says of each layer with experts; None: the routers choose."""
    ahead: tuple[AheadDecode, ...] = ()
    """Decodes whose host blocks are copied to the GPU, in the order of their rows."""
    near_lens: torch.Tensor | None = None
    """int32 [decodes]: their `seq_lens`, but 0 of those in `ahead`; None: there are no others, or
    none in `ahead`."""
    scored: tuple[tuple[range, Callable[[torch.Tensor], None]], ...] = ()
    """Tokens whose logits are wanted beside those, and what takes them, float32 [n, V], in parts;
    they are overwritten afterwards."""

    @property
    def num_rows(self) -> int:
        """Rows of the block tables but for staged prefills, whose rows follow."""
        return int(self.seq_lens.shape[0]) - len(self.staged)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, padding included."""
        return int(self.input_ids.shape[0])

    @property
    def num_logits(self) -> int:
        """Rows of logits that are wanted."""
        wanted = self.input_ids if self.logits_rows is None else self.logits_rows
        return int(wanted.shape[0])


class StepShape(NamedTuple):
    """What a step is padded to, and so which graph runs it."""

    decodes: int
    """Rows that decode."""
    tokens: int = 0
    """Tokens of prompts."""
    reads_host: bool = False
    """Whether a decode reads blocks in the host tier, for which attention has a kernel variant."""


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

    They hold steps of `tokens` and `rows` (sequences) with `width` blocks each, of which `num_host`
    may lie in the host tier: those of the first group with numbers from `num_gpu` on. With
    `beside_moves` inputs go by a kernel where it can reach, as copy engines also move KV blocks.
    With `has_routes` tokens have a row of a table of experts each.
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
        has_routes: bool = False,
    ) -> None:
        self.ids: Field
        """int64 [tokens]."""
        self.positions: Field
        """int64 [tokens]."""
        self.slots: tuple[Field, ...]
        """int64 [tokens] for each group."""
        self.lens: Field
        """int32 [rows]."""
        self.routes: Field | None = None
        """int64 [tokens]; None without a table of experts."""
        self._has_routes = has_routes
        num_fields = 2 + num_groups + has_routes
        num_bytes = tokens * num_fields * 8 + (9 + 2 * num_groups) * ALIGN_BYTES
        num_bytes += rows * (num_groups * width * 4 + 4 + 4 + 8 + 8 + 8)
        if num_host:
            num_bytes += rows * (num_host * 8 + 8 + 4 + 2 * ALIGN_BYTES) + 2 * ALIGN_BYTES
        self._hosts = [device.upload_buffer((num_bytes,), torch.uint8) for _ in range(2)]
        self._arrays = [host.numpy() for host in self._hosts]
        self._sources = [device.reach(host) if beside_moves else host for host in self._hosts]
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
        if self._has_routes:
            self.routes = self._take(num_tokens, torch.int64)

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
        """Write a row of the first group, int64, for one step only; `set_table` writes it anew."""
        self._used_rows = max(self._used_rows, row + 1)
        self._used_width = max(self._used_width, blocks.shape[0])
        self._tables[0].write_once(row, blocks)

    def table_row(self, row: int, num_blocks: int) -> np.ndarray:
        """Return the first blocks of a row of the first group as last written, int32."""
        return self._tables[0].host[row, :num_blocks]

    def num_hosts(self, row: int) -> int:
        """Return how many blocks of a row's sequence lie in the host tier; of `set_table` only."""
        return self._tables[0].num_hosts[row]

    def set_unknown(self, place: int, token_row: int) -> None:
        """Let the id at `place` be the token that the step before samples in `token_row`."""
        self.ids.host[place] = 0
        self._unknown.append((place, token_row))

    def send(self, tokens: torch.Tensor | None) -> None:
        """Enqueue the copy of everything that was written, and fill in unknown ids.

        Unknown ids come from `tokens`, int64 on the device, the newest step's sampled ones by row.

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


class TieredInputs:
    """What a step needs to know of blocks that lie in the host tier, where sequences own such.

    Blocks are those of the first group of layers; live blocks of the others all lie on the GPU.
    """

    def __init__(self, plan: MemoryPlan, group: KVGroup, host: HostKVPlan) -> None:
        self.num_gpu = group.num_gpu_blocks
        """Blocks on the GPU; those of the host tier have the numbers from it on."""
        self.block_size, self.block_bytes = plan.block_size, group.block_bytes
        self.layer_bytes = group.layer_bytes
        self.stage_blocks = host.stage_blocks
        """Blocks that a staging buffer holds."""
        self.width = min(-(-plan.max_model_len // plan.block_size), group.num_in_place)
        """Most blocks of a sequence in the host tier."""
        copies = self._copies = host.copy_ahead
        self._least_run = None if copies is None else -(-copies.run_bytes // group.layer_bytes)
        """Neighbouring blocks from which on a copy engine copies them; None: never."""

    @property
    def copies_ahead(self) -> bool:
        """Whether a decode's host blocks may be copied ahead."""
        return self._least_run is not None and self.width > 0

    def split(
        self, prefills: SequenceOf[ScheduledSequence]
    ) -> tuple[list[ScheduledSequence], list[StagedItem]]:
        """Part prefills whose keys all lie on the GPU from others; those with their places."""
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
        """Write what a prefill with host blocks needs beside its tokens, before `send`.

        `row` of the block tables is the prefill's, `first` its first token among the step's.
        """
        count = -(-item.stop // self.block_size)
        table = np.asarray(item.sequence.block_table[:count], dtype=np.int64)
        host_ids = table[places] - self.num_gpu
        table[places] = self._slots(places.size)
        inputs.set_staged_table(row, table)
        pieces = cut_pieces(places, item.stop, self.block_size, self.stage_blocks)
        if self._least_run is not None:
            pieces = with_runs(pieces, host_ids, self._least_run)
        return self._part(inputs, row, first, item.start, item.num_tokens, host_ids, pieces)

    def padding(self, inputs: StepInputs, tokens: int, keys: int, is_mixed: bool) -> StagedPrefill:
        """Return the same for tokens of padding in row 0, with a piece for each PIECE_KEYS keys."""
        each = min(PIECE_KEYS // self.block_size, self.stage_blocks, self.width)
        count = -(-keys // self.block_size)
        pieces = []
        for begin in range(0, keys, PIECE_KEYS):
            num_hosts = min(each, count - begin // self.block_size)
            end = min(keys, begin + PIECE_KEYS)
            pieces.append(PrefillPiece(begin, end, 0, num_hosts, is_mixed))
        # Every block lies in a stage, also of pieces that are said to have others.
        inputs.set_staged_table(0, self.num_gpu + np.arange(count) % each)
        host_ids = np.arange(each)
        return self._part(inputs, 0, 0, keys - tokens, tokens, host_ids, tuple(pieces))

    def _slots(self, count: int) -> np.ndarray:
        """Return the numbers of blocks in staging buffers, the same whichever piece stages one."""
        return self.num_gpu + np.arange(count) % self.stage_blocks

    def _part(
        self,
        inputs: StepInputs,
        row: int,
        first: int,
        start: int,
        num_tokens: int,
        host_ids: np.ndarray,
        pieces: tuple[PrefillPiece, ...],
    ) -> StagedPrefill:
        return StagedPrefill(
            first=first,
            stop=first + num_tokens,
            start=start,
            table=inputs.tables[0][row : row + 1],
            starts=inputs.add([0, num_tokens], torch.int32),
            seq_len=inputs.lens.device[row : row + 1],
            host_ids=inputs.add(host_ids, torch.int64),
            pieces=pieces,
        )

    def copy_ahead(
        self,
        inputs: StepInputs,
        decodes: SequenceOf[ScheduledSequence],
        read_bytes: int,
        *,
        beside_prompts: bool,
    ) -> tuple[AheadDecode, ...]:
        """Return the decodes whose host blocks are to be copied, their tables being written anew.

        `read_bytes` are those of the step in the host tier. Each decode is launched by itself, so
        each needs enough of them, but beside prompts that have no graph: those compute meanwhile.
        """
        if self._copies is None or self._least_run is None or not read_bytes:
            return ()
        far = [(row, item) for row, item in enumerate(decodes) if inputs.num_hosts(row)]
        if read_bytes < self._copies.step_bytes * len(far) and not beside_prompts:
            return ()
        found = []
        for row, item in far:
            pieces, table = cut_ahead(
                inputs.table_row(row, -(-item.stop // self.block_size)),
                item.stop,
                self.block_size,
                self.num_gpu,
                stage_blocks=self.stage_blocks,
                least_run=self._least_run,
            )
            if any(piece.runs for piece in pieces):
                inputs.set_staged_table(row, table)
                found.append(AheadDecode(row, pieces))
        return tuple(found)

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

    `num_routes` are the rows of a table of experts (engine/run/routing.py); None: there is none.

    Everything is only enqueued, on the current stream. Batches of padding hold no sequence; they
    are for warming up and capturing.
    """

    def __init__(self, plan: MemoryPlan, device: Device, num_routes: int | None = None) -> None:
        self._plan, self._device, self._num_routes = plan, device, num_routes
        rows = pad_batch(plan.max_num_seqs)
        group, host = plan.kv.groups[0], plan.host_kv
        self.tiered: TieredInputs | None = None
        """None where sequences own no blocks of the host tier."""
        if host is not None and group.num_in_place:
            self.tiered = TieredInputs(plan, group, host)
        self.inputs = StepInputs(
            device,
            tokens=max(plan.max_num_batched_tokens, rows),
            rows=rows + PREFILL_SEQUENCES,
            width=-(-plan.max_model_len // plan.block_size),
            num_groups=len(plan.kv.groups),
            num_gpu=NO_HOST_TIER if self.tiered is None else self.tiered.num_gpu,
            num_host=0 if self.tiered is None else self.tiered.width,
            beside_moves=plan.host_kv is not None,
            has_routes=num_routes is not None,
        )
        self.shape: StepShape | None = None
        """Shape of the newest batch; None: padded to none."""
        self.kv_in_place_bytes = 0
        """Keys and values that decodes read in the host tier so far."""
        self.kv_copied_bytes = 0
        """Keys and values that were copied from it for decodes so far."""
        self.first_rows: dict[int, int] = {}
        """Where the tokens of each prompt's part begin in the newest batch, by seq_id."""

    def prepare(self, plan: StepPlan, tokens: torch.Tensor | None = None) -> Batch:
        """Fill the input buffers and enqueue their upload; return the inputs on the device.

        `tokens` are those of the step before by row of its `sampling`, int64 on the device; needed
        where the plan was made ahead. They are read there, behind the sampling of that step.
        """
        self.shape = None
        if plan.prefills:
            return self._prepare_prefills(plan, tokens)
        size = len(plan.decodes)
        if self._plan.graph_sizes:
            size = pad_batch(size)
        self.inputs.begin(size, size)
        read_bytes = self._fill_decodes(plan.decodes, size)
        ahead = self._copy_ahead(plan.decodes, read_bytes, beside_prompts=False)
        near_lens = self._near_lens(plan.decodes, size, ahead)
        self.inputs.send(tokens)
        longest, reads_host = max(item.stop for item in plan.decodes), read_bytes > 0
        if not ahead:
            self.shape = StepShape(size, 0, reads_host)
        batch = self._batch(size, longest, reads_host=reads_host)
        return replace(batch, ahead=ahead, near_lens=near_lens) if ahead else batch

    def _prepare_prefills(self, plan: StepPlan, tokens: torch.Tensor | None) -> Batch:
        """Prompts beside decodes; padded where a graph holds so many and none is staged."""
        inputs, rows, tiered = self.inputs, len(plan.decodes), self.tiered
        plain, staged = ([*plan.prefills], []) if tiered is None else tiered.split(plan.prefills)
        order = [*plain, *(item for item, _ in staged)]
        num_tokens, num_prefills = sum(item.num_tokens for item in order), len(order)
        most_tokens = max((item.num_tokens for item in plain), default=0)
        # The same in every placement.
        is_scored = any(item.sequence.lacks_prompt_logprobs for item in order)
        sizes = () if staged or is_scored else self._plan.prefill_sizes
        padded = padded_prefill(sizes, rows, num_tokens, num_prefills)
        if padded is not None:
            rows, num_tokens = padded
            num_prefills, most_tokens = PREFILL_SEQUENCES, num_tokens
        inputs.begin(rows + num_tokens, rows + num_prefills)
        read_bytes = self._fill_decodes(plan.decodes, rows)
        reads_host = read_bytes > 0
        ahead = self._copy_ahead(plan.decodes, read_bytes, beside_prompts=padded is None)
        starts = self._fill_prefills(order, rows)
        self._fill_padding(rows + starts[-1], rows + num_tokens)
        inputs.lens.host[rows + len(order) :] = 0
        begins = zip(order, starts[:-1], strict=True)
        self.first_rows = {item.sequence.seq_id: rows + start for item, start in begins}
        last = {id(item): rows + end - 1 for item, end in zip(order, starts[1:], strict=True)}
        wanted = [*range(len(plan.decodes)), *(last[id(x)] for x in plan.prefills if x.samples)]
        if padded is not None:
            self.shape = None if ahead else StepShape(*padded, reads_host)
            wanted += [0] * (self._num_wanted(rows) - len(wanted))
        begun = starts[: len(plain) + 1] + starts[-1:] * (num_prefills - len(order))
        longest = max((item.stop for item in plan.decodes), default=0)
        batch = self._batch(
            rows,
            longest,
            starts=begun if plain else (),
            wanted=wanted,
            most_tokens=most_tokens,
            reads_host=reads_host,
        )
        if tiered is not None and staged:
            parts = zip(staged, starts[len(plain) : -1], strict=True)
            found = [
                tiered.stage(inputs, row, rows + start, item, places)
                for row, ((item, places), start) in enumerate(parts, rows + len(plain))
            ]
            batch = replace(batch, staged=tuple(found))
        near_lens = self._near_lens(plan.decodes, rows, ahead)
        if ahead:
            batch = replace(batch, ahead=ahead, near_lens=near_lens)
        inputs.send(tokens)
        return batch

    def _num_wanted(self, decodes: int) -> int:
        """Rows of logits of a captured step with prompts."""
        return min(decodes + PREFILL_SEQUENCES, pad_batch(self._plan.max_num_seqs))

    def _batch(
        self,
        decodes: int,
        longest: int,
        *,
        starts: SequenceOf[int] = (),
        wanted: SequenceOf[int] | None = None,
        most_tokens: int = 0,
        reads_host: bool = False,
    ) -> Batch:
        """The batch of what is in the input buffers; `send` follows where there are prompts."""
        inputs = self.inputs
        return Batch(
            input_ids=inputs.ids.device,
            positions=inputs.positions.device,
            slots=tuple(slots.device for slots in inputs.slots),
            block_tables=tuple(table[: len(inputs.lens.host)] for table in inputs.tables),
            seq_lens=inputs.lens.device,
            num_decodes=decodes,
            max_decode_len=longest,
            prefill_starts=inputs.add(starts, torch.int32) if starts else None,
            max_prefill_tokens=most_tokens,
            logits_rows=None if wanted is None else inputs.add(wanted, torch.int64),
            reads_host=reads_host,
            routes=None if inputs.routes is None else inputs.routes.device,
        )

    def _copy_ahead(
        self, decodes: SequenceOf[ScheduledSequence], read_bytes: int, *, beside_prompts: bool
    ) -> tuple[AheadDecode, ...]:
        """Choose the decodes whose host blocks are copied; count what is copied and read there."""
        if self.tiered is None:
            return ()
        ahead = self.tiered.copy_ahead(
            self.inputs, decodes, read_bytes, beside_prompts=beside_prompts
        )
        copied = sum(decode.num_copied for decode in ahead) * self.tiered.block_bytes
        self.kv_copied_bytes += copied
        self.kv_in_place_bytes += read_bytes - copied
        return ahead

    def _near_lens(
        self,
        decodes: SequenceOf[ScheduledSequence],
        size: int,
        ahead: tuple[AheadDecode, ...],
    ) -> torch.Tensor | None:
        """Send the lengths of `size` rows of decodes without those in `ahead`, if there are any."""
        if not ahead or len(ahead) == len(decodes):
            return None
        lens = self.inputs.lens.host[:size].copy()
        lens[[decode.row for decode in ahead]] = 0
        return self.inputs.add(lens, torch.int32)

    def _fill_decodes(self, decodes: SequenceOf[ScheduledSequence], size: int) -> int:
        """Write decodes, then padding up to `size` rows; return what they read in the host tier.

        Bytes.
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
        self._fill_routes(decodes, 0)
        inputs.lens.host[:count] = inputs.positions.host[:count] + 1
        return 0 if self.tiered is None else self.tiered.read_bytes(inputs, decodes)

    def _fill_padding(self, start: int, stop: int) -> None:
        """Write tokens that go nowhere."""
        inputs = self.inputs
        inputs.ids.host[start:stop] = 0
        inputs.positions.host[start:stop] = 0
        for field in inputs.slots:
            field.host[start:stop] = -1
        if inputs.routes is not None:
            inputs.routes.host[start:stop] = 0

    def _fill_routes(self, items: SequenceOf[ScheduledSequence], at: int) -> None:
        """Write the rows of the table of experts of tokens from place `at` on, if there is one."""
        routes, count = self.inputs.routes, self._num_routes
        if routes is None or count is None:
            return
        for item in items:
            row = first_row(item.sequence.prompt_token_ids) + item.start
            routes.host[at : at + item.num_tokens] = np.arange(row, row + item.num_tokens) % count
            at += item.num_tokens

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
        self._fill_routes(prefills, at)
        return starts

    def _begin_padding(self, num_tokens: int, num_rows: int, length: int = 0) -> None:
        self.inputs.begin(num_tokens, num_rows)
        self._fill_padding(0, num_tokens)
        self.inputs.lens.host[:] = length

    def padding_decode(self, size: int, *, reads_host: bool = False) -> Batch:
        """Return a decode of padding."""
        self._begin_padding(size, size)
        self.inputs.send(None)
        return self._batch(size, self._plan.max_model_len, reads_host=reads_host)

    def padding_unknown(self, *, reads_host: bool) -> Batch:
        """Return a decode of one row of padding whose token is read on the device."""
        self._begin_padding(1, 1)
        self.inputs.set_unknown(0, 0)
        self.inputs.send(torch.zeros(1, dtype=torch.int64, device=self._device.torch_device))
        return self._batch(1, self._plan.max_model_len, reads_host=reads_host)

    def padding_prefill(self, decodes: int, tokens: int) -> Batch:
        """Return a captured step with prompts, all padding."""
        self._begin_padding(decodes + tokens, decodes + PREFILL_SEQUENCES)
        starts, wanted = [0] * (PREFILL_SEQUENCES + 1), [0] * self._num_wanted(decodes)
        longest = self._plan.max_model_len
        batch = self._batch(decodes, longest, starts=starts, wanted=wanted, most_tokens=tokens)
        self.inputs.send(None)
        return batch

    def padding_prompts(self, num_tokens: int) -> Batch:
        """Return prompts of padding of so many tokens, in as many sequences as it takes."""
        longest = min(num_tokens, self._plan.max_model_len)
        rows = min(num_tokens // longest, self._plan.max_num_seqs)
        count = rows * longest
        self._begin_padding(count, rows, longest)
        starts, wanted = range(0, count + 1, longest), range(longest - 1, count, longest)
        batch = self._batch(0, 0, starts=starts, wanted=wanted, most_tokens=longest)
        self.inputs.send(None)
        return batch

    def padding_staged(self, tiered: TieredInputs, *, is_mixed: bool) -> Batch:
        """Return a prompt of padding with keys in the host tier, in as many pieces as differ.

        Block tables name its blocks until `forget_tables`.
        """
        longest = min(3 * PIECE_KEYS, self._plan.max_model_len)
        count = min(2, longest)
        self._begin_padding(count, 1, longest)
        batch = self._batch(0, 0, wanted=[count - 1])
        staged = tiered.padding(self.inputs, count, longest, is_mixed)
        self.inputs.send(None)
        return replace(batch, staged=(staged,))

    def padding_ahead(self) -> Batch:
        """Return a decode of one row of padding, with a key in the host tier that is copied.

        Block tables name it until `forget_tables`.
        """
        assert self.tiered is not None
        longest = min(DECODE_SPLIT_TOKENS + 1, self._plan.max_model_len)
        self._begin_padding(1, 1, longest)
        table = np.zeros(-(-longest // self._plan.block_size), dtype=np.int64)
        table[0] = self.tiered.num_gpu
        self.inputs.set_staged_table(0, table)
        self.inputs.send(None)
        cuts = (
            DecodePiece(0, DECODE_SPLIT_TOKENS, ((0, 1),)),
            DecodePiece(DECODE_SPLIT_TOKENS, longest),
        )
        pieces = tuple(piece for piece in cuts if piece.begin_key < longest)
        batch = self._batch(1, longest, reads_host=True)
        return replace(batch, ahead=(AheadDecode(0, pieces),))

    def forget_tables(self) -> None:
        """Let padding of later steps name blocks that are there.

        Stream: enqueued on the current stream.
        """
        self.inputs.tables[0].zero_()
