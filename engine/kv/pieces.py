"""How a prefill over blocks of both tiers is cut: each piece stages no more than a buffer holds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
