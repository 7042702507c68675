"""Around every request: its id, who may ask, by which name, and a line in the access log."""

import contextlib
import hashlib
import hmac
import json
import logging
import re
from base64 import b64decode
from collections.abc import Sequence
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Final
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import APIError
from server.settings import LOOPBACK_NAMES, ListenSettings

LIVENESS: Final = ("/health", "/ping")
"""Paths that need no key."""
QUIET: Final = (*LIVENESS, "/metrics")
"""Paths that are asked for so often that the log leaves them out."""
ACCESS: Final = "server.access"
_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_PORT: Final = re.compile(r":\d+$")


class Guard:
    """The outermost layer of the application.

    Args:
        app: What answers.
        settings: Names and the log.
        keys: Keys of clients; empty: anybody may ask.
        is_for_browsers: A key may also be the password of HTTP's Basic scheme, under any name,
            for which a browser asks its user by itself.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ListenSettings,
        keys: Sequence[str],
        *,
        is_for_browsers: bool = False,
    ) -> None:
        self._is_for_browsers = is_for_browsers
        self._app, self._log = app, settings.access_log
        self._keys = [_digest(key.encode()) for key in keys]
        self._origins = frozenset(settings.cors_origins)
        is_open = not settings.is_loopback and not settings.allowed_hosts
        names = {*LOOPBACK_NAMES, settings.host, *settings.allowed_hosts}
        self._names = None if is_open else {name.lower() for name in names}
        self.num_open = 0
        """Requests that are being answered."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid4().hex
        scope["state"] = {"request_id": request_id}
        begin_s, status = monotonic(), 0
        origin = headers.get("origin")

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                out = MutableHeaders(scope=message)
                out["X-Request-Id"] = request_id
                if origin in self._origins:
                    out["Access-Control-Allow-Origin"] = str(origin)
                    out["Vary"] = "Origin"
            await send(message)

        self.num_open += 1
        try:
            error = self._refusal(scope, headers)
            if error is not None:
                await _send_error(error, send_on)
            elif scope["method"] == "OPTIONS" and origin in self._origins:
                await _send_preflight(headers, send_on)
            else:
                await self._app(scope, receive, send_on)
        finally:
            self.num_open -= 1
            if self._log and scope["path"] not in QUIET:
                self._write(scope, status, monotonic() - begin_s)

    def _refusal(self, scope: Scope, headers: Headers) -> APIError | None:
        host = _PORT.sub("", headers.get("host", "").lower())
        if self._names is not None and host not in self._names:
            return APIError(
                403,
                f"Host: expected a name of this server, got {host!r}. Add it with --allowed-hosts.",
                code="unknown_host",
            )
        is_preflight = scope["method"] == "OPTIONS" and headers.get("origin") in self._origins
        if not self._keys or scope["path"] in LIVENESS or is_preflight:
            return None
        digest = _digest(self._key(headers).encode("latin-1"))  # as its bytes came
        # All are compared, each in a time that tells nothing of where they differ.
        if sum(hmac.compare_digest(digest, known) for known in self._keys):
            return None
        return APIError(
            401,
            "Authorization: expected Bearer and a key of this server.",
            code="invalid_api_key",
            headers={
                "WWW-Authenticate": 'Basic realm="Tightfit", charset="UTF-8"'
                if self._is_for_browsers
                else "Bearer"
            },
        )

    def _key(self, headers: Headers) -> str:
        """Return the key that a request gives, empty without one."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        match scheme.lower():
            case "bearer":
                return given.strip()
            case "basic" if self._is_for_browsers:
                with contextlib.suppress(ValueError):
                    return b64decode(given, validate=True).decode("latin-1").partition(":")[2]
        return headers.get("x-api-key", "")

    def _write(self, scope: Scope, status: int, duration_s: float) -> None:
        client = scope.get("client")
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": scope["state"]["request_id"],
            "client": client[0] if client else None,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "duration_s": round(duration_s, 6),
            **scope["state"].get("told", {}),
        }
        logging.getLogger(ACCESS).info("%s", json.dumps(line))


def _digest(key: bytes) -> bytes:
    """Return a key at one length, so that comparing tells nothing of it."""
    return hashlib.sha256(key).digest()


async def _send_error(error: APIError, send: Send) -> None:
    body = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _send_preflight(headers: Headers, send: Send) -> None:
    asked = headers.get("access-control-request-headers", "")
    allowed = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", asked.encode()),
        (b"access-control-max-age", b"600"),
        (b"content-length", b"0"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": allowed})
    await send({"type": "http.response.body", "body": b""})
