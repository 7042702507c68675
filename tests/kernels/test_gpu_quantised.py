"""Quantised weights on a GPU against the same weights restored, bit for bit."""

from dataclasses import replace

import pytest
import torch

from kernels.arguments import QUANTISED_ARRAYS, Quantised, decode_workspace
from kernels.ops import linear, quantised
from kernels.ref import quantised as ref
from tests.kernels.cases import randn
from tests.kernels.quantised_cases import CASES, Case, make

pytestmark = pytest.mark.gpu
TOKENS = [1, 2, 8, 9, 16, 17, 32, 33, 50, 64, 65, 200]
SHAPES = [(4096, 4096), (12288, 1024), (1536, 576), (96, 64), (10272, 128), (22016, 1024)]
HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
EVERY = [
    *CASES,
    Case("uint4", 64, has=("zero",), scale_dtype=BF16),
    Case("uint4", has=("zero",)),
    Case("uint4", 16, offset=8, scale_dtype=FLOAT),
    Case("uint4", 192, has=("zero", "low")),
    Case("uint5", 32, offset=16),
    Case("uint5", 32, has=("low",)),
    Case("uint6", 64, has=("zero",), scale_dtype=BF16),
    Case("uint8", 256, 16, offset=128, has=("subscale",)),
    Case("uint8", 16, 16, offset=128, has=("zero", "low", "subscale", "sublow")),
    Case("float8_e4m3fn", scale_dtype=BF16),
    Case("float8_e4m3fn", 64, has=("low",), scale_dtype=FLOAT),
    Case("table4", 32, scale_dtype=HALF),
]
"""Every kind with scales of every dtype, and every size of groups within a step and beyond."""


def weights(case, shape, dtype, rng) -> Quantised:
    """Random weights; in the first half of the rows some scales are negative, some far smaller."""
    weight = make(case, *shape, dtype, rng)
    scale = weight.scale.view(-1)[: -(-weight.scale.numel() // 2)]
    scale[3::17] *= -1
    scale[5::29] *= 2.0**-12
    return replace(weight, columns=None)


@pytest.mark.parametrize("dtype", [BF16, HALF], ids=str)
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_restored_bits_are_those_of_the_twin(case, dtype, rng):
    for shape in ((4096, 256), (1536, 576), (16, 64), (48, 832)):
        weight = weights(case, shape, dtype, rng)
        found = quantised.restore(weight)
        assert torch.equal(found.view(torch.int16), ref.restore(weight).view(torch.int16)), shape


@pytest.mark.parametrize("dtype", [BF16, HALF], ids=str)
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_products_have_the_bits_of_restored_weights(case, dtype, rng):
    workspace = decode_workspace(1, 1, 64, 1, rng.device)
    for shape in SHAPES if case in CASES[:2] else SHAPES[2:]:
        num_rows, num_columns = shape
        weight = weights(case, shape, dtype, rng)
        plain = ref.restore(weight)
        bias = randn((num_rows,), dtype, rng)
        for tokens in TOKENS:
            x = randn((tokens, num_columns), dtype, rng)
            found = quantised.linear(x, weight, bias, workspace=workspace)
            assert torch.equal(found, linear.linear(x, plain, bias)), (shape, tokens)
            gated = quantised.linear_gated_mul(x, weight)
            assert torch.equal(gated, linear.linear_gated_mul(x, plain)), (shape, tokens)
            gated = quantised.linear_gated_mul(x, weight, bias, is_gelu=True)
            expected = linear.linear_gated_mul(x, plain, bias, is_gelu=True)
            assert torch.equal(gated, expected), (shape, tokens)


@pytest.mark.parametrize("tokens", [1, 8, 16])
@pytest.mark.parametrize("case", [CASES[3], CASES[4], CASES[5]], ids=str)
def test_products_of_unit_vectors_are_the_weights(case, tokens, rng):
    """Kinds whose weights a product computes otherwise than a matrix of them is restored."""
    weight = weights(case, (48, 4096), HALF, rng)
    tokens_K = torch.eye(4096, dtype=HALF, device=rng.device).split(tokens)
    found = torch.cat([quantised.linear(x_TK, weight) for x_TK in tokens_K])
    assert torch.equal(found, ref.restore(weight).T)


@pytest.mark.parametrize("dtype", [BF16, HALF], ids=str)
def test_every_float8_is_restored(dtype, rng):
    weight = weights(Case("float8_e4m3fn", scale_dtype=FLOAT), (16, 64), dtype, rng)
    weight.values.view(-1)[:256] = torch.arange(256, device=rng.device)
    found, expected = quantised.restore(weight), ref.restore(weight)
    assert expected.isnan().sum() == 2
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("tokens", [1, 16, 64, 65])
def test_weights_in_host_memory_are_read_in_place(tokens, rng, host_view):
    weight = weights(CASES[0], (512, 1024), BF16, rng)
    arrays = {
        name: host_view(each.cpu())
        for name in QUANTISED_ARRAYS
        if (each := getattr(weight, name)) is not None
    }
    x = randn((tokens, 1024), BF16, rng)
    expected = quantised.linear(x, weight)
    assert torch.equal(quantised.linear(x, replace(weight, **arrays)), expected)


@pytest.mark.parametrize("tokens", [3, 40])
def test_products_in_a_graph_have_the_bits_of_eager(tokens, rng):
    weight = weights(CASES[0], (4096, 4096), BF16, rng)
    x = randn((tokens, 4096), BF16, rng)

    def chain():
        out = x
        for _ in range(8):
            out = quantised.linear(out, weight)
        return out

    expected = chain().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(10):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, expected)


def test_rows_split_at_multiples_of_16_are_those_of_the_whole(rng):
    weight = weights(CASES[3], (256, 1024), BF16, rng)
    whole = quantised.restore(weight)
    names = ("values", "scale", "low", "subscale", "sublow")
    for start, stop in ((0, 16), (48, 256)):
        arrays = {name: getattr(weight, name)[start:stop] for name in names}
        part = replace(weight, num_rows=stop - start, **arrays)
        assert torch.equal(quantised.restore(part), whole[start:stop])
