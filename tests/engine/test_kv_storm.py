"""Moves of KV blocks on streams in any order that their waits allow, requests and aborts at random.

Faults put in on purpose, one wait or one block each, must change tokens.
"""

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.errors import EngineError
from engine.kv import memory as mover
from engine.kv.memory import BlockMover
from engine.kv.moves import MoveBatch, MoveLedger
from engine.run.stages import Stages
from tests.engine.conftest import TinyModels
from tests.engine.faults import or_poison
from tests.engine.many_streams import POLICIES, SimulatedStream, on_many_streams, simulate
from tests.engine.tiers import ALWAYS, SIZES, Alone, check_empty, tiers
from tests.tiny import greedy, make_prompt, open_llm

pytestmark = pytest.mark.slow

STEM = make_prompt(70, seed=7)
PROMPTS = [STEM[: 24 * (at % 4)] + make_prompt(4 + at % 13, seed=at) for at in range(16)]
LONG = make_prompt(370, seed=8)
TOKENS = 14


@pytest.fixture(scope="module")
def alone() -> Alone:
    return Alone(at_once=True)


def open_stormy(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, family: str = "llama", **keywords: Any
) -> LLM:
    """Open an engine on simulated streams, its KV blocks poisoned, moves in pieces of 3."""
    simulate(monkeypatch)
    monkeypatch.setattr(mover, "piece_moves", lambda *_: 3)
    given = {"num_window": 24, "pinned": 34, "pageable": 4, "stage_blocks": 16, **keywords}
    tiers(monkeypatch, given.pop("num_gpu", 16), **given)
    llm = open_llm(
        tiny.folder(family, **SIZES),
        block_size=8,
        max_num_batched_tokens=48,
        max_model_len=390,
        max_num_seqs=12,
    )
    assert llm._engine is not None
    for tensor in llm._engine.cache.tensors:
        tensor.fill_(float("nan"))
    for blocks in llm._engine.tier.blocks:
        blocks.pinned.fill_(255)
        blocks.pageable.fill_(255)
    return llm


def run_all(llm: LLM, policy: str, seed: int) -> list[list[int]]:
    """Run prompts that share prefixes, twice and with an empty GPU between, and a long one."""
    with on_many_streams(llm, policy, seed):
        found = greedy(llm, PROMPTS, TOKENS)
        llm.evict_gpu_cache()
        found += greedy(llm, PROMPTS[::-1], TOKENS)
        found += greedy(llm, [LONG], TOKENS)
    return found


def expected_of(tiny: TinyModels, alone: Alone, family: str = "llama") -> list[list[int]]:
    found = alone(tiny.folder(family, **SIZES), [*PROMPTS, LONG], TOKENS)
    return [*found[:-1], *found[-2::-1], found[-1]]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("family", "sizes"),
    [("llama", {}), ("gemma3", {}), ("llama", {"copy_ahead": ALWAYS, "stage_blocks": 32})],
    ids=["", "two groups", "copied by runs"],
)
def test_moves_in_any_order(
    tiny: TinyModels,
    alone: Alone,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    sizes: dict[str, Any],
    policy: str,
) -> None:
    llm = open_stormy(tiny, monkeypatch, family, **sizes)
    assert run_all(llm, policy, 0) == expected_of(tiny, alone, family)
    stats = llm.stats()["kv"]
    assert min(stats["moved"]["stored_bytes"], stats["moved"]["loaded_bytes"]) > 0
    assert min(stats["preemptions"], stats["staged_prefill_bytes"]) > 0
    assert (stats["copied_ahead_bytes"] > 0) is ("copy_ahead" in sizes)
    check_empty(llm)
    llm.close()


# Requests at random.


def storm(llm: LLM, expected: Callable[[int], list[int]], seed: int, steps: int) -> int:
    """Add, abort, evict, forget and step at random; return how many answers were compared."""
    rng, found, compared = random.Random(seed), {}, 0
    prompts: dict[str, int] = {}
    for number in range(steps):
        for _ in range(rng.choice((0, 0, 1, 3))):
            if len(prompts) < 20:
                prompt = rng.randrange(len(PROMPTS) + 1)
                name = f"{number} {rng.random()}"
                prompts[name], found[name] = prompt, []
                # Some end by a token, while a step that runs them once more is in flight.
                params = SamplingParams(
                    temperature=0,
                    max_tokens=rng.randrange(1, TOKENS + 1),
                    stop_token_ids=list(range(rng.randrange(9), 151, 9)),
                )
                llm.add_request([*PROMPTS, LONG][prompt], params, name)
        if prompts and rng.random() < 0.15:
            name = rng.choice(list(prompts))
            llm.abort(name)
            del prompts[name]
        if rng.random() < 0.05:
            llm.reset_cache(rng.choice(("gpu", "cpu", None)))
        if rng.random() < 0.05:
            llm.evict_gpu_cache()
        compared += _step(llm, prompts, found, expected)
    while llm.has_unfinished():
        compared += _step(llm, prompts, found, expected)
    return compared


def _step(
    llm: LLM,
    prompts: dict[str, int],
    found: dict[str, list[int]],
    expected: Callable[[int], list[int]],
) -> int:
    compared = 0
    for event in llm.step():
        if event.request_id not in prompts:
            continue
        tokens = found[event.request_id]
        tokens.append(event.token_id)
        if event.finish_reason is not None:
            assert tokens == expected(prompts.pop(event.request_id))[: len(tokens)]
            compared += 1
    return compared


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", {}),
        ("llama", {"prefix_caching": False}),
        ("llama", {"num_gpu": 49, "pinned": 2, "pageable": 3, "in_place": False}),
        ("llama", {"num_gpu": 49, "pinned": 0, "pageable": 0}),
        ("gemma3", {"num_window": 21}),
        ("llama", {"copy_ahead": ALWAYS, "stage_blocks": 32}),
    ],
    ids=["", "no prefixes", "few blocks", "no blocks", "two groups", "copied by runs"],
)
def test_a_storm_of_requests(
    tiny: TinyModels,
    alone: Alone,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    sizes: dict[str, Any],
) -> None:
    folder = tiny.folder(family, **SIZES)
    tokens = alone(folder, [*PROMPTS, LONG], TOKENS)
    llm = open_stormy(tiny, monkeypatch, family, **sizes)
    with on_many_streams(llm, "any order", 1):
        compared = storm(llm, lambda prompt: tokens[prompt], seed=1, steps=80)
        assert compared > 20
        check_empty(llm)
    llm.close()


def test_a_request_that_loads_can_be_aborted(
    tiny: TinyModels, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_stormy(tiny, monkeypatch)
    expected = alone(tiny.folder("llama", **SIZES), [STEM], TOKENS)
    assert greedy(llm, [STEM], TOKENS) == expected
    llm.evict_gpu_cache()
    with on_many_streams(llm, "copies late"):
        for count in range(4):
            llm.add_request(STEM, SamplingParams(temperature=0, max_tokens=4), "aborted")
            for _ in range(count):
                llm.step()
            llm.abort("aborted")
            assert not llm.has_unfinished()
        llm.add_request(PROMPTS[0], SamplingParams(temperature=0, max_tokens=2))
        assert greedy(llm, [STEM], TOKENS) == expected
        assert [event.position for event in llm.step()] == [len(PROMPTS[0]), len(PROMPTS[0]) + 1]
        check_empty(llm)
    llm.close()


# Faults put in on purpose.


def steps_too_early(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """A step does not wait for the moves that still read blocks which it writes."""
    submit = BlockMover.submit
    monkeypatch.setattr(
        BlockMover, "submit", lambda self, batch: submit(self, MoveBatch(batch.moves, frozenset()))
    )


def loads_told_too_early(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """Sequences run while their blocks are still on the way."""
    monkeypatch.setattr(MoveLedger, "is_pending", lambda self, move_ids: False)


def stages_of(llm: LLM) -> Stages:
    assert llm._engine is not None
    found = llm._engine.executor._decoder.stages
    assert found is not None
    return found


def stages_not_waited_for(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """Attention does not wait for the copies into its buffer."""
    monkeypatch.setattr(stages_of(llm)._stream, "compute_after", lambda event: None)


def one_stage(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """The next piece goes where this one is still read."""
    for name in ("_rows", "_words", "_hosts"):
        buffers = getattr(stages_of(llm), name)
        monkeypatch.setattr(stages_of(llm), name, buffers[:1] * len(buffers))


def keys_copied_too_early(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """A piece is copied before the layer has written the step's own keys of it."""
    fill = Stages._fill
    monkeypatch.setattr(
        Stages, "_fill", lambda self, layer: fill(self, self._next.layer if self._next else None)
    )


def a_stale_block(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """The first host block of a piece is the one that lay there before."""
    stage = Stages._stage

    def stage_less(self: Stages, layer: int, staged: Any, piece: Any, buffer: int) -> None:
        ids = staged.host_ids.clone()
        ids[piece.first_host : piece.first_host + 1] = ids[-1]
        stage(self, layer, replace(staged, host_ids=ids), piece, buffer)

    monkeypatch.setattr(Stages, "_stage", stage_less)


@pytest.mark.parametrize(
    ("fault", "policy"),
    [
        (None, "copies late"),
        (None, "copies early"),
        (steps_too_early, "copies late"),
        (loads_told_too_early, "copies late"),
        (stages_not_waited_for, "copies late"),
        (one_stage, "copies early"),
        (keys_copied_too_early, "copies early"),
        (a_stale_block, "copies late"),
    ],
)
def test_control_a_fault_changes_tokens(
    tiny: TinyModels,
    alone: Alone,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[..., None] | None,
    policy: str,
) -> None:
    llm = open_stormy(tiny, monkeypatch, pageable=0)
    if fault is not None:
        fault(monkeypatch, llm)
    found = None
    with suppress(IndexError):  # numbers of blocks that are read too late
        found = or_poison(lambda: run_all(llm, policy, 0))
    assert (found == expected_of(tiny, alone)) is (fault is None)


def test_control_copies_that_do_not_wait_for_compute_change_tokens(
    tiny: TinyModels, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence that ended or was aborted may still be written by a step in flight."""
    tokens = alone(tiny.folder("llama", **SIZES), [*PROMPTS, LONG], TOKENS)

    def is_spoiled(seed: int) -> bool:
        llm = open_stormy(tiny, monkeypatch)
        monkeypatch.setattr(SimulatedStream, "after_compute", lambda self: None)
        try:
            with on_many_streams(llm, "copies early", seed):
                storm(llm, lambda prompt: tokens[prompt], seed, steps=100)
        except (AssertionError, EngineError):
            return True
        return False

    assert any(is_spoiled(seed) for seed in range(8))
