"""The engine under load: reports of other servers' users, each by its symptom."""

import asyncio
import json
import random
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.launch import Served, last_events, open_stream, serving, wait_for
from tests.slow import slow

pytestmark = pytest.mark.thorough

PROMPT = "the same beginning for all of them, "
NUM_CLIENTS = 100
"""That ask at once."""
LONG = {"max_tokens": 1000, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def busy(tiny_model: Path) -> Iterator[Served]:
    """A server with room for two long sequences, which finds prefixes, and a short queue."""
    small = ("--max-num-seqs", "4", "--max-num-queued-reqs", "8", "--enable-prefix-caching")
    times = ("--header-timeout-s", "1", "--body-timeout-s", "1", "--write-timeout-s", "2")
    with serving(tiny_model, *small, *times) as found:
        yield found


def is_idle(served: Served) -> bool:
    return served.get("/load").json() == {"server_load": 0}


def stops_generating(served: Served) -> None:
    """Fail unless no request is left in the end, and no token comes after that."""
    wait_for(lambda: is_idle(served), served)
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    for name in names:
        assert f"\n{name}{{" in served.get("/metrics").text
        wait_for(lambda: served.metric(name) == 0, served)  # noqa: B023
    wait_for(lambda: has_rested(served), served)


def has_rested(served: Served) -> bool:
    """Whether no step is counted within 0.6 s; the step in flight when all left counts late."""
    steps = served.metric("tightfit:steps_total")
    time.sleep(0.6)
    return served.metric("tightfit:steps_total") == steps


def test_usage_tells_what_the_prefix_cache_gave_and_metrics_how_long_it_waited(
    busy: Served,
) -> None:
    def usage(**more: Any) -> dict[str, Any]:
        text = busy.post("/v1/completions", **body, **more).text
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if "usage" in line]
        return json.loads(lines[-1])["usage"]

    names = [f"vllm:request_{name}_time_seconds_count" for name in ("queue", "prefill")]
    before = [busy.metric(name) for name in names]
    body = {"prompt": "a prompt of its own " * 10, "n": 2, "max_tokens": 3, "ignore_eos": True}
    assert usage()["prompt_tokens_details"] == {"cached_tokens": 0}
    again = usage()
    found = again["prompt_tokens_details"]["cached_tokens"]
    assert again["prompt_tokens"] - 32 <= found < again["prompt_tokens"]
    assert usage(stream=True, stream_options={"include_usage": True}) == again
    wait_for(lambda: [busy.metric(name) for name in names] == [x + 3 for x in before])
    assert busy.metric("vllm:request_queue_time_seconds_sum") > 0


@pytest.mark.parametrize(("stream", "n"), [(False, 1), (True, 4), slow(True, 1), slow(False, 4)])
def test_generation_goes_on_after_the_client_left(busy: Served, stream: bool, n: int) -> None:
    body = LONG | {"prompt": PROMPT, "stream": stream, "n": n}
    before = busy.metric("tightfit:steps_total")
    host, port = busy.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as client:
        client.sendall(head.encode() + content)
        wait_for(lambda: busy.metric("tightfit:steps_total") > before + 2, busy)
    stops_generating(busy)
    assert busy.metric("tightfit:steps_total") < before + LONG["max_tokens"]


def test_a_queued_request_whose_client_left_never_runs(busy: Served) -> None:
    async def leave() -> None:
        async with httpx.AsyncClient(base_url=busy.url, timeout=60) as client:
            running = [
                asyncio.create_task(client.post("/v1/completions", json=LONG | {"prompt": PROMPT}))
                for _ in range(8)
            ]
            await asyncio.sleep(0.5)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    asyncio.run(leave())
    stops_generating(busy)


def test_unbounded_queue(busy: Served) -> None:
    async def flood() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=busy.url, timeout=60, limits=limits) as client:
            body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
            return await asyncio.gather(
                *(client.post("/v1/completions", json=body) for _ in range(60))
            )

    found = asyncio.run(flood())
    served = [response for response in found if response.status_code == 200]
    refused = [response for response in found if response.status_code == 429]
    assert len(served) + len(refused) == 60
    assert len(served) >= 12
    assert refused
    assert all(response.headers["retry-after"] for response in refused)
    assert refused[0].json()["error"]["code"] == "queue_full"
    assert len({response.json()["choices"][0]["text"] for response in served}) == 1
    assert is_idle(busy)


def test_one_bad_request_kills_the_engine_for_all(busy: Served) -> None:
    pid = busy.engine.pid
    for change in (
        {"prompt": ""},
        {"prompt": [10**9]},
        {"prompt": [-1]},
        {"prompt": "x", "logit_bias": {"99999999": 1}},
        {"prompt": "x", "stop_token_ids": [-5]},
        {"prompt": "x", "max_tokens": 2**70},
        {"prompt": "x", "seed": -(2**80)},
        {"prompt": "\ud800"},
        {"prompt": "x", "min_p": 7},
        {"prompt": "x", "top_k": -7},
    ):
        body = json.dumps(change)
        headers = {"content-type": "application/json"}
        response = httpx.post(f"{busy.url}/v1/completions", content=body, headers=headers)
        assert response.status_code == 400, change
    assert busy.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200
    assert busy.engine.pid == pid


def test_running_0_waiting_n_for_ever_at_full_kv(busy: Served) -> None:
    async def crowd() -> list[Any]:
        async with httpx.AsyncClient(base_url=busy.url, timeout=110) as client:
            body = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "n": 2}
            asked = [
                client.post("/v1/completions", json=body | {"prompt": PROMPT * 6 + str(number)})
                for number in range(6)
            ]
            return [x.json()["choices"][0]["text"] for x in await asyncio.gather(*asked)]

    crowded = asyncio.run(crowd())
    body = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    for number, text in enumerate(crowded):
        alone = busy.post("/v1/completions", **body, prompt=PROMPT * 6 + str(number)).json()
        assert alone["choices"][0]["text"] == text


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /health HTT",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
    ],
)
def test_slow_headers_are_not_waited_for(busy: Served, sent: bytes) -> None:
    host, port = busy.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(sent)
        answer = client.recv(1000)  # which a client that is waited for never gets
        assert not answer or answer.startswith(b"HTTP/1.1 4")


def test_huge_or_slow_bodies_are_refused_and_others_served(busy: Served) -> None:
    host, port = busy.url.removeprefix("http://").split(":")
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Content-Length: {}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(head.format(100).encode() + b'{"prompt": ')
        assert busy.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200
        assert b" 408 " in client.recv(10_000)
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(head.format(10**8).encode())
        assert b" 413 " in client.recv(10_000)  # before the body is sent
    # Without a length, too.
    parts = (b"x" * 2**20 for _ in range(40))
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{busy.url}/v1/completions", content=parts, headers=headers)
    assert response.status_code == 413


def test_health_answers_while_long_prompts_are_read(busy: Served) -> None:
    """Within 100 ms of an idle machine; here other tests share the cores."""

    async def ask() -> tuple[list[float], list[int]]:
        async with httpx.AsyncClient(base_url=busy.url, timeout=60) as client:
            text = "words and more of them " * 20_000
            reading = [
                asyncio.create_task(client.post("/tokenize", json={"prompt": text})),
                asyncio.create_task(client.post("/v1/completions", json={"prompt": text})),
                asyncio.create_task(
                    client.post("/v1/completions", json={"prompt": PROMPT * 30, "max_tokens": 5})
                ),
            ]
            times = []
            while not all(task.done() for task in reading):
                begin_s = time.monotonic()
                assert (await client.get("/health")).status_code == 200
                times.append(time.monotonic() - begin_s)
                await asyncio.sleep(0.01)
            return times, [task.result().status_code for task in reading]

    times, codes = asyncio.run(ask())
    assert codes == [200, 400, 200]
    assert sorted(times)[len(times) // 2] < 0.1


@pytest.mark.slow
def test_answers_leak_between_concurrent_requests(busy: Served) -> None:
    """Clients with prefixes in common, a third of which leave: texts are those of one alone."""
    draw = random.Random(7)
    prompts = [PROMPT * draw.randint(1, 4) + f"marker {number}" for number in range(NUM_CLIENTS)]
    body = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    serial = [
        busy.post("/v1/completions", **body, prompt=prompt).json()["choices"][0]["text"]
        for prompt in prompts[:40]
    ]

    async def one(client: httpx.AsyncClient, number: int) -> str | None:
        stream = draw.random() < 0.5
        leaves = draw.random() < 0.3
        asked = body | {"prompt": prompts[number], "stream": stream}
        while True:
            try:
                async with asyncio.timeout(draw.random() * 0.3 if leaves else 100):
                    response = await client.post("/v1/completions", json=asked)
            except TimeoutError:
                return None
            if response.status_code != 429:
                break
            await asyncio.sleep(draw.random())
        assert response.status_code == 200
        if not stream:
            return str(response.json()["choices"][0]["text"])
        lines = [line for line in response.text.split("\n\n") if line][:-1]
        parts = [json.loads(line.removeprefix("data: ")) for line in lines]
        return "".join(part["choices"][0]["text"] for part in parts)

    async def all_of_them() -> list[str | None]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=busy.url, timeout=100, limits=limits) as client:
            return await asyncio.gather(*(one(client, number) for number in range(NUM_CLIENTS)))

    found = asyncio.run(all_of_them())
    assert sum(text is not None for text in found) > NUM_CLIENTS // 2
    assert [
        (number, text, found[number])
        for number, text in enumerate(serial)
        if found[number] not in {None, text}
    ] == []
    stops_generating(busy)


@pytest.mark.slow
def test_slow_readers_are_dropped_and_hold_nobody_up(busy: Served) -> None:
    host, port = busy.url.removeprefix("http://").split(":")
    # Large events, so that buffers of both sides are full soon.
    body = LONG | {"prompt": "x", "stream": True, "n": 4, "logprobs": 20, "return_token_ids": True}
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    with client:
        client.sendall(head.encode() + content)
        wait_for(lambda: not is_idle(busy), busy)
        begin_s = time.monotonic()
        assert busy.post("/v1/completions", prompt="y", max_tokens=2).status_code == 200
        assert time.monotonic() - begin_s < 30
        wait_for(lambda: is_idle(busy), busy, limit_s=90)


@pytest.mark.slow
def test_idle_engine_at_100_percent_of_a_core(busy: Served) -> None:
    def cpu_s() -> float:
        processes = [busy.engine, busy.engine.parent()]
        return sum(sum(process.cpu_times()[:2]) for process in processes if process)

    wait_for(lambda: is_idle(busy), busy)
    before, begin_s = cpu_s(), time.monotonic()
    time.sleep(10)
    assert (cpu_s() - before) / (time.monotonic() - begin_s) < 0.05


@pytest.mark.slow
def test_memory_and_file_handles_stay_flat(busy: Served) -> None:
    front = busy.engine.parent()
    assert front is not None

    def mixed() -> None:
        for number in range(100):
            busy.post("/v1/completions", prompt=PROMPT + str(number), max_tokens=3)
            busy.post("/v1/completions", prompt="x" * 5000)
            busy.post("/v1/completions", stream=True, prompt="x", max_tokens=2)

    mixed()
    before = front.memory_info().rss, front.num_fds(), busy.engine.memory_info().rss
    mixed()
    mixed()
    after = front.memory_info().rss, front.num_fds(), busy.engine.memory_info().rss
    assert after[0] - before[0] < 2**23
    assert after[1] <= before[1] + 2
    assert after[2] - before[2] < 2**25
    assert re.search(r"^vllm:e2e", busy.get("/metrics").text, re.MULTILINE)


# The last one: it ends the server.
def test_engine_child_dead_api_says_so_and_ends(busy: Served) -> None:
    with httpx.Client(timeout=60) as client:
        response = open_stream(client, busy)
        busy.engine.kill()
        event, done = last_events(response)
        assert (
            "was ended by signal 9" in json.loads(event.removeprefix("data: "))["error"]["message"]
        )
        assert done == "data: [DONE]"
        health = busy.get("/health")
        assert (health.status_code, health.json()["state"]) == (503, "failed")
        assert "signal 9" in health.json()["reason"]
        assert busy.end() == 1
