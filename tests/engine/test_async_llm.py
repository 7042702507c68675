"""AsyncLLM on an engine whose steps the test lets go one by one."""

import asyncio
import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from engine import AsyncLLM
from engine.asked.request import TokenEvent
from engine.asked.sampling import SamplingParams
from engine.errors import EngineError, RequestError

THREE = SamplingParams(max_tokens=3)
pytestmark = pytest.mark.timeout(60)


class Gated:
    """Gives each request a token a step; a step waits for a ticket. Refuses prompts with a 0."""

    tokenizer = None

    def __init__(self, tickets: int | None = None) -> None:
        self._gate = None if tickets is None else threading.Semaphore(tickets)
        self.open: dict[str, Any] = {}
        self.aborted: list[str] = []
        self.threads: set[int] = set()
        self.fail: BaseException | None = None
        self.forget = False
        self.is_closed = False
        self.last_step: Any = None
        self.adds = threading.Event()
        self.priorities: list[int] = []
        self.adds.set()

    def hold_adds(self) -> None:
        self.adds.clear()

    def let_go(self, steps: int = 1) -> None:
        assert self._gate is not None
        self._gate.release(steps)

    def add_request(
        self, prompt: list[int], params: Any, request_id: str | None = None, *, priority: int = 0
    ) -> str:
        assert request_id is not None
        assert self.adds.wait(timeout=20)
        self.threads.add(threading.get_ident())
        self.priorities.append(priority)
        if 0 in prompt:
            raise RequestError("prompt: holds a 0. Remove it.")
        if 99 in prompt:
            raise ValueError("a bug")
        num = 16 if params is None else params.max_tokens
        answers = 1 if params is None else params.n
        self.open[request_id] = SimpleNamespace(left=num, first=prompt[0], n=answers)
        return request_id

    def has_unfinished(self) -> bool:
        return bool(self.open)

    def step(self) -> list[TokenEvent]:
        if self._gate is not None:
            assert self._gate.acquire(timeout=20), "no ticket came"
        self.threads.add(threading.get_ident())
        if self.fail is not None:
            raise self.fail
        if self.forget:
            self.open.clear()
            return []
        self.last_step = object()
        events = []
        for name, request in list(self.open.items()):
            request.left -= 1
            events += [self._event(name, request, index) for index in range(request.n)]
            if not request.left:
                del self.open[name]
        return events

    @staticmethod
    def _event(name: str, request: Any, index: int) -> TokenEvent:
        return TokenEvent(
            request_id=name,
            index=index,
            token_id=request.first * 10 + request.left,
            position=0,
            finish_reason=None if request.left else "length",
            logprob=-0.5,
            time_s=1.0,
            text="x",
        )

    def abort(self, request_id: str) -> None:
        self.open.pop(request_id, None)
        self.aborted.append(request_id)

    def close(self) -> None:
        self.is_closed = True


async def collect(door: AsyncLLM, prompt: Any, params: Any = THREE, name: str | None = None) -> Any:
    """The last output of a request."""
    last = None
    async for output in door.generate(prompt, params, name):
        assert last is None or not last.finished
        last = output
    return last


async def to_the_end(stream: Any) -> None:
    async for _ in stream:
        pass


def test_requests_stream_and_end_apart() -> None:
    async def main() -> None:
        engine = Gated()
        async with AsyncLLM(engine) as door:
            other = collect(door, [2], SamplingParams(max_tokens=2), "b")
            first, second = await asyncio.gather(collect(door, [1]), other)
            assert first.finished
            assert first.outputs[0].token_ids == [12, 11, 10]
            assert first.outputs[0].text == "xxx"
            assert first.outputs[0].finish_reason == "length"
            assert first.outputs[0].cumulative_logprob == -1.5
            assert first.prompt_token_ids == [1]
            assert (second.request_id, second.outputs[0].token_ids) == ("b", [21, 20])
            assert door.num_pending == 0
            assert door.failure is None
            assert repr(door) == f"AsyncLLM({engine!r})"
        assert engine.is_closed
        assert engine.threads != {threading.get_ident()}
        assert len(engine.threads) == 1

    asyncio.run(main())


def test_each_step_is_seen_as_it_ends() -> None:
    async def main() -> None:
        engine = Gated(tickets=0)
        async with AsyncLLM(engine) as door:
            seen = []
            engine.let_go()
            async for events in door.tokens([1], THREE):
                seen.append([event.token_id for event in events])
                engine.let_go()
            assert seen == [[12], [11], [10]]

    asyncio.run(main())


def test_a_slow_client_gets_what_came_meanwhile_at_once() -> None:
    async def main() -> None:
        engine = Gated(tickets=0)
        async with AsyncLLM(engine) as door:
            stream = door.generate([1], THREE)
            task = asyncio.ensure_future(anext(stream))
            engine.let_go()
            assert len((await task).outputs[0].token_ids) == 1
            other = asyncio.ensure_future(collect(door, [2], SamplingParams(max_tokens=1)))
            await asyncio.sleep(0)  # it is sent
            engine.let_go(2)
            await other  # its token came with or after the third of the first request's
            engine.let_go(3)
            rest = [output async for output in stream]
            assert rest[-1].finished
            assert rest[-1].outputs[0].token_ids == [12, 11, 10]
            assert len(rest) <= 2

    asyncio.run(main())


def test_every_answer_of_a_request_is_waited_for() -> None:
    async def main() -> None:
        async with AsyncLLM(Gated()) as door:
            found = await collect(door, [1], SamplingParams(max_tokens=2, n=3))
            assert [answer.token_ids for answer in found.outputs] == [[11, 10]] * 3
            assert [answer.index for answer in found.outputs] == [0, 1, 2]

    asyncio.run(main())


def test_priorities_reach_the_engine() -> None:
    async def main() -> None:
        engine = Gated()
        async with AsyncLLM(engine) as door:
            await to_the_end(door.generate([1], SamplingParams(max_tokens=1), priority=-3))
            await to_the_end(door.tokens([1], SamplingParams(max_tokens=1), priority=4))
            await to_the_end(door.tokens([1], SamplingParams(max_tokens=1)))
        assert engine.priorities == [-3, 4, 0]

    asyncio.run(main())


def test_an_error_reaches_its_own_request_alone() -> None:
    async def main() -> None:
        async with AsyncLLM(Gated()) as door:
            good, bad = await asyncio.gather(
                collect(door, [1]), collect(door, [0]), return_exceptions=True
            )
            assert good.outputs[0].token_ids == [12, 11, 10]
            assert isinstance(bad, RequestError)
            assert "holds a 0" in str(bad)
            assert door.num_pending == 0

    asyncio.run(main())


def test_a_full_queue_refuses_and_takes_again_when_a_request_ended() -> None:
    async def main() -> None:
        engine = Gated(tickets=0)
        async with AsyncLLM(engine, max_pending=2) as door:
            running = [asyncio.ensure_future(collect(door, [index])) for index in (1, 2)]
            await asyncio.sleep(0)  # both are sent
            assert door.num_pending == 2
            with pytest.raises(RequestError, match="max_pending=2 unfinished requests, got 2"):
                await collect(door, [3])
            engine.let_go(20)
            await asyncio.gather(*running)
            assert (await collect(door, [3])).finished

    asyncio.run(main())


def test_an_id_is_used_once_at_a_time() -> None:
    async def main() -> None:
        engine = Gated(tickets=0)
        async with AsyncLLM(engine) as door:
            running = asyncio.ensure_future(collect(door, [1], THREE, "a"))
            await asyncio.sleep(0)
            with pytest.raises(RequestError, match="expected an unused one, got 'a'"):
                await collect(door, [2], THREE, "a")
            engine.let_go(20)
            await running
            assert (await collect(door, [2], THREE, "a")).outputs[0].token_ids == [22, 21, 20]

    asyncio.run(main())


@pytest.mark.parametrize("way", ["cancel", "leave", "abort"])
def test_a_request_that_its_client_gives_up_leaves_the_engine(way: str) -> None:
    async def main() -> None:
        engine = Gated(tickets=1)
        async with AsyncLLM(engine) as door:
            stream = door.generate([1], SamplingParams(max_tokens=99), "a")
            await anext(stream)
            if way == "cancel":
                task = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif way == "leave":
                await stream.aclose()
            else:
                door.abort("a")
            engine.let_go()  # the step that may be under way
            if way == "abort":
                with pytest.raises(EngineError, match="was aborted"):
                    await to_the_end(stream)
            engine.let_go(20)
            assert (await collect(door, [2])).finished
            assert engine.aborted == ["a"]
            assert door.num_pending == 0
            door.abort("a")  # unknown by now

    asyncio.run(main())


def test_a_failed_step_reaches_every_request_and_later_ones() -> None:
    async def main() -> None:
        engine = Gated(tickets=0)
        async with AsyncLLM(engine) as door:
            running = [asyncio.ensure_future(collect(door, [index])) for index in (1, 2)]
            await asyncio.sleep(0)
            engine.fail = ValueError("broken")
            engine.let_go()
            errors = await asyncio.gather(*running, return_exceptions=True)
            for found in errors:
                assert isinstance(found, EngineError)
                assert "the engine failed: ValueError: broken" in str(found)
                assert found.__cause__ is engine.fail
            assert errors[0] is not errors[1]  # each gets a traceback of its own
            with pytest.raises(EngineError, match=r"broken\. Build a new one"):
                await collect(door, [3])
            assert sorted(engine.aborted) == ["async-0", "async-1"]
            assert door.failure is engine.fail

    asyncio.run(main())


def test_a_bug_while_a_request_is_added_ends_the_engine() -> None:
    async def main() -> None:
        async with AsyncLLM(Gated()) as door:
            with pytest.raises(ValueError, match="a bug"):
                await collect(door, [99])
            with pytest.raises(EngineError, match="a bug"):
                await collect(door, [1])  # refused, or dropped by the thread that ends

    asyncio.run(main())


def test_a_request_that_the_engine_forgets_is_an_error() -> None:
    async def main() -> None:
        engine = Gated(tickets=1)
        engine.forget = True
        async with AsyncLLM(engine) as door:
            with pytest.raises(EngineError, match="without ending this request"):
                await collect(door, [1])

    asyncio.run(main())


def test_closing_ends_requests_in_flight() -> None:
    async def main() -> None:
        engine = Gated(tickets=1)
        door = AsyncLLM(engine)
        stream = door.generate([1], SamplingParams(max_tokens=10**6), "a")
        await anext(stream)
        closing = asyncio.ensure_future(door.close())
        engine.let_go(10**5)
        with pytest.raises(EngineError, match="closed before this request ended"):
            await to_the_end(stream)
        await closing
        assert engine.is_closed
        assert engine.open == {}
        with pytest.raises(EngineError, match="it was closed"):
            await collect(door, [1])
        await door.close()

    asyncio.run(main())


def test_a_client_whose_loop_is_gone_costs_no_other() -> None:
    engine = Gated(tickets=0)
    door = AsyncLLM(engine)
    loop = asyncio.new_event_loop()
    stream = door.generate([1], SamplingParams(max_tokens=99), "gone")
    first = loop.create_task(anext(stream))
    loop.call_soon(loop.stop)
    loop.run_forever()  # the request is sent
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        loop.run_until_complete(first)
    loop.close()
    engine.let_go(20)
    assert asyncio.run(collect(door, [2])).finished
    assert door.release() is engine
    assert not engine.is_closed
    assert engine.open == {}


def test_steps_are_reported() -> None:
    steps = []
    door = AsyncLLM(Gated(), on_step=lambda step, wall_s: steps.append((step, wall_s)))
    asyncio.run(collect(door, [1]))
    door.release()
    assert len(steps) == 3
    assert all(wall_s >= 0 for _, wall_s in steps)


@pytest.mark.parametrize("bound", [0, -1, True, 1.5])
def test_a_bound_is_an_integer_from_one(bound: Any) -> None:
    with pytest.raises(EngineError, match="max_pending: expected an integer >= 1"):
        AsyncLLM(Gated(), max_pending=bound)
