"""Bodies of many requests share one bound."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from server.body import MAX_HELD, Bodies
from server.errors import APIError
from server.settings import ServerSettings

MIB = 2**20


def request(parts: Iterator[bytes] | list[bytes], *, leaves: bool = False) -> Request:
    """A request whose body comes in parts."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    end: dict[str, Any] = {"type": "http.request", "body": b"", "more_body": False}
    messages.append({"type": "http.disconnect"} if leaves else end)
    waiting = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(waiting)

    headers = [(b"content-type", b"application/json")]
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


def test_bodies_that_are_open_have_one_bound_and_give_it_back() -> None:
    bodies = Bodies(ServerSettings(max_body_mib=1.0))
    part = [b"x" * (MIB // 2)] * 2

    async def read() -> None:
        found = [await bodies.read(request(part)) for _ in range(MAX_HELD)]
        with pytest.raises(APIError) as full:
            await bodies.read(request([b"x"]))
        assert (full.value.status, full.value.headers) == (429, {"Retry-After": "1"})
        bodies.release(len(found[0]))
        with pytest.raises(APIError) as large:
            await bodies.read(request([*part, b"x"]))
        assert large.value.status in {413, 429}
        with pytest.raises(ClientDisconnect):
            await bodies.read(request(part, leaves=True))
        assert len(await bodies.read(request(part))) == MIB

    asyncio.run(read())


def test_a_body_that_does_not_come_is_given_up_and_counts_no_longer() -> None:
    bodies = Bodies(ServerSettings(max_body_mib=1.0, body_timeout_s=0.01))

    async def never() -> dict[str, Any]:
        await asyncio.sleep(60)
        raise AssertionError

    async def read() -> None:
        headers = [(b"content-type", b"application/json")]
        slow = Request({"type": "http", "method": "POST", "headers": headers}, never)
        with pytest.raises(APIError) as late:
            await bodies.read(slow)
        assert late.value.status == 408

    asyncio.run(read())
