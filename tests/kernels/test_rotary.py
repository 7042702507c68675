import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kernels import ops
from kernels.ref import rotary as ref
from tests.kernels.cases import fused_heads
from tests.kernels.tolerances import ROUNDED_ONCE, assert_close


def table(rotated, num_positions, device):
    inverse = 10000.0 ** (-torch.arange(0, rotated, 2, device=device).double() / rotated)
    angles = torch.arange(num_positions, device=device).double()[:, None] * inverse
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


# tokens, query heads, KV heads, head size, rotated elements
SHAPES = [
    (4, 8, 2, 64, 64),
    (1, 1, 1, 16, 2),
    (3, 9, 3, 64, 64),
    (5, 123, 1, 80, 20),
    (2, 7, 7, 96, 96),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_matches_twin_on_views_of_one_tensor(shape, dtype, rng):
    from kernels.triton import rotary

    tokens, heads, kv_heads, head_size, rotated = shape
    q, k, v = fused_heads(tokens, heads, kv_heads, head_size, dtype, rng)
    positions = torch.randint(0, 50, (tokens,), device=rng.device, generator=rng)
    cos_sin = table(rotated, 50, rng.device)
    twin_q, twin_k, v_before = q.clone(), k.clone(), v.clone()
    rotary.rotary_(q, k, cos_sin, positions)
    ref.rotary_(twin_q, twin_k, cos_sin, positions)
    assert_close(q, twin_q, ROUNDED_ONCE)
    assert_close(k, twin_k, ROUNDED_ONCE)
    assert torch.equal(q[..., rotated:], twin_q[..., rotated:])
    assert torch.equal(v, v_before)


def test_kernel_takes_no_tokens(rng):
    from kernels.triton import rotary

    q, k, _ = fused_heads(0, 2, 1, 16, torch.float32, rng)
    positions = torch.zeros(0, dtype=torch.int64, device=rng.device)
    rotary.rotary_(q, k, table(16, 4, rng.device), positions)
    assert q.shape == (0, 2, 16)


def test_twin_is_the_formula_of_llama(rng):
    q, k, _ = fused_heads(6, 4, 2, 32, torch.float32, rng)
    positions = torch.randint(0, 40, (6,), device=rng.device, generator=rng)
    cos_sin = table(32, 40, rng.device)
    cos, sin = cos_sin[positions].chunk(2, dim=1)
    cos, sin = torch.cat([cos, cos], 1)[None], torch.cat([sin, sin], 1)[None]
    want_q, want_k = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin
    )
    ref.rotary_(q, k, cos_sin, positions)
    assert_close(q, want_q[0].transpose(0, 1).contiguous(), ROUNDED_ONCE)
    assert_close(k, want_k[0].transpose(0, 1).contiguous(), ROUNDED_ONCE)


def test_twin_keeps_lengths_and_what_is_not_rotated(rng):
    q, k, _ = fused_heads(3, 2, 1, 64, torch.float32, rng)
    before = q.clone()
    ref.rotary_(q, k, table(32, 8, rng.device), torch.tensor([1, 5, 7], device=rng.device))
    assert torch.equal(q[..., 32:], before[..., 32:])
    assert not torch.equal(q[..., :32], before[..., :32])
    torch.testing.assert_close(q.norm(dim=-1), before.norm(dim=-1))


def test_door_runs_the_twin_on_the_cpu():
    rng = torch.Generator().manual_seed(0)
    q, k, _ = fused_heads(3, 4, 2, 16, torch.float32, rng)
    twin_q, twin_k = q.clone(), k.clone()
    positions = torch.tensor([0, 3, 2])
    ops.rotary_(q, k, table(16, 4, "cpu"), positions)
    ref.rotary_(twin_q, twin_k, table(16, 4, "cpu"), positions)
    assert torch.equal(q, twin_q)
    assert torch.equal(k, twin_k)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_TNH": torch.zeros(3, 64)}, r"rotary_\.q: expected shape \[T, N, H\]"),
        ({"k_TKH": torch.zeros(2, 2, 16)}, r"rotary_\.k: expected shape \(3, any, 16\)"),
        ({"cos_sin": torch.zeros(8, 16).half()}, r"rotary_\.cos_sin: expected torch\.float32"),
        ({"cos_sin": torch.zeros(8, 18)}, r"even number of columns, 2 to 16 \(H\), got 18"),
        ({"cos_sin": torch.zeros(8, 7)}, r"even number of columns, 2 to 16 \(H\), got 7"),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, r"rotary_\.positions: .*int64"),
    ],
)
def test_door_refuses(change, message):
    arguments = {
        "q_TNH": torch.zeros(3, 4, 16),
        "k_TKH": torch.zeros(3, 2, 16),
        "cos_sin": torch.zeros(8, 16),
        "positions": torch.zeros(3, dtype=torch.int64),
    }
    with pytest.raises(ops.KernelArgumentError, match=message):
        ops.rotary_(**(arguments | change))
