import pytest
import torch

from kernels.ops import linear
from kernels.ops.checks import KernelArgumentError
from kernels.ref import linear as ref
from tests.kernels.cases import randn
from tests.kernels.tolerances import GATED, assert_close
from tests.slow import slow

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16)], ids=str)


def draw(tokens, size_in, size_out, dtype, rng, *, has_bias):
    x = randn((tokens, size_in), dtype, rng)
    weight = randn((2 * size_out, size_in), dtype, rng) / size_in**0.5
    return x, weight, randn((2 * size_out,), dtype, rng) if has_bias else None


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 256, 40), (16, 130, 65), (33, 96, 7)], ids=str)
@HALVES
def test_kernel_matches_twin(shape, has_bias, dtype, rng):
    from kernels.triton import small_linear

    x, weight, bias = draw(*shape, dtype, rng, has_bias=has_bias)
    out = small_linear.linear_silu_mul(x, weight, bias)
    assert_close(out, ref.linear_silu_mul(x, weight, bias), GATED)


@pytest.mark.parametrize("shape", [(3, 24, 10), (2, 3, 24, 10), (0, 8, 4)], ids=str)
def test_twin_is_the_product_and_the_activation(shape, dtype, rng):
    *outer, size_in, size_out = shape
    x = randn((*outer, size_in), dtype, rng)
    weight = randn((2 * size_out, size_in), dtype, rng)
    product = ref.linear(x, weight)
    expected = ref.silu_mul(product.view(-1, 2 * size_out)).view(*outer, size_out)
    assert torch.equal(ref.linear_silu_mul(x, weight), expected)


@pytest.mark.parametrize("has_bias", [False, True])
def test_door_runs_the_twin_on_the_cpu(has_bias, dtype):
    rng = torch.Generator().manual_seed(0)
    x, weight, bias = draw(3, 16, 8, dtype, rng, has_bias=has_bias)
    assert torch.equal(
        linear.linear_silu_mul(x, weight, bias), ref.linear_silu_mul(x, weight, bias)
    )


@pytest.mark.parametrize(
    ("weight", "bias", "message"),
    [
        (torch.zeros(4, 9), None, r"linear_silu_mul\.weight: expected shape \(4, 8\)"),
        (torch.zeros(5, 8), None, r"\.weight: expected an even number of rows, got 5"),
        (torch.zeros(4, 8), torch.zeros(2), r"\.bias: expected shape \(4\)"),
    ],
)
def test_door_refuses(weight, bias, message):
    with pytest.raises(KernelArgumentError, match=message):
        linear.linear_silu_mul(torch.zeros(2, 8), weight, bias)


@pytest.mark.gpu
@HALVES
@pytest.mark.parametrize("tokens", [1, 16, 24, 64, 65])
def test_kernel_at_the_sizes_of_a_real_model(tokens, dtype, rng):
    x, weight, bias = draw(tokens, 4096, 11008, dtype, rng, has_bias=False)
    out = linear.linear_silu_mul(x, weight, bias)
    expected = ref.silu_mul(ref.linear(x.float(), weight.float()).to(dtype))
    assert_close(out, expected, GATED)
    assert torch.equal(linear.linear_silu_mul(x[:1], weight), linear.linear_silu_mul(x[:1], weight))


@pytest.mark.gpu
def test_weight_in_host_memory_read_in_place(host_view):
    weight = torch.randn(512, 1024).bfloat16()
    x = torch.randn(16, 1024).bfloat16().cuda()
    out = linear.linear_silu_mul(x, host_view(weight))
    assert torch.equal(out, linear.linear_silu_mul(x, weight.cuda()))
