import pytest
import torch

from kernels.ops import linear
from kernels.ops.checks import KernelArgumentError
from kernels.ref import linear as ref
from tests.kernels.cases import randn
from tests.kernels.tolerances import GATED, assert_close
from tests.slow import slow

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16)], ids=str)
BOTH = pytest.mark.parametrize("is_gelu", [False, True], ids=["silu", "gelu"])


def draw(tokens, size_in, size_out, dtype, rng, *, has_bias):
    x = randn((tokens, size_in), dtype, rng)
    weight = randn((2 * size_out, size_in), dtype, rng) / size_in**0.5
    return x, weight, randn((2 * size_out,), dtype, rng) if has_bias else None


@BOTH
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 256, 40), (16, 130, 65), (33, 96, 7)], ids=str)
@HALVES
def test_kernel_matches_twin(shape, has_bias, is_gelu, dtype, rng):
    from kernels.triton import small_linear

    x, weight, bias = draw(*shape, dtype, rng, has_bias=has_bias)
    out = small_linear.linear_gated_mul(x, weight, bias, is_gelu=is_gelu)
    assert_close(out, ref.linear_gated_mul(x, weight, bias, is_gelu=is_gelu), GATED)
    other = small_linear.linear_gated_mul(x, weight, bias, is_gelu=not is_gelu)
    assert not torch.equal(out, other)


@BOTH
@pytest.mark.parametrize("shape", [(3, 24, 10), (2, 3, 24, 10), (0, 8, 4)], ids=str)
def test_twin_is_the_product_and_the_activation(shape, is_gelu, dtype, rng):
    *outer, size_in, size_out = shape
    x = randn((*outer, size_in), dtype, rng)
    weight = randn((2 * size_out, size_in), dtype, rng)
    product = ref.linear(x, weight).view(-1, 2 * size_out)
    expected = ref.gated_mul(product, is_gelu=is_gelu).view(*outer, size_out)
    assert torch.equal(ref.linear_gated_mul(x, weight, is_gelu=is_gelu), expected)


@BOTH
@pytest.mark.parametrize("has_bias", [False, True])
def test_door_runs_the_twin_on_the_cpu(has_bias, is_gelu, dtype):
    rng = torch.Generator().manual_seed(0)
    x, weight, bias = draw(3, 16, 8, dtype, rng, has_bias=has_bias)
    out = linear.linear_gated_mul(x, weight, bias, is_gelu=is_gelu)
    assert torch.equal(out, ref.linear_gated_mul(x, weight, bias, is_gelu=is_gelu))


@pytest.mark.parametrize(
    ("weight", "bias", "message"),
    [
        (torch.zeros(4, 9), None, r"linear_gated_mul\.weight: expected shape \(4, 8\)"),
        (torch.zeros(5, 8), None, r"\.weight: expected an even number of rows, got 5"),
        (torch.zeros(4, 8), torch.zeros(2), r"\.bias: expected shape \(4\)"),
    ],
)
def test_door_refuses(weight, bias, message):
    with pytest.raises(KernelArgumentError, match=message):
        linear.linear_gated_mul(torch.zeros(2, 8), weight, bias)


@pytest.mark.gpu
@HALVES
@pytest.mark.parametrize("tokens", [1, 16, 24, 64, 65])
@pytest.mark.parametrize(
    ("is_gelu", "size_in", "size_out"), [(False, 4096, 11008), (True, 2560, 10240)]
)
def test_kernel_at_the_sizes_of_a_real_model(is_gelu, size_in, size_out, tokens, dtype, rng):
    x, weight, _ = draw(tokens, size_in, size_out, dtype, rng, has_bias=False)
    out = linear.linear_gated_mul(x, weight, is_gelu=is_gelu)
    product = ref.linear(x.float(), weight.float()).to(dtype)
    assert_close(out, ref.gated_mul(product, is_gelu=is_gelu), GATED)
    alone = [linear.linear_gated_mul(x[:1], weight, is_gelu=is_gelu) for _ in range(2)]
    assert torch.equal(*alone)


@pytest.mark.gpu
def test_weight_in_host_memory_read_in_place(host_view):
    weight = torch.randn(512, 1024).bfloat16()
    x = torch.randn(16, 1024).bfloat16().cuda()
    out = linear.linear_gated_mul(x, host_view(weight))
    assert torch.equal(out, linear.linear_gated_mul(x, weight.cuda()))
