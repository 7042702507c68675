"""What is on the disk: downloads, scans, and removals that touch nothing else."""

import shutil
import time
from pathlib import Path

import pytest

from catalogue.checkpoint import ModelUnavailableError, freed_bytes
from catalogue.files import kept_folder
from console.page.models import removal_of
from console.registry import holdings
from console.registry.checks import BusyError, FieldError
from console.registry.database import Database
from console.registry.holdings import Holdings
from console.registry.models import Models, profile_of
from console.registry.results import Results
from console.registry.stale import own_process
from console.registry.tables import Model, Service
from engine.model.checkpoint import copy_folder
from tests.console.registry.conftest import checkpoint, measured
from tests.console.registry.gguf_file import write


@pytest.fixture
def disk(database: Database) -> Holdings:
    return Holdings(database)


def add(models: Models, source: Path | str, name: str | None = None) -> Model:
    return models.store(models.describe(str(source), name=name), {})


def snapshot(cache: Path, repository: str, revision: str = "main") -> Path:
    """A whole snapshot as the hub's client keeps it: links to blobs."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    whole = checkpoint(folder / "snapshots" / ("c0ffee" + 34 * "0"))
    (folder / "refs").mkdir()
    (folder / "refs" / revision).write_text("c0ffee" + 34 * "0")
    (folder / "blobs").mkdir()
    for file in whole.iterdir():
        blob = folder / "blobs" / file.name.replace(".", "_")
        file.rename(blob)
        file.symlink_to(Path("../../blobs") / blob.name)
    return folder


def test_a_scan_follows_the_disk(
    models: Models, disk: Holdings, tmp_path: Path, home: Path
) -> None:
    add(models, checkpoint(tmp_path / "a"))
    add(models, checkpoint(tmp_path / "b"))
    assert disk.scan() == holdings.Scan()
    (tmp_path / "a").rename(tmp_path / "gone")
    shutil.rmtree(tmp_path / "b")
    checkpoint(tmp_path / "b", num_hidden_layers=1)
    found = disk.scan()
    assert (found.vanished, found.changed, found.returned) == (["a"], ["b"], [])
    assert (models.get("a").state, models.get("a").reason) == (
        "missing",
        "its files are not on this machine",
    )
    assert models.get("b").reason.startswith("its files changed: 0.00 GiB before")
    assert models.get("b").spec["num_hidden_layers"] == 1
    (tmp_path / "gone").rename(tmp_path / "a")
    weights = tmp_path / "b" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    found = disk.scan()
    assert (found.vanished, found.returned, found.failed) == ([], ["a"], ["b"])
    assert models.get("a").state == "untested"
    assert "is cut short" in models.get("b").reason
    assert disk.scan() == holdings.Scan()


def test_a_scan_keeps_what_was_tested(
    models: Models, disk: Holdings, database: Database, tmp_path: Path
) -> None:
    row = add(models, checkpoint(tmp_path / "a"))
    with database.write() as session:
        session.get(Model, row.id).state = "ready"
    results = Results(database)
    results.change(results.create(row.id, "test").id, status="finished")
    disk.scan()
    assert models.get("a").state == "ready"
    (tmp_path / "a").rename(tmp_path / "x")
    disk.scan()
    (tmp_path / "x").rename(tmp_path / "a")
    disk.scan()
    assert models.get("a").state == "ready"


def test_a_scan_finds_new_models(
    models: Models, disk: Holdings, home: Path, tmp_path: Path
) -> None:
    checkpoint(home / "models" / "mine")
    (home / "models" / "half").mkdir()
    (home / "models" / ".mine-1").mkdir()
    (home / "models" / "link").symlink_to(checkpoint(tmp_path / "elsewhere"))
    snapshot(home / "hub", "a/mine")
    snapshot(tmp_path / "theirs", "b/tagged", revision="v1")
    bert = snapshot(tmp_path / "theirs", "b/bert")
    (bert / "blobs" / "config_json").write_text('{"model_type": "bert"}')
    found = disk.scan()
    assert found.added == ["mine", "a_mine", "tagged"]
    assert list(found.refused) == ["b/bert"]
    assert "bert" in found.refused["b/bert"]
    tagged = models.get("tagged")
    assert (tagged.kind, tagged.source, tagged.revision) == ("hub", "b/tagged", "v1")
    assert (models.get("mine").kind, models.get("a_mine").source) == ("folder", "a/mine")
    assert profile_of(tagged).settings == {}
    again = disk.scan()
    assert (again.added, again.vanished) == ([], [])


def test_a_removal_says_what_goes_and_frees_it(
    models: Models, disk: Holdings, database: Database, home: Path
) -> None:
    repository = snapshot(home / "hub", "a/b")
    row = add(models, "a/b")
    results = Results(database)
    run = results.create(row.id, "test", status="finished")
    measured(results, run, "CPU", "load", {})
    size = sum(file.stat().st_size for file in (repository / "blobs").iterdir())
    found = disk.removal("b")
    assert (found.folder, found.profiles) == (repository, ("default",))
    assert (found.num_tests, found.num_measurements) == (1, 1)
    assert size <= found.num_bytes < size + 100
    assert disk.remove("b") == found
    assert not repository.exists()
    assert models.list() == []
    assert results.runs() == []
    assert add(models, "glass").id == row.id + 1  # an id is never given again


@pytest.mark.parametrize("keep_files", [False, True])
def test_a_copy_in_codes_goes_with_its_model(
    models: Models, disk: Holdings, home: Path, *, keep_files: bool
) -> None:
    folder = checkpoint(home / "models" / "mine")
    row = add(models, folder)
    copy, another = (copy_folder(kept_folder(), each) for each in (folder, home / "other"))
    for each in (copy, another):
        each.mkdir(parents=True)
        (each / "0.safetensors").write_bytes(bytes(1024))
    found = disk.removal("mine", keep_files=keep_files)
    assert (found.copy, found.copy_bytes) == (copy, 1024)
    assert found.num_bytes == 1024 + (0 if keep_files else freed_bytes(folder))
    told = removal_of(row, found)
    assert any(f"its copy in lossless codes, {copy}, 1.00 KiB" in line for line in told["lines"])
    assert "frees" in told["answer"]
    assert disk.remove("mine", keep_files=keep_files) == found
    assert (copy.exists(), another.exists(), folder.exists()) == (False, True, keep_files)


def test_files_of_the_user_s_stay(
    models: Models, disk: Holdings, home: Path, tmp_path: Path
) -> None:
    add(models, checkpoint(tmp_path / "a"))
    theirs = snapshot(tmp_path / "theirs", "a/b")
    add(models, "a/b")
    outside = checkpoint(tmp_path / "outside")
    (home / "models").mkdir(parents=True, exist_ok=True)
    (home / "models" / "link").symlink_to(outside)
    row = add(models, home / "models" / "link", "link")
    assert row.path == str(outside)
    add(models, checkpoint(home / "models" / "deep" / "er"))
    for name in ("a", "b", "link", "er"):
        with pytest.raises(FieldError, match=r"which are the user's\. With --keep-files they stay"):
            disk.remove(name)
        assert disk.remove(name, keep_files=True).num_bytes == 0
    assert models.list() == []
    assert all(path.is_dir() for path in (tmp_path / "a", theirs, outside, home / "models/deep/er"))


def test_a_link_in_the_place_of_a_folder_is_not_followed(
    models: Models, disk: Holdings, home: Path, tmp_path: Path
) -> None:
    folder = checkpoint(home / "models" / "mine")
    add(models, folder)
    folder.rename(tmp_path / "precious")
    folder.symlink_to(tmp_path / "precious")
    with pytest.raises(FieldError, match="which are the user's"):
        disk.remove("mine")
    assert (tmp_path / "precious" / "config.json").is_file()


def test_what_is_in_use_is_not_removed(
    models: Models, disk: Holdings, database: Database, home: Path
) -> None:
    row = add(models, checkpoint(home / "models" / "mine"))
    results, own = Results(database), own_process()
    run = results.create(row.id, "test")
    with pytest.raises(BusyError, match=r"its test 1 has not ended\. Cancel that first"):
        disk.remove("mine", keep_files=True)
    results.change(run.id, status="cancelled")
    with database.write() as session:
        service = Service(name="main", kind="own", model_id=row.id, wanted="running")
        session.add(service)
    with pytest.raises(BusyError, match=r"service main serves it\. Stop that first"):
        disk.removal("mine")
    with database.write() as session:
        session.get(Service, service.id).wanted = "stopped"
        downloading = session.get(Model, row.id)
        downloading.state, downloading.pid = "downloading", own.pid
        downloading.pid_started_s = own.started_s
    with pytest.raises(BusyError, match=f"process {own.pid} downloads it"):
        disk.remove("mine")
    with pytest.raises(BusyError, match=f"process {own.pid} downloads it"):
        disk.fetch("mine", report=print)
    with database.write() as session:
        session.get(Model, row.id).pid_started_s = 1.0
    assert disk.remove("mine").folder == home / "models" / "mine"
    assert not (home / "models" / "mine").exists()


def test_revisions_of_one_repository_go_together(
    models: Models, disk: Holdings, home: Path
) -> None:
    repository = snapshot(home / "hub", "a/b")
    (repository / "refs" / "v1").write_text("c0ffee" + 34 * "0")
    add(models, "a/b")
    models.store(models.describe("a/b", name="old", revision="v1"), {})
    with pytest.raises(FieldError, match="model b: old is in the same repository"):
        disk.remove("b")
    disk.remove("old", keep_files=True)
    assert disk.remove("b").folder == repository


def test_a_download_is_followed(
    models: Models,
    disk: Holdings,
    database: Database,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = checkpoint(home / "hub" / "models--a--b" / "snapshots" / ("c0ffee" + 34 * "0"))
    (part.parents[1] / "refs").mkdir()
    (part.parents[1] / "refs" / "main").write_text(part.name)
    (part / "model.safetensors").rename(part.parents[1] / "later")
    add(models, "a/b")
    seen = []

    def fetch(entry: object, report: object) -> Path:
        (part.parents[1] / "blobs").mkdir()
        (part.parents[1] / "blobs" / "x.incomplete").write_bytes(b"12345")
        while (row := models.get("b")).done_bytes != 5:
            time.sleep(0.001)
        seen.append((row.state, row.pid, row.total_bytes))
        (part.parents[1] / "later").rename(part / "model.safetensors")
        return part

    monkeypatch.setattr(holdings, "PROGRESS_S", 0.001)
    monkeypatch.setattr(holdings, "wanted_bytes", lambda name, source: 9)
    monkeypatch.setattr(holdings, "fetch", fetch)
    row = disk.fetch("b", report=print)
    assert seen == [("downloading", own_process().pid, 9)]
    assert (row.state, row.path, row.pid) == ("untested", str(part), None)


def test_a_download_that_fails_says_why(
    models: Models, disk: Holdings, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(models, "glass")

    def refuse(entry: object, report: object) -> Path:
        raise ModelUnavailableError("model glass: pip could not download it")

    monkeypatch.setattr(holdings, "fetch", refuse)
    with pytest.raises(ModelUnavailableError, match="pip could not"):
        disk.fetch("glass", report=print)
    row = models.get("glass")
    assert (row.state, row.reason) == ("failed", "model glass: pip could not download it")

    def interrupt(entry: object, report: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(holdings, "fetch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        disk.fetch("glass", report=print)
    assert models.get("glass").state == "missing"


def test_a_scan_finds_gguf_files(models: Models, disk: Holdings, home: Path) -> None:
    (home / "models").mkdir()
    file = write(home / "models" / "tiny.gguf")
    (home / "models" / "notes.txt").write_text("no model")
    found = disk.scan()
    assert (found.added, found.refused) == (["tiny"], {})
    assert models.get("tiny").path == str(file)
    file.unlink()
    assert disk.scan().vanished == ["tiny"]
    assert disk.remove("tiny").folder is None
