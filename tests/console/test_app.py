"""The console's API: what it answers, refuses, and lets nobody else do."""

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from catalogue.models import find
from console.app import Console, make_app
from console.page.sources import Sources
from console.registry.checks import BusyError, FieldError
from console.registry.database import Database, RegistryError
from console.registry.tables import Model, Profile, TestRun
from console.settings import ConsoleSettings
from console.verdicts import Verdicts

SETTINGS = ConsoleSettings()


class Job:
    def __init__(self, action: str, arguments: dict[str, Any]) -> None:
        self._told = {"id": 1, "action": action, "arguments": arguments, "state": "queued"}

    def to_dict(self) -> dict[str, Any]:
        return self._told


class Scripted:
    """A supervisor that notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.error: Exception | None = None
        self.url: str | None = None
        self.num_changes = 2

    def snapshot(self) -> dict[str, Any]:
        machine = {"time_s": None, "gpus": [], "ram": {}, "disks": [], "history": [{"time_s": 1}]}
        return {
            "time_s": time.time(),
            "services": [],
            "jobs": [],
            "machine": machine,
            "foreign": [],
        }

    async def feed(self) -> AsyncIterator[None]:
        for _ in range(self.num_changes):
            yield None
            await asyncio.sleep(0)

    async def submit(self, action: str, **arguments: Any) -> Job:
        if self.error is not None:
            raise self.error
        self.asked.append((action, arguments))
        return Job(action, arguments)

    def log(self, service_id: int, after: str | None) -> tuple[list[dict[str, str]], str]:
        if service_id != 1:
            raise LookupError(f"service: there is none with the id {service_id}.")
        return [{"level": "info", "text": f"after {after}"}], "7"

    def base_url(self, service_id: int | None) -> str | None:
        return self.url


@pytest.fixture(scope="module")
def supervisor() -> Scripted:
    return Scripted()


@pytest.fixture
def scripted(supervisor: Scripted) -> Scripted:
    supervisor.__init__()  # type: ignore[misc]  as it was
    return supervisor


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def database(home: Path) -> Iterator[Database]:
    found = Database.open(home / "registry.db")
    spec = find("qwen25_0_5b").spec
    assert spec is not None
    with found.write() as session:
        for number in (1, 2):
            profiles = [Profile(id=10 * number, name="default", is_default=True, settings={})]
            if number == 1:
                profiles.append(Profile(id=11, name="uva", settings={"offload": "uva"}))
            session.add(
                Model(
                    id=number,
                    name=f"model{number}",
                    source="qwen25_0_5b",
                    kind="hub",
                    state="untested",
                    spec=asdict(spec),
                    identity=str(number),
                    profiles=profiles,
                )
            )
        session.add(TestRun(id=5, model_id=1, kind="test", status="finished", settings={}))
    yield found
    found.close()


def client_of(
    scripted: Scripted, database: Database, home: Path, keys: tuple[str, ...] = ()
) -> TestClient:
    verdicts = Verdicts(database)
    console = Console(scripted, database, SETTINGS, home, verdicts)
    sources = Sources(scripted, database, home, verdicts)
    app = make_app(console, sources, SETTINGS, keys)
    return TestClient(app, base_url="http://127.0.0.1:7999", raise_server_exceptions=False)


@pytest.fixture(scope="module")
def whole(supervisor: Scripted, database: Database, home: Path) -> TestClient:
    return client_of(supervisor, database, home)


@pytest.fixture
def client(whole: TestClient, scripted: Scripted) -> TestClient:
    return whole


@pytest.mark.parametrize(
    ("method", "path", "body", "asked"),
    [
        ("POST", "/api/services/3/start", {}, ("start", {"service_id": 3})),
        ("POST", "/api/services/3/stop", {}, ("stop", {"service_id": 3})),
        (
            "POST",
            "/api/services/3/switch",
            {"profile_id": 11},
            ("switch", {"service_id": 3, "profile_id": 11}),
        ),
        (
            "PATCH",
            "/api/services/3",
            {"auto_restart": False},
            ("set_auto_restart", {"service_id": 3, "auto_restart": False}),
        ),
        (
            "PATCH",
            "/api/services/3",
            {"max_model_len": 4096},
            ("set_context", {"service_id": 3, "max_model_len": 4096}),
        ),
        (
            "PATCH",
            "/api/services/3",
            {"port": 8001},
            ("set_port", {"service_id": 3, "port": 8001}),
        ),
        ("POST", "/api/models/1/download", {}, ("download", {"model_id": 1})),
        (
            "DELETE",
            "/api/models/1",
            {"confirm": "model1", "files": True},
            ("delete", {"model_id": 1, "keep_files": False}),
        ),
        (
            "POST",
            "/api/tests",
            {"profile_id": 11, "num_requests": 3},
            ("test", {"profile_id": 11, "num_requests": 3, "stop_service": False}),
        ),
        (
            "POST",
            "/api/ab",
            {"profile_a_id": 10, "profile_b_id": 11, "stop_service": True},
            (
                "ab",
                {"profile_a_id": 10, "profile_b_id": 11, "num_requests": 100, "stop_service": True},
            ),
        ),
        (
            "POST",
            "/api/sweep",
            {"model_id": 1},
            ("sweep", {"model_id": 1, "num_requests": 100, "stop_service": False}),
        ),
        ("POST", "/api/tests/5/cancel", {}, ("cancel_test", {"test_id": 5})),
    ],
)
def test_actions_are_submitted(
    client: TestClient,
    scripted: Scripted,
    method: str,
    path: str,
    body: dict[str, Any],
    asked: tuple[str, dict[str, Any]],
) -> None:
    answer = client.request(method, path, json=body)
    assert answer.status_code == 202, answer.text
    assert answer.json()["job"]["action"] == asked[0]
    assert scripted.asked == [asked]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("DELETE", "/api/models/1", {"confirm": "model2"}, 400, "confirm"),
        ("DELETE", "/api/models/1", {}, 400, "confirm"),
        ("DELETE", "/api/models/77", {"confirm": "x"}, 404, "model"),
        ("DELETE", "/api/models/99999999999999999999999", {"confirm": "x"}, 404, "model"),
        ("POST", "/api/ab", {"profile_a_id": 10, "profile_b_id": 20}, 400, "profile_b_id"),
        ("POST", "/api/ab", {"profile_a_id": 10, "profile_b_id": 99}, 404, "profile_b_id"),
        ("POST", "/api/tests", {"profile_id": "10"}, 400, "profile_id"),
        ("POST", "/api/tests", {"profile_id": 10, "requests": 4}, 400, "requests"),
        ("POST", "/api/tests/9/cancel", {}, 404, "test"),
        ("PATCH", "/api/services/1", {}, 400, "auto_restart"),
        (
            "PATCH",
            "/api/services/1",
            {"auto_restart": True, "max_model_len": 1},
            400,
            "auto_restart",
        ),
        ("PATCH", "/api/models/1", {"settings": {"max_num_seqs": 0}}, 400, "max_num_seqs"),
        (
            "PATCH",
            "/api/models/1",
            {"settings": {"gpu_memory_utilization": 1.01}},
            400,
            "gpu_memory_utilization",
        ),
        ("PATCH", "/api/models/1", {"profile": "a/b", "settings": {}}, 400, "profile"),
        ("POST", "/api/models", {"source": "model1/../../etc"}, 400, "source"),
        ("POST", "/api/models", {"source": ""}, 400, "source"),
        ("POST", "/api/plan", {"settings": {}}, 400, "source"),
        ("GET", "/api/tests/9.csv", None, 404, "test"),
        ("GET", f"/api/models/{10**30}", None, 404, "model"),
        ("GET", "/api/tests?before=x", None, 400, "before"),
        ("GET", "/api/runs?start=1.5", None, 400, "start"),
    ],
)
def test_what_is_wrong_is_refused_with_its_field(
    client: TestClient,
    scripted: Scripted,
    method: str,
    path: str,
    body: Any,
    status: int,
    param: str,
) -> None:
    answer = client.request(method, path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert scripted.asked == []


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BusyError("service", "service: main is loading."), 409, "busy"),
        (FieldError("max_model_len", "max_model_len: too long."), 400, "invalid_value"),
        (LookupError("service: there is none with the id 4."), 404, "not_found"),
        (RegistryError("registry.db: the disk is full."), 503, "registry_failed"),
        (ValueError("a fault"), 500, "console_failed"),
    ],
)
def test_errors_of_jobs_have_one_shape(
    client: TestClient, scripted: Scripted, error: Exception, status: int, code: str
) -> None:
    scripted.error = error
    answer = client.post("/api/services/4/start", json={})
    assert answer.status_code == status
    told = answer.json()["error"]
    assert set(told) == {"message", "type", "param", "code"}
    assert told["code"] == code


PATHS = [
    "/api/models/../../etc/passwd",
    "/api/models/%2e%2e",
    "/api/models/1%2f..",
    "/api/models/x",
]


@pytest.mark.parametrize("path", PATHS)
def test_ids_are_never_paths(client: TestClient, scripted: Scripted, path: str) -> None:
    assert client.request("DELETE", path, json={"confirm": "x"}).status_code in {404, 405}
    assert scripted.asked == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://127.0.0.1:8000"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Origin": "http://127.0.0.1:7999", "Sec-Fetch-Site": "same-origin"}, 202),
        ({}, 202),
    ],
)
def test_another_site_changes_nothing(
    client: TestClient, scripted: Scripted, headers: dict[str, str], status: int
) -> None:
    given = {"Content-Type": "application/json"} | headers
    answer = client.post("/api/services/1/stop", content="{}", headers=given)
    assert answer.status_code == status, answer.text
    assert bool(scripted.asked) == (status == 202)


CHANGES = [
    "/api/services/1/start",
    "/api/services/1/stop",
    "/api/models/scan",
    "/api/models/1/download",
    "/api/tests/5/cancel",
]


@pytest.mark.parametrize("path", CHANGES)
def test_no_get_changes_anything(client: TestClient, scripted: Scripted, path: str) -> None:
    assert client.get(path).status_code in {404, 405}
    assert scripted.asked == []


def test_a_key_is_needed_for_all_but_life(
    scripted: Scripted, database: Database, home: Path
) -> None:
    client = client_of(scripted, database, home, ("secret",))
    assert client.get("/health").status_code == 200
    for path in ("/", "/models", "/static/page.js", "/api/snapshot", "/api/events"):
        answer = client.get(path)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Basic")

    def basic(text: str) -> dict[str, str]:
        return {"Authorization": f"Basic {base64.b64encode(text.encode()).decode()}"}

    assert client.get("/api/snapshot", headers=basic("me:secret")).status_code == 200
    assert client.get("/", headers=basic(":secret")).status_code == 200
    assert client.get("/", headers={"Authorization": "Bearer secret"}).status_code == 200
    for wrong in (basic("secret:"), basic("me:secre"), {"Authorization": "Basic %%%"}):
        assert client.get("/", headers=wrong).status_code == 401


def test_a_body_is_bounded(client: TestClient, scripted: Scripted) -> None:
    answer = client.post("/api/plan", json={"source": "x" * 5_000_000})
    assert answer.status_code == 413
    answer = client.post(
        "/api/plan", content="[" * 100, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400


def test_a_plan_says_verdict_price_and_why(client: TestClient) -> None:
    settings = {"device": "cpu", "gpu_memory_gib": 4, "max_model_len": 1024}
    found = client.post("/api/plan", json={"model_id": 1, "settings": settings}).json()
    assert (found["kind"], found["answer"]) == ("good", "Fits the CPU of this machine"), found
    assert found["price"].startswith("Predicted: about ")
    settings["gpu_memory_gib"] = 0.5
    worse = client.post("/api/plan", json={"model_id": 1, "settings": settings}).json()
    assert worse["kind"] == "warn", worse
    assert worse["answer"].startswith("Does not fit the CPU of this machine as set; fits with --")
    assert worse["why"]


def test_the_stream_has_all_then_changes_without_the_history(client: TestClient) -> None:
    text = client.get("/api/events").text
    assert text.startswith("event: snapshot\ndata: {")
    assert '"history"' not in text
    assert '"history"' in client.get("/api/snapshot").text


def test_lists(client: TestClient) -> None:
    models = client.get("/api/models").json()["models"]
    assert [each["name"] for each in models] == ["model1", "model2"]
    assert [each["name"] for each in models[0]["profiles"]] == ["default", "uva"]
    assert client.get("/api/models/1").json()["measured"] == []
    assert [each["id"] for each in client.get("/api/tests").json()["tests"]] == [5]
    assert client.get("/api/runs").json() == {"runs": [], "start": 0, "total": 0}
    assert client.get("/api/tests/5.json").json()["test"]["id"] == 5
    assert client.get("/api/tests/5.csv").text.startswith("model,test,profile")
    told = client.get("/api/logs/1?after=3").json()
    assert told == {"lines": [{"level": "info", "text": "after 3"}], "after": "7"}
    assert client.get("/api/logs/2").status_code == 404


def test_numbers_of_any_size_are_no_fault(client: TestClient) -> None:
    assert client.get(f"/tests/{10**30}").status_code == 404
    pages = [client.get(f"/api/tests?before={sign}{10**30}") for sign in ("", "-")]
    assert [(page.status_code, bool(page.json()["tests"])) for page in pages] == [
        (200, bool(client.get("/api/tests").json()["tests"])),
        (200, False),
    ]


def test_chat_without_a_model(client: TestClient, scripted: Scripted) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}]}
    answer = client.post("/api/chat", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
    scripted.url = "http://127.0.0.1:1"
    answer = client.post("/api/chat", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")


def test_an_address_that_there_is_not(client: TestClient) -> None:
    assert client.get("/api/nothing").json()["error"]["code"] == "not_found"
    page = client.get("/nothing", headers={"Accept": "text/html"})
    assert page.status_code == 404
    assert page.headers["content-type"].startswith("text/html")
