"""The contract of the package: behind every operator a twin, tests and a docstring."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import ops, ops_attention
from kernels.ref import activation, attention, block_copy, linear, norm, prefill, rotary_write_kv

TWINS = (activation, attention, block_copy, linear, norm, prefill, rotary_write_kv)
WORKSPACE_FUNCTIONS = {
    "decode_workspace",
    "decode_workspace_bytes",
    "prefill_state",
    "prefill_state_bytes",
}
OPERATORS = sorted(
    name
    for name in ops.__all__
    if inspect.isfunction(getattr(ops, name)) and name not in WORKSPACE_FUNCTIONS
)


def test_the_door_lists_every_public_function():
    defined = {
        name
        for name, value in (vars(ops) | vars(ops_attention)).items()
        if inspect.isfunction(value)
        and value.__module__ in {ops.__name__, ops_attention.__name__}
        and name[0] != "_"
    }
    assert defined == set(OPERATORS)
    assert len(OPERATORS) >= 9


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_has_one_twin_with_its_parameters(name):
    twins = [
        getattr(module, name)
        for module in TWINS
        if getattr(getattr(module, name, None), "__module__", None) == module.__name__
    ]
    assert len(twins) == 1
    only_the_kernel_needs = {"max_seq_len", "max_query_len", "workspace"}
    wanted = [
        parameter
        for parameter in inspect.signature(getattr(ops, name)).parameters.values()
        if parameter.name not in only_the_kernel_needs
    ]
    assert list(inspect.signature(twins[0]).parameters.values()) == wanted


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_has_a_test_file_and_argument_docs(name):
    assert (Path(__file__).parent / f"test_{name.rstrip('_')}.py").is_file()
    documented = inspect.getdoc(getattr(ops, name))
    for parameter in inspect.signature(getattr(ops, name)).parameters:
        assert f"\n    {parameter}: " in documented


def test_planning_the_workspace_imports_no_torch():
    code = "import sys, kernels.sizes; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
