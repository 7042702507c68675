"""Sizes of the operators' scratch memory and of codes: pure arithmetic, no torch needed."""

import functools
import math

DECODE_SPLIT_TOKENS = 256
"""Keys that one partial result of decode attention covers.

Fixed, so that a sequence's result depends on neither the batch nor the grid.
"""

PREFILL_PART_KEYS = 128
"""Parts of a prefill's keys begin at multiples of it; every kernel's tile of keys divides it."""

PREFILL_SPLIT_MAX_QUERIES = 256
"""With as many queries in a call or fewer, programs share the keys of a prefill."""

PREFILL_SPLIT_KEYS = 256
"""Keys of one partial result of a prefill at least; every kernel's tile of keys divides it."""

PREFILL_FEWEST_QUERIES = 16
"""The first of the numbers of queries up to which the keys of a prefill are shared alike."""

_PREFILL_SPLIT_QUERIES = (PREFILL_FEWEST_QUERIES, 64, PREFILL_SPLIT_MAX_QUERIES)
_PREFILL_MAX_PARTS = 32
_PREFILL_PARTIAL_ELEMENTS = 2**22
"""Elements of all partial results: 128 rows of 128 for 256 programs, which fill a card."""

MAX_SMALL_TOKENS = 64
"""Most tokens of a product that is bound by reading its weight, and has a kernel of its own."""

LEAST_CAPABILITY = (8, 0)
"""Compute capability from which on a GPU multiplies with codes: asynchronous copies, bf16 products.
"""

MIN_COUNTERS = 2048
"""Counters of a workspace at least; a product of few tokens needs one for each 64 rows of a weight
of fewer than 8192 rows."""

MAX_GROUP_ESCAPES = 256
"""Most weights of 16 rows of a matrix in codes whose bits are in its table: their index is a byte.
"""

_PACK_BYTES = 64 * 2**20
"""Scratch of packing and restoring, unless 16 rows need more."""

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
    """Return the bytes that kernels.arguments.decode_workspace allocates for the same arguments.

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
    """Return the bytes that kernels.arguments.prefill_state allocates for the same arguments.

    Args:
        num_tokens: queries of a call at most.
        num_heads: query heads.
        head_dim: elements of a head.
    """
    return num_tokens * num_heads * (head_dim + 2) * _FLOAT32_BYTES


def prefill_num_parts(num_queries: int, num_heads: int, head_dim: int) -> int:
    """Return into how many parts a prefill's keys are split at most; 1: they are not.

    Calls of 1 to 16, of 17 to 64 and of 65 to 256 queries have one number each, so that a call
    padded to the most of them gives the same bits.

    Args:
        num_queries: queries of the call, of all its sequences.
        num_heads: query heads.
        head_dim: elements of a head.
    """
    for size in _PREFILL_SPLIT_QUERIES:
        if num_queries <= size:
            parts = _PREFILL_PARTIAL_ELEMENTS // (size * num_heads * head_dim)
            return max(1, min(_PREFILL_MAX_PARTS, parts))
    return 1


def prefill_partial_rows(num_queries: int, num_heads: int, head_dim: int, max_seq_len: int) -> int:
    """Return how many rows of partial results calls of so many queries or fewer have at most.

    Args:
        num_queries: queries of a call at most; more than PREFILL_SPLIT_MAX_QUERIES are not split.
        num_heads: query heads.
        head_dim: elements of a head.
        max_seq_len: tokens of a sequence at most.
    """
    most_parts = -(-max_seq_len // PREFILL_SPLIT_KEYS)
    return _partial_rows(num_queries, num_heads, head_dim, most_parts)


@functools.lru_cache(maxsize=1024)  # asked by every launch
def _partial_rows(num_queries: int, num_heads: int, head_dim: int, most_parts: int) -> int:
    rows = 0
    for size in _PREFILL_SPLIT_QUERIES:
        parts = min(most_parts, prefill_num_parts(size, num_heads, head_dim))
        if parts > 1:
            rows = max(rows, min(size, num_queries) * num_heads * parts)
        if size >= num_queries:
            break
    return rows


def prefill_workspace_bytes(
    num_queries: int, num_heads: int, head_dim: int, max_seq_len: int
) -> int:
    """Return the bytes that kernels.arguments.prefill_workspace allocates for the same arguments.

    Args:
        num_queries: queries of a call at most.
        num_heads: query heads.
        head_dim: elements of a head.
        max_seq_len: tokens of a sequence at most.
    """
    rows = prefill_partial_rows(num_queries, num_heads, head_dim, max_seq_len)
    return rows * (head_dim + 1) * _FLOAT32_BYTES


def has_codes(num_rows: int, num_columns: int) -> bool:
    """Tell whether a matrix fills the tiles of its codes.

    Args:
        num_rows: of the matrix.
        num_columns: of the matrix.
    """
    return num_rows > 0 and num_columns > 0 and num_rows % 16 == 0 and num_columns % 64 == 0


def codes_capacity(num_rows: int, num_columns: int) -> int:
    """Return the most escapes of a matrix in codes: 0.25 % of its weights, at least 256.

    Args:
        num_rows: of the matrix.
        num_columns: of the matrix.
    """
    return max(MAX_GROUP_ESCAPES, num_rows * num_columns // 400)


def codes_table_size(num_rows: int, num_columns: int) -> int:
    """Return the elements of the table of a matrix in codes.

    Args:
        num_rows: of the matrix.
        num_columns: of the matrix.
    """
    return codes_capacity(num_rows, num_columns) + MAX_GROUP_ESCAPES


def pack_chunk_rows(num_columns: int) -> int:
    """Return the rows that packing and restoring take at a time, a multiple of 16.

    Args:
        num_columns: of the matrix.
    """
    return max(1, _PACK_BYTES // (16 * _pack_row_bytes(num_columns))) * 16


def pack_scratch_bytes(num_rows: int, num_columns: int) -> int:
    """Return the most bytes that packing allocates beside its argument and the codes.

    Args:
        num_rows: of the matrix.
        num_columns: of the matrix.
    """
    return min(num_rows, pack_chunk_rows(num_columns)) * _pack_row_bytes(num_columns)


def _pack_row_bytes(num_columns: int) -> int:
    """Bytes beside a row while it is packed: a count of exponents, and of each weight its bits."""
    return 12 * num_columns + 5 * 1024


_EXPERTS_BYTES = 64 * 2**20
"""Experts that are restored together for a product of many tokens, unless one has more."""


def restored_experts(num_experts: int, num_rows: int, num_columns: int, element_bytes: int) -> int:
    """Return how many experts of a matrix are restored together for a product of many tokens.

    Args:
        num_experts: of the matrix, or slots of a bank.
        num_rows: of one expert.
        num_columns: of the matrix.
        element_bytes: of its dtype.
    """
    whole = 16 // math.gcd(16, num_rows)  # as many have whole tiles of 16 rows
    most = _EXPERTS_BYTES // (num_rows * num_columns * element_bytes)
    return min(num_experts, max(whole, most // whole * whole))


def num_expert_parts(num_ids: int, num_experts: int, num_slots: int) -> int:
    """Return how many parts a step runs in, each with room in the slots for all its experts.

    Args:
        num_ids: experts of all its tokens, at least 1; at most so many differ.
        num_experts: of a layer.
        num_slots: of its bank, at least 1.
    """
    return -(-min(num_ids, num_experts) // num_slots)


EXPERT_COPIERS = 32
"""Programs that copy missing experts over the link; products with others compute beside them."""


def expert_cache_bytes(num_experts: int, num_slots: int) -> int:
    """Return the bytes that kernels.expert_arguments.expert_cache takes for the same arguments.

    Args:
        num_experts: of a layer.
        num_slots: of its bank.
    """
    longs, ints = 1 + num_slots + 2 * num_experts, 3 + 4 * num_slots + num_experts
    return 8 * (longs + -(-ints // 2))
