import pytest
import torch

from kernels.ops import kv
from kernels.ops.checks import KernelArgumentError
from kernels.ref import kv as ref


def numbered(blocks, words, device, start=0):
    values = torch.arange(start, start + blocks * words, dtype=torch.int32, device=device)
    return values.view(blocks, words)


# blocks of src, blocks of dst, words, how many are copied
SHAPES = [(9, 7, 64, 5), (3, 3, 1, 3), (4, 6, 4099, 4), (40, 50, 96, 40)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_matches_twin(shape, rng):
    from kernels.triton import block_copy

    num_src, num_dst, words, count = shape
    src = numbered(num_src, words, rng.device)
    dst = numbered(num_dst, words, rng.device, start=-(2**20))
    src_ids = torch.randint(num_src, (count,), device=rng.device, generator=rng)
    dst_ids = torch.randperm(num_dst, device=rng.device, generator=rng)[:count]
    twin = dst.clone()
    block_copy.copy_blocks(dst, src, dst_ids, src_ids)
    ref.copy_blocks(twin, src, dst_ids, src_ids)
    assert torch.equal(dst, twin)
    expected = [row.tolist() for row in numbered(num_dst, words, "cpu", start=-(2**20))]
    for target, source in zip(dst_ids.tolist(), src_ids.tolist(), strict=True):
        expected[target] = src[source].tolist()
    assert dst.tolist() == expected


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_layer_of_blocks_is_gathered_and_scattered(shape, rng):
    from kernels.triton import block_copy

    num_src, num_dst, words, count = shape
    blocks = numbered(num_src, 3 * words, rng.device).view(num_src, 3, words)
    stage = numbered(num_dst, words, rng.device, start=-(2**20))
    src_ids = torch.randperm(num_src, device=rng.device, generator=rng)[:count]
    dst_ids = torch.randperm(num_dst, device=rng.device, generator=rng)[:count]
    for copy in (block_copy.copy_blocks, ref.copy_blocks):
        out = stage.clone()
        copy(out, blocks[:, 1], dst_ids[: len(src_ids)], src_ids)
        expected = stage.clone()
        expected[dst_ids[: len(src_ids)]] = blocks[src_ids, 1]
        assert torch.equal(out, expected)
        back = blocks.clone()
        copy(back[:, 2], out, src_ids, dst_ids[: len(src_ids)])
        assert torch.equal(back[:, :2], blocks[:, :2])
        assert torch.equal(back[src_ids, 2], out[dst_ids[: len(src_ids)]])


def test_nothing_to_copy(rng):
    from kernels.triton import block_copy

    none = torch.empty(0, dtype=torch.int64, device=rng.device)
    for copy in (block_copy.copy_blocks, ref.copy_blocks):
        dst = numbered(2, 8, rng.device)
        copy(dst, numbered(2, 8, rng.device, start=100), none, none)
        assert torch.equal(dst, numbered(2, 8, rng.device))


@pytest.mark.gpu
@pytest.mark.parametrize("words", [8192, 524_288], ids=["32 KiB", "2 MiB"])
def test_blocks_cross_the_link_both_ways(words, rng, host_view):
    device = numbered(6, words, rng.device)
    host = host_view(numbered(9, words, "cpu", start=-(2**24)))
    out, back = torch.tensor([5, 0, 3]), torch.tensor([8, 1, 2])
    expected_host, expected_device = host.cpu().clone(), device.cpu().clone()
    ref.copy_blocks(expected_host, device.cpu(), back, out)
    kv.copy_blocks(host, device, back.cuda(), out.cuda())
    assert torch.equal(host.cpu(), expected_host)
    ref.copy_blocks(expected_device, expected_host, out + 0, torch.tensor([0, 8, 7]))
    kv.copy_blocks(device, host, out.cuda(), torch.tensor([0, 8, 7]).cuda())
    assert torch.equal(device.cpu(), expected_device)


@pytest.mark.gpu
def test_one_layer_of_host_blocks_reaches_a_stage(rng, host_view):
    words = 2 * 8 * 16 * 128 // 2
    host = host_view(numbered(7 * 4, words, "cpu").view(7, 4, words))
    stage = numbered(9, words, rng.device, start=-(2**24))
    expected, src_ids, dst_ids = stage.cpu(), torch.tensor([6, 0, 3]), torch.tensor([8, 2, 1])
    ref.copy_blocks(expected, host[:, 2].cpu(), dst_ids, src_ids)
    kv.copy_blocks(stage, host[:, 2], dst_ids.cuda(), src_ids.cuda())
    assert torch.equal(stage.cpu(), expected)


def test_door_runs_the_twin_on_the_cpu():
    dst, src = numbered(3, 8, "cpu"), numbered(5, 8, "cpu", start=100)
    kv.copy_blocks(dst, src, torch.tensor([2]), torch.tensor([4]))
    assert dst[2].tolist() == src[4].tolist()
    assert torch.equal(dst[:2], numbered(2, 8, "cpu"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dst_BW": torch.zeros(24, dtype=torch.int32)}, r"dst: expected shape \[B, W\]"),
        ({"dst_BW": torch.zeros(3, 9, dtype=torch.int32)}, r"src: expected shape \(any, 9\)"),
        ({"src_BW": torch.zeros(3, 8)}, r"src: expected torch\.int32"),
        ({"src_BW": torch.zeros(8, 3, dtype=torch.int32).mT}, r"src: expected stride 1 in the"),
        (
            {"dst_BW": torch.zeros(1, 8, dtype=torch.int32).expand(3, 8)},
            r"dst: expected rows at least 8 words apart, got strides \(0, 1\)",
        ),
        ({"dst_ids": torch.zeros(2, dtype=torch.int32)}, r"dst_ids: expected torch\.int64"),
        ({"src_ids": torch.zeros(3, dtype=torch.int64)}, r"src_ids: expected shape \(2\), got"),
    ],
)
def test_door_refuses(change, message):
    arguments = {
        "dst_BW": torch.zeros(3, 8, dtype=torch.int32),
        "src_BW": torch.zeros(4, 8, dtype=torch.int32),
        "dst_ids": torch.zeros(2, dtype=torch.int64),
        "src_ids": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(KernelArgumentError, match=rf"copy_blocks\.{message}"):
        kv.copy_blocks(**(arguments | change))
