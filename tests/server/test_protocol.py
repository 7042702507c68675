"""Connections, from the bytes of clients that are careless or mean."""

import re
import socket
from collections.abc import Iterator

import pytest

from server.protocol import MOST_HEADER_BYTES, MOST_PIPELINED
from tests.server.launch import Served, wait_for

HEAD = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
PING = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = b'{"prompt":"a"}'
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"


@pytest.fixture
def client(served: Served) -> Iterator[socket.socket]:
    """A connection with the server."""
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as found:
        yield found


def statuses(client: socket.socket, num: int) -> list[int]:
    """Return the statuses of so many answers, of fewer where the connection ends before."""
    seen, found = b"", list[int]()
    while len(found) < num and (data := client.recv(2**16)):
        seen += data
        found = [int(each) for each in re.findall(rb"HTTP/1\.1 (\d+) ", seen)]
    return found


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        # A length of thousands of digits, which is a small one.
        (HEAD + b"Content-Length: " + b"0" * 5000 + b"14\r\n\r\n" + BODY + PING, [200, 200]),
        # HTTP/2 on offer, as Java's client does: its body and what comes after count.
        (HEAD + OFFER + b"Content-Length: 14\r\n\r\n" + BODY + PING, [200, 200]),
        (CHUNKED[:-2] + OFFER + b"\r\ne\r\n" + BODY + b"\r\n0\r\n\r\n" + PING, [200, 200]),
        (PING[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + PING, [200, 200]),
        (PING[:-2] + b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n\r\n" + PING, [200]),
        (b"CONNECT a:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", [400]),
        (CHUNKED + b"zz\r\n", [400]),
        ("GET /v1/models/\u00e9 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(), [400]),
        (PING[:-2] + b"X: " + b"a" * MOST_HEADER_BYTES + b"\r\n\r\n", [431]),
        (HEAD + b"Content-Length: 14\r\nTransfer-Encoding: chunked\r\n\r\n", [400]),
        # What a proxy in front may read in another way.
        (CHUNKED.replace(b"chunked", b"gzip, chunked") + b"e\r\n" + BODY + b"\r\n0\r\n\r\n", [400]),
        (CHUNKED.replace(b"/1.1", b"/1.0") + b"e\r\n" + BODY + b"\r\n0\r\n\r\n", [400]),
        (PING[:-2] + b"Host: localhost\r\n\r\n", [400]),
        (PING.replace(b"Host: localhost\r\n", b""), [400]),
        # Refused before its body, which may or may not follow: nothing after it counts.
        (HEAD + b"Expect: 100-continue\r\nContent-Length: 99999999\r\n\r\n" + PING, [413]),
    ],
)
def test_requests_of_a_connection(client: socket.socket, sent: bytes, expected: list[int]) -> None:
    client.sendall(sent)
    assert statuses(client, len(expected)) == expected


def test_a_client_of_http_1_0_gets_a_stream_without_chunks(client: socket.socket) -> None:
    head = HEAD.replace(b"/tokenize", b"/v1/completions").replace(b"/1.1", b"/1.0")
    body = b'{"prompt":"a","max_tokens":2,"ignore_eos":true,"stream":true}'
    keep = b"Connection: keep-alive\r\n"
    client.sendall(head + keep + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    headers, _, events = client.makefile("rb").read().partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in headers
    assert b"transfer-encoding" not in headers
    assert events.startswith(b"data: {")
    assert events.endswith(b"}\n\ndata: [DONE]\n\n")


def test_trailers_are_bounded_as_headers_are(client: socket.socket) -> None:
    client.sendall(PING + CHUNKED + b"0\r\n")
    assert statuses(client, 1) == [200]
    client.sendall(b"X-Trailer: a\r\n" * (MOST_HEADER_BYTES // 13))
    assert statuses(client, 1) == [431]


def test_a_connection_ends_where_too_many_requests_wait(client: socket.socket) -> None:
    client.sendall(PING * (MOST_PIPELINED + 3))
    assert len(statuses(client, MOST_PIPELINED + 3)) <= MOST_PIPELINED + 1


def test_generation_ends_where_the_client_leaves_with_another_request_behind(
    served: Served, client: socket.socket
) -> None:
    body = b'{"prompt":"a","max_tokens":1000,"ignore_eos":true,"stream":true}'
    head = HEAD.replace(b"/tokenize", b"/v1/completions")
    before = num_aborted(served)
    client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body + PING)
    assert statuses(client, 1) == [200]
    client.close()
    wait_for(lambda: served.get("/load").json() == {"server_load": 0}, served)
    assert num_aborted(served) == before + 1


def num_aborted(served: Served) -> float:
    """Return how many requests ended because their clients had left."""
    text = served.get("/metrics").text
    return sum(
        map(float, re.findall(r'^vllm:request_success_total.*"abort".* (\S+)$', text, re.MULTILINE))
    )
