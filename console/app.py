"""The console's application: its API below /api, the pages, and who may ask."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import urlsplit

import httpx
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict
from starlette.background import BackgroundTask
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from catalogue.checkpoint import ModelUnavailableError
from console import stream
from console.page.runs import Runs
from console.page.sources import Sources
from console.page.views import Pages
from console.registry.checks import BusyError, FieldError
from console.registry.database import Database, RegistryError
from console.registry.holdings import Holdings
from console.registry.models import Models
from console.registry.results import PAGE, Results
from console.registry.tables import MOST_ID, Model, Profile, TestRun
from console.settings import ConsoleSettings
from console.testing.export import as_csv, as_json
from console.verdicts import Verdicts
from engine.errors import ConfigError
from server.body import Bodies, parsed
from server.errors import APIError
from server.flags import as_flags
from server.guard import Guard
from server.settings import API_KEY_VARIABLE

SAFE: Final = ("GET", "HEAD", "OPTIONS")
CHAT_S: Final = httpx.Timeout(600.0, connect=5.0)
UNSENT: Final = "history"
"""Of the machine: too long for a stream; the snapshot has it."""
Body = TypeVar("Body", bound=BaseModel)


class Job(Protocol):
    """What a submitted action became."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""


class Supervisor(Protocol):
    """What the application needs of the supervisor."""

    def snapshot(self) -> dict[str, Any]:
        """Return the state of everything as plain data."""

    def feed(self) -> AsyncIterator[Any]:
        """Yield at once, and again after each change."""

    async def submit(self, action: str, **arguments: Any) -> Job:
        """Begin a job."""

    def log(self, service_id: int, after: str | None) -> tuple[list[dict[str, str]], str]:
        """Return lines of a service's log, and where later ones begin."""

    def base_url(self, service_id: int | None) -> str | None:
        """Return where a ready service listens; None: there is none."""


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Nothing(_Asked):
    """No arguments."""


class NewModel(_Asked):
    """A model that is to be added."""

    source: str
    name: str | None = None
    revision: str | None = None
    settings: dict[str, Any] = {}


class Plan(_Asked):
    """Settings that are to be planned."""

    source: str | None = None
    model_id: int | None = None
    settings: dict[str, Any] = {}


class ChangedModel(_Asked):
    """A change of a profile; settings that are null become open."""

    profile: str | None = None
    is_default: bool = False
    settings: dict[str, Any] = {}


class Removal(_Asked):
    """A model's removal: its name, and whether its files go as well."""

    confirm: str
    files: bool = False


class NewTest(_Asked):
    """A test of one profile."""

    profile_id: int
    num_requests: int = 100
    stop_service: bool = False


class NewComparison(_Asked):
    """A test of two profiles in turns."""

    profile_a_id: int
    profile_b_id: int
    num_requests: int = 100
    stop_service: bool = False


class NewSweep(_Asked):
    """A test of every profile of a model."""

    model_id: int
    num_requests: int = 100
    stop_service: bool = False


class Switch(_Asked):
    """The profile that a service is to serve."""

    profile_id: int


class ChangedService(_Asked):
    """A change of a service: one of them."""

    auto_restart: bool | None = None
    max_model_len: int | None = None
    port: int | None = None


class Console:
    """The routes of the API.

    Args:
        supervisor: of services and tests.
        database: of the registry.
        settings: of the console.
        home: TIGHTFIT_HOME.
        verdicts: on settings.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        database: Database,
        settings: ConsoleSettings,
        home: Path,
        verdicts: Verdicts,
    ) -> None:
        self._supervisor, self._database, self._settings = supervisor, database, settings
        self._models, self._results = Models(database), Results(database)
        self._holdings, self._runs = Holdings(database), Runs(home)
        self._bodies = Bodies(settings)
        self._verdicts = verdicts
        self.client = httpx.AsyncClient(timeout=CHAT_S, trust_env=False)

    async def close(self) -> None:
        """Let go of connections."""
        await self.client.aclose()

    def routes(self) -> Sequence[tuple[str, str, Callable[..., Any]]]:
        """Return method, path and what answers."""
        one, test, service = (
            f"/api/{name}/{{{key}:int}}"
            for name, key in (
                ("models", "model_id"),
                ("tests", "test_id"),
                ("services", "service_id"),
            )
        )
        acts = ("start", "stop", "restart", "reset")
        return (
            ("GET", "/health", self.health),
            ("GET", "/api/snapshot", self.snapshot),
            ("GET", "/api/events", self.events),
            ("GET", "/api/models", self.models),
            ("POST", "/api/models", self.add),
            ("POST", "/api/models/scan", self.scan),
            ("GET", one, self.model),
            ("PATCH", one, self.change_model),
            ("DELETE", one, self.delete),
            ("POST", f"{one}/download", self.download),
            ("POST", "/api/plan", self.plan),
            ("GET", "/api/tests", self.tests),
            ("POST", "/api/tests", self.test),
            ("POST", "/api/ab", self.compare),
            ("POST", "/api/sweep", self.sweep),
            ("POST", f"{test}/cancel", self.cancel),
            ("GET", f"{test}.csv", self.csv),
            ("GET", f"{test}.json", self.json),
            ("GET", "/api/runs", self.runs),
            *(("POST", f"{service}/{name}", self._act(name)) for name in acts),
            ("POST", f"{service}/switch", self.switch),
            ("PATCH", service, self.change_service),
            ("GET", "/api/logs/{service_id:int}", self.log),
            ("POST", "/api/chat", self.chat),
        )

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        body = await self._bodies.read(request)
        try:
            return parsed(body or b"{}", kind)
        finally:
            self._bodies.release(len(body))

    async def _submit(self, action: str, **arguments: Any) -> Response:
        job = await self._supervisor.submit(action, **arguments)
        return JSONResponse({"job": job.to_dict()}, 202)

    # What is asked.

    async def health(self) -> Response:
        """Say that the console lives."""
        return JSONResponse({"state": "ready"})

    def snapshot(self) -> Response:
        """Return everything that the supervisor knows."""
        return JSONResponse(self._supervisor.snapshot())

    async def events(self) -> Response:
        """Return the snapshot and its changes as a stream."""

        def live() -> dict[str, Any]:
            found = self._supervisor.snapshot()
            machine = found.get("machine") or {}
            short = {name: value for name, value in machine.items() if name != UNSENT}
            return {**found, "machine": short}

        return stream.respond(live, self._supervisor.feed())

    def models(self) -> Response:
        """Return all models."""
        return JSONResponse({"models": [_plain(each) for each in self._models.list()]})

    def model(self, model_id: int) -> Response:
        """Return a model with its profiles and what was measured last."""
        row = self._model(model_id)
        measured = self._results.performance(model_id)
        return JSONResponse(_plain(row) | {"measured": [each.to_dict() for each in measured]})

    def tests(self, before: int | None = None) -> Response:
        """Return a page of tests, the last first."""
        rows = self._results.runs(before_id=before, limit=PAGE)
        return JSONResponse({"tests": [each.to_dict() for each in rows]})

    def csv(self, test_id: int) -> Response:
        """Return a test's figures as a table."""
        return self._file(test_id, "csv", "text/csv; charset=utf-8", as_csv)

    def json(self, test_id: int) -> Response:
        """Return a test as one document."""
        return self._file(test_id, "json", "application/json", as_json)

    def _file(
        self, test_id: int, suffix: str, kind: str, text: Callable[[Database, int], str]
    ) -> Response:
        self._row(TestRun, test_id, "test")
        name = f'attachment; filename="test-{test_id}.{suffix}"'
        return Response(
            text(self._database, test_id),
            media_type=kind,
            headers={"Content-Disposition": name},
        )

    def runs(self, start: int = 0, q: str = "") -> Response:
        """Return a page of the runs of TIGHTFIT_HOME, the newest first."""
        found = self._runs.page(max(0, start), q)
        return JSONResponse({"runs": found.rows, "start": found.start, "total": found.total})

    def log(self, service_id: int, after: str | None = None) -> Response:
        """Return lines of a service's log."""
        lines, then = self._supervisor.log(service_id, after)
        return JSONResponse({"lines": lines, "after": then})

    async def plan(self, request: Request) -> Response:
        """Say whether settings fit, and what they cost."""
        asked = await self._read(request, Plan)
        found = await asyncio.to_thread(
            self._verdicts.ask, asked.settings, source=asked.source, model_id=asked.model_id
        )
        return JSONResponse(found)

    # What changes something.

    async def add(self, request: Request) -> Response:
        """Add a model."""
        asked = await self._read(request, NewModel)
        row = await asyncio.to_thread(
            self._models.add,
            asked.source,
            name=asked.name,
            revision=asked.revision,
            settings=asked.settings,
        )
        return JSONResponse(_plain(row), 201)

    async def scan(self, request: Request) -> Response:
        """Compare the registry with the disk."""
        await self._read(request, Nothing)
        return JSONResponse(vars(await asyncio.to_thread(self._holdings.scan)))

    async def change_model(self, request: Request, model_id: int) -> Response:
        """Change a profile, or make one."""
        asked = await self._read(request, ChangedModel)
        self._model(model_id)
        await asyncio.to_thread(
            self._models.set_profile,
            model_id,
            asked.profile,
            asked.settings,
            make_default=asked.is_default,
        )
        return JSONResponse(_plain(self._model(model_id)))

    async def delete(self, request: Request, model_id: int) -> Response:
        """Remove a model, whose name must be given."""
        asked = await self._read(request, Removal)
        row = self._model(model_id)
        if asked.confirm != row.name:
            raise FieldError(
                "confirm", f"confirm: expected the model's name, {row.name}, to delete it."
            )
        return await self._submit("delete", model_id=model_id, keep_files=not asked.files)

    async def download(self, request: Request, model_id: int) -> Response:
        """Download a model."""
        await self._read(request, Nothing)
        self._model(model_id)
        return await self._submit("download", model_id=model_id)

    async def test(self, request: Request) -> Response:
        """Measure a profile."""
        asked = await self._read(request, NewTest)
        self._row(Profile, asked.profile_id, "profile_id")
        return await self._submit("test", **_sizes(asked), profile_id=asked.profile_id)

    async def compare(self, request: Request) -> Response:
        """Compare two profiles of a model."""
        asked = await self._read(request, NewComparison)
        a = self._row(Profile, asked.profile_a_id, "profile_a_id")
        b = self._row(Profile, asked.profile_b_id, "profile_b_id")
        if a.model_id != b.model_id:
            raise FieldError(
                "profile_b_id", "profile_b_id: expected another profile of the same model."
            )
        return await self._submit("ab", **_sizes(asked), profile_a_id=a.id, profile_b_id=b.id)

    async def sweep(self, request: Request) -> Response:
        """Measure every profile of a model."""
        asked = await self._read(request, NewSweep)
        self._model(asked.model_id)
        return await self._submit("sweep", **_sizes(asked), model_id=asked.model_id)

    async def cancel(self, request: Request, test_id: int) -> Response:
        """End a test."""
        await self._read(request, Nothing)
        self._row(TestRun, test_id, "test")
        return await self._submit("cancel_test", test_id=test_id)

    def _act(self, action: str) -> Callable[..., Awaitable[Response]]:
        async def act(request: Request, service_id: int) -> Response:
            await self._read(request, Nothing)
            return await self._submit(action, service_id=service_id)

        act.__doc__ = f"{action.capitalize()} a service."
        return act

    async def switch(self, request: Request, service_id: int) -> Response:
        """Serve another profile."""
        asked = await self._read(request, Switch)
        self._row(Profile, asked.profile_id, "profile_id")
        return await self._submit("switch", service_id=service_id, profile_id=asked.profile_id)

    async def change_service(self, request: Request, service_id: int) -> Response:
        """Change a service's context window or port, or whether it is started again by itself."""
        asked = await self._read(request, ChangedService)
        given = asked.model_dump(exclude_none=True)
        actions = {
            "auto_restart": "set_auto_restart",
            "max_model_len": "set_context",
            "port": "set_port",
        }
        if len(given) != 1:
            raise FieldError(
                "auto_restart", f"the body: expected one of {', '.join(actions)}, got {len(given)}."
            )
        (name,) = given
        return await self._submit(actions[name], service_id=service_id, **given)

    async def chat(self, request: Request) -> Response:
        """Pass a chat on to the service that is ready, and its answer back."""
        body = await self._bodies.read(request)
        try:
            url = self._supervisor.base_url(None)
            if url is None:
                raise APIError(503, "no model is ready. Start one first.", code="not_ready")
            async with AsyncExitStack() as opened:
                answer = await opened.enter_async_context(
                    self.client.stream(
                        "POST",
                        f"{url}/v1/chat/completions",
                        content=body,
                        headers={"Content-Type": "application/json", **_key_of_servers()},
                    )
                )
                closing = opened.pop_all()
        except httpx.HTTPError as error:
            raise APIError(
                503, f"the server does not answer ({error!r}).", code="engine_failed"
            ) from error
        finally:
            self._bodies.release(len(body))
        return StreamingResponse(
            answer.aiter_raw(),
            answer.status_code,
            media_type=answer.headers.get("content-type"),
            headers=stream.HEADERS,
            background=BackgroundTask(closing.aclose),
        )

    # Rows by their ids.

    def _model(self, model_id: int) -> Model:
        self._row(Model, model_id, "model")
        return self._models.get(model_id)

    def _row(self, table: type[Any], row_id: int, name: str) -> Any:
        with self._database.read() as session:
            found = session.get(table, row_id) if row_id <= MOST_ID else None
        if found is None:
            raise APIError(404, f"{name}: there is none with the id {row_id}.", param=name)
        return found


def _key_of_servers() -> dict[str, str]:
    """Return the header with the key that servers take from the environment, as this one does."""
    key = os.environ.get(API_KEY_VARIABLE, "").strip()
    return {"Authorization": f"Bearer {key}"} if key else {}


def _sizes(asked: NewTest | NewComparison | NewSweep) -> dict[str, Any]:
    return {"num_requests": asked.num_requests, "stop_service": asked.stop_service}


def _plain(row: Model) -> dict[str, Any]:
    return row.to_dict() | {"profiles": [each.to_dict() for each in row.profiles]}


class SameOrigin:
    """Refuses changes that another site's page asks a browser for.

    The body of a change is JSON, which such a page cannot send unasked; where a browser says whose
    page asks, that must be this console's.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http" and scope["method"] not in SAFE:
            headers = Headers(scope=scope)
            origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
            is_foreign = origin is not None and urlsplit(origin).netloc != headers.get("host")
            if is_foreign or site not in {"same-origin", "none"}:
                error = APIError(
                    403,
                    "Origin: expected a page of this console, or no page.",
                    code="foreign_origin",
                )
                await _answer(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def make_app(
    console: Console, sources: Sources, settings: ConsoleSettings, keys: Sequence[str]
) -> Guard:
    """Return the application of the console, with its guard around it."""
    app = FastAPI(
        title="Tightfit console",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        exception_handlers={
            APIError: _on_error,
            ConfigError: _on_error,
            ModelUnavailableError: _on_error,
            LookupError: _on_error,
            RegistryError: _on_error,
            HTTPException: _on_error,
            RequestValidationError: _on_error,
            ClientDisconnect: _on_error,
            Exception: _on_error,
        },
    )
    for method, path, answer in console.routes():
        app.add_api_route(path, answer, methods=[method], response_model=None)
    pages = Pages(sources)
    app.include_router(pages.router())
    app.state.pages = pages
    return Guard(SameOrigin(app), settings, keys, is_for_browsers=True)


def _answer(error: APIError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers)


async def _on_error(request: Request, error: Exception) -> Response:
    found = _as_api_error(request, error)
    wants_page = "text/html" in request.headers.get("accept", "")
    if wants_page and request.method == "GET" and not request.url.path.startswith("/api/"):
        pages: Pages = request.app.state.pages
        title = "No such page" if found.status == 404 else "That did not work"
        page: Response = await asyncio.to_thread(pages.missing, title, found.message, found.status)
        return page
    return _answer(found)


def _as_api_error(request: Request, error: Exception) -> APIError:
    path = request.url.path
    match error:
        case APIError():
            found = error
        case FieldError():
            status, code = (409, "busy") if isinstance(error, BusyError) else (400, "invalid_value")
            found = APIError(status, str(error), param=error.field, code=code)
        case ConfigError() | ModelUnavailableError():
            found = APIError(400, as_flags(str(error)), code="invalid_value")
        case RequestValidationError():
            first = error.errors()[0]
            name = str(first["loc"][-1])
            text = f"{name}: expected an integer, got {first['input']!r}."
            found = APIError(400, text, param=name, code="invalid_value")
        case RegistryError():
            found = APIError(503, str(error), code="registry_failed")
        case HTTPException(status_code=405):
            found = APIError(405, f"{request.method} does not go with {path}.", code="method")
        case HTTPException(status_code=status):
            text = f"there is no {path} here." if status == 404 else str(error.detail)
            found = APIError(status, text, code="not_found" if status == 404 else None)
        case LookupError():
            found = APIError(404, str(error.args[0] if error.args else error), code="not_found")
        case _:
            found = APIError(500, f"the console failed: {error!r}", code="console_failed")
    return found
