"""Times of reading weights by format, and when those in host memory are staged. No torch."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from engine.model.formats import TensorFormats, TensorSpec
from engine.plan.rates import STAGE_GAIN, Rates, stage_tokens
from engine.plan.units import Slab
from kernels.sizes import MAX_SMALL_TOKENS

WEIGHT_SHARE: Final = 1.0
"""Products of few rows, bytes of weights read over the copy rate of HBM, which writes half of its
bytes; with LAYER_OVERHEAD_S (H200)."""
LOSSLESS_MOST_GB_S: Final = ((8, math.inf), (16, 3580.0), (32, 3000.0), (64, 2220.0))
"""Tokens of a product at most, and what restoring weights in registers carries of codes then on a
card of LOSSLESS_MOST_TFLOPS, however fast memory is: 85, 102 and 137 us for 16, 32 and 64."""
LOSSLESS_MOST_TFLOPS: Final = 593.0
"""bf16 products of that card (H200), as reached. What restoring carries goes with multiprocessors
and their clock, which from an RTX 3060 to an H200 differ by no more than the root of this rate; a
card with more tensor cores restores no faster (not measured on any but an H200)."""
RESTORING_WORK: Final[Mapping[str, float]] = MappingProxyType(
    {
        "uint4": 1.0,
        "uint4+sub": 1.25,
        "table4": 1.5,
        "uint5": 2.0,
        "uint5+sub": 1.7,
        "uint6+sub": 1.7,
        "uint8": 1.25,
        "float8_e4m3fn": 1.2,
    }
)
"""Time of products of 1 and 16 tokens over that of AWQ's values in float16, by kind: estimated for
an H200, held against steps of Llama 2 7B in float16. 5 bits and tables: assumed. In bfloat16,
K-quants (+sub) take longer than that."""
QUANTISED_MOST: Final = ((8, 3.3), (64, 2.4))
"""Tokens of a product at most, and what restoring quantised weights in registers carries of their
work (RESTORING_WORK), over the bytes of codes that it carries at 16 tokens (H200, steps of
Llama 2 7B)."""
IN_PLACE_SHARES: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {
        "uint4": (0.78, 0.75),
        "uint4+sub": (0.78, 0.75),
        "uint5": (0.9, 0.9),
        "uint5+sub": (0.9, 0.9),
        "uint6+sub": (0.9, 0.9),
    }
)
"""Rate at which products of up to 8 and of up to 64 tokens read quantised weights in place, over
that of reads in place, by kind; other kinds have 1. uint4: steps of Llama 2 7B with all layers of
AWQ off the GPU read 3.39 GB in 86.6 ms at batch 1 and 90.3 ms at batch 16, where reads in place
carried 50.6 GB/s (study=bench_quantised study.rows=[awq_uva], commit c3bb0a98, H200, 2026-11-30).
The others are estimates."""
IN_PLACE_ROWS: Final = (8, MAX_SMALL_TOKENS)
"""Most tokens of a product for each of them."""


@dataclass(frozen=True)
class Packed:
    """Bytes of weights that products restore."""

    stored: int = 0
    plain: int = 0
    """Once they are restored."""
    quantised: int = 0
    """The part of `stored` that a checkpoint keeps quantised."""
    quantised_plain: int = 0
    """Once they are restored."""
    quantised_work: int = 0
    """quantised_plain, each times what its kind takes to restore (RESTORING_WORK)."""
    in_place_few: int = 0
    """`stored`, each over its share of the rate of reads in place, for at most 8 tokens."""
    in_place_more: int = 0
    """The same for at most 64."""

    def in_place(self, rows: int) -> int:
        """Return how many plain bytes products of so many rows read in place in the same time.

        Matrices that are restored first are read as fast as plain ones.
        """
        sizes = zip(IN_PLACE_ROWS, (self.in_place_few, self.in_place_more), strict=True)
        return next((size for most, size in sizes if rows <= most), self.stored)

    def __add__(self, other: "Packed") -> "Packed":
        """Return both together."""
        return Packed(*map(operator.add, vars(self).values(), vars(other).values()))

    def share(self, part: float) -> "Packed":
        """Return a share of them."""
        return Packed(*(round(part * size) for size in vars(self).values()))

    @classmethod
    def among(cls, tensors: Iterable[TensorSpec], formats: TensorFormats) -> "Packed":
        """Return those among some tensors."""
        restored, plain_bytes = formats.restored(tensors), formats.default.num_bytes
        unpacked = formats.unpacked(restored)
        quantised = [tensor for tensor, _ in unpacked]
        work, slower = 0.0, [0.0, 0.0]
        for tensor, form in unpacked:
            ratio = form.num_bytes(tensor) / plain_bytes(tensor)
            for kind, part in form.kinds(tensor):
                size = plain_bytes(part)
                work += RESTORING_WORK[kind] * size
                shares = IN_PLACE_SHARES.get(kind, ()) if not tensor.num_experts else ()
                for at, share in enumerate(shares):
                    slower[at] += size * ratio * (1 / share - 1)
        stored = formats.total_bytes(restored)
        few, more = (stored + round(size) for size in slower)
        return cls(
            stored=stored,
            plain=sum(map(plain_bytes, restored)),
            quantised=formats.total_bytes(quantised),
            quantised_plain=sum(map(plain_bytes, quantised)),
            quantised_work=round(work),
            in_place_few=few,
            in_place_more=more,
        )


NONE_PACKED: Final = Packed()


def packed_s(
    rates: Rates, rows: int, here: Packed, there: Packed = NONE_PACKED
) -> tuple[float, float]:
    """Return the seconds of restoring matrices before products of so many rows, and of their reads.

    Args:
        rates: Of the machine.
        rows: Of the products; few restore what they read, and nothing comes before them.
        here: What lies in GPU memory.
        there: What is read in place from host memory.
    """
    if not here.stored and not there.stored:
        return 0.0, 0.0
    link_bytes = there.stored if rates.is_cpu else there.in_place(rows)
    link_s = link_bytes / (rates.in_place_gb_s * 1e9)
    if rows <= MAX_SMALL_TOKENS:
        here_s, there_s = (_restored_in_registers_s(rates, rows, each) for each in (here, there))
        return 0.0, here_s + max(link_s, there_s)
    whole = here.plain + there.plain
    restore_s = whole / (rates.restore_gb_s * 1e9)
    return restore_s + link_s, whole / (WEIGHT_SHARE * rates.hbm_gb_s * 1e9)


def _of_rows(table: Sequence[tuple[int, float]], rows: int) -> float:
    """Return the entry of a table of products of at most so many rows."""
    return next(value for most, value in table if rows <= most)


def _restored_in_registers_s(rates: Rates, rows: int, packed: Packed) -> float:
    """Return the seconds in which products of few rows read weights and restore them."""
    scale = min(1.0, math.sqrt(rates.bf16_tflops / LOSSLESS_MOST_TFLOPS)) * 1e9
    most = _of_rows(LOSSLESS_MOST_GB_S, rows) * scale
    read = rates.lossless_gb_s * 1e9
    seconds = (packed.stored - packed.quantised) / min(read, most)
    if not packed.quantised:
        return seconds
    if rates.is_cpu:  # which restores them whole
        return seconds + packed.quantised_plain / (rates.restore_gb_s * 1e9)
    restored = _of_rows(QUANTISED_MOST, rows) * min(most, _of_rows(LOSSLESS_MOST_GB_S, 16) * scale)
    read = WEIGHT_SHARE * rates.hbm_gb_s * 1e9
    return seconds + max(packed.quantised / read, packed.quantised_work / restored)


def staged_from(rates: Rates, slabs: Sequence[Slab], formats: TensorFormats) -> int:
    """Return from how many tokens on these slabs in host memory are staged.

    From 1 on, if products of one token read their formats so much slower in place than plain
    weights that copying the slabs takes STAGE_GAIN less, and products that meanwhile read a slot do
    not take longer. Experts are no reason: copies bring all of them, and products read few.
    """
    common, tensors = stage_tokens(rates), [tensor for slab in slabs for tensor in slab.tensors]
    if rates.is_cpu or any(tensor.num_experts for tensor in tensors):
        return common
    packed = Packed.among(tensors, formats)
    if packed.in_place(1) == packed.stored:
        return common
    plain = formats.total_bytes(tensors) - packed.stored
    in_place_s = plain / (rates.in_place_gb_s * 1e9) + packed_s(rates, 1, NONE_PACKED, packed)[1]
    copy_s = sum(slab.num_bytes / (rates.h2d_gb_s * 1e9) + rates.copy_overhead_s for slab in slabs)
    read_s = plain / (WEIGHT_SHARE * rates.hbm_gb_s * 1e9) + packed_s(rates, 1, packed)[1]
    return 1 if in_place_s >= STAGE_GAIN * max(copy_s, read_s) else common
