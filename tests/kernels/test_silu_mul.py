import pytest
import torch

from kernels.ops import linear
from kernels.ops.checks import KernelArgumentError
from kernels.ref import linear as ref
from tests.kernels.cases import randn
from tests.kernels.tolerances import ROUNDED_ONCE, assert_close


@pytest.mark.thorough_but("float32")
@pytest.mark.parametrize("is_strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("shape", [(4, 256), (1, 2), (3, 2 * 1025), (7, 246), (0, 32)], ids=str)
def test_kernel_matches_twin(shape, is_strided, dtype, rng):
    from kernels.triton import activation

    gate_up = randn(shape, dtype, rng, is_strided=is_strided)
    out = activation.silu_mul(gate_up)
    assert out.is_contiguous()
    assert_close(out, ref.silu_mul(gate_up), ROUNDED_ONCE)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's; the quotient is 0
@pytest.mark.parametrize("gate", [-1e4, -88.0, 0.0, 88.0, 1e4])
def test_kernel_takes_extreme_gates(gate, device):
    from kernels.triton import activation

    gate_up = torch.tensor([[gate, 2.0]], device=device)
    assert_close(activation.silu_mul(gate_up), ref.silu_mul(gate_up), ROUNDED_ONCE)


def test_twin_is_the_definition(rng):
    gate_up = randn((5, 64), torch.float32, rng)
    gate, up = gate_up[:, :32].double(), gate_up[:, 32:].double()
    expected = (gate / (1 + torch.exp(-gate)) * up).float()
    assert_close(ref.silu_mul(gate_up), expected, ROUNDED_ONCE)


def test_door_runs_the_twin_on_the_cpu():
    gate_up = torch.randn(3, 16)
    assert torch.equal(linear.silu_mul(gate_up), ref.silu_mul(gate_up))


@pytest.mark.parametrize(
    ("gate_up", "message"),
    [
        (torch.zeros(2, 7), "an even number of columns, got 7"),
        (torch.zeros(8), r"expected shape \[T, F\]"),
        (torch.zeros(2, 8, dtype=torch.int32), "expected float32, bfloat16 or float16"),
    ],
)
def test_door_refuses(gate_up, message):
    with pytest.raises(KernelArgumentError, match=message):
        linear.silu_mul(gate_up)
