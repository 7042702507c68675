"""Files stay short, and importing a package runs nothing."""

import ast
import subprocess
import sys
from pathlib import Path

from tests.contracts.project import PACKAGES, ROOT, python_files, relative

MOST_LINES = 800
# The doors: LLM, SamplingParams and others, loaded when they are asked for.
LAZY_DOORS = [ROOT / "engine" / "__init__.py", ROOT / "tightfit" / "__init__.py"]


def test_python_files_are_not_too_long() -> None:
    lengths = {
        relative(path): len(path.read_text(encoding="utf-8").splitlines())
        for path in python_files(*PACKAGES, "tests")
    }
    assert len(lengths) > 20
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def test_every_package_folder_has_an_init_that_is_a_docstring() -> None:
    folders = {path.parent for path in python_files(*PACKAGES)}
    assert [relative(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []
    inits = [folder / "__init__.py" for folder in folders]
    assert [
        relative(path) for path in inits if path not in LAZY_DOORS and not _is_docstring(path)
    ] == []


def _is_docstring(path: Path) -> bool:
    match ast.parse(path.read_text(encoding="utf-8")).body:
        case [ast.Expr(value=ast.Constant(value=str()))]:
            return True
    return False


def test_importing_the_engine_loads_no_torch() -> None:
    code = "import sys, engine; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_python_files_are_ascii() -> None:
    files = python_files(*PACKAGES, "tests")
    assert [relative(path) for path in files if not path.read_bytes().isascii()] == []
