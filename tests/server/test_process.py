"""The life of the two processes: start, drain, death, and what is left behind."""

import asyncio
import json
import os
import signal
import socket
import time
from pathlib import Path

import httpx
import psutil
import pytest

from server.lifecycle import EXIT_CONFIG, EXIT_USAGE
from server.listen import listen
from server.run import main
from server.settings import ServerSettings
from tests.server.launch import last_events, open_stream, serving, wait_for


@pytest.mark.slow
def test_sigterm_drains_new_requests_are_refused_and_streams_end_whole(tiny_model: Path) -> None:
    with serving(tiny_model, is_ready=False) as served, httpx.Client(timeout=60) as client:
        # The port answers before there is an engine.
        health = served.get("/health")
        assert health.status_code == 503
        assert health.json()["state"] == "loading"
        assert served.get("/ping").status_code == 200
        early = served.post("/v1/completions", prompt="x")
        assert early.status_code == 503
        assert early.headers["retry-after"]
        served.wait_ready()
        engine = served.engine
        response = open_stream(client, served, max_tokens=300)
        served.process.send_signal(signal.SIGTERM)
        wait_for(lambda: served.get("/health").json()["state"] == "draining", served)
        assert served.post("/v1/completions", prompt="x").json()["error"]["code"] == "draining"
        event, done = last_events(response)
        assert json.loads(event.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert done == "data: [DONE]"
        assert served.end() == 0
        assert not engine.is_running()


@pytest.mark.slow
def test_engine_child_stopped_is_reported_within_five_seconds(tiny_model: Path) -> None:
    with serving(tiny_model) as served, httpx.Client(timeout=60) as client:
        response = open_stream(client, served)
        served.engine.suspend()
        begin_s = time.monotonic()
        event, _ = last_events(response)
        assert time.monotonic() - begin_s < 5
        assert "is stopped" in event
        assert served.get("/health").status_code == 503
        assert served.end() == 1


@pytest.mark.slow
def test_parent_sigkilled_leaves_no_child(tiny_model: Path) -> None:
    with serving(tiny_model) as served:
        engine = served.engine
        served.process.kill()
        served.end()
        engine.wait(5)


@pytest.mark.slow
def test_stop_twice_ends_at_once_with_an_error_event(tiny_model: Path) -> None:
    with serving(tiny_model) as served, httpx.Client(timeout=60) as client:
        response = open_stream(client, served)
        engine = served.engine
        served.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "draining" in served.log, served)
        begin_s = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        event, _ = last_events(response)
        assert "shutting down" in event
        assert served.end() == 0
        assert time.monotonic() - begin_s < 4
        assert not engine.is_running()


@pytest.mark.slow
def test_drain_has_an_end(tiny_model: Path) -> None:
    with serving(tiny_model, "--drain-s", "0.2") as served, httpx.Client(timeout=60) as client:
        response = open_stream(client, served)
        served.process.send_signal(signal.SIGTERM)
        assert "shutting down" in last_events(response)[0]
        assert served.end() == 0


@pytest.mark.slow
def test_stop_while_loading_leaves_nothing(tiny_model: Path) -> None:
    with serving(tiny_model, is_ready=False) as served:
        engine = served.engine
        served.process.send_signal(signal.SIGTERM)
        assert served.end() == 0
        engine.wait(5)


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_refused_with_its_own_exit_code(tiny_model: Path) -> None:
    with serving(tiny_model, "--gpu-memory-gib", "0.001", is_ready=False) as served:
        assert served.end(60) == EXIT_CONFIG
        assert "does not fit" in served.log
        assert "Traceback" not in served.log


@pytest.mark.slow
def test_a_folder_without_weights_is_refused_with_its_own_exit_code(tiny_model: Path) -> None:
    with serving(tiny_model, "--load-format", "auto", is_ready=False) as served:
        assert served.end(60) == EXIT_CONFIG
        assert "safetensors" in served.log


def test_port_in_use_names_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["model", "--port", str(port)]) == 1
    told = capsys.readouterr().err
    assert f"process {os.getpid()}" in told
    assert psutil.Process().cmdline()[0] in told


def test_small_writes_are_sent_at_once() -> None:
    """A client's acknowledgement takes up to 40 ms, for which the next write would wait."""

    async def accepted() -> int:
        options = list[int]()

        async def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = writer.get_extra_info("socket")
            options.append(peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with listen(ServerSettings(port=0)) as listening:
            async with await asyncio.start_server(note, sock=listening):
                reader, writer = await asyncio.open_connection(*listening.getsockname())
                await reader.read()
                writer.close()
        return options[0]

    assert asyncio.run(accepted()) == 1


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--host", "0.0.0.0"], EXIT_CONFIG, "--api-key-file"),
        (["--max-model-length", "5"], EXIT_USAGE, "Did you mean --max-model-len?"),
        (["--max-model-len", "many"], EXIT_CONFIG, "max-model-len: expected an integer"),
        (["--chat-template", "/no/such/file"], EXIT_CONFIG, "--chat-template"),
        (["--log-prompts", "--no-access-log"], EXIT_CONFIG, "--log-prompts: expected --access-log"),
        (["--tool-call-parser", "other"], EXIT_CONFIG, "hermes"),
        (["--config", "/no/such/file"], EXIT_CONFIG, "config"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(
    flags: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", *flags]) == code
    assert words in capsys.readouterr().err
