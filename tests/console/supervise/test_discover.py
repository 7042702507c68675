"""Foreign servers: found by what they answer, shown, and never more than asked."""

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from console.supervise import discover
from console.supervise.discover import Discovery, Listener, listeners, shown_command

CARD = {"id": "org/<img onerror=x>", "object": "model", "owned_by": "vllm", "max_model_len": 4096}
MODELS = {"object": "list", "data": [CARD, CARD | {"id": "other"}]}


def http(status: int, content: Any) -> bytes:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


@contextlib.asynccontextmanager
async def listening(answer: bytes | None) -> AsyncIterator[Listener]:
    """A server that gives one answer, or none for ever."""
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.append(1)
        if answer is None:
            await over.wait()
        else:
            writer.write(answer)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        writer.close()

    asked: list[int] = []
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield Listener("0.0.0.0", port, 7, 1.5, "command", "user")
    over.set()
    server.close()
    await server.wait_closed()


async def found_with(*answers: bytes | None, own: frozenset[int] = frozenset()) -> list[Any]:
    async with contextlib.AsyncExitStack() as stack:
        there = [await stack.enter_async_context(listening(answer)) for answer in answers]
        discovery = Discovery(lambda: set(own), list_listeners=lambda: there)
        await discovery.look()
        return discovery.snapshot()


def test_a_server_is_told_with_its_process_and_models() -> None:
    begin_s = time.time()
    [found] = asyncio.run(found_with(http(200, MODELS)))
    assert found.pop("checked_s") >= begin_s
    port = found.pop("port")
    assert found == {
        "address": "0.0.0.0",
        "url": f"http://127.0.0.1:{port}",
        "pid": 7,
        "started_s": 1.5,
        "command": "command",
        "user": "user",
        "owner": "vllm",
        "models": ["org/<img onerror=x>", "other"],
        "max_model_len": 4096,
        "needs_key": False,
    }


def test_a_server_that_wants_a_key_has_unknown_models() -> None:
    [found] = asyncio.run(found_with(http(401, {"error": {"message": "no"}})))
    assert found["needs_key"]
    assert found["models"] is None
    assert found["owner"] is None


@pytest.mark.parametrize(
    "answer",
    [
        http(404, {"error": "no such path"}),
        http(200, b"<html>"),
        http(200, {"data": "text"}),
        http(200, {"object": "list", "data": [1]}),
        http(200, {"object": "error", "data": []}),
        http(200, [MODELS]),
        http(200, b"[" * 100_000),
        http(200, b" " * (discover.MAX_ANSWER_BYTES + 1)),
        http(401, b"Unauthorized"),
        http(302, b"").replace(b"Content", b"Location: http://127.0.0.1:1/\r\nContent"),
        b"SSH-2.0-OpenSSH\r\n",
    ],
)
def test_what_is_no_such_server_is_left_out(answer: bytes) -> None:
    assert asyncio.run(found_with(answer)) == []


def test_own_processes_are_left_out() -> None:
    assert asyncio.run(found_with(http(200, MODELS), own=frozenset({7}))) == []


def test_one_that_never_answers_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "TIMEOUT_S", 0.2)
    begin_s = time.monotonic()
    found = asyncio.run(found_with(*[None] * discover.AT_ONCE, http(200, MODELS)))
    assert len(found) == 1
    assert time.monotonic() - begin_s < 60


def test_others_are_asked_more_and_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    asked: list[float] = []

    async def ask(_: object, __: Listener) -> None:
        asked.append(clock[0])

    monkeypatch.setattr(discover, "_ask", ask)
    who = Listener("127.0.0.1", 5000, 7, 1.0, None, None)
    there = [who]

    async def look_for_a_while() -> None:
        discovery = Discovery(set, list_listeners=lambda: list(there), clock=lambda: clock[0])
        for _ in range(80):
            await discovery.look()
            clock[0] += discover.LOOK_S
        there.clear()
        await discovery.look()
        there.append(who)  # one that came back is asked at once
        await discovery.look()

    asyncio.run(look_for_a_while())
    assert asked == [1000.0, 1010.0, 1070.0, 1370.0, 1670.0, 1800.0]


def test_changes_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "LOOK_S", 0.01)
    told: list[int] = []

    async def watch() -> None:
        async with listening(http(200, MODELS)) as who:
            there = [who]
            discovery = Discovery(
                set,
                on_change=lambda: told.append(len(discovery.snapshot())),
                list_listeners=lambda: list(there),
            )
            discovery.start()
            await until(lambda: told == [1])
            await asyncio.sleep(0.1)
            there.clear()
            await until(lambda: told == [1, 0])
            await discovery.close()

    asyncio.run(watch())


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_true():
            await asyncio.sleep(0.01)


def test_listeners_tell_the_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        [found] = [each for each in listeners() if each.port == port]
    assert found.pid == os.getpid()
    assert found.started_s is not None
    assert found.started_s <= time.time() + 1
    assert found.command


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["vllm", "serve", "a model"], "vllm serve 'a model'"),
        (["x", "--api-key", "abc", "def", "--port", "1"], "x --api-key HIDDEN HIDDEN --port 1"),
        (["x", "--api-key=abc", "--hf-token", "t"], "x --api-key=HIDDEN --hf-token HIDDEN"),
        (["env", "OPENAI_API_KEY=abc", "x"], "env OPENAI_API_KEY=HIDDEN x"),
        (["x", "--tokenizer", "t", "--max-tokens", "5"], "x --tokenizer t --max-tokens 5"),
    ],
)
def test_commands_are_shown_without_keys(words: list[str], text: str) -> None:
    assert shown_command(words) == text


def test_a_long_command_is_cut() -> None:
    assert len(shown_command(["x" * 10_000])) == discover.MAX_CHARACTERS
