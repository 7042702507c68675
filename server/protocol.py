"""Connections: HTTP/1.1 as uvicorn speaks it, with bounds on how a request may come.

uvicorn bounds the time between requests. Here the size of headers and of trailers is bounded, the
number of requests that wait on a connection, and the time in which headers and the rest of a
refused body may come. Offers to speak another protocol are passed over, as a server may. Clients
of HTTP/1.0, which know no chunks, get a stream as it is, until the connection ends.
"""

import json
import socket
from asyncio import TimerHandle, Transport
from functools import partial
from typing import Any, Final

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.errors import APIError, shown

DEAD_PEER_S: Final = 30
"""Seconds after which a peer that acknowledges nothing counts as gone."""
MOST_HEADER_BYTES: Final = 65_536
"""Bytes of a request's address and headers at most, and of what comes after its body."""
MOST_PIPELINED: Final = 256
"""Requests of a connection that may wait until the one before is answered."""


class Connection(HttpToolsProtocol):
    """One connection."""

    header_timeout_s: float = 10.0
    _timer: TimerHandle | None = None
    _num_bytes: int = 0
    """Bytes that came since the last whole part of a request: its headers, a piece of its body."""
    _is_amid_body: bool = False
    _running: RequestResponseCycle | None = None
    """The request that is being answered; those behind it wait."""
    _is_offer: bool = False
    """The request offers to speak another protocol, after which its parser has no body."""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        _watch_peer(transport.get_extra_info("socket"))
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Take bytes; wait while they are no whole request."""
        self._num_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self.transport.is_closing():
            return
        if self._num_bytes > MOST_HEADER_BYTES:
            self._refuse_size()
        elif self._is_answering():
            self._disarm()
        elif self._timer is None:
            self._arm()

    def _feed(self, data: bytes) -> None:
        """Parse bytes; a request that offers another protocol, once more without the offer."""
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                data = self._without_offer() + data[offer.args[0] :]
            else:
                return

    def _without_offer(self) -> bytes:
        """Return the head of a request without its offer, for a parser that has seen nothing."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        keeps = version == "1.1" and not any(
            name == b"connection" and b"close" in value.lower() for name, value in self.headers
        )
        headers = [x for x in self.headers if x[0] not in {b"connection", b"upgrade"}]
        if not keeps:
            headers.append((b"connection", b"close"))
        self._is_offer = False
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        lines = [b"%b: %b\r\n" % each for each in headers]
        return b"%b %b HTTP/%b\r\n%b\r\n" % (
            method,
            self.url,
            version.encode(),
            b"".join(lines),
        )

    def on_headers_complete(self) -> None:
        """Begin a request."""
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("this is no proxy")
        if self.parser.should_upgrade():
            self._is_offer = True
            return
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MOST_HEADER_BYTES:
            self._refuse_size()
            raise ValueError("headers are too large")  # which ends parsing
        if len(self.pipeline) >= MOST_PIPELINED:
            raise ValueError("too many requests wait")
        self._check_framing()
        self._num_bytes, self._is_amid_body = 0, True
        super().on_headers_complete()
        if self.expect_100_continue:
            # Refused without a "100 Continue", it may or may not be followed by its body.
            self.cycle.keep_alive = False

    def _check_framing(self) -> None:
        """Refuse what a proxy in front may read in another way."""
        version, hosts = self.parser.get_http_version(), self._values(b"host")
        if len(hosts) > 1 or (not hosts and version >= "1.1"):
            self._refuse(400, f"Host: expected one, got {len(hosts)}.")
            raise ValueError("not one host")
        codings = self._values(b"transfer-encoding")
        if codings and (version < "1.1" or [each.lower() for each in codings] != [b"chunked"]):
            got = b", ".join(codings).decode("latin-1")
            self._refuse(
                400, f"Transfer-Encoding: expected chunked, of HTTP/1.1, got {shown(got)}."
            )
            raise ValueError("another coding")

    def _values(self, name: bytes) -> list[bytes]:
        return [value.strip() for other, value in self.headers if other == name]

    def on_chunk_header(self) -> None:
        """Take the size of a piece of a body."""
        self._num_bytes = 0

    def on_body(self, body: bytes) -> None:
        """Take a piece of a request's body."""
        self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Take the end of a request's body."""
        if self._is_offer:
            return
        self._num_bytes, self._is_amid_body = 0, False
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._running = cycle
        if cycle.scope["http_version"] < "1.1":
            app = partial(_without_chunks, app, cycle)
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def on_response_complete(self) -> None:
        """Go on with the connection."""
        super().on_response_complete()
        if self._is_amid_body:
            self._arm()  # what is left of a refused body is read and dropped, for a while

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer; the request that is being answered has nobody to answer."""
        self._disarm()
        self._end_running()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in OpenAI's shape."""
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        """Answer in OpenAI's shape where no answer has begun, and close the connection."""
        if self.transport.is_closing():
            return
        running = self._running
        if running is None or running.response_complete or not running.response_started:
            reason = {400: "Bad Request", 431: "Request Header Fields Too Large"}[status]
            content = json.dumps(APIError(status, message, code="invalid_http").body()).encode()
            head = (
                f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + content)
        self._end_running()
        self.transport.close()

    def _refuse_size(self) -> None:
        self._refuse(431, f"headers: expected at most {MOST_HEADER_BYTES} bytes, got more.")

    def _end_running(self) -> None:
        """Tell the request that is being answered that its client has left."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _is_answering(self) -> bool:
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _arm(self) -> None:
        self._disarm()
        self._timer = self.loop.call_later(self.header_timeout_s, self._give_up)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        is_idle = self.timeout_keep_alive_task is not None
        if not is_idle and not self.transport.is_closing():
            self.transport.close()


async def _without_chunks(
    app: ASGIApp, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer a client that knows no chunks: what has no length goes on to the connection's end."""
    is_unframed = False

    async def send_on(message: Message) -> None:
        nonlocal is_unframed
        if message["type"] == "http.response.start":
            is_unframed = all(name != b"content-length" for name, _ in message["headers"])
            if is_unframed:
                cycle.chunked_encoding = False
        elif is_unframed:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_on)


def protocol_of(header_timeout_s: float) -> type[Connection]:
    """Return the class of connections whose requests begin within a time."""
    return type("Connection", (Connection,), {"header_timeout_s": header_timeout_s})


def _watch_peer(peer: socket.socket | None) -> None:
    """Have the kernel end connections whose other side is gone without a word."""
    if peer is None or peer.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", DEAD_PEER_S // 2),
        ("TCP_KEEPINTVL", DEAD_PEER_S // 6),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", DEAD_PEER_S * 1000),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            peer.setsockopt(socket.IPPROTO_TCP, option, value)
