"""Prefills over blocks of both tiers: which they are, and what a batch says of them."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import StagedPrefill
from engine.inputs import StepInputs
from engine.kv.pieces import PIECE_KEYS, PrefillPiece, cut_pieces, host_places
from engine.plan import MemoryPlan
from engine.step_plan import ScheduledSequence

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
