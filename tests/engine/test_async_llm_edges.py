"""AsyncLLM at its edges: names, changes after sending, forks, programs that end."""

import asyncio
import contextlib
from typing import Any

import pytest

from engine import AsyncLLM
from engine.asked.sampling import SamplingParams
from engine.errors import EngineError, RequestError
from tests.engine.test_async_llm import THREE, Gated, collect

pytestmark = pytest.mark.timeout(60)


def test_what_the_client_changes_after_sending_does_not_count() -> None:
    async def main() -> None:
        engine = Gated(tickets=0)
        async with AsyncLLM(engine) as door:
            prompt, params = [1], SamplingParams(max_tokens=3)
            engine.hold_adds()
            running = asyncio.ensure_future(collect(door, prompt, params))
            await asyncio.sleep(0)  # it is sent, and not added
            prompt[0], params.max_tokens = 7, 1
            engine.adds.set()
            engine.let_go(20)
            assert (await running).outputs[0].token_ids == [12, 11, 10]

    asyncio.run(main())


def test_a_name_is_no_engine() -> None:
    with pytest.raises(
        EngineError, match=r"expected an LLM, got 'glass'\. Write AsyncLLM\(LLM\('gl"
    ):
        AsyncLLM("glass")  # type: ignore[arg-type]


def test_a_closed_door_is_not_entered() -> None:
    async def main() -> None:
        door = AsyncLLM(Gated(tickets=0))
        async with door:
            pass
        with pytest.raises(EngineError, match="was closed"):
            async with door:
                raise AssertionError

    asyncio.run(main())


def test_a_program_that_ends_waits_for_the_step() -> None:
    """A thread that the interpreter kills amid a step aborts the process."""

    async def main() -> None:
        engine = Gated(tickets=1)
        door = AsyncLLM(engine)
        running = asyncio.ensure_future(collect(door, [1]))
        await asyncio.sleep(0)
        assert door._at_exit.atexit
        engine.let_go(20)
        await asyncio.to_thread(door._at_exit)
        assert not door._thread.is_alive()
        await asyncio.wait([running])
        with contextlib.suppress(EngineError):
            running.result()
        await door.close()

    asyncio.run(main())


@pytest.mark.parametrize("name", [5, 0, "", b"a", ["a"]])
def test_a_name_that_is_no_text_is_refused(name: Any) -> None:
    async def main() -> None:
        async with AsyncLLM(Gated()) as door:
            with pytest.raises(RequestError, match="request_id: expected a string"):
                await collect(door, [1], THREE, name)
            door.abort(name)
            assert (await collect(door, [1])).finished

    asyncio.run(main())


def test_a_forked_child_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copy has no thread that would answer."""

    async def main() -> None:
        async with AsyncLLM(Gated()) as door:
            with monkeypatch.context() as patched:
                patched.setattr("os.getpid", lambda: 0)
                with pytest.raises(EngineError, match="Build the engine after the fork"):
                    await collect(door, [1])
            assert (await collect(door, [1])).finished

    asyncio.run(main())
