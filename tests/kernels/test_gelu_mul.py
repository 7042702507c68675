import pytest
import torch

from kernels.ops import linear
from kernels.ops.checks import KernelArgumentError
from kernels.ref import linear as ref
from tests.kernels.cases import randn
from tests.kernels.tolerances import ROUNDED_ONCE, ROUNDED_TWICE, assert_close


@pytest.mark.thorough_but("float32")
@pytest.mark.parametrize("is_strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("shape", [(4, 256), (3, 2 * 1025), (0, 32)], ids=str)
def test_kernel_matches_twin(shape, is_strided, dtype, rng):
    from kernels.triton import activation

    gate_up = randn(shape, dtype, rng, is_strided=is_strided)
    out = activation.gelu_mul(gate_up)
    assert out.is_contiguous()
    # In float32 the twin loses digits of 1 + tanh where the kernel's quotient keeps them.
    bounds = ROUNDED_TWICE if dtype == torch.float32 else ROUNDED_ONCE
    assert_close(out, ref.gelu_mul(gate_up), bounds)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's; the quotient is 0
@pytest.mark.parametrize("gate", [-1e4, -88.0, 0.0, 88.0, 1e4])
def test_kernel_takes_extreme_gates(gate, device):
    from kernels.triton import activation

    gate_up = torch.tensor([[gate, 2.0]], device=device)
    assert_close(activation.gelu_mul(gate_up), ref.gelu_mul(gate_up), ROUNDED_ONCE)


def test_twin_is_the_definition(rng):
    gate_up = randn((5, 64), torch.float32, rng)
    gate, up = gate_up[:, :32].double(), gate_up[:, 32:].double()
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    expected = (0.5 * gate * (1 + inner.tanh()) * up).float()
    assert_close(ref.gelu_mul(gate_up), expected, ROUNDED_ONCE)


def test_door_runs_the_twin_on_the_cpu():
    gate_up = torch.randn(3, 16)
    assert torch.equal(linear.gelu_mul(gate_up), ref.gelu_mul(gate_up))


@pytest.mark.parametrize(
    ("gate_up", "message"),
    [
        (torch.zeros(2, 7), "an even number of columns, got 7"),
        (torch.zeros(8), r"gelu_mul\.gate_up: expected shape \[T, F\]"),
        (torch.zeros(2, 8, dtype=torch.int32), "expected float32, bfloat16 or float16"),
    ],
)
def test_door_refuses(gate_up, message):
    with pytest.raises(KernelArgumentError, match=message):
        linear.gelu_mul(gate_up)


@pytest.mark.gpu
def test_kernel_at_the_sizes_of_a_real_model(dtype, rng):
    gate_up = randn((2048, 2 * 10240), dtype, rng)
    assert_close(linear.gelu_mul(gate_up), ref.gelu_mul(gate_up), ROUNDED_TWICE)
