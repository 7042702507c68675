"""A host tier from its configuration to its end: planned, allocated, recorded, released."""

import gc
import threading
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, build
from engine.asked.kv import KVTransferConfig
from engine.device.base import HostBuffer
from engine.device.cpu import CPUDevice
from engine.errors import CapacityError, EngineError, PinningError
from engine.kv import memory as mover
from engine.kv.memory import HostBlocks
from engine.plan.sizes import ids_bytes
from engine.run.core import Transfers
from tests.engine.conftest import TinyModels
from tests.engine.late import drain
from tests.engine.tiers import SIZES, Alone, check_empty, tiers
from tests.tiny import greedy, greedy_params, make_config, make_prompt, open_llm

pytestmark = pytest.mark.slow

GIB = 2**30
FEW = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "block_size": 16}
PROMPTS = [make_prompt(length, seed=length) for length in (40, 90, 230)]


@pytest.fixture(scope="module")
def alone() -> Alone:
    return Alone(at_once=True)


def budget_of(folder: Path, num_blocks: int, **keywords: Any) -> float:
    """A GPU budget, GiB, with which so many blocks have room beside all else."""
    plan = LLM.plan_for(make_config(folder, max_model_len=256, **FEW, **keywords))
    others = plan.gpu_total_bytes - plan.gpu_items["kv_cache"]
    return (others + (num_blocks + 0.5) * plan.block_bytes) / GIB


@pytest.mark.parametrize(
    "keywords",
    [
        {"num_cpu_blocks": 20},
        {"cpu_gib": 20.5 * 6144 / GIB},
        {"num_cpu_blocks": 20, "enable_prefix_caching": True, "pin_limit_gib": 15.2 * 6144 / GIB},
        {
            "kv_transfer_config": KVTransferConfig(
                kv_connector="OffloadingConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"num_cpu_blocks": 20, "block_size": 16},
            ),
            "enable_prefix_caching": True,
        },
    ],
    ids=["blocks", "size", "pin limit", "connector"],
)
def test_what_is_allocated_is_what_was_planned(
    tiny: TinyModels, alone: Alone, keywords: dict[str, Any]
) -> None:
    folder = tiny.folder("llama", **SIZES)
    expected = alone(folder, PROMPTS, 8)
    budget = {"gpu_memory_gib": budget_of(folder, 14, **keywords), "gpu_memory_utilization": 1.0}
    llm = open_llm(folder, max_model_len=256, **FEW, **budget, **keywords)
    plan, memory, found = llm.plan, llm.memory(), llm.effective()["kv"]
    planned = set(plan.gpu_items) - {"graphs", "runtime"}
    # Numbers of moves take less where the GPU has fewer blocks than are of use.
    rest = sum(plan.gpu_items[part] for part in planned) - memory["gpu_allocated_bytes"]
    moves = ids_bytes(plan.block_bytes, 2**21, min(20, plan.num_gpu_blocks))
    assert rest == plan.gpu_items["kv_moves"] - moves
    pinned = 15 if "pin_limit_gib" in keywords else 20
    assert (found["num_pinned_blocks"], found["num_pageable_blocks"]) == (pinned, 20 - pinned)
    assert memory["host_pinned_bytes"] == pinned * plan.block_bytes == plan.host_items["pinned_kv"]
    assert memory["host_pageable_bytes"] == (20 - pinned) * plan.block_bytes
    assert found["in_place"]
    assert found["prefix_caching"] is ("enable_prefix_caching" in keywords)
    report = llm.load_report
    assert report.moved["pin"] == memory["host_pinned_bytes"]
    assert report.phases["pin"] >= 0
    assert greedy(llm, PROMPTS, 8) == expected
    assert llm.stats()["kv"]["in_place_bytes"] > 0
    assert memory["gpu_peak_bytes"] <= memory["gpu_budget_bytes"]
    check_empty(llm)
    llm.close()


def test_a_tier_that_no_sequence_needs_stages_nothing(tiny: TinyModels, alone: Alone) -> None:
    folder = tiny.folder("llama", **SIZES)
    llm = open_llm(folder, max_model_len=256, num_cpu_blocks=20, **FEW)
    assert not llm.effective()["kv"]["in_place"]
    assert llm._engine is not None
    assert llm._engine.cache.host_layer(0) is None
    assert greedy(llm, PROMPTS, 8) == alone(folder, PROMPTS, 8)
    assert llm.stats()["kv"]["in_place_bytes"] == 0
    llm.close()


class NoPinning(CPUDevice):
    """A machine whose driver refuses to register memory."""

    def host_buffer(self, num_bytes: int, *, pin: bool) -> HostBuffer:
        if pin:
            raise PinningError("cudaHostRegister failed, tests say so")
        return super().host_buffer(num_bytes, pin=pin)


def test_where_pinning_fails_blocks_are_pageable(
    tiny: TinyModels, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.folder("llama", **SIZES)
    expected = alone(folder, PROMPTS, 8)
    monkeypatch.setattr(build, "open_device", lambda _: NoPinning())
    llm = open_llm(folder, max_model_len=256, num_cpu_blocks=20, enable_prefix_caching=True, **FEW)
    [note] = llm.effective()["fallbacks"]
    assert "tests say so" in note
    assert llm.effective()["kv"]["num_pageable_blocks"] == 20
    assert greedy(llm, PROMPTS, 8) == expected
    llm.evict_gpu_cache()
    assert greedy(llm, PROMPTS, 8) == expected
    moved = llm.stats()["kv"]["moved"]
    assert moved["staged_bytes"] == moved["stored_bytes"] + moved["loaded_bytes"] > 0
    check_empty(llm)
    llm.close()


def count_buffers(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Note host blocks that are open."""
    opened: set[int] = set()
    init, close = HostBlocks.__init__, HostBlocks.close

    def open_and_note(self: HostBlocks, *args: Any, **keywords: Any) -> None:
        init(self, *args, **keywords)
        opened.add(id(self))

    def close_and_note(self: HostBlocks) -> None:
        close(self)
        opened.discard(id(self))

    monkeypatch.setattr(HostBlocks, "__init__", open_and_note)
    monkeypatch.setattr(HostBlocks, "close", close_and_note)
    return opened


def test_a_build_that_fails_leaves_nothing_behind(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.folder("gemma3", **SIZES)
    opened = count_buffers(monkeypatch)
    tiers(monkeypatch, 40, num_window=40, pinned=10, pageable=10)
    steps = [(build, name) for name in ("KVCache", "_warm_up", "EngineCore")]
    for owner, name in (*steps, (build._Loader, "_read")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, _fail)
            with pytest.raises(EngineError, match="tests say so"):
                open_llm(folder, max_model_len=256, **FEW)
        assert not opened, name
    make, made = HostBlocks, []

    def fail_at_the_second(*args: Any, **keywords: Any) -> HostBlocks:
        if made:
            raise CapacityError("tests say so")
        made.append(1)
        return make(*args, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(mover, "HostBlocks", fail_at_the_second)
        with pytest.raises(CapacityError, match="tests say so"):
            open_llm(folder, max_model_len=256, **FEW)
    assert not opened


def _fail(*_: Any, **__: Any) -> Any:
    raise EngineError("tests say so")


def test_closing_waits_for_moves_and_ends_the_thread(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.folder("llama", **SIZES)
    opened = count_buffers(monkeypatch)
    tiers(monkeypatch, 20, pinned=2, pageable=20)
    before = set(threading.enumerate())
    llm = open_llm(folder, max_model_len=256, **FEW)
    assert len(opened) == 1
    greedy(llm, PROMPTS[1:2], 4)
    assert llm._engine is not None
    core = llm._engine.core
    core.scheduler.evict_gpu_cache()
    core.transfers.submit()
    assert core.transfers.num_under_way > 0
    assert set(threading.enumerate()) - before
    llm.close()
    assert not opened
    assert set(threading.enumerate()) == before
    del core
    gc.collect()


# Failures of steps.


@pytest.mark.parametrize("where", ["submit", "prepare", "execute", "move"])
def test_a_step_that_fails_is_planned_again(
    tiny: TinyModels, alone: Alone, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    folder = tiny.folder("llama", **SIZES)
    prompts = [make_prompt(30 + at, seed=at % 3) for at in range(12)]
    expected = alone(folder, prompts, 20)
    tiers(monkeypatch, 22, pinned=30, pageable=4)
    llm = open_llm(folder, max_model_len=120, **FEW | {"max_num_seqs": 8, "block_size": 8})
    assert llm._engine is not None
    engine, count = llm._engine, 0
    target: Any = {
        "submit": engine.core.transfers,
        "move": engine.tier.movers[0],
    }.get(where, engine.executor)
    name = "_enqueue" if where == "move" else where
    run = getattr(target, name)

    def fail_now_and_then(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count % 5 == 0:
            raise RuntimeError("tests say so")
        return run(*args)

    monkeypatch.setattr(target, name, fail_now_and_then)
    for number, prompt in enumerate(prompts):
        llm.add_request(prompt, greedy_params(20), str(number))
    tokens: dict[str, list[int]] = {}
    failures = 0
    while llm.has_unfinished():
        try:
            drain(llm, tokens)
        except RuntimeError as error:
            assert str(error) == "tests say so"  # noqa: PT017
            failures += 1
    assert failures > 3
    assert [tokens[str(number)] for number in range(len(prompts))] == expected
    monkeypatch.setattr(target, name, run)
    check_empty(llm)
    llm.close()


def test_a_call_that_finds_only_loads_waits_for_one_piece(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.folder("llama", **SIZES)
    tiers(monkeypatch, 20, pinned=20)
    llm = open_llm(folder, max_model_len=256, **FEW)
    greedy(llm, PROMPTS[1:2], 4)
    llm.evict_gpu_cache()
    waited = []
    wait = Transfers.wait_next

    def note(self: Transfers) -> None:
        assert self.num_under_way
        waited.append(1)
        wait(self)

    monkeypatch.setattr(Transfers, "wait_next", note)
    llm.add_request(PROMPTS[1], greedy_params(3))
    assert len(llm.step()) == 1
    assert waited == [1]
    llm.close()
