"""Cases of kernels.bench whose weights are codes or quantised."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from kernels.arguments import (
    CODES_PARTS,
    QUANTISED_ARRAYS,
    Codes,
    Quantised,
    decode_workspace,
    empty_codes,
)
from kernels.bench_timing import (
    HEAD_SIZE,
    ROUNDS,
    Case,
    Product,
    Weight,
    num_copies,
    operator_of,
    randn,
)
from kernels.ops import codes, linear, quantised

_CODES_TOKENS: Final = (1, 16, 32, 64)
_CODES_SIZES: Final = ((4096, 6144), (4096, 4096), (14336, 4096), (4096, 28672))
"""Inputs and rows of weights in codes."""


def stored_bytes(packed: Codes) -> int:
    """Return the bytes of a weight in codes, those of its tables among them."""
    return sum(getattr(packed, part).nbytes for part in CODES_PARTS)


def _multiply(x: torch.Tensor, weights: Iterable[Weight], product: Product) -> None:
    for weight in weights:
        product(x, weight)


def _code_products(
    op: str, sizes: tuple[tuple[int, int], ...], device: torch.device
) -> Iterator[Case]:
    """Products with weights in codes, over those with the same weights plain."""
    plain, coded = operator_of(linear, op), operator_of(codes, op)
    if op == "linear":
        plain = partial(plain, workspace=decode_workspace(1, 1, HEAD_SIZE, 1, device))

    def has_plain_bits(x: torch.Tensor, weights: torch.Tensor, packed: list[Codes]) -> bool:
        pairs = zip(weights, packed, strict=True)
        return all(torch.equal(coded(x, one), plain(x, weight)) for weight, one in pairs)

    for size_in, size_out in sizes:
        copies = num_copies(size_in, size_out)
        weights = randn((copies, size_out, size_in), device)
        packed = [codes.pack(weight) for weight in weights]
        for num_tokens in _CODES_TOKENS:
            x = randn((num_tokens, size_in), device)
            out_bytes = plain(x, weights[0]).nbytes
            yield Case(
                f"{op} in codes, {copies} of {num_tokens} x {size_in} by {size_in} x {size_out}",
                partial(_multiply, x, packed, coded),
                sum(map(stored_bytes, packed)) + copies * (x.nbytes + out_bytes),
                num_flops=2 * num_tokens * weights.numel(),
                beside=Case("", partial(_multiply, x, weights, plain), 0),
                check=partial(has_plain_bits, x, weights, packed),
            )


def restore_case(size_in: int, size_out: int, device: torch.device) -> Case:
    """Return the case of num_copies weights in codes that are written as bfloat16.

    A call writes them ROUNDS times, one after the other, as the prefill of a model does.
    """
    copies = num_copies(size_in, size_out)
    weights = randn((copies, size_out, size_in), device)
    packed, out = [codes.pack(weight) for weight in weights], torch.empty_like(weights)

    def run() -> None:
        for _ in range(ROUNDS):
            for one, place in zip(packed, out, strict=True):
                codes.restore(one, place)

    def has_the_weights() -> bool:
        out.zero_()
        run()
        return torch.equal(out.view(torch.int16), weights.view(torch.int16))

    return Case(
        f"restore {copies} of {size_in} x {size_out}",
        run,
        sum(map(stored_bytes, packed)) + out.nbytes,
        num_layers=ROUNDS,
        check=has_the_weights,
    )


def _restore(device: torch.device) -> Iterator[Case]:
    for size_in, size_out in _CODES_SIZES:
        yield restore_case(size_in, size_out, device)


def _pack(device: torch.device) -> Iterator[Case]:
    """Weights of bfloat16, written in codes."""
    for size_in, size_out in _CODES_SIZES:
        weight = randn((size_out, size_in), device)
        packed = empty_codes(size_out, size_in, device)
        yield Case(
            f"pack {size_in} x {size_out}",
            partial(codes.pack_into, weight, packed),
            weight.nbytes + stored_bytes(packed),
            check=partial(_restores, packed, weight),
            is_captured=False,
        )


def _restores(packed: Codes, weight: torch.Tensor) -> bool:
    """Tell whether codes are those of a weight."""
    return torch.equal(codes.restore(packed).view(torch.int16), weight.view(torch.int16))


_QUANTISED_TOKENS: Final = (1, 16, 64)
_QUANTISED_SIZES: Final = ((4096, 12288), (4096, 4096), (11008, 4096), (4096, 22016))
"""Inputs and rows of quantised weights."""


@dataclass(frozen=True, slots=True)
class QuantisedKind:
    """What a quantised weight has, as kernels.arguments.Quantised says.

    Attributes:
        kind: of its values.
        dtype: in which it multiplies.
        group: columns of a scale; 0: all.
        scale_dtype: of scales.
        offset: of values without zeros.
        has: other arrays.
        subgroup: columns of a subscale.
    """

    kind: str
    dtype: torch.dtype
    group: int
    scale_dtype: torch.dtype
    offset: int = 0
    has: tuple[str, ...] = ()
    subgroup: int = 0

    def draw(self, num_rows: int, num_columns: int, device: torch.device) -> Quantised:
        """Draw a weight of about 1 / sqrt(num_columns)."""
        bits = {"uint4": 4, "uint5": 5, "uint6": 6, "table4": 4}.get(self.kind, 8)
        group, subgroup = self.group or num_columns, self.subgroup or num_columns
        groups = num_rows, num_columns // group
        size = {"float8_e4m3fn": 100.0, "table4": 1.0}.get(self.kind, 2.0 ** (bits - 2))
        size *= num_columns**0.5 * (16 if "subscale" in self.has else 1)

        def draw(shape: tuple[int, ...], high: int = 256) -> torch.Tensor:
            return torch.randint(0, high, shape, dtype=torch.uint8, device=device)

        values = draw((num_rows, num_columns * (8 if bits == 8 else 4) // 8))
        if self.kind == "float8_e4m3fn":
            values[values & 127 == 127] = 0
        scale = ((torch.rand(groups, device=device) + 0.5) / size).to(self.scale_dtype)
        others = {
            "high": draw((num_rows, num_columns * (bits - 4) // 8)) if bits in {5, 6} else None,
            "zero": draw(groups, 2**bits),
            "low": scale * 7,
            "subscale": draw((num_rows, num_columns // subgroup), 32).view(torch.int8),
            "sublow": draw((num_rows, num_columns // subgroup), 32),
            "table": torch.linspace(-1, 1, 16, device=device) if self.kind == "table4" else None,
        }
        absent = {"zero", "low", "subscale", "sublow"} - set(self.has)
        return Quantised(
            kind=self.kind,
            dtype=self.dtype,
            num_rows=num_rows,
            num_columns=num_columns,
            group=group,
            subgroup=subgroup,
            values=values,
            scale=scale,
            offset=self.offset,
            **{name: None if name in absent else each for name, each in others.items()},
        )


_HALF, _BF16, _FLOAT = torch.float16, torch.bfloat16, torch.float32
_LOWS: Final = ("low", "subscale", "sublow")
QUANTISED_KINDS: Final[Mapping[str, QuantisedKind]] = {
    "int4 of 128, float16": QuantisedKind("uint4", _HALF, 128, _HALF, has=("zero",)),
    "int4 of 128": QuantisedKind("uint4", _BF16, 128, _HALF, has=("zero",)),
    "int8 of rows": QuantisedKind("uint8", _BF16, 0, _BF16, 128),
    "fp8 of blocks": QuantisedKind("float8_e4m3fn", _BF16, 128, _FLOAT),
    "Q4_K": QuantisedKind("uint4", _BF16, 256, _HALF, 0, _LOWS, 32),
    "Q6_K": QuantisedKind("uint6", _BF16, 256, _HALF, 32, ("subscale",), 16),
    "Q8_0": QuantisedKind("uint8", _BF16, 32, _HALF, 128),
    "nf4": QuantisedKind("table4", _BF16, 64, _FLOAT),
}
"""What is timed, by its name in the table."""


def quantised_bytes(weight: Quantised) -> int:
    """Return the bytes of a quantised weight, those of its scales among them."""
    arrays = (getattr(weight, name) for name in QUANTISED_ARRAYS)
    return sum(0 if each is None else each.nbytes for each in arrays)


def _quantised_copies(
    kind: QuantisedKind, size_in: int, size_out: int, device: torch.device
) -> list[Quantised]:
    """Draw weights that exceed the card's cache together."""
    first = kind.draw(size_out, size_in, device)
    others = range(1, -(-(2**28) // quantised_bytes(first)))
    return [first, *(kind.draw(size_out, size_in, device) for _ in others)]


def _quantised_products(
    op: str, sizes: tuple[tuple[int, int], ...], device: torch.device
) -> Iterator[Case]:
    """Products with quantised weights, over those with the same weights restored."""
    plain, small = operator_of(linear, op), operator_of(quantised, op)
    if op == "linear":
        workspace = decode_workspace(1, 1, HEAD_SIZE, 1, device)
        plain, small = (partial(each, workspace=workspace) for each in (plain, small))

    def has_plain_bits(
        x: torch.Tensor, weights: list[Quantised], restored: list[torch.Tensor]
    ) -> bool:
        pairs = zip(weights, restored, strict=True)
        return all(torch.equal(small(x, one), plain(x, whole)) for one, whole in pairs)

    for size_in, size_out in sizes:
        for name, kind in QUANTISED_KINDS.items():
            weights = _quantised_copies(kind, size_in, size_out, device)
            restored = [quantised.restore(weight) for weight in weights]
            for num_tokens in _QUANTISED_TOKENS:
                x = randn((num_tokens, size_in), device).to(kind.dtype)
                out_bytes = plain(x, restored[0]).nbytes
                yield Case(
                    f"{op} {name}, {len(weights)} of {num_tokens} x {size_in} by {size_out}",
                    partial(_multiply, x, weights, small),
                    sum(map(quantised_bytes, weights)) + len(weights) * (x.nbytes + out_bytes),
                    num_flops=2 * num_tokens * len(weights) * size_in * size_out,
                    beside=Case("", partial(_multiply, x, restored, plain), 0),
                    check=partial(has_plain_bits, x, weights, restored),
                )


def _restore_each(weights: list[Quantised], out: list[torch.Tensor]) -> None:
    for weight, place in zip(weights, out, strict=True):
        quantised.restore(weight, place)


def _restore_quantised(device: torch.device) -> Iterator[Case]:
    """Quantised weights that are written as plain ones."""
    size_in, size_out = _QUANTISED_SIZES[0]
    for name, kind in QUANTISED_KINDS.items():
        weights = _quantised_copies(kind, size_in, size_out, device)
        out = [torch.empty((size_out, size_in), dtype=kind.dtype, device=device) for _ in weights]
        yield Case(
            f"restore {name}, {len(weights)} of {size_in} x {size_out}",
            partial(_restore_each, weights, out),
            sum(map(quantised_bytes, weights)) + sum(each.nbytes for each in out),
        )


WEIGHT_CASES: Final[Mapping[str, Callable[[torch.device], Iterator[Case]]]] = {
    "linear_codes": partial(_code_products, "linear", _CODES_SIZES[:3]),
    "linear_silu_mul_codes": partial(_code_products, "linear_silu_mul", _CODES_SIZES[3:]),
    "restore": _restore,
    "pack": _pack,
    "linear_quantised": partial(_quantised_products, "linear", _QUANTISED_SIZES[:3]),
    "linear_silu_mul_quantised": partial(
        _quantised_products, "linear_silu_mul", _QUANTISED_SIZES[3:]
    ),
    "restore_quantised": _restore_quantised,
}
