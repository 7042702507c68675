"""The one door, and the command line before it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.models import __main__ as command
from harness.models.resolve import ModelUnavailableError, ensure_model


def test_a_folder_with_a_checkpoint_is_returned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert ensure_model("mine", {"kind": "folder", "path": str(tmp_path)}) == tmp_path


def test_a_folder_that_lacks_files_names_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelUnavailableError, match=r"lacks \*\.safetensors\. What helps"):
        ensure_model("mine", {"kind": "folder", "path": str(tmp_path)})
    with pytest.raises(ModelUnavailableError, match="expected a folder, found none at"):
        ensure_model("mine", {"kind": "folder", "path": str(tmp_path / "no")})


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "found none"),
        ('{"model_type": ', "cannot be read (Expecting value"),
        ("[]", "got a list in it"),
    ],
)
def test_an_unusable_config_is_told_before_weights_are_looked_for(
    content: str | None, fault: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelUnavailableError, match=r"expected a config\.json with") as error:
        ensure_model("mine", {"kind": "folder", "path": str(tmp_path)})
    assert fault in str(error.value)
    assert "*.safetensors" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("../x", {"kind": "folder", "path": "/"}, "model name: expected letters"),
        ("x", {"kind": "torrent"}, "hub, package or folder, got 'torrent'"),
        ("x", {}, "hub, package or folder, got 'None'"),
        ("x", {"kind": "hub"}, r"model\.source\.repo: expected a value for kind 'hub', got None"),
        ("x", {"kind": "hub", "repo": "a b/c"}, r"OWNER/NAME, got 'a b/c'"),
        ("x", {"kind": "package", "package": "p", "version": "1"}, r"model\.source\.sha256"),
        ("x", {"kind": "folder"}, r"model\.source\.path"),
    ],
)
def test_an_unusable_source_is_a_value_error(
    name: str, source: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ensure_model(name, source)


def test_fetch_prints_the_folder_and_refuses_unknown_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text(
        json.dumps({"source": {"kind": "folder", "path": str(tmp_path)}})
    )
    (tmp_path / "conf" / "bare.yaml").write_text("name: bare\n")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(command, "MODELS", tmp_path / "conf")

    assert command.main(["fetch", "mine"]) == 3
    assert "lacks *.safetensors" in capsys.readouterr().err
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert command.main(["fetch", "mine"]) == 0
    assert capsys.readouterr().out == f"mine: {tmp_path}\n"
    assert command.main(["fetch", "mime"]) == 2
    assert "expected one of bare, mine, got 'mime'. Did you mean mine?" in capsys.readouterr().err
    assert command.main(["fetch", "bare"]) == 2
    assert "bare.yaml: expected a node `source`" in capsys.readouterr().err


def test_home_prints_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path))
    assert command.main(["home"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"


def test_the_package_loads_no_heavy_library() -> None:
    heavy = "{'torch', 'transformers', 'huggingface_hub', 'gguf', 'tokenizers', 'mlflow', 'hydra'}"
    code = f"import sys, harness.models.__main__; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_models_of_a_user_s_folder_are_fetched_too(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(f"name: mine\npath: {tmp_path / 'weights'}\n")
    (tmp_path / "model" / "broken.yaml").write_text("name: [\n")
    words = ["--config-dir", str(tmp_path)]
    assert command.main(["fetch", "mine", *words]) == 3
    assert f"found none at {tmp_path / 'weights'}" in capsys.readouterr().err
    assert command.main(["fetch", "mime", *words]) == 2
    assert "Did you mean mine?" in capsys.readouterr().err
    assert command.main(["fetch", "broken", *words]) == 2
    assert "expected YAML" in capsys.readouterr().err
    assert command.main(["fetch", "mine"]) == 2
