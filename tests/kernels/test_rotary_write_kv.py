import pytest
import torch

from kernels.ops import kv
from kernels.ops.checks import KernelArgumentError
from kernels.ref import kv as ref
from kernels.ref import norm as ref_norm
from tests.kernels.cases import fused_heads, randn
from tests.kernels.tolerances import ROUNDED_ONCE, ROUNDED_TWICE, assert_close
from tests.slow import mostly_slow, slow

NORMS = ["none", "head", "full"]

# tokens, query heads, KV heads, head size, rotated elements, block size
SHAPES = [
    (4, 8, 2, 64, 64, 16),
    (1, 1, 1, 16, 2, 8),
    (3, 9, 3, 64, 64, 16),
    (3, 43, 1, 80, 20, 32),
    (2, 7, 7, 96, 96, 24),
    (0, 2, 1, 16, 16, 8),
]


def table(rotated, num_positions, device):
    inverse = 10000.0 ** (-torch.arange(0, rotated, 2, device=device).double() / rotated)
    angles = torch.arange(num_positions, device=device).double()[:, None] * inverse
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


class Inputs:
    """Arguments of the operator, and a cache of three layers that holds NaN."""

    def __init__(self, shape, norm, dtype, rng):
        tokens, heads, kv_heads, head_size, rotated, block_size = shape
        device = rng.device
        self.q, self.k, self.v = fused_heads(tokens, heads, kv_heads, head_size, dtype, rng)
        factor = {"head": (1, 1), "full": (heads, kv_heads)}.get(norm)
        self.weights = (None, None)
        if factor is not None:
            self.weights = tuple(randn((f * head_size,), dtype, rng) for f in factor)
        self.cos_sin = table(rotated, 50, device)
        self.positions = torch.randint(0, 50, (tokens,), device=device, generator=rng)
        cache_shape = (4, 3, 2, kv_heads, block_size, head_size)
        self.cache = torch.full(cache_shape, torch.nan, dtype=dtype, device=device)
        self.slots = torch.randperm(4 * block_size, generator=rng, device=device)[:tokens]
        if tokens > 1:
            self.slots[1] = -1

    def run(self, function, rows=slice(None)):
        """Return the queries and the cache that a call leaves; inputs stay as they are."""
        cache = self.cache.clone()
        fused = torch.cat([x.flatten(1) for x in (self.q, self.k, self.v)], dim=1)[rows]
        q, k, v = fused.split([x.shape[1] * x.shape[2] for x in (self.q, self.k, self.v)], dim=1)
        q, k, v = (x.view(-1, *y.shape[1:]) for x, y in ((q, self.q), (k, self.k), (v, self.v)))
        kept = k.clone(), v.clone()
        function(
            q, k, v, *self.weights, 1e-5, self.cos_sin, self.positions[rows],
            cache[:, 1, 0], cache[:, 1, 1], self.slots[rows],
        )  # fmt: skip
        assert torch.equal(k, kept[0])
        assert torch.equal(v, kept[1])
        assert cache[:, 0].isnan().all()
        assert cache[:, 2].isnan().all()
        return q, cache[:, 1]


def kernel(*arguments):
    from kernels.triton import rotary_write_kv

    rotary_write_kv.rotary_write_kv_(*arguments)


@pytest.mark.thorough_but("float32")
@pytest.mark.parametrize(
    ("shape", "norm"),
    [
        (shape, norm) if at > 2 and (at + other) % 2 else slow(shape, norm)
        for at, shape in enumerate(SHAPES)
        for other, norm in enumerate(NORMS)
    ],
    ids=str,
)
def test_kernel_matches_twin(shape, norm, dtype, rng):
    inputs = Inputs(shape, norm, dtype, rng)
    q, cache = inputs.run(kernel)
    twin_q, twin_cache = inputs.run(ref.rotary_write_kv_)
    bounds = ROUNDED_ONCE if norm == "none" else ROUNDED_TWICE
    assert_close(q, twin_q, bounds)
    assert torch.equal(cache.isnan(), twin_cache.isnan())
    assert_close(cache[:, 0].nan_to_num(), twin_cache[:, 0].nan_to_num(), bounds)
    assert torch.equal(cache[:, 1].nan_to_num(), twin_cache[:, 1].nan_to_num())


@pytest.mark.thorough_but("float32")
@pytest.mark.parametrize("norm", mostly_slow(NORMS, lambda x: x == "full"))
def test_kernel_result_of_a_token_is_the_same_in_every_batch(norm, dtype, rng):
    inputs = Inputs((3, 6, 3, 32, 32, 8), norm, dtype, rng)
    together, cache = inputs.run(kernel)
    for row in range(3):
        alone, own = inputs.run(kernel, slice(row, row + 1))
        assert torch.equal(alone[0], together[row])
        written = ~own.isnan()
        assert torch.equal(own[written], cache[written])


def test_twin_is_the_formula_of_llama(rng):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    inputs = Inputs((6, 4, 2, 32, 32, 16), "none", torch.float32, rng)
    inputs.slots = torch.arange(6, device=rng.device) + 16
    cos, sin = inputs.cos_sin[inputs.positions].chunk(2, dim=1)
    cos, sin = torch.cat([cos, cos], 1)[None], torch.cat([sin, sin], 1)[None]
    want_q, want_k = apply_rotary_pos_emb(
        inputs.q.transpose(0, 1)[None], inputs.k.transpose(0, 1)[None], cos, sin
    )
    q, cache = inputs.run(ref.rotary_write_kv_)
    assert_close(q, want_q[0].transpose(0, 1).contiguous(), ROUNDED_ONCE)
    assert_close(cache[1, 0, :, :6].contiguous(), want_k[0].contiguous(), ROUNDED_ONCE)
    assert torch.equal(cache[1, 1, :, :6].transpose(0, 1), inputs.v)


@pytest.mark.parametrize("norm", ["head", "full"])
def test_twin_norms_before_it_rotates(norm, rng):
    inputs = Inputs((3, 4, 2, 16, 8, 8), norm, torch.bfloat16, rng)
    q, _ = inputs.run(ref.rotary_write_kv_)
    normed = inputs.q if norm == "head" else inputs.q.flatten(1)
    inputs.q = ref_norm.rms_norm(normed, inputs.weights[0], 1e-5).view(inputs.q.shape)
    inputs.weights = (None, None)
    assert torch.equal(q, inputs.run(ref.rotary_write_kv_)[0])


def test_twin_keeps_lengths_and_what_is_not_rotated(rng):
    inputs = Inputs((3, 2, 1, 64, 32, 16), "none", torch.float32, rng)
    inputs.positions = torch.tensor([1, 5, 7], device=rng.device)
    q, _ = inputs.run(ref.rotary_write_kv_)
    assert torch.equal(q[..., 32:], inputs.q[..., 32:])
    assert not torch.equal(q[..., :32], inputs.q[..., :32])
    torch.testing.assert_close(q.norm(dim=-1), inputs.q.norm(dim=-1))


@pytest.mark.parametrize("norm", NORMS)
def test_door_runs_the_twin_on_the_cpu(norm):
    inputs = Inputs(SHAPES[0], norm, torch.float32, torch.Generator().manual_seed(0))
    q, cache = inputs.run(kv.rotary_write_kv_)
    twin_q, twin_cache = inputs.run(ref.rotary_write_kv_)
    assert torch.equal(q, twin_q)
    assert torch.equal(cache.nan_to_num(), twin_cache.nan_to_num())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_TNH": torch.zeros(3, 64)}, r"\.q: expected shape \[T, N, H\]"),
        ({"k_TKH": torch.zeros(2, 2, 16)}, r"\.k: expected shape \(3, 2, 16\)"),
        ({"v_TKH": torch.zeros(3, 2, 8)}, r"\.v: expected shape \(3, 2, 16\)"),
        ({"cos_sin": torch.zeros(8, 16).half()}, r"\.cos_sin: expected torch\.float32"),
        (
            {"cos_sin": torch.zeros(8, 18)},
            r"\.cos_sin: expected an even number of columns, 2 to 16 \(H\), got 18",
        ),
        (
            {"cos_sin": torch.zeros(8, 7)},
            r"\.cos_sin: expected an even number of columns, 2 to 16 \(H\), got 7",
        ),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, r"\.positions: .*int64"),
        ({"slots": torch.zeros(3, dtype=torch.int32)}, r"\.slots: expected torch\.int64"),
        ({"k_cache": torch.zeros(4, 3, 8, 16)}, r"\.k_cache: expected shape \(4, 2"),
        ({"v_cache": torch.zeros(4, 2, 4, 16)}, r"\.v_cache: expected shape \(4, 2, 8, 16"),
        ({"k_cache": torch.zeros(4, 2, 8, 16).half()}, r"\.k_cache: expected torch\.float32"),
        ({"k_cache": torch.zeros(4, 2, 16, 8).mT}, r"\.k_cache: expected stride 1"),
        ({"q_weight": torch.zeros(16)}, r"\.k_weight: expected both weights or neither"),
        (
            {"q_weight": torch.zeros(64), "k_weight": torch.zeros(16)},
            r"\.k_weight: expected shape \(32\), got shape \(16,\)",
        ),
        (
            {"q_weight": torch.zeros(17), "k_weight": torch.zeros(16)},
            r"\.q_weight: expected shape \(64\), got shape \(17,\)",
        ),
    ],
)
def test_door_refuses(change, message):
    arguments = {
        "q_TNH": torch.zeros(3, 4, 16),
        "k_TKH": torch.zeros(3, 2, 16),
        "v_TKH": torch.zeros(3, 2, 16),
        "q_weight": None,
        "k_weight": None,
        "eps": 1e-6,
        "cos_sin": torch.zeros(8, 16),
        "positions": torch.zeros(3, dtype=torch.int64),
        "k_cache": torch.zeros(4, 2, 8, 16),
        "v_cache": torch.zeros(4, 2, 8, 16),
        "slots": torch.zeros(3, dtype=torch.int64),
    }
    with pytest.raises(KernelArgumentError, match=r"rotary_write_kv_" + message):
        kv.rotary_write_kv_(**(arguments | change))
