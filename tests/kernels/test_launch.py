"""What a Launcher gives to Triton, and what it launches itself."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from kernels.triton import launch
from kernels.triton.launch import Launcher, power_of_2

CPU = torch.device("cpu")


class Kernel:
    """Stands for what triton.jit returns; notes what it and what it compiled are called with."""

    params = tuple(SimpleNamespace(is_constexpr=n >= 5) for n in range(7))

    def __init__(self) -> None:
        self.given: list[tuple] = []
        self.launched: list[tuple] = []

    def __getitem__(self, grid):
        def through_triton(*arguments, **constants):
            self.given.append((grid, arguments, constants))
            name = f"compiled {len(self.given)}"
            run = lambda *all_of_it: self.launched.append(all_of_it)  # noqa: E731
            return SimpleNamespace(run=run, function=name, packed_metadata="metadata")

        return through_triton


@pytest.fixture
def kernel(monkeypatch):
    active = SimpleNamespace(get_current_stream=lambda index: f"stream of {index}")
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    return Kernel()


def test_the_first_launch_of_a_kind_compiles_and_the_others_do_not(kernel):
    run = Launcher(kernel, torch.device("cuda", 1), SIZE=8, num_warps=4)
    x, out, slots = torch.zeros(64), torch.zeros(64), torch.zeros(9, dtype=torch.int64)
    run((3, 1, 1), (x, out), (slots,), (7,), (64,))
    assert kernel.given == [((3, 1, 1), (x, out, slots, 7, 64), {"SIZE": 8, "num_warps": 4})]
    assert kernel.launched == []
    run((5, 2, 1), (out, x), (slots[1:],), (9,), (64,))
    pointers = out.data_ptr(), x.data_ptr(), slots[1:].data_ptr()
    beside = "stream of 1", "compiled 1", "metadata", None, None, None
    assert kernel.launched == [(5, 2, 1, *beside, *pointers, 9, 64, None, None)]
    assert len(kernel.given) == 1


def test_other_dtypes_and_numbers_are_other_kinds(kernel):
    run = Launcher(kernel, CPU)
    x, half = torch.zeros(64), torch.zeros(64, dtype=torch.float16)
    for tensors, numbers in (((x, x), (64,)), ((x, half), (64,)), ((x, x), (65,))):
        for _ in range(2):
            run((1, 1, 1), tensors, (), (1,), numbers)
    assert len(kernel.given) == 3
    functions = [arguments[4] for arguments in kernel.launched]
    assert functions == ["compiled 1", "compiled 2", "compiled 3"]


def test_pointers_that_are_not_aligned_go_through_triton(kernel):
    run = Launcher(kernel, CPU)
    x = torch.zeros(64)
    for tensors in ((x, x[1:]), (x, x), (x, x[1:]), (x, x)):
        run((1, 1, 1), tensors, (), (), (64,))
    assert [arguments[1].data_ptr() % 16 for _, arguments, _ in kernel.given] == [4, 0, 4]
    assert [arguments[4] for arguments in kernel.launched] == ["compiled 2"]


def test_an_interpreter_is_called_every_time():
    calls = []
    kernel = {(1, 1, 1): lambda *arguments, **_: calls.append(arguments)}
    run = Launcher(kernel, CPU)
    x = torch.zeros(64)
    for _ in range(2):
        run((1, 1, 1), (x,), (), (), (64,))
    assert len(calls) == 2


@pytest.mark.parametrize(("size", "power"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_powers_of_2(size, power):
    assert power_of_2(size) == power
