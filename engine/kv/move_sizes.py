"""How moves of blocks are cut into copies, and the memory that this takes; pure arithmetic."""

PIECE_BYTES = 32 * 2**20
"""Moves are enqueued in pieces of about this size; what waits for a move waits for its piece."""
PIECE_MOVES = 1024
"""No piece holds more moves."""
DMA_RUN_BYTES = 2 * 2**20
"""From this size on, neighbouring blocks that stay neighbours are one DMA copy; what is smaller
goes together in one kernel. Measured on an H200 with copies of 54.9 GB/s one way, kernel against
DMA: 49 and 9 GB/s for blocks of 256 KiB, 51 and 40 of 1 MiB, 51 and 50 of 2 MiB, 51 and 54 of
8 MiB; both ways at once 61 and 97 of 8 MiB."""
ID_SLOTS = 64
"""Pieces of small blocks that can be under way before the host waits for the oldest."""
STAGING_BYTES = 16 * 2**20
"""Pinned memory through which blocks of pageable memory go."""

_ID_BYTES = 8


def piece_moves(block_bytes: int, num_blocks: int = PIECE_MOVES) -> int:
    """Return how many moves a piece holds at most.

    Args:
        block_bytes: Of a block over all layers.
        num_blocks: Of the smaller tier; a piece needs no more moves.
    """
    return max(1, min(PIECE_MOVES, PIECE_BYTES // block_bytes, num_blocks))


def ids_bytes(block_bytes: int, num_blocks: int = PIECE_MOVES) -> int:
    """Return what block numbers take on the GPU, and in pinned memory once more, bytes.

    Two lists for each slot and direction; nothing where every block is large enough for DMA.

    Args:
        block_bytes: Of a block over all layers.
        num_blocks: Of the smaller tier.
    """
    if block_bytes >= DMA_RUN_BYTES:
        return 0
    return 2 * ID_SLOTS * 2 * piece_moves(block_bytes, num_blocks) * _ID_BYTES


def staging_blocks(block_bytes: int) -> int:
    """Return how many blocks the staging memory holds, at least 1."""
    return max(1, STAGING_BYTES // block_bytes)
