"""AsyncLLM on a tiny real engine: the synchronous door's tokens and text."""

import asyncio
from typing import Any

import pytest

from engine import AsyncLLM
from engine.errors import EngineError, RequestError
from tests.engine.test_async_llm import collect, to_the_end
from tests.tiny import greedy_params, make_config, make_prompt, open_llm, tokens_of

pytestmark = pytest.mark.timeout(60)


def test_tokens_and_text_are_those_of_the_synchronous_door(llm: Any) -> None:
    prompts: list[Any] = [make_prompt(length, seed=4) for length in (1, 12, 30)] + ["hello there"]
    params = [greedy_params(size) for size in (4, 9, 6, 12)]
    wanted = llm.generate(prompts, params)
    stop = wanted[3].outputs[0].text[2:4]
    params[3] = greedy_params(12, stop=stop)
    wanted = llm.generate(prompts, params)

    async def main() -> list[Any]:
        door = AsyncLLM(llm)
        pairs = zip(prompts, params, strict=True)
        found = await asyncio.gather(*(collect(door, prompt, each) for prompt, each in pairs))
        door.release()
        return found

    found = asyncio.run(main())
    assert tokens_of(found) == tokens_of(wanted)
    for mine, other in zip(found, wanted, strict=True):
        assert mine.prompt == other.prompt
        assert mine.prompt_token_ids == other.prompt_token_ids
        assert mine.outputs[0].text == other.outputs[0].text
        assert mine.outputs[0].finish_reason == other.outputs[0].finish_reason
        assert mine.outputs[0].stop_reason == other.outputs[0].stop_reason
    assert found[3].outputs[0].stop_reason == stop


def test_a_prompt_is_encoded_once(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting:
        def __init__(self, tokenizer: Any) -> None:
            self._tokenizer, self.texts = tokenizer, []

        def __call__(self, text: str, *, verbose: bool) -> Any:
            assert not verbose  # of lengths, which are checked after
            self.texts.append(text)
            return self._tokenizer(text)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tokenizer, name)

    counting = Counting(llm.tokenizer)
    monkeypatch.setattr(type(llm), "tokenizer", counting)
    monkeypatch.setattr(llm._sessions, "_tokenizer", counting)

    async def main() -> None:
        door = AsyncLLM(llm)
        found = await collect(door, "hello there", greedy_params(2))
        assert found.prompt_token_ids == counting._tokenizer("hello there")["input_ids"]
        with pytest.raises(RequestError, match="Remove lone surrogates"):
            await collect(door, "bad \ud800", greedy_params(2))
        door.release()

    asyncio.run(main())
    assert counting.texts == ["hello there", "bad \ud800"]


def test_blocks_come_back_from_requests_that_were_given_up(llm: Any) -> None:
    async def main() -> None:
        door = AsyncLLM(llm)
        stream = door.tokens(make_prompt(20), greedy_params(150))
        await anext(stream)
        await stream.aclose()
        bad = collect(door, [10**6], greedy_params(2))
        with pytest.raises(RequestError, match="vocabulary"):
            await bad
        other = door.tokens(make_prompt(30), greedy_params(150))
        await anext(other)
        door.release()
        with pytest.raises(EngineError, match="closed before"):
            await to_the_end(other)

    asyncio.run(main())  # the fixture checks that no block is held


def test_an_engine_is_built_from_a_configuration(text_folder: Any) -> None:
    async def main() -> None:
        config = make_config(text_folder, max_model_len=64)
        async with AsyncLLM.from_config(config, max_pending=3) as door:
            found = await collect(door, make_prompt(5), greedy_params(4))
        wanted = open_llm(text_folder, max_model_len=64)
        assert tokens_of([found]) == tokens_of(wanted.generate([make_prompt(5)], greedy_params(4)))
        wanted.close()

    asyncio.run(main())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "offload", [{}, {"cpu_offload_gb": 1}, {"offload_group_size": 2}], ids=["none", "uva", "ring"]
)
def test_a_thread_of_its_own_changes_no_token_on_a_gpu(tiny: Any, offload: Any) -> None:
    prompts = [make_prompt(length, seed=5) for length in (1, 9, 40)]
    params = greedy_params(12)
    llm = open_llm(tiny.folder("llama"), device="cuda", **offload)
    wanted = tokens_of(llm.generate(prompts, params))

    async def main() -> list[Any]:
        door = AsyncLLM(llm)
        found = await asyncio.gather(*(collect(door, prompt, params) for prompt in prompts))
        door.release()
        return found

    assert tokens_of(asyncio.run(main())) == wanted
    assert tokens_of(llm.generate(prompts, params)) == wanted  # back on the first thread
    llm.close()
