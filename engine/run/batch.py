"""Batch: the device tensors of one step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.errors import EngineError
from kernels.sizes import PREFILL_PART_KEYS

PIECE_KEYS = PREFILL_PART_KEYS
"""Pieces begin at multiples of it."""


@dataclass(frozen=True, slots=True)
class PrefillPiece:
    """Keys begin_key to end_key - 1 of a sequence, and which of its host blocks hold some."""

    begin_key: int
    end_key: int
    first_host: int
    """The first one, counted in the sequence's host blocks in order of position."""
    num_hosts: int


def host_places(table: Sequence[int], num_tokens: int, block_size: int, num_gpu: int) -> np.ndarray:
    """Return which of the blocks of a sequence's first tokens lie in the host tier.

    Args:
        table: The block table.
        num_tokens: Leading tokens that matter.
        block_size: Tokens in a block.
        num_gpu: Blocks with smaller numbers lie on the GPU.

    Returns:
        int64: their places in the table, ascending.
    """
    count = -(-num_tokens // block_size)
    return np.flatnonzero(np.asarray(table[:count], dtype=np.int64) >= num_gpu)


def cut_pieces(
    places: np.ndarray, num_tokens: int, block_size: int, stage_blocks: int
) -> tuple[PrefillPiece, ...]:
    """Cut the keys of a sequence into pieces of at most `stage_blocks` host blocks.

    What comes before the first host block is a piece of its own, which needs no copy and runs
    beside that of the next one.

    Args:
        places: From `host_places`.
        num_tokens: Keys in all, at least 1.
        block_size: Tokens in a block.
        stage_blocks: Blocks that a staging buffer holds.

    Raises:
        EngineError: A buffer does not hold the blocks of PIECE_KEYS keys.
    """
    stops = np.arange(PIECE_KEYS, num_tokens + PIECE_KEYS, PIECE_KEYS)
    stops[-1] = num_tokens
    # Host blocks that hold a key before each stop.
    hosts = np.searchsorted(places, -(-stops // block_size))
    pieces: list[PrefillPiece] = []
    begin = 0
    while begin < num_tokens:
        first = int(np.searchsorted(places, begin // block_size))
        end = at = 0
        for most in (stage_blocks,) if pieces else (0, stage_blocks):
            at = int(np.searchsorted(hosts, first + most, side="right")) - 1
            end = int(stops[at]) if at >= 0 else 0
            if end > begin:
                break
        if end <= begin:
            raise EngineError(
                f"prefill: expected staging buffers of at least {-(-PIECE_KEYS // block_size)} "
                f"blocks, got {stage_blocks}. This is a fault of the plan."
            )
        pieces.append(PrefillPiece(begin, end, first, int(hosts[at]) - first))
        begin = end
    return tuple(pieces)


@dataclass(frozen=True, slots=True)
class StagedPrefill:
    """The part of a sequence that has blocks in the host tier: they are copied to the GPU first."""

    first: int
    """Place of its first token among the step's."""
    stop: int
    """The one after its last."""
    table: torch.Tensor
    """int32 [1, M]; blocks of the host tier are named by their place in a staging buffer, counted
    from the number of blocks on the GPU."""
    starts: torch.Tensor
    """int32 [2]: 0 and its number of tokens."""
    seq_len: torch.Tensor
    """int32 [1]."""
    host_ids: torch.Tensor
    """int64 [n]: its blocks of the host tier in order of position, numbered within the tier."""
    pieces: tuple[PrefillPiece, ...]


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

    @property
    def is_decode(self) -> bool:
        """Whether it has no prefill."""
        return self.prefill_starts is None and not self.staged

    @property
    def num_rows(self) -> int:
        """Rows of the block tables but for staged prefills, whose rows follow."""
        return int(self.seq_lens.shape[0]) - len(self.staged)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, padding included."""
        return int(self.input_ids.shape[0])
