"""ARCHITECTURE.md names files and functions that exist, and the route is the one that is taken."""

import ast
import json
import re
import traceback
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.project import ROOT

TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
ROUTE_FILE = re.compile(r"^\| \d \| ([\w/]+\.py) \| (`[^|]*`[^|]*) \|", flags=re.MULTILINE)


def route() -> list[tuple[str, list[str]]]:
    """The files of the route of one request with their functions, in order."""
    section = TEXT.split("## Route of one request")[1].split("\n## ")[0]
    return [(file, re.findall(r"`(\w+)`", names)) for file, names in ROUTE_FILE.findall(section)]


def defined(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_file_that_is_named_exists() -> None:
    named = set(re.findall(r"\b(?:conf|harness|engine|kernels|reports)/[\w/.*]*\w", TEXT))
    named = {name for name in named if "." in name}
    assert len(named) > 15
    assert [name for name in sorted(named) if not any(ROOT.glob(name))] == []


def test_every_function_of_the_route_is_in_its_file() -> None:
    assert len(route()) == 7
    for file, names in route():
        assert names
        assert [name for name in names if name not in defined(ROOT / file)] == [], file


def test_a_request_takes_the_route(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The project's files on the stack at the first operator, from the door downwards."""
    from engine.run import decoder
    from tests.tiny import COMMON, greedy_params, open_llm

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | COMMON))
    llm = open_llm(tmp_path, load_format="dummy")
    attend, stacks = decoder.attention.paged_prefill_attention, []

    def record(*args: Any, **keywords: Any) -> Any:
        stacks.append([frame.filename for frame in traceback.extract_stack()])
        return attend(*args, **keywords)

    monkeypatch.setattr(decoder.attention, "paged_prefill_attention", record)
    llm.generate([[1, 2, 3]], greedy_params(1))
    llm.close()
    paths = [Path(name) for name in stacks[0]]
    inside = [str(path.relative_to(ROOT)) for path in paths if (ROOT / "engine") in path.parents]
    taken = list(dict.fromkeys(inside))
    # Returned before, and not yet called.
    decides = {"engine/schedule/scheduler.py", "kernels/ops/attention.py"}
    assert taken == [file for file, _ in route() if file not in decides]


def test_every_package_is_in_the_table() -> None:
    """A row names its packages once with their folder: `harness/ab, search`."""
    named = set()
    row = re.compile(r"^\| ((?:harness|engine|kernels|reports)/[\w, ]+) \|", flags=re.MULTILINE)
    for cell in row.findall(TEXT):
        folder, names = cell.split("/")
        named |= {f"{folder}/{name}" for name in names.split(", ")}
    packages = {
        file.parent.relative_to(ROOT).as_posix()
        for folder in ("harness", "engine", "kernels", "reports")
        for file in (ROOT / folder).glob("*/__init__.py")
    }
    assert named == packages
