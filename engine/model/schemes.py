"""How a linear layer of a quantised checkpoint is stored, and what its arrays are; no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

TILE: Final = 64
TILE_ROWS: Final = 16
"""Columns and rows whose values lie side by side; the last ones are filled up."""
ELEMENT_BYTES: Final = MappingProxyType(
    {
        "int64": 8,
        "float32": 4,
        "int32": 4,
        "int16": 2,
        "float16": 2,
        "bfloat16": 2,
        "uint8": 1,
        "int8": 1,
        "float8_e4m3fn": 1,
        "json": 1,
    }
)
GGUF_TYPES: Final = MappingProxyType(
    {
        "Q4_0": (32, 18),
        "Q4_1": (32, 20),
        "Q5_0": (32, 22),
        "Q5_1": (32, 24),
        "Q8_0": (32, 34),
        "Q4_K": (256, 144),
        "Q5_K": (256, 176),
        "Q6_K": (256, 210),
    }
)
"""Quantised types of GGUF: columns of a block, and its bytes."""
GGUF_ROWS: Final = "gguf-rows"
"""Plain rows of a GGUF file that are put into another order."""
GGUF_NORM: Final = "gguf-norm"
"""Weights of norms to which a GGUF file has 1 added."""
ROUNDED: Final = "int"
"""Integers that a load makes of plain rows; no checkpoint has them (model.quantize)."""
EXPERT_ROWS: Final = "expert-rows"
"""Plain experts whose matrices are transposed, each gate before its up."""
ROWS_BIAS: Final = "rows-bias"
"""Biases that are put into another order, as the rows of their matrix are."""
MXFP4: Final = "mxfp4"
LINEAR: Final = "Linear"
"""A target that every matrix of a layer and the head match."""


@dataclass(frozen=True)
class Scheme:
    """How the weight of a linear layer is stored.

    Attributes:
        layout: A key of LAYOUTS.
        bits: Bits of a value.
        group: Input columns of one scale; 0: all.
        scale_dtype: dtype of scales as they are stored.
        symmetric: Whether there are no zero points.
        ordered: Whether columns are grouped in an order of their own (g_idx).
        zeros_from_one: Whether zero points are stored less one (GPTQ's first version).
        rows: Rows of one scale; 0: all.
        nested: Whether scales are quantised too (bitsandbytes).
        heads: Heads of queries and of keys, where a GGUF file keeps rows that rotate together side
            by side; 0: it does not.
        index_dtype: dtype of GPTQ's g_idx; empty: there is none, columns are grouped as they stand.
    """

    layout: str
    bits: int
    group: int = 0
    scale_dtype: str = "float16"
    symmetric: bool = False
    ordered: bool = False
    zeros_from_one: bool = False
    rows: int = 1
    heads: tuple[int, int] = (0, 0)
    nested: bool = False
    index_dtype: str = "int32"

    @property
    def name(self) -> str:
        """Name in plans and records."""
        is_whole = self.layout.startswith(("gguf", "nf4", MXFP4))
        return self.layout if is_whole else f"{self.layout}{self.bits}"

    @property
    def gguf_type(self) -> str:
        """Type of a GGUF file; empty: of no such file."""
        word = self.layout.removeprefix("gguf-").upper()
        return word if word in GGUF_TYPES else ""


@dataclass(frozen=True)
class Arrays:
    """What one scheme keeps of a matrix of N rows and K columns in a checkpoint, and here."""

    kind: str
    """The kind of kernels.arguments.Quantised."""
    stored: tuple[tuple[str, tuple[int, ...], str | None], ...]
    """Suffix of the parameter, shape, dtype; None: that of scales."""
    offset: int = 0
    has: tuple[str, ...] = ()
    """Optional tensors of kernels.arguments.Quantised."""
    subgroup: int = 0


def groups_of(scheme: Scheme, columns: int) -> int:
    """Return how many groups so many columns are."""
    return -(-columns // (scheme.group or columns))


def _awq(scheme: Scheme, rows: int, columns: int) -> Arrays:
    groups = groups_of(scheme, columns)
    return Arrays(
        "uint4",
        (
            ("qweight", (columns, rows // 8), "int32"),
            ("qzeros", (groups, rows // 8), "int32"),
            ("scales", (groups, rows), None),
        ),
        has=("zero",),
    )


def _gptq(scheme: Scheme, rows: int, columns: int) -> Arrays:
    groups, bits = groups_of(scheme, columns), scheme.bits
    return Arrays(
        f"uint{bits}",
        (
            ("qweight", (columns * bits // 32, rows), "int32"),
            ("qzeros", (groups, rows * bits // 32), "int32"),
            ("scales", (groups, rows), None),
            *((("g_idx", (columns,), scheme.index_dtype),) if scheme.index_dtype else ()),
        ),
        has=("zero", "columns") if scheme.ordered else ("zero",),
    )


def _scale_shape(scheme: Scheme, rows: int, columns: int) -> tuple[int, ...]:
    """Return the shape of scales that stand by rows."""
    if not scheme.rows:
        return (1,)
    return -(-rows // scheme.rows), groups_of(scheme, columns)


def _packed(scheme: Scheme, rows: int, columns: int) -> Arrays:
    bits, groups = scheme.bits, groups_of(scheme, columns)
    zeros = ("weight_zero_point", (-(-rows * bits // 32), groups), "int32")
    return Arrays(
        f"uint{bits}",
        (
            ("weight_packed", (rows, -(-columns * bits // 32)), "int32"),
            ("weight_scale", _scale_shape(scheme, rows, columns), None),
            ("weight_shape", (2,), "int64"),
            *(() if scheme.symmetric else (zeros,)),
            *((("weight_g_idx", (columns,), "int32"),) if scheme.ordered else ()),
        ),
        offset=2 ** (bits - 1) if scheme.symmetric else 0,
        has=(
            *(() if scheme.symmetric else ("zero",)),
            *(("columns",) if scheme.ordered else ()),
        ),
    )


def _bytes(scheme: Scheme, rows: int, columns: int) -> Arrays:
    """Return what is kept of whole bytes: int8, or float8."""
    is_float, shape = scheme.layout != "int-quantized", _scale_shape(scheme, rows, columns)
    has_zero = not (is_float or scheme.symmetric)
    return Arrays(
        "float8_e4m3fn" if is_float else "uint8",
        (
            ("weight", (rows, columns), "float8_e4m3fn" if is_float else "int8"),
            ("weight_scale", shape, None),
            *((("weight_zero_point", shape, "int8"),) if has_zero else ()),
        ),
        offset=0 if is_float or has_zero else 128,
        has=("zero",) if has_zero else (),
    )


STATE_BYTES: Final = 1024
"""At most, of what bitsandbytes says of a tensor in JSON."""
JSON: Final = "json"
"""dtype of bytes of any number up to what is asked for, in uint8."""


def _nf4(scheme: Scheme, rows: int, columns: int) -> Arrays:
    blocks = rows * columns // scheme.group
    nested = (
        ("weight.nested_absmax", (-(-blocks // 256),), "float32"),
        ("weight.nested_quant_map", (256,), "float32"),
    )
    return Arrays(
        "table4",
        (
            ("weight", (rows * columns // 2, 1), "uint8"),
            ("weight.absmax", (blocks,), "uint8" if scheme.nested else "float32"),
            ("weight.quant_map", (16,), "float32"),
            ("weight.quant_state.bitsandbytes__nf4", (STATE_BYTES,), JSON),
            *(nested if scheme.nested else ()),
        ),
        has=("table",),
    )


_GGUF_HAS: Final = MappingProxyType(
    {
        "Q4_1": ("low",),
        "Q5_1": ("low",),
        "Q4_K": ("low", "subscale", "sublow"),
        "Q5_K": ("low", "subscale", "sublow"),
        "Q6_K": ("subscale",),
    }
)
_GGUF_OFFSETS: Final = MappingProxyType({"Q4_0": 8, "Q5_0": 16, "Q8_0": 128, "Q6_K": 32})


def _gguf(scheme: Scheme, rows: int, columns: int) -> Arrays:
    word = scheme.gguf_type
    block, block_bytes = GGUF_TYPES[word]
    return Arrays(
        f"uint{scheme.bits}",
        (("weight", (rows, columns // block * block_bytes), "uint8"),),
        offset=_GGUF_OFFSETS.get(word, 0),
        has=_GGUF_HAS.get(word, ()),
        subgroup={"Q4_K": 32, "Q5_K": 32, "Q6_K": 16}.get(word, 0),
    )


def gguf_scheme(word: str, heads: tuple[int, int] = (0, 0)) -> Scheme:
    """Return the scheme of a quantised type of GGUF."""
    bits = int(word[1])
    return Scheme(f"gguf-{word.lower()}", bits, GGUF_TYPES[word][0], "float16", heads=heads)


def _plain(_: Scheme, rows: int, columns: int) -> Arrays:
    return Arrays("", (("weight", (rows, columns), None),))


def _norm(_: Scheme, rows: int, columns: int) -> Arrays:
    del columns
    return Arrays("", (("weight", (rows,), None),))


def _expert_rows(_: Scheme, rows: int, columns: int) -> Arrays:
    return Arrays("", (("weight", (columns, rows), None),))


def _rows_bias(_: Scheme, rows: int, columns: int) -> Arrays:
    del columns
    return Arrays("", (("bias", (rows,), None),))


def _mxfp4(scheme: Scheme, rows: int, columns: int) -> Arrays:
    """Return what is kept of blocks of 32 e2m1 values, two a byte, with a scale of e8m0 each."""
    groups = groups_of(scheme, columns)
    return Arrays(
        "table4",
        (
            ("blocks", (rows, groups, scheme.group // 2), "uint8"),
            ("scales", (rows, groups), "uint8"),
        ),
        has=("table",),
    )


def _rounded(scheme: Scheme, rows: int, columns: int) -> Arrays:
    return Arrays(f"uint{scheme.bits}", (("weight", (rows, columns), None),), has=("zero",))


class Layout(NamedTuple):
    """One way to store a matrix."""

    arrays: Callable[[Scheme, int, int], Arrays]
    """Returns what it keeps of a matrix of so many rows and columns."""
    bits: tuple[int, ...]
    """Bits that a value may have."""


LAYOUTS: Final = MappingProxyType(
    {
        ROUNDED: Layout(_rounded, (4, 8)),
        **{f"gguf-{word.lower()}": Layout(_gguf, (int(word[1]),)) for word in GGUF_TYPES},
        GGUF_ROWS: Layout(_plain, (16,)),
        GGUF_NORM: Layout(_norm, (32,)),
        EXPERT_ROWS: Layout(_expert_rows, (16,)),
        ROWS_BIAS: Layout(_rows_bias, (16,)),
        MXFP4: Layout(_mxfp4, (4,)),
        "awq": Layout(_awq, (4,)),
        "gptq": Layout(_gptq, (4, 8)),
        "nf4": Layout(_nf4, (4,)),
        "pack-quantized": Layout(_packed, (4, 8)),
        "int-quantized": Layout(_bytes, (8,)),
        "float-quantized": Layout(_bytes, (8,)),
        "fp8": Layout(_bytes, (8,)),
    }
)
"""Every layout by name."""
_WORDS: Final = frozenset({"awq", "gptq"})
"""Layouts that keep values of several rows in one word."""


def arrays_of(scheme: Scheme, rows: int, columns: int) -> Arrays:
    """Return what a scheme keeps of a matrix."""
    return LAYOUTS[scheme.layout].arrays(scheme, rows, columns)


def why_not(scheme: Scheme, rows: int, columns: int) -> str:
    """Return why a matrix cannot be stored so; nothing if it can."""
    size, unit = scheme.group, 32 // scheme.bits
    if (scheme.gguf_type or scheme.layout in {"nf4", MXFP4}) and columns % size:
        return f"a multiple of {size} columns, got {columns}"
    if size < 0 or (size and size not in {16, 32, columns} and size % TILE):
        return f"groups of 16, 32, a multiple of {TILE} or all columns, got {size}"
    if size and columns % size and scheme.layout in _WORDS:
        return f"groups of {size} that divide its columns, got {columns}"
    if scheme.layout in _WORDS and (rows % unit or columns % unit):
        return f"rows and columns that fill words of {unit}, got {rows} x {columns}"
    return ""
