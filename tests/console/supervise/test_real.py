"""The server itself as a child, with a tiny model."""

import asyncio
from pathlib import Path

import httpx
import psutil
import pytest

from catalogue.processes import module_command
from console.registry.database import Database
from tests.console.supervise.conftest import add_model, main_of, serve, supervising, until
from tests.server.launch import write_model

SETTINGS = {
    "device": "cpu",
    "load_format": "dummy",
    "host_reserve_gib": 0.0,
    "gpu_memory_gib": 0.125,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "enable_prefix_caching": False,
}


@pytest.mark.slow
def test_the_server_is_served_and_shown(database: Database, home: Path, tmp_path: Path) -> None:
    async def run() -> None:
        path = write_model(tmp_path / "tiny [1]")
        profile = add_model(database, "", name="tiny", path=path, **SETTINGS)
        command = module_command("server")
        async with supervising(database, home, command=command) as supervisor:
            job = await serve(supervisor, profile)
            assert (job.state, job.reason) == ("done", None)
            found = main_of(supervisor)
            assert found["effective"]["max_num_seqs"] == 8
            assert None not in found["effective"].values()
            url = supervisor.base_url()
            async with httpx.AsyncClient(trust_env=False) as client:
                body = {"model": "tiny", "prompt": "go", "max_tokens": 4}
                answer = await client.post(f"{url}/v1/completions", json=body)
                assert answer.json()["usage"]["completion_tokens"] == 4
            load = await until(
                lambda: (x := main_of(supervisor)["load"]) and x["running"] is not None and x
            )
            unknown = {name for name, value in load.items() if value is None}
            assert unknown <= {"link_share", "prefill_tokens_s", "decode_tokens_s"}
            family = psutil.Process(found["pid"]).children(recursive=True)
            assert family
            await supervisor.wait(await supervisor.submit("stop", service_id=1))
            assert main_of(supervisor)["state"] == "stopped"
            assert not any(process.is_running() for process in family)
        job_log = [line["text"] for line in supervisor.log(1)[0]]
        assert any(line.startswith("ready: serving") for line in job_log)

    asyncio.run(run())


@pytest.mark.slow
def test_what_does_not_fit_fails_with_the_reason(
    database: Database, home: Path, tmp_path: Path
) -> None:
    async def run() -> None:
        path = write_model(tmp_path / "tiny")
        settings = SETTINGS | {"gpu_memory_gib": 0.001}
        profile = add_model(database, "", name="tiny", path=path, **settings)
        command = module_command("server")
        async with supervising(database, home, command=command) as supervisor:
            job = await serve(supervisor, profile)
            found = main_of(supervisor)
            assert (job.state, found["state"], len(found["failures"])) == ("failed", "failed", 1)
            assert "tiny does not fit" in str(job.reason).splitlines()[0]
            assert found["reason"] == job.reason

    asyncio.run(run())
