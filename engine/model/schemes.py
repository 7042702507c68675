"""How a linear layer of a quantised checkpoint is stored, and what its arrays are; no torch."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

TILE: Final = 64
"""Columns whose values lie side by side; the last ones of a row are filled up."""
ELEMENT_BYTES: Final = MappingProxyType(
    {
        "int64": 8,
        "float32": 4,
        "int32": 4,
        "float16": 2,
        "bfloat16": 2,
        "uint8": 1,
        "int8": 1,
        "float8_e4m3fn": 1,
    }
)
LINEAR: Final = "Linear"
"""A target that every matrix of a layer and the head match."""


@dataclass(frozen=True)
class Scheme:
    """How the weight of a linear layer is stored.

    Attributes:
        layout: A key of LAYOUTS.
        bits: Of a value.
        group: Input columns of one scale; 0: all.
        scale_dtype: Of scales as they are stored.
        symmetric: Whether there are no zero points.
        ordered: Whether columns are grouped in an order of their own (g_idx).
        zeros_from_one: Whether zero points are stored less one (GPTQ's first version).
        rows: Rows of one scale; 0: all.
    """

    layout: str
    bits: int
    group: int = 0
    scale_dtype: str = "float16"
    symmetric: bool = False
    ordered: bool = False
    zeros_from_one: bool = False
    rows: int = 1

    @property
    def name(self) -> str:
        """Name in plans and records."""
        return f"{self.layout}{self.bits}"


@dataclass(frozen=True)
class Arrays:
    """What one scheme keeps of a matrix of N rows and K columns in a checkpoint, and here."""

    kind: str
    """Of kernels.arguments.Quantised."""
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
            ("g_idx", (columns,), "int32"),
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
    is_inverse = scheme.layout == "fp8" and scheme.rows > 1
    has_zero = not (is_float or scheme.symmetric)
    return Arrays(
        "float8_e4m3fn" if is_float else "uint8",
        (
            ("weight", (rows, columns), "float8_e4m3fn" if is_float else "int8"),
            ("weight_scale_inv" if is_inverse else "weight_scale", shape, None),
            *((("weight_zero_point", shape, "int8"),) if has_zero else ()),
        ),
        offset=0 if is_float or has_zero else 128,
        has=("zero",) if has_zero else (),
    )


LAYOUTS: Final = MappingProxyType(
    {
        "awq": _awq,
        "gptq": _gptq,
        "pack-quantized": _packed,
        "int-quantized": _bytes,
        "float-quantized": _bytes,
        "fp8": _bytes,
    }
)
"""What each layout keeps of a matrix, by name."""
BITS: Final = MappingProxyType(
    {
        "awq": (4,),
        "gptq": (4, 8),
        "pack-quantized": (4, 8),
        "int-quantized": (8,),
        "float-quantized": (8,),
        "fp8": (8,),
    }
)
"""Bits of a value in each layout."""
_WORDS: Final = frozenset({"awq", "gptq"})
"""Layouts that keep values of several rows in one word."""


def arrays_of(scheme: Scheme, rows: int, columns: int) -> Arrays:
    """Return what a scheme keeps of a matrix."""
    return LAYOUTS[scheme.layout](scheme, rows, columns)


def why_not(scheme: Scheme, rows: int, columns: int) -> str:
    """Return why a matrix cannot be stored so; nothing if it can."""
    size, unit = scheme.group, 32 // scheme.bits
    if size and size not in {16, 32, columns} and size % TILE:
        return f"groups of 16, 32, a multiple of {TILE} or all columns, got {size}"
    if size and columns % size and scheme.layout in _WORDS:
        return f"groups of {size} that divide its columns, got {columns}"
    if scheme.layout in _WORDS and (rows % unit or columns % unit):
        return f"rows and columns that fill words of {unit}, got {rows} x {columns}"
    return ""
