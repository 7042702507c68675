"""Who may ask: keys, host names, origins. The guard around an application that answers all."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from server.guard import Guard
from server.settings import ServerSettings


async def _hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


def ask(
    path: str = "/v1/models",
    headers: dict[str, str] | None = None,
    keys: tuple[str, ...] = (),
    method: str = "GET",
    **settings: Any,
) -> httpx.Response:
    guard = Guard(_hello, ServerSettings(access_log=False, **settings), keys)

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(guard)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(send())


def test_every_path_but_liveness_needs_a_key() -> None:
    keys = ("first", "second")
    for path in ("/v1/models", "/metrics", "/docs", "/openapi.json", "/tokenize", "/nowhere"):
        refused = ask(path, keys=keys)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
        assert ask(path, {"Authorization": "Bearer second"}, keys).status_code == 200
    for path in ("/health", "/ping"):
        assert ask(path, keys=keys).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer third"},
        {"Authorization": "Bearer "},
        {"Authorization": "Basic first"},
        {"Authorization": "first"},
        {"X-Api-Key": "fir"},
        {"Authorization": "Bearer f\u00efrst".encode("latin-1").decode("latin-1")},
    ],
)
def test_what_is_no_key_is_refused(headers: dict[str, str]) -> None:
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    assert ask(headers=raw, keys=("first",)).status_code == 401  # type: ignore[arg-type]
    assert ask(headers={"X-Api-Key": "first"}, keys=("first",)).status_code == 200


def test_a_key_may_have_any_letters() -> None:
    key = "schl\u00fcssel"
    headers: Any = {"Authorization": f"Bearer {key}".encode()}  # as curl sends it
    assert ask(headers=headers, keys=(key,)).status_code == 200


@pytest.mark.parametrize(
    ("host", "settings", "status"),
    [
        ("localhost:8000", {}, 200),
        ("127.0.0.1", {}, 200),
        ("[::1]:8000", {}, 200),
        ("LOCALHOST", {}, 200),
        ("evil.example", {}, 403),
        ("localhost.evil.example", {}, 403),
        ("box.lan", {"allowed_hosts": ["box.lan"]}, 200),
        ("box.lan", {"host": "0.0.0.0"}, 200),
        ("box.lan", {"host": "0.0.0.0", "allowed_hosts": ["other.lan"]}, 403),
    ],
)
def test_a_name_of_another_server_is_refused(
    host: str, settings: dict[str, Any], status: int
) -> None:
    for path in ("/health", "/v1/models"):
        assert ask(path, {"Host": host}, **settings).status_code == status


def test_origins_are_off_unless_listed() -> None:
    origin = {"Origin": "http://page.example"}
    assert "access-control-allow-origin" not in ask(headers=origin).headers
    listed = {"cors_origins": ["http://page.example"]}
    found = ask(headers=origin, **listed)
    assert found.headers["access-control-allow-origin"] == "http://page.example"
    asked = origin | {"Access-Control-Request-Headers": "authorization, content-type"}
    preflight = ask(headers=asked, keys=("k",), method="OPTIONS", **listed)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-headers"] == "authorization, content-type"
    assert ask(headers={"Origin": "http://evil"}, keys=("k",), **listed).status_code == 401


def test_a_refusal_and_an_answer_have_an_id_of_the_request() -> None:
    assert ask(headers={"X-Request-Id": "abc"}).headers["x-request-id"] == "abc"
    odd = ask(headers={"X-Request-Id": "a b\t" + "x" * 200})
    assert len(odd.headers["x-request-id"]) == 32
    refused = ask(headers={"Host": "evil", "X-Request-Id": "abc"})
    assert refused.headers["x-request-id"] == "abc"
    assert set(json.loads(refused.text)["error"]) == {"message", "type", "param", "code"}
