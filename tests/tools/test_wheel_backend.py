"""The wheel's layout: every folder inside `tightfit`, nothing else; it runs from any folder."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from tests.contracts.project import PACKAGES, ROOT, python_files, relative


@pytest.fixture(scope="module")
def backend() -> ModuleType:
    spec = importlib.util.spec_from_file_location("backend", ROOT / "tools" / "wheel_backend.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from engine.llm import LLM\n", "from tightfit.engine.llm import LLM\n"),
        ("import engine\n", "from tightfit import engine\n"),
        ("import engine.llm as door\n", "import tightfit.engine.llm as door\n"),
        ("\u00e9 = 1; from engine import x\n", "\u00e9 = 1; from tightfit.engine import x\n"),
        *((text, text) for text in ("from engines import x\n", "x = 'engine.seed'\n")),
    ],
)
def test_imports_move_into_the_package(backend: ModuleType, before: str, after: str) -> None:
    assert backend.moved(before, ["engine"], "some.py") == after


@pytest.mark.parametrize("line", ["import engine.llm\n", "import os, engine\n"])
def test_an_import_that_would_bind_another_name_is_refused(backend: ModuleType, line: str) -> None:
    with pytest.raises(ValueError, match=r"some\.py, line 1: expected `from PACKAGE import"):
        backend.moved(line, ["engine"], "some.py")


@pytest.fixture(scope="module")
def staged(backend: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project in the wheel's layout."""
    folder = tmp_path_factory.mktemp("staged")
    backend.stage(ROOT, folder)
    return folder


@pytest.mark.thorough
def test_every_folder_of_the_project_is_staged(staged: Path) -> None:
    assert [path.name for path in staged.iterdir() if path.is_dir()] == ["tightfit"]
    names = {path.name for path in (staged / "tightfit").iterdir() if path.is_dir()}
    assert names >= {*PACKAGES, "conf"} - {"tightfit"}
    assert (staged / "tightfit" / "conf" / "config.yaml").is_file()


@pytest.mark.thorough
def test_the_registry_is_made_by_the_migrations_of_the_wheel(staged: Path, tmp_path: Path) -> None:
    """Alembic finds them beside the moved packages, and they name these."""
    code = (
        "from pathlib import Path\n"
        "from tightfit.console.registry.database import MIGRATIONS, Database\n"
        f"assert Path({str(staged)!r}) in MIGRATIONS.parents, MIGRATIONS\n"
        "database = Database.open(Path('registry.db'))\n"
        "with database.read() as session:\n"
        "    print(session.connection().exec_driver_sql('SELECT count(*) FROM models').scalar())\n"
        "database.close()\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(staged)}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, check=False, encoding="utf-8"
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


@pytest.mark.thorough
def test_no_text_names_a_module_of_the_project() -> None:
    """In the wheel it has another name; catalogue.processes makes it, for `python -m`."""
    modules = {relative(path)[:-3].replace("/", ".") for path in python_files(*PACKAGES)}
    names = "|".join(map(re.escape, modules))
    may_name = re.compile(rf"""["']({names}|-m)["']""")  # so that few files are parsed
    found = []
    for path in python_files(*PACKAGES):
        text = path.read_text(encoding="utf-8")
        if may_name.search(text) is None:
            continue
        tree = ast.parse(text)
        named = {
            id(node.args[0])
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in {"module_name", "module_command"}
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value in modules and id(node) not in named:
                found.append(f"{relative(path)}, line {node.lineno}: {node.value}")
            if isinstance(node, ast.List | ast.Tuple) and _run_by_name(node):
                found.append(f"{relative(path)}, line {node.lineno}: -m")
    assert found == []


def _run_by_name(node: ast.List | ast.Tuple) -> bool:
    """Whether "-m" and the name of a package of the project stand side by side, not to be shown."""
    texts = [item.value if isinstance(item, ast.Constant) else None for item in node.elts]
    pairs = list(pairwise(texts))
    return texts[:1] != ["python"] and any(
        one == "-m" and str(other).partition(".")[0] in PACKAGES for one, other in pairs
    )


OTHER = "def get_kernel(name):\n    return name\n"
BESIDE = """
import kernels, server
assert kernels.get_kernel("x") == "x" and server.OWN
from tightfit import LLM, SamplingParams
with_kernels = LLM("glass", device="cpu", gpu_memory_gib=0.5, max_num_seqs=2)
print(with_kernels.generate("Alice was", SamplingParams(max_tokens=4))[0].outputs[0].text)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_runs_from_another_folder_beside_a_package_named_kernels(
    tmp_path: Path, glass_model_dir: Path
) -> None:
    def start(*command: str, folder: Path = tmp_path) -> str:
        environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            command,
            cwd=folder,
            env={**environ, "TIGHTFIT_HOME": str(glass_model_dir.parents[1])},
            capture_output=True,
            check=False,
            encoding="utf-8",
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    build = ("--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp_path / "dist"))
    start(sys.executable, "-m", "pip", "wheel", *build, str(ROOT))
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
        (top_level,) = (name for name in archive.namelist() if name.endswith("top_level.txt"))
        assert archive.read(top_level).split() == [b"tightfit"]
    assert tops == {"tightfit", wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"}

    place = tmp_path / "fresh"
    start(sys.executable, "-m", "venv", "--without-pip", str(place))
    (site,) = place.glob("lib/python3*/site-packages")
    (site / "base.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n", encoding="utf-8")
    python, command = str(place / "bin" / "python"), str(place / "bin" / "tightfit")
    start(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index",
          str(wheel))  # fmt: skip
    (site / "kernels").mkdir()
    (site / "kernels" / "__init__.py").write_text(OTHER, encoding="utf-8")

    elsewhere = tmp_path / "mine"
    elsewhere.mkdir()
    (elsewhere / "server.py").write_text("OWN = True\n", encoding="utf-8")
    assert "tightfit COMMAND" in start(command, "--help", folder=elsewhere)
    assert "olmo7b" in start(command, "run", "--help", folder=elsewhere)
    shown = start(command, "plan", "model=llama31_8b", "gpu=rtx4090_24gb", folder=elsewhere)
    assert "llama31_8b" in shown
    limits = ("gpu.memory_gib=1", "scenario=quick", "engine.max_model_len=96", "tracking=none")
    shown = start(command, "run", "model=glass", "gpu=cpu", *limits, folder=elsewhere)
    assert "glass" in shown
    assert "report.html" in shown
    assert start(python, "-c", BESIDE, folder=elsewhere).strip()
