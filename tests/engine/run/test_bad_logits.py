"""Unusable logits fail their own request; others go on, and nothing of its content is kept."""

import asyncio
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine import LLM, AsyncLLM, SamplingParams
from engine.asked.request import NO_TOKEN
from engine.errors import RequestError
from tests.engine.conftest import TinyModels
from tests.engine.test_async_llm import collect
from tests.tiny import greedy, greedy_params, make_prompt, open_llm

PROMPTS = [make_prompt(length, seed=8) for length in (40, 20, 33)]
WHY = "expected finite logits"


@pytest.fixture
def cached(text_folder: Any, pool_is_full: Callable[[LLM], bool]) -> Iterator[LLM]:
    llm = open_llm(text_folder, max_model_len=200, enable_prefix_caching=True, num_cpu_blocks=30)
    yield llm
    assert pool_is_full(llm)
    llm.close()


def spoil(llm: LLM, request_id: str, index: int = 0) -> None:
    """Write NaN into the first KV block of a running sequence."""
    sequence = llm._sessions._open[request_id].sequences[index]
    llm._engine.cache.tensor[sequence.block_table[0]] = math.nan


def drain(llm: LLM) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    while llm.has_unfinished():
        for event in llm.step():
            found.setdefault(event.request_id, []).append(event)
    return found


@pytest.mark.thorough
def test_a_request_fails_alone_and_its_prompt_works_again(cached: LLM, tiny: TinyModels) -> None:
    wanted = tiny.greedy("llama", PROMPTS, 12)
    for index, prompt in enumerate(PROMPTS):
        cached.add_request(prompt, greedy_params(12), f"r{index}")
    for _ in range(3):
        cached.step()
    spoil(cached, "r0")
    found = drain(cached)
    last = found["r0"][-1]
    assert (last.finish_reason, last.token_id) == ("error", NO_TOKEN)
    assert WHY in last.stop_reason
    assert all(event.finish_reason is None for event in found["r0"][:-1])
    for index in (1, 2):
        tokens = [event.token_id for event in found[f"r{index}"]]
        assert tokens == wanted[index][-len(tokens) :]
    assert cached.stats()["failed"] == 1
    assert greedy(cached, PROMPTS, 12) == wanted


def test_all_answers_of_the_request_end(cached: LLM) -> None:
    cached.add_request(PROMPTS[0], SamplingParams(n=3, max_tokens=30, seed=4), "r")
    cached.step()
    cached.step()
    spoil(cached, "r", index=1)
    events = drain(cached)["r"]
    errors = [event for event in events if event.finish_reason == "error"]
    assert sorted(event.index for event in errors) == [0, 1, 2]
    assert "r" not in cached._sessions._open


def test_generate_returns_the_error_and_the_text_so_far(
    cached: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = cached.step, []

    def step_and_spoil() -> Any:
        events = step()
        calls.append(1)
        if len(calls) == 4:
            spoil(cached, next(iter(cached._sessions._open)))
        return events

    monkeypatch.setattr(cached, "step", step_and_spoil)
    bad, good = cached.generate(PROMPTS[:2], greedy_params(20, stop="never this"))
    assert WHY in str(bad.error)
    assert bad.finished
    assert bad.outputs[0].finish_reason == "error"
    assert 4 <= len(bad.outputs[0].token_ids) < 20
    assert bad.outputs[0].text == cached.tokenizer.decode(bad.outputs[0].token_ids)
    assert (good.error, len(good.outputs[0].token_ids)) == (None, 20)


def test_a_stream_raises_and_others_go_on(cached: LLM, tiny: TinyModels) -> None:
    wanted = tiny.greedy("llama", PROMPTS, 12)

    async def main() -> None:
        spoiled = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_step(*_: Any) -> None:  # on the engine's thread
            if cached.stats()["steps"] == steps + 5:
                spoil(cached, "bad")
                loop.call_soon_threadsafe(spoiled.set)

        steps = cached.stats()["steps"]
        door = AsyncLLM(cached, on_step=on_step)
        other = asyncio.ensure_future(collect(door, PROMPTS[1], greedy_params(12)))
        seen: list[int] = []

        async def follow() -> None:
            async for events in door.tokens(PROMPTS[0], greedy_params(30), "bad"):
                seen.extend(event.token_id for event in events)

        with pytest.raises(RequestError, match=WHY):
            await follow()
        assert spoiled.is_set()
        assert seen[:4] == wanted[0][:4]
        assert NO_TOKEN not in seen
        assert (await other).outputs[0].token_ids == wanted[1]
        again = await collect(door, PROMPTS[0], greedy_params(12))
        assert again.outputs[0].token_ids == wanted[0]
        assert door.num_pending == 0
        assert door.failure is None
        door.release()

    asyncio.run(main())
