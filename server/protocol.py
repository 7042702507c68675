"""Connections: HTTP/1.1 as uvicorn speaks it, with bounds on how a request may come.

uvicorn bounds the time between requests. Here the size of headers is bounded, and the time in which
they and the rest of a refused body may come.
"""

import json
import socket
from asyncio import TimerHandle, Transport
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import APIError

DEAD_PEER_S: Final = 30
"""Seconds after which a peer that acknowledges nothing counts as gone."""
MOST_HEADER_BYTES: Final = 65_536
"""Bytes of a request's address and headers at most."""


class Connection(HttpToolsProtocol):
    """One connection."""

    header_timeout_s: float = 10.0
    _timer: TimerHandle | None = None
    _header_bytes: int | None = 0
    """Bytes that came of the headers of a request; None: they are complete."""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        _watch_peer(transport.get_extra_info("socket"))
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Take bytes; wait while they are no whole request."""
        if self._header_bytes is not None:
            self._header_bytes += len(data)
        super().data_received(data)
        if (self._header_bytes or 0) > MOST_HEADER_BYTES and not self.transport.is_closing():
            self._refuse(431, f"headers: expected at most {MOST_HEADER_BYTES} bytes, got more.")
        elif self._is_answering():
            self._disarm()
        elif self._timer is None:
            self._arm()

    def on_headers_complete(self) -> None:
        """Begin a request."""
        self._header_bytes = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Take the end of a request's body."""
        self._header_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Go on with the connection."""
        super().on_response_complete()
        if self._header_bytes is None:
            self._arm()  # what is left of a refused body is read and dropped, for a while

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._disarm()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in OpenAI's shape."""
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        """Answer in OpenAI's shape where nothing is being answered, and close the connection."""
        if not self._is_answering():
            reason = {400: "Bad Request", 431: "Request Header Fields Too Large"}[status]
            content = json.dumps(APIError(status, message, code="invalid_http").body()).encode()
            head = (
                f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + content)
        self.transport.close()

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
