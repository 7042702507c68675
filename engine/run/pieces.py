"""Pieces of a sequence's keys whose host blocks are copied to the GPU one after the other.

Those of a piece go into one stage buffer: by a copy engine run by run of neighbours, as a copy of
many blocks reaches the link's rate and a copy of one does not. Of a prefill, every piece with host
blocks is copied, of short runs by a kernel. A decode is cut at whole splits; a piece is read where
it lies if it has no host blocks, if its runs are short, and if it holds the newest keys, which the
step itself writes.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.errors import EngineError
from kernels.sizes import DECODE_SPLIT_TOKENS, PREFILL_PART_KEYS

PIECE_KEYS = PREFILL_PART_KEYS
"""Pieces begin at multiples of it."""

Run = tuple[int, int]
"""The first of neighbouring host blocks, numbered within the tier, and how many they are."""


@dataclass(frozen=True, slots=True)
class PrefillPiece:
    """Keys begin_key to end_key - 1 of a sequence, and which of its host blocks hold some."""

    begin_key: int
    end_key: int
    first_host: int
    """The first one, counted in the sequence's host blocks in order of position."""
    num_hosts: int
    runs: tuple[Run, ...] = ()
    """Its host blocks in order of position, cut where they are no neighbours; none: a kernel copies
    them."""


def host_places(
    table: SequenceOf[int], num_tokens: int, block_size: int, num_gpu: int
) -> np.ndarray:
    """Return the places in a table of the first tokens' blocks in the host tier, int64 ascending.

    Blocks with numbers below `num_gpu` lie on the GPU.
    """
    count = -(-num_tokens // block_size)
    return np.flatnonzero(np.asarray(table[:count], dtype=np.int64) >= num_gpu)


def cut_pieces(
    places: np.ndarray, num_tokens: int, block_size: int, stage_blocks: int
) -> tuple[PrefillPiece, ...]:
    """Cut the keys of a sequence into pieces of at most `stage_blocks` host blocks.

    What comes before the first host block is a piece of its own, which needs no copy and runs
    beside that of the next one.

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


def with_runs(
    pieces: SequenceOf[PrefillPiece], host_ids: np.ndarray, least_run: int
) -> tuple[PrefillPiece, ...]:
    """Return pieces with runs, where those have at least `least_run` blocks in the mean.

    `host_ids` are the sequence's host blocks in order of position, numbered within the tier.
    """
    found = []
    for piece in pieces:
        runs = _runs(host_ids[piece.first_host : piece.first_host + piece.num_hosts])
        is_long = least_run * len(runs) <= piece.num_hosts
        found.append(replace(piece, runs=runs) if is_long else piece)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class StagedPrefill:
    """The part of a sequence that has blocks in the host tier: they are copied to the GPU first."""

    first: int
    """Place of its first token among the step's."""
    stop: int
    """The one after its last."""
    start: int
    """Position of its first token: the step writes the keys from there on."""
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
class DecodePiece:
    """Keys begin_key to end_key - 1 of a sequence."""

    begin_key: int
    end_key: int
    runs: tuple[Run, ...] = ()
    """Host blocks to copy, one run behind the other in a stage buffer; none: nothing is copied."""


@dataclass(frozen=True, slots=True)
class AheadDecode:
    """A decode some of whose host blocks are copied ahead."""

    row: int
    """Its row of the step."""
    pieces: tuple[DecodePiece, ...]

    @property
    def num_copied(self) -> int:
        """Blocks that are copied in every layer."""
        return sum(count for piece in self.pieces for _, count in piece.runs)


def cut_ahead(
    table: np.ndarray,
    num_tokens: int,
    block_size: int,
    num_gpu: int,
    *,
    stage_blocks: int,
    least_run: int,
) -> tuple[tuple[DecodePiece, ...], np.ndarray]:
    """Cut a decode's keys into pieces; return them and its table as they are read by pieces.

    Args:
        table: Blocks of the sequence, the host tier's numbered from `num_gpu` on.
        num_tokens: Its keys, the newest one included.
        block_size: Tokens of a block; divides DECODE_SPLIT_TOKENS.
        num_gpu: Blocks on the GPU.
        stage_blocks: Host blocks of a piece at most.
        least_run: Blocks of a run at least, in the mean of a piece, for it to be copied.

    Returns:
        Pieces in order, neighbours that are read in place as one; in the table, blocks that are
        copied have the numbers of their places in a stage buffer, counted from `num_gpu` on.
    """
    per_split = DECODE_SPLIT_TOKENS // block_size
    num_splits = (num_tokens - 1) // DECODE_SPLIT_TOKENS
    table = table.astype(np.int64)
    is_host = table[: num_splits * per_split] >= num_gpu
    before = np.concatenate([[0], np.cumsum(is_host.reshape(-1, per_split).sum(axis=1))])
    pieces: list[DecodePiece] = []
    begin = 0
    while begin < num_splits:
        # What comes before the first host block is a piece of its own, beside the first copy.
        most = stage_blocks if before[begin + 1] > before[begin] else 0
        end = max(begin + 1, int(np.searchsorted(before, before[begin] + most, side="right")) - 1)
        at = begin * per_split + np.flatnonzero(is_host[begin * per_split : end * per_split])
        order = at[np.argsort(table[at])]
        runs = _runs(table[order] - num_gpu)
        if not least_run * len(runs) <= len(order) <= stage_blocks:
            runs = ()
        if runs:
            table[order] = num_gpu + np.arange(len(order))
        _append(pieces, begin * DECODE_SPLIT_TOKENS, end * DECODE_SPLIT_TOKENS, runs)
        begin = end
    _append(pieces, num_splits * DECODE_SPLIT_TOKENS, num_tokens, ())
    return tuple(pieces), table


def _append(pieces: list[DecodePiece], begin_key: int, end_key: int, runs: tuple[Run, ...]) -> None:
    if pieces and not runs and not pieces[-1].runs:
        begin_key = pieces.pop().begin_key
    pieces.append(DecodePiece(begin_key, end_key, runs))


def _runs(ids: np.ndarray) -> tuple[Run, ...]:
    """Cut numbers where one is not the next."""
    starts = np.concatenate([[0], np.flatnonzero(np.diff(ids) != 1) + 1]) if ids.size else ids
    counts = np.diff(np.concatenate([starts, [ids.size]])) if ids.size else ids
    return tuple(zip(ids[starts].tolist(), counts.tolist(), strict=True))
