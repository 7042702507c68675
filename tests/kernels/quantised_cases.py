"""Random quantised matrices of every kind, and their weights by a slow reading of the layout."""

from dataclasses import dataclass
from typing import Any

import torch

from kernels.arguments import Quantised, filled_rows

NF4 = torch.linspace(-1, 1, 16)


@dataclass(frozen=True)
class Case:
    """What a random matrix has."""

    kind: str
    group: int = 0
    """0: all columns."""
    subgroup: int = 0
    has: tuple[str, ...] = ()
    offset: int = 0
    scale_dtype: torch.dtype = torch.float16

    def __str__(self) -> str:
        return " ".join(map(str, (self.kind, self.group, *self.has)))


CASES = [
    Case("uint4", 128, has=("zero",)),
    Case("uint4", 32, offset=8, scale_dtype=torch.bfloat16),
    Case("uint4", 32, has=("low",)),
    Case("uint4", 256, 32, has=("low", "subscale", "sublow")),
    Case("uint5", 256, 32, has=("low", "subscale", "sublow")),
    Case("uint6", 256, 16, offset=32, has=("subscale",)),
    Case("uint8", 32, offset=128),
    Case("uint8", 64, has=("zero", "columns")),
    Case("uint8", offset=128),
    Case("float8_e4m3fn", scale_dtype=torch.float32),
    Case("float8_e4m3fn", 128, scale_dtype=torch.float32),
    Case("table4", 64, scale_dtype=torch.float32),
]


def make(
    case: Case, num_rows: int, num_columns: int, dtype: torch.dtype, rng: torch.Generator
) -> Quantised:
    """Return a random matrix whose weights are about 0.05."""

    def draw(high: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=rng, device=rng.device).to(dtype)

    bits = {"uint4": 4, "uint5": 5, "uint6": 6, "table4": 4}.get(case.kind, 8)
    tiles, byte = -(-num_columns // 64), torch.uint8
    group, subgroup = (case.group or num_columns), (case.subgroup or num_columns)
    rows = filled_rows(num_rows)
    groups = rows, -(-num_columns // group)
    subgroups = rows, -(-num_columns // subgroup)
    scale = torch.rand(groups, generator=rng, device=rng.device) + 0.5
    size = {"uint4": 8, "uint5": 400, "uint6": 400, "uint8": 128, "table4": 0.7}.get(case.kind, 80)
    size *= 30 if "subscale" in case.has and case.kind == "uint4" else 1
    values = draw(256, (rows, tiles * (64 if bits == 8 else 32)), byte)
    if case.kind == "float8_e4m3fn":
        values[(values & 127) == 127] = 5
    others: dict[str, Any] = {
        "high": draw(256, (rows, tiles * 8 * (bits - 4)), byte) if bits in {5, 6} else None,
        "zero": draw(2**bits, groups, byte),
        "low": (scale.flip(1) * (0.001 if "sublow" in case.has else 0.03)).to(case.scale_dtype),
        "subscale": draw(64, subgroups, torch.int8) - (32 if case.kind == "uint6" else 0),
        "sublow": draw(64, subgroups, byte),
        "columns": torch.randperm(num_columns, generator=rng, device=rng.device).int(),
        "table": NF4.to(rng.device) if case.kind == "table4" else None,
    }
    is_exponent = case.scale_dtype == torch.uint8
    optional = {"zero", "low", "subscale", "sublow", "columns"} - set(case.has)
    return Quantised(
        kind=case.kind,
        dtype=dtype,
        num_rows=num_rows,
        num_columns=num_columns,
        group=group,
        subgroup=subgroup,
        values=values,
        scale=draw(5, groups, byte) + 118
        if is_exponent
        else (scale * 0.05 / size).to(case.scale_dtype),
        offset=case.offset,
        **{name: None if name in optional else each for name, each in others.items()},
    )


def slowly(weight: Quantised, row: int, column: int) -> float:
    """Return one weight as the documentation of Quantised gives it."""
    block, u, g = row // 16, row % 16 // 8, row % 8
    tile, h, q, n = column // 64, column // 32 % 2, column // 16 % 2, column // 8 % 2
    t, s = column // 2 % 4, column % 2
    lane, tiles = 4 * g + t, -(-weight.num_columns // 64)

    def of_tile(each: torch.Tensor) -> torch.Tensor:
        return each.view(-1, tiles, each.numel() // len(each) * 16 // tiles)[block, tile]

    if weight.bits == 8:
        value = int(of_tile(weight.values).view(2, 32, 2, 2, 2, 2)[h, lane, u, q, n, s])
    else:
        value = int(of_tile(weight.values).view(32, 2, 2, 2, 2)[lane, h, u, s, q]) >> 4 * n & 15
    if weight.bits == 5:
        byte = int(of_tile(weight.high).view(32, 2, 2)[lane, s, h])
        value |= (byte >> 4 * u + 2 * q + n & 1) << 4
    if weight.bits == 6:
        byte = int(of_tile(weight.high).view(32, 2, 2, 2)[lane, h, s, u])
        value |= (byte >> 4 * q + 2 * n & 3) << 4

    def at(each: torch.Tensor, size: int) -> torch.Tensor:
        return each.view(-1, each.shape[1], 8, 2)[block, column // size, g, u].float()

    if weight.kind == "table4":
        number = weight.table[value]
    elif weight.kind == "float8_e4m3fn":
        number = torch.tensor(value, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    else:
        zero = weight.offset if weight.zero is None else at(weight.zero, weight.group)
        number = torch.tensor(float(value)) - zero
    scale = at(weight.scale, weight.group)
    if weight.subscale is not None:
        scale = scale * at(weight.subscale, weight.subgroup)
    found = scale * number
    if weight.low is not None:
        low = at(weight.low, weight.group)
        found = found - (low if weight.sublow is None else low * at(weight.sublow, weight.subgroup))
    return found.to(weight.dtype).item()
