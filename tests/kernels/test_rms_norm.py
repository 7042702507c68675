import pytest
import torch

from kernels.ops import norm
from kernels.ops.checks import KernelArgumentError
from kernels.ref import norm as ref
from tests.kernels.cases import fused_heads, randn
from tests.kernels.tolerances import ROUNDED_ONCE, assert_close

SHAPES = [(4, 64), (1, 1), (1, 576), (7, 123), (3, 9, 64), (2, 123, 40), (2, 3, 5, 16)]


@pytest.mark.thorough_but("float32")
@pytest.mark.parametrize("is_strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_matches_twin(shape, is_strided, dtype, rng):
    from kernels.triton import norm

    x = randn(shape, dtype, rng, is_strided=is_strided)
    weight = randn(shape[-1:], dtype, rng)
    out = norm.rms_norm(x, weight, 1e-6)
    assert out.is_contiguous()
    assert_close(out, ref.rms_norm(x, weight, 1e-6), ROUNDED_ONCE)


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_kernel_norms_heads_of_a_fused_projection(num_tokens, dtype, rng):
    from kernels.triton import norm

    _, k, _ = fused_heads(num_tokens, 7, 3, 80, dtype, rng)
    weight = randn((80,), dtype, rng)
    assert_close(norm.rms_norm(k, weight, 1e-5), ref.rms_norm(k, weight, 1e-5), ROUNDED_ONCE)


def test_kernel_result_of_a_row_is_the_same_in_every_batch(dtype, rng):
    from kernels.triton import norm

    x, weight = randn((9, 48), dtype, rng), randn((48,), dtype, rng)
    together = norm.rms_norm(x, weight, 1e-6)
    for row in range(9):
        assert torch.equal(norm.rms_norm(x[row : row + 1], weight, 1e-6)[0], together[row])


def test_kernel_takes_no_rows(dtype, rng):
    from kernels.triton import norm

    empty = norm.rms_norm(randn((0, 16), dtype, rng), randn((16,), dtype, rng), 1e-6)
    assert empty.shape == (0, 16)


def test_twin_is_the_formula_of_llama(rng):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    layer = LlamaRMSNorm(96, eps=1e-5).to(rng.device)
    layer.weight.data = randn((96,), torch.float32, rng)
    x = randn((5, 96), torch.float32, rng)
    with torch.no_grad():
        expected = layer(x)
    assert_close(ref.rms_norm(x, layer.weight.data, 1e-5), expected, ROUNDED_ONCE)


def test_twin_rounds_once_in_low_precision(rng):
    x, weight = randn((64, 128), torch.bfloat16, rng), randn((128,), torch.bfloat16, rng)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    exact = (exact * weight.double()).to(torch.bfloat16)
    differing = (ref.rms_norm(x, weight, 1e-6) != exact).double().mean().item()
    assert differing < 1e-3


def test_door_runs_the_twin_on_the_cpu():
    x, weight = torch.randn(3, 16), torch.randn(16)
    assert torch.equal(norm.rms_norm(x, weight, 1e-6), ref.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.zeros(2, 16).double(), torch.zeros(16), r"rms_norm\.x: expected float32"),
        (torch.zeros(2, 16), torch.zeros(8), r"rms_norm\.weight: expected shape \(16\)"),
        (
            torch.zeros(2, 16),
            torch.zeros(16).half(),
            r"expected torch\.float32, got torch\.float16",
        ),
        (torch.zeros(16, 2).T, torch.zeros(16), r"stride 1 in the last dimension"),
        (torch.tensor(1.0), torch.zeros(1), "one dimension or more"),
    ],
)
def test_door_refuses(x, weight, message):
    with pytest.raises(KernelArgumentError, match=message):
        norm.rms_norm(x, weight, 1e-6)
