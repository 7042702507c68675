"""Experts cached in banks of slots: tokens of everything resident, whatever is in the slots."""

from typing import Any

import numpy as np
import pytest
import torch

from engine import LLM
from engine.errors import CapacityError, ConfigError
from engine.weights.residence import CachedUnits, ExpertBank
from kernels.ops import expert_cache
from tests.engine.conftest import TinyModels
from tests.slow import mostly_slow, slow
from tests.tiny import EXPERT_FAMILIES, greedy, greedy_params, make_prompt, open_llm

PROMPTS = [make_prompt(length, seed=5) for length in (1, 2, 15, 16, 17, 40, 70)]
MAX_TOKENS = 8


def open_cached(tiny: TinyModels, family: str, **keywords: Any) -> LLM:
    given = {"max_num_batched_tokens": 24, "offload_backend": "experts", **keywords}
    return open_llm(tiny.folder(family), **given)


def counts(llm: LLM) -> np.ndarray:
    """Hits and misses of each layer with experts, so far."""
    counters = llm.engine.store.expert_counters
    assert counters is not None
    return counters.cpu().numpy().copy()


def banks(llm: LLM) -> list[ExpertBank]:
    """The banks of all layers."""
    [units] = [each for each in llm.engine.store.held.values() if isinstance(each, CachedUnits)]
    return list(units.banks)


def check_banks(llm: LLM) -> None:
    """Every slot that has an expert has its bytes."""
    for bank in banks(llm):
        for slot, expert in enumerate(bank.cache.expert_of_slot.tolist()):
            for source, target in zip(bank.arrays.sources, bank.arrays.targets, strict=True):
                if expert >= 0:
                    assert torch.equal(target[slot].cpu(), source[expert].cpu())


def poison(llm: LLM) -> None:
    """Fill slots without an expert with what would be noticed."""
    for bank in banks(llm):
        empty = bank.cache.expert_of_slot < 0
        for target in bank.arrays.targets:
            target[empty] = 0xFF  # NaN


@pytest.mark.thorough_but("1")
@pytest.mark.parametrize("slots", [1, slow(2), slow(5), None])
@pytest.mark.parametrize("family", mostly_slow(EXPERT_FAMILIES, lambda x: x == "qwen3_moe"))
def test_tokens_are_those_of_everything_resident(
    tiny: TinyModels, family: str, slots: int | None
) -> None:
    """With fewer slots than experts of one token, too."""
    llm = open_cached(tiny, family, **({"expert_slots": slots} if slots else {}))
    poison(llm)
    assert greedy(llm, PROMPTS, MAX_TOKENS) == tiny.greedy(family, PROMPTS, MAX_TOKENS)
    check_banks(llm)
    plan = llm.plan
    assert plan.experts is not None
    wanted = slots or plan.experts.num_experts
    assert set(plan.experts.slots) == {wanted}
    hits, misses = counts(llm).sum(0)
    assert misses > 0
    assert hits > 0 or slots == 1
    if slots is None:  # each was copied once, and all of them
        assert misses <= plan.experts.num_experts * len(plan.experts.layers)
    assert llm.stats()["h2d_bytes"] == llm.stats()["in_place_bytes"] == 0
    llm.close()


@pytest.mark.parametrize("family", mostly_slow(["qwen3_moe", "olmoe_all"], lambda x: x[0] == "o"))
def test_a_stale_slot_changes_tokens(
    tiny: TinyModels, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The equality above is one: without copies tokens differ."""
    llm = open_cached(tiny, family, expert_slots=2)
    for bank in banks(llm):
        for target in bank.arrays.targets:
            target.zero_()
    monkeypatch.setattr(expert_cache, "gather", lambda *_: None)
    assert greedy(llm, PROMPTS[3:5], MAX_TOKENS) != tiny.greedy(family, PROMPTS[3:5], MAX_TOKENS)
    llm.close()


def test_a_step_counts_experts_once(tiny: TinyModels) -> None:
    """Hits and misses are the distinct experts of a layer; those in place count as misses."""
    cached = open_cached(tiny, "qwen3_moe", expert_slots=3)
    in_place = open_llm(
        tiny.folder("qwen3_moe"),
        max_num_batched_tokens=24,
        cpu_offload_gb=1,
        cpu_offload_params=["experts"],
    )
    for llm in (cached, in_place):
        llm.engine.store.expert_counters.zero_()
        assert greedy(llm, [PROMPTS[0]], 5) == tiny.greedy("qwen3_moe", [PROMPTS[0]], 5)
    routed = counts(cached).sum(1)
    assert (routed == counts(in_place)[:, 1]).all()
    assert not counts(in_place)[:, 0].any()
    assert (routed == 5 * cached.spec.num_experts_per_tok).all()  # five steps of one token
    sizes = cached.engine.store.expert_bytes
    assert sizes is not None
    spec = cached.spec
    assert (sizes == 3 * spec.hidden_size * spec.moe_intermediate_size * 4).all()
    assert (in_place.engine.store.expert_bytes == sizes).all()
    for bank in banks(cached):
        each = [target.shape[1] for target in bank.arrays.targets]
        assert 3 * sum(each[: bank.arrays.num_first]) == 2 * sum(each)  # gate and up, then down
    assert cached.plan.bytes_per_step() == 0  # experts stand apart
    for llm in (cached, in_place):
        llm.close()


@pytest.mark.thorough
def test_all_experts_in_slots_are_copied_once_and_hit_then(tiny: TinyModels) -> None:
    llm = open_cached(tiny, "qwen3_moe")
    greedy(llm, PROMPTS, MAX_TOKENS)
    before = counts(llm)
    greedy(llm, PROMPTS, MAX_TOKENS)
    assert (counts(llm)[:, 1] == before[:, 1]).all()
    assert (counts(llm)[:, 0] > before[:, 0]).all()
    llm.close()


@pytest.mark.thorough
def test_aborts_and_preemptions_change_no_tokens(tiny: TinyModels) -> None:
    """Sequences come, go, and give way to each other; the slots never hold another's experts."""
    family = "qwen3_moe"
    with open_llm(tiny.folder(family), max_model_len=112) as resident:
        expected = greedy(resident, PROMPTS, 40)
    sizes = {"expert_slots": 2, "block_size": 16, "max_model_len": 112}
    plan = open_cached(tiny, family, **sizes).plan
    room = plan.gpu_total_bytes - plan.gpu_items["kv_cache"] + 10 * plan.block_bytes
    llm = open_cached(
        tiny, family, **sizes, gpu_memory_gib=room / 2**30, gpu_memory_utilization=1.0
    )
    assert llm.plan.num_gpu_blocks == 10
    ids = [llm.add_request(list(prompt), greedy_params(40)) for prompt in PROMPTS]
    outputs: dict[str, list[int]] = {request_id: [] for request_id in ids}
    steps = 0
    while llm.has_unfinished():
        for event in llm.step():
            outputs[event.request_id].append(event.token_id)
        steps += 1
        if steps == 6:
            llm.abort(ids[2])
        if steps % 4 == 0:
            check_banks(llm)
            poison(llm)
    assert llm.stats()["preemptions"] > 0
    for index, request_id in enumerate(ids):
        if index != 2:
            assert outputs[request_id] == expected[index]
    llm.close()


@pytest.mark.thorough
def test_slots_are_forgotten_when_a_step_fails(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a claim and its copies all may end: then no slot is believed."""
    family = "qwen3_moe"
    llm = open_cached(tiny, family, expert_slots=3)
    assert greedy(llm, PROMPTS[:3], 4) == tiny.greedy(family, PROMPTS[:3], 4)

    def fail(*_: object) -> None:
        raise RuntimeError("no copy")

    with monkeypatch.context() as patch:
        patch.setattr(expert_cache, "gather", fail)
        llm.add_request(list(PROMPTS[5]), greedy_params(4))
        with pytest.raises(RuntimeError, match="no copy"):
            llm.step()
    assert greedy(llm, PROMPTS[:5], MAX_TOKENS) == tiny.greedy(family, PROMPTS[:5], MAX_TOKENS)
    check_banks(llm)
    llm.close()


def test_more_slots_than_experts_and_dense_models_are_refused(tiny: TinyModels) -> None:
    with pytest.raises(ConfigError, match=r"expert_slots: expected at most the 6 experts .* got 7"):
        open_cached(tiny, "qwen3_moe", expert_slots=7)
    with pytest.raises(ConfigError, match="expected a model with experts, got llama, which is"):
        open_cached(tiny, "llama")
    with pytest.raises(ConfigError, match=r"experts_first: expected a model with experts"):
        open_llm(tiny.folder("llama"), cpu_offload_gb=1, experts_first=True)
    with pytest.raises(CapacityError):
        open_cached(tiny, "qwen3_moe", gpu_memory_gib=0.001)


def test_without_pinned_memory_experts_are_copied_on_demand(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIGHTFIT_DISABLE_UVA", "1")
    llm = open_cached(tiny, "qwen3_moe", expert_slots=3)
    assert greedy(llm, PROMPTS[:4], 4) == tiny.greedy("qwen3_moe", PROMPTS[:4], 4)
    assert llm.plan.placed_bytes()["cached"] == 0
    assert llm.plan.placed_bytes()["on_demand"] > 0
    assert any(note.startswith("fallback: cached is not possible") for note in llm.plan.notes)
    llm.close()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "stored",
    [
        {"quantize": "int4"},
        slow({"quantize": "int8"}),
        slow({"dtype": "bfloat16", "weight_format": "lossless"}),
    ],
    ids=lambda stored: "-".join(stored.values()),
)
def test_experts_in_other_formats(tiny: TinyModels, stored: dict[str, Any]) -> None:
    """Arrays of a bank are those of its slots; what belongs to no expert is there whole."""
    folder = tiny.folder("qwen3_moe", hidden_size=128, moe_intermediate_size=64)
    limits = {"max_num_batched_tokens": 24, **stored}
    resident = open_llm(folder, **limits)
    expected = greedy(resident, PROMPTS, MAX_TOKENS)
    form = resident.plan.formats["model.layers.0.mlp.experts.w13_weight"].name
    assert form not in {"float32", "bfloat16"}
    resident.close()
    llm = open_llm(folder, **limits, offload_backend="experts", expert_slots=3)
    poison(llm)
    assert greedy(llm, PROMPTS, MAX_TOKENS) == expected
    assert llm.plan.formats["model.layers.0.mlp.experts.w13_weight"].name == form
    check_banks(llm)
    llm.close()


def test_counters_are_copied_before_the_mark_that_says_so(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a flight reads once its mark is done must be behind the mark on the stream."""
    llm = open_cached(tiny, "qwen3_moe")
    executor, order = llm.engine.executor, []
    assert executor.meter is not None
    for owner, name in ((executor.meter, "send"), (executor, "mark")):
        real = getattr(owner, name)

        def noted(real: Any = real, name: str = name) -> Any:
            order.append(name)
            return real()

        monkeypatch.setattr(owner, name, noted)
    greedy(llm, PROMPTS[:1], 2)
    assert order[:2] == ["send", "mark"]
    assert order[2:] == ["send", "mark"] * (len(order) // 2 - 1)
