import pytest
import torch

from kernels import ops
from kernels.ref import kv as ref
from tests.kernels.cases import fused_heads


def empty_cache(num_blocks, num_heads, block_size, head_size, dtype, device):
    shape = (num_blocks, 3, 2, num_heads, block_size, head_size)
    return torch.full(shape, -7.0, dtype=dtype, device=device)


# tokens, KV heads, head size, block size
SHAPES = [(16, 2, 64, 16), (1, 1, 16, 8), (7, 3, 80, 32), (9, 123, 24, 128), (5, 8, 256, 16)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_matches_twin(shape, dtype, rng):
    from kernels.triton import kv

    tokens, heads, head_size, block_size = shape
    _, k, v = fused_heads(tokens, 2 * heads, heads, head_size, dtype, rng)
    num_blocks = 4
    slots = torch.randperm(num_blocks * block_size, device=rng.device, generator=rng)[:tokens]
    if tokens > 1:
        slots[1] = -1
    cache = empty_cache(num_blocks, heads, block_size, head_size, dtype, rng.device)
    twin = cache.clone()
    kv.write_kv(k, v, cache[:, 1, 0], cache[:, 1, 1], slots)
    ref.write_kv(k, v, twin[:, 1, 0], twin[:, 1, 1], slots)
    assert torch.equal(cache, twin)


def test_twin_writes_only_the_slots_named(dtype, rng):
    _, k, v = fused_heads(4, 4, 2, 16, dtype, rng)
    cache = empty_cache(3, 2, 8, 16, dtype, rng.device)
    expected = cache.clone()
    slots = [11, -1, 0, 23]
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // 8, 2, 0, :, slot % 8] = k[token]
            expected[slot // 8, 2, 1, :, slot % 8] = v[token]
    ref.write_kv(k, v, cache[:, 2, 0], cache[:, 2, 1], torch.tensor(slots, device=rng.device))
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("slots", [[], [-1, -1]], ids=["no tokens", "padding alone"])
def test_nothing_to_write(slots, rng):
    from kernels.triton import kv

    _, k, v = fused_heads(len(slots), 2, 1, 16, torch.float32, rng)
    slots = torch.tensor(slots, dtype=torch.int64, device=rng.device)
    for write in (kv.write_kv, ref.write_kv):
        cache = empty_cache(2, 1, 8, 16, torch.float32, rng.device)
        write(k, v, cache[:, 0, 0], cache[:, 0, 1], slots)
        assert (cache == -7.0).all()


def test_door_runs_the_twin_on_the_cpu():
    rng = torch.Generator().manual_seed(0)
    _, k, v = fused_heads(3, 4, 2, 16, torch.float32, rng)
    slots = torch.tensor([3, 9, -1])
    cache = empty_cache(2, 2, 8, 16, torch.float32, "cpu")
    twin = cache.clone()
    ops.write_kv(k, v, cache[:, 1, 0], cache[:, 1, 1], slots)
    ref.write_kv(k, v, twin[:, 1, 0], twin[:, 1, 1], slots)
    assert torch.equal(cache, twin)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v_TKH": torch.zeros(3, 2, 8)}, r"write_kv\.v: expected shape \(3, 2, 16\)"),
        ({"k_cache": torch.zeros(4, 3, 8, 16)}, r"write_kv\.k_cache: expected shape \(any, 2"),
        ({"v_cache": torch.zeros(4, 2, 4, 16)}, r"write_kv\.v_cache: expected shape \(4, 2, 8, 16"),
        (
            {"k_cache": torch.zeros(4, 2, 8, 16).half()},
            r"write_kv\.k_cache: expected torch\.float32",
        ),
        ({"k_cache": torch.zeros(4, 2, 16, 8).mT}, r"write_kv\.k_cache: expected stride 1"),
        ({"slots": torch.zeros(3, dtype=torch.int32)}, r"write_kv\.slots: expected torch\.int64"),
    ],
)
def test_door_refuses(change, message):
    arguments = {
        "k_TKH": torch.zeros(3, 2, 16),
        "v_TKH": torch.zeros(3, 2, 16),
        "k_cache": torch.zeros(4, 2, 8, 16),
        "v_cache": torch.zeros(4, 2, 8, 16),
        "slots": torch.zeros(3, dtype=torch.int64),
    }
    with pytest.raises(ops.KernelArgumentError, match=message):
        ops.write_kv(**(arguments | change))
