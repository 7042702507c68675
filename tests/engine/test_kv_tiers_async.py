"""AsyncLLM over two tiers: clients that give up while their prefix loads; the others' tokens."""

import asyncio
from typing import Any

import pytest

from engine import AsyncLLM
from tests.engine.conftest import TinyModels
from tests.engine.test_async_llm import collect
from tests.engine.tiers import SIZES, Alone, check_empty, tiers
from tests.tiny import greedy, greedy_params, make_prompt, open_llm, tokens_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

STEM = make_prompt(90, seed=7)
PROMPTS = [STEM[: 30 * (at % 4)] + make_prompt(4 + at, seed=at) for at in range(10)]
TOKENS = 10


def test_clients_that_give_up_while_their_prefix_loads(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.folder("llama", **SIZES)
    expected = Alone(at_once=True)(folder, PROMPTS, TOKENS)
    tiers(monkeypatch, 24, pinned=50, pageable=6)
    llm = open_llm(folder, max_model_len=160, block_size=8, max_num_batched_tokens=48)
    assert greedy(llm, PROMPTS, TOKENS) == expected
    llm.evict_gpu_cache()

    async def give_up(door: AsyncLLM, prompt: list[int], after: int) -> None:
        stream = door.tokens(prompt, greedy_params(TOKENS))
        task = asyncio.ensure_future(anext(stream))
        for _ in range(after):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await stream.aclose()

    async def main() -> list[Any]:
        door = AsyncLLM(llm)
        leavers = [give_up(door, prompt, after) for after, prompt in enumerate(PROMPTS)]
        stayers = [collect(door, prompt, greedy_params(TOKENS)) for prompt in PROMPTS]
        mixed = [each for pair in zip(leavers, stayers, strict=True) for each in pair]
        found = await asyncio.gather(*mixed)
        door.release()
        return found[1::2]

    assert tokens_of(asyncio.run(main())) == expected
    assert llm.stats()["kv"]["prefix"]["hits_cpu_tokens"] > 0
    check_empty(llm)
    llm.close()
