"""The command `tightfit`: its words, what it hands on, and what it says without an environment."""

import ast
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

import console.registry.cli
import harness.__main__
import harness.search
import reports.__main__
import server.chat
import server.run
from harness import needs
from tests.contracts.project import ROOT
from tightfit.__main__ import main
from tightfit.cli import COMMANDS


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """What is handed on to the modules below, which do nothing."""
    found: list[tuple[str, list[str]]] = []
    for name, module in {
        "harness": harness.__main__,
        "search": harness.search,
        "models": console.registry.cli,
        "reports": reports.__main__,
        "serve": server.run,
        "chat": server.chat,
    }.items():

        def keep(arguments: list[str], *_: object, name: str = name, **__: object) -> int:
            found.append((name, list(arguments)))
            return 0

        monkeypatch.setattr(module, "main", keep)
    return found


@pytest.mark.parametrize(
    ("typed", "module", "arguments"),
    [
        (["run", "gpu=cpu", "+model=glass"], "harness", ["gpu=cpu", "+model=glass"]),
        (["plan", "model=glass"], "harness", ["mode=plan", "model=glass"]),
        (["sweep", "offload=none,uva"], "harness", ["-m", "offload=none,uva"]),
        (["ab", "model=glass"], "harness", ["scenario=ab", "model=glass"]),
        (["search", "--trials", "3"], "search", ["--trials", "3"]),
        (["models", "fetch", "glass"], "models", ["fetch", "glass"]),
        (["serve", "glass", "--port", "9"], "serve", ["glass", "--port", "9"]),
        (["chat", "glass"], "chat", ["glass"]),
        (["help", "run"], "harness", ["--help"]),
    ],
)
def test_words_are_handed_on(
    typed: list[str], module: str, arguments: list[str], handed: list[tuple[str, list[str]]]
) -> None:
    assert main(typed) == 0
    assert handed == [(module, arguments)]


@pytest.mark.parametrize(
    "typed", [[], ["help"], ["--help"], ["-h"], ["help", "--help"], ["help", "-h"]]
)
def test_help_lists_every_command(typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(typed) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    for command in COMMANDS:
        assert [line for line in lines if line.startswith(f"  {command.name} ")], command.name


@pytest.mark.parametrize(
    "name",
    [
        *(each.name for each in COMMANDS if each.name != "version"),
        *("models add", "models set", "service install"),
    ],
)
def test_each_command_has_a_help_of_its_own(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with suppress(SystemExit):  # argparse ends with its help
        main(["help", *name.split()])
    shown = capsys.readouterr().out
    assert f"usage: tightfit {name} " in shown.replace("COMMAND", "help ")
    assert not [line for line in shown.splitlines() if len(line) > 80]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["pln"], "got 'pln'. Did you mean `tightfit plan`?"),
        (["qqq"], "got 'qqq'. `tightfit help` lists them."),
        (["nonsense"], "got 'nonsense'. `tightfit help` lists them."),
        (["gpu=cpu", "-m"], "Did you mean: `tightfit run gpu=cpu -m`"),
    ],
)
def test_other_words_are_refused(
    typed: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed) == 2
    shown = capsys.readouterr()
    assert shown.err.strip().endswith(said)
    assert not shown.out


def test_ui_shows_the_runs_of_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[tuple[object, ...]] = []
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path))
    monkeypatch.setattr("harness.ui.serve", lambda *asked: started.append(asked))
    assert main(["ui", "--port", "0"]) == 0
    [(store, home, _, _)] = started
    assert (store, home) == (f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path)


def test_help_and_version_load_neither_torch_nor_hydra() -> None:
    code = "import sys; from tightfit.__main__ import main; main(['help']); main(['version']); "
    code += "sys.exit(str({'torch', 'hydra', 'yaml'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr.strip() == "set()"
    assert "tightfit 0." in done.stdout or "not installed" in done.stdout


@pytest.mark.parametrize("module", ["harness", "tightfit"])
def test_without_the_environment_a_sentence_says_so(module: str) -> None:
    """`-S` takes the packages away, as another Python would lack them."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", module], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    *_, setup, activate = done.stderr.splitlines()
    assert done.stderr.startswith("tightfit: expected its packages in Python ")
    assert "found no torch, transformers" in done.stderr
    assert setup == "  make setup PYTHON=python3.12"
    assert activate == "  . .venv/bin/activate"


def test_what_the_server_needs_and_an_older_environment_lacks_is_named() -> None:
    found = needs.lacking(
        (3, 12),
        lambda name: None if name == "uvloop" else SimpleNamespace(origin=None),
        needs.SERVER_PACKAGES,
    )
    assert "found no uvloop. In the checkout run\n  make setup" in found


def test_mlflow_is_not_needed_to_start() -> None:
    found = needs.lacking(
        (3, 12), lambda name: None if name == "mlflow" else SimpleNamespace(origin=None)
    )
    assert found == ""


@pytest.mark.parametrize(
    "typed", [["-m", "tightfit"], ["-m", "harness"], ["-c", "import tightfit; tightfit.LLM"]]
)
def test_a_file_with_a_folder_s_name_is_named(typed: list[str], tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text("", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, *typed],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    said = f"tightfit: expected engine to be {ROOT / 'engine'}, got {tmp_path}"
    assert said in " ".join(done.stderr.split("\n"))


def test_another_python_is_named() -> None:
    assert needs.lacking() == ""
    line = needs.lacking((3, 8))
    assert line.startswith("tightfit: expected Python 3.11 or 3.12, got Python 3.8 (")
    assert needs.lacking((3, 13)).startswith("tightfit: expected Python 3.11 or 3.12")


@pytest.mark.parametrize(
    "file", ["harness/__init__.py", "harness/__main__.py", "harness/needs.py",
             "tightfit/__init__.py", "tightfit/__main__.py"]
)  # fmt: skip
def test_entry_files_are_read_by_an_old_python(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    tree = ast.parse(text, feature_version=(3, 6))
    evaluated = [
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for hint in [function.returns, *(item.annotation for item in function.args.args)]
        for node in ast.walk(hint or ast.Constant(None))
        if isinstance(node, ast.BinOp)
    ]
    assert evaluated == [], "X | Y in an annotation is an error before Python 3.10: quote it"


def test_the_versions_are_those_of_the_project() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (low, high) = (".".join(map(str, version)) for version in needs.PYTHONS)
    assert project["requires-python"] == f">={low},<{high}"
