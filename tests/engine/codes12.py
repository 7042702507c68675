"""Codes12: a format that only tests have, of 12 bits a weight, which are restored exactly to bf16.

A weight is a byte (sign, mantissa) and a code of four bits: its exponent in a window of 15, one for
a tensor. Code 0 says that the byte is an index into a table of whole values.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from engine.errors import CheckpointError
from engine.model.formats import Format, ParamSpec, Products, TensorSpec, View, align

WINDOW, TABLE = 15, 256


class Codes12(Format):
    """Matrices with an even number of columns."""

    name = "codes12"
    is_packed = True

    def num_bytes(self, tensor: ParamSpec | TensorSpec) -> int:
        """Bytes, codes, table and window."""
        *_, last = self._views(tensor.shape)
        return last.offset + 4

    def views(self, tensor: TensorSpec) -> tuple[View, ...]:
        """List the four arrays."""
        return self._views(tensor.shape)

    def _views(self, shape: tuple[int, ...]) -> tuple[View, ...]:
        codes = align(prod(shape))
        table = codes + align(prod(shape) // 2)
        return (
            View("bytes", shape, "uint8", 0),
            View("codes", (shape[0], shape[1] // 2), "uint8", codes),
            View("table", (TABLE,), "bfloat16", table),
            View("below", (1,), "int32", table + align(2 * TABLE)),
        )

    def pack(self, tensor: TensorSpec, values: Mapping[str, Any], views: Mapping[str, Any]) -> None:
        """Write bytes and codes; the window is where it holds most weights."""
        whole = torch.cat([values[part.name].bfloat16() for part in tensor.parts])
        bits = whole.view(torch.int16).int() & 0xFFFF
        exponents = bits >> 7 & 0xFF
        counts = exponents.view(-1).bincount(minlength=256).unfold(0, WINDOW, 1).sum(-1)
        below = int(counts.argmax()) - 1
        codes = exponents - below
        escaped = (codes < 1) | (codes > WINDOW)
        codes[escaped] = 0
        found, places = bits[escaped].unique(return_inverse=True)
        if len(found) > TABLE:
            raise CheckpointError(f"{tensor.name}: {len(found)} values are out of the window.")
        kept = bits >> 8 & 0x80 | bits & 0x7F
        kept[escaped] = places.int()
        views["bytes"].copy_(kept.to(torch.uint8))
        pairs = codes.to(torch.uint8).view(*whole.shape[:-1], -1, 2)
        views["codes"].copy_(pairs[..., 0] | pairs[..., 1] << 4)
        views["table"].zero_()
        views["table"][: len(found)] = found.to(torch.int16).view(torch.bfloat16)
        views["below"].fill_(below)

    def products(self, ops: Any) -> Products:
        """Restore the weight, or the rows that are asked for, and multiply as bf16 does."""

        def restored(product: Any) -> Any:
            def call(x: Any, weight: Any, *args: Any, **keywords: Any) -> Any:
                return product(x, restore(weight), *args, **keywords)

            return call

        def embedding(ids: Any, table: Any, *args: Any) -> Any:
            rows = {"bytes": table["bytes"][ids], "codes": table["codes"][ids]}
            return ops.embedding(torch.arange(len(ids)), restore({**table, **rows}), *args)

        kinds = (ops.linear, ops.linear_silu_mul, ops.linear_gelu_mul)
        return Products(*map(restored, kinds), embedding)


def restore(views: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the weight in bf16."""
    kept, codes = views["bytes"].int(), views["codes"].int()
    codes = torch.stack([codes & 15, codes >> 4], dim=-1).view(kept.shape)
    bits = (kept & 0x80) << 8 | codes + views["below"] << 7 | kept & 0x7F
    whole = bits.to(torch.int16).view(torch.bfloat16)
    return torch.where(codes == 0, views["table"][kept], whole)
