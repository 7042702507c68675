"""system=serve: the server gets a point's settings, and is measured like any other."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.asked.config import EngineConfig, EngineSettings, GPUConfig, ModelConfig
from engine.asked.keywords import config_from_keywords
from engine.asked.kv import KVConfig
from engine.errors import ConfigError
from harness.studies import bench_serve
from harness.studies.table import Result
from harness.systems.serve_engine import NOT_SENT, serve_door, settings_of
from harness.work.drive import run_requests
from server.flags import NOT_FLAGS, parse
from tests.harness.cases import SPEC
from tests.server.launch import write_model


def config(folder: Path | str | None, **keywords: Any) -> EngineConfig:
    model = ModelConfig(
        name="tiny", path=None if folder is None else str(folder), load_format="dummy",
        spec=SPEC if folder is None else None,
    )  # fmt: skip
    return EngineConfig(
        model=model,
        gpu=GPUConfig(device="cpu", memory_gib=0.125),
        engine=EngineSettings(max_num_seqs=8, host_reserve_gib=0.0, **keywords),
        kv=KVConfig(enable_prefix_caching=True),
    )


def test_the_server_s_file_says_what_the_point_says(tmp_path: Path) -> None:
    import yaml

    asked = config("/models/tiny", max_model_len=64)
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(settings_of(asked)), encoding="utf-8")
    got = parse(["--config", str(file)])
    again = config_from_keywords(ModelConfig(name="tiny", path=got.model), got.keywords)
    for node in ("gpu", "engine", "kv", "offload", "planner"):
        assert getattr(again, node) == getattr(asked, node)
    assert got.server.served_model_name == ["tiny"]
    with pytest.raises(ConfigError, match="folder"):
        ModelConfig(name="tiny")


def test_what_is_no_flag_of_the_server_is_not_sent() -> None:
    assert set(NOT_FLAGS) < set(NOT_SENT)
    asked = replace(config("/models/tiny"), emulated_kv_tokens=64)
    assert "emulated_kv_tokens" not in settings_of(asked)


@pytest.mark.slow
def test_requests_are_answered_and_the_server_ends(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny")
    told: list[str] = []
    build = serve_door().load_code()
    before = {*psutil.Process().children(recursive=True)}  # of other tests
    llm: Any = build(config(folder), progress=lambda phase, *_: told.append(phase))
    children = {*psutil.Process().children(recursive=True)} - before
    try:
        requests, *_ = run_requests(
            llm, [[1, 2, 3], [4, 5]], 4, clock=time.perf_counter, at_once=True, prefix="r"
        )
        assert [len(request.token_ids) for request in requests] == [4, 4]
        assert llm.effective()["system"] == "serve"
        assert told == ["serve"]
    finally:
        llm.close()
    assert len(children) == 2
    assert not any(child.is_running() for child in children)


def test_a_row_without_its_points_says_so() -> None:
    found = {
        name: Result(title=name, record=None, why="it did not run")
        for name in ("full_alone", "full_http", "rate_alone", "rate_http", "streams_http")
    }
    judged = bench_serve.judge(found)
    assert len(judged.rows) == 4
    assert all("it did not run" in row.figure for row in judged.rows)
