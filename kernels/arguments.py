"""What operators take beside plain tensors: weights in codes, a second tier of blocks, scratch.

Shape letters: T tokens, S sequences, M blocks per sequence, B blocks, C blocks beside them or
splits of a sequence, P tokens per block, N query heads, K KV heads, H head size, R rows of partial
results.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple

import torch

from kernels.scratch import check_scratch, scratch_of
from kernels.sizes import (
    MAX_GROUP_ESCAPES,
    codes_table_size,
    decode_num_counters,
    decode_num_splits,
    prefill_partial_rows,
)

CODES_PARTS: Final = ("bytes", "codes", "first", "offsets", "table")
"""The tensors that keep a matrix in codes."""


CODES_ALIGNMENT: Final = 16
"""Bytes that kernels read of codes at a time."""


@dataclass(frozen=True, slots=True)
class Codes:
    """A bfloat16 matrix of N rows and K columns in 12 bits a weight, each restored to the bit.

    Bytes and codes lie at multiples of CODES_ALIGNMENT.

    A row has a window of 15 exponents. A weight whose exponent field lies in it is a code of 4 bits
    (exponent - first, 0 to 14) and a byte (sign << 7 | mantissa). Any other is an escape: code 15,
    and its byte is its number among the escapes of its group of 16 rows, by row and then column;
    its 16 bits are in the table at offsets[group] + number.

    Codes and bytes lie in the order in which the 32 lanes of mma.m16n8k16 hold a tile of 16 rows
    and 64 columns. Lane 4 * g + t holds for half h and product j, with c = 32 * h + 16 * j + 2 * t,
    four pairs of weights: r0 (row g, columns c and c + 1), r1 (row g + 8, the same), r2 (row g,
    columns c + 8 and c + 9), r3 (row g + 8, the same). What belongs to the first weight of a pair
    is in the low 16 bits of a word, what belongs to the second in the high ones.

    Attributes:
        bytes: int32 [N / 16, K / 64, 2 (h), 32 (lane), 4]. Word 2 * j + p holds A = r0 and B = r1
            where p = 0, A = r2 and B = r3 where p = 1; of 16 bits: bit 15 is the sign of A, bits 14
            to 8 the mantissa of B, bit 7 the sign of B, bits 6 to 0 the mantissa of A.
        codes: int32 [N / 16, K / 64, 32 (lane), 4]. Word 2 * h + j holds the codes of register i at
            bits 4 * i and 16 + 4 * i.
        first: uint8 [N], the lowest exponent of each row's window, 0 to 241.
        offsets: int32 [N / 16], where each group's escapes begin in the table.
        table: int16 [capacity + 256], the bits of escapes; zeros behind them, so that every byte is
            an index into it.
        scratch: bfloat16 [N, K], in which products of many tokens restore the matrix; others may
            share the memory, as work on one stream does. Of a matrix of experts the rows of some,
            which are restored together. None: each call allocates.
        launches: arguments of kernels that were launched with these tensors, kept for the next
            launch; made by kernels.cuda and kernels.ops.experts alone, and written by every launch,
            so that on a GPU one thread at a time may use the object.
    """

    bytes: torch.Tensor
    codes: torch.Tensor
    first: torch.Tensor
    offsets: torch.Tensor
    table: torch.Tensor
    scratch: torch.Tensor | None = None
    launches: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise ValueError unless the tensors are those of one matrix; no operator looks again."""
        num_rows, num_columns = self.shape
        groups, tiles = num_rows // 16, num_columns // 64
        shapes = {
            "bytes": ((groups, tiles, 2, 32, 4), torch.int32),
            "codes": ((groups, tiles, 32, 4), torch.int32),
            "first": ((num_rows,), torch.uint8),
            "offsets": ((groups,), torch.int32),
            "table": ((max(MAX_GROUP_ESCAPES, self.table.shape[0]),), torch.int16),
        }
        for part, (shape, dtype) in shapes.items():
            found: torch.Tensor = getattr(self, part)
            wanted = tuple(shape), dtype, self.bytes.device, True
            got = tuple(found.shape), found.dtype, found.device, found.is_contiguous()
            if wanted != got or num_rows % 16 or not groups:
                raise ValueError(
                    f"codes.{part}: expected (shape, dtype, device, contiguous) {wanted} of a "
                    f"multiple of 16 rows, got {got}. Make codes with empty_codes or pack."
                )
        for part in ("bytes", "codes"):
            if rest := getattr(self, part).data_ptr() % CODES_ALIGNMENT:
                raise ValueError(
                    f"codes.{part}: expected memory at a multiple of {CODES_ALIGNMENT} bytes, "
                    f"which kernels read at a time, got {rest} more. Copy it to memory of its own."
                )
        if self.scratch is not None:
            check_scratch("codes", self.scratch, self.shape, torch.bfloat16)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.first.shape[0], 64 * self.codes.shape[1]

    def with_scratch(self, memory: torch.Tensor, num_experts: int = 0) -> "Codes":
        """Return codes that products of many tokens restore in this memory, if they fit.

        Args:
            memory: uint8, on the device of the products; work of one stream alone may use it.
            num_experts: of the matrix, some of which are restored together; 0: it has none.
        """
        scratch = scratch_of(memory, self.shape, num_experts, torch.bfloat16)
        return self if scratch is None else replace(self, scratch=scratch)

    def rows(self, start: int, stop: int) -> "Codes":
        """Return some rows, both numbers multiples of 16, in the same memory, without scratch."""
        names, groups = ("bytes", "codes", "offsets"), slice(start // 16, stop // 16)
        parts = {name: getattr(self, name)[groups] for name in names}
        return replace(self, **parts, first=self.first[start:stop], scratch=None)

    @property
    def capacity(self) -> int:
        """Most escapes."""
        return self.table.shape[0] - MAX_GROUP_ESCAPES


def empty_codes(num_rows: int, num_columns: int, device: torch.device | str) -> Codes:
    """Allocate the codes of a matrix.

    Args:
        num_rows: a multiple of 16.
        num_columns: a multiple of 64.
        device: where they lie.

    Returns:
        Tensors that are not initialised.
    """
    groups, tiles = num_rows // 16, num_columns // 64

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return Codes(
        bytes=empty((groups, tiles, 2, 32, 4), torch.int32),
        codes=empty((groups, tiles, 32, 4), torch.int32),
        first=empty((num_rows,), torch.uint8),
        offsets=empty((groups,), torch.int32),
        table=empty((codes_table_size(num_rows, num_columns),), torch.int16),
    )


class Escapes(NamedTuple):
    """How many weights are outside the windows of their rows.

    Attributes:
        total: of all rows.
        most: of the group of 16 rows that has most.
    """

    total: int
    most: int

    def fits(self, capacity: int) -> bool:
        """Whether codes with so large a table hold the matrix.

        Args:
            capacity: most escapes of the table.
        """
        return self.total <= capacity and self.most <= MAX_GROUP_ESCAPES


class TooManyEscapesError(ValueError):
    """A matrix has more weights outside the windows of their rows than codes can hold.

    Attributes:
        escapes: how many.
        capacity: most that the table holds.
    """

    def __init__(self, escapes: Escapes, capacity: int) -> None:
        super().__init__(
            f"codes: expected at most {capacity} escapes and {MAX_GROUP_ESCAPES} in 16 rows, got "
            f"{escapes.total} and {escapes.most}. Leave the matrix in bfloat16."
        )
        self.escapes = escapes
        self.capacity = capacity


QUANTISED_KINDS: Final = ("uint4", "uint5", "uint6", "uint8", "float8_e4m3fn", "table4")
"""What the values of a quantised matrix are."""
QUANTISED_ARRAYS: Final = (
    *("values", "scale", "high", "zero", "low", "subscale", "sublow", "columns", "table"),
)
"""The tensors that keep a quantised matrix."""
QUANTISED_ROWS: Final = 16
QUANTISED_TILE: Final = 64
"""Rows and columns of a tile, whose values lie side by side; the last ones are filled up."""


def filled_rows(num_rows: int) -> int:
    """Return the rows of whole tiles that rows of a quantised matrix take.

    Args:
        num_rows: of the matrix.
    """
    return -(-num_rows // QUANTISED_ROWS) * QUANTISED_ROWS


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix of N rows and K columns in small values and scales of groups of columns.

    In float32, and in this order, rounded once to the dtype:

        weight = (scale * subscale) * (value - zero) - low * sublow

    where what is None is left out. With scales of 16 bits every product of integers is exact.

    Arrays lie in tiles of 16 rows and 64 columns, in the order in which the 32 lanes of
    mma.m16n8k16 hold them. Filled up to whole tiles, an array has a shape as if it lay row after
    row, but rows 16 * i to 16 * i + 15 are tile after tile of i, so that arrays are split and
    joined at multiples of 16 rows.

    In a tile, row 8 * u + g and column 32 * h + 16 * q + 8 * n + 2 * t + s belong to lane
    4 * g + t. With b, the bits of a value above the low four:

    - values of 8 bits: uint8 [2 (h), 32 (lane), 2 (u), 2 (q), 2 (n), 2 (s)];
    - of fewer: uint8 [32 (lane), 2 (h), 2 (u), 2 (s), 2 (q)], the low four bits where n is 0 in the
      low half of a byte, where n is 1 in the high one;
    - bits above, b = 1: uint8 [32 (lane), 2 (s), 2 (h)], at bit 4 * u + 2 * q + n;
    - b = 2: uint8 [32 (lane), 2 (h), 2 (s), 2 (u)], from bit 4 * q + 2 * n on.

    What belongs to a group of columns (scale, zero, low, subscale, sublow) lies as [8 (g), 2 (u)]
    for each group.

    Attributes:
        kind: one of QUANTISED_KINDS. Of table4, a value is the one that 4 bits choose in the table.
        dtype: of the weights once they are restored, and of the tokens of products.
        num_rows: N.
        num_columns: K.
        group: columns of one scale, zero and low: 16, 32, a multiple of 64, or all K.
        subgroup: likewise of one subscale and sublow.
        values: uint8 [N, bytes], N filled up; 64 bytes a tile and row, or 32 of fewer than 8 bits.
        scale: [N, ceil(K / group)] float16, bfloat16 or float32, or uint8 s, which means
            2 ** (s - 127); N filled up.
        offset: what is subtracted from every value where there is no zero; less than values can be.
        high: uint8 [N, bytes], N filled up: of uint5 and uint6 the bits above the low four, 8 * b
            bytes a tile and row; else None.
        zero: uint8, of the shape of scale, less than values can be; or None.
        low: of the shape and dtype of scale, or None.
        subscale: int8 [N, ceil(K / subgroup)], N filled up, or None.
        sublow: uint8, of the shape of subscale, or None.
        columns: int32 [K]: column k of the matrix is multiplied with input columns[k]; None: k.
        table: float32 [16] of table4, else None.
        scratch: [N, K] of the dtype, as that of Codes.
        launches: as that of Codes.
    """

    kind: str
    dtype: torch.dtype
    num_rows: int
    num_columns: int
    group: int
    subgroup: int
    values: torch.Tensor
    scale: torch.Tensor
    offset: int = 0
    high: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    low: torch.Tensor | None = None
    subscale: torch.Tensor | None = None
    sublow: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    table: torch.Tensor | None = None
    scratch: torch.Tensor | None = None
    launches: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.num_rows, self.num_columns

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return {"uint4": 4, "uint5": 5, "uint6": 6, "table4": 4}.get(self.kind, 8)

    def __post_init__(self) -> None:
        """Raise ValueError unless the tensors are those of one matrix; no operator looks again."""
        if self.kind not in QUANTISED_KINDS:
            raise ValueError(f"quantised.kind: expected one of {QUANTISED_KINDS}, got {self.kind}.")
        num_rows, num_columns = self.shape
        for part, size in (("group", self.group), ("subgroup", self.subgroup)):
            if size not in {16, 32, num_columns} and size % QUANTISED_TILE:
                raise ValueError(
                    f"quantised.{part}: expected 16, 32, a multiple of {QUANTISED_TILE} or all "
                    f"{num_columns} columns, got {size}."
                )
        tiles, rows = -(-num_columns // QUANTISED_TILE), filled_rows(num_rows)
        row_bytes = tiles * QUANTISED_TILE * (8 if self.bits == 8 else 4) // 8
        groups, subgroups = -(-num_columns // self.group), -(-num_columns // self.subgroup)
        scale_dtype, byte = self.scale.dtype, torch.uint8
        wanted = {
            "values": ((rows, row_bytes), byte),
            "scale": ((rows, groups), scale_dtype),
            "high": ((rows, tiles * 8 * (self.bits - 4)), byte),
            "zero": ((rows, groups), byte),
            "low": ((rows, groups), scale_dtype),
            "subscale": ((rows, subgroups), torch.int8),
            "sublow": ((rows, subgroups), byte),
            "columns": ((num_columns,), torch.int32),
            "table": ((16,), torch.float32),
        }
        if self.scratch is not None:
            check_scratch("quantised", self.scratch, self.shape, self.dtype)
        for part, (shape, dtype) in wanted.items():
            found: torch.Tensor | None = getattr(self, part)
            if found is None:
                continue
            if (tuple(found.shape), found.dtype, found.is_contiguous()) != (shape, dtype, True):
                raise ValueError(
                    f"quantised.{part}: expected a contiguous tensor of shape {shape} in {dtype}, "
                    f"got {tuple(found.shape)} in {found.dtype}."
                )
        if (self.table is None) == (self.kind == "table4"):
            raise ValueError("quantised.table: expected one for table4, and for no other kind.")
        if (self.high is None) == (self.bits in {5, 6}):
            raise ValueError("quantised.high: expected them for uint5 and uint6 alone.")

    @classmethod
    def of(
        cls,
        arrays: Mapping[str, torch.Tensor],
        scratch: torch.Tensor | None,
        num_experts: int = 0,
        **meaning: Any,
    ) -> "Quantised":
        """Return the matrix that arrays keep, restored into the scratch where it has room.

        Args:
            arrays: by the names of the attributes.
            scratch: as that of with_scratch, or None.
            num_experts: likewise.
            meaning: the other attributes; dtype by its name.
        """
        dtype = getattr(torch, meaning["dtype"])
        found = cls(**{**meaning, **arrays, "dtype": dtype})
        return found if scratch is None else found.with_scratch(scratch, num_experts)

    def with_scratch(self, memory: torch.Tensor, num_experts: int = 0) -> "Quantised":
        """Return the same matrix, restored into this memory by products of many tokens.

        Args:
            memory: uint8, on the device; kept only if the matrix has room in it.
            num_experts: of the matrix, some of which are restored together; 0: it has none.
        """
        scratch = scratch_of(memory, self.shape, num_experts, self.dtype)
        return self if scratch is None else replace(self, scratch=scratch)

    def rows(self, start: int, stop: int) -> "Quantised":
        """Return some rows, in the same memory, without scratch.

        Args:
            start: a multiple of 16.
            stop: likewise, or the number of rows.
        """
        names = (name for name in QUANTISED_ARRAYS if name not in {"columns", "table"})
        arrays = {name: each for name in names if (each := getattr(self, name)) is not None}
        own = {name: each[start : filled_rows(stop)] for name, each in arrays.items()}
        return replace(self, **own, num_rows=stop - start, scratch=None)


@dataclass(frozen=True, slots=True)
class Stored:
    """How a quantised matrix is kept: what its kernels are compiled for.

    Attributes:
        kind: that of Quantised.
        scale_dtype: of its scales.
        group: columns of a scale; 0: all.
        subgroup: columns of a subscale; 0: all.
        has: the names of those of zero, low, subscale and sublow that there are; offset where one
            is subtracted.
    """

    kind: str
    scale_dtype: torch.dtype
    group: int
    subgroup: int
    has: frozenset[str]

    @classmethod
    def of(
        cls, *, kind: str, scale_dtype: str, group: int, subgroup: int, offset: int, arrays: Any
    ) -> "Stored":
        """Return how matrices with these arrays are kept.

        Args:
            kind: that of Quantised.
            scale_dtype: of its scales, by its name.
            group: columns of a scale; 0: all.
            subgroup: columns of a subscale; 0: all.
            offset: that of Quantised.
            arrays: the names of its optional arrays.
        """
        has = set(arrays) & {"zero", "low", "subscale", "sublow"}
        if offset and "zero" not in has:
            has.add("offset")
        return cls(kind, getattr(torch, scale_dtype), group, subgroup, frozenset(has))


@dataclass(frozen=True, slots=True)
class Joined:
    """Matrices of the same columns, one below the other, each kept in its own way.

    Attributes:
        parts: a plain tensor [N, K] or a Quantised each.
    """

    parts: tuple["torch.Tensor | Quantised", ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of all, and columns."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]


@dataclass(frozen=True, slots=True)
class HostCache:
    """Keys and values of blocks that have the numbers after those of the cache.

    A block table or slot that names block B + c, where the cache has B blocks, means block c here.
    On a GPU these are CUDA tensors: over pinned host memory, which kernels then read and write in
    place, or over memory of the card, as a buffer that host blocks were copied into.

    Attributes:
        k: [C, K, P, H], dtype and device of the cache; the strides of head, token and element are
            the cache's, that of blocks is free.
        v: [C, K, P, H], as k beside the cache of values.
    """

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of attention over a paged cache: what is read, what is seen of it, what is written.

    Made once, and handed as it is to the checks and to the kernel or its twin.

    Attributes:
        q: queries, [S, N, H] of decode, [T, N, H] of prefill; N a multiple of K, H from 16 to 256;
            may be a strided view.
        k_cache: [B, K, P, H], dtype of q, stride 1 in the last dimension, other strides free.
        v_cache: [B, K, P, H], as k_cache.
        block_tables: [S, M] int32; row s names the blocks of sequence s in order. Entries beyond
            the sequence's length are not read.
        seq_lens: [S] int32, keys of each sequence.
        scale: multiplies the scores.
        out: shape and dtype of q, stride 1 in the last dimension; written.
        window: a query sees the last `window` keys up to its own; blocks and table entries that lie
            wholly before are not read. None: all keys.
        host: blocks B and above, read where they are; None where all blocks are the cache's.
        sinks: [N], dtype of q: exp(sink) is added to the denominator of a head's softmax, as if it
            saw one more key of that score, whose value is zero. None: nothing is added.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    scale: float
    out: torch.Tensor
    window: int | None = None
    host: HostCache | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Partial results of decode attention, and the counters of kernels that share work.

    One workspace may serve calls of the same stream with fewer sequences or shorter ones; two
    streams need two.

    Attributes:
        partial: float32 [S, N, C, H], the output of each of C splits.
        logsumexp: float32 [S, N, C], base-2 logarithm of each split's softmax denominator.
        counters: int32, how many programs of a shared result are done; the last one, which puts the
            parts together, sets it back to zero. Zeros between kernels.
    """

    partial: torch.Tensor
    logsumexp: torch.Tensor
    counters: torch.Tensor


def decode_workspace(
    num_seqs: int, num_heads: int, head_dim: int, max_seq_len: int, device: torch.device | str
) -> DecodeWorkspace:
    """Allocate the scratch tensors of paged_decode_attention and linear.

    Args:
        num_seqs: sequences in a step at most.
        num_heads: query heads.
        head_dim: elements of a head.
        max_seq_len: tokens of a sequence at most.
        device: where attention runs.

    Returns:
        Tensors of decode_workspace_bytes(...) bytes in sum; the counters are zero, the others not
        initialised.
    """
    splits = max(1, decode_num_splits(max_seq_len))
    return DecodeWorkspace(
        partial=torch.empty(
            (num_seqs, num_heads, splits, head_dim), dtype=torch.float32, device=device
        ),
        logsumexp=torch.empty((num_seqs, num_heads, splits), dtype=torch.float32, device=device),
        counters=torch.zeros(
            decode_num_counters(num_seqs, num_heads), dtype=torch.int32, device=device
        ),
    )


@dataclass(frozen=True, slots=True)
class DecodePart:
    """A part of the keys of decodes.

    Attributes:
        begin_key: the first key, a multiple of kernels.sizes.DECODE_SPLIT_TOKENS.
        end_key: the one behind the last key; such a multiple too, but for the last part.
        is_last: whether the results of all parts are added and out is written.
        workspace: partial results of all parts, for the longest sequence of the call; nothing else
            uses it between a call's first part and its last.
    """

    begin_key: int
    end_key: int
    is_last: bool
    workspace: DecodeWorkspace


@dataclass(frozen=True, slots=True)
class PrefillWorkspace:
    """Partial results of prefill attention with few queries.

    One workspace may serve calls of the same stream with fewer queries or shorter sequences; two
    streams need two.

    Attributes:
        partial: float32 [R, H], the output of each part of the keys, query and head.
        logsumexp: float32 [R], base-2 logarithm of each one's softmax denominator.
        max_seq_len: no sequence of a call is longer, in tokens; bounds the grid.
    """

    partial: torch.Tensor
    logsumexp: torch.Tensor
    max_seq_len: int


def prefill_workspace(
    num_queries: int, num_heads: int, head_dim: int, max_seq_len: int, device: torch.device | str
) -> PrefillWorkspace:
    """Allocate the scratch tensors of paged_prefill_attention.

    Args:
        num_queries: queries of a call at most, of all its sequences; those of calls of more than
            kernels.sizes.PREFILL_SPLIT_MAX_QUERIES need none.
        num_heads: query heads.
        head_dim: elements of a head.
        max_seq_len: tokens of a sequence at most.
        device: where attention runs.

    Returns:
        Tensors of prefill_workspace_bytes(...) bytes in sum, not initialised.
    """
    rows = prefill_partial_rows(num_queries, num_heads, head_dim, max_seq_len)
    return PrefillWorkspace(
        partial=torch.empty((rows, head_dim), dtype=torch.float32, device=device),
        logsumexp=torch.empty(rows, dtype=torch.float32, device=device),
        max_seq_len=max_seq_len,
    )


@dataclass(frozen=True, slots=True)
class PrefillState:
    """What is known of a prefill's queries between two parts of their keys.

    One state may serve calls of the same stream with fewer queries, one prefill after the other.

    Attributes:
        row_max: float32 [T, N], the largest score so far; of what base is the operator's affair.
        row_sum: float32 [T, N], the softmax denominator so far, relative to row_max.
        acc: float32 [T, N, H], the weighted sum of values so far, relative to row_max.
    """

    row_max: torch.Tensor
    row_sum: torch.Tensor
    acc: torch.Tensor


def prefill_state(
    num_tokens: int, num_heads: int, head_dim: int, device: torch.device | str
) -> PrefillState:
    """Allocate the state of paged_prefill_part.

    Args:
        num_tokens: queries of a call at most.
        num_heads: query heads.
        head_dim: elements of a head.
        device: where attention runs.

    Returns:
        Tensors of prefill_state_bytes(...) bytes in sum, not initialised: the first part does.
    """
    shape = (num_tokens, num_heads, head_dim)
    return PrefillState(
        row_max=torch.empty(shape[:2], dtype=torch.float32, device=device),
        row_sum=torch.empty(shape[:2], dtype=torch.float32, device=device),
        acc=torch.empty(shape, dtype=torch.float32, device=device),
    )


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """A part of a prefill's keys.

    Attributes:
        begin_key: its first key in every sequence, a multiple of PREFILL_PART_KEYS; 0 begins anew.
        end_key: the key after its last one, a multiple of PREFILL_PART_KEYS unless is_last.
        is_last: whether out is written; the other parts write the state.
        state: for at least T queries; carried from part to part, and free after the last one. Read
            by no other call in between.
        tiers: where the blocks with keys of the part lie. If all lie in one tier, no key costs a
            look where its block lies; the bits are the same.
    """

    begin_key: int
    end_key: int
    is_last: bool
    state: PrefillState
    tiers: Literal["cache", "host", "both"] = "both"
