"""Predictions held against measured times: the flow on a CPU, tables, and what counts as good."""

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.asked.offload import OffloadConfig, UVAOffloadConfig
from engine.errors import CapacityError
from engine.plan.memory import MemoryPlan
from engine.plan.planner import plan_memory
from harness.forecast import validate as command
from harness.forecast import validate_engine, validate_worker
from harness.forecast.validate_cases import (
    EngineCase,
    Scale,
    cut_cases,
    full_cases,
    grid_cases,
    read_model,
)
from harness.forecast.validate_engine import measure
from harness.forecast.validate_splits import hand_made
from harness.forecast.validate_worker import Workers
from tests.engine.specs import H200

pytestmark = pytest.mark.slow

SCALE = Scale(
    num_layers=8,
    batches=(1, 16),
    prompt_tokens=256,
    max_model_len=512,
    max_num_seqs=64,
    kv_sequences=16,
)
TINY = ["--device", "cpu", "--models", "glass", "--max-model-len", "64", "--kv-sequences", "4"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "home"))


def run_here(job: EngineCase | str) -> dict[str, Any]:
    return {"h2d_gb_s": 10.0} if isinstance(job, str) else measure(job)


def plan_of(case: EngineCase) -> MemoryPlan:
    assert case.config.model.spec is not None
    return plan_memory(case.config, case.config.model.spec, H200)


@pytest.mark.parametrize("model", ["olmo7b", "mistral_7b", "qwen3_4b", "gemma3_4b"])
def test_cuts_fit_a_scaled_budget_with_room_for_the_batches(model: str) -> None:
    cases = cut_cases(model, SCALE)
    plans = [plan_of(case) for case in cases]
    off = [len(plan.offloaded_layers) for plan in plans]
    assert off[:3] == [0, 6, 6]
    assert off[3] > 0 or model == "gemma3_4b"
    assert min(plan.kv_tokens for plan in plans) >= 16 * 512
    assert len({case.config.gpu.memory_gib for case in cases}) == 2


def test_full_size_engines_fit() -> None:
    assert [plan_of(case).kv_tokens >= 512 for case in full_cases(SCALE)] == [True] * 4


def test_the_twelve_splits_of_a_grid_are_as_small_as_its_budget_lets_them_be() -> None:
    scale = replace(SCALE, batches=(1,), prompt_tokens=64, max_model_len=128)
    cases = grid_cases("mistral_7b", scale, 2, 200, (64, 64))
    assert len(cases) == len({case.name for case in cases}) == 14
    assert [case.num_requests for case in cases] == [0, *[200] * 13]
    auto, *_ = plans = [plan_of(case) for case in cases]
    hand = plans[2:]
    assert all(plan.offloaded_layers for plan in hand)
    assert min(plan.bytes_per_step() for plan in hand) <= 1.1 * auto.bytes_per_step()
    for need in (32 * 128, 64 * 128):  # room for half of the sequences, and for all
        assert len([plan for plan in hand if plan.kv_tokens >= need]) >= 2
    least, roomy = cases[2:4]
    with pytest.raises(CapacityError):
        plan_of(with_less_uva(least, 0.3))
    assert plan_of(with_less_uva(roomy, 0.12)).kv_tokens < 32 * 128


def with_less_uva(case: EngineCase, gib: float) -> EngineCase:
    uva = UVAOffloadConfig(cpu_offload_gb=case.config.offload.uva.cpu_offload_gb - gib)
    return replace(case, config=replace(case.config, offload=OffloadConfig(uva=uva)))


def test_splits_that_cannot_fit_move_all_that_their_sort_can() -> None:
    (*_, case) = grid_cases("glass", replace(SCALE, device="cpu", max_model_len=16), 2, 4, (8, 8))
    tiny = replace(case.config, gpu=replace(case.config.gpu, memory_gib=0.01))
    names = [name for name, _ in hand_made(tiny, read_model("glass", 8), H200)]
    assert len(names) == 12
    assert names[3] == "uva mlp of 8 layers"  # its table is tied
    assert names[6] == "prefetch all of 8 layers, 8/8/1"


def test_the_flow_on_a_cpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    arguments = [*TINY, "--batches", "1,2", "--prompt-tokens", "16", "--json", str(file)]
    code = command.validate(arguments, run_here)
    out = capsys.readouterr().out
    figures = json.loads(file.read_text())["engines"]
    assert list(figures) == [
        f"glass, 8 layers; {name}"
        for name in ("resident", "uva 6 layers", "prefetch 6 layers", "auto")
    ]
    points = [point for item in figures.values() for point in item["points"]]
    assert [point["what"] for point in points] == ["prefill", "decode step"] * 8
    assert min(point["measured_s"] for point in points) > 0
    assert min(point["predicted_s"] for point in points) > 0
    for item in figures.values():
        assert item["gpu_peak_gib"] == pytest.approx(item["gpu_planned_gib"], rel=0.03)
        assert item["rates"]["h2d_gb_s"] == 10.0
    assert " of 8 decode steps within 15%." in out
    assert code in {0, 3}  # a CPU's times are not what is predicted here

    def fail(job: EngineCase | str) -> dict[str, Any]:
        return {"h2d_gb_s": 10.0} if isinstance(job, str) else {"failed": "built again"}

    assert command.validate([*arguments, "--resume"], fail) == code
    assert "built again" not in capsys.readouterr().out


def test_the_grid_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*TINY, "--grid", "--freed", "2", "--requests", "3", "--queue-tokens", "8"]
    command.validate(arguments, run_here)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "glass, 8 layers, 2 layers less"
    assert len([line for line in lines if line.startswith("| ")]) == 15
    assert [line.split(":")[0] for line in lines if "of the best by hand (" in line] == [
        "auto latency",
        "auto throughput",
    ]


def test_a_queue_far_behind_the_best_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    limits = []

    def run(job: EngineCase | str) -> dict[str, Any]:
        if isinstance(job, str):
            return {"h2d_gb_s": 10.0}
        limits.append(job.queue_limit_s)
        return figures_of(point("queue", 1.0, 4.0 if len(limits) == 2 else 8.0))

    arguments = [*TINY, "--grid", "--freed", "2,3", "--queue-tokens", "8"]
    command.validate(arguments, run)
    assert limits == [None, 10.0, *[5.0] * 12, None, *[10.0] * 13]
    capsys.readouterr()
    (*_, last) = grid_cases("glass", replace(SCALE, device="cpu", max_model_len=16), 2, 4, (8, 8))
    case = replace(last, batches=(), queue_limit_s=1e-9)
    given_up = measure(case)
    assert given_up["points"] == []
    assert given_up["queue_given_up_s"] == 1e-9
    assert len(measure(replace(case, queue_limit_s=60.0))["points"]) == 1


def case_of(name: str) -> EngineCase:
    (first, *_) = cut_cases("olmo7b", SCALE)
    return replace(first, name=name, model="m", budget="b")


def point(what: str, predicted_s: float, measured_s: float) -> dict[str, Any]:
    return {"what": what, "batch": 1, "predicted_s": predicted_s, "measured_s": measured_s}


def figures_of(*points: dict[str, Any]) -> dict[str, Any]:
    names = ("gpu_planned_gib", "gpu_peak_gib", "host_planned_gib", "host_rss_gib")
    return dict.fromkeys(names, 1.0) | {"points": list(points)}


@pytest.mark.parametrize(
    ("found", "is_good", "words"),
    [
        (
            figures_of(point("decode step", 1.14, 1.0), point("prefill", 9.0, 1.0)),
            True,
            "+14.0%",
        ),
        (figures_of(point("decode step", 1.16, 1.0)), False, "0 of 1 decode steps"),
        (figures_of(point("decode step", 0.84, 1.0)), False, "-16.0%"),
        (figures_of(), False, "0 of 0"),
        ({"no_fit": "too large"}, False, "too large"),
        ({"failed": "crashed"}, False, "crashed"),
    ],
)
def test_points_are_good_within_the_tolerance(
    found: dict[str, Any], is_good: bool, words: str
) -> None:
    lines, good = command.point_lines([case_of("x")], {"m; b; x": found})
    assert good is is_good
    assert words in "\n".join(lines)


@pytest.mark.parametrize(("auto_s", "is_good"), [(1.05, True), (1.06, False), (0.5, True)])
def test_auto_has_to_reach_a_share_of_the_best(auto_s: float, is_good: bool) -> None:
    cases = [case_of(name) for name in ("auto latency", "auto throughput", "a", "b", "c")]
    times = {"auto latency": auto_s, "auto throughput": 1.0, "a": 1.0, "b": 2.0}
    found = {
        f"m; b; {name}": figures_of(point("decode step", 1.0, value), point("queue", 1.0, 5.0))
        for name, value in times.items()
    } | {"m; b; c": {"no_fit": "no room"}}
    lines, good = command.grid_lines(cases, found)
    assert good is is_good
    assert f"auto latency: {1 / auto_s:.3f} of the best by hand (a) in decode step." in lines
    assert "| c (no fit) | - | - |" in lines
    del found["m; b; auto latency"]["points"][0]
    assert command.grid_lines(cases, found)[1] is False


@pytest.mark.parametrize(
    "arguments",
    [["--batches", "x"], ["--models", "nosuch"], ["--resume"], ["--grid", "--freed", "0"]],
)
def test_a_bad_command_line_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.validate(arguments, lambda job: pytest.fail("ran")) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_splits_that_were_all_given_up_are_said_to_be() -> None:
    cases = [case_of(name) for name in ("auto latency", "auto throughput", "a")]
    points = [point("decode step", 1.0, 1.0), point("queue", 1.0, 5.0)]
    found = {f"m; b; {name}": figures_of(*points) for name in ("auto latency", "auto throughput")}
    found["m; b; a"] = figures_of(points[0]) | {"queue_given_up_s": 6.25}
    lines, good = command.grid_lines(cases, found)
    assert good
    assert "| a | 1,000 | given up |" in lines
    assert "auto throughput: 5.00 s; every split by hand that fits was given up in queue." in lines


JOBS = """import json, os, sys
for number, line in enumerate(sys.stdin):
    job, result = line.rstrip("\\n").split("\\t")
    if {dies}:
        sys.exit("RuntimeError: y")
    with open(result, "w") as file:
        json.dump({"pid": os.getpid()}, file)
    print("a line of something else")
    print("job done", flush=True)
"""


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Workers]:
    def start(dies: str) -> Workers:
        (tmp_path / "stand_in.py").write_text(JOBS.replace("{dies}", dies))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(validate_worker, "MODULE", "stand_in")
        return Workers()

    return start


def test_engines_share_a_process_where_they_may(jobs: Callable[[str], Workers]) -> None:
    alone, shared = case_of("a"), replace(case_of("b"), shares_process=True)
    workers = jobs("False")
    pids = [workers.run(job)["pid"] for job in ("cpu", alone, shared, shared, alone, shared)]
    workers.close()
    assert pids[2] == pids[3]
    assert len(set(pids)) == 5


def test_a_job_that_fails_in_a_used_process_is_tried_in_a_fresh_one(
    jobs: Callable[[str], Workers],
) -> None:
    shared = replace(case_of("b"), shares_process=True)
    workers = jobs("number == 1")
    pids = [workers.run(shared)["pid"] for _ in range(2)]
    workers.close()
    assert pids[0] != pids[1]
    workers = jobs("True")
    assert workers.run(shared) == {"failed": "RuntimeError: y"}
    workers.close()


def test_a_process_ends_where_an_engine_leaves_memory_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(validate_engine, "probe_rates", lambda device: {"of": 1.0})
    job, result = tmp_path / "job", tmp_path / "result"
    job.write_bytes(pickle.dumps("cpu"))
    rest = iter([f"{job}\t{result}\n"] * 3)
    assert validate_engine.main(rest) == 0
    assert next(rest, None) is None
    assert json.loads(result.read_text()) == {"of": 1.0}
    held = iter([0, 2**29])
    monkeypatch.setattr(validate_engine, "_gpu_bytes", lambda: next(held))
    rest = iter([f"{job}\t{result}\n"] * 3)
    validate_engine.main(rest)
    assert len(list(rest)) == 1


@pytest.mark.gpu
def test_the_flow_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--models", "qwen25_0_5b", "--batches", "1,4", "--kv-sequences", "4"]
    assert command.main(arguments) in {0, 3}
    out = capsys.readouterr().out
    assert " of 8 decode steps within 15%." in out
    assert "no fit" not in out
