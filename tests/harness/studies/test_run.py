"""Studies from start to record: which points run and with what, and what is written where."""

import functools
import json
import re
from dataclasses import replace

import pytest

from engine.errors import ConfigError
from harness.config.cli_args import parse_command_line
from harness.config.compose import Composer
from harness.config.study import StudyConfig, StudyPoint
from harness.studies import run as studies
from harness.studies.run import (
    StudyRun,
    changes_of,
    check_document,
    check_studies,
    compose_points,
    keeps_shape,
    marks,
    write_section,
)
from harness.sweep.app import run as run_line
from reports.record.record import RunRecord
from tests.harness.cases import quoted
from tests.harness.studies.examples import case, decode

HERE = {"emulated": False, "gpu": {"name": "NVIDIA H200"}, "git": {"sha": "a" * 40}}
KEPT = pytest.StashKey()
GOOD = {  # 8 GB in 0.16 s are 50 of 40 GB/s
    "resident": {1: decode(0.003, kv_bytes=0)},
    "prefetch": {1: decode(0.16, copied=8_000_000_000)},
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "home"))


@pytest.fixture
def documents(tmp_path, monkeypatch):
    """The two documents of the bench, in a folder of our own."""
    monkeypatch.setattr(studies, "ROOT", tmp_path)
    begin, end = marks("bench")
    (tmp_path / "docs").mkdir()
    files = [tmp_path / "docs" / "performance.md", tmp_path / "README.md"]
    for file in files:
        file.write_text(f"head\n{begin}\nold\n{end}\ntail\n")
    return files


@pytest.fixture(autouse=True)
def composed(monkeypatch, request):
    """Compose each point of this file once: what is composed is sealed."""
    plain = studies.compose_point

    def compose_point(composer, name, point, base):
        key = (name, tuple(point.overrides), tuple(base))
        if key not in kept:
            kept[key] = plain(composer, name, point, base)
        return kept[key]

    kept = request.config.stash.setdefault(KEPT, {})
    monkeypatch.setattr(studies, "compose_point", compose_point)


def fake_run(decodes=None, environment=HERE, **changes):
    """A run of any point that takes no time."""

    def run_one(config, folder, overrides, sweep):
        name = folder.name
        seen[name] = config
        found = case(name, (decodes or GOOD).get(name, {}))
        if name in changes and changes[name] is None:
            raise KeyboardInterrupt
        record = replace(found.record, environment=environment, config=config.to_dict())
        return replace(record, **changes.get(name, {}))

    seen = run_one.seen = {}
    return run_one


FEW = ("resident", "prefetch", "uva", "chosen")


@functools.cache
def bench_plan():
    return Composer().plan(["study=bench"])


@functools.cache
def asked(*more):
    """The study of the bench as a command line asks for it."""
    (found,) = Composer().plan(["study=bench", "tracking=none", *more]).points
    return found


def study(tmp_path, *more, run_one=None):
    """Run a study of a few points of the bench."""
    found = asked(*more)
    whole = found.config.study
    few = replace(whole, points={name: whole.points[name] for name in FEW})
    config = replace(found.config, study=few)
    planned = compose_points(config, found.overrides)
    return StudyRun(replace(found, config=config), tmp_path / "run", planned).run(
        run_one or fake_run()
    )


@pytest.mark.slow
def test_points_are_those_of_the_file_in_order():
    (found,) = bench_plan().points
    points = compose_points(found.config, found.overrides)
    assert list(points)[:5] == ["resident", "embed_in_place", "prefetch", "uva", "chosen"]
    assert {point.config.model.name for point in points.values()} == {"olmo7b"}
    assert {point.config.study for point in points.values()} == {None}
    assert points["resident"].config.gpu.memory_gib == 44.45
    assert points["prefetch"].config.offload.prefetch.offload_prefetch_step == 2
    assert points["prefetch_step_4"].config.offload.prefetch.offload_prefetch_step == 4
    assert points["uva_staged"].config.engine.uva_stage_tokens == 1
    assert points["uva_staged"].config.scenario.steps.batches == []
    (found,) = Composer().plan(["study=bench_kv"]).points
    points = compose_points(found.config, found.overrides)
    own = ["kv_bare", "kv_gpu", "kv_cpu", "kv_long", "kv_weights", "kv_together"]
    assert list(points)[: len(own)] == own
    assert not points["kv_bare"].config.scenario.needs_engine
    assert points["kv_long"].config.engine.max_model_len == 131_072
    experiments = ("multi_turn", "shared_prefix", "parked")
    for name in experiments:
        assert points[name].config.scenario.serve == points[f"{name}_gpu"].config.scenario.serve
        assert (points[f"{name}_gpu"].config.kv.cpu_gib, points[name].config.gpu.name) == (
            0,
            "rtx4090_24gb",
        )
    assert points["multi_turn"].config.kv.cpu_gib == 32
    assert points["long_context"].config.engine.max_model_len == 54_032


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bench_quantised", "bench_experts"])
def test_points_of_other_weights_and_experts_have_either_steps_or_requests(name):
    (found,) = Composer().plan([f"study={name}"]).points
    points = compose_points(found.config, found.overrides)
    budgets = {"cached": 21.6, "awq_cached": 13.6, "resident": 80.01, "plain": 40.005}
    for point, planned in points.items():
        scenario, card = planned.config.scenario, planned.config.gpu
        parts = (scenario.steps, scenario.throughput, scenario.bare and scenario.bare.parts)
        assert sum(map(bool, parts)) == 1, point
        budget = card.memory_gib * planned.config.engine.gpu_memory_utilization
        assert budget == pytest.approx(budgets.get(point, budget)), point
        assert planned.config.model.load_format == "dummy"
    assert list(points)[-1] in {"four", "awq_uva"}


@pytest.mark.slow
def test_points_of_lossless_weights_have_the_budgets_of_their_targets():
    (found,) = Composer().plan(["study=bench_lossless"]).points
    points = compose_points(found.config, found.overrides)
    gib = {
        name: point.config.gpu.memory_gib * point.config.engine.gpu_memory_utilization
        for name, point in points.items()
    }
    for name, budget in {"plain_40gib": 40, "lossless_13gib": 13.6, "lossless_16gib": 16}.items():
        assert budget - 0.001 < gib[name] <= budget
    assert gib["lossless_13b"] == gib["plain_llama"] == gib["lossless_llama"]
    formats = {name: point.config.engine.weight_format for name, point in points.items()}
    assert {formats[name] for name in points if name.startswith("lossless_")} == {"lossless"}
    assert {formats[name] for name in points if name.startswith("plain_")} == {"checkpoint"}
    small, models = points["lossless_13gib"].config, [p.config.model.name for p in points.values()]
    assert (small.engine.max_num_batched_tokens, small.engine.max_num_seqs) == (2048, 32)
    assert small.offload.uva.cpu_offload_params == ["embed_tokens"]
    assert small.scenario.throughput.num_requests == 100
    assert {name for name in points if points[name].config.scenario.throughput} == {
        "lossless_13gib"
    }
    assert {*models} == {"olmo7b", "olmo2_13b", "llama31_8b"}
    ahead = points["lossless_prefetch"].config.offload.prefetch
    size, num = ahead.offload_group_size, ahead.offload_num_in_group
    in_place = points["lossless_uva"].config.offload.uva.cpu_offload_params
    assert in_place == [f"layers.{i}" for i in range(32) if i % size >= size - num]
    assert len(in_place) == 20
    kept = [name for name in points if points[name].config.model.keep_lossless]
    assert kept == ["lossless_keep"]


@pytest.mark.thorough
def test_the_command_line_holds_over_a_point(tmp_path):
    run_one = fake_run()
    study(
        tmp_path,
        *("study.rows=[resident,uva]", "gpu.memory_gib=2", "scenario.steps.batches=[1]"),
        run_one=run_one,
    )
    assert list(run_one.seen) == ["resident", "uva"]
    for config in run_one.seen.values():
        assert config.gpu.memory_gib == 2
        assert config.scenario.steps.batches == [1]
        assert config.rerun == "all"
    assert run_one.seen["resident"].scenario.steps.steps == 88  # nobody typed another number


@pytest.mark.thorough
def test_settings_of_a_part_that_a_point_leaves_out_are_those_of_others():
    base = ["study=bench_kv", "scenario.bare.parts=[moves]", "gpu.memory_gib=2"]
    points = {"with": StudyPoint(), "without": StudyPoint(overrides=["scenario.bare=null"])}
    found = {
        name: studies.compose_point(Composer(), name, point, base).config
        for name, point in points.items()
    }
    assert found["with"].scenario.bare.parts == ["moves"]
    assert found["without"].scenario.bare is None
    assert {config.gpu.memory_gib for config in found.values()} == {2}


@pytest.mark.thorough
def test_a_point_takes_values_of_an_earlier_one(tmp_path, capsys):
    run_one = fake_run()
    study(tmp_path, "study.rows=[prefetch,chosen]", run_one=run_one)
    assert run_one.seen["chosen"].planner.kv_tokens == 9000
    assert run_one.seen["chosen"].planner.choose
    run_one = fake_run(prefetch={"plan": None, "status": "oom", "samples": {}})
    record = study(tmp_path / "2", "study.rows=[prefetch,chosen]", run_one=run_one)
    assert list(run_one.seen) == ["prefetch"]
    assert any("prefetch 8/5/2 has no plan.kv.tokens." in reason for reason in record.reasons)


@pytest.mark.thorough_but("study.rows=[nosuch]")
@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("study.rows=[nosuch]", "study.rows: expected some of resident, "),
        ("study.rows=[chosen]", "chosen takes a value of prefetch. Add it"),
        ("mode=plan", "expected one study with mode=run"),
        ("gpu.nosuch=1", "gpu.nosuch: there is no such key"),
        ("study=nosuch", "study: expected one of bench"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_does(typed, text, capsys):
    from harness.__main__ import main

    assert main(["study=bench", "tracking=none", typed]) == 2
    assert text in capsys.readouterr().err


def test_a_sweep_of_studies_is_refused():
    plan = Composer().plan(["study=bench", "gpu.memory_gib=1,2"], multirun=True)
    with pytest.raises(ConfigError, match="expected one study"):
        check_studies(plan)


@pytest.mark.parametrize("source", ["b:plan", "a", "nosuch:x"])
def test_a_value_comes_of_an_earlier_point(source):
    points = {"a": StudyPoint(take={"seed": source}), "b": StudyPoint()}
    with pytest.raises(ConfigError, match=r"an earlier point|POINT:PATH"):
        StudyConfig(name="x", judge="bench", points=points)


@pytest.mark.thorough
def test_the_usual_run_writes_both_documents(tmp_path, documents, capsys):
    record = study(tmp_path)
    assert (record.status, record.valid) == ("failed", False)  # 6 GB in 3 ms are 2000 GB/s
    for file in documents:
        text = file.read_text()
        assert text.startswith("head\n")
        assert text.endswith("tail\n")
        assert "old" not in text
    table = documents[0].read_text()
    assert "commit aaaaaaaaaaaa" in table
    assert "on NVIDIA H200, host None, driver unknown" in table
    assert "| prefetch 8/5/2, batch 1: bytes / step time / link rate | 160.00 ms" in table
    assert "| `offload=prefetch` |" in documents[1].read_text()
    assert (tmp_path / "run" / "table.md").read_text() in table
    assert RunRecord.read(tmp_path / "run" / "result.json") == record
    sample = record.samples["study"]
    assert [point["name"] for point in sample["points"]] == list(FEW)
    assert sample["points"][1]["folder"] == "points/prefetch"
    assert {row["is_met"] for row in sample["rows"]} == {True, False}


@pytest.mark.thorough_but("study.rows")
@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["study.rows=[prefetch]"], "study.rows"),
        (["study.rows=[prefetch]", "model=mistral_7b"], "model=mistral_7b"),
    ],
)
def test_another_run_leaves_the_documents(tmp_path, documents, more, why, capsys):
    study(tmp_path, *more)
    assert all("old" in file.read_text() for file in documents)
    shown = capsys.readouterr()
    assert "README.md stays as it is: " in shown.err
    assert why in shown.err
    assert "bytes / step time / link rate" in shown.out


def test_seconds_are_judged_at_the_usual_shape_only():
    kept = ["+study=bench", "tracking=none", "rerun=failed", "study.output=x"]
    assert changes_of(kept, []) == []
    assert changes_of(kept, ["prefetch"]) == ["study.rows"]
    more = ["scenario.steps.batches=[1]", "study.rows=[prefetch]", "+model=mistral_7b"]
    assert changes_of([*kept, *more], ["prefetch"]) == more
    assert [keeps_shape(item) for item in more] == [True, True, False]


def test_an_emulated_run_is_held_against_nothing(tmp_path, documents, capsys):
    run_one = fake_run(environment={"emulated": True})
    record = study(tmp_path, "study.rows=[resident,prefetch]", run_one=run_one)
    assert (record.status, record.error) == ("ok", None)
    assert "**Emulated" in capsys.readouterr().out
    assert all("old" in file.read_text() for file in documents)


@pytest.mark.thorough_but("driver")
@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("git", {"sha": "b"}),
        ("driver", "551"),
        ("host", "other"),
        ("gpu", {"name": "NVIDIA H200", "uuid": "GPU-2"}),
    ],
)
def test_points_of_other_surroundings_make_no_table(tmp_path, documents, fact, value, capsys):
    other = HERE | {fact: value}
    record = study(tmp_path, run_one=fake_run(uva={"environment": other}))
    assert re.match(rf"{fact}[.\w]*: expected the same for all points, got ", record.reasons[0])
    assert all("old" in file.read_text() for file in documents)
    assert "ran in different surroundings" in capsys.readouterr().err


def test_points_that_fail_and_other_tokens_are_faults(tmp_path, capsys):
    run_one = fake_run(
        {"resident": {1: decode(0.1)}, "uva": {1: decode(0.1, tokens=[1, 2, 4])}},
        prefetch={"status": "oom", "error": {"type": "E", "message": "too much"}, "samples": {}},
    )
    record = study(tmp_path, "study.rows=[resident,prefetch,uva]", run_one=run_one)
    assert record.status == "failed"
    assert "prefetch 8/5/2: no figures: oom: too much" in record.reasons
    assert any("**not equal** to the resident engine's in uva" in text for text in record.reasons)


def test_doubts_of_a_point_stand_below_the_table(tmp_path, capsys):
    doubt = {"valid": False, "reasons": ["gpu: its clock was throttled."]}
    study(tmp_path, "study.rows=[prefetch]", run_one=fake_run(prefetch=doubt))
    assert "prefetch 8/5/2: not valid: gpu: its clock was throttled." in capsys.readouterr().out


def test_an_interrupt_leaves_a_record(tmp_path, documents):
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, run_one=fake_run(uva=None))
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (record["status"], record["error"]["type"]) == ("killed", "Interrupted")
    assert [point["name"] for point in record["samples"]["study"]["points"]][-1] == "prefetch"
    assert all("old" in file.read_text() for file in documents)


def test_what_a_point_measured_before_an_interrupt_stands_in_the_table(tmp_path, documents, capsys):
    whole = fake_run()

    def run_one(config, folder, overrides, sweep):
        record = whole(config, folder, overrides, sweep)
        if folder.name == "prefetch":
            error = {"type": "Interrupted", "message": "the harness was interrupted", "phase": "x"}
            folder.mkdir(parents=True)
            replace(record, status="killed", error=error).write(folder / "result.json")
            raise KeyboardInterrupt
        return record

    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, "study.rows=[prefetch,uva]", run_one=run_one)
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    points = record["samples"]["study"]["points"]
    assert [(point["name"], point["status"]) for point in points] == [("prefetch", "killed")]
    rows = record["samples"]["study"]["rows"]
    assert any(row["share"] and row["what"].startswith("prefetch 8/5/2, batch 1") for row in rows)
    assert "NVIDIA H200" in capsys.readouterr().out
    assert all("old" in file.read_text() for file in documents)


def test_an_interrupt_before_any_point_ended_claims_no_machine(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, "study.rows=[uva]", run_one=fake_run(uva=None))
    said = capsys.readouterr().out
    assert "no point ended" in said
    assert "Emulated" not in said


@pytest.mark.parametrize("text", ["no marks", "{0}\n", "{1}\n{0}\n", "{0}{0}{1}"])
def test_a_document_without_its_marks_is_refused(tmp_path, monkeypatch, documents, text, capsys):
    documents[0].write_text(text.format(*marks("bench")))
    with pytest.raises(ConfigError, match="once each"):
        write_section(documents[0], "x", "bench")
    with pytest.raises(ConfigError, match="once each"):
        check_studies(bench_plan())
    with pytest.raises(ConfigError, match="No such file"):
        check_document(tmp_path / "absent.md", "bench")


def before(tmp_path, samples=None, **environment):
    """A folder of a run of an earlier version."""
    record = case("resident", {1: decode(0.005)}).record
    record = replace(record, environment=HERE | environment)
    if samples is not None:
        record = replace(record, samples=samples)
    folder = tmp_path / "before"
    folder.mkdir()
    record.write(folder / "result.json")
    return f"study.before={folder}"


def beside(found, tmp_path, run_one):
    """Judge two points of the bench as lossless weights beside an earlier version."""
    points = {
        name: StudyPoint(title=name, overrides=["offload=none"])
        for name in ("plain_40gib", "lossless_13gib")
    }
    few = replace(found.config.study, judge="bench_lossless", points=points)
    config = replace(found.config, study=few)
    planned = compose_points(config, found.overrides)
    return StudyRun(replace(found, config=config), tmp_path / "run", planned).run(run_one)


@pytest.mark.thorough
def test_a_run_of_the_version_before_stands_beside_the_points(tmp_path, documents, capsys):
    typed = before(tmp_path, git={"sha": "b" * 40})
    run_one = fake_run({"plain_40gib": {1: decode(0.0049)}, "lossless_13gib": {1: decode(0.004)}})
    assert changes_of([typed], []) == []
    record = beside(asked(typed), tmp_path, run_one)
    found = {row["what"]: row for row in record.samples["study"]["rows"]}
    row = found["lossless / bf16 of the version before, batch 1: step"]
    assert (row["figure"], row["is_met"]) == ("4.00 against 5.00 ms", True)
    assert found["lossless / bf16, batch 1: step"]["target"] == ""
    assert found["bf16 / bf16 of the version before, batch 1: step"]["is_met"]
    assert not any("expected the same for all points" in reason for reason in record.reasons)
    assert record.samples["study"]["points"][0]["folder"] is None


@pytest.mark.thorough
def test_a_run_of_another_card_makes_no_table(tmp_path, documents, capsys):
    typed = before(tmp_path, driver="551")
    record = beside(asked(typed), tmp_path, fake_run())
    assert record.reasons[0].startswith("driver: expected the same for all points")


@pytest.mark.parametrize(
    ("samples", "text"), [(None, "no such file"), ({}, "a run with scenario.steps")]
)
def test_what_stands_beside_is_a_run_with_steps(tmp_path, documents, samples, text):
    typed = f"study.before={tmp_path / 'absent'}" if samples is None else before(tmp_path, samples)
    with pytest.raises(ConfigError, match=f"study.before: .*{text}"):
        check_studies(Composer().plan(["study=bench", typed]))


@pytest.mark.slow
def test_a_study_runs_its_points_in_workers(tmp_path, capsys):
    """The whole way on a CPU: a placement that is chosen in the room of another."""
    line = [
        *("study=bench", "study.rows=[resident,prefetch,chosen]", "tracking=none", "model=glass"),
        *("gpu=cpu", "gpu.memory_gib=0.5", "model.spec.num_hidden_layers=8"),
        *("scenario.steps.batches=[2]", "scenario.steps.prompt_tokens=8"),
        *("scenario.steps.prefill_tokens=16", "scenario.steps.steps=4"),
        *("scenario.steps.counter_s=0.05", "engine.max_num_batched_tokens=64"),
        *("engine.max_num_seqs=2", "engine.max_model_len=128"),
        f"hydra.run.dir={quoted(tmp_path / 'run')}",
    ]
    assert run_line(parse_command_line(line)) == 0
    record = RunRecord.read(tmp_path / "run" / "result.json")
    folders = [point["folder"] for point in record.samples["study"]["points"]]
    points = [RunRecord.read(tmp_path / "run" / folder / "result.json") for folder in folders]
    assert [point.status for point in points] == ["ok"] * 3
    assert [point.name for point in points] == ["resident", "prefetch", "chosen"]
    room = points[1].plan["kv"]["tokens"]
    assert points[2].config["planner"]["kv_tokens"] == room
    shown = capsys.readouterr().out
    assert "prefetch 8/5/2: bytes of a step, counted / planned" in shown
    assert "Greedy tokens: equal to the resident engine's in every case" in shown
