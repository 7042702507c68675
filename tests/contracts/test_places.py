"""What is added touches few files: a toy of each kind is written into a copy, and works there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contracts.project import PACKAGES, ROOT

MOST = {"scenario part": 4, "metric": 2, "setting": 3, "format": 3, "backend": 3}
"""Files that one may touch, at most; an added one counts, the toy's own test counts as one too."""


class Copy:
    """The project's packages elsewhere, with what each toy changes in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.touched: dict[str, set[str]] = {kind: set() for kind in MOST}
        for name in (*PACKAGES, "conf", "tests"):
            shutil.copytree(ROOT / name, folder / name)  # with its bytecode, which stays valid

    def add(self, kind: str, name: str, text: str) -> None:
        """Write a file that is not there yet."""
        path = self.folder / name
        assert not path.exists()
        self.touched[kind].add(name)
        path.write_text(text, encoding="utf-8")

    def edit(self, kind: str, name: str, *changes: tuple[str, str]) -> None:
        """Replace what patterns match, once each, in a file."""
        self.touched[kind].add(name)
        path = self.folder / name
        text = path.read_text(encoding="utf-8")
        for pattern, replacement in changes:
            text, count = re.subn(pattern, replacement, text, count=1, flags=re.MULTILINE)
            assert count == 1, f"{name}: nothing matches {pattern!r}"
        path.write_text(text, encoding="utf-8")


def add_metric(copy: Copy) -> None:
    """A count that a run has, and that its summary shows."""
    row = '    Metric("toy/parts", "parts with requests", label="toys", shown=("sweep",)),\n'
    copy.edit("metric", "reports/record/metrics.py", (r"^(_SHOWN\b.*\(\n)", rf"\1{row}"))
    found = r"^(        metrics \|= self\._door\..*\n)"
    computed = r'\1        metrics["toy/parts"] = float(len(timed))' + "\n"
    copy.edit("metric", "harness/worker.py", (found, computed))


def add_setting(copy: Copy) -> None:
    """A limit of the engine, of which its bound is checked."""
    field = '    toy_limit: int = number(5, low=1)\n    """A limit without a meaning."""\n'
    head = r"^(class EngineSettings\(Sealed\):\n(?:.*\n)*?)"
    copy.edit(
        "setting", "engine/asked/config.py", (rf"{head}(    max_num_seqs: )", rf"\1{field}\2")
    )


def add_backend(copy: Copy) -> None:
    """A way to offload: the first layer alone, copied ahead."""
    copy.edit(
        "backend",
        "engine/asked/offload.py",
        (r'^BACKENDS = \("auto", ', r'BACKENDS = ("auto", "toy", '),
    )
    case = (
        '        case "toy":\n'
        "            found = assign_resident(spec)\n"
        "            moved = {tensor.name: PREFETCH for tensor in spec.layer_tensors(0)}\n"
        "            found = replace(found, placements=found.placements | moved)\n"
    )
    copy.edit("backend", "engine/plan/policy.py", (r'^(        case "prefetch":\n)', rf"{case}\1"))
    copy.add("backend", "conf/offload/toy.yaml", "# The first layer.\noffload_backend: toy\n")


def add_format(copy: Copy) -> None:
    """Matrices kept with the other sign, and a product that knows."""
    entry = '''

@dataclass(frozen=True)
class Negated(PackedFormat):
    """Elements with the other sign."""

    plain: Plain
    name = "negated"

    def holds(self, tensor, dtype):
        """Whether it is a matrix."""
        return len(tensor.shape) == 2

    def num_bytes(self, tensor):
        """Bytes of all elements."""
        return self.plain.num_bytes(tensor)

    def views(self, tensor):
        """List the tensor itself."""
        return self.plain.views(tensor)

    def operand(self, tensor, views, ops, scratch=None):
        """Return the tensor itself."""
        return views[""]

    def block_rows(self, tensor):
        """Return all rows."""
        return tensor.shape[0]

    def scratch_bytes(self, tensor):
        """Return what a block takes besides."""
        return 0

    def packing(self, tensor, views, ops):
        """Return what writes them."""
        return _Negating(views[""])

    def products(self, ops):
        """Return the product that turns them back."""
        return Products(ops.linear.linear_negated, *[None] * 2)


class _Negating(Packing):
    def __init__(self, place):
        self.place, self.row = place, 0

    def add(self, rows):
        self.place[self.row : self.row + rows.shape[0]] = -rows
        self.row += rows.shape[0]

    def finish(self):
        return ""
'''
    copy.edit("format", "engine/model/formats.py", (r"\n\nFORMATS: Final", rf"{entry}\n\g<0>"))
    product = (
        "def linear_negated(x, weight, bias=None, **keywords):\n"
        "    return linear(x, -weight, bias, **keywords)\n\n\n"
    )
    copy.edit("format", "kernels/ops/linear.py", (r"^(def linear_gated_mul)", rf"{product}\1"))


def add_part(copy: Copy) -> None:
    """A part that counts what the engine knows of its vocabulary."""
    node = (
        "@dataclass(kw_only=True)\nclass ToyScenario(Sealed):\n"
        '    """A part without a meaning."""\n\n    factor: int = 2\n    """Of the count."""\n\n\n'
    )
    copy.edit(
        "scenario part",
        "harness/config/schema.py",
        (r"^(@dataclass\(kw_only=True\)\nclass ScenarioConfig)", rf"{node}\1"),
        (
            r"^(    load: LoadScenario \| None = None\n)",
            r'    toy: ToyScenario | None = None\n    """A toy."""\n\1',
        ),
        (r"^(        requests = \(self\.throughput, )", r"\1self.toy, "),
    )
    copy.add(
        "scenario part",
        "harness/work/toy.py",
        '"""The toy part."""\n\n\ndef measure_toy(llm, config):\n'
        '    return {"toy/tokens": float(config.factor * llm.spec.vocab_size)}\n',
    )
    call = (
        "        if self._job.scenario.toy is not None:\n"
        '            self._state.enter("toy")\n'
        '            self._result["metrics"] |= measure_toy(llm, self._job.scenario.toy)\n'
    )
    copy.edit(
        "scenario part",
        "harness/worker.py",
        (r"^(from harness\.work\.drive import )", r"from harness.work.toy import measure_toy\n\1"),
        (r"^(            self\._run_overhead\(llm, scenario\.overhead\)\n)", rf"\1{call}"),
    )
    row = '    Metric("toy/tokens", "twice the vocabulary"),\n'
    copy.edit("scenario part", "reports/record/metrics.py", (r"^(_SHOWN\b.*\(\n)", rf"\1{row}"))


PROGRAM = """
import sys, tempfile
from dataclasses import replace
from pathlib import Path

import harness
assert Path(harness.__file__).parents[1] == Path.cwd()

from engine.asked.config import EngineConfig, ModelConfig
from engine.asked.keywords import config_from_keywords
from engine.errors import ConfigError
from harness.config.compose import Composer
from harness.config.schema import ScenarioConfig, ToyScenario
from harness.point.process import WorkerJob
from harness.worker import Work
from reports.record.metrics import definition, metric_of
from tests.harness.cases import SPEC, scenario
from tests.harness.fakes import FakeClock, Script, fake_door

mine = Path("mine")  # a scenario that has the part lies in a user's folder
(mine / "scenario").mkdir(parents=True)
(mine / "scenario" / "toy.yaml").write_text("name: toy\\ntoy:\\n  factor: 3\\n", encoding="utf-8")
[point] = Composer(mine).plan(
    ["model=olmo7b", "offload=toy", "engine.toy_limit=7", "scenario=toy"]
).points
assert point.config.offload_name == "toy", point.config.offload_name
assert point.config.engine.toy_limit == 7
assert point.config.scenario.toy == ToyScenario(factor=3)
assert config_from_keywords("x", {"toy_limit": 9}).engine.toy_limit == 9
try:
    config_from_keywords("x", {"toy_limit": 0})
except ConfigError as error:
    assert "engine.toy_limit" in str(error)
else:
    raise AssertionError("the bound is not checked")

model = ModelConfig(name="tiny", load_format="dummy", spec=SPEC)
parts = replace(scenario(), toy=ToyScenario())
job = WorkerJob(name="measure", kind="measure", engine=EngineConfig(model=model), scenario=parts)
clock = FakeClock()
door, _ = fake_door(Script(), clock)
result = Work(job, Path(tempfile.mkdtemp(dir=Path.cwd())), door, spawned_s=clock()).run()
assert result["status"] == "ok", result["error"]
assert result["metrics"]["toy/tokens"] == 2 * 1000
assert result["metrics"]["toy/parts"] == 2
assert definition("toy/tokens") and metric_of("toy/parts").label == "toys"
assert "torch" not in sys.modules

from engine import LLM, build
from engine.device.cuda import open_device
from engine.model.formats import FORMATS, Negated, PackedFormat
from engine.plan.planner import plan_memory
from tests.engine.specs import configuration, small_spec
from tests.tiny import greedy, make_prompt
from engine.asked.offload import OffloadConfig

spec = small_spec()
prompts = [make_prompt(9, vocab=spec.vocab_size), make_prompt(4, vocab=spec.vocab_size)]

def tokens(offload=None, formats=None):
    config = configuration(spec, memory_gib=1, offload=offload, max_model_len=32, max_num_seqs=2)
    config = replace(config, model=replace(config.model, load_format="dummy"))
    facts = open_device("cpu").facts()
    plan = plan_memory(config, spec, facts, tensor_formats=formats or {})
    llm = LLM.__new__(LLM)
    llm._open(build.build_engine(config, plan=plan))
    found = greedy(llm, prompts, 6)
    llm.close()
    return found, plan

expected, _ = tokens()
found, plan = tokens(OffloadConfig(offload_backend="toy"))
assert found == expected
assert plan.placed_bytes()["prefetch"] > 0
name = "model.layers.0.mlp.down_proj.weight"
found, plan = tokens(formats={name: Negated(FORMATS[plan.dtype])})
assert found == expected
assert isinstance(plan.formats[name], PackedFormat)
"""


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A copy that has a toy of each kind."""
    copy = Copy(tmp_path_factory.mktemp("places"))
    for add in (add_metric, add_setting, add_backend, add_format, add_part):
        add(copy)
    return copy


@pytest.mark.parametrize("kind", MOST)
def test_what_is_added_touches_few_files(kind: str, changed: Copy) -> None:
    touched = changed.touched[kind]
    num_tests = 1 if kind == "format" else 0
    assert 0 < len(touched) + num_tests <= MOST[kind], sorted(touched)


@pytest.mark.slow  # an interpreter that compiles the copy and imports torch takes seconds
def test_what_is_added_works(changed: Copy) -> None:
    folder = str(changed.folder)
    environ = {**os.environ, "PYTHONPATH": folder, "TIGHTFIT_HOME": folder}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, check=False, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
