import pytest
import torch

from kernels.ops import linear
from kernels.ops.checks import KernelArgumentError
from kernels.ref import linear as ref
from tests.kernels.cases import randn


@pytest.mark.parametrize("shape", [(64, 32), (1, 7)], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_door_returns_the_rows(shape, num_tokens, dtype, rng):
    table = randn(shape, dtype, rng)
    ids = torch.randint(0, shape[0], (num_tokens,), device=rng.device, generator=rng)
    out = linear.embedding(ids, table)
    assert torch.equal(out, ref.embedding(ids, table))
    assert torch.equal(out, torch.nn.functional.embedding(ids, table))


def test_door_takes_a_strided_table(dtype, rng):
    table = randn((16, 8), dtype, rng, is_strided=True)
    ids = torch.tensor([3, 15, 3], device=rng.device)
    assert torch.equal(linear.embedding(ids, table), table[ids])


@pytest.mark.parametrize(
    ("ids", "table", "message"),
    [
        (torch.zeros(3, dtype=torch.int32), torch.zeros(4, 8), r"embedding\.ids: .*int64"),
        (torch.zeros(3, 1, dtype=torch.int64), torch.zeros(4, 8), r"embedding\.ids: .*shape"),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(8), r"embedding\.table: .*\[V, D\]"),
    ],
)
def test_door_refuses(ids, table, message):
    with pytest.raises(KernelArgumentError, match=message):
        linear.embedding(ids, table)


@pytest.mark.gpu
def test_table_in_host_memory_read_in_place(host_view, dtype):
    table = torch.randn(1000, 576).to(dtype)
    ids = torch.randint(0, 1000, (77,))
    out = linear.embedding(ids.cuda(), host_view(table))
    assert torch.equal(out.cpu(), table[ids])
