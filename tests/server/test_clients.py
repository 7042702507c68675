"""Clients that others wrote: openai-python, curl, the harness's own, and a fuzz of the schema."""

import asyncio
import contextlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.asked.config import EngineConfig, ModelConfig
from harness.config.schema import SystemConfig
from harness.systems.http_engine import HTTPEngine
from harness.work.drive import run_requests
from tests.server.launch import Served

GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 8}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def openai() -> Any:
    """The client's package, which takes a second to import, where it is used alone."""
    import openai

    return openai


@pytest.fixture
def client(served: Served, openai: Any):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_openai_python_sync(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "org/tiny"]
    assert client.models.retrieve("org/tiny").id == "org/tiny"
    whole = client.completions.create(prompt="hello", logprobs=2, **GREEDY)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    parts = list(client.completions.create(prompt="hello", stream=True, **GREEDY))
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    chat = client.chat.completions.create(messages=HELLO, **GREEDY)
    options = {"include_usage": True}
    with client.chat.completions.create(
        messages=HELLO, stream=True, stream_options=options, **GREEDY
    ) as stream:
        chunks = list(stream)
    texts = [x.delta.content or "" for chunk in chunks for x in chunk.choices]
    assert "".join(texts) == chat.choices[0].message.content
    assert chunks[-1].usage == chat.usage


@pytest.mark.thorough
def test_openai_python_async(served: Served, openai: Any) -> None:
    async def ask() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        async with client:
            answers = [
                client.chat.completions.create(
                    messages=[{"role": "user", "content": f"hello {number}"}], **GREEDY
                )
                for number in range(12)
            ]
            found = await asyncio.gather(*answers)
            stream = await client.chat.completions.create(messages=HELLO, stream=True, **GREEDY)
            parts = [part.choices[0].delta.content or "" async for part in stream]
        return [*(x.choices[0].message.content or "" for x in found), "".join(parts)]

    assert all(asyncio.run(ask()))


@pytest.mark.thorough
def test_openai_python_raises_the_class_of_each_error(client: Any, openai: Any) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(prompt="x", **(GREEDY | {"max_tokens": 10_000}))
    assert bad.value.code == "context_length_exceeded"
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError) as absent:
        client.completions.create(prompt="x", **(GREEDY | {"model": "other"}))
    assert absent.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="x")
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(messages=HELLO, stream=True, **(GREEDY | {"n": 0}))


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_streams_and_sees_refusals(served: Served, tmp_path: Path) -> None:
    def curl(*words: str) -> str:
        command = ["curl", "-sS", "-N", "-H", "Content-Type: application/json", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    body = json.dumps(GREEDY | {"prompt": "hello", "stream": True})
    lines = curl(f"{served.url}/v1/completions", "-d", body).splitlines()
    assert lines[-2:] == ["data: [DONE]", ""]
    large = tmp_path / "large.json"
    large.write_text(json.dumps({"prompt": "x" * 2**25}), encoding="utf-8")
    code = curl(
        f"{served.url}/v1/completions", "--data-binary", f"@{large}", "-o", "/dev/null",
        "-w", "%{http_code}",
    )  # fmt: skip
    assert code == "413"


def test_the_harness_measures_it(served: Served, tiny_model: Path) -> None:
    model = ModelConfig(name="tiny", path=str(tiny_model), load_format="dummy")
    system = SystemConfig(kind="http", base_url=f"{served.url}/v1")
    import time

    with contextlib.closing(HTTPEngine(EngineConfig(model=model), system)) as llm:
        assert llm.max_model_len == 1200
        prompts = [[1, 2, 3], [4, 5, 6, 7]]
        requests, _, *_ = run_requests(
            llm, prompts, 5, clock=time.perf_counter, at_once=True, prefix="r"
        )
        assert [len(request.token_ids) for request in requests] == [5, 5]
        assert all(request.is_complete for request in requests)
        assert llm.stats()["reasons"] == []


@pytest.mark.slow
def test_a_fuzz_of_the_schema_finds_no_server_error(served: Served) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings

    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    pid = served.engine.pid
    for operation in schema.get_all_operations():

        @given(case=operation.ok().as_strategy())
        @settings(
            max_examples=60,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def check(case) -> None:
            response = case.call(base_url=served.url)
            assert response.status_code < 500, (case, response.content)
            documented = case.operation.definition.raw["responses"]
            assert str(response.status_code) in documented, (case, response.status_code)

        check()
    assert served.engine.pid == pid
    assert served.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200
    assert httpx.get(f"{served.url}/load").json() == {"server_load": 0}
