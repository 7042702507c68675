"""Sizes of the operators' scratch memory; pure arithmetic, so that planning needs no torch."""

DECODE_SPLIT_TOKENS = 256
"""Keys that one partial result of decode attention covers.

Fixed, so that a sequence's result depends on neither the batch nor the grid.
"""

PREFILL_PART_KEYS = 128
"""Parts of a prefill's keys begin at multiples of it; every kernel's tile of keys divides it."""

MAX_SMALL_TOKENS = 64
"""Most tokens of a product that is bound by reading its weight, and has a kernel of its own."""

MIN_COUNTERS = 2048
"""Counters of a workspace at least; a product of few tokens needs one for each 64 rows of a weight
of fewer than 8192 rows."""

_FLOAT32_BYTES = 4
_INT32_BYTES = 4


def decode_num_splits(max_seq_len: int) -> int:
    """Return the number of partial results of a sequence of this many tokens.

    Args:
        max_seq_len: tokens, 0 or more.
    """
    return -(-max_seq_len // DECODE_SPLIT_TOKENS)


def decode_num_counters(num_seqs: int, num_heads: int) -> int:
    """Return the number of counters of a workspace.

    Args:
        num_seqs: sequences in a step at most.
        num_heads: query heads.
    """
    return max(MIN_COUNTERS, num_seqs * num_heads)


def decode_workspace_bytes(num_seqs: int, num_heads: int, head_dim: int, max_seq_len: int) -> int:
    """Return the bytes that kernels.ops.decode_workspace allocates for the same arguments.

    Args:
        num_seqs: sequences in a step at most.
        num_heads: query heads.
        head_dim: elements of a head.
        max_seq_len: tokens of a sequence at most.
    """
    partials = num_seqs * num_heads * max(1, decode_num_splits(max_seq_len))
    counters = decode_num_counters(num_seqs, num_heads)
    return partials * (head_dim + 1) * _FLOAT32_BYTES + counters * _INT32_BYTES


def prefill_state_bytes(num_tokens: int, num_heads: int, head_dim: int) -> int:
    """Return the bytes that kernels.ops.prefill_state allocates for the same arguments.

    Args:
        num_tokens: queries of a call at most.
        num_heads: query heads.
        head_dim: elements of a head.
    """
    return num_tokens * num_heads * (head_dim + 2) * _FLOAT32_BYTES
