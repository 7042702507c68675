"""On a GPU: KV blocks of two tiers, in graphs and eager, moves delayed at random: same tokens."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from engine import LLM
from engine.device.cuda import CUDACopyStream
from engine.kv.memory import BlockMover
from engine.kv.moves import MoveBatch
from engine.plan import host_times
from engine.plan.sizes import CopyAhead
from engine.run.executor import DeviceExecutor
from kernels.compile_time import count_compile_time
from tests.engine.conftest import TinyModels
from tests.engine.faults import or_poison
from tests.engine.groups import SIX, WINDOWS, Masked, with_windows
from tests.engine.storm import LONG_CYCLES, MOST_CYCLES
from tests.engine.tiers import ALWAYS, SIZES, TOGETHER, TURNS, Alone, check_empty, tiers
from tests.engine.two_streams import poison
from tests.tiny import FAMILIES, greedy, hf_model, make_prompt, open_llm

pytestmark = pytest.mark.gpu

CUDA: dict[str, Any] = {"device": "cuda", "gpu_memory_gib": 4.0}
STEM = make_prompt(90, seed=7)
PROMPTS = [STEM[: 30 * (at % 4)] + make_prompt(4 + at % 13, seed=at) for at in range(16)]
LONG = make_prompt(420, seed=8)
TOKENS = 20


@pytest.fixture(scope="module")
def alone() -> Alone:
    return Alone()


def open_tiers(folder: Any, **keywords: Any) -> LLM:
    given = {"max_num_batched_tokens": 96, "max_model_len": 480, "max_num_seqs": 16, **keywords}
    llm = open_llm(folder, block_size=8, **CUDA, **given)
    assert llm._engine is not None
    for tensor in llm._engine.cache.tensors:
        tensor.fill_(float("nan"))
    for blocks in llm._engine.tier.blocks:
        blocks.pinned.fill_(255)
        blocks.pageable.fill_(255)
    return llm


def run_all(llm: LLM) -> list[list[int]]:
    """Run prompts that share prefixes, again from the host tier, and one that exceeds the GPU."""
    found = greedy(llm, PROMPTS, TOKENS)
    llm.evict_gpu_cache()
    found += greedy(llm, PROMPTS[::-1], TOKENS)
    return found + greedy(llm, [LONG], TOKENS)


def expected_of(folder: Any, alone: Alone) -> list[list[int]]:
    found = alone(folder, [*PROMPTS, LONG], TOKENS, **CUDA)
    return [*found[:-1], *found[-2::-1], found[-1]]


@pytest.mark.parametrize("family", FAMILIES)
def test_prefixes_swaps_and_a_long_sequence(
    tiny: TinyModels, alone: Alone, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    folder = tiny.folder(family)
    expected = expected_of(folder, alone)
    tiers(monkeypatch, 24, num_window=40, pinned=44, pageable=6)
    llm = open_tiers(folder)
    with count_compile_time(enabled=True) as compiled:
        assert run_all(llm) == expected
        assert compiled.num_kernels == 0  # none in the middle of a run
    stats, step = llm.stats()["kv"], llm.last_step
    assert stats["preemptions"] > 0
    assert min(stats["in_place_bytes"], stats["staged_prefill_bytes"]) > 0
    assert min(stats["moved"]["kernel_bytes"], stats["moved"]["loaded_bytes"]) > 0
    assert step is not None
    assert step.used_graph
    assert step.kv_in_place_bytes > 0
    assert llm.effective()["kv"]["in_place"]
    check_empty(llm)
    llm.close()


@pytest.mark.parametrize("rates", [TURNS, TOGETHER], ids=["turns", "together"])
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_several_long_sequences_and_short_ones(
    tiny: TinyModels, alone: Alone, monkeypatch: pytest.MonkeyPatch, rates: Any, eager: bool
) -> None:
    monkeypatch.setattr(host_times, "LEAST_TURN", 3)
    monkeypatch.setattr(host_times, "MOST_TURN", 5)
    folder = tiny.folder("qwen3")
    prompts = [LONG, *PROMPTS[:4], LONG[7:], *PROMPTS[4:8], LONG[31:]]
    expected = alone(folder, prompts, TOKENS, **CUDA)
    tiers(monkeypatch, 24, pinned=180, pageable=6, read_rates=rates)
    llm = open_tiers(folder, enforce_eager=eager)
    assert greedy(llm, prompts, TOKENS) == expected
    stats = llm.stats()["kv"]
    assert (stats["long_turns"] > 0) is (rates is TURNS)
    assert min(stats["pool"]["demoted"], stats["in_place_bytes"]) > 0
    check_empty(llm)
    llm.close()


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_three_kinds_of_layers(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    with_windows(monkeypatch, WINDOWS)
    found = Masked(hf_model("qwen3", **SIX))([*PROMPTS, LONG], TOKENS)
    tiers(monkeypatch, 24, num_window=(40, 30), pinned=44, pageable=6)
    llm = open_tiers(tiny.folder("qwen3", **SIX), enforce_eager=eager)
    assert run_all(llm) == [*found[:-1], *found[-2::-1], found[-1]]
    stats, step = llm.stats()["kv"], llm.last_step
    assert stats["preemptions"] > 0
    assert min(stats["in_place_bytes"], stats["staged_prefill_bytes"]) > 0
    assert step is not None
    assert step.used_graph is not eager
    check_empty(llm)
    llm.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("block_size", [8, 32, 128])
@pytest.mark.parametrize("way", ["graph", "eager", "copied ahead"])
def test_a_long_sequence_has_the_bits_of_a_resident_one(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, dtype: str, block_size: int, way: str
) -> None:
    folder = tiny.folder("qwen3")
    given: dict[str, Any] = {
        # Prefills of 256 tokens or fewer round otherwise where their keys are shared by programs.
        "max_num_batched_tokens": 200 if dtype == "float32" else 500,
        "max_model_len": 1100,
        "max_num_seqs": 2,
        "dtype": dtype,
        "block_size": block_size,
        "enforce_eager": way == "eager",
        **CUDA,
    }
    prompt = make_prompt(1000, seed=2)
    resident = open_llm(folder, **given)
    expected = greedy(resident, [prompt], 60)
    resident.close()
    for times in (1.3, 3):
        num_gpu = int(1060 / times) // block_size
        need = -(-1060 // block_size)
        tiers(
            monkeypatch,
            num_gpu,
            pinned=need + 8,
            stage_blocks=max(20, 256 // block_size),
            copy_ahead=ALWAYS if way == "copied ahead" else None,
        )
        llm = open_llm(folder, **given)
        assert greedy(llm, [prompt], 60) == expected
        step = llm.last_step
        assert step is not None
        assert step.used_graph is (way == "graph")
        host_tokens = 1059 - num_gpu * block_size
        moved = step.kv_in_place_bytes + step.kv_copied_bytes
        assert moved == host_tokens * llm.plan.block_bytes // block_size
        assert (step.kv_copied_bytes > 0) is (way == "copied ahead")
        check_empty(llm)
        llm.close()
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("keywords", "sizes"),
    [
        ({}, {"pinned": 0, "pageable": 60}),
        ({}, {"pinned": 2, "pageable": 0}),
        ({"cpu_offload_gb": 1}, {"pinned": 60}),
        ({"offload_group_size": 1}, {"pinned": 40, "pageable": 10}),
        ({"enforce_eager": True}, {"pinned": 60, "prefix_caching": False}),
    ],
    ids=["pageable", "few", "uva", "prefetch", "eager, no prefixes"],
)
def test_other_tiers_and_weights_in_host_memory(
    tiny: TinyModels,
    alone: Alone,
    monkeypatch: pytest.MonkeyPatch,
    keywords: dict[str, Any],
    sizes: dict[str, Any],
) -> None:
    folder = tiny.folder("llama")
    expected = expected_of(folder, alone)
    tiers(monkeypatch, 60 - min(36, sizes["pinned"]), **sizes)
    llm = open_tiers(folder, **keywords)
    assert run_all(llm) == expected
    check_empty(llm)
    llm.close()


@pytest.mark.parametrize("switch", ["TIGHTFIT_DISABLE_UVA", "TIGHTFIT_DISABLE_PIN_MEMORY"])
def test_without_in_place_reads_and_without_pinning(
    tiny: TinyModels, alone: Alone, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    folder = tiny.folder("gemma3")
    expected = expected_of(folder, alone)
    tiers(monkeypatch, 60, num_window=40, pinned=50)
    monkeypatch.setenv(switch, "1")
    llm = open_tiers(folder)
    assert run_all(llm) == expected
    assert llm.stats()["kv"]["moved"]["loaded_bytes"] > 0
    check_empty(llm)
    llm.close()


# Streams delayed at random.


def poison_on_card(dst: torch.Tensor) -> None:
    if dst.is_cuda:
        poison(dst.view(torch.uint8))


@contextmanager
def delayed(copies: float, compute: float, most_cycles: int = MOST_CYCLES) -> Iterator[None]:
    """Let copies and steps lag at random; what a copy will write is NaN before it."""
    chance = random.Random(f"{copies} {compute}")
    copy, run, execute = CUDACopyStream.copy, CUDACopyStream.run, DeviceExecutor.execute
    copy_rows = CUDACopyStream.copy_rows

    def delay(share: float) -> None:
        if chance.random() < share:
            torch.cuda._sleep(chance.randrange(most_cycles // 4, most_cycles))

    def late_copy(self: CUDACopyStream, dst: torch.Tensor, src: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            poison_on_card(dst)
            delay(copies)
        copy(self, dst, src)

    def late_copies(self: CUDACopyStream, pairs: Any) -> None:
        for dst, src in pairs:
            late_copy(self, dst, src)

    def late_rows(self: CUDACopyStream, dst: torch.Tensor, src: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            poison_on_card(dst)
            delay(copies)
        copy_rows(self, dst, src)

    def late_run(self: CUDACopyStream, work: Any) -> None:
        with torch.cuda.stream(self._stream):
            if isinstance(work, partial):  # ops.copy_blocks
                dst, _, ids, _ = work.args
                dst[ids] = -1
            delay(copies)
        run(self, work)

    def late_execute(self: DeviceExecutor, batch: Any) -> torch.Tensor:
        delay(compute)
        return execute(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CUDACopyStream, "copy", late_copy)
        patch.setattr(CUDACopyStream, "copy_all", late_copies)
        patch.setattr(CUDACopyStream, "copy_rows", late_rows)
        patch.setattr(CUDACopyStream, "run", late_run)
        patch.setattr(DeviceExecutor, "execute", late_execute)
        yield


@pytest.mark.parametrize("shares", [(0.7, 0.0), (0.0, 0.7), (0.4, 0.4)])
@pytest.mark.parametrize("copy_ahead", [None, ALWAYS], ids=["in place", "copied ahead"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_delays_and_poison_change_no_token(
    tiny: TinyModels,
    alone: Alone,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    copy_ahead: CopyAhead | None,
    shares: tuple[float, float],
) -> None:
    folder = tiny.folder(family, **SIZES)
    expected = expected_of(folder, alone)
    tiers(monkeypatch, 24, num_window=40, pinned=44, pageable=6, copy_ahead=copy_ahead)
    llm = open_tiers(folder)
    with delayed(*shares):
        assert run_all(llm) == expected
        assert (llm.stats()["kv"]["copied_ahead_bytes"] > 0) is (copy_ahead is not None)
        check_empty(llm)
    llm.close()


def test_control_a_step_that_does_not_wait_for_moves_changes_tokens(
    tiny: TinyModels, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.folder("llama", **SIZES)
    expected = expected_of(folder, alone)
    submit = BlockMover.submit
    for is_right in (True, False):
        tiers(monkeypatch, 24, pinned=44)
        if not is_right:
            monkeypatch.setattr(
                BlockMover, "submit", lambda self, x: submit(self, MoveBatch(x.moves, frozenset()))
            )
        llm = open_tiers(folder)
        with delayed(1.0, 0.0, LONG_CYCLES):
            assert (or_poison(lambda: run_all(llm)) == expected) is is_right  # noqa: B023
        llm.close()


def test_what_is_closed_is_given_back(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.folder("gemma3", **SIZES)
    tiers(monkeypatch, 24, num_window=40, pinned=44, pageable=6)
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        llm = open_tiers(folder)
        greedy(llm, PROMPTS, 4)
        llm.evict_gpu_cache()
        llm.close()
        assert torch.cuda.memory_allocated() <= before
