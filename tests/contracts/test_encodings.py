"""Text is read and written as UTF-8, whatever the locale: every open file names its encoding."""

import ast
import re

import pytest

from tests.contracts.project import PACKAGES, python_files, relative

OPENS = re.compile(r"read_text|write_text|open\(|subprocess")
"""What is in every file with a call that opens text; the others need not be parsed."""
NO_TEXT = ("os", "Database", "Registry", "zipfile", "tarfile", "self._allocator")
"""What has an `open` that opens no text."""


def _is_text(call: ast.Call, place: int) -> bool:
    """Return whether the mode of an open, which is its argument at a place, is one of text."""
    named = [item.value for item in call.keywords if item.arg == "mode"]
    mode = [*named, *call.args[place : place + 1], ast.Constant("r")][0]
    text = mode.value if isinstance(mode, ast.Constant) else None
    return isinstance(text, str) and set(text) <= set("rwxat+")


def opens_text(call: ast.Call) -> bool:
    """Return whether a call reads or writes text without naming its encoding."""
    keywords = {item.arg for item in call.keywords}
    if keywords & {"encoding", None}:
        return False
    owner, _, name = ast.unparse(call.func).rpartition(".")
    match name:
        case "read_text":
            return not call.args
        case "write_text":
            return len(call.args) == 1
        case "open":
            return owner not in NO_TEXT and _is_text(call, 0 if owner else 1)
        case _:
            return owner == "subprocess" and bool(keywords & {"text", "universal_newlines"})


@pytest.mark.parametrize("package", PACKAGES)
def test_every_text_file_names_its_encoding(package: str) -> None:
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in python_files(package)
        if OPENS.search(text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and opens_text(node)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("path.read_text()", True),
        ("path.read_text('utf-8')", False),
        ("(folder / name).write_text(text)", True),
        ("path.write_text(text, encoding='utf-8')", False),
        ("path.open()", True),
        ("path.open('rb')", False),
        ("open(name, 'w')", True),
        ("open(name, mode='ab')", False),
        ("os.open(name, os.O_RDONLY)", False),
        ("archive.open(MEMBER)", False),
        ("subprocess.run(command, text=True)", True),
        ("subprocess.run(command)", False),
    ],
)
def test_what_opens_text(code: str, is_found: bool) -> None:
    statement = ast.parse(code).body[0]
    assert isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Call)
    assert opens_text(statement.value) == is_found
