"""KV blocks of two tiers: the same tokens as each prompt alone in a resident engine.

All families; prefixes found on the GPU, in the host tier and nowhere; sequences longer than the
GPU's room; preemption at concurrency; any size of block and of tier; what this machine cannot do.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.errors import EngineError
from tests.engine.conftest import TinyModels
from tests.engine.tiers import SIZES, Alone, check_empty, tiers
from tests.tiny import FAMILIES, greedy, make_prompt, open_llm, tokens_of

pytestmark = pytest.mark.thorough_but("test_prefixes_are_shared_by_requests_that_run")

STEM = make_prompt(90, seed=7)
PROMPTS = [
    make_prompt(150, seed=1),
    STEM + make_prompt(20, seed=2),
    make_prompt(30, seed=3),
    STEM + make_prompt(33, seed=4),
    make_prompt(5, seed=5),
]
TOKENS = 8
NEW = 12
"""Of sequences that exceed the GPU."""
LONG = make_prompt(260, seed=8)
ALL = (*FAMILIES, "mistral_window", "qwen2_window", "gpt_oss")
SHORT = ("gemma3",)
"""One of each kind of group of layers; the others go to `make test-slow`."""


@pytest.fixture(scope="module")
def alone() -> Alone:
    return Alone(at_once=True)


def open_tiers(folder: Any, **keywords: Any) -> LLM:
    given = {"max_num_batched_tokens": 64, "max_model_len": 320, "max_num_seqs": 32, **keywords}
    return open_llm(folder, **given)


def kv(llm: LLM) -> dict[str, Any]:
    found: dict[str, Any] = llm.stats()["kv"]
    return found


def changes(llm: LLM, prompts: Sequence[Sequence[int]], expected: Any) -> dict[str, int]:
    """Run prompts together, compare, and return where prefixes were found."""
    before = kv(llm)["prefix"]
    assert greedy(llm, prompts, len(expected[0])) == expected
    return {name: count - before[name] for name, count in kv(llm)["prefix"].items()}


@pytest.mark.parametrize(
    "variant",
    [pytest.param(x, marks=() if x in SHORT else pytest.mark.slow) for x in ALL],
)
def test_prefixes_long_sequences_and_swaps_of_every_family(
    tiny: TinyModels, alone: Alone, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    folder = tiny.folder(variant)
    expected = alone(folder, [*PROMPTS, LONG], TOKENS)
    tiers(monkeypatch, 14, num_window=18, pinned=40, pageable=3)
    llm = open_tiers(folder)
    cold = changes(llm, PROMPTS, expected[:-1])
    assert cold["missed_tokens"] > 0
    llm.evict_gpu_cache()
    assert kv(llm)["gpu"]["cached"] == 0
    assert changes(llm, PROMPTS, expected[:-1])["hits_cpu_tokens"] > 0
    llm.reset_cache()
    again = changes(llm, PROMPTS[:1], expected[:1])
    assert (again["hits_gpu_tokens"], again["hits_cpu_tokens"]) == (0, 0)
    assert changes(llm, PROMPTS[:1], expected[:1])["hits_gpu_tokens"] > 0
    assert greedy(llm, [LONG], TOKENS) == expected[-1:]
    stats = kv(llm)
    exceeds = llm.plan.kv.windows[0] is None
    assert (stats["in_place_bytes"] > 0) is exceeds
    assert (stats["staged_prefill_bytes"] > 0) is exceeds
    assert llm.last_step is not None
    assert (llm.last_step.kv_in_place_bytes > 0) is exceeds
    check_empty(llm)
    llm.close()


@pytest.mark.parametrize(
    ("overlap", "prefix_caching", "recompute_token_s"),
    [
        (True, True, 1.0),
        pytest.param(False, False, 1.0, marks=pytest.mark.slow),
        (True, False, 0.0),
    ],
    ids=["swaps of shared blocks", "swaps, no overlap", "recomputes"],
)
def test_preemption_at_concurrency(
    tiny: TinyModels,
    alone: Alone,
    monkeypatch: pytest.MonkeyPatch,
    overlap: bool,
    prefix_caching: bool,
    recompute_token_s: float,
) -> None:
    folder = tiny.folder("llama", **SIZES)
    prompts = [STEM[: 7 * (at % 3)] + make_prompt(3 + at % 9, seed=at) for at in range(12)]
    expected = alone(folder, prompts, 24)
    tiers(
        monkeypatch,
        18,
        pinned=40,
        pageable=30,
        prefix_caching=prefix_caching,
        recompute_token_s=recompute_token_s,
    )
    llm = open_tiers(folder, block_size=8, max_model_len=80)
    assert llm._engine is not None
    llm._engine.core.overlap = overlap
    assert greedy(llm, prompts, 24) == expected
    stats = kv(llm)
    assert stats["preemptions"] > 2
    if recompute_token_s:
        assert stats["swaps_out"] > 0
        assert stats["moved"]["loaded_bytes"] > 0
    else:
        assert (stats["swaps_out"], stats["recomputes"]) == (0, stats["preemptions"])
    assert (llm.stats()["overlapped_steps"] > 0) is overlap
    check_empty(llm)
    llm.close()


@pytest.mark.thorough_but("8-1.3")
@pytest.mark.parametrize(
    ("block_size", "times"),
    [
        (8, 1.3),
        pytest.param(16, 3, marks=pytest.mark.slow),
        pytest.param(32, 1.3, marks=pytest.mark.slow),
        (64, 3),
        pytest.param(128, 1.3, marks=pytest.mark.slow),
        pytest.param(128, 3, marks=pytest.mark.slow),
    ],
)
def test_one_sequence_longer_than_the_gpu(
    tiny: TinyModels,
    alone: Alone,
    monkeypatch: pytest.MonkeyPatch,
    block_size: int,
    times: float,
) -> None:
    folder = tiny.folder("qwen3", **SIZES)
    num_gpu = 256 // block_size
    prompt = make_prompt(int(256 * times) - 6, seed=9)
    expected = alone(folder, [prompt], NEW)
    need = -(-(len(prompt) + NEW) // block_size)
    tiers(monkeypatch, num_gpu, pinned=need - num_gpu, stage_blocks=128 // block_size)
    llm = open_tiers(folder, block_size=block_size, max_model_len=len(prompt) + NEW)
    assert greedy(llm, [prompt], NEW) == expected
    step = llm.last_step
    assert step is not None
    host_tokens = len(prompt) + NEW - 1 - 256
    assert step.kv_in_place_bytes == host_tokens * llm.plan.block_bytes // block_size
    assert 0 < kv(llm)["cpu"]["blocks"] <= need
    check_empty(llm)
    llm.close()


@pytest.mark.parametrize(
    ("pinned", "pageable", "in_place"),
    [
        pytest.param(0, 0, True, marks=pytest.mark.slow),
        pytest.param(1, 0, True, marks=pytest.mark.slow),
        (0, 1, False),
        pytest.param(2, 1, True, marks=pytest.mark.slow),
        pytest.param(0, 30, False, marks=pytest.mark.slow),
        pytest.param(30, 0, True, marks=pytest.mark.slow),
        pytest.param(7, 30, False, marks=pytest.mark.slow),
    ],
)
def test_any_size_of_host_tier(
    tiny: TinyModels,
    alone: Alone,
    monkeypatch: pytest.MonkeyPatch,
    pinned: int,
    pageable: int,
    in_place: bool,
) -> None:
    folder = tiny.folder("llama", **SIZES)
    prompts = [make_prompt(4 + at, seed=20 + at) for at in range(8)]
    expected = alone(folder, prompts, 20)
    tiers(monkeypatch, 9, pinned=pinned, pageable=pageable, in_place=in_place)
    llm = open_tiers(folder, block_size=8, max_model_len=64)
    assert greedy(llm, prompts, 20) == expected
    llm.evict_gpu_cache()
    assert greedy(llm, prompts[::-1], 20) == expected[::-1]
    stats = kv(llm)
    assert (stats["moved"]["staged_bytes"] > 0) is (pageable > 0)
    assert stats["preemptions"] > 0
    assert (stats["cpu"]["pinned"], stats["cpu"]["pageable"]) == (pinned, pageable)
    check_empty(llm)
    llm.close()


def test_nothing_is_in_transit_once_an_idle_engine_was_reset(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moves of the last step are known to be done, though no step asks."""
    tiers(monkeypatch, 12, pinned=20)
    llm = open_tiers(tiny.folder("llama", **SIZES), block_size=8, max_model_len=64)
    greedy(llm, [make_prompt(40, seed=at) for at in range(6)], 8)
    assert not llm.has_unfinished()
    assert kv(llm)["cpu"]["in_transit"] > 0
    llm.reset_cache()
    found = kv(llm)["cpu"]
    assert (found["in_transit"], found["free"]) == (0, 20)
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("switch", ["TIGHTFIT_DISABLE_UVA", "TIGHTFIT_DISABLE_PIN_MEMORY"])
def test_without_in_place_reads_and_without_pinning(
    tiny: TinyModels, alone: Alone, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    folder = tiny.folder(
        "gemma3",
        num_hidden_layers=4,
        **{k: v for k, v in SIZES.items() if k != "num_hidden_layers"},
    )
    prompts = [make_prompt(20 + at, seed=at) for at in range(8)]
    expected = alone(folder, prompts, 30)
    monkeypatch.setenv(switch, "1")
    tiers(monkeypatch, 24, num_window=40, pinned=40)
    llm = open_tiers(folder, block_size=8, max_model_len=128)
    assert greedy(llm, prompts, 30) == expected
    found = llm.effective()["kv"]
    assert not found["in_place"]
    is_pinned = switch.endswith("UVA")
    assert (found["num_pinned_blocks"], found["num_pageable_blocks"]) == (
        (80, 0) if is_pinned else (0, 80)
    )
    moved = kv(llm)["moved"]
    assert (moved["dma_bytes"] > 0, moved["staged_bytes"] > 0) == (is_pinned, not is_pinned)
    assert moved["kernel_bytes"] == 0
    pinned, pageable = llm._engine.host_bytes()  # type: ignore[union-attr]
    assert (pinned > 0, pageable > 0) == (is_pinned, not is_pinned)
    check_empty(llm)
    llm.close()


@pytest.mark.parametrize(
    "offload",
    [
        pytest.param({"cpu_offload_gb": 1}, marks=pytest.mark.slow),
        {"cpu_offload_gb": 1, "uva_stage_tokens": 1},
        pytest.param({"offload_group_size": 2}, marks=pytest.mark.slow),
        {"offload_group_size": 1, "offload_prefetch_step": 2},
    ],
    ids=["uva", "uva staged", "prefetch", "prefetch, two ahead"],
)
def test_weights_and_blocks_in_host_memory(
    tiny: TinyModels, alone: Alone, monkeypatch: pytest.MonkeyPatch, offload: dict[str, Any]
) -> None:
    folder = tiny.folder("olmo2", **SIZES)
    expected = alone(folder, [*PROMPTS, LONG], TOKENS)
    tiers(monkeypatch, 14, pinned=40, pageable=3)
    llm = open_tiers(folder, **offload)
    assert greedy(llm, PROMPTS, TOKENS) == expected[:-1]
    assert greedy(llm, [LONG], TOKENS) == expected[-1:]
    assert llm.stats()["h2d_bytes"] + llm.stats()["in_place_bytes"] > 0
    assert kv(llm)["in_place_bytes"] > 0
    check_empty(llm)
    llm.close()


def test_several_answers_of_one_prompt_share_it(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.folder("llama", **SIZES)
    params = SamplingParams(n=6, temperature=0.9, top_k=30, seed=3, max_tokens=25, ignore_eos=True)
    found = []
    for num_gpu, keywords in ((200, {}), (18, {"pinned": 30})):
        tiers(monkeypatch, num_gpu, prefix_caching=bool(keywords), **keywords)
        llm = open_tiers(folder, max_num_seqs=6)
        [output] = llm.generate([STEM], params)
        found.append([answer.token_ids for answer in output.outputs])
        check_empty(llm)
        llm.close()
    assert found[0] == found[1]


def test_prefixes_are_shared_by_requests_that_run(
    tiny: TinyModels, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.folder("llama", **SIZES)
    prompts = [STEM + make_prompt(4, seed=at) for at in range(10)]
    expected = alone(folder, prompts, TOKENS)
    tiers(monkeypatch, 24, pinned=24)
    llm = open_tiers(folder)
    assert greedy(llm, prompts[:1], TOKENS) == expected[:1]
    llm.evict_gpu_cache()
    before = kv(llm)["moved"]["loaded_bytes"]
    hits = changes(llm, prompts, expected)
    # Loaded once, for all ten.
    assert kv(llm)["moved"]["loaded_bytes"] - before <= 6 * llm.plan.block_bytes
    assert hits["hits_cpu_tokens"] + hits["hits_gpu_tokens"] >= 10 * 80
    check_empty(llm)
    llm.close()


def test_prefix_caching_without_a_host_tier(
    tiny: TinyModels, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.folder("llama", **SIZES)
    expected = alone(folder, PROMPTS, TOKENS)
    tiers(monkeypatch, 40)
    llm = open_tiers(folder)
    assert changes(llm, PROMPTS, expected)["hits_cpu_tokens"] == 0
    assert changes(llm, PROMPTS[1:2], expected[1:2])["hits_gpu_tokens"] == 96
    llm.evict_gpu_cache()
    assert changes(llm, PROMPTS[1:2], expected[1:2])["hits_gpu_tokens"] == 0
    assert llm.effective()["kv"]["tiers"] == ["gpu"]
    check_empty(llm)
    llm.close()


def test_a_tier_can_be_forgotten_at_any_time(
    tiny: TinyModels, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.folder("llama", **SIZES)
    prompts = [*PROMPTS, LONG]
    expected = alone(folder, prompts, TOKENS)
    tiers(monkeypatch, 14, pinned=40, pageable=3)
    llm = open_tiers(folder)
    found: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        llm.add_request(prompt, SamplingParams(temperature=0, max_tokens=TOKENS), str(number))
    steps = 0
    while llm.has_unfinished():
        for event in llm.step():
            found.setdefault(event.request_id, []).append(event.token_id)
        steps += 1
        llm.reset_cache(("gpu", "cpu", None)[steps % 3])  # type: ignore[arg-type]
    assert [found[str(number)] for number in range(len(prompts))] == expected
    with pytest.raises(EngineError, match="expected tier gpu, cpu or None, got 'disk'"):
        llm.reset_cache("disk")  # type: ignore[arg-type]
    check_empty(llm)
    llm.close()


def test_answers_do_not_depend_on_the_seed_of_moves(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random draws are keyed by request and position, whatever was found or swapped."""
    folder = tiny.folder("llama", **SIZES)
    params = SamplingParams(temperature=1.1, max_tokens=20, ignore_eos=True)
    found = []
    for num_gpu, pinned in ((200, 0), (16, 30)):
        tiers(monkeypatch, num_gpu, pinned=pinned)
        llm = open_tiers(folder)
        found.append(tokens_of(llm.generate(PROMPTS, params)))
        llm.close()
    assert found[0] == found[1]
