import pytest
import torch

from kernels.ops import linear
from kernels.ops.checks import KernelArgumentError
from kernels.ref import linear as ref
from tests.kernels.cases import randn
from tests.kernels.tolerances import ROUNDED_ONCE, ROUNDED_TWICE, assert_close

BOTH = pytest.mark.parametrize("is_gelu", [False, True], ids=["silu", "gelu"])


@pytest.mark.thorough_but("float32")
@BOTH
@pytest.mark.parametrize("is_strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("shape", [(4, 256), (1, 2), (3, 2 * 1025), (7, 246), (0, 32)], ids=str)
def test_kernel_matches_twin(shape, is_strided, is_gelu, dtype, rng):
    from kernels.triton import activation

    gate_up = randn(shape, dtype, rng, is_strided=is_strided)
    out = activation.gated_mul(gate_up, is_gelu=is_gelu)
    assert out.is_contiguous()
    # In float32 the twin loses digits of 1 + tanh where the kernel's quotient keeps them.
    bounds = ROUNDED_TWICE if is_gelu and dtype == torch.float32 else ROUNDED_ONCE
    assert_close(out, ref.gated_mul(gate_up, is_gelu=is_gelu), bounds)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's; the quotient is 0
@BOTH
@pytest.mark.parametrize("gate", [-1e4, -88.0, 0.0, 88.0, 1e4])
def test_kernel_takes_extreme_gates(gate, is_gelu, device):
    from kernels.triton import activation

    gate_up = torch.tensor([[gate, 2.0]], device=device)
    out = activation.gated_mul(gate_up, is_gelu=is_gelu)
    assert_close(out, ref.gated_mul(gate_up, is_gelu=is_gelu), ROUNDED_ONCE)


def test_twin_is_the_definition(rng):
    gate_up = randn((5, 64), torch.float32, rng)
    gate, up = gate_up[:, :32].double(), gate_up[:, 32:].double()
    expected = (gate / (1 + torch.exp(-gate)) * up).float()
    assert_close(ref.gated_mul(gate_up), expected, ROUNDED_ONCE)
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    expected = (0.5 * gate * (1 + inner.tanh()) * up).float()
    assert_close(ref.gated_mul(gate_up, is_gelu=True), expected, ROUNDED_ONCE)


@BOTH
def test_door_runs_the_twin_on_the_cpu(is_gelu):
    gate_up = torch.randn(3, 16)
    out = linear.gated_mul(gate_up, is_gelu=is_gelu)
    assert torch.equal(out, ref.gated_mul(gate_up, is_gelu=is_gelu))
    assert not torch.equal(out, ref.gated_mul(gate_up, is_gelu=not is_gelu))


@pytest.mark.parametrize(
    ("gate_up", "message"),
    [
        (torch.zeros(2, 7), "an even number of columns, got 7"),
        (torch.zeros(8), r"gated_mul\.gate_up: expected shape \[T, F\]"),
        (torch.zeros(2, 8, dtype=torch.int32), "expected float32, bfloat16 or float16"),
    ],
)
def test_door_refuses(gate_up, message):
    with pytest.raises(KernelArgumentError, match=message):
        linear.gated_mul(gate_up)


@pytest.mark.gpu
def test_gelu_kernel_at_the_sizes_of_a_real_model(dtype, rng):
    gate_up = randn((2048, 2 * 10240), dtype, rng)
    out = linear.gated_mul(gate_up, is_gelu=True)
    assert_close(out, ref.gated_mul(gate_up, is_gelu=True), ROUNDED_TWICE)
