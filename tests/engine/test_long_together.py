"""Several sequences beyond the GPU's room, and short ones beside them: tokens of each one alone."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.plan import long as long_rates
from tests.engine.conftest import TinyModels
from tests.engine.tiers import SIZES, TOGETHER, TURNS, Alone, check_empty, tiers
from tests.slow import slow
from tests.tiny import greedy, make_prompt, open_llm

LONGS = [make_prompt(length, seed=20 + length) for length in (170, 260, 330)]
SHORTS = [make_prompt(3 + 9 * at, seed=at) for at in range(5)]
TOKENS = 24


@pytest.fixture(scope="module")
def alone() -> Alone:
    return Alone(at_once=True)


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let turns be short, so that few tokens see several."""
    monkeypatch.setattr(long_rates, "LEAST_TURN", 3)
    monkeypatch.setattr(long_rates, "MOST_TURN", 5)
    monkeypatch.setattr(long_rates, "MOST_SKIPPED", 2)


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


@pytest.mark.parametrize(("seed", "rates"), [(1, TURNS), slow(2, TOGETHER), slow(3, None)])
def test_aborts_in_the_middle_of_turns(
    tiny: TinyModels, alone: Alone, monkeypatch: pytest.MonkeyPatch, seed: int, rates: Any
) -> None:
    """Arrivals and aborts at random, with both tiers full at times: tokens are a beginning."""
    folder = tiny.folder("llama", **SIZES)
    prompts = [*LONGS, *SHORTS]
    expected = alone(folder, prompts, TOKENS)
    tiers(monkeypatch, 18, pinned=90, pageable=20, read_rates=rates)
    llm = open_tiers(folder)
    rng, found, asked = random.Random(seed), dict[str, list[int]](), dict[str, int]()
    aborted = ended = 0
    for number in range(130):
        if number < 90 and len(asked) < 9 and rng.random() < 0.5:
            name, prompt = str(number), rng.randrange(len(prompts))
            params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
            llm.add_request(prompts[prompt], params, name)
            asked[name], found[name] = prompt, []
        if asked and rng.random() < 0.08:
            name = rng.choice(sorted(asked))
            llm.abort(name)
            del asked[name]
            aborted += 1
        for event in llm.step():
            if event.request_id not in asked:
                continue
            tokens = found[event.request_id]
            tokens.append(event.token_id)
            assert tokens == expected[asked[event.request_id]][: len(tokens)]
            if event.finish_reason is not None:
                del asked[event.request_id]
                ended += 1
    assert min(aborted, ended) > 3
    for name in asked:
        llm.abort(name)
    check_empty(llm)
    assert greedy(llm, [LONGS[2]], 4) == [expected[2][:4]]
    llm.close()
