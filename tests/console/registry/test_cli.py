"""`tightfit models`: one command for the registry and the catalogue."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from console.registry.cli import VERBS, main
from console.registry.database import Database
from console.registry.models import Models
from console.registry.results import Results
from engine.device import machine
from tests.console.registry.conftest import checkpoint, measured

Command = Callable[..., Any]


@pytest.fixture
def models_command(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Command:
    """Run a command; return its code, and what it wrote, as JSON where that was asked for."""
    monkeypatch.setattr(machine, "open_gpu", lambda: None)

    def run(*arguments: object) -> tuple[int, Any, str]:
        code = main([str(each) for each in arguments], {})
        said = capsys.readouterr()
        is_json = "--json" in arguments
        return code, json.loads(said.out) if is_json else said.out, said.err

    return run


@pytest.mark.thorough
def test_without_a_registry_the_catalogue_is_shown_and_none_is_made(
    models_command: Command, home: Path
) -> None:
    code, out, _ = models_command("list")
    assert code == 0
    heads = [line.split() for line in out.splitlines() if line.startswith("  model ")]
    assert heads == [
        ["model", "here", "GiB", "on", "disk", "billion", "weights"],
        ["model", "source"],
    ]
    assert "olmo7b" in out
    assert "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4" in out
    assert max(map(len, out.splitlines())) <= 80
    code, out, _ = models_command("show", "olmo7b")
    assert "allenai/OLMo-2-1124-7B-Instruct" in out
    assert "512.0 KiB" in out
    assert models_command("home")[1] == f"{home}\n"
    assert not home.exists()


def test_a_model_is_added_shown_changed_and_removed(
    models_command: Command, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "mine")
    code, out, _ = models_command("add", folder, "--card", "rtx4080_16gb", "--seed", "7")
    assert code == 0
    first, verdict, *_, profile, price = out.splitlines()
    assert first == f"mine is added (0.00 GiB, in {folder})."
    assert verdict.startswith("mine fits rtx4080_16gb: ")
    assert profile == "Profile default: seed=7 max_num_seqs=256"
    assert price.startswith("Predicted: ")
    assert price.endswith("(data sheet of rtx4080_16gb)")
    code, out, _ = models_command("set", "mine", "--cpu-offload-gb", "0.001", "--unset", "seed")
    assert out.splitlines()[0] == "Profile default: max_num_seqs=256 cpu_offload_gb=0.001"
    assert "\nnote: --offload uva is not needed: " in out  # in words of this command
    code, _, said = models_command("set", "mine", "--unset", "cpu-ofload-gb")
    assert code == 2
    assert "got 'cpu-ofload-gb'. Did you mean cpu_offload_gb?" in " ".join(said.split())
    _, out, _ = models_command("set", "mine", "--profile", "plain", "--unset", "cpu_offload_gb")
    assert out.splitlines()[0] == "Profile plain: max_num_seqs=256"
    assert models_command("set", "mine", "--profile", "plain", "--default")[0] == 0
    _, out, _ = models_command("list")
    added = out.splitlines()[1].split()
    assert added == [
        "mine",
        "untested",
        "0.00",
        "0.00",
        "-",
        "max_num_seqs=256",
        *str(folder).split(),
    ]
    _, out, _ = models_command("show", "mine", "--card", "rtx4080_16gb")
    assert "profile plain (default)  max_num_seqs=256" in out
    assert "mine fits rtx4080_16gb: " in out
    code, out, _ = models_command("set", "mine", "--profile", "default", "--drop")
    assert out == "mine: profile default is removed\n"
    code, _, err = models_command("remove", "mine")
    assert (code, err.startswith("error: model mine: expected files that were fetched")) == (
        2,
        True,
    )
    code, out, _ = models_command("remove", "mine", "--keep-files", "--dry-run")
    assert out.startswith("mine: no files would be removed, with 1 profile, 0 tests")
    assert models_command("remove", "mine", "--keep-files")[0] == 0
    assert "mine" not in models_command("list")[1]


def test_texts_are_as_wide_as_the_terminal(
    models_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "mine")
    models_command("add", folder, "--as", "m", "--as-is")
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = models_command("set", "m", "--cpu-offload-gb", "0.001")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.thorough
def test_every_answer_is_there_as_json(models_command: Command, tmp_path: Path, home: Path) -> None:
    folder = checkpoint(home / "models" / "mine")
    _, found, _ = models_command("add", folder, "--as", "m", "--as-is", "--json")
    assert (found["name"], found["profiles"][0]["settings"], found["plan"]) == ("m", {}, None)
    database = Database.open()
    results = Results(database)
    asked = {"profiles": {"default": {"max_num_seqs": 4}}, "profile_ids": {"default": 1}}
    run = results.create(1, "test", profile_id=1, status="finished", settings=asked)
    measured(results, run, "CPU", "throughput", {"throughput/output_tok_s": 12.5})
    database.close()
    _, found, _ = models_command("list", "--json")
    assert [(row["name"], row["output_tok_s"]) for row in found["models"]] == [("m", 12.5)]
    assert "olmo7b" in [entry["name"] for entry in found["catalogue"]]
    assert "spec" not in found["models"][0]
    listed = found["models"][0]
    _, found, _ = models_command("show", "m", "--json", "--card", "cpu")
    assert {name: found[name] for name in listed if name != "output_tok_s"} == {
        name: value for name, value in listed.items() if name != "output_tok_s"
    }
    assert found["spec"]["num_hidden_layers"] == 2
    assert (found["tests"][0]["status"], found["performance"][0]["card"]) == ("finished", "CPU")
    assert found["plan"]["verdict"] == "fits"
    assert found["plan"]["measured"][0]["settings"] == {"max_num_seqs": 4}
    _, out, _ = models_command("show", "m")
    assert "measured, default  CPU, output 12.5 tok/s\n" in out
    _, found, _ = models_command("set", "m", "--propose", "--json")
    assert found["profiles"][0]["settings"] == {"max_num_seqs": 4}  # as measured
    _, found, _ = models_command("scan", "--json")
    assert found["added"] == []
    _, found, _ = models_command("remove", "m", "--dry-run", "--json")
    assert (found["folder"], found["num_tests"]) == (str(folder), 1)
    code, found, said = models_command("show", "nope", "--json")
    assert (code, found["kind"], found["exit_code"]) == (2, "error", 2)
    assert said == f"error: {found['message']}\n"
    _, found, _ = models_command("show", "olmo7b", "--json")
    assert found["spec"]["num_hidden_layers"] == 32


@pytest.mark.thorough
def test_a_list_loads_no_sqlalchemy(models_command: Command, tmp_path: Path) -> None:
    models_command("add", checkpoint(tmp_path / "mine"), "--as-is")
    code = (
        "import sys\nfrom console.registry.cli import main\nmain(['list'], {})\n"
        "print([name for name in ('sqlalchemy', 'torch', 'psutil') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    added, *_, loaded = done.stdout.splitlines()[1:]
    assert added.split()[:2] == ["mine", "untested"]
    assert loaded == "[]"


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        (["add", "nothing here"], 2, "source: expected one of gemma3_1b,"),
        (["add", "glass", "--as", "a/b"], 2, "name: expected letters, digits"),
        (["add", "glass", "--gpu-memory-utilization", "1.01"], 2, "--gpu-memory-utilization: exp"),
        (["add", "glass", "--max-model-len", "4096"], 2, "at most the model's 128 positions"),
        (["add", "glass", "--card", "rtx"], 2, "card: expected cpu or a card of conf/gpu,"),
        (["add", "glass", "--card", "cpu", "--as-is"], 2, "card: expected none beside --as-is"),
        (["show", "glass", "--card", "cpu"], 2, "card: expected a model that was added, got glass"),
        (["set", "glass"], 2, "set: expected a setting, such as --cpu-offload-gb 4"),
        (["set", "glass", "--seed", "1"], 2, "a model of the registry (it has none), got 'glass'"),
        (["set", "glass", "--drop"], 2, "drop: expected --profile NAME beside it"),
        (["remove", "glass"], 2, "model glass: expected files that were fetched"),
        (["remove", "glass", "--keep-files"], 2, "expected a model that was added, got glass"),
        (["show", "glas"], 2, "Did you mean glass?"),
    ],
)  # fmt: skip
def test_refusals(typed: list[str], code: int, said: str, models_command: Command) -> None:
    found, out, err = models_command(*typed)
    assert (found, out) == (code, "")
    assert err.startswith("error: ")
    assert said in err


def test_a_model_in_use_is_another_code(
    models_command: Command, models: Models, database: Database
) -> None:
    models.store(models.describe("glass"), {})
    Results(database).create(1, "test")
    code, _, err = models_command("remove", "glass", "--keep-files")
    assert (code, err) == (3, "error: model glass: its test 1 has not ended. Cancel that first.\n")


def test_files_of_models_that_were_not_added_are_fetched_and_removed(
    models_command: Command, tmp_path: Path, home: Path
) -> None:
    (tmp_path / "model").mkdir()
    weights = tmp_path / "weights"
    (tmp_path / "model" / "mine.yaml").write_text(f"name: mine\npath: {weights}\n")
    (tmp_path / "model" / "bare.yaml").write_text("name: bare\n")
    words = ["--config-dir", tmp_path]
    code, _, err = models_command("fetch", "mine", *words)
    assert code == 3
    assert f"found none at {weights}" in err
    checkpoint(weights)
    assert models_command("fetch", "mine", *words)[:2] == (0, f"mine: {weights}\n")
    code, _, err = models_command("fetch", "mime", *words)
    assert code == 2
    assert "got 'mime'. Did you mean mine?" in err
    code, _, err = models_command("fetch", "bare", *words)
    assert code == 2
    assert "model bare: expected a model with a source" in err
    checkpoint(home / "models" / "glass")
    assert models_command("remove", "glass", "--dry-run")[1] == "glass: 0.00 GiB would be removed\n"
    assert models_command("remove", "glass")[1] == "glass: 0.00 GiB removed\n"
    assert not (home / "models" / "glass").exists()


def test_help_names_every_verb_and_others_carry_out_some(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"], {})
    out = capsys.readouterr().out
    assert all(f"    {verb} " in out for verb in VERBS)
    handed: list[list[str]] = []
    assert (
        main(["pack", "x", "--device", "cpu"], {"pack": lambda each: handed.append(each) or 0}) == 0
    )
    assert handed == [["x", "--device", "cpu"]]


def test_the_command_loads_no_heavy_library() -> None:
    heavy = (
        "{'torch', 'transformers', 'gguf', 'tokenizers', 'mlflow', 'hydra', 'omegaconf', "
        "'sqlalchemy', 'alembic'}"
    )
    code = f"import sys, console.registry.cli; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
