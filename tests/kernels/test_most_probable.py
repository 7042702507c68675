import math

import pytest
import torch

from kernels.ops import logits
from kernels.ops.checks import KernelArgumentError
from kernels.ref import logits as ref
from tests.kernels.cases import randn

INF, NAN = math.inf, math.nan
SIZES = [1, 2, 63, 1000, 16_384, 20_001]


def kernel(logits_SV):
    from kernels.triton import logits

    return logits.most_probable(logits_SV)


def assert_same(found, expected):
    (found_S2, largest_S), (expected_S2, expected_largest_S) = found, expected
    assert found_S2.dtype == torch.float64
    is_usable = expected_S2[:, 1].isfinite()
    assert torch.equal(found_S2[:, 1].isfinite(), is_usable)
    assert torch.equal(found_S2[is_usable, 0], expected_S2[is_usable, 0])
    torch.testing.assert_close(
        found_S2[is_usable, 1], expected_S2[is_usable, 1], rtol=2**-18, atol=2**-20
    )
    assert torch.equal(largest_S[is_usable], expected_largest_S[is_usable])


@pytest.mark.parametrize("size", SIZES)
def test_kernel_matches_twin(size, rng):
    rows = randn((3, size), torch.float32, rng) * 8
    assert_same(kernel(rows), ref.most_probable(rows))


def test_kernel_takes_rows_of_a_wider_tensor_and_from_any_place(rng):
    wide = randn((5, 131), torch.float32, rng)
    rows = wide[1:, 3:130]
    assert_same(kernel(rows), ref.most_probable(rows))


@pytest.mark.parametrize("size", [40, 20_001])
def test_the_lowest_id_counts_among_equals(size, rng):
    rows = randn((4, size), torch.float32, rng).clamp_(max=0.0)
    rows[0, [7, size - 1]] = 3.0
    rows[1, [0, 9]] = 3.0
    rows[2] = -1.0
    rows[3, [5, 6]] = torch.tensor([0.0, -0.0], device=rows.device)  # equal
    rows[3, :5] = -1.0
    for found_S2, _ in (kernel(rows), ref.most_probable(rows)):
        assert found_S2[:, 0].tolist() == [7, 0, 0, 5]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's
def test_rows_that_hold_what_is_no_logit_are_told_by_nan(rng):
    rows = randn((6, 20_001), torch.float32, rng)
    rows[0, 12] = NAN
    rows[1, 19_000] = NAN
    rows[2, 18_000] = INF
    rows[3] = -INF
    rows[4] = NAN
    rows[5, :17_000] = -INF  # the others of its row can be chosen
    for found_S2, _ in (kernel(rows), ref.most_probable(rows)):
        assert found_S2[:, 1].isnan().tolist() == [True] * 5 + [False]
        assert bool(((found_S2[:, 0] >= 0) & (found_S2[:, 0] < 20_001)).all())
    assert_same(kernel(rows), ref.most_probable(rows))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of overflow, the interpreter's
@pytest.mark.parametrize(("least", "most"), [(-1e30, 1e30), (-3.4e38, 3.4e38), (-INF, -3.4e38)])
def test_a_logit_far_above_the_others_is_certain(least, most, device):
    rows = torch.full((1, 20_001), least, device=device)
    rows[0, 17_000] = most
    for found_S2, largest_S in (kernel(rows), ref.most_probable(rows), logits.most_probable(rows)):
        assert found_S2.tolist() == [[17_000.0, 0.0]]
        assert largest_S.tolist() == rows[:, 17_000].tolist()


def test_kernel_result_of_a_row_is_the_same_in_every_batch(rng):
    rows = randn((7, 3000), torch.float32, rng)
    together, largest = kernel(rows)
    for at in range(7):
        alone, alone_largest = kernel(rows[at : at + 1])
        assert torch.equal(alone[0], together[at])
        assert torch.equal(alone_largest[0], largest[at])


def test_no_rows(rng):
    found, largest = kernel(randn((0, 7), torch.float32, rng))
    assert (found.shape, largest.shape) == ((0, 2), (0,))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.zeros(3), r"expected shape \(any, any\), got shape \(3,\)"),
        (torch.zeros((2, 3), dtype=torch.float64), "expected torch.float32, got torch.float64"),
        (torch.zeros((3, 2)).T, "expected stride 1"),
        (torch.zeros((2, 0)), "expected one token or more, got none"),
    ],
    ids=["dimensions", "dtype", "stride", "empty"],
)
def test_refusals(rows, message):
    with pytest.raises(KernelArgumentError, match=f"most_probable.logits: .*{message}"):
        logits.most_probable(rows)
