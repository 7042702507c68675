"""Inputs of a step: laid side by side in pinned memory, sent to the device in one copy."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from engine.device.base import Device
from engine.errors import EngineError
from engine.request import Sequence

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
        """Of each row, how many entries lie in the host tier."""
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
