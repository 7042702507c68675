"""Tile shapes of the kernels, from sizes and element size alone.

A batch has no say in those of attention, so that a sequence's result is the same in every batch.
One exception: where keys of a prefill go into parts, tiles and parts follow from the number of all
queries. Those of products depend on the number of tokens. All fit the 99 KiB of shared memory that
a block has on consumer cards, some with fewer stages there.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from kernels.sizes import DECODE_SPLIT_TOKENS, PREFILL_FEWEST_QUERIES

_OTHER_SHARED_BYTES = 2048
_CONSUMER_SHARED_BYTES = 99 * 1024


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Return the shared memory that a block may use for its loads.

    Args:
        device: where the kernel runs; a CPU, which interprets it, has what consumer cards have.
    """
    if device.type != "cuda":
        return _CONSUMER_SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin) - _OTHER_SHARED_BYTES


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel's shape.

    Attributes:
        keys: keys of one iteration.
        num_warps: warps of a program.
        num_stages: iterations whose loads are in flight.
        rows: query rows of a program.
    """

    keys: int
    num_warps: int
    num_stages: int
    rows: int

    def stages_on(self, device: torch.device, head_size: int) -> int:
        """Return the stages of prefill attention for which a block has shared memory, 3 at least.

        Beside the queries lie keys and values of this iteration and of those ahead, one for every
        two stages: the other one loads the block table. No result depends on it.

        Args:
            device: where the kernel runs.
            head_size: elements of a head, 2 bytes each.
        """
        loads = 1 + (self.num_stages - 1) // 2
        needed = (self.rows + 2 * self.keys * loads) * head_size * 2
        return self.num_stages if needed <= shared_bytes(device) else min(3, self.num_stages)


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """Shape of decode attention.

    Attributes:
        keys: keys of one iteration.
        num_warps: warps of a program.
        num_stages: iterations whose loads are in flight.
        split: keys of one partial result; other than DECODE_SPLIT_TOKENS in measurements only, as
            results depend on it.
        sum_rows: rows of partial results that are loaded at a time, those of several splits.
    """

    keys: int
    num_warps: int
    num_stages: int
    split: int = DECODE_SPLIT_TOKENS
    sum_rows: int = 64

    def sum_splits(self, rows: int) -> int:
        """Return how many splits are added at a time.

        Args:
            rows: rows of a split's partial result.
        """
        return max(4, min(16, self.sum_rows // rows))


def decode_tile(head_size: int, dtype: torch.dtype) -> DecodeTile:
    """Return the tile of decode attention.

    Args:
        head_size: elements of a head.
        dtype: element type of the cache.
    """
    if dtype == torch.float32:
        return DecodeTile(keys=32 if head_size <= 128 else 16, num_warps=4, num_stages=2)
    return DecodeTile(keys=64 if head_size <= 128 else 32, num_warps=4, num_stages=2)


def prefill_tile(head_size: int, dtype: torch.dtype, few_queries: int | None = None) -> Tile:
    """Return the tile of prefill attention.

    Few queries are spread over a card as parts of their keys; then loads lie further ahead. Tiles
    of keys are the same, so that a sequence of one part has the same bits among few and many.

    Args:
        head_size: elements of a head.
        dtype: element type of the cache.
        few_queries: of a call whose keys go into parts; None: they do not.
    """
    if dtype == torch.float32:
        return Tile(rows=32, keys=16, num_warps=8, num_stages=2)
    if head_size <= 128 and few_queries is not None:
        if few_queries <= PREFILL_FEWEST_QUERIES:
            return Tile(rows=64, keys=64, num_warps=4, num_stages=5)
        return Tile(rows=128, keys=64, num_warps=8, num_stages=5)
    if head_size <= 128:
        return Tile(rows=128, keys=64, num_warps=8, num_stages=3)
    return Tile(rows=64, keys=32, num_warps=8, num_stages=2)


@dataclass(frozen=True, slots=True)
class LinearTile:
    """Shape of a product of few tokens.

    Attributes:
        block_t: tokens, padded.
        block_n: rows of the weight of a program; of gates and of ups each where the product is
            gated.
        block_k: inputs of one iteration.
        parts: programs that share the inputs of a row.
        num_warps: warps of a program.
        num_stages: iterations whose loads are in flight, where the card has room for them; the
            result does not depend on it.
    """

    block_t: int
    block_n: int
    block_k: int
    parts: int
    num_warps: int
    num_stages: int


_MOST_SPLIT_ROWS = 8192
"""So many rows times parts give every multiprocessor enough to load; more parts cost more sums."""
PART_INPUTS = 256
"""The inputs of a part are a multiple of so many; a part has that many at least."""


def linear_tile(
    num_tokens: int, num_rows: int, size_in: int, *, is_gated: bool = False
) -> LinearTile:
    """Return the tile of a product of at most MAX_SMALL_TOKENS tokens.

    Programs share the inputs of a row only where there are at least twice as many inputs as rows.
    Chosen on an H200 among ten rules by the decode graphs of cuts of six models, 3B to 14B: within
    1 % of each model's best in the mean; at 32 and 64 tokens by products of 32 shapes alone.

    Numbers of tokens differ in how much is loaded at a time, never in the order of the sums.

    Args:
        num_tokens: tokens.
        num_rows: rows of the weight.
        size_in: inputs.
        is_gated: whether the rows are gates and ups.
    """
    block_t = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
    if is_gated:
        block_k, stages = (64 if block_t == 64 else 128), (4 if block_t == 16 else 6)
        return LinearTile(block_t, 64, block_k, 1, 4, stages)
    parts = 1
    most = min(size_in, _MOST_SPLIT_ROWS)
    while 2 * parts * num_rows <= most and size_in >= 2 * parts * PART_INPUTS:
        parts *= 2
    if block_t == 16 and num_rows < _MOST_SPLIT_ROWS:
        # One program a multiprocessor: where two fit, few programs would lie on half of them.
        return LinearTile(block_t, 64, 256, parts, 4, 4)
    return LinearTile(block_t, 64, 128, parts, 4, 5)


@dataclass(frozen=True, slots=True)
class GroupedTile:
    """Shape of a product of many tokens with experts.

    Attributes:
        block_n: rows of the weight of a program; of gates and of ups each where it is gated.
        block_k: inputs of one iteration.
        num_warps: warps of a program.
        num_stages: iterations whose loads are in flight.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def pairs_of_tile(num_pairs: int, num_slots: int, dtype: torch.dtype) -> int:
    """Return how many pairs of a token and an expert a program multiplies.

    Args:
        num_pairs: of all experts.
        num_slots: blocks of rows of the weight.
        dtype: element type.
    """
    if dtype == torch.float32:
        return 32
    return 64 if num_pairs <= 64 * num_slots else 128


def grouped_tile(block_m: int, dtype: torch.dtype) -> GroupedTile:
    """Return the tile of a product of many tokens with experts.

    Args:
        block_m: pairs of a program.
        dtype: element type.
    """
    if dtype == torch.float32:
        return GroupedTile(32, 32, 4, 2)
    return GroupedTile(64, 64, 8 if block_m == 128 else 4, 3)
