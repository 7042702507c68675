"""The choice of a system, from the command line to its door; peers that are stepped also serve."""

import dataclasses
import time

import pytest

from engine.errors import ConfigError
from harness.config.compose import Composer
from harness.config.engine import check_settings
from harness.config.schema import ModelNode, ScenarioConfig, SystemConfig
from harness.config.serve import Arrivals
from harness.point.describe import flat_params, point_name, tags
from harness.systems.door import peer_door
from harness.systems.http_engine import HTTPDoor
from harness.systems.vllm_engine import load_code
from harness.worker import Work, door_for
from tests.harness.cases import attempt, run_config
from tests.harness.systems.test_vllm import config
from tests.harness.systems.vllm_stand_in import install
from tests.harness.test_worker import job
from tests.harness.work.traffic.cases import serve

HTTP = SystemConfig(kind="http", base_url="http://localhost:1/v1")


def composed(*overrides):
    (point,) = Composer().plan([*overrides, "tracking=none"]).points
    return point.config


def test_a_system_is_chosen_on_the_command_line():
    assert composed("model=glass").system == SystemConfig()
    assert composed("model=glass", "system=accelerate").system.kind == "accelerate"
    found = composed(
        *("model=glass", "system=http", "system.base_url=http://localhost:1/v1"),
        *("system.served_model=m", "scenario.load=null"),
    )
    assert found.system.served_model == "m"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["system=http", "scenario.load=null"], "system.base_url: expected the address"),
        (["system=vllm", "system.base_url=http://a"], "system.base_url: expected null"),
        (["system=accelerate", "offload=prefetch"], "offload.prefetch.offload_group_size"),
        (["system=vllm", "gpu.host_gib=8"], "gpu.host_gib: expected null with system=vllm"),
    ],
)
def test_a_choice_that_cannot_be_is_refused_before_anything_runs(overrides, words):
    with pytest.raises(ConfigError, match=words):
        composed("model=glass", *overrides)


def test_settings_are_held_against_the_system_too():
    with pytest.raises(ConfigError, match=r"scenario\.correctness\.enabled"):
        check_settings(run_config(system=HTTP))


def test_every_kind_has_a_door():
    assert door_for(job()).is_exact
    for kind in ("accelerate", "vllm"):
        assert not door_for(job(system=SystemConfig(kind=kind))).is_exact
    door = door_for(job(system=HTTP))
    assert door.open_async is HTTPDoor
    assert door.probe(None) == {}


def test_names_parameters_and_tags_say_the_system():
    peer = run_config(system=SystemConfig(kind="vllm"))
    assert point_name(peer, [], None) == "tiny-vllm-none-cpu-test"
    assert point_name(run_config(), [], None) == "tiny-none-cpu-test"
    assert flat_params(peer)["system"] == "vllm"
    assert tags(peer, {})["system"] == "vllm"


@pytest.mark.parametrize(
    ("changes", "load_format", "why"),
    [
        ({}, "dummy", None),
        ({"kind": "vllm"}, "dummy", "dummy weights of two systems differ"),
        ({"kind": "vllm"}, "auto", None),
        ({"kind": "http", "base_url": "http://h/v1", "api": "chat"}, "auto", "template"),
    ],
)
def test_tokens_are_compared_where_prompts_and_weights_are_the_same(changes, load_format, why):
    model = ModelNode(name="tiny", path="/weights", load_format=load_format)
    asked = run_config(system=SystemConfig(**changes), model=model)
    tried = attempt(asked)
    assert tried._is_comparable() == (why is None)
    assert len(tried.findings.notes) == (why is not None)
    assert why is None or why in tried.findings.notes[0]


def test_a_peer_that_is_stepped_serves_a_schedule(monkeypatch, tmp_path):
    install(monkeypatch)
    load = serve(num_requests=6, warmup_requests=1, arrivals=Arrivals(process="at_once"))
    door = dataclasses.replace(peer_door(load_code), probe=lambda config: {})
    task = job(
        system=SystemConfig(kind="vllm"),
        engine=config(),
        scenario=ScenarioConfig(name="serve", serve=load),
    )
    result = Work(task, tmp_path, door, spawned_s=time.perf_counter()).run()
    assert result["status"] == "ok", result["error"]
    assert result["samples"]["serve"]["num_completed"] == 6
