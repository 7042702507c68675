"""How far a kernel may be from its twin, by dtype: one table for all operators."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """Bounds for torch.testing.assert_close."""

    rtol: float
    atol: float


ROUNDED_ONCE = {
    torch.float32: Tolerance(rtol=2e-6, atol=2e-6),
    torch.bfloat16: Tolerance(rtol=2**-7, atol=1e-5),
    torch.float16: Tolerance(rtol=2**-10, atol=1e-5),
}
"""Both sides compute in float32 and round once: they may differ by one step of the dtype."""

ROUNDED_TWICE = {
    torch.float32: Tolerance(rtol=4e-6, atol=4e-6),
    torch.bfloat16: Tolerance(rtol=2**-6, atol=2**-5),
    torch.float16: Tolerance(rtol=2**-9, atol=2**-8),
}
"""Two results of about 1 to 8, each rounded, are added: what cancels leaves the error of both."""

PRODUCT = {
    torch.bfloat16: Tolerance(rtol=2**-6, atol=2**-7),
    torch.float16: Tolerance(rtol=2**-9, atol=2**-10),
}
"""Sums of about 1 in float32, added in another order and rounded once."""

GATED = {
    torch.bfloat16: Tolerance(rtol=2**-5, atol=2**-6),
    torch.float16: Tolerance(rtol=2**-8, atol=2**-9),
}
"""Two products of about 1, rounded and then multiplied."""

ATTENTION = {
    torch.float32: Tolerance(rtol=1e-5, atol=1e-5),
    torch.bfloat16: Tolerance(rtol=2**-6, atol=2**-7),
    torch.float16: Tolerance(rtol=2**-9, atol=2**-10),
}
"""The kernels also round the softmax weights to the dtype, between the two products; values are
drawn from a normal distribution of deviation 1."""


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, table: dict[torch.dtype, Tolerance]
) -> None:
    """Compare two tensors of one dtype within the table's bounds for it."""
    bounds = table[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=bounds.rtol, atol=bounds.atol)
