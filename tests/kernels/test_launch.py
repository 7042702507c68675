"""What a Launcher gives to Triton, what it launches itself, and the kernels that suit it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from kernels.arguments import (
    AttentionCall,
    DecodePart,
    HostCache,
    PrefillPart,
    decode_workspace,
    prefill_state,
)
from kernels.triton import (
    activation,
    decode_attention,
    launch,
    logits,
    norm,
    prefill_attention,
    rotary_write_kv,
)
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


OPTIONS = {"num_warps", "num_stages", "launch_pdl"}
"""Constants of launches that are Triton's own."""


class Launch(NamedTuple):
    """What one call of a Launcher was made of."""

    kernel: Any
    constants: frozenset[str]
    tensors: tuple[torch.Tensor, ...]
    indices: tuple[torch.Tensor, ...]
    varying: tuple[int, ...]
    numbers: tuple[float, ...]

    def params(self) -> list[Any]:
        """Return the kernel's parameters, also of one that Triton interprets here."""
        kernel = self.kernel
        compiled = kernel if hasattr(kernel, "params") else JITFunction(kernel.fn, **kernel.kwargs)
        return compiled.params


def every_launch(num_tokens: int) -> None:
    """Call all that launches through a Launcher; batch, lengths, blocks follow from the tokens."""
    x, weight = torch.zeros(num_tokens, 64), torch.zeros(64)
    norm.rms_norm(x, weight, 1e-6)
    norm.add_rms_norm(x, x, weight, 1e-6)
    norm.rms_norm_add_(x, x, weight, 1e-6)
    activation.gated_mul(x, is_gelu=False)
    logits.most_probable(x)
    q, k, v = torch.zeros(num_tokens, 8, 16).split_with_sizes((4, 2, 2), 1)
    cache = torch.zeros(num_tokens + 3, 2, 2, 16, 16)
    k_cache, v_cache = cache[:, 0], cache[:, 1]
    ids, host = torch.zeros(num_tokens, dtype=torch.int64), HostCache(k_cache, v_cache)
    table, places = torch.zeros(8, 16), (ids, k_cache, v_cache, ids)
    rotary_write_kv.rotary_write_kv_(q, k, v, None, None, 1e-6, table, *places, host=host)
    tables = torch.zeros(num_tokens, 256 + num_tokens, dtype=torch.int32)
    lens, starts = (torch.zeros(num_tokens + n, dtype=torch.int32) for n in (0, 1))
    paged = q, k_cache, v_cache, tables, lens, 1.0, torch.zeros(num_tokens, 4, 16)
    tiered = AttentionCall(*paged, host=host)
    workspace = decode_workspace(8, 4, 16, 4096, "cpu")
    decode_attention.paged_decode_attention(
        tiered, max_seq_len=512 * num_tokens, workspace=workspace
    )
    part = DecodePart(256 * num_tokens, 2048, is_last=False, workspace=workspace)
    decode_attention.paged_decode_part(tiered, part)
    for num_parts in (1, num_tokens):
        prefill_attention.paged_prefill_attention(
            AttentionCall(*paged), starts, max_query_len=num_tokens, num_parts=num_parts
        )
    state = prefill_state(8, 4, 16, "cpu")
    prefill_attention.paged_prefill_part(
        tiered,
        starts,
        PrefillPart(256 * num_tokens, 2048, is_last=True, state=state),
        max_query_len=num_tokens,
    )


@pytest.fixture
def launches(monkeypatch):
    """Return what is launched; nothing runs."""
    found = []

    def note(self, grid, tensors, indices, varying, numbers):
        assert len(grid) == 3
        given = tuple(tensors), tuple(indices), varying, numbers
        found.append(Launch(self._kernel, frozenset(self._constants) - OPTIONS, *given))

    monkeypatch.setattr(Launcher, "__call__", note)
    return found


def test_parameters_of_kernels_lie_as_a_launcher_takes_them(launches):
    """Else a variant that Triton compiled for other values would run, and read wrong memory."""
    every_launch(3)
    for made in launches:
        params, what = made.params(), made.kernel.fn.__name__
        counts = [len(given) for given in made[2:]]
        free, end = params[: sum(counts)], sum(counts)
        kinds = [kind for kind, count in enumerate(counts) for _ in range(count)]
        assert [(p.do_not_specialize_on_alignment, p.do_not_specialize) for p in free] == [
            (kind == 1, kind == 2) for kind in kinds
        ], what
        assert not any(p.is_constexpr for p in free), what
        assert all(p.is_constexpr for p in params[end:]), what
        assert {p.name for p in params[end:]} == made.constants, what
    using = {
        path.stem
        for path in Path(launch.__file__).parent.glob("*.py")
        if "import Launcher" in path.read_text(encoding="utf-8")
    }
    assert {made.kernel.fn.__module__.rpartition(".")[2] for made in launches} == using


def test_what_kernels_are_kept_by_follows_from_the_model_alone(launches):
    """Neither batch nor lengths, of which a run has many; and of types that never change."""
    every_launch(3)
    few, begin = list(launches), len(launches)
    every_launch(5)
    for one, other in zip(few, launches[begin:], strict=True):
        what = one.kernel.fn.__name__
        assert one.kernel is other.kernel
        assert one.numbers == other.numbers, what
        assert {type(each) for each in one.varying} <= {int}, what
        assert [*map(type, one.numbers)] == [*map(type, other.numbers)], what
        assert {type(each) for each in one.numbers} <= {int, float}, what
        assert [x.dtype for x in one.tensors] == [x.dtype for x in other.tensors], what
        types = {torch.float32} if what == "_most_probable_kernel" else {torch.int32, torch.int64}
        assert {x.dtype for x in one.indices} <= types, what  # not among what they are kept by
