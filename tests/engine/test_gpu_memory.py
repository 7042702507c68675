"""On a GPU: budgets, ownership of host memory, memory given back, races put in on purpose."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM
from engine.device.cuda import CUDADevice
from engine.errors import CapacityError
from engine.weights.residence import SlotRing
from harness.observe.probe import probe_link
from tests.engine.conftest import TinyModels
from tests.tiny import greedy, greedy_params, make_prompt, open_llm

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

MIB, GIB = 2**20, 2**30
PROMPTS = [make_prompt(length, seed=6) for length in (1, 19, 90)]
LARGE = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
LARGE_PROMPTS = [make_prompt(length, seed=7, vocab=32000) for length in (3, 300, 600)]


def open_gpu(folder: Any, **keywords: Any) -> LLM:
    return open_llm(folder, **({"device": "cuda"} | keywords))


@pytest.fixture(scope="module")
def large(single_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes of a model whose layers take milliseconds to copy (134 MiB each)."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(LARGE))
    return folder


def open_large(folder: Path, **keywords: Any) -> LLM:
    return open_gpu(
        folder,
        load_format="dummy",
        dtype="bfloat16",
        max_num_batched_tokens=512,
        max_num_seqs=4,
        **keywords,
    )


@pytest.fixture(scope="module")
def large_tokens(large: Path) -> list[list[int]]:
    """Tokens of the large model with every weight on the GPU."""
    llm = open_large(large)
    found = greedy(llm, LARGE_PROMPTS, 8)
    assert llm.stats()["graph_steps"] > 0
    llm.close()
    assert len({token for tokens in found for token in tokens}) > 2
    return found


PLACEMENTS: list[dict[str, Any]] = [
    {"cpu_offload_gb": 0.3},
    {"cpu_offload_gb": 2},
    {"cpu_offload_gb": 2, "uva_stage_tokens": 1},
    {"offload_group_size": 1},
    {"offload_group_size": 1, "offload_prefetch_step": 3},
    {"offload_group_size": 3, "offload_num_in_group": 2, "offload_prefetch_step": 2},
    {"offload_group_size": 2, "enforce_eager": True},
]


@pytest.mark.parametrize("keywords", PLACEMENTS, ids=str)
def test_layers_that_take_long_to_copy(
    large: Path, large_tokens: list[list[int]], keywords: dict[str, Any]
) -> None:
    llm = open_large(large, **keywords)
    for _ in range(2):
        assert greedy(llm, LARGE_PROMPTS, 8) == large_tokens
    memory = llm.memory()
    assert memory["gpu_peak_bytes"] <= memory["gpu_budget_bytes"]
    assert memory["host_pinned_bytes"] == llm.plan.host_items["pinned_weights"]
    llm.close()


@pytest.mark.parametrize("keywords", [{}, {"offload_group_size": 1}], ids=["resident", "prefetch"])
def test_the_largest_steps_fit_what_is_planned_exactly(
    tmp_path: Path, keywords: dict[str, Any]
) -> None:
    """Nothing is left beside the plan, and activations of 112 MiB leave holes that others fill."""
    wide = LARGE | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    wide |= {"num_hidden_layers": 3, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(wide))
    asked = {"load_format": "dummy", "dtype": "bfloat16", "max_num_seqs": 16, **keywords}
    asked |= {"max_num_batched_tokens": 2048, "gpu_memory_gib": 8.0}
    llm = open_gpu(tmp_path, **asked)
    planned, share = llm.plan.gpu_total_bytes, llm.memory()["gpu_budget_bytes"] / (8 * GIB)
    llm.close()
    llm = open_gpu(tmp_path, **asked | {"gpu_memory_gib": (planned + MIB) / GIB / share})
    prompts = [make_prompt(length, seed=8, vocab=32000) for length in (2000, 1500, 700, 3)]
    assert greedy(llm, prompts, 4) == greedy(llm, prompts, 4)
    memory = llm.memory()
    assert planned - max(0.03 * planned, 150 * MIB) <= memory["gpu_peak_bytes"]
    assert memory["gpu_peak_bytes"] <= memory["gpu_budget_bytes"]
    llm.close()


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_control_a_skipped_wait_changes_tokens(
    large: Path, large_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    """Compute that does not wait for the copies reads the layer that was in the slot before."""

    def acquire(self: SlotRing, k: int) -> int:
        return k % self._num_slots

    monkeypatch.setattr(SlotRing, "acquire", acquire)
    llm = open_large(large, offload_group_size=1, enforce_eager=eager)
    assert greedy(llm, LARGE_PROMPTS, 8) != large_tokens
    llm.close()


def test_control_changed_host_memory_is_seen_by_in_place_reads(
    large: Path, large_tokens: list[list[int]]
) -> None:
    llm = open_large(large, cpu_offload_gb=2)
    assert greedy(llm, LARGE_PROMPTS, 8) == large_tokens
    llm._engine.store._host_buffer.tensor[: 64 * MIB].zero_()
    assert greedy(llm, LARGE_PROMPTS, 8) != large_tokens
    llm.close()


def test_graphs_find_their_layers_after_a_step_that_failed(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_large(large, offload_group_size=1)
    params = greedy_params(8)
    llm.add_request(LARGE_PROMPTS[0], params, "first")
    tokens = [event.token_id for event in llm.step()]
    llm.add_request(LARGE_PROMPTS[1], params, "second")
    store = llm._engine.store
    acquire = store.acquire

    def fail_at_three(layer: int) -> Any:
        if layer == 3:
            raise RuntimeError("tests say so")
        return acquire(layer)

    with monkeypatch.context() as patched:
        patched.setattr(store, "acquire", fail_at_three)
        with pytest.raises(RuntimeError, match="tests say so"):
            llm.step()
    llm.abort("second")
    while llm.has_unfinished():
        tokens += [event.token_id for event in llm.step()]
        assert llm.last_step is not None
        assert llm.last_step.used_graph
    alone = open_large(large)
    assert [tokens] == greedy(alone, LARGE_PROMPTS[:1], 8)
    alone.close()
    llm.close()


# The budget.


@pytest.mark.parametrize(
    "keywords", [{}, {"offload_group_size": 1}, {"cpu_offload_gb": 2}, {"swap_space": 2}], ids=str
)
def test_the_peak_stays_within_the_budget(large: Path, keywords: dict[str, Any]) -> None:
    llm = open_gpu(
        large,
        load_format="dummy",
        dtype="bfloat16",
        gpu_memory_gib=3.5,
        max_num_seqs=24,
        max_num_batched_tokens=1024,
        max_model_len=1024,
        **keywords,
    )
    prompts = [make_prompt(700 + 9 * i, seed=8, vocab=32000) for i in range(30)]
    greedy(llm, prompts, 6)
    memory = llm.memory()
    assert memory["gpu_budget_bytes"] == int(3.5 * GIB * 0.9)
    assert memory["gpu_allocated_bytes"] < memory["gpu_peak_bytes"] <= memory["gpu_budget_bytes"]
    llm.close()


def test_allocations_beyond_the_budget_fail_until_the_engine_is_closed(tiny: TinyModels) -> None:
    llm = open_gpu(tiny.folder("llama"), gpu_memory_gib=2.0)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    assert greedy(llm, PROMPTS, 3) == tiny.greedy("llama", PROMPTS, 3)
    llm.close()
    del llm
    torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()


def test_a_budget_beyond_the_card_is_refused(tiny: TinyModels) -> None:
    with pytest.raises(CapacityError, match=r"GPU budget: expected at most the"):
        open_gpu(tiny.folder("llama"), gpu_memory_gib=4000)


def test_memory_is_given_back(large: Path) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    free = torch.cuda.mem_get_info()[0]
    for close in (True, False):
        llm = open_large(large, offload_group_size=2)
        greedy(llm, LARGE_PROMPTS[:1], 2)
        assert torch.cuda.memory_allocated() > before + 500 * MIB
        if close:
            llm.close()
        del llm
        gc.collect()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() <= before + 128 * MIB
        assert torch.cuda.mem_get_info()[0] >= free - 512 * MIB


def test_two_engines_in_one_process(tiny: TinyModels) -> None:
    first = open_gpu(tiny.folder("llama"), offload_group_size=1)
    second = open_gpu(tiny.folder("qwen3"), cpu_offload_gb=1)
    for llm, family in ((first, "llama"), (second, "qwen3"), (first, "llama")):
        assert greedy(llm, PROMPTS, 5) == tiny.greedy(family, PROMPTS, 5)
    assert first.memory()["gpu_peak_bytes"] == second.memory()["gpu_peak_bytes"]
    both = torch.cuda.get_per_process_memory_fraction()
    first.close()
    assert 0 < torch.cuda.get_per_process_memory_fraction() < both < 1
    assert greedy(second, PROMPTS, 5) == tiny.greedy("qwen3", PROMPTS, 5)
    second.close()
    assert torch.cuda.get_per_process_memory_fraction() == 1


# Host memory that the GPU reads in place.


def test_memory_read_in_place_is_owned_by_the_engine(tiny: TinyModels) -> None:
    """Other pinned memory that comes and goes must never land in the weights."""
    expected = tiny.greedy("llama", PROMPTS, 5)
    llm = open_gpu(tiny.folder("llama"), cpu_offload_gb=1)
    store = llm._engine.store
    before = store._host_buffer.tensor.clone()
    assert greedy(llm, PROMPTS, 5) == expected
    for size in (4096, 100_000, before.numel(), 8 * MIB) * 4:
        blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(4)]
        for block in blocks:
            block.fill_(255)
        del blocks
        gc.collect()
        other = open_gpu(tiny.folder("qwen3"), cpu_offload_gb=1) if size == 4096 else None
        if other is not None:
            other.close()
    assert torch.equal(store._host_buffer.tensor, before)
    assert greedy(llm, PROMPTS, 5) == expected
    llm.close()


def test_a_view_keeps_pinned_memory_alive() -> None:
    device = CUDADevice()
    buffer = device.host_buffer(MIB, pin=True)
    buffer.tensor.copy_(torch.arange(MIB, dtype=torch.int64).to(torch.uint8))
    view = device.in_place(buffer, buffer.tensor[512:1024].view(torch.int16).view(16, 16))
    assert view.is_cuda
    assert view.shape == (16, 16)
    expected = buffer.tensor[512:1024].clone()
    del buffer
    gc.collect()
    for _ in range(8):
        torch.full((MIB,), 255, dtype=torch.uint8, pin_memory=True)
    assert torch.equal(view.cpu().view(-1).view(torch.uint8), expected)


def test_pageable_memory_is_never_read_in_place() -> None:
    device = CUDADevice()
    buffer = device.host_buffer(4096, pin=False)
    with pytest.raises(CapacityError, match="expected pinned memory"):
        device.in_place(buffer, buffer.tensor)


def test_the_link_probe() -> None:
    found = probe_link("cuda")
    assert all(value is not None and value > 0 for value in found.values())
    h2d, d2h, two_way, in_place, hbm = (
        found[f"{name}_gb_s"] or 0.0 for name in ("h2d", "d2h", "two_way", "in_place", "hbm_copy")
    )
    assert 1 < h2d < 1000
    assert 1 < d2h < 1000
    assert two_way > 0.8 * max(h2d, d2h)
    assert 0.05 * h2d < in_place < 1.5 * h2d
    assert hbm > h2d
