"""How the kernel of products reads a weight: its loaders, and what each takes as arguments."""

from dataclasses import dataclass, field
from typing import Final

import torch

from kernels.arguments import Codes, Quantised
from kernels.cuda.driver import Args

_VALUES: Final = {
    "uint4": ("UINT4", 512),
    "uint5": ("UINT5", 512 + 128),
    "uint6": ("UINT6", 512 + 256),
    "uint8": ("UINT8", 1024),
    "float8_e4m3fn": ("FLOAT8", 1024),
    "table4": ("TABLE4", 512),
}
"""Name in the source of each kind, and the bytes of a tile's values."""
_SCALES: Final = {
    torch.float16: ("IN_FLOAT16", 2),
    torch.bfloat16: ("IN_BFLOAT16", 2),
    torch.float32: ("IN_FLOAT32", 4),
}
_ARRAYS: Final = ("zero", "low", "subscale", "sublow")
_WHOLE_GROUP: Final = 64
"""Columns of a step: groups of more have one scale in it."""
_LINE_BYTES: Final = 128
"""Of memory; copies start where lines do."""


@dataclass(frozen=True, slots=True)
class Loader:
    """A class of the source.

    Attributes:
        expression: its name, with its template arguments.
        tile_bytes: what it copies for 16 rows and 64 inputs, a multiple of 16.
        steps: the most of 64 inputs that are multiplied between two waits.
        is_light: whether a tile takes so few instructions that a warp should have several.
    """

    expression: str
    tile_bytes: int
    steps: int = 1
    is_light: bool = field(default=False, repr=False)

    def chunk_bytes(self, tiles: int) -> int:
        """Return the shared memory of so many tiles that are copied at a time, in whole lines."""
        return -(-tiles * self.tile_bytes // _LINE_BYTES) * _LINE_BYTES


PLAIN: Final = Loader("Plain", 2048)
CODES: Final = Loader("Codes", 1536)


def quantised(
    kind: str, scale_dtype: torch.dtype, group: int, subgroup: int, has: frozenset[str]
) -> Loader:
    """Return the loader of quantised weights.

    Args:
        kind: of values.
        scale_dtype: of scales.
        group: columns of one; 0: all, which have no subscale.
        subgroup: columns of a subscale.
        has: which of zero, low, subscale and sublow there are, and whether there is an offset.
    """
    (values, num_bytes), (scales, size) = _VALUES[kind], _SCALES[scale_dtype]
    flags = [name for name in (*_ARRAYS, "offset") if name in has]
    groups, subgroups = min(group, _WHOLE_GROUP), min(subgroup, _WHOLE_GROUP)
    spans = 16 * _WHOLE_GROUP // groups if groups else 0
    subspans = 16 * _WHOLE_GROUP // subgroups
    sizes = {"zero": spans, "low": spans * size, "subscale": subspans, "sublow": subspans}
    num_bytes += spans * size + sum(sizes[name] for name in _ARRAYS if name in has)
    names = " | ".join(name.upper() for name in flags) or "0"
    expression = f"Quantised<{values}, {scales}, {groups}, {subgroups}, {names}>"
    is_light = kind == "uint4" and scale_dtype != torch.float32 and not has & {"low", "subscale"}
    return Loader(expression, num_bytes, 2 if kind in {"uint8", "float8_e4m3fn"} else 4, is_light)


def loader_of(weight: Quantised) -> Loader:
    """Return the loader of a quantised weight."""
    found: Loader | None = weight.launches.get("loader")
    if found is None:
        has = frozenset(name for name in _ARRAYS if getattr(weight, name) is not None)
        if weight.offset and weight.zero is None:
            has |= {"offset"}
        is_of_rows = weight.group == weight.num_columns and weight.subscale is None
        group = 0 if is_of_rows else weight.group
        found = quantised(weight.kind, weight.scale.dtype, group, weight.subgroup, has)
        weight.launches["loader"] = found
    return found


def args_of(weight: Codes | Quantised, use: str) -> Args:
    """Return the argument of kernels that read a weight, kept for the next launch.

    Args:
        weight: on the device, or over pinned host memory.
        use: by which kernel; what else it sets stays.
    """
    args: Args | None = weight.launches.get(use)
    if args is None:
        args = weight.launches[use] = Args(rows=weight.shape[0], inputs=weight.shape[1])
        if isinstance(weight, Codes):
            _set_codes(args, weight)
        else:
            _set_quantised(args, weight)
    return args


def _set_codes(args: Args, codes: Codes) -> None:
    for name in ("bytes", "codes", "first", "offsets", "table"):
        setattr(args, name, getattr(codes, name).data_ptr())


def _set_quantised(args: Args, weight: Quantised) -> None:
    for name in ("values", "high", "scale", "zero", "low", "subscale", "sublow"):
        array: torch.Tensor | None = getattr(weight, name)
        setattr(args, name, None if array is None else array.data_ptr())
    args.numbers = None if weight.table is None else weight.table.data_ptr()
    args.offset = weight.offset
    for name, size in (("group", weight.group), ("subgroup", weight.subgroup)):
        columns = weight.num_columns
        of_steps = max(1, size // _WHOLE_GROUP)
        units = -(-columns // max(size, _WHOLE_GROUP))
        setattr(args, f"{name}_units", units)
        setattr(args, f"{name}_inverse", -(-(2**31) // of_steps))
