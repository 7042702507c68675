"""The application: every route, what it checks, and errors in one shape."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from time import time
from typing import Any, Final, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from server.body import Bodies, parsed
from server.engine_link import EngineLink
from server.errors import APIError, bad_value, not_ready, overloaded, shown, unsupported
from server.guard import LIVENESS, Guard
from server.lifecycle import Lifecycle
from server.metrics import Metrics
from server.respond import Generated
from server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    plain_messages,
    plain_tools,
)
from server.settings import ServerSettings
from server.shapes import ChatShape, CompletionShape, Shape
from server.wire import Chat, Detokenize, Prompt, Ready, Submit, Tokenize

_ERRORS: Final = {
    400: "A value is wrong, or the prompt is too long.",
    401: "No key, or a wrong one.",
    403: "The Host header names another server.",
    404: "No such model.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue is full; Retry-After says when to come again.",
    503: "The engine is not ready, or failed.",
}
RESERVED: Final = frozenset(
    {
        *("chat_template", "tools", "documents", "tokenize", "messages", "conversation", "padding"),
        *("add_generation_prompt", "continue_final_message", "truncation", "max_length", "self"),
        *("return_tensors", "return_dict", "tokenizer_kwargs", "return_assistant_tokens_mask"),
    }
)
"""Arguments of a template's rendering that clients do not set."""
_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {
        status: {
            "description": _ERRORS[status],
            "content": {"application/json": {"schema": _ERROR}},
        }
        for status in statuses
    }


Body = TypeVar("Body", bound=BaseModel)
_ALWAYS: Final = (401, 403)
_POST: Final = _responses(400, *_ALWAYS, 404, 408, 413, 415, 429, 503)


def program_version() -> str:
    """Return the version of the program; a checkout that is not installed has none."""
    try:
        return installed_version("tightfit")
    except PackageNotFoundError:
        return "not installed"


class Server:
    """The answers of one server.

    Args:
        settings: Bounds and names.
        names: The model's names, the first in answers.
        link: To the engine.
        lifecycle: Where the server stands.
    """

    def __init__(
        self,
        settings: ServerSettings,
        names: Sequence[str],
        link: EngineLink,
        lifecycle: Lifecycle,
    ) -> None:
        self._settings, self._names, self._link = settings, list(names), link
        self._lifecycle, self._created = lifecycle, int(time())
        self._bodies = Bodies(settings)
        self.num_requests = 0
        """Requests to the model that are being answered."""
        self._metrics = Metrics(
            self._names[0], lambda: link.counts, self._cache_facts, self._memory_facts
        )

    # What needs no engine.

    async def health(self) -> Response:
        """Whether requests are taken: 200, or 503 with the state."""
        status = 200 if self._lifecycle.state == "ready" else 503
        headers = {"Retry-After": "1"} if status == 503 else {}
        return JSONResponse(self._lifecycle.to_dict(), status, headers)

    async def ping(self) -> Response:
        """Whether the server lives, whatever its engine does."""
        return JSONResponse({"status": "ok"})

    async def version(self) -> Response:
        """The version of the program."""
        return JSONResponse({"version": program_version()})

    async def load(self) -> Response:
        """How many requests to the model are being answered."""
        return JSONResponse({"server_load": self.num_requests})

    async def info(self) -> Response:
        """What is in force: device, placements of weights, memory, KV cache; 503 until ready."""
        ready = self._ready()
        return JSONResponse(
            {
                "model": self._names[0],
                "max_num_seqs": ready.max_num_seqs,
                **ready.facts,
                "memory": ready.memory,
            }
        )

    async def metrics(self) -> Response:
        """Figures in Prometheus' text format."""
        return PlainTextResponse(
            self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def models(self) -> Response:
        """The names of the model."""
        return JSONResponse({"object": "list", "data": [self._card(x) for x in self._names]})

    async def model(self, model: str) -> Response:
        """One name of the model."""
        self._check_model(model)
        return JSONResponse(self._card(model))

    def _card(self, name: str) -> dict[str, Any]:
        ready = self._link.ready
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "tightfit",
            "root": self._names[0],
            "max_model_len": None if ready is None else ready.max_model_len,
        }

    def _cache_facts(self) -> dict[str, Any]:
        ready = self._link.ready
        if ready is None:
            return {}
        return {
            name: ready.facts[name]
            for name in ("block_size", "num_gpu_blocks", "max_model_len", "backend")
        }

    def _memory_facts(self) -> dict[str, Any]:
        ready = self._link.ready
        return {} if ready is None else ready.memory

    # What does.

    async def completions(self, request: Request) -> Response:
        """Continue prompts."""
        return await self._with_body(request, CompletionRequest, self._complete)

    async def chat(self, request: Request) -> Response:
        """Answer a chat."""
        return await self._with_body(request, ChatRequest, self._chat)

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a prompt or a chat."""
        return await self._with_body(request, TokenizeRequest, self._tokenize)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens."""
        return await self._with_body(request, DetokenizeRequest, self._detokenize)

    async def _with_body(
        self,
        request: Request,
        kind: type[Body],
        answer: Callable[[Body, Ready], Awaitable[Response]],
    ) -> Response:
        ready = self._ready()
        body = await self._bodies.read(request)
        self.num_requests += 1
        try:
            asked = parsed(body, kind)
            if (name := getattr(asked, "model", None)) is not None:
                self._check_model(name)
            response = await answer(asked, ready)
        except BaseException:
            self.release(len(body))
            raise
        return _Held(response, self, len(body))

    def _ready(self) -> Ready:
        if self._lifecycle.state != "ready" or self._link.ready is None:
            raise not_ready(self._lifecycle.state)
        return self._link.ready

    def _check_model(self, name: str) -> None:
        if name not in self._names:
            raise APIError(
                404,
                f"model: expected {' or '.join(self._names)}, got {shown(name)}.",
                param="model",
                code="model_not_found",
            )

    def _check_room(self, ready: Ready, num_answers: int) -> None:
        """Raise APIError where the queue is full."""
        most = ready.max_num_seqs + self._settings.max_num_queued_reqs
        num_open = self._link.num_open
        if num_open and num_open + num_answers > most:
            raise overloaded(
                f"the queue: expected at most {most} answers that run or wait, got {num_open} and "
                f"{num_answers} more. Try again later."
            )

    async def _complete(self, asked: CompletionRequest, ready: Ready) -> Response:
        params = asked.to_params(ready.sampling_defaults)
        self._check_room(ready, len(asked.prompts) * params.n)
        common = {
            "with_usage": asked.wants_usage,
            "running_usage": asked.wants_running_usage,
            "with_ids": bool(asked.return_token_ids),
            "with_logprobs": asked.logprobs is not None,
        }
        shape = CompletionShape(
            self._names[0],
            len(asked.prompts),
            params.n,
            best=(asked.n or 1) if asked.best_of else None,
            echo=asked.prompts if asked.echo else None,
            **common,
        )

        def make(prompt: Prompt, name: str) -> Submit:
            return Submit(
                request_id=name,
                prompt=prompt,
                params=params,
                priority=asked.priority or 0,
                room=asked.max_tokens is None,
                wants_text=bool(asked.echo),
                add_special_tokens=asked.add_special_tokens is not False,
            )

        makes = [partial(make, prompt) for prompt in asked.prompts]
        return self._generated(asked, shape, makes, params.n, asked.max_tokens)

    async def _chat(self, asked: ChatRequest, ready: Ready) -> Response:
        chat = self._rendered(asked, ready)
        params = asked.to_params(ready.sampling_defaults)
        is_forced = asked.forced_tools() is not None
        may_call = chat.tools and params.structured is None  # a form leaves no room for calls
        self._check_room(ready, params.n)
        parser = self._settings.tool_call_parser
        parser = ready.tool_parser if parser == "auto" else parser
        shape = ChatShape(
            self._names[0],
            1,
            params.n,
            num_top=asked.top_logprobs or 0,
            tool_parser="forced" if is_forced else parser if may_call else "none",
            only_one_call=asked.parallel_tool_calls is False,
            with_usage=asked.wants_usage,
            running_usage=asked.wants_running_usage,
            with_ids=bool(asked.return_token_ids),
            with_logprobs=bool(asked.logprobs),
        )

        def make(name: str) -> Submit:
            return Submit(
                request_id=name,
                prompt=chat,
                params=params,
                priority=asked.priority or 0,
                form_name=asked.form_name,
                room=asked.limit is None,
            )

        return self._generated(asked, shape, [make], params.n, asked.limit)

    def _rendered(self, asked: ChatRequest | TokenizeRequest, ready: Ready) -> Chat:
        if not ready.has_chat_template:
            raise bad_value(
                "messages",
                "messages: expected a model with a chat template, got one without. Send the prompt "
                "to /v1/completions, or start the server with --chat-template FILE.",
            )
        tools = plain_tools(asked)
        if tools and not ready.takes_tools:
            raise unsupported("tools", "calling tools with this model's chat template")
        extra = asked.chat_template_kwargs or {}
        if taken := RESERVED & extra.keys():
            raise bad_value(
                "chat_template_kwargs",
                f"chat_template_kwargs: expected variables of the template, got {min(taken)}, "
                "which the server sets. Remove it.",
            )
        return Chat(
            messages=plain_messages(asked.messages or []),
            tools=tools,
            add_generation_prompt=asked.add_generation_prompt is not False,
            continue_final_message=bool(asked.continue_final_message),
            extra=extra,
        )

    def _generated(
        self,
        asked: CompletionRequest | ChatRequest,
        shape: Shape,
        makes: Sequence[Callable[[str], Submit]],
        n: int,
        max_tokens: int | None,
    ) -> Response:
        return Generated(
            self._link,
            makes,
            shape,
            self._metrics,
            limits=(n, max_tokens),
            prompts=_told(asked) if self._settings.log_prompts else None,
            is_stream=bool(asked.stream),
            with_usage=asked.wants_usage,
            write_timeout_s=self._settings.write_timeout_s,
        )

    async def _tokenize(self, asked: TokenizeRequest, ready: Ready) -> Response:
        text = asked.prompt
        prompt: Prompt = self._rendered(asked, ready) if text is None else text
        ids, texts = await self._link.call(
            lambda name: Tokenize(
                request_id=name,
                prompt=prompt,
                add_special_tokens=asked.add_special_tokens is not False,
                with_texts=bool(asked.return_token_strs),
            )
        )
        return JSONResponse(
            {
                "count": len(ids),
                "max_model_len": ready.max_model_len,
                "tokens": ids,
                "token_strs": texts,
            }
        )

    async def _detokenize(self, asked: DetokenizeRequest, ready: Ready) -> Response:
        del ready
        text = await self._link.call(lambda name: Detokenize(name, asked.tokens))
        return JSONResponse({"prompt": text})

    def release(self, num_bytes: int) -> None:
        """Count a request to the model, and what its body holds, no longer."""
        self._bodies.release(num_bytes)
        self.num_requests -= 1


def _told(asked: CompletionRequest | ChatRequest) -> Any:
    """Return what a request asked, for the log."""
    return asked.messages if isinstance(asked, ChatRequest) else asked.prompt


class _Held(Response):
    """A response whose request counts, with its body, until it has ended."""

    def __init__(self, inner: Response, server: Server, num_bytes: int) -> None:
        super().__init__()
        self._inner, self._server, self._num_bytes = inner, server, num_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self._inner(scope, receive, send)
        finally:
            self._server.release(self._num_bytes)


def make_app(server: Server, settings: ServerSettings, keys: Sequence[str]) -> Guard:
    """Return the application of a server, with its guard around it."""
    app = FastAPI(
        title="Tightfit",
        version=program_version(),
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
        exception_handlers={
            APIError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _left,
            Exception: _server_error,
        },
    )
    get: dict[str, tuple[Callable[..., Any], dict[int | str, Any]]] = {
        "/health": (server.health, _responses(403)),
        "/ping": (server.ping, _responses(403)),
        "/version": (server.version, _responses(*_ALWAYS)),
        "/load": (server.load, _responses(*_ALWAYS)),
        "/info": (server.info, _responses(*_ALWAYS, 503)),
        "/metrics": (server.metrics, _responses(*_ALWAYS)),
        "/v1/models": (server.models, _responses(*_ALWAYS)),
        "/v1/models/{model:path}": (server.model, _responses(*_ALWAYS, 404)),
    }
    get["/health"][1][503] = {"description": "Not ready; the body says why."}
    for path, (answer, responses) in get.items():
        app.add_api_route(path, answer, methods=["GET"], responses=responses)
    for path in LIVENESS:
        app.add_api_route(path, get[path][0], methods=["HEAD"], include_in_schema=False)
    post: dict[str, tuple[Callable[..., Any], type[BaseModel]]] = {
        "/v1/completions": (server.completions, CompletionRequest),
        "/v1/chat/completions": (server.chat, ChatRequest),
        "/tokenize": (server.tokenize, TokenizeRequest),
        "/detokenize": (server.detokenize, DetokenizeRequest),
    }
    for path, (answer, model) in post.items():
        schema = model.model_json_schema()
        app.add_api_route(
            path,
            answer,
            methods=["POST"],
            responses=_POST,
            openapi_extra={
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": _inlined(schema)}},
                }
            },
        )
    app.add_api_route("/docs", partial(_docs, app), methods=["GET"], include_in_schema=False)
    return Guard(app, settings, keys)


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with its definitions in their places."""
    known = schema.pop("$defs", {})

    def replace(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return replace(known[node["$ref"].rpartition("/")[2]])
            return {name: replace(value) for name, value in node.items()}
        return [replace(item) for item in node] if isinstance(node, list) else node

    found: dict[str, Any] = replace(schema)
    return found


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return JSONResponse(error.body(), error.status, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Return the refusal of a path or method that there is not."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        found = APIError(
            404, f"there is no {request.method} {path} here.", code="unsupported_endpoint"
        )
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        found = APIError(
            405,
            f"{path}: expected {allowed}, got {request.method}.",
            code="method_not_allowed",
            headers=dict(error.headers or {}),
        )
    else:
        found = APIError(error.status_code, str(error.detail))
    return JSONResponse(found.body(), found.status, found.headers)


async def _left(_: Request, __: Exception) -> Response:
    """Answer a client that left amid its body; nobody reads it."""
    return Response(status_code=400)


async def _server_error(_: Request, error: Exception) -> Response:
    found = APIError(500, f"the server failed: {type(error).__name__}.", code="internal_error")
    # The connection ends, as the error goes on to the front's log.
    return JSONResponse(found.body(), 500, {"Connection": "close"})


_PAGE: Final = """<!doctype html><meta charset="utf-8"><title>Tightfit</title>
<style>body{font:16px/1.5 system-ui;margin:2em auto;max-width:50em;padding:0 1em}
pre{background:#f4f4f4;padding:1em;overflow:auto}td{padding:.2em 1em .2em 0}</style>
<h1>Tightfit</h1><p>The API of OpenAI's clients; <a href="/openapi.json">openapi.json</a> has every
field.</p><table>%s</table>
"""


async def _docs(app: FastAPI) -> Response:
    """Return a page of the routes, which needs nothing from elsewhere."""
    rows = "".join(
        f"<tr><td>{method.upper()}</td><td><code>{path}</code></td>"
        f"<td>{route.get('description', '')}</td></tr>"
        for path, routes in app.openapi()["paths"].items()
        for method, route in routes.items()
    )
    return Response(_PAGE % rows, media_type="text/html")
