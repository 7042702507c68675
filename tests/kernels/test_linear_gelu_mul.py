import pytest
import torch

from kernels.ops import linear
from kernels.ops.checks import KernelArgumentError
from kernels.ref import linear as ref
from tests.kernels.cases import randn
from tests.kernels.test_linear_silu_mul import HALVES, draw
from tests.kernels.tolerances import GATED, assert_close


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 256, 40), (33, 96, 7)], ids=str)
@HALVES
def test_kernel_matches_twin(shape, has_bias, dtype, rng):
    from kernels.triton import small_linear

    x, weight, bias = draw(*shape, dtype, rng, has_bias=has_bias)
    out = small_linear.linear_gelu_mul(x, weight, bias)
    assert_close(out, ref.linear_gelu_mul(x, weight, bias), GATED)
    assert not torch.equal(out, small_linear.linear_silu_mul(x, weight, bias))


@pytest.mark.parametrize("shape", [(3, 24, 10), (2, 3, 24, 10), (0, 8, 4)], ids=str)
def test_twin_is_the_product_and_the_activation(shape, dtype, rng):
    *outer, size_in, size_out = shape
    x = randn((*outer, size_in), dtype, rng)
    weight = randn((2 * size_out, size_in), dtype, rng)
    product = ref.linear(x, weight)
    expected = ref.gelu_mul(product.view(-1, 2 * size_out)).view(*outer, size_out)
    assert torch.equal(ref.linear_gelu_mul(x, weight), expected)


@pytest.mark.parametrize("has_bias", [False, True])
def test_door_runs_the_twin_on_the_cpu(has_bias, dtype):
    rng = torch.Generator().manual_seed(0)
    x, weight, bias = draw(3, 16, 8, dtype, rng, has_bias=has_bias)
    assert torch.equal(
        linear.linear_gelu_mul(x, weight, bias), ref.linear_gelu_mul(x, weight, bias)
    )


def test_door_refuses_an_odd_number_of_rows():
    with pytest.raises(KernelArgumentError, match=r"linear_gelu_mul\.weight: expected an even"):
        linear.linear_gelu_mul(torch.zeros(2, 8), torch.zeros(5, 8))


@pytest.mark.gpu
@HALVES
@pytest.mark.parametrize("tokens", [1, 16, 24, 64, 65])
def test_kernel_at_the_sizes_of_a_real_model(tokens, dtype, rng):
    x, weight, _ = draw(tokens, 2560, 10240, dtype, rng, has_bias=False)
    out = linear.linear_gelu_mul(x, weight)
    expected = ref.gelu_mul(ref.linear(x.float(), weight.float()).to(dtype))
    assert_close(out, expected, GATED)
