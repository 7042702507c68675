"""Build the wheel: setuptools, on a copy in which every folder of the project lies in `tightfit`.

In a checkout the packages stand beside each other (`engine`, `harness`, ...). Installed so, they
would take names that others have: `kernels` is a package of Hugging Face, `server` may be the
user's own. In the wheel `engine.llm` is `tightfit.engine.llm`, and conf/ its package data. An
editable installation leaves the folders where they are.
"""

import ast
import shutil
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401  hooks that need nothing of their own
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

HOUSE = "tightfit"
Import = ast.Import | ast.ImportFrom
FILES = ("pyproject.toml", "README.md", "LICENSE")


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,  # noqa: ARG001  of the hook
) -> str:
    """Build a wheel from the project in the current folder (PEP 517); return its file name."""
    target = str(Path(wheel_directory).absolute())
    with tempfile.TemporaryDirectory() as folder:
        stage(Path.cwd(), Path(folder))
        with chdir(folder):
            return build_meta.build_wheel(target, config_settings)


def package_names(root: Path) -> list[str]:
    """Return the packages that pyproject.toml lists and that are there, but for `tightfit`."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["packages"]["find"]["include"]
    names = (pattern.rstrip("*") for pattern in patterns)
    return [name for name in names if name != HOUSE and (root / name / "__init__.py").is_file()]


def stage(root: Path, target: Path) -> None:
    """Copy the project into an empty folder, in the wheel's layout."""
    names = package_names(root)
    skipped = shutil.ignore_patterns("__pycache__")
    house = target / HOUSE
    shutil.copytree(root / HOUSE, house, ignore=skipped)
    shutil.copytree(root / "conf", house / "conf")
    for name in names:
        shutil.copytree(root / name, house / name, ignore=skipped)
    for path in house.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text(moved(text, names, str(path.relative_to(target))), encoding="utf-8")
    for name in FILES:
        shutil.copy(root / name, target)


def moved(source: str, names: Iterable[str], file: str) -> str:
    """Return a module's source with its imports of the named packages below `tightfit`.

    Lines keep their numbers. `file` is for the message.

    Raises:
        ValueError: an import cannot be written so that the same name is bound.
    """
    lines = source.encode().splitlines(keepends=True)  # ast counts bytes
    for node, module in _imports(ast.parse(source), set(names)):
        old, new = f" {module}".encode(), f" {HOUSE}.{module}".encode()
        if isinstance(node, ast.Import):
            if ("." in module and node.names[0].asname is None) or len(node.names) > 1:
                raise ValueError(
                    f"{file}, line {node.lineno}: expected `from PACKAGE import MODULE` or one "
                    f"`import {module} as NAME`, got another import. Rewrite it."
                )
            if node.names[0].asname is None:
                old, new = f"import {module}".encode(), f"from {HOUSE} import {module}".encode()
        line, column = lines[node.lineno - 1], node.col_offset
        lines[node.lineno - 1] = line[:column] + line[column:].replace(old, new, 1)
    return b"".join(lines).decode()


def _imports(tree: ast.Module, names: set[str]) -> Iterator[tuple[Import, str]]:
    """Yield the imports of the packages, the last of a line first."""
    found = []
    for node in ast.walk(tree):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [node.module or ""]
        found += [(node, each) for each in modules if each.partition(".")[0] in names]
    yield from sorted(found, key=lambda item: -item[0].col_offset)
