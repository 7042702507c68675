import asyncio
import gc
import multiprocessing
import os
import shlex
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from urllib.request import url2pathname

import pytest

from harness import ui
from harness.config.schema import SweepContext, TrackingConfig
from harness.observe.host import start_ticks
from harness.point.describe import flat_params
from harness.point.point import run_point, skip_point
from harness.sweep.track import finish_sweep, sweep_note
from harness.tracking.base import GuardedTracker, PointFacts, SweepFacts, Tracker
from harness.tracking.mlflow import MlflowTracker, open_tracker, prepare_store
from reports.record.record import RunRecord
from tests.harness.cases import fake_command, run_config, scenario
from tests.harness.fakes import Script

# MLflow and SQLAlchemy warn about each other's deprecations.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("forked_workers")]
ROOT = Path(__file__).resolve().parents[3]
SEVERAL = 2
"""Processes that meet a home without a database."""


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    """Drawing takes seconds and has tests of its own."""
    monkeypatch.setattr("harness.point.point.build_report", lambda folder: [])
    monkeypatch.setattr("harness.sweep.track.build_report", lambda folder: [])


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """A home whose database several processes created at once: migrations take seconds."""
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401  once: the slow part

    home = tmp_path_factory.mktemp("home")
    shown = home.with_name("shown")
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(SEVERAL)
    workers = [
        context.Process(target=_one_of_several, args=(barrier, home, shown, i))
        for i in range(SEVERAL)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which a fork lacks
        for worker in workers:
            worker.start()
    for worker in workers:
        worker.join()
    return home, [worker.exitcode for worker in workers], shown


def _one_of_several(barrier, home, shown, index):
    """Open a tracker at the same moment as others, on a home without a database."""
    gc.freeze()
    with shown.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
    os.environ["TIGHTFIT_HOME"] = str(home)
    folder = home / f"cwd-{index}"
    folder.mkdir()
    os.chdir(folder)
    barrier.wait()
    tracker = MlflowTracker(TrackingConfig(), home)
    tracker.open()
    tracker.start_point(PointFacts(run_id=str(index), name=f"run-{index}", params={}, tags={}))
    barrier.wait()  # nobody takes another for dead


@pytest.fixture
def home(database, monkeypatch):
    folder, _, _ = database
    monkeypatch.setenv("TIGHTFIT_HOME", str(folder))
    return folder


def tracking(request):
    return TrackingConfig(experiment=request.node.name)


@pytest.fixture
def client(home):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{home}/mlflow.db")


def runs_of(client, experiment):
    found = client.get_experiment_by_name(experiment)
    return client.search_runs([found.experiment_id], order_by=["attributes.start_time ASC"])


def run(tmp_path, config, name="run", sweep=None, overrides=(), **script):
    command = fake_command(tmp_path, Script(**script))
    return run_point(config, tmp_path / name, overrides, sweep, command=command)


def unchecked(request, **changes):
    from harness.config.schema import CorrectnessConfig

    parts = scenario(correctness=CorrectnessConfig(enabled=False), throughput=None)
    return run_config(scenario=parts, tracking=tracking(request), **changes)


@pytest.mark.thorough
def test_several_processes_create_one_database(database, client):
    home, codes, shown = database
    said = shown.read_text(encoding="utf-8")
    assert codes == [0] * SEVERAL, said
    assert said == ""  # nothing of the migrations is shown
    runs = runs_of(client, "tightfit")
    assert sorted(run.info.run_name for run in runs) == [f"run-{index}" for index in range(SEVERAL)]
    root = (home / "artifacts").as_uri()
    assert all(run.info.artifact_uri.startswith(root) for run in runs)
    assert client.get_experiment("0").artifact_location.startswith(root)  # MLflow's own
    assert not list(home.glob("cwd-*/*"))


@pytest.mark.thorough
def test_runs_of_dead_processes_are_repaired(database, home, client):
    assert {run.info.status for run in runs_of(client, "tightfit")} == {"RUNNING"}
    MlflowTracker(TrackingConfig(), home).open()
    runs = runs_of(client, "tightfit")
    assert {run.info.status for run in runs} == {"KILLED"}
    assert {run.data.tags["harness.status"] for run in runs} == {"killed"}


@pytest.mark.thorough
def test_a_point_is_mirrored(tmp_path, request, client):
    config = unchecked(request)
    record = run(tmp_path, config, prefill_s=0.5)
    assert record.effective["warnings"] == []
    (mirrored,) = runs_of(client, request.node.name)
    assert mirrored.info.status == "FINISHED"
    assert mirrored.info.run_name == record.name
    tags = mirrored.data.tags
    assert tags["harness.status"] == "ok"
    assert tags["harness.valid"] == "unknown"
    assert tags["harness.run_id"] == record.run_id
    assert len(tags["harness.config_hash"]) == 64
    assert tags["mlflow.note.content"].startswith("**ok**")
    assert ", TTFT p50 500.0 ms," in tags["mlflow.note.content"]
    params = mirrored.data.params
    assert params.keys() == flat_params(config).keys()
    assert (params["model"], params["offload"], params["engine.seed"]) == ("tiny", "none", "0")
    metrics = mirrored.data.metrics
    assert metrics["latency/ttft_ms/p50"] == pytest.approx(500)
    assert "latency/ttft_ms/p90" not in metrics
    assert metrics["headline/latency_ttft_ms_p50"] == metrics["latency/ttft_ms/p50"]
    assert min(metrics).startswith("headline/")
    assert metrics["system/requests_done"] == 11
    # What no table shows is in the artifacts.
    assert "latency/ttft_ms/std" not in metrics
    assert record.metrics["latency/ttft_ms/std"] is not None
    assert metrics["system/kv_gpu_used_gib"] > 0
    names = {item.path for item in client.list_artifacts(mirrored.info.run_id)}
    assert {"config.yaml", "result.json", "worker.log", "samples.jsonl"} <= names
    artifact = (
        Path(url2pathname(mirrored.info.artifact_uri.removeprefix("file://"))) / "result.json"
    )
    assert artifact.read_bytes() == (tmp_path / "run" / "result.json").read_bytes()


@pytest.mark.thorough
def test_no_parameter_is_left_out(request, client, home):
    tracker = MlflowTracker(tracking(request), home)
    tracker.open()
    wanted = {f"group.key_{index}": str(index) for index in range(250)}
    tracker.start_point(PointFacts(run_id="a", name="a", params=wanted, tags={}))
    (mirrored,) = runs_of(client, request.node.name)
    assert mirrored.data.params == wanted


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("failure", "status", "mirrored_status"),
    [("sigkill", "killed", "KILLED"), ("oom", "oom", "FAILED")],
)
def test_a_bad_point_is_mirrored(tmp_path, request, client, failure, status, mirrored_status):
    record = run(tmp_path, unchecked(request), fail_at="step", failure=failure)
    assert record.status == status
    (mirrored,) = runs_of(client, request.node.name)
    assert mirrored.info.status == mirrored_status
    assert mirrored.data.tags["harness.status"] == status
    assert mirrored.data.tags["error.type"] == record.error["type"]


@pytest.mark.thorough
def test_a_sweep_has_a_parent_and_a_child_for_each_point(tmp_path, request, client):
    config = unchecked(request)
    sweeps = [
        SweepContext(
            sweep_id="s1", folder=tmp_path, index=index, total=2, title="tiny: offload, 2 points"
        )
        for index in range(2)
    ]
    (tmp_path / "sweep.html").write_text(
        '<a href="0/report.html">0. none</a> <a href="#points">Points</a> <a href="https://h">h</a>'
    )
    records = [
        run(tmp_path, config, "0", sweeps[0], ["+model=tiny", "offload=none"]),
        skip_point(config, tmp_path / "1", ["offload=uva"], sweeps[1], reason="fail_fast=true"),
    ]
    warnings, view = finish_sweep(config.tracking, sweeps[0], records)
    assert warnings == []
    assert "compareRunsMode=CHART&searchFilter=tags.%60harness.sweep_ids%60%20LIKE%20" in view
    parent, first, second = runs_of(client, request.node.name)
    assert parent.info.run_name == "tiny: offload, 2 points"
    assert (parent.info.status, parent.data.tags["harness.status"]) == ("FINISHED", "ok")
    assert parent.data.tags["harness.points"] == "1 ok, 1 skipped"
    note = parent.data.tags["mlflow.note.content"]
    assert note.startswith("**tiny: offload, 2 points**")
    assert "| 0 | model=tiny offload=none | ok |" in note
    assert "- point 1, offload=uva: skipped: fail_fast=true" in note
    of_search = sweep_note(records, sweeps[0], [1, 4])
    assert "| trial |" in of_search
    assert "| 1 | model=tiny offload=none | ok |" in of_search
    assert "- trial 4, offload=uva: skipped: fail_fast=true" in of_search
    assert records[0].effective["mlflow_experiment_id"] == first.info.experiment_id
    experiment = client.get_experiment_by_name(request.node.name)
    assert experiment.tags["mlflow.note.content"].endswith(note)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    artifacts = Path(url2pathname(parent.info.artifact_uri.removeprefix("file://")))
    page = (artifacts / "sweep.html").read_text()
    assert page == '0. none <a href="#points">Points</a> <a href="https://h">h</a>'
    assert parent.data.metrics == {"points/ok": 1, "points/skipped": 1}
    for child, name in ((first, "model=tiny,offload=none"), (second, "offload=uva")):
        assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert child.data.tags["harness.sweep_id"] == "s1"
        assert child.info.run_name == name
    assert (first.info.status, second.info.status) == ("FINISHED", "FAILED")


@pytest.mark.thorough
def test_the_end_of_a_sweep_ends_points_that_are_running_yet(tmp_path, request, client, home):
    sweep = SweepContext(sweep_id=request.node.name, folder=tmp_path, index=0, total=1)
    cut_short = open_tracker(tracking(request), home)
    cut_short.start_point(PointFacts(run_id="1", name="point", params={}, tags={}, sweep=sweep))
    finish_sweep(tracking(request), sweep, [], interrupted=True)
    assert [run.info.status for run in runs_of(client, request.node.name)] == ["KILLED"] * 2


@pytest.mark.thorough
def test_a_database_whose_creation_was_killed_is_made_anew(tmp_path, monkeypatch):
    class Store:
        def __init__(self, uri, _):
            self.file, self.engine = Path(uri.removeprefix("sqlite:///")), self
            assert not self.file.exists()
            self.file.touch()
            if not is_complete:
                raise KeyboardInterrupt

        def dispose(self):
            self.file.write_text("complete")

    monkeypatch.setattr("mlflow.store.tracking.sqlalchemy_store.SqlAlchemyStore", Store)
    database, is_complete = "mlflow.db", False
    asked = (f"sqlite:///{tmp_path / database}", tmp_path, "tightfit")
    with pytest.raises(KeyboardInterrupt):
        prepare_store(*asked)
    assert not (tmp_path / database).exists()
    is_complete = True
    prepare_store(*asked)
    assert {file.name for file in tmp_path.iterdir()} == {database, f"{database}.lock"}
    assert (tmp_path / database).read_text() == "complete"


@pytest.mark.thorough
def test_a_broken_database_costs_no_point(tmp_path, request, monkeypatch):
    home = tmp_path / "broken"
    home.mkdir()
    (home / "mlflow.db").write_text("this is no database")
    monkeypatch.setenv("TIGHTFIT_HOME", str(home))
    record = run(tmp_path, unchecked(request))
    assert record.status == "ok"
    (warning,) = record.effective["warnings"]
    assert warning.startswith("tracking: open failed: ")


def test_a_tracker_that_hangs_is_given_up(tmp_path):
    release = threading.Event()

    class Hanging(Tracker):
        def start_point(self, point):
            release.wait(30)

    tracker = GuardedTracker(Hanging(), timeout_s=0.1)
    tracker.start_point(PointFacts(run_id="a", name="a", params={}, tags={}))
    tracker.finish_sweep(
        SweepFacts(
            context=SweepContext(sweep_id="s", folder=tmp_path, index=0, total=1), status="ok"
        )
    )
    release.set()
    (warning,) = tracker.warnings
    assert "start_point took longer than 0.1 s" in warning


def test_the_thread_of_a_tracker_ends_with_it(tmp_path):
    before = set(threading.enumerate())
    tracker = GuardedTracker(Tracker())
    (thread,) = set(threading.enumerate()) - before
    tracker.start_sweep(SweepContext(sweep_id="s", folder=tmp_path, index=0, total=1))
    assert thread.is_alive()
    del tracker
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.thorough
def test_tracking_none_works_without_mlflow(tmp_path, monkeypatch):
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(sys.modules, "mlflow", None)
    record = run(tmp_path, run_config(scenario=scenario(throughput=None)))
    assert (record.status, record.effective["warnings"]) == ("ok", [])


def test_tracking_without_mlflow_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    tracker = open_tracker(TrackingConfig(), tmp_path)
    assert "ModuleNotFoundError" in tracker.warnings[0]
    assert tracker.view_command() is None


@pytest.mark.thorough
def test_a_point_taken_over_is_not_logged_twice(tmp_path, request, client):
    config = unchecked(request)
    first = SweepContext(sweep_id="one", folder=tmp_path, index=0, total=1, began_s=time.time())
    record = run(tmp_path, config, "0", first)
    later = replace(first, sweep_id="two", began_s=time.time() + 1)
    config = replace(config, rerun="failed")
    assert run(tmp_path, config, "1", later).run_id == record.run_id
    finish_sweep(config.tracking, later, [record])
    runs = runs_of(client, request.node.name)
    kinds = [found.data.tags["harness.kind"] for found in runs]
    assert sorted(kinds) == ["point", "sweep", "sweep"]
    found = client.search_runs(
        [runs[0].info.experiment_id], "tags.`harness.sweep_ids` LIKE '%two%'"
    )
    assert sorted(found.data.tags["harness.kind"] for found in found) == ["point", "sweep"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("status", "mirrored"),
    [
        ("no_fit", "FINISHED"),
        ("partial", "FINISHED"),
        ("failed", "FAILED"),
        ("oom", "FAILED"),
        (None, "FAILED"),  # no point left a record
    ],
)
def test_a_sweep_with_points_that_do_not_fit_is_whole(tmp_path, request, client, status, mirrored):
    sweep = SweepContext(sweep_id=request.node.name, folder=tmp_path, index=0, total=1)
    ended = [RunRecord(run_id="1", name="offload=none", status=status)] if status else []
    finish_sweep(tracking(request), sweep, ended)
    (parent,) = runs_of(client, request.node.name)
    assert parent.info.status == mirrored
    assert parent.data.tags["harness.points"] == (f"1 {status}" if status else "")


@pytest.mark.thorough
def test_the_view_command_opens_the_runs(home):
    page = "http://127.0.0.1:5000/#/experiments"
    command = MlflowTracker(TrackingConfig(), home).view_command()
    assert command == (f"tightfit ui    # then {page}?workflowType=machine_learning&searchFilter=")
    other = f"sqlite:///{home}/my runs/runs.db"
    tracker = MlflowTracker(TrackingConfig(uri=other), home)
    words = shlex.split(tracker.view_command(), comments=True)
    assert words == ["tightfit", "ui", "--store", other]
    tracker._experiment_id = "3"
    assert tracker.view_command().endswith(
        f"{page}/3/runs?workflowType=machine_learning&searchFilter="
    )
    remote = MlflowTracker(TrackingConfig(uri="http://server:1/"), home)
    remote._experiment_id = "3"
    assert remote.view_command("s-1") == (
        "open http://server:1/#/experiments/3/runs?workflowType=machine_learning"
        "&compareRunsMode=CHART&searchFilter=tags.%60harness.sweep_ids%60%20LIKE%20%27%25s-1%25%27"
        "&orderByKey=tags.%60mlflow.runName%60&orderByAsc=true"
    )


@pytest.mark.parametrize(
    ("uri", "root"),
    [
        (None, "file:///srv/me/artifacts"),
        ("sqlite:////data/my%20team/runs.db", "file:///data/my%2520team/artifacts"),
        ("sqlite+pysqlite:////data/runs.db?timeout=3", "file:///data/artifacts"),
        ("postgresql://host/db", "file:///srv/me/artifacts"),
        ("http://host:5000", None),
        ("databricks", None),
    ],
)
def test_no_store_keeps_files_where_a_command_starts(uri, root):
    assert MlflowTracker(TrackingConfig(uri=uri), Path("/srv/me"))._artifacts == root


def test_a_relative_store_is_found_from_where_the_command_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tracker = MlflowTracker(TrackingConfig(uri="sqlite:///sub/runs.db"), Path("/srv/me"))
    assert tracker._artifacts == (tmp_path / "sub" / "artifacts").as_uri()


def test_start_ticks_tell_processes_apart():
    assert start_ticks(os.getpid()) is not None
    assert start_ticks(2**22 + 1) is None


@pytest.mark.thorough
def test_the_server_runs_in_this_process_and_says_where_it_answers(tmp_path, monkeypatch, capsys):
    class Server:
        def __init__(self, config):
            self.config = config

        def run(self, sockets):
            asyncio.run(self.startup(sockets))

        async def startup(self, sockets=None):
            assert sockets == [listener]
            assert os.environ["_MLFLOW_SERVER_FILE_STORE"] == "sqlite:///a.db"

    class Client:
        def __init__(self, tracking_uri):
            assert tracking_uri == "sqlite:///a.db"

        def get_experiment_by_name(self, name):
            return None if name == "absent" else type("Found", (), {"experiment_id": "7"})

    uvicorn, application = ModuleType("uvicorn"), ModuleType("mlflow.server.fastapi_app")
    uvicorn.Server, uvicorn.Config = Server, lambda app, **settings: (app, settings)
    application.app = "the app"
    monkeypatch.setitem(sys.modules, "uvicorn", uvicorn)
    monkeypatch.setitem(sys.modules, "mlflow.server.fastapi_app", application)
    monkeypatch.setattr("mlflow.MlflowClient", Client)
    for name in ("_MLFLOW_SERVER_FILE_STORE", "_MLFLOW_SERVER_ARTIFACT_ROOT", *ui.ENVIRONMENT):
        monkeypatch.setenv(name, os.environ.get(name, "false"))
    prepared = []
    monkeypatch.setattr(ui, "prepare_store", lambda *asked: prepared.append(asked))
    with ui.listening("127.0.0.1", 0) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        ui.serve("sqlite:///a.db", tmp_path, listener, "tightfit")
    assert prepared == [("sqlite:///a.db", tmp_path, "tightfit")]
    said = capsys.readouterr().err
    page = f"{address}/#/experiments/7/runs?workflowType=machine_learning&searchFilter="
    assert f"MLflow answers: {page}\n" in said
