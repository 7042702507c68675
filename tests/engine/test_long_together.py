"""Several sequences beyond the GPU's room, and short ones beside them: tokens of each one alone."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.plan import host_times
from tests.engine.conftest import TinyModels
from tests.engine.tiers import ALWAYS, SIZES, TOGETHER, TURNS, Alone, check_empty, tiers
from tests.slow import slow
from tests.tiny import make_prompt, open_llm

pytestmark = pytest.mark.thorough

LONGS = [make_prompt(length, seed=20 + length) for length in (170, 260, 330)]
SHORTS = [make_prompt(3 + 9 * at, seed=at) for at in range(5)]
TOKENS = 24


@pytest.fixture(scope="module")
def alone() -> Alone:
    return Alone(at_once=True)


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let turns be short, so that few tokens see several."""
    monkeypatch.setattr(host_times, "LEAST_TURN", 3)
    monkeypatch.setattr(host_times, "MOST_TURN", 5)
    monkeypatch.setattr(host_times, "MOST_SKIPPED", 2)


def open_tiers(folder: Any, **keywords: Any) -> LLM:
    given = {"max_num_batched_tokens": 48, "max_model_len": 380, "max_num_seqs": 12, **keywords}
    return open_llm(folder, block_size=8, **given)


def kv(llm: LLM) -> dict[str, Any]:
    found: dict[str, Any] = llm.stats()["kv"]
    return found


def run_staggered(llm: LLM, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """Send a prompt every third step."""
    found: dict[str, list[int]] = {}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    rest = list(enumerate(prompts))
    steps = 0
    while rest or llm.has_unfinished():
        if rest and steps % 3 == 0:
            number, prompt = rest.pop(0)
            llm.add_request(prompt, params, str(number))
        for event in llm.step():
            found.setdefault(event.request_id, []).append(event.token_id)
        steps += 1
    return [found[str(number)] for number in range(len(prompts))]


@pytest.mark.thorough_but("True-together")
@pytest.mark.parametrize(
    ("rates", "keywords", "family"),
    [
        pytest.param(TURNS, {}, "llama", marks=pytest.mark.slow),
        (TOGETHER, {}, "llama"),
        pytest.param(TURNS, {"prefix_caching": False}, "llama", marks=pytest.mark.slow),
        pytest.param(None, {"prefix_caching": False}, "llama", marks=pytest.mark.slow),
        (TURNS, {"num_window": 100}, "gemma3"),
        pytest.param(TOGETHER, {"num_window": 60}, "gemma3", marks=pytest.mark.slow),
    ],
    ids=["turns", "together", "turns, no prefixes", "no rates", "turns, windows", "windows"],
)
@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_tokens_of_each_alone(
    tiny: TinyModels,
    alone: Alone,
    monkeypatch: pytest.MonkeyPatch,
    rates: Any,
    keywords: dict[str, Any],
    family: str,
    overlap: bool,
) -> None:
    folder = tiny.folder(family, **SIZES)
    prompts = [LONGS[0], SHORTS[0], LONGS[1], *SHORTS[1:3], LONGS[2], *SHORTS[3:]]
    expected = alone(folder, prompts, TOKENS)
    tiers(monkeypatch, 18, pinned=140, read_rates=rates, **keywords)
    llm = open_tiers(folder)
    assert llm._engine is not None
    llm._engine.core.overlap = overlap
    assert run_staggered(llm, prompts, TOKENS) == expected
    found = kv(llm)
    assert (found["long_turns"] > 0) is (rates is TURNS)
    assert min(found["pool"]["demoted"], found["in_place_bytes"]) > 0
    check_empty(llm)
    llm.close()


def test_the_least_input_that_blocked(
    tiny: TinyModels, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """464 tokens of room on the GPU, 2,320 in the host tier: two prompts of 600 and four of 6."""
    folder = tiny.folder("llama", **SIZES)
    longs = [make_prompt(600, seed=at) for at in range(2)]
    shorts = [make_prompt(6, seed=10 + at) for at in range(4)]
    expected = alone(folder, [*longs, *shorts], 6)
    tiers(monkeypatch, 29, pinned=145)
    llm = open_llm(
        folder, block_size=16, max_model_len=640, max_num_batched_tokens=128, max_num_seqs=8
    )
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for number, prompt in enumerate([*longs, *shorts]):
        llm.add_request(prompt, params, str(number))
    found: dict[str, list[int]] = {}
    first_steps: dict[str, int] = {}
    steps = 0
    while llm.has_unfinished():
        steps += 1
        for event in llm.step():
            found.setdefault(event.request_id, []).append(event.token_id)
            first_steps.setdefault(event.request_id, steps)
    assert [found[str(number)] for number in range(6)] == expected
    assert all(first_steps[str(number)] <= 2 for number in range(2, 6))
    assert min(first_steps["0"], first_steps["1"]) > 4
    check_empty(llm)
    llm.close()


@pytest.mark.parametrize(
    "offload",
    [
        {"offload_group_size": 1, "offload_prefetch_step": 2},
        pytest.param({"cpu_offload_gb": 1}, marks=pytest.mark.slow),
    ],
    ids=["prefetch", "uva"],
)
def test_weights_over_the_link_beside(
    tiny: TinyModels, alone: Alone, monkeypatch: pytest.MonkeyPatch, offload: dict[str, Any]
) -> None:
    folder = tiny.folder("olmo2", **SIZES)
    prompts = [*LONGS[:2], *SHORTS[:2]]
    expected = alone(folder, prompts, TOKENS)
    tiers(monkeypatch, 18, pinned=100, read_rates=TURNS)
    llm = open_tiers(folder, **offload)
    assert run_staggered(llm, prompts, TOKENS) == expected
    assert llm.stats()["h2d_bytes"] + llm.stats()["in_place_bytes"] > 0
    assert kv(llm)["long_turns"] > 0
    check_empty(llm)
    llm.close()


@pytest.mark.parametrize("rates", [TURNS, slow(TOGETHER)], ids=["turns", "together"])
def test_answers_that_share_a_long_prompt(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, rates: Any
) -> None:
    folder = tiny.folder("llama", **SIZES)
    params = SamplingParams(n=3, temperature=0.9, seed=3, max_tokens=30, ignore_eos=True)
    found = []
    for num_gpu, keywords in ((400, {}), (18, {"pinned": 120, "read_rates": rates})):
        tiers(monkeypatch, num_gpu, prefix_caching=bool(keywords), **keywords)
        llm = open_tiers(folder)
        outputs = llm.generate([LONGS[0], SHORTS[1]], params)
        found.append([[answer.token_ids for answer in output.outputs] for output in outputs])
        check_empty(llm)
        llm.close()
    assert found[0] == found[1]


WEIGHTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {}),
    ("llama", {"offload_group_size": 1, "offload_prefetch_step": 2}),
    ("olmo2", {"cpu_offload_gb": 1, "uva_stage_tokens": 20}),
    ("llama", {"quantize": "int8"}),
    ("llama", {"quantize": "int4", "cpu_offload_gb": 1}),
    ("gemma3", {}),
    ("mistral_window", {"offload_group_size": 2}),
    ("qwen3_moe", {"offload_backend": "experts", "expert_slots": 3}),
    ("qwen3_moe", {"cpu_offload_gb": 1}),
)
STEM = make_prompt(200, seed=50)


def mixed_prompts(rng: random.Random) -> list[list[int]]:
    """Lengths from one token to three times the room, some with a common beginning."""
    found = []
    for at in range(7):
        length = rng.choice((1, 7, 20, 60, 110, 150, 200, 280, 350))
        stem = STEM[: rng.choice((0, 0, 40, 199))]
        found.append([*stem, *make_prompt(length, seed=100 * at + length)][:length])
    return found


@pytest.mark.parametrize("seed", [1, 5, *map(slow, range(6, 66))])
def test_any_mix_of_lengths_and_arrivals(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Arrivals and aborts at random, tiers that are full at times: tokens are those of each alone.

    Weights are anywhere, rounded or in experts; layers have windows; answers share a prompt.
    """
    rng = random.Random(seed)
    family, weights = WEIGHTS[seed % len(WEIGHTS)]
    folder = tiny.folder(family, **SIZES)
    prompts = mixed_prompts(rng)
    plain = {name: weights[name] for name in weights if name == "quantize"}
    expected = Alone()(folder, prompts, TOKENS, **plain)
    tiers(
        monkeypatch,
        rng.choice((16, 18, 24)),
        pinned=rng.choice((60, 90, 160)),
        pageable=rng.choice((0, 0, 20)),
        num_window=80,
        prefix_caching=rng.random() < 0.7,
        read_rates=rng.choice((None, TURNS, TURNS, TOGETHER)),
        copy_ahead=rng.choice((None, ALWAYS)) if family != "mistral_window" else None,
    )
    budget, seqs = rng.choice((24, 48, 96)), rng.choice((4, 8, 12))
    llm = open_tiers(folder, max_num_batched_tokens=budget, max_num_seqs=seqs, **weights)
    assert llm._engine is not None
    llm._engine.core.overlap = rng.random() < 0.8
    found, asked = dict[tuple[str, int], list[int]](), dict[str, int]()
    for number in range(120):
        if number < 80 and len(asked) < 9 and rng.random() < 0.5:
            name, asked_n = str(number), rng.choice((1, 1, 1, 2))
            params = SamplingParams(
                n=asked_n, temperature=0, max_tokens=rng.randrange(1, TOKENS + 1), ignore_eos=True
            )
            asked[name] = rng.randrange(len(prompts))
            llm.add_request(prompts[asked[name]], params, name)
        if asked and rng.random() < 0.06:
            llm.abort(asked.popitem()[0])
        if rng.random() < 0.02:
            llm.evict_gpu_cache()
        check_step(llm, asked, found, expected)
    steps = 0
    while llm.has_unfinished():
        check_step(llm, asked, found, expected)
        steps += 1
        assert steps < 3000, "no progress"
    assert sum(map(len, found.values())) > 40
    check_empty(llm)
    llm.close()


def check_step(
    llm: LLM,
    asked: dict[str, int],
    found: dict[tuple[str, int], list[int]],
    expected: list[list[int]],
) -> None:
    """Run a step; the tokens of each are a beginning of what it has alone."""
    for event in llm.step():
        if event.request_id in asked:
            tokens = found.setdefault((event.request_id, event.index), [])
            tokens.append(event.token_id)
            assert tokens == expected[asked[event.request_id]][: len(tokens)]
