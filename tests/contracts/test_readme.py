"""Every command that the README shows is one that works."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from catalogue.models import names
from harness.studies.search_request import parse_request
from server.body import parsed
from server.flags import parse
from server.schemas import CompletionRequest
from tests.contracts.project import ROOT
from tightfit import cli
from tightfit.__main__ import main

README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def _commands() -> list[str]:
    """The lines of the README's ```sh blocks, without comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    lines = [shlex.join(shlex.split(line, comments=True)) for line in "".join(blocks).splitlines()]
    return [line for line in lines if line]


COMMANDS = _commands()
TIGHTFIT = [line for line in COMMANDS if line.startswith("tightfit ")]
HARNESS = [line for line in TIGHTFIT if line.split()[1] in {"run", "plan", "sweep", "ab"}]
SEARCH = [line for line in TIGHTFIT if line.split()[1] == "search"]
MAKE = [line for line in COMMANDS if line.startswith("make ")]
SERVE = [line for line in TIGHTFIT if line.split()[1] == "serve"]
CLIENTS = [line for line in COMMANDS if line.startswith(("curl localhost:8000/", "python -c "))]


def test_every_command_is_of_a_kind_that_is_checked() -> None:
    assert HARNESS
    assert MAKE
    assert sorted(MAKE + TIGHTFIT + CLIENTS) == sorted(COMMANDS)
    assert {line.split()[1] for line in TIGHTFIT} <= {each.name for each in cli.COMMANDS}


def test_the_server_s_lines_are_understood_by_it() -> None:
    [serve], [curl, python] = SERVE, CLIENTS
    model = parse(shlex.split(serve)[2:]).model
    assert model in names()
    _, address, *words = shlex.split(curl)
    assert address == "localhost:8000/v1/completions"
    assert words[:2] == ["-H", "Content-Type: application/json"]
    assert parsed(words[3].encode(), CompletionRequest).prompts
    code = shlex.split(python)[2]
    compile(code, "README.md", "exec")
    assert f"model='{model}'" in code


@pytest.mark.parametrize("line", MAKE)
def test_make_target_exists(line: str) -> None:
    target = line.split()[1]
    assert re.search(rf"^{target}:.*## \S", MAKEFILE, flags=re.MULTILINE), target


def test_a_folder_may_have_spaces() -> None:
    assert '-m reports "$(DIR)"' in MAKEFILE


@pytest.mark.parametrize(
    "line",
    [  # test_conf.py composes the commands of all experiments
        pytest.param(line, marks=pytest.mark.slow if "+experiment=" in line else [])
        for line in HARNESS
    ],
)
def test_harness_command_composes(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)
    code = main([*words[1:], "--cfg", "job"])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert "offload:" in shown.out


@pytest.mark.parametrize("line", SEARCH)
def test_search_command_is_understood(line: str) -> None:
    request = parse_request(shlex.split(line)[2:])
    assert request is not None
    assert request.space.parameters


def test_the_python_lines_run(
    glass_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from engine.asked.offload import OffloadWarning

    [lines] = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    assert '"path/to/checkpoint"' in lines
    lines = lines.replace('"path/to/checkpoint"', repr(str(glass_model_dir)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    known: dict[str, Any] = {}
    with pytest.warns(OffloadWarning, match="everything fits"):  # it is for a larger model
        exec(lines, known)
    known["llm"].close()
    assert capsys.readouterr().out.strip()


def test_linked_files_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []
