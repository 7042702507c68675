"""Every placement gives the resident engine's tokens and moves the bytes that were planned."""

from itertools import pairwise
from typing import Any

import pytest

from engine import build
from engine.device.base import HostBuffer
from engine.device.cpu import CPUDevice
from engine.errors import PinningError
from tests.engine.placements import (
    FEW_TOKENS,
    GIB,
    MAX_TOKENS,
    OFFLOADS,
    PROMPTS,
    Residents,
    check_equal,
)
from tests.slow import mostly_slow, slow
from tests.tiny import greedy, greedy_params, open_llm

FAST = (
    "uva of some, staged",
    "uva of all",
    "uva of products",
    "prefetch",
    "prefetch, three slots",
    "swap space",
)
"""One of each backend, part, number of slots and way to read."""


@pytest.mark.parametrize("name", mostly_slow(OFFLOADS, FAST.__contains__))
def test_every_placement_equals_resident(residents: Residents, name: str) -> None:
    llm = residents.open(5, **OFFLOADS[name])
    check_equal(residents, llm, 5)
    llm.close()


@pytest.mark.thorough
@pytest.mark.parametrize("family", [slow("qwen2"), "olmo2", slow("mistral"), slow("qwen3")])
def test_placements_of_other_families(residents: Residents, family: str) -> None:
    for name in ("uva of some, staged", "uva of products", "prefetch", "prefetch of products"):
        llm = residents.open(3, family, **OFFLOADS[name])
        check_equal(residents, llm, 3, family)
        llm.close()


def test_outer_tensors_are_read_in_place(residents: Residents) -> None:
    outer = ["embed_tokens", "lm_head", "model.norm"]
    llm = residents.open(2, cpu_offload_gb=1, cpu_offload_params=outer)
    assert llm.plan.placed_bytes()["uva"] == (2 * 61 * 32 + 32) * 4
    check_equal(residents, llm, 2)
    llm.close()


def test_a_tied_embedding_is_not_offloaded(residents: Residents) -> None:
    from engine.errors import ConfigError

    with pytest.raises(ConfigError, match="embed_tokens"):
        residents.open(2, "qwen2", cpu_offload_gb=1, cpu_offload_params=["embed_tokens"])


class NoPinning(CPUDevice):
    """A machine whose driver refuses to register memory."""

    def host_buffer(self, num_bytes: int, *, pin: bool) -> HostBuffer:
        if pin:
            raise PinningError("cudaHostRegister failed, tests say so")
        return super().host_buffer(num_bytes, pin=pin)


@pytest.mark.thorough
def test_where_pinning_fails_weights_are_copied_from_pageable_memory(
    residents: Residents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "open_device", lambda _: NoPinning())
    for keywords in ({"cpu_offload_gb": 1}, {"offload_group_size": 2}):
        llm = residents.open(5, **keywords)
        [note] = llm.effective()["fallbacks"]
        assert "tests say so" in note
        assert llm.memory()["host_pinned_bytes"] == 0
        check_equal(residents, llm, 5)
        llm.close()
    residents.open(5).close()


@pytest.mark.thorough_but("uva of all", "prefetch")
@pytest.mark.parametrize("name", mostly_slow(OFFLOADS, FAST.__contains__))
def test_what_is_allocated_is_what_was_planned(residents: Residents, name: str) -> None:
    llm = residents.open(5, **OFFLOADS[name])
    items = llm.plan.gpu_items
    planned = set(items) - {"graphs", "runtime"}
    assert llm.memory()["gpu_allocated_bytes"] == sum(items[part] for part in planned)
    host = llm.plan.host_items
    pinned = host["pinned_weights"] + host.get("pinned_kv", 0)
    assert llm.memory()["host_pinned_bytes"] == pinned
    greedy(llm, PROMPTS, 2)
    assert llm.memory()["gpu_peak_bytes"] <= llm.memory()["gpu_budget_bytes"]
    llm.close()


def test_the_reference_copies_every_layer_on_demand(residents: Residents) -> None:
    folder = residents.folder(5)
    llm = open_llm(folder, reference=True, offload_group_size=2, **FEW_TOKENS)
    assert llm.effective()["offloaded_layers"] == [0, 1, 2, 3, 4]
    assert llm.effective()["graphs"] == []
    check_equal(residents, llm, 5)
    llm.close()


def test_swap_space_moves_only_as_many_layers_as_must(residents: Residents) -> None:
    plan = residents.open(7, **FEW_TOKENS).plan
    weights = plan.gpu_items["weights"]
    others = plan.gpu_total_bytes - weights
    layer = plan.layers[0].resident.num_bytes
    # Room for all but two layers beside the KV cache of one sequence; two slots need room too.
    budget = others - plan.gpu_items["kv_cache"] + 4 * plan.block_bytes + weights - 2 * layer
    # What weights leave of the swap space holds no block.
    swap_space = (4 * layer + plan.block_bytes - 1) / GIB
    llm = residents.open(
        7, swap_space=swap_space, gpu_memory_gib=budget / GIB, gpu_memory_utilization=1.0
    )
    assert llm.plan.host_kv is None
    assert len(llm.effective()["offloaded_layers"]) == 4
    assert llm.plan.placed_bytes()["prefetch"] > 0
    check_equal(residents, llm, 7)
    llm.close()


@pytest.mark.thorough
def test_engines_that_follow_each_other_and_engines_side_by_side(residents: Residents) -> None:
    first = residents.open(5, offload_group_size=1)
    second = residents.open(3, "qwen3", cpu_offload_gb=1)
    for llm in (first, second):
        for prompt in PROMPTS:
            llm.add_request(prompt, greedy_params(MAX_TOKENS))
    tokens: dict[Any, dict[str, list[int]]] = {first: {}, second: {}}
    while first.has_unfinished() or second.has_unfinished():
        for llm in (first, second):
            for event in llm.step():
                tokens[llm].setdefault(event.request_id, []).append(event.token_id)
    assert list(tokens[first].values()) == residents.tokens(5)
    assert list(tokens[second].values()) == residents.tokens(3, "qwen3")
    first.close()
    assert greedy(second, PROMPTS, MAX_TOKENS) == residents.tokens(3, "qwen3")
    second.close()


@pytest.mark.thorough
def test_the_order_of_requests_does_not_matter(residents: Residents) -> None:
    llm = residents.open(5, offload_group_size=1, max_num_seqs=2)
    expected = residents.tokens(5)
    for first, second in pairwise([0, 1, 2, 3, 0]):
        found = greedy(llm, [PROMPTS[second], PROMPTS[first]], MAX_TOKENS)
        assert found == [expected[second], expected[first]]
    llm.close()
