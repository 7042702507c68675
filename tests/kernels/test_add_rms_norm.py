import pytest
import torch

from kernels.ops import norm
from kernels.ops.checks import KernelArgumentError
from kernels.ref import norm as ref
from tests.kernels.cases import randn
from tests.kernels.tolerances import ROUNDED_ONCE, assert_close


@pytest.mark.thorough_but("float32")
@pytest.mark.parametrize("is_strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("shape", [(4, 64), (1, 576), (7, 123), (0, 16)], ids=str)
def test_kernel_matches_twin(shape, is_strided, dtype, rng):
    from kernels.triton import norm

    x = randn(shape, dtype, rng, is_strided=is_strided)
    residual = randn(shape, dtype, rng, is_strided=is_strided)
    weight = randn(shape[-1:], dtype, rng)
    twin_residual = residual.clone()
    out = norm.add_rms_norm(x, residual, weight, 1e-6)
    ref.add_rms_norm(x, twin_residual, weight, 1e-6)
    # The interpreter truncates where a GPU rounds to nearest, so the sums are compared by bound
    # and the norm is compared for the sum that the kernel stored.
    assert_close(residual, twin_residual, ROUNDED_ONCE)
    assert_close(out, ref.rms_norm(residual, weight, 1e-6), ROUNDED_ONCE)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 4096), (33, 576)], ids=str)
def test_kernel_stores_the_sum_that_torch_stores(shape, dtype, rng):
    from kernels.triton import norm

    x, residual = randn(shape, dtype, rng), randn(shape, dtype, rng)
    expected = residual + x
    norm.add_rms_norm(x, residual, randn(shape[-1:], dtype, rng), 1e-6)
    assert torch.equal(residual, expected)


def test_twin_norms_the_rounded_sum(rng):
    x, residual = randn((8, 64), torch.bfloat16, rng), randn((8, 64), torch.bfloat16, rng)
    weight = randn((64,), torch.bfloat16, rng)
    stored = (x.double() + residual.double()).to(torch.bfloat16)
    out = ref.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, stored)
    assert torch.equal(out, ref.rms_norm(stored, weight, 1e-6))


def test_door_runs_the_twin_on_the_cpu():
    x, residual, weight = torch.randn(3, 16), torch.randn(3, 16), torch.randn(16)
    twin_residual = residual.clone()
    out = norm.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(out, ref.add_rms_norm(x, twin_residual, weight, 1e-6))
    assert torch.equal(residual, twin_residual)


@pytest.mark.parametrize(
    ("x", "residual", "message"),
    [
        (torch.zeros(2, 3, 16), torch.zeros(2, 3, 16), r"expected shape \[T, D\]"),
        (torch.zeros(2, 16), torch.zeros(3, 16), r"add_rms_norm\.residual: expected shape"),
        (torch.zeros(2, 16), torch.zeros(2, 16).bfloat16(), r"add_rms_norm\.residual: .*bfloat16"),
    ],
)
def test_door_refuses(x, residual, message):
    with pytest.raises(KernelArgumentError, match=message):
        norm.add_rms_norm(x, residual, torch.zeros(16), 1e-6)
