"""A small server with the completions interface, on a thread of its own."""

import asyncio
import json
import threading
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.harness.prefixes import PrefixCache


@dataclass
class Script:
    """How the server answers."""

    tokens_per_part: int = 1
    gap_s: float = 0.0
    """Between two parts."""
    with_ids: bool = True
    with_usage: bool = True
    extra_usage: int = 0
    status: int = 200
    break_after: int | None = None
    error_after: int | None = None
    raw: str | None = None
    """Sent in the place of every answer."""
    hang: bool = False
    prompt_offset: int = 0
    tells_hits: bool = True
    knows_salts: bool = False
    cache: PrefixCache = field(default_factory=PrefixCache)
    finish: str = "length"
    finish_before: str | None = None
    """Reason in the parts before the last one."""
    fails: tuple[int, ...] = ()
    """Numbers of the requests, from 0, that get a status of 500."""
    num_models_asked: int = 0
    models: tuple[str, ...] = ("tiny",)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_cut: int = 0
    logprobs: dict[str, Any] | None = None
    """Sent with the echo of a prompt."""


def next_token(prompt, position):
    """The greedy token of a prompt."""
    return (sum(prompt) + 7 * position) % 1000


class Server:
    """Answers as a script says; use as a context."""

    def __init__(self, script: Script) -> None:
        self.script, self.base_url = script, ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        self._runner = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self):
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        self.base_url = f"http://127.0.0.1:{port}/v1"
        return runner

    async def _models(self, request):
        self.script.num_models_asked += 1
        rows = [{"id": name, "owned_by": "test"} for name in self.script.models]
        return web.json_response({"data": rows})

    async def _complete(self, request):
        script, body = self.script, await request.json()
        script.bodies.append(body)
        script.headers.append(dict(request.headers))
        if script.status != 200 or len(script.bodies) - 1 in script.fails:
            return web.json_response({"error": "refused"}, status=max(script.status, 400))
        if body.get("echo"):
            return web.json_response({"choices": [{"logprobs": script.logprobs}]})
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            await self._stream(response, body)
        except (asyncio.CancelledError, ConnectionError):
            script.num_cut += 1
            raise
        return response

    async def _chat(self, request):
        """Answer a chat: a part with the role alone, then one each token."""
        body = await request.json()
        self.script.bodies.append(body)
        response = web.StreamResponse()
        await response.prepare(request)
        await self._send(response, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for index in range(body["max_tokens"]):
            finish = "length" if index + 1 == body["max_tokens"] else None
            name = "reasoning_content" if index == 0 else "content"
            await self._send(
                response, {"choices": [{"delta": {name: "x"}, "finish_reason": finish}]}
            )
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _stream(self, response, body):
        script, prompt = self.script, body["prompt"]
        seed = prompt if isinstance(prompt, list) else [len(prompt)]
        tokens = [next_token(seed, index) for index in range(body["max_tokens"])]
        if script.raw is not None:
            await response.write(script.raw.encode())
            return
        if script.hang:
            await asyncio.sleep(3600)
        for start in range(0, len(tokens), script.tokens_per_part):
            if script.break_after is not None and start >= script.break_after:
                return
            if script.error_after is not None and start >= script.error_after:
                await self._send(response, {"error": {"message": "out of blocks"}})
                return
            part = tokens[start : start + script.tokens_per_part]
            choice = {"text": "x" * len(part), "index": 0, "finish_reason": script.finish_before}
            if script.with_ids:
                choice["token_ids"] = part
            if start + len(part) == len(tokens):
                choice["finish_reason"] = script.finish
            await self._send(response, {"choices": [choice]})
        if script.with_usage:
            usage = {
                "prompt_tokens": len(seed) + script.prompt_offset,
                "completion_tokens": len(tokens) + script.extra_usage,
            }
            salt = body.get("cache_salt") if script.knows_salts else None
            if script.tells_hits:
                found = script.cache.find(salt, seed)
                usage["prompt_tokens_details"] = {"cached_tokens": found}
            await self._send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")

    async def _send(self, response, part):
        await response.write(f"data: {json.dumps(part)}\n\n".encode())
        await asyncio.sleep(self.script.gap_s)
