"""Looking up and refusing hub models; every call into the hub library is replaced."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import pytest
from huggingface_hub import errors

from catalogue import checkpoint
from catalogue.checkpoint import ModelUnavailableError, missing_files
from catalogue.entry import ModelSource
from catalogue.hub import ensure_config, ensure_hub_model

SOURCE = ModelSource(kind="hub", repo="owner/name", revision="main")
COMMIT = "c0ffee" + 34 * "0"
GIB = 1 << 30


def _snapshot(folder: Path, *, shards: int = 2, absent: int = 0) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    names = [f"model-{index}.safetensors" for index in range(shards)]
    weight_map = {f"w{index}": name for index, name in enumerate(names)}
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    for name in names[: shards - absent]:
        (folder / name).write_bytes(b"")
    return folder


class Hub:
    """Stands for the hub library: what is cached, what the hub lists, what it refuses."""

    def __init__(self) -> None:
        self.files = {
            "config.json": 1000,
            "model-0.safetensors": 3 * GIB,
            "tokenizer.json": 1000,
            "consolidated.safetensors": 9 * GIB,
            "original/params.json": 9 * GIB,
            "pytorch_model.bin": 9 * GIB,
        }
        self.error: Exception | None = None
        self.downloaded: Path | None = None
        self.lookups = 0

    def model_info(self, repo: str, **options: Any) -> SimpleNamespace:
        self.lookups += 1
        assert options["timeout"] <= 10
        if self.error is not None:
            raise self.error
        siblings = [SimpleNamespace(rfilename=n, size=size) for n, size in self.files.items()]
        return SimpleNamespace(sha=COMMIT, siblings=siblings)

    def snapshot_download(self, repo: str, **options: Any) -> str:
        assert options["revision"] == "main"
        assert self.downloaded is not None, "nothing may be downloaded here"
        self.patterns = options["allow_patterns"]
        return str(self.downloaded)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    fake = Hub()
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "theirs"))
    return fake


def _http_error(kind: type[errors.HfHubHTTPError]) -> Exception:
    error = kind.__new__(kind)
    error.args = ("refused",)
    return error


def test_missing_files_names_absent_shards(tmp_path: Path) -> None:
    folder = _snapshot(tmp_path / "a", absent=1)
    assert missing_files(folder) == ["model-1.safetensors"]
    (folder / "model-1.safetensors").write_bytes(b"")
    assert missing_files(folder) == []
    assert missing_files(tmp_path) == ["config.json", "*.safetensors"]
    single = _snapshot(tmp_path / "b", absent=2)
    (single / "model.safetensors").write_bytes(b"")
    assert missing_files(single) == []


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"weight_map": ["a"]}', "\ufeff{"])
def test_an_index_that_is_none_is_lacking(tmp_path: Path, content: str) -> None:
    folder = _snapshot(tmp_path / "a", absent=1)
    (folder / "model.safetensors.index.json").write_text(content, encoding="utf-8")
    (lacking,) = missing_files(folder)
    assert "model.safetensors.index.json" in lacking


def _cached(cache: Path, *, absent: int = 0, revision: str = "main") -> Path:
    """A snapshot where the hub library keeps it."""
    repository = cache / "models--owner--name"
    if revision != COMMIT:
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / revision).write_text(COMMIT)
    return _snapshot(repository / "snapshots" / COMMIT, absent=absent)


@pytest.mark.parametrize("where", ["home/hub", "theirs"])
@pytest.mark.parametrize("revision", ["main", "v1", COMMIT])
def test_a_complete_snapshot_in_either_cache_is_used(
    hub: Hub, tmp_path: Path, where: str, revision: str
) -> None:
    folder = _cached(tmp_path / where, revision=revision)
    source = ModelSource(kind="hub", repo="owner/name", revision=revision)
    assert ensure_hub_model("m", source) == folder
    assert hub.lookups == 0


def test_the_hub_library_finds_a_cache_of_this_layout(tmp_path: Path) -> None:
    folder = _cached(tmp_path)
    found = huggingface_hub.snapshot_download(
        "owner/name", revision="main", cache_dir=tmp_path, local_files_only=True
    )
    assert Path(found) == folder


def test_config_is_had_alone(hub: Hub, tmp_path: Path) -> None:
    hub.downloaded = tmp_path
    assert ensure_config("m", SOURCE) == tmp_path
    assert hub.patterns == ["config.json"]
    hub.downloaded = None
    folder = _cached(tmp_path / "home" / "hub", absent=1)
    assert ensure_config("m", SOURCE) == folder


def test_an_incomplete_snapshot_is_not_used(hub: Hub, tmp_path: Path) -> None:
    _cached(tmp_path / "theirs", absent=1)
    hub.downloaded = _snapshot(tmp_path / "fresh")
    lines: list[str] = []
    assert ensure_hub_model("m", SOURCE, report=lines.append) == tmp_path / "fresh"
    assert lines == [f"m: downloading owner/name (3.0 GiB) into {tmp_path / 'home' / 'hub'}"]


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (
            ConnectionError("x"),
            ["cannot be reached (ConnectionError)", "fetch owner/name`", "model.path=FOLDER"],
        ),
        (errors.OfflineModeIsEnabled("x"), ["cannot be reached", "model.load_format=dummy"]),
        (_http_error(errors.HfHubHTTPError), ["cannot be reached (HfHubHTTPError)"]),
        (_http_error(errors.GatedRepoError), ["gated", "hf auth login", "HF_TOKEN"]),
        (_http_error(errors.RepositoryNotFoundError), ["no such repository", "model.source.repo"]),
        (
            _http_error(errors.RevisionNotFoundError),
            ["no revision 'main'", "model.source.revision"],
        ),
    ],
)
def test_refusals_name_reason_and_remedy(hub: Hub, error: Exception, parts: list[str]) -> None:
    hub.error = error
    with pytest.raises(ModelUnavailableError) as caught:
        ensure_hub_model("m", SOURCE)
    assert [part for part in parts if part not in str(caught.value)] == []
    assert caught.value.__cause__ is None
    assert hub.lookups == 1


def test_transport_errors_of_the_http_client_are_caught(hub: Hub) -> None:
    base = errors.HfHubHTTPError.__mro__[1]
    hub.error = type("ConnectTimeout", (base,), {})("timed out")
    with pytest.raises(ModelUnavailableError, match=r"cannot be reached \(ConnectTimeout\)"):
        ensure_hub_model("m", SOURCE)


def test_only_wanted_files_count_for_the_disk(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        checkpoint.shutil, "disk_usage", lambda folder: SimpleNamespace(free=3 * GIB)
    )
    with pytest.raises(
        ModelUnavailableError, match=r"expected 3\.5 GiB free at .*, found 3\.0 GiB"
    ):
        ensure_hub_model("m", SOURCE)


def test_bytes_that_are_there_already_count(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = tmp_path / "home" / "hub" / "models--owner--name" / "blobs"
    blobs.mkdir(parents=True)
    with (blobs / "part").open("wb") as stream:
        stream.truncate(GIB)
    monkeypatch.setattr(
        checkpoint.shutil, "disk_usage", lambda folder: SimpleNamespace(free=3 * GIB)
    )
    hub.downloaded = _snapshot(tmp_path / "fresh")
    assert ensure_hub_model("m", SOURCE) == tmp_path / "fresh"


def test_a_repository_without_safetensors_is_refused(hub: Hub) -> None:
    hub.files = {"config.json": 1, "pytorch_model.bin": 5}
    with pytest.raises(ModelUnavailableError, match="expected weights in safetensors, found none"):
        ensure_hub_model("m", SOURCE)


def test_an_incomplete_download_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.downloaded = _snapshot(tmp_path / "fresh", absent=2)
    with pytest.raises(ModelUnavailableError, match=r"lacks model-0\.safetensors, model-1"):
        ensure_hub_model("m", SOURCE)
