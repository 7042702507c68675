"""Weights in codes on a GPU against the same weights plain, bit for bit."""

import pytest
import torch

from kernels.arguments import CODES_PARTS, Codes
from kernels.ops import codes, linear
from tests.kernels.cases import randn

pytestmark = pytest.mark.gpu
TOKENS = [1, 2, 8, 9, 16, 17, 32, 33, 40, 41, 64, 65, 200]
SHAPES = [(4096, 4096), (12288, 4096), (1536, 576), (96, 64), (10272, 128), (22016, 1024)]


def weights(shape, rng):
    """Normal weights; some far smaller, larger, zero or not finite."""
    weight = randn(shape, torch.bfloat16, rng) / shape[1] ** 0.5
    flat = weight.view(-1)
    for start, value in ((5, 0.0), (11, 1e30), (17, -1e-39), (23, float("inf"))):
        flat[start :: max(4001, shape[1])] = value
    return weight


def on_host(packed: Codes, host_view) -> Codes:
    return Codes(*(host_view(getattr(packed, each).cpu()) for each in CODES_PARTS))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_have_the_bits_of_plain_weights(shape, rng):
    num_rows, num_columns = shape
    weight = weights(shape, rng)
    weight[weight.isinf()] = 3.0  # so that no result is NaN
    packed = codes.pack(weight)
    bias = randn((num_rows,), torch.bfloat16, rng)
    for tokens in TOKENS:
        x = randn((tokens, num_columns), torch.bfloat16, rng) * 2.0**-100  # beside weights of 1e30
        for each in (None, bias):
            found = codes.linear(x, packed, each)
            assert torch.equal(found, linear.linear(x, weight, each)), tokens
            assert torch.equal(found, codes.linear(x, packed, each))
        assert torch.equal(codes.linear_gated_mul(x, packed), linear.linear_gated_mul(x, weight))
        gelu = codes.linear_gated_mul(x, packed, bias, is_gelu=True)
        assert torch.equal(gelu, linear.linear_gated_mul(x, weight, bias, is_gelu=True))


def test_many_tokens_restore_into_the_scratch(rng):
    weight = weights((4096, 1024), rng)
    weight[weight.isinf()] = 3.0
    memory = torch.empty(4 * weight.numel(), dtype=torch.uint8, device=rng.device)
    packed = codes.pack(weight).with_scratch(memory)
    x = randn((100, 1024), torch.bfloat16, rng) * 2.0**-100
    assert torch.equal(codes.linear(x, packed), linear.linear(x, weight))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = codes.linear_gated_mul(x, packed)
    assert torch.cuda.max_memory_allocated() - before < weight.nbytes
    assert torch.equal(out, linear.linear_gated_mul(x, weight))
    assert torch.equal(packed.scratch, weight)
    assert codes.pack(weight).with_scratch(memory[:100]).scratch is None


def test_a_wrong_escape_changes_the_product(rng):
    weight = weights((512, 1024), rng)
    weight[weight.isinf()] = 3.0
    packed = codes.pack(weight)
    x = randn((4, 1024), torch.bfloat16, rng)
    right = codes.linear(x, packed)
    packed.table[:64] ^= 0x4000  # exponents
    assert not torch.equal(codes.linear(x, packed), right)


@pytest.mark.parametrize("shape", [*SHAPES, (65536, 64), (16, 27648)], ids=str)
def test_restored_bits_are_those_packed(shape, rng):
    weight = weights(shape, rng)
    packed = codes.pack(weight)
    out = codes.restore(packed)
    assert torch.equal(out.view(torch.int16), weight.view(torch.int16))


def test_every_bit_pattern_is_restored(rng):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=rng.device)
    patterns = patterns.to(torch.int16).view(32, 2048)[:, : 15 * 128].contiguous()
    packed = codes.pack(patterns.view(torch.bfloat16))
    assert torch.equal(codes.restore(packed).view(torch.int16), patterns)
    ids = torch.arange(32, device=rng.device)
    assert torch.equal(codes.embedding(ids, packed).view(torch.int16), patterns)


def test_rows_are_those_of_the_table(rng, host_view):
    table = weights((1024, 576), rng)
    packed = codes.pack(table)
    ids = torch.randint(1024, (37,), generator=rng, device=rng.device)
    for each in (packed, on_host(packed, host_view)):
        assert torch.equal(
            codes.embedding(ids, each).view(torch.int16), table[ids].view(torch.int16)
        )
    scaled = codes.embedding(ids, packed, 1.7)
    expected = linear.embedding(ids, table, 1.7)
    assert torch.equal(scaled.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("tokens", [1, 16, 64, 65])
def test_codes_in_host_memory_are_read_in_place(tokens, rng, host_view):
    weight = randn((512, 1024), torch.bfloat16, rng)
    packed = codes.pack(weight)
    x = randn((tokens, 1024), torch.bfloat16, rng)
    assert torch.equal(codes.linear(x, on_host(packed, host_view)), linear.linear(x, weight))


@pytest.mark.parametrize("tokens", [3, 20, 40])
def test_products_in_a_graph_have_the_bits_of_eager(tokens, rng):
    weight = randn((4096, 4096), torch.bfloat16, rng) / 64
    packed = codes.pack(weight)
    x = randn((tokens, 4096), torch.bfloat16, rng)

    def chain():
        out = x
        for _ in range(8):
            out = codes.linear(out, packed)
        return out

    expected = chain().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(10):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(4096, 4096), (10272, 128)], ids=str)
def test_a_token_has_one_result_in_every_batch_of_its_size(shape, dtype, rng):
    x = randn((64, shape[1]), dtype, rng)
    weight = randn(shape, dtype, rng) / shape[1] ** 0.5
    few = linear.linear(x[:32], weight)
    for count in (1, 8, 9, 17):
        assert torch.equal(linear.linear(x[:count], weight), few[:count])
    many = linear.linear(x, weight)
    for count in (33, 40, 41):
        assert torch.equal(linear.linear(x[:count], weight), many[:count])
