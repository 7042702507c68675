"""Norms whose weight is stored less one: the offset is added in float32."""

import pytest
import torch

from kernels.ops import linear, norm
from kernels.ref import kv as ref_rotary
from kernels.ref import norm as ref
from tests.kernels.cases import randn
from tests.kernels.test_rotary_write_kv import Inputs
from tests.kernels.test_rotary_write_kv import kernel as rotary_kernel
from tests.kernels.tolerances import ROUNDED_ONCE, ROUNDED_TWICE, assert_close
from tests.slow import slow


def test_twin_is_the_formula_of_gemma(dtype, rng):
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    layer = Gemma3RMSNorm(96, eps=1e-5).to(rng.device)
    layer.weight.data = randn((96,), dtype, rng)
    x = randn((5, 96), dtype, rng)
    with torch.no_grad():
        expected = layer(x)
    assert torch.equal(ref.rms_norm(x, layer.weight.data, 1e-5, 1.0), expected)


def test_kernels_match_their_twins(dtype, rng):
    from kernels.triton import norm

    x, weight = randn((7, 48), dtype, rng), randn((48,), dtype, rng)
    out = norm.rms_norm(x, weight, 1e-6, 1.0)
    assert_close(out, ref.rms_norm(x, weight, 1e-6, 1.0), ROUNDED_ONCE)
    residual = randn((7, 48), dtype, rng)
    out = norm.add_rms_norm(x, residual, weight, 1e-6, 1.0)
    assert_close(out, ref.rms_norm(residual, weight, 1e-6, 1.0), ROUNDED_ONCE)
    twin_residual = residual.clone()
    norm.rms_norm_add_(x, residual, weight, 1e-6, 1.0)
    ref.rms_norm_add_(x, twin_residual, weight, 1e-6, 1.0)
    assert_close(residual, twin_residual, ROUNDED_TWICE)


@pytest.mark.thorough_but("float32")
@pytest.mark.parametrize("kind", ["head", slow("full")])
def test_rotary_matches_its_twin(kind, dtype, rng):
    inputs = Inputs((4, 6, 2, 32, 32, 16), kind, dtype, rng)
    q, cache = inputs.run(lambda *arguments: rotary_kernel(*arguments, 1.0))
    twin_q, twin_cache = inputs.run(lambda *arguments: ref_rotary.rotary_write_kv_(*arguments, 1.0))
    assert_close(q, twin_q, ROUNDED_TWICE)
    assert_close(cache[:, 0].nan_to_num(), twin_cache[:, 0].nan_to_num(), ROUNDED_TWICE)
    assert not torch.equal(q, inputs.run(rotary_kernel)[0])


def test_door_passes_the_offset_on():
    x, weight = torch.randn(3, 16), torch.randn(16)
    expected = ref.rms_norm(x, weight, 1e-6, 1.0)
    assert torch.equal(norm.rms_norm(x, weight, 1e-6, 1.0), expected)
    assert torch.equal(norm.add_rms_norm(x, torch.zeros(3, 16), weight, 1e-6, 1.0), expected)
    residual = torch.zeros(3, 16)
    norm.rms_norm_add_(x, residual, weight, 1e-6, 1.0)
    assert torch.equal(residual, expected)


def test_embedding_is_scaled_by_the_rounded_scale():
    table, ids = torch.randn(8, 4).bfloat16(), torch.tensor([3, 0])
    out = linear.embedding(ids, table, 3072**0.5)
    assert torch.equal(out, table[ids] * torch.tensor(55.5, dtype=torch.bfloat16))
