"""A home that was moved or copied: its runs' files and its finished points are found again."""

import sqlite3
from contextlib import closing

import pytest

from harness.point.rerun import FinishedPoints
from harness.tracking.mlflow import follow_store
from reports.record.record import RESULT_NAME, RunRecord

FIXED = "s3://bucket/artifacts"


def make_store(folder, location):
    """A store with as much of MLflow's tables as counts here; return its addresses."""
    folder.mkdir(parents=True)
    with closing(sqlite3.connect(folder / "mlflow.db")) as store, store:
        store.execute("CREATE TABLE experiments (name TEXT, artifact_location TEXT)")
        store.execute("CREATE TABLE runs (artifact_uri TEXT)")
        rows = [("Default", f"{location}/0"), ("mine", location), ("other", FIXED)]
        store.executemany("INSERT INTO experiments VALUES (?, ?)", rows)
        uris = [f"{location}/ab/artifacts", f"{location}-2/cd/artifacts", f"{FIXED}/ef"]
        store.executemany("INSERT INTO runs VALUES (?)", [(uri,) for uri in uris])


def addresses(folder):
    with closing(sqlite3.connect(folder / "mlflow.db")) as store:
        rows = store.execute("SELECT artifact_location FROM experiments").fetchall()
        rows += store.execute("SELECT artifact_uri FROM runs").fetchall()
    return [address for (address,) in rows]


def follow(folder, experiment="mine"):
    follow_store(folder / "mlflow.db", (folder / "artifacts").as_uri(), experiment)
    return addresses(folder)


def test_a_moved_store_keeps_files_beside_itself(tmp_path):
    home, old = tmp_path / "ho me#1", "file:///ba%20d/home/artifacts"
    make_store(home, old)
    (home / "artifacts").mkdir()
    now = (home / "artifacts").as_uri()
    moved = [f"{now}/0", now, FIXED, f"{now}/ab/artifacts", f"{old}-2/cd/artifacts", f"{FIXED}/ef"]
    assert follow(home) == moved
    assert follow(home) == moved


@pytest.mark.parametrize(
    ("location", "experiment"),
    [
        ("file:///somewhere/of/mine", "mine"),
        ("http://server/artifacts", "mine"),
        ("file:///old/artifacts", "absent"),
        ("file:///old/artifacts", "other"),
    ],
)
def test_other_addresses_stay(tmp_path, location, experiment):
    home = tmp_path / "home"
    make_store(home, location)
    (home / "artifacts").mkdir()
    before = addresses(home)
    assert follow(home, experiment) == before


def test_without_its_files_a_store_was_not_moved(tmp_path):
    make_store(tmp_path / "home", "file:///old/artifacts")
    before = addresses(tmp_path / "home")
    assert follow(tmp_path / "home") == before


def test_finished_points_move_with_their_home(tmp_path):
    home = tmp_path / "home"
    inside, outside = home / "runs" / "a", tmp_path / "b"
    record = RunRecord(run_id="r", name="n", status="ok")
    for key, folder in (("1", inside), ("2", outside)):
        folder.mkdir(parents=True)
        record.write(folder / RESULT_NAME)
        FinishedPoints(home).note(key, folder, record)
    moved = home.rename(tmp_path / "elsewhere")
    points = FinishedPoints(moved)
    assert points.find("1", "failed").folder == moved / "runs" / "a"
    assert points.find("2", "failed").folder == outside
