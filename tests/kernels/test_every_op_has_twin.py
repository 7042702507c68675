"""The contract of the package: behind every operator a twin, tests and a docstring."""

import inspect
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import kernels.ops
from kernels.arguments import AttentionCall, PrefillPart

MODULES = sorted(
    module.name for module in pkgutil.iter_modules(kernels.ops.__path__) if module.name != "checks"
)


def public(module):
    """The functions that a module defines for others, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"
    }


DOORS = {
    name: (module, function)
    for module in MODULES
    for name, function in public(import_module(f"kernels.ops.{module}")).items()
}
OPERATORS = sorted(DOORS)


def test_every_operator_is_found_once():
    assert MODULES == ["attention", "kv", "linear", "norm"]
    assert len(OPERATORS) >= 14
    each = [public(import_module(f"kernels.ops.{module}")) for module in MODULES]
    assert sum(map(len, each)) == len(OPERATORS)


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_has_a_twin_with_its_parameters_in_the_file_of_its_name(name):
    module, function = DOORS[name]
    twin = public(import_module(f"kernels.ref.{module}"))[name]
    only_the_kernel_needs = {"max_seq_len", "max_query_len", "workspace"}
    wanted = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in only_the_kernel_needs
    ]
    assert list(inspect.signature(twin).parameters.values()) == wanted


@pytest.mark.parametrize("module", MODULES)
def test_every_twin_has_an_operator(module):
    twins = public(import_module(f"kernels.ref.{module}"))
    assert {name: DOORS[name][0] for name in twins} == dict.fromkeys(twins, module)


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_has_a_test_file_and_argument_docs(name):
    assert (Path(__file__).parent / f"test_{name.rstrip('_')}.py").is_file()
    _, function = DOORS[name]
    documented = inspect.getdoc(function)
    for parameter in inspect.signature(function).parameters:
        assert f"\n    {parameter}: " in documented


@pytest.mark.parametrize("record", [AttentionCall, PrefillPart])
def test_a_record_of_arguments_documents_its_fields(record):
    documented = inspect.getdoc(record)
    for name in record.__dataclass_fields__:
        assert f"\n    {name}: " in documented


def test_planning_the_workspace_imports_no_torch():
    code = "import sys, kernels.sizes; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
