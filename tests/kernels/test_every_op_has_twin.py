"""The contract of the package: behind every operator a twin, tests and a docstring."""

import inspect
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import kernels.ops
from kernels.arguments import AttentionCall, Codes, Joined, PrefillPart, Quantised
from kernels.expert_arguments import ExpertArrays, ExpertCache

MODULES = sorted(
    module.name for module in pkgutil.iter_modules(kernels.ops.__path__) if module.name != "checks"
)


def public(module):
    """The functions that a module defines for others, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"
        if name != "kernels_of"  # says what operators launch, and takes no tensor
    }


DOORS = {
    f"{module}.{name}": function
    for module in MODULES
    for name, function in public(import_module(f"kernels.ops.{module}")).items()
}
OPERATORS = sorted(DOORS)
STORED = ("codes", "quantised")
"""Modules of operators over weights that are restored; they have the names of those over plain ones
and one file of tests."""
RECORDS = (AttentionCall, Codes, ExpertArrays, ExpertCache, Joined, PrefillPart, Quantised)
TOGETHER = (*STORED, "expert_cache", "experts")
"""Modules with one file of tests."""
PLAIN = [name for name in OPERATORS if name.split(".")[0] not in STORED]


def test_every_operator_is_found_once():
    assert [
        *("attention", "codes", "expert_cache", "experts", "kv", "linear", "logits", "norm"),
        "quantised",
    ] == MODULES
    assert len(OPERATORS) >= 21
    assert len({name.split(".")[1] for name in PLAIN}) == len(PLAIN)


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_has_a_twin_with_its_parameters_in_the_file_of_its_name(name):
    module, short = name.split(".")
    function, twin = DOORS[name], public(import_module(f"kernels.ref.{module}"))[short]
    only_the_kernel_needs = {"arriving", "max_seq_len", "max_query_len", "workspace"}
    wanted = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in only_the_kernel_needs
    ]
    assert list(inspect.signature(twin).parameters.values()) == wanted


@pytest.mark.parametrize("module", MODULES)
def test_every_twin_has_an_operator(module):
    twins = public(import_module(f"kernels.ref.{module}"))
    assert [name for name in twins if f"{module}.{name}" not in DOORS] == []


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_has_a_test_file_and_argument_docs(name):
    module, short = name.split(".")
    file = module if module in TOGETHER else short.rstrip("_")
    assert (Path(__file__).parent / f"test_{file}.py").is_file()
    documented = inspect.getdoc(DOORS[name])
    for parameter in inspect.signature(DOORS[name]).parameters:
        assert f"\n    {parameter}: " in documented


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_of_arguments_documents_its_fields(record):
    documented = inspect.getdoc(record)
    for name in record.__dataclass_fields__:
        assert f"\n    {name}: " in documented


def test_planning_the_workspace_imports_no_torch():
    code = "import sys, kernels.sizes; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
