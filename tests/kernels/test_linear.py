import pytest
import torch

from kernels import ops
from kernels.ref import linear as ref
from tests.kernels.cases import randn


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(4, 32, 16), (1, 7, 123), (0, 8, 8)], ids=str)
def test_door_multiplies(shape, has_bias, rng):
    tokens, size_in, size_out = shape
    x = randn((tokens, size_in), torch.float32, rng)
    weight = randn((size_out, size_in), torch.float32, rng)
    bias = randn((size_out,), torch.float32, rng) if has_bias else None
    out = ops.linear(x, weight, bias)
    assert torch.equal(out, ref.linear(x, weight, bias))
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_door_keeps_the_dtype(dtype, rng):
    x, weight = randn((3, 16), dtype, rng), randn((8, 16), dtype, rng)
    assert ops.linear(x, weight).dtype == dtype


@pytest.mark.parametrize(
    ("x", "weight", "bias", "message"),
    [
        (torch.zeros(2, 8), torch.zeros(4, 9), None, r"linear\.weight: expected shape \(any, 8\)"),
        (torch.zeros(2, 8), torch.zeros(4, 8).half(), None, r"linear\.weight: .*float32"),
        (torch.zeros(2, 8), torch.zeros(4, 8), torch.zeros(5), r"linear\.bias: .*\(4\)"),
    ],
)
def test_door_refuses(x, weight, bias, message):
    with pytest.raises(ops.KernelArgumentError, match=message):
        ops.linear(x, weight, bias)


@pytest.mark.gpu
def test_weight_in_host_memory_read_in_place(host_view):
    weight = torch.randn(512, 1024).bfloat16()
    x = torch.randn(16, 1024).bfloat16().cuda()
    assert torch.equal(ops.linear(x, host_view(weight)), ops.linear(x, weight.cuda()))
