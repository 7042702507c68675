"""Models are added with sizes from their files, their settings checked as the engine does."""

import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError
from sqlalchemy import text

from catalogue.checkpoint import ModelUnavailableError
from catalogue.models import find
from console.registry.checks import FieldError
from console.registry.database import Database
from console.registry.models import Models, default_of, entry_of, profile_of
from tests.console.registry.conftest import checkpoint
from tests.console.registry.gguf_file import write

CARD = "rtx4080_16gb"
WEIGHTS_BYTES = 4 * (2 * 32 * 32 + 32 + 2 * (4 * 32 * 32 + 3 * 64 * 32 + 2 * 32))


def test_a_folder_is_added_with_the_sizes_of_its_headers(models: Models, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "Mixtral-8x7B", shards=3)
    row = models.add(str(folder), settings={"max-num-seqs": "4", "cpu_offload_gb": None}, card=CARD)
    assert row.to_dict() | {"created_s": 0, "changed_s": 0, "spec": None} == {
        "id": 1,
        "name": "Mixtral-8x7B",
        "source": str(folder),
        "kind": "folder",
        "revision": None,
        "identity": f"folder:{folder}",
        "path": str(folder),
        "family": "llama",
        "format": "float32",
        "num_parameters": WEIGHTS_BYTES // 4,
        "weights_bytes": WEIGHTS_BYTES,
        "max_model_len": 64,
        "spec": None,
        "state": "untested",
        "reason": None,
        "done_bytes": None,
        "total_bytes": None,
        "pid": None,
        "pid_started_s": None,
        "created_s": 0,
        "changed_s": 0,
    }
    assert default_of(row).settings == {"max_num_seqs": 4}
    assert models.list()[0].profiles[0].name == "default"


def test_a_name_of_the_catalogue_and_a_hub_s_id_are_one_model(models: Models) -> None:
    row = models.store(models.describe("allenai/OLMo-2-1124-7B-Instruct"), {})
    assert (row.name, row.source, row.kind, row.state) == ("olmo7b", "olmo7b", "hub", "missing")
    assert row.reason == "its files are not on this machine"
    assert row.weights_bytes == find("olmo7b").spec.weight_bytes()
    assert entry_of(row) == find("olmo7b")
    with pytest.raises(FieldError, match=r"source: .* got that of olmo7b") as refused:
        models.add("olmo7b", name="other")
    assert refused.value.field == "source"


def test_a_folder_of_the_working_folder_is_not_taken_for_the_catalogue_s(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = models.add("glass")
    checkpoint(tmp_path / "glass")
    monkeypatch.chdir(tmp_path)
    assert entry_of(row).source.kind == "package"


def test_a_hub_s_model_needs_its_config_alone(models: Models, home: Path) -> None:
    repository = home / "hub" / "models--a--b"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "v1").write_text("c0ffee")
    snapshot = checkpoint(repository / "snapshots" / "c0ffee", shards=2)
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    row = models.add("a/b", name="mine", revision="v1")
    assert (row.source, row.revision, row.state) == ("a/b", "v1", "missing")
    assert row.reason.startswith("lacks model-00002-of-00002.safetensors (")
    assert row.weights_bytes == WEIGHTS_BYTES
    assert entry_of(row).source.repo == "a/b"


@pytest.mark.parametrize(
    "name",
    ["", "a/b", "..", "a..b", ".a", "a'b", 'a"b', "a\nb", "{}", "a b", "<img onerror>", "n" * 97],
)
def test_a_name_that_is_none_is_refused(models: Models, name: str) -> None:
    for arguments in ({"name": name}, {"profile": name}):
        with pytest.raises(FieldError, match="expected letters, digits") as refused:
            models.add("glass", **arguments)
        assert refused.value.field == next(iter(arguments))
        assert "\n" not in str(refused.value)
    assert models.list() == []


@pytest.mark.parametrize(
    "source", ["", " ", "a\nb", "\0", "a/..", "../b", "a/b/c", "{}/{}", "no'such", "-a/b", "a/.b"]
)
def test_a_source_that_is_none_is_refused(models: Models, source: str) -> None:
    with pytest.raises(FieldError, match="source: expected ") as refused:
        models.add(source)
    assert refused.value.field == "source"


def test_names_are_taken_whatever_their_case(models: Models, tmp_path: Path) -> None:
    models.add("glass")
    with pytest.raises(FieldError, match=r"name: expected one that no model .* got GLASS"):
        models.add(str(checkpoint(tmp_path / "x")), name="GLASS")


def test_a_folder_called_otherwise_gets_a_name(models: Models, tmp_path: Path) -> None:
    assert (
        models.describe(
            str(checkpoint(tmp_path / "my mod\N{LATIN SMALL LETTER E WITH ACUTE}l..1"))
        ).name
        == "my_mod_l.1"
    )
    assert models.describe(str(checkpoint(tmp_path / "(...)"))).name == "model"


def test_a_revision_is_of_a_hub_s_repository_alone(models: Models) -> None:
    with pytest.raises(FieldError, match="revision: expected one of a hub's repository alone"):
        models.add("glass", revision="main")
    with pytest.raises(FieldError, match="revision: expected a branch, tag or commit"):
        models.add("a/b", revision="../x")


def test_a_folder_that_is_not_whole_is_refused(models: Models, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "a", shards=3)
    shard = folder / "model-00002-of-00003.safetensors"
    whole = shard.read_bytes()
    shard.unlink()
    with pytest.raises(FieldError, match=r"source: .* lacks model-00002-of-00003\.safetensors\. F"):
        models.add(str(folder))
    shard.write_bytes(whole[:-8])
    with pytest.raises(FieldError, match="is cut short; fetch it again"):
        models.add(str(folder))
    shard.write_bytes(whole)
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(FieldError, match=r"source: .*bert"):
        models.add(str(folder))
    with pytest.raises(FieldError, match=r"a file whose name ends in \.gguf, got the file"):
        models.add(str(shard))


def test_a_gguf_file_is_a_model(models: Models, tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.F32.gguf")
    row = models.store(models.describe(str(file)), {})
    assert (row.name, row.kind, row.state, row.path) == ("tiny.F32", "gguf", "untested", str(file))
    assert (row.format, row.weights_bytes, row.max_model_len) == ("gguf", WEIGHTS_BYTES, 64)
    assert entry_of(row).path == str(file)
    with pytest.raises(
        FieldError, match=r"expected one GGUF file, got the folder .*tiny\.F32\.gguf"
    ):
        models.describe(str(tmp_path))
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(FieldError, match=r"source: .*cut\.gguf: .* is cut short"):
        models.describe(str(file.rename(tmp_path / "cut.gguf")))
    (tmp_path / "no.gguf").write_bytes(b"nothing of the kind")
    with pytest.raises(FieldError, match=r"no\.gguf: not a GGUF file"):
        models.describe(str(tmp_path / "no.gguf"))


@pytest.mark.parametrize(
    ("settings", "field", "message"),
    [
        ({"gpu_memory_utilization": 0}, None, "--gpu-memory-utilization: expected a number > 0"),
        ({"gpu_memory_utilization": 1.01}, None, "expected a number > 0 and <= 1, got 1.01"),
        ({"gpu_memory_utilization": -0.5}, None, "got -0.5"),
        ({"max_num_seqs": 0}, None, "--max-num-seqs: expected an integer >= 1, got 0"),
        ({"max_num_seqs": True}, None, "expected an integer >= 1, got True"),
        ({"max_model_len": 129}, None, "--max-model-len: .* at most the model's 128 positions"),
        ({"cpu_offload_gb": float("nan")}, None, "--cpu-offload-gb: expected a finite number"),
        ({"offload": "half"}, None, "offload: expected one of none, auto, uva, prefetch, experts"),
        (
            {"offload": "none", "cpu_offload_gb": 4},
            None,
            "offload: expected no --cpu-offload-gb beside --offload none, got 4",
        ),
        ({"offload": "auto", "cpu_offload_gb": 4}, None, "expected no offload settings beside it"),
        ({"max_num_seqs": 4000}, None, "--max-num-batched-tokens: expected at least"),
        ({"host": "0.0.0.0"}, None, "host: there is no such setting of the engine"),
        ({"{}": 1}, "settings", "there is no such setting of the engine"),
    ],
)
def test_settings_are_refused_as_by_the_engine(
    models: Models, settings: dict[str, object], field: str | None, message: str
) -> None:
    with pytest.raises(FieldError, match=message) as refused:
        models.add("glass", settings=settings)
    assert refused.value.field == (field or next(iter(settings)))
    models.store(models.describe("glass"), {"max_num_seqs": 8})
    with pytest.raises(FieldError, match=message):
        models.set_profile("glass", settings=settings)
    assert profile_of(models.get("glass")).settings == {"max_num_seqs": 8}


def test_settings_change_and_the_others_keep_their_values(models: Models) -> None:
    models.store(
        models.describe("glass"), {"max_num_seqs": 8, "cpu_gib": 2, "enforce_eager": "yes"}
    )
    changed = models.set_profile("glass", settings={"max_num_seqs": None, "seed": 3})
    assert changed.settings == {"kv_cpu_gib": 2, "enforce_eager": True, "seed": 3}
    new = models.set_profile("glass", "long", {"max_model_len": 128}, make_default=True)
    assert new.settings == changed.settings | {"max_model_len": 128}
    row = models.get("glass")
    assert [(each.name, each.is_default) for each in row.profiles] == [
        ("default", False),
        ("long", True),
    ]
    with pytest.raises(FieldError, match="expected another one than the default, got long"):
        models.remove_profile("glass", "long")
    models.remove_profile("glass", "default")
    with pytest.raises(FieldError, match="profile: expected one of long, got 'default'"):
        models.remove_profile("glass", "default")


def test_the_database_holds_no_second_default(models: Models, database: Database) -> None:
    models.add("glass")
    models.set_profile("glass", "b")
    with pytest.raises(Exception, match="UNIQUE constraint failed"), database.write() as session:
        session.execute(text("UPDATE profiles SET is_default = 1"))


def test_a_gated_model_without_access_says_so_and_no_token_is_kept(
    models: Models, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = GatedRepoError.__new__(GatedRepoError)
    error.args = ("401 for hf_secret",)

    def refuse(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelUnavailableError, match=r"a/b is gated .* \(`hf auth login`, or HF_TO"):
        models.add("a/b")
    assert models.list() == []
    assert all(b"hf_secret" not in file.read_bytes() for file in home.glob("registry.db*"))


def test_a_model_that_is_none_is_refused(models: Models) -> None:
    for name in ("x", 7, "1; DROP TABLE models"):
        with pytest.raises(FieldError, match=r"expected a model of the registry \(it has none\)"):
            models.get(name)


def test_a_wrong_name_is_refused_with_the_names_there_are_and_how_to_add_one(
    models: Models, tmp_path: Path
) -> None:
    for number in range(12):
        models.add(str(checkpoint(tmp_path / f"{number}")), name=f"m{number:02}")
    listed = ", ".join(f"m{number:02}" for number in range(10))
    with pytest.raises(FieldError) as error:
        models.get("none")
    assert str(error.value) == (
        f"model: expected a model of the registry ({listed}, 2 more), got 'none'. "
        "`tightfit models add NAME` adds one."
    )
