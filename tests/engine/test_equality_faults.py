"""Random loads give the tokens of requests alone; faults put in on purpose change tokens."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine import LLM
from engine.run.executor import DeviceExecutor
from tests.engine.groups import with_blocks
from tests.engine.placements import MAX_TOKENS, OFFLOADS, PROMPTS, Residents, copies
from tests.tiny import greedy, greedy_params, make_prompt

LOAD = [make_prompt(1 + 7 * index % 34, seed=index, vocab=61) for index in range(14)]

MOST_TOKENS = 28


@pytest.fixture(scope="module")
def load_tokens(residents: Residents) -> list[list[int]]:
    """What each request of LOAD gets alone, with nothing offloaded."""
    llm = residents.open(5)
    found = [greedy(llm, [prompt], MOST_TOKENS)[0] for prompt in LOAD]
    llm.close()
    return found


@pytest.mark.slow  # test_stress.py has them on two streams
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_random_loads(
    residents: Residents,
    load_tokens: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    pool_is_full: Callable[[LLM], bool],
    seed: int,
) -> None:
    """Random arrivals, aborts and preemptions: each request gets the tokens it gets alone."""
    chance = random.Random(seed)
    with_blocks(monkeypatch, 9)
    copies(monkeypatch, eager=seed % 2 == 0)
    keywords = OFFLOADS[chance.choice(sorted(OFFLOADS))]
    llm = residents.open(5, block_size=8, max_num_seqs=5, **keywords)
    order = chance.sample(range(len(LOAD)), len(LOAD))
    sent, aborted = 0, set()
    tokens: dict[str, list[int]] = {}
    while sent < len(LOAD) or llm.has_unfinished():
        while sent < len(LOAD) and chance.random() < 0.4:
            index = order[sent]
            llm.add_request(LOAD[index], greedy_params(chance.randint(1, MOST_TOKENS)), str(index))
            sent += 1
        if sent and chance.random() < 0.03:
            aborted.add(str(order[chance.randrange(sent)]))
            llm.abort(max(aborted))
        for event in llm.step():
            tokens.setdefault(event.request_id, []).append(event.token_id)
    for index, whole in enumerate(load_tokens):
        found = tokens.get(str(index), [])
        assert found == whole[: len(found)]
        assert found or str(index) in aborted
    assert llm.stats()["preemptions"] > 0
    assert pool_is_full(llm)
    llm.close()


# Faults put in on purpose; those of waits and slots are in test_stress.py.


def faulty_tokens(residents: Residents, layers: int = 5, **keywords: Any) -> list[list[int]]:
    llm = residents.open(layers, **keywords)
    found = greedy(llm, PROMPTS, MAX_TOKENS)
    llm.close()
    return found


def patch_before(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, before: Callable[..., None]
) -> None:
    """Let `before` run, with the same arguments, ahead of a method."""
    method = getattr(owner, name)

    def run(self: Any, *args: Any) -> Any:
        before(self, *args)
        return method(self, *args)

    monkeypatch.setattr(owner, name, run)


def test_control_a_changed_weight_in_host_memory_changes_tokens(residents: Residents) -> None:
    for keywords in ({"cpu_offload_gb": 1}, {"offload_group_size": 1}):
        llm = residents.open(5, **keywords)
        assert greedy(llm, PROMPTS, MAX_TOKENS) == residents.tokens(5)
        llm._engine.store._host_buffer.tensor.zero_()
        assert greedy(llm, PROMPTS, MAX_TOKENS) != residents.tokens(5)
        llm.close()


def test_control_a_wrong_block_in_the_table_changes_tokens(
    residents: Residents, monkeypatch: pytest.MonkeyPatch
) -> None:
    def repeat(self: DeviceExecutor, batch: Any) -> None:
        if batch.prefill_starts is None:
            [table] = batch.block_tables
            table[:, :2] = table[:, :2].flip(1)

    llm = residents.open(5)
    llm._engine.cache.tensor.zero_()  # a wrong block may hold slots that nothing was written to
    expected = greedy(llm, PROMPTS[2:], 10)
    patch_before(monkeypatch, DeviceExecutor, "execute", repeat)
    assert greedy(llm, PROMPTS[2:], 10) != expected
    llm.close()


def test_control_a_poisoned_block_changes_tokens(residents: Residents) -> None:
    llm = residents.open(5)
    llm.add_request(PROMPTS[3], greedy_params(MAX_TOKENS))
    events = []
    while llm.has_unfinished():
        events += llm.step()
        [running] = llm._engine.core.scheduler.running or [None]
        if running is not None:
            block = llm._engine.cache.tensor[running.block_table[0]]
            block.copy_(torch.randn_like(block) * 5)
    assert [event.token_id for event in events] != residents.tokens(5)[3]
    llm.close()


def test_control_a_shifted_position_changes_tokens(
    residents: Residents, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shift(self: DeviceExecutor, batch: Any) -> None:
        if batch.prefill_starts is None:
            batch.positions.sub_(1).clamp_(min=0)

    patch_before(monkeypatch, DeviceExecutor, "execute", shift)
    assert faulty_tokens(residents) != residents.tokens(5)
