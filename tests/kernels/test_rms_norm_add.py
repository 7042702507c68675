import pytest
import torch

from kernels.ops import norm
from kernels.ops.checks import KernelArgumentError
from kernels.ref import norm as ref
from tests.kernels.cases import randn
from tests.kernels.tolerances import ROUNDED_TWICE, assert_close


@pytest.mark.thorough_but("float32")
@pytest.mark.parametrize("is_strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("shape", [(4, 64), (1, 576), (7, 123), (0, 16)], ids=str)
def test_kernel_matches_twin(shape, is_strided, dtype, rng):
    from kernels.triton import norm

    x = randn(shape, dtype, rng, is_strided=is_strided)
    residual = randn(shape, dtype, rng, is_strided=is_strided)
    weight = randn(shape[-1:], dtype, rng)
    before, twin_residual = x.clone(), residual.clone()
    norm.rms_norm_add_(x, residual, weight, 1e-6)
    ref.rms_norm_add_(x, twin_residual, weight, 1e-6)
    assert_close(residual, twin_residual, ROUNDED_TWICE)
    assert torch.equal(x, before)


def test_twin_is_the_sum_of_residual_and_norm(dtype, rng):
    x, residual = randn((5, 32), dtype, rng), randn((5, 32), dtype, rng)
    weight = randn((32,), dtype, rng)
    expected = residual + ref.rms_norm(x, weight, 1e-6)
    ref.rms_norm_add_(x, residual, weight, 1e-6)
    assert torch.equal(residual, expected)


def test_door_runs_the_twin_on_the_cpu():
    x, residual, weight = torch.randn(3, 16), torch.randn(3, 16), torch.randn(16)
    twin_residual = residual.clone()
    norm.rms_norm_add_(x, residual, weight, 1e-6)
    ref.rms_norm_add_(x, twin_residual, weight, 1e-6)
    assert torch.equal(residual, twin_residual)


@pytest.mark.parametrize(
    ("x", "residual", "weight", "message"),
    [
        (torch.zeros(2, 3, 16), torch.zeros(2, 3, 16), torch.zeros(16), r"shape \[T, D\]"),
        (torch.zeros(2, 16), torch.zeros(3, 16), torch.zeros(16), r"_\.residual: expected shape"),
        (torch.zeros(2, 16), torch.zeros(2, 16).half(), torch.zeros(16), r"_\.residual: .*float16"),
        (torch.zeros(2, 16), torch.zeros(2, 16), torch.zeros(8), r"_\.weight: expected shape"),
    ],
)
def test_door_refuses(x, residual, weight, message):
    with pytest.raises(KernelArgumentError, match=message):
        norm.rms_norm_add_(x, residual, weight, 1e-6)
