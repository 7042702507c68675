"""What a record says of the weights that were loaded."""

import hashlib
import json
from pathlib import Path

import pytest

from catalogue.checkpoint import identify, write_provenance

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_a_snapshot_is_named_by_its_commit(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "models--allenai--OLMo--2" / "snapshots" / COMMIT)
    assert identify(folder, "auto") == {
        "source": "hub",
        "path": str(folder),
        "repo": "allenai/OLMo--2",
        "revision": COMMIT,
    }


def test_a_converted_package_is_named_by_its_wheel(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "glass")
    write_provenance(folder, {"package": "glassllm", "version": "0.1.0", "sha256": "ab" * 32})
    assert identify(folder, "auto") == {
        "source": "package",
        "path": str(folder),
        "requirement": "glassllm==0.1.0",
        "sha256": "ab" * 32,
    }


def test_a_folder_is_named_by_its_config(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "mine" / COMMIT)
    assert identify(folder, "safetensors") == {
        "source": "folder",
        "path": str(folder),
        "config_sha256": hashlib.sha256(b"{}").hexdigest(),
    }
    (folder / "config.json").unlink()
    assert identify(folder, "auto")["config_sha256"] is None


@pytest.mark.parametrize(
    ("notes", "revision"),
    [
        ({"model.safetensors": COMMIT}, COMMIT),
        ({"model.safetensors": "main"}, None),
        ({"model.safetensors": COMMIT, "model-2.safetensors": "f" * 40}, None),
        ({"config.json": COMMIT}, None),
    ],
)
def test_a_downloaded_folder_has_the_commit_of_all_its_weights(
    tmp_path: Path, notes: dict[str, str], revision: str | None
) -> None:
    folder = checkpoint(tmp_path / "mine")
    downloads = folder / ".cache" / "huggingface" / "download"
    downloads.mkdir(parents=True)
    for name, commit in notes.items():
        (folder / name).touch()
        (downloads / f"{name}.metadata").write_text(f"{commit}\netag\n1700000000.0\n")
    assert identify(folder, "auto").get("revision") == revision


def test_random_weights_are_no_checkpoint_s(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "models--a--b" / "snapshots" / COMMIT)
    assert identify(folder, "dummy") == {"source": "random", "path": str(folder)}
    assert json.loads(json.dumps(identify(None, "dummy"))) == {"source": "random", "path": None}
