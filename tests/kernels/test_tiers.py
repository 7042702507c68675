"""Blocks in two tiers: decode attention and cache writes give what one tier gives, to the bit."""

import pytest
import torch

from kernels.arguments import HostCache
from kernels.ops import attention, kv
from kernels.ops.checks import KernelArgumentError
from kernels.ref import attention as ref
from kernels.ref import kv as ref_write
from kernels.sizes import DECODE_SPLIT_TOKENS
from tests.kernels.cases import flat, fused_heads, in_tiers, paged_cache
from tests.kernels.test_rotary_write_kv import table
from tests.kernels.tolerances import ATTENTION, assert_close

pytestmark = pytest.mark.slow

SPLIT = DECODE_SPLIT_TOKENS

# query heads, KV heads, head size, block size, window, sequence lengths
CASES = [
    (8, 2, 64, 16, None, [5, 0, SPLIT + 3, SPLIT]),
    (3, 1, 22, 8, None, [4 * SPLIT + 1, 9]),
    (38, 1, 24, 128, None, [130]),
    (4, 2, 32, 24, 70, [2 * SPLIT + 1, 23, 60]),
    (1, 1, 16, 8, 1, [1, 90]),
]
SHARES = [0.0, 0.6]
DTYPES = [torch.float32, torch.bfloat16]


def draw(case, dtype, rng):
    heads, kv_heads, head_size, block_size, window, lengths = case
    cache = paged_cache(lengths, kv_heads, head_size, block_size, dtype, rng)
    q, _, _ = fused_heads(len(lengths), heads, kv_heads, head_size, dtype, rng)
    return cache, q, {"scale": head_size**-0.5, "window": window}


def num_gpu(cache, share):
    """Blocks of the first tier: one at least, as no engine has none."""
    return max(1, round(share * len(cache.storage)))


def kernel(*arguments, max_seq_len=8 * SPLIT, **options):
    from kernels.triton import decode_attention

    return flat(decode_attention.paged_decode_attention)(
        *arguments, max_seq_len=max_seq_len, **options
    )


ATTEND = {"kernel": kernel, "twin": flat(ref.paged_decode_attention)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ATTEND)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode_gives_the_bits_of_one_tier(case, name, dtype, rng, beside):
    cache, q, options = draw(case, dtype, rng)
    tables = cache.block_tables, cache.seq_lens
    whole = ATTEND[name](q, cache.k_cache, cache.v_cache, *tables, **options)
    for share in SHARES:
        k, v, host = in_tiers(cache, num_gpu(cache, share), beside)
        assert torch.equal(ATTEND[name](q, k, v, *tables, **options, host=host), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_kernel_matches_twin(case, dtype, rng, beside):
    cache, q, options = draw(case, dtype, rng)
    k, v, host = in_tiers(cache, num_gpu(cache, 0.5), beside)
    arguments = (q, k, v, cache.block_tables, cache.seq_lens)
    twin = flat(ref.paged_decode_attention)(*arguments, **options, host=host)
    assert_close(kernel(*arguments, **options, host=host), twin, ATTENTION)


@pytest.mark.parametrize("name", ATTEND)
def test_a_wrong_host_block_changes_the_result(name, rng, beside):
    cache, q, options = draw((4, 2, 16, 8, None, [40, 40]), torch.float32, rng)
    k, v, host = in_tiers(cache, 5, beside)
    arguments = (q, k, v, cache.block_tables, cache.seq_lens)
    right = ATTEND[name](*arguments, **options, host=host)
    row, place = (cache.block_tables[:, :5] >= 5).nonzero()[0].tolist()
    own, others = cache.block_tables[row, place].clone(), cache.block_tables[1 - row, :5]
    cache.block_tables[row, place] = next(block for block in others if block >= 5)
    wrong = ATTEND[name](*arguments, **options, host=host)
    assert not torch.allclose(wrong[row], right[row], atol=1e-3)
    assert torch.equal(wrong[1 - row], right[1 - row])
    cache.block_tables[row, place] = own - 5
    assert not torch.equal(ATTEND[name](*arguments, **options, host=host)[row], right[row])


@pytest.mark.parametrize("most", [1, 2, 6])
def test_programs_share_splits_of_both_tiers(most, monkeypatch, rng, beside):
    from kernels.triton import decode_attention

    cache, q, options = draw((2, 1, 16, 16, None, [5 * SPLIT + 1, 9]), torch.float32, rng)
    k, v, host = in_tiers(cache, 30, beside)
    arguments = (q, k, v, cache.block_tables, cache.seq_lens)
    whole = kernel(*arguments, **options, host=host)
    monkeypatch.setattr(decode_attention, "_MAX_PROGRAMS", 1)
    monkeypatch.setattr(decode_attention, "_MIN_HOST_PROGRAMS", most)
    assert torch.equal(kernel(*arguments, **options, host=host), whole)


class Write:
    """Arguments of a cache write whose slots lie in both tiers."""

    def __init__(self, dtype, rng, beside, *, tokens=40, gpu_blocks=3):
        device, block_size = rng.device, 8
        self.q, self.k, self.v = fused_heads(tokens, 4, 2, 32, dtype, rng)
        self.cos_sin = table(16, 50, device)
        self.positions = torch.randint(0, 50, (tokens,), device=device, generator=rng)
        self.storage = torch.full((9, 3, 2, 2, block_size, 32), torch.nan, dtype=dtype)
        self.storage = self.storage.to(device)
        self.slots = torch.randperm(9 * block_size, generator=rng, device=device)[:tokens]
        self.slots[1] = -1
        self.gpu_blocks, self.beside = gpu_blocks, beside

    def run(self, function, *, in_tiers):
        """Return queries and the layer's blocks of both tiers in one tensor."""
        q = self.q.clone()
        gpu = self.storage[: self.gpu_blocks].clone() if in_tiers else self.storage.clone()
        beside = self.beside(self.storage[self.gpu_blocks :])
        host = HostCache(beside[:, 1, 0], beside[:, 1, 1]) if in_tiers else None
        function(
            q, self.k, self.v, None, None, 1e-5, self.cos_sin, self.positions,
            gpu[:, 1, 0], gpu[:, 1, 1], self.slots, host=host,
        )  # fmt: skip
        whole = torch.cat([gpu, beside]) if in_tiers else gpu
        assert whole[:, 0].isnan().all()
        assert whole[:, 2].isnan().all()
        return q, whole[:, 1]


def write_kernel(*arguments, host):
    from kernels.triton import rotary_write_kv

    rotary_write_kv.rotary_write_kv_(*arguments, host=host)


WRITES = {"kernel": write_kernel, "twin": ref_write.rotary_write_kv_}


@pytest.mark.parametrize("gpu_blocks", [1, 3, 9])
@pytest.mark.parametrize("name", WRITES)
def test_writes_reach_the_block_of_either_tier(name, gpu_blocks, dtype, rng, beside):
    write = Write(dtype, rng, beside, gpu_blocks=gpu_blocks)
    q, cache = write.run(WRITES[name], in_tiers=True)
    want_q, want = write.run(WRITES[name], in_tiers=False)
    assert torch.equal(q, want_q)
    assert torch.equal(cache.isnan(), want.isnan())
    assert torch.equal(cache.nan_to_num(), want.nan_to_num())
    assert cache[gpu_blocks:].isnan().all() == (gpu_blocks == 9)


@pytest.mark.parametrize("name", WRITES)
def test_a_wrong_slot_writes_elsewhere(name, rng, beside):
    write = Write(torch.float32, rng, beside)
    _, right = write.run(WRITES[name], in_tiers=True)
    place = int((write.slots >= 3 * 8).nonzero()[0])
    write.slots[place] -= 3 * 8
    _, wrong = write.run(WRITES[name], in_tiers=True)
    assert not torch.equal(wrong.isnan(), right.isnan())


def test_doors_run_the_twins_on_the_cpu():
    rng = torch.Generator().manual_seed(0)
    cache, q, options = draw(CASES[0], torch.float32, rng)
    k, v, host = in_tiers(cache, 10, torch.clone)
    arguments = (q, k, v, cache.block_tables, cache.seq_lens)
    out = flat(attention.paged_decode_attention)(
        *arguments, **options, max_seq_len=2 * SPLIT, host=host
    )
    assert torch.equal(out, flat(ref.paged_decode_attention)(*arguments, **options, host=host))
    write = Write(torch.float32, rng, torch.clone)
    _, cache = write.run(kv.rotary_write_kv_, in_tiers=True)
    assert torch.equal(
        cache.nan_to_num(), write.run(ref_write.rotary_write_kv_, in_tiers=True)[1].nan_to_num()
    )


def zeros(shape=(5, 2, 8, 16), **options):
    return torch.zeros(shape, **options)


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ((zeros((5, 2, 4, 16)), zeros()), r"\.k: expected shape \(5, 2, 8, 16\)"),
        ((zeros(), zeros((4, 2, 8, 16))), r"\.v: expected shape \(5, 2, 8, 16\)"),
        ((zeros().half(), zeros()), r"\.k: expected torch\.float32, got torch\.float16"),
        ((zeros(), zeros((5, 8, 2, 16)).transpose(1, 2)), r"\.v: expected the strides of the"),
        ((zeros(), zeros(device="meta")), r"\.v: expected a tensor on cpu"),
    ],
)
@pytest.mark.parametrize("op", ["paged_decode_attention", "rotary_write_kv_"])
def test_doors_refuse_other_blocks(op, host, message):
    cache, lens = zeros((3, 2, 8, 16)), torch.ones(2, dtype=torch.int32)
    heads = [torch.zeros(2, count, 16) for count in (4, 2, 2)]
    ids = torch.zeros(2, dtype=torch.int64)
    arguments = {
        "paged_decode_attention": (heads[0], cache, cache, zeros((2, 2)).int(), lens, 1.0),
        "rotary_write_kv_": (
            *heads, None, None, 0.0, zeros((8, 16)), ids, cache, cache.clone(), ids,
        ),
    }[op]  # fmt: skip
    run, options = {
        "paged_decode_attention": (flat(attention.paged_decode_attention), {"max_seq_len": 1}),
        "rotary_write_kv_": (kv.rotary_write_kv_, {}),
    }[op]
    with pytest.raises(KernelArgumentError, match=op + r"\.host" + message):
        run(*arguments, **options, host=HostCache(*host))
