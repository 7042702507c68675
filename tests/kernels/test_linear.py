import pytest
import torch

from kernels.arguments import decode_workspace
from kernels.ops import linear
from kernels.ops.checks import KernelArgumentError
from kernels.ref import linear as ref
from tests.kernels.cases import randn
from tests.kernels.tolerances import PRODUCT, assert_close
from tests.slow import slow

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16)], ids=str)

# tokens, inputs, outputs
KERNEL_SHAPES = [(1, 256, 128), (3, 1160, 72), (16, 130, 65), (17, 96, 16), (40, 128, 7)]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(4, 32, 16), (1, 7, 123), (0, 8, 8)], ids=str)
def test_door_multiplies(shape, has_bias, rng):
    tokens, size_in, size_out = shape
    x = randn((tokens, size_in), torch.float32, rng)
    weight = randn((size_out, size_in), torch.float32, rng)
    bias = randn((size_out,), torch.float32, rng) if has_bias else None
    out = linear.linear(x, weight, bias)
    assert torch.equal(out, ref.linear(x, weight, bias))
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_door_keeps_the_dtype(dtype, rng):
    x, weight = randn((3, 16), dtype, rng), randn((8, 16), dtype, rng)
    assert linear.linear(x, weight).dtype == dtype


@pytest.mark.parametrize(
    ("x", "weight", "bias", "message"),
    [
        (torch.zeros(2, 8), torch.zeros(4, 9), None, r"linear\.weight: expected shape \(4, 8\)"),
        (torch.zeros(2, 8), torch.zeros(4, 8).half(), None, r"linear\.weight: .*float32"),
        (torch.zeros(2, 8), torch.zeros(4, 8), torch.zeros(5), r"linear\.bias: .*\(4\)"),
    ],
)
def test_door_refuses(x, weight, bias, message):
    with pytest.raises(KernelArgumentError, match=message):
        linear.linear(x, weight, bias)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", KERNEL_SHAPES, ids=str)
@HALVES
def test_kernel_matches_twin(shape, has_bias, dtype, rng):
    from kernels.triton import small_linear

    tokens, size_in, size_out = shape
    x = randn((tokens, size_in), dtype, rng, is_strided=True)
    weight = randn((size_out, size_in), dtype, rng) / size_in**0.5
    bias = randn((size_out,), dtype, rng) if has_bias else None
    out = small_linear.linear(x, weight, bias, None)
    assert_close(out, ref.linear(x.contiguous(), weight, bias), PRODUCT)


@pytest.mark.thorough_but("90-2")
@pytest.mark.parametrize(
    ("size_in", "parts"),
    [(512, 4), (90, 2), (90, 1), slow(512, 2), slow(512, 1), slow(90, 4)],
)
def test_kernel_adds_parts_and_leaves_its_counters_at_zero(size_in, parts, rng):
    from kernels.triton import small_linear
    from kernels.triton.tiles import LinearTile

    tile = LinearTile(16, 16, 32, parts, 4, 3)
    x = randn((5, size_in), torch.float16, rng)
    weight = randn((40, size_in), torch.float16, rng) / size_in**0.5
    bias = randn((40,), torch.float16, rng)
    counters = torch.zeros(8, dtype=torch.int32, device=rng.device)
    for _ in range(2):
        out = small_linear.launch(x, weight, bias, counters, tile, is_gated=False)
        assert_close(out, ref.linear(x, weight, bias), PRODUCT)
        assert (counters == 0).all()


@pytest.mark.parametrize("size", [(64, 128), slow((320, 1024))], ids=str)
def test_kernel_result_of_a_token_is_the_same_alone_and_among_16(size, rng):
    from kernels.triton import small_linear

    size_out, size_in = size
    x = randn((16, size_in), torch.bfloat16, rng)
    weight = randn((size_out, size_in), torch.bfloat16, rng)
    together = small_linear.linear(x, weight, None, None)
    for row in (0, 7, 15):
        alone = small_linear.linear(x[row : row + 1], weight, None, None)
        assert torch.equal(alone[0], together[row])


@pytest.mark.gpu
@HALVES
@pytest.mark.parametrize("size", [(12288, 4096), (4096, 4096), (4096, 11008), (1152, 896)], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 16, 24, 64])
def test_kernel_at_the_sizes_of_real_models(tokens, size, dtype, rng):
    size_out, size_in = size
    x = randn((tokens, size_in), dtype, rng)
    weight = randn((size_out, size_in), dtype, rng) / size_in**0.5
    bias = randn((size_out,), dtype, rng)
    workspace = decode_workspace(1, 1, 16, 1, rng.device)
    first = linear.linear(x, weight, bias, workspace=workspace)
    assert_close(first, ref.linear(x.float(), weight.float(), bias.float()).to(dtype), PRODUCT)
    for _ in range(20):
        assert torch.equal(linear.linear(x, weight, bias, workspace=workspace), first)
    assert (workspace.counters == 0).all()


@pytest.mark.gpu
def test_kernel_in_a_graph_gives_the_bits_of_eager(rng):
    x = randn((4, 4096), torch.bfloat16, rng)
    weight = randn((4096, 4096), torch.bfloat16, rng) / 64
    workspace = decode_workspace(1, 1, 16, 1, rng.device)

    def chain():
        out = x
        for _ in range(8):
            out = linear.linear(out, weight, workspace=workspace)
        return out

    expected = chain().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(10):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 64, 65])
def test_weight_in_host_memory_read_in_place(tokens, host_view):
    weight = torch.randn(512, 1024).bfloat16()
    x = torch.randn(tokens, 1024).bfloat16().cuda()
    assert torch.equal(linear.linear(x, host_view(weight)), linear.linear(x, weight.cuda()))
