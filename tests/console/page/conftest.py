"""Pages over a scripted supervisor and a registry with a few models."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from console.page.sources import Sources
from console.page.views import Pages
from console.registry.database import Database
from console.registry.tables import Comparison, Model, Performance, Profile, TestRun
from console.verdicts import Verdicts
from tests.console.page.snapshots import GIB, HOSTILE, snapshot


class Scripted:
    """A supervisor whose snapshot is what a test sets."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        self.is_open = True
        self.is_gone = False

    def snapshot(self) -> dict[str, Any]:
        return self.told

    def log(self, service_id: int, after: str | None) -> tuple[list[dict[str, str]], str]:
        (found,) = [each for each in self.told["services"] if each["id"] == service_id]
        lines = (found.get("log_tail") or "").splitlines()
        return [{"level": line.split()[0].lower(), "text": line} for line in lines], "0"

    async def feed(self) -> AsyncIterator[None]:
        assert not self.is_gone
        while self.is_open:
            yield None
            await asyncio.sleep(0.15)


def fill(database: Database) -> None:
    """Two models, one with a hostile name that some other program wrote, and their tests."""
    now_s = time.time()
    with database.write() as session:
        for number, name in enumerate(("llama31_8b", HOSTILE), start=1):
            profiles = [
                Profile(id=number, name="default", is_default=True, settings={"offload": "auto"}),
                Profile(
                    id=number + 10, name="uva4", settings={"offload": "uva", "cpu_offload_gb": 4}
                ),
            ]
            session.add(
                Model(
                    id=number,
                    name=name,
                    source=name,
                    kind="hub",
                    family="llama",
                    format="bfloat16",
                    num_parameters=8_030_261_248,
                    weights_bytes=int(15 * GIB),
                    max_model_len=131072,
                    state="ready" if number == 1 else "failed",
                    reason=None if number == 1 else f"its {HOSTILE} does not fit",
                    identity=name,
                    profiles=profiles,
                )
            )
        session.flush()
        session.add(
            TestRun(
                id=1,
                model_id=1,
                profile_id=1,
                kind="test",
                num_requests=100,
                status="running",
                progress={"done": 40, "total": 100, "phase": "throughput"},
                started_s=now_s,
            )
        )
        metrics = {"throughput/output_tok_s": 212.5, "latency/tpot_ms": 24.1}
        session.add(
            TestRun(
                id=2,
                model_id=1,
                profile_id=1,
                kind="ab",
                num_requests=100,
                status="finished",
                metrics=metrics,
                settings={"seed": 1},
                environment={"gpu": HOSTILE},
                started_s=now_s - 90,
                ended_s=now_s - 9,
            )
        )
        session.flush()
        session.add(
            Performance(
                model_id=1,
                profile_id=1,
                test_run_id=2,
                card="RTX 4080",
                part="throughput",
                metrics=metrics,
            )
        )
        rows = [
            {
                "metric": "latency/tpot_ms",
                "unit": "ms",
                "a": 24.1,
                "b": 31.0,
                "ratio": 1.286,
                "low": 1.27,
                "high": 1.3,
            },
            {
                "metric": "load/total_s",
                "unit": "s",
                "a": 12.0,
                "b": None,
                "ratio": None,
                "low": None,
                "high": None,
            },
        ]
        session.add(
            Comparison(
                model_id=1,
                test_run_id=2,
                profile_a_id=1,
                profile_b_id=11,
                rows=rows,
                tokens_equal=6400,
                tokens_total=6400,
                verdict="Side b against a: time per output token 1.286 times",
            )
        )


@pytest.fixture
def scripted() -> Scripted:
    return Scripted(snapshot(time.time()))


@pytest.fixture
def database(tmp_path: Path) -> Database:
    found = Database.open(tmp_path / "registry.db")
    fill(found)
    return found


@pytest.fixture
def client(scripted: Scripted, database: Database, tmp_path: Path) -> Iterator[TestClient]:
    app = FastAPI()
    app.include_router(Pages(Sources(scripted, database, tmp_path, Verdicts(database))).router())
    with TestClient(app) as found:
        yield found
    scripted.is_open = False
