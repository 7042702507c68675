"""On a GPU: experts in banks of slots, in graphs: tokens of everything resident, in the budget."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.weights import residence as banked
from tests.engine.conftest import TinyModels
from tests.engine.growth import GRAPHS, Growths, check_composition, grow, some_eager
from tests.engine.test_expert_cache import banks, check_banks, counts, poison
from tests.slow import mostly_slow
from tests.tiny import EXPERT_FAMILIES, greedy, greedy_params, make_prompt, open_llm

pytestmark = pytest.mark.gpu

GIB = 2**30
BACKEND = {"offload_backend": "experts"}
PLACES: dict[str, dict[str, Any]] = {
    "one slot": BACKEND | {"expert_slots": 1},
    "as many slots as experts of a token": BACKEND | {"expert_slots": 2},
    "some slots": BACKEND | {"expert_slots": 4},
    "some slots, eager": BACKEND | {"expert_slots": 4, "enforce_eager": True},
    "all have slots": BACKEND,
    "in place": {"cpu_offload_gb": 1, "cpu_offload_params": ["experts"]},
    "in place, never staged": {
        "cpu_offload_gb": 1,
        "cpu_offload_params": ["experts"],
        "uva_stage_tokens": 97,
    },
    "one matrix in place": {"cpu_offload_gb": 1, "cpu_offload_params": ["w2_weight"]},
    "copied ahead": {"offload_group_size": 1, "offload_params": ["experts"]},
}


@pytest.fixture(scope="module")
def growths(tiny: TinyModels) -> Growths:
    return Growths(tiny)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", PLACES)
def test_tokens_are_those_of_everything_resident(growths: Growths, name: str, dtype: str) -> None:
    """Batches across captured sizes, decodes beside prompts, graphs and eager steps in turn."""
    expected, keywords = growths.expected("qwen3_moe", dtype=dtype), PLACES[name]
    llm = growths.open("qwen3_moe", dtype=dtype, **keywords)
    is_cached = keywords.get("offload_backend") == "experts"
    if is_cached:
        poison(llm)
    found = grow(llm, growths.prompts)
    assert found.tokens == expected.tokens
    check_composition(found, [] if keywords.get("enforce_eager") else GRAPHS)
    if is_cached:
        check_banks(llm)
        poison(llm)
    with some_eager(llm, 0.5):
        assert grow(llm, growths.prompts).tokens == expected.tokens
    if is_cached or "in place" in name:
        hits, misses = counts(llm).sum(0)
        assert misses > 0
        assert bool(hits) is is_cached or keywords.get("expert_slots") == 1
    llm.close()


@pytest.mark.parametrize("family", mostly_slow(EXPERT_FAMILIES, lambda x: x == "qwen2_moe"))
def test_every_family(growths: Growths, family: str) -> None:
    expected = growths.expected(family, dtype="bfloat16")
    llm = growths.open(family, dtype="bfloat16", offload_backend="experts", expert_slots=2)
    assert grow(llm, growths.prompts).tokens == expected.tokens
    check_banks(llm)
    llm.close()


def test_a_stale_slot_changes_tokens(growths: Growths, monkeypatch: pytest.MonkeyPatch) -> None:
    """The equality above is one."""
    expected = growths.expected("qwen3_moe", dtype="float32")
    monkeypatch.setattr(banked.expert_cache, "gather", lambda *_: None)
    llm = growths.open("qwen3_moe", dtype="float32", offload_backend="experts", expert_slots=2)
    for bank in banks(llm):
        for target in bank.arrays.targets:
            target.zero_()
    assert grow(llm, growths.prompts).tokens != expected.tokens
    llm.close()


def test_aborts_in_between(growths: Growths) -> None:
    llm = growths.open("qwen3_moe", dtype="float32", offload_backend="experts", expert_slots=2)
    alone = [greedy(llm, [prompt], 24)[0] for prompt in growths.prompts[:6]]
    outputs: dict[str, list[int]] = {str(at): [] for at in range(6)}
    for at, prompt in enumerate(growths.prompts[:6]):
        llm.add_request(prompt, greedy_params(24), str(at))
    steps = 0
    while llm.has_unfinished():
        for event in llm.step():
            outputs[event.request_id].append(event.token_id)
        steps += 1
        if steps in {4, 9}:
            llm.abort("1" if steps == 4 else "3")
        check_banks(llm)
    assert all(outputs[str(at)] == alone[at] for at in (0, 2, 4, 5))
    llm.close()


LARGE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 512,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
    "torch_dtype": "bfloat16",
}
LARGE_PROMPTS = [make_prompt(length, seed=8, vocab=8192) for length in (700, 300, 3, 1)]


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_banks_take_what_is_left_and_no_more(tmp_path: Path, quantize: str | None) -> None:
    """The plan's peak is the budget's; experts of 3 MiB, of which banks hold some."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    asked: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "device": "cuda",
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
        "max_model_len": 1024,
        "quantize": quantize,
    }
    llm = open_llm(tmp_path, **asked, gpu_memory_gib=8.0)
    expected = greedy(llm, LARGE_PROMPTS, 24)
    llm.close()
    llm = open_llm(tmp_path, **asked, **BACKEND, expert_slots=20, gpu_memory_gib=8.0)
    assert greedy(llm, LARGE_PROMPTS, 24) == expected
    plan = llm.plan
    room = plan.gpu_total_bytes - plan.gpu_items["kv_cache"] + plan.kv.room(64)
    llm.close()
    share = plan.gpu_budget_bytes / (8 * GIB)
    llm = open_llm(tmp_path, **asked, **BACKEND, gpu_memory_gib=(room + 64) / GIB / share)
    assert llm.plan.experts is not None
    assert 18 <= min(llm.plan.experts.slots) <= 22
    for _ in range(2):
        assert greedy(llm, LARGE_PROMPTS, 24) == expected
    # What lies outside the allocator has the modules of other tests too: test_gpu_memory counts it.
    assert llm.engine.device._allocator.peak_bytes() <= llm.plan.allocator_bytes
    hits, misses = counts(llm).sum(0)
    assert hits > 0
    assert misses > 0
    check_banks(llm)
    llm.close()
    torch.cuda.empty_cache()
