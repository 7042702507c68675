"""Our package `kernels` beside the library of that name that transformers imports."""

import ast
import tomllib
from pathlib import Path

from tests.contracts.project import ROOT

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


def test_transformers_loads_a_llama_beside_our_kernels(tmp_path: Path) -> None:
    import torch
    import transformers

    import kernels

    assert kernels.__file__ is not None
    assert Path(kernels.__file__) == ROOT / "kernels" / "__init__.py"
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(ids).logits, again(ids).logits)


def test_kernels_package_holds_a_docstring_and_no_version() -> None:
    tree = ast.parse((ROOT / "kernels" / "__init__.py").read_text(encoding="utf-8"))
    assert [type(node) for node in tree.body] == [ast.Expr]
    assert ast.get_docstring(tree)


def test_version_stays_out_of_the_range_that_transformers_compares() -> None:
    """transformers takes the version of the distribution that ships a folder named kernels."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "tightfit"
    assert not project["version"].startswith("0.18.")


def test_no_dependency_brings_the_other_kernels() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().splitlines()
    assert [line for line in pins if line.startswith("kernels==")] == []
