"""Operators over quantised weights: twins against the layout as it is written, kernels against
twins."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.arguments import Joined, Quantised, decode_workspace
from kernels.ops import linear as plain
from kernels.ops import quantised
from kernels.ops.checks import KernelArgumentError
from kernels.ref import quantised as ref
from tests.kernels.cases import randn
from tests.kernels.quantised_cases import CASES, Case, make, slowly
from tests.kernels.tolerances import PRODUCT, assert_close
from tests.slow import slow

EACH = pytest.mark.parametrize("case", CASES, ids=str)
AFFINE, K_QUANT, TABLE = CASES[0], CASES[3], CASES[-2]
RESTORED = [(AFFINE, 328), (K_QUANT, 256), (TABLE, 328)]
# tokens, inputs, outputs
SHAPES = [(1, 256, 72), (17, 576, 32), (40, 200, 65)]


@pytest.mark.thorough_but("256")
@EACH
@pytest.mark.parametrize("num_columns", [256, 328])
def test_twin_reads_the_layout(case, num_columns, rng):
    weight = make(case, 2, num_columns, torch.bfloat16, rng)
    found = quantised.restore(weight)
    expected = torch.tensor(
        [[slowly(weight, row, column) for column in range(num_columns)] for row in range(2)]
    )
    assert torch.equal(found.float().cpu(), expected)
    assert 0.005 < found.float().std() < 0.5


@given(
    bits=st.sampled_from([4, 5, 6, 8]),
    num_rows=st.integers(1, 50),
    num_columns=st.integers(1, 200),
    seed=st.integers(0, 99),
)
def test_packed_values_are_those_that_are_read(bits, num_rows, num_columns, seed):
    rng = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2**bits, (num_rows, num_columns), generator=rng).byte()
    packed, high = quantised.pack(values, bits)
    scale = torch.randint(-9, 9, (num_rows, -(-num_columns // 32)), generator=rng).float()
    weight = Quantised(
        kind=f"uint{bits}",
        dtype=torch.float32,
        num_rows=num_rows,
        num_columns=num_columns,
        group=32,
        subgroup=num_columns,
        values=packed,
        high=high,
        scale=quantised.pack_groups(scale),
    )
    expected = values * scale.repeat_interleave(32, 1)[:, :num_columns]
    assert torch.equal(ref.restore(weight), expected)
    start = 16 * (num_rows // 32)
    part = replace(
        weight,
        num_rows=num_rows - start,
        values=packed[start:],
        high=None if high is None else high[start:],
        scale=weight.scale[start:],
    )
    assert torch.equal(ref.restore(part), expected[start:])


@pytest.fixture
def half(device: torch.device) -> torch.dtype:
    """What kernels compute in: Triton's interpreter cuts float32 to bfloat16, it does not round."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16


@pytest.mark.thorough_but("float8_e4m3fn 128")
@pytest.mark.parametrize(
    ("case", "num_columns"),
    [
        (case, columns) if (case, columns) in RESTORED else slow(case, columns)
        for case in CASES
        for columns in (256, 328)
    ],
    ids=str,
)
def test_kernel_restores_the_twins_bits(case, num_columns, half, rng):
    from kernels.triton import quantised as kernel

    weight = make(case, 5, num_columns, half if num_columns == 256 else torch.float32, rng)
    expected = ref.restore(weight)
    out = torch.full_like(expected, 7)
    kernel.restore(weight, out)
    assert torch.equal(out, expected)
    ids = torch.tensor([4, 0, 3, 3], device=out.device)
    assert torch.equal(kernel.rows(weight, ids), expected[ids])


def test_kernel_restores_a_nan_of_float8_and_subnormals(rng):
    from kernels.triton import quantised as kernel

    weight = make(Case("float8_e4m3fn", scale_dtype=torch.float32), 1, 256, torch.float32, rng)
    every = torch.arange(256, dtype=torch.uint8, device=rng.device).view(1, -1)
    weight.values.copy_(quantised.pack(every, 8)[0])
    weight.scale.fill_(1.0)
    out = torch.empty(1, 256, device=rng.device)
    kernel.restore(weight, out)
    expected = ref.restore(weight)
    assert expected.isnan().sum() == 2
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


FAST = [(AFFINE, SHAPES[1]), (K_QUANT, SHAPES[0]), (TABLE, SHAPES[2])]
"""Each kind and each shape once."""


@pytest.mark.thorough_but("uint4 128 zero")
@pytest.mark.parametrize(
    ("case", "shape"),
    [
        (case, shape) if (case, shape) in FAST else slow(case, shape)
        for case in CASES
        for shape in SHAPES
    ],
    ids=str,
)
def test_kernel_matches_twin(case, shape, half, rng):
    from kernels.triton import quantised as kernel

    tokens, size_in, size_out = shape
    x = randn((tokens, size_in), half, rng)
    weight = replace(make(case, size_out, size_in, half, rng), columns=None)
    bias = randn((size_out,), half, rng)
    out = kernel.linear(x, weight, bias, None)
    assert_close(out, ref.linear(x, weight, bias), PRODUCT)


@pytest.mark.thorough_but("float8_e4m3fn 128")
@pytest.mark.parametrize(
    ("case", "tokens"),
    [(AFFINE, 2), (K_QUANT, 2), (TABLE, 64), slow(TABLE, 2), slow(AFFINE, 64), slow(K_QUANT, 64)],
    ids=str,
)
def test_gated_kernel_matches_twin(case, tokens, half, rng):
    from kernels.triton import quantised as kernel

    x = randn((tokens, 256), half, rng)
    weight = make(case, 2 * 40, 256, half, rng)
    bias = randn((80,), half, rng)
    out = kernel.linear(x, weight, bias, None, is_gated=True)
    assert_close(out, ref.linear_gated_mul(x, weight, bias), PRODUCT)
    out = kernel.linear(x, weight, None, None, is_gated=True, is_gelu=True)
    assert_close(out, ref.linear_gated_mul(x, weight, is_gelu=True), PRODUCT)


@pytest.mark.thorough
def test_kernel_adds_parts_in_order_and_leaves_the_counters_zero(half, rng):
    from kernels.triton import quantised as kernel

    x = randn((3, 1160), half, rng)
    weight = make(CASES[4], 40, 1160, half, rng)
    counters = decode_workspace(16, 8, 64, 256, x.device).counters
    out = kernel.linear(x, weight, None, counters)
    assert_close(out, ref.linear(x, weight), PRODUCT)
    assert not counters.any()


def test_door_multiplies_with_the_restored_weight(rng):
    dtype = torch.bfloat16
    x = randn((5, 328), dtype, rng)
    bias = randn((48,), dtype, rng)
    for case in CASES:
        weight = make(case, 48, 328, dtype, rng)
        inputs = x if weight.columns is None else x[:, weight.columns]
        whole = quantised.restore(weight)
        assert_close(quantised.linear(x, weight, bias), plain.linear(inputs, whole, bias), PRODUCT)
        for is_gelu in (False, True):
            gated = quantised.linear_gated_mul(x, weight, is_gelu=is_gelu)
            assert_close(gated, plain.linear_gated_mul(inputs, whole, is_gelu=is_gelu), PRODUCT)


def test_door_joins_matrices_of_any_kind(rng):
    x, bias = randn((3, 256), torch.bfloat16, rng), randn((112,), torch.bfloat16, rng)
    parts = [make(case, 32, 256, torch.bfloat16, rng) for case in (AFFINE, CASES[7])]
    parts.append(randn((48, 256), torch.bfloat16, rng))
    expected = [quantised.linear(x, part) for part in parts]
    out = quantised.linear(x, Joined(tuple(parts)), bias)
    assert torch.equal(out, torch.cat(expected, -1) + bias)
    product = quantised.linear(x, Joined(tuple(parts)))
    gated = quantised.linear_gated_mul(x, Joined(tuple(parts)))
    assert torch.equal(gated, plain.gated_mul(product))


def test_scratch_holds_the_restored_weight(rng):
    weight = make(AFFINE, 16, 256, torch.bfloat16, rng)
    memory = torch.zeros(20000, dtype=torch.uint8, device=rng.device)
    assert weight.with_scratch(memory[:100]) is weight
    held = weight.with_scratch(memory)
    x = randn((70, 256), torch.bfloat16, rng)
    assert torch.equal(quantised.linear(x, held), quantised.linear(x, weight))
    assert torch.equal(held.scratch, quantised.restore(weight))
    assert held.scratch.data_ptr() == memory.data_ptr()


def test_embedding_scales_rows(rng):
    weight = make(CASES[6], 16, 256, torch.bfloat16, rng)
    ids = torch.tensor([3, 15, 3], device=rng.device)
    table = quantised.restore(weight)
    assert torch.equal(quantised.embedding(ids, weight), table[ids])
    assert torch.equal(quantised.embedding(ids, weight, 7.9), plain.embedding(ids, table, 7.9))
    assert torch.equal(quantised.rows(weight, ids), table[ids])


def test_door_refuses(rng):
    weight = make(AFFINE, 15, 256, torch.bfloat16, rng)
    with pytest.raises(KernelArgumentError, match=r"linear\.x: expected shape \(2, 256\)"):
        quantised.linear(torch.zeros(2, 128).bfloat16(), weight)
    with pytest.raises(KernelArgumentError, match=r"linear\.bias: expected shape \(15\)"):
        quantised.linear(torch.zeros(2, 256).bfloat16(), weight, torch.zeros(3).bfloat16())
    with pytest.raises(KernelArgumentError, match="an even number of rows, got 15"):
        quantised.linear_gated_mul(torch.zeros(2, 256).bfloat16(), weight)
    with pytest.raises(KernelArgumentError, match=r"restore\.out"):
        quantised.restore(weight, torch.zeros(15, 255).bfloat16())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "uint3"}, "quantised.kind: expected one of"),
        ({"group": 48}, "quantised.group: expected 16, 32, a multiple of 64"),
        ({"zero": None, "scale": torch.zeros(16, 3)}, r"quantised.scale: .*\(16, 2\)"),
        ({"zero": torch.zeros(16, 1).byte()}, r"quantised.zero: .*\(16, 2\)"),
        ({"table": torch.zeros(16)}, "quantised.table"),
        ({"kind": "uint5"}, "quantised.high"),
    ],
)
def test_a_matrix_of_parts_that_do_not_fit_is_refused(change, message):
    weight = make(AFFINE, 15, 256, torch.bfloat16, torch.Generator())
    with pytest.raises(ValueError, match=message):
        replace(weight, **change)
