"""Connections: HTTP/1.1 as uvicorn speaks it, with a limit on how long a request may take to come.

uvicorn bounds the time between requests; here headers and the rest of a refused body are bounded.
"""

import json
import socket
from asyncio import TimerHandle, Transport
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from server.errors import APIError

DEAD_PEER_S: Final = 30
"""Seconds after which a peer that acknowledges nothing counts as gone."""


class Connection(H11Protocol):
    """One connection."""

    header_timeout_s: float = 10.0
    _timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        _watch_peer(transport.get_extra_info("socket"))
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Take bytes; wait while they are no whole request."""
        super().data_received(data)
        if self._is_answering():
            self._disarm()
        elif self._timer is None:
            self._arm()

    def on_response_complete(self) -> None:
        """Go on with the connection."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._arm()  # what is left of a refused body is read and dropped, for a while

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._disarm()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in OpenAI's shape."""
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            self.transport.close()
            return
        content = json.dumps(APIError(400, msg, code="invalid_http").body()).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            (b"connection", b"close"),
        ]
        events: list[Any] = [
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=content),
            h11.EndOfMessage(),
        ]
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()

    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
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
