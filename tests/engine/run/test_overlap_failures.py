"""Ends, aborts and failures while steps are in flight: nothing is lost or counted twice."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from engine import LLM
from tests.engine.conftest import TinyModels
from tests.engine.late import drain, make_late
from tests.slow import slow
from tests.tiny import greedy, greedy_params, make_prompt, open_llm

PROMPTS = [make_prompt(length, seed=5) for length in (1, 12, 30, 7, 18)]


def fail_once(method: Callable[..., Any], kind: type[BaseException]) -> Callable[..., Any]:
    """Return the method with a failure behind its first call's work."""
    calls: list[int] = []

    def run(*args: Any) -> Any:
        result = method(*args)
        calls.append(1)
        if len(calls) == 1:
            raise kind("tests say so")
        return result

    return run


def test_a_step_in_flight_of_which_nothing_is_left_is_dropped(
    llm: LLM, tiny: TinyModels, pool_is_full: Callable[[LLM], bool]
) -> None:
    [tokens] = tiny.greedy("llama", PROMPTS[1:2], 9)
    stop = next(token for token in tokens[2:] if token not in tokens[:2])
    place = tokens.index(stop)
    before = llm.stats()["steps"]
    [output] = llm.generate([PROMPTS[1]], greedy_params(20, stop_token_ids=[stop]))
    assert output.outputs[0].token_ids == tokens[: place + 1]
    assert llm._engine.core._flight is not None
    assert pool_is_full(llm)
    assert llm.stats()["steps"] == before + place + 1
    assert llm.step() == []
    assert llm._engine.core._flight is None
    assert llm.stats()["steps"] == before + place + 2
    llm.generate([PROMPTS[1]], greedy_params(20, stop_token_ids=[stop]))
    assert greedy(llm, PROMPTS[:3], 5) == tiny.greedy("llama", PROMPTS[:3], 5)


def test_requests_may_be_aborted_and_named_again_while_in_flight(
    llm: LLM, tiny: TinyModels
) -> None:
    wanted = tiny.greedy("llama", PROMPTS[:3], 9)
    llm.add_request(PROMPTS[0], greedy_params(9), "a")
    llm.add_request(PROMPTS[1], greedy_params(9), "b")
    tokens: dict[str, list[int]] = {}
    for _ in range(2):
        for event in llm.step():
            tokens.setdefault(event.request_id, []).append(event.token_id)
    llm.abort("b")
    llm.add_request(PROMPTS[2], greedy_params(9), "b")
    assert tokens.pop("b") == wanted[1][:2]
    assert drain(llm, tokens) == {"a": wanted[0], "b": wanted[2]}


@pytest.mark.thorough_but("KeyboardInterrupt")
@pytest.mark.parametrize("where", ["prepare", "execute", "enqueue", "mark"])
@pytest.mark.parametrize(
    ("kind", "late"),
    [
        (RuntimeError, False),
        (KeyboardInterrupt, True),
        slow(RuntimeError, True),
        slow(KeyboardInterrupt, False),
    ],
)
def test_a_launch_that_fails_leaves_the_step_in_flight(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, where: str, kind: type, late: bool
) -> None:
    llm = open_llm(tiny.folder("llama"), offload_group_size=1)
    if late:
        make_late(llm, monkeypatch)
    core = llm._engine.core
    owner = core.executor.sampler if where == "enqueue" else core.executor
    method = getattr(owner, where)
    for index, prompt in enumerate(PROMPTS[:3]):
        llm.add_request(prompt, greedy_params(7), str(index))
    tokens: dict[str, list[int]] = {}
    for event in llm.step():
        tokens.setdefault(event.request_id, []).append(event.token_id)
    steps = llm.stats()["steps"]
    for _ in range(2):
        flight = core._flight
        with monkeypatch.context() as patched:
            patched.setattr(owner, where, fail_once(method, kind))
            with pytest.raises(kind, match="tests say so"):
                llm.step()
        assert core._flight is flight
        assert core.scheduler.planned == [flight.plan]
        assert llm.stats()["steps"] == steps
        for event in llm.step():
            tokens[event.request_id].append(event.token_id)
        for event in llm.step():
            tokens[event.request_id].append(event.token_id)
        steps += 2
    assert core.last_step.is_overlapped is False
    found = drain(llm, tokens)
    assert list(found.values()) == tiny.greedy("llama", PROMPTS[:3], 7)
    assert llm.stats()["decode_tokens"] == 3 * 6
    llm.close()


@pytest.mark.thorough
@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
def test_unusable_logits_end_their_requests_and_drop_the_step_behind(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    llm = open_llm(tiny.folder("llama"))
    if late:
        make_late(llm, monkeypatch)
    core, head = llm._engine.core, llm._engine.store.outer("lm_head.weight")
    for index, prompt in enumerate(PROMPTS[:3]):
        llm.add_request(prompt, greedy_params(7), str(index))
    for _ in range(3):
        llm.step()
    sound = head.clone()
    head.fill_(math.nan)
    if not late:
        llm.step()  # it ran before the weights were spoilt
    events = llm.step()
    assert [event.finish_reason for event in events] == ["error"] * 3
    assert not llm.has_unfinished()
    assert core.scheduler.planned[0].is_dead  # it is in flight
    head.copy_(sound)
    assert greedy(llm, PROMPTS, 7) == tiny.greedy("llama", PROMPTS, 7)
    assert core._flight is None
    llm.close()


def test_unusable_logits_of_a_sequence_that_ended_harm_nobody(llm: LLM, tiny: TinyModels) -> None:
    core = llm._engine.core
    llm.add_request(PROMPTS[0], greedy_params(7), "a")
    llm.add_request(PROMPTS[1], greedy_params(7), "b")
    tokens: dict[str, list[int]] = {}
    for event in llm.step():
        tokens.setdefault(event.request_id, []).append(event.token_id)
    core._flight.flight.pending.table[0, 1] = math.nan
    llm.abort("a")
    del tokens["a"]
    assert drain(llm, tokens) == {"b": tiny.greedy("llama", PROMPTS[1:2], 7)[0]}


def test_an_engine_closes_with_a_step_in_flight(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm(tiny.folder("llama"))
    work = make_late(llm, monkeypatch)
    llm.add_request(PROMPTS[1], greedy_params(5))
    llm.step()
    assert work._done < work._enqueued
    llm.close()
    assert work._done == work._enqueued
