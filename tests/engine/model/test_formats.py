"""Formats of tensors: a plan counts them, the store places them, products take them."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, build
from engine.asked.offload import OffloadWarning
from engine.device.cuda import open_device
from engine.errors import CheckpointError, ConfigError
from engine.model.formats import FORMATS, Format, ParamSpec, TensorSpec, align, plain
from engine.plan.planner import plan_memory
from engine.plan.units import UVA
from tests.engine.codes12 import Codes12, restore
from tests.engine.specs import small_spec
from tests.slow import slow
from tests.tiny import greedy, hf_model, make_config, make_prompt, open_llm, save

CODES = Codes12()
PROMPTS = [make_prompt(length) for length in (3, 40)]
MLP = ("mlp.gate_up_proj.weight", "mlp.down_proj.weight")


def tensor_of(rows: int, columns: int) -> TensorSpec:
    """A matrix of two parameters."""
    return TensorSpec("w", (ParamSpec("a", (rows - 1, columns)), ParamSpec("b", (1, columns))))


def packed(tensor: TensorSpec, whole: torch.Tensor) -> dict[str, torch.Tensor]:
    views = {
        view.name: torch.full(view.shape, 1).to(getattr(torch, view.dtype))
        for view in CODES.views(tensor)
    }
    CODES.pack(tensor, {"a": whole[:-1], "b": whole[-1:]}, views)
    return views


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_plain_tensor_is_its_elements(dtype: str) -> None:
    tensor, form = tensor_of(5, 6), FORMATS[dtype]
    size = getattr(torch, dtype).itemsize
    assert form.num_bytes(tensor) == 30 * size
    assert form.row_bytes(tensor) == 6 * size
    assert [(view.shape, view.dtype, view.offset) for view in form.views(tensor)] == [
        ((5, 6), dtype, 0)
    ]
    whole = torch.arange(30).view(5, 6)
    (first, rows), (second, last) = form.targets(tensor, {"": whole})
    assert (first.name, second.name) == ("a", "b")
    assert torch.equal(torch.cat([rows, last]), whole)


def test_codes_restore_every_bit() -> None:
    whole = torch.randn(8, 64).bfloat16()
    whole[0, :6] = torch.tensor([0.0, -0.0, 1e-30, -3e38, 1.5, 1e-40])
    tensor = tensor_of(8, 64)
    assert torch.equal(restore(packed(tensor, whole)).view(torch.int16), whole.view(torch.int16))
    assert CODES.num_bytes(tensor) == align(8 * 64 + 8 * 32) + 512 + 4
    far = torch.logspace(-37, 0, 20 * 64).view(20, 64).bfloat16()
    with pytest.raises(CheckpointError, match="out of the window"):
        packed(tensor_of(20, 64), far)


def matrices(spec: Any, names: tuple[str, ...] = ()) -> dict[str, Format]:
    """Codes for every matrix, or for those of these endings."""
    return {
        tensor.name: CODES
        for tensor in spec.tensors()
        if len(tensor.shape) == 2 and (not names or tensor.name.endswith(names))
    }


def open_formats(
    folder: Path, formats: Mapping[str, Format], *, reference: bool = False, **keywords: Any
) -> LLM:
    """Build a small engine with formats of its own."""
    config = make_config(folder, dtype="bfloat16", **keywords)
    spec, facts = build.read_model(config.model).spec, open_device("cpu").facts()
    plan = plan_memory(config, spec, facts, reference=reference, tensor_formats=formats)
    llm = LLM.__new__(LLM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)
        llm._open(build.build_engine(config, plan=plan, reference=reference))
    return llm


PLACES: dict[str, dict[str, Any]] = {
    "resident": {},
    "prefetch": {"offload_group_size": 2, "offload_prefetch_step": 1},
    "in place": {"cpu_offload_gb": 1},
    "in place, the table too": {
        "cpu_offload_gb": 1,
        "cpu_offload_params": ["embed_tokens", "lm_head", "mlp", "self_attn"],
    },
    "staged": {"cpu_offload_gb": 1, "uva_stage_tokens": 2},
    "on demand": {"reference": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 checkpoint with values that no window of exponents holds."""
    folder = save(hf_model("llama"), tmp_path_factory.mktemp("codes"), "bfloat16")
    tensors = load_file(folder / "model.safetensors")
    for tensor in tensors.values():
        tensor.view(-1)[::97] *= 2.0**-20
        tensor.view(-1)[1] = 0.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """The tokens of the same weights in bf16."""
    llm = open_llm(folder, dtype="bfloat16")
    found = greedy(llm, PROMPTS, 6)
    llm.close()
    return found


@pytest.mark.parametrize(
    ("place", "names"),
    [
        (place, names) if (names == MLP) == (at % 2 == 0) else slow(place, names)
        for at, place in enumerate(PLACES)
        for names in ((), MLP)
    ],
)
def test_tokens_equal_those_of_bf16_wherever_weights_lie(
    folder: Path, expected: list[list[int]], place: str, names: tuple[str, ...]
) -> None:
    """Also where formats are mixed within a layer, and so within a slab and a slot."""
    spec = build.read_model(make_config(folder).model).spec
    llm = open_formats(folder, matrices(spec, names), **PLACES[place])
    assert greedy(llm, PROMPTS, 6) == expected
    store, moved = llm._engine.store, llm.plan.layers[1].offloaded_bytes
    assert store.host_bytes()[0] == llm.plan.host_items["pinned_weights"]
    assert bool(moved) is (place != "resident")
    if place in {"prefetch", "staged", "on demand"}:
        assert store.copied_bytes > 0
        assert store.copied_bytes % moved == 0
    llm.close()


def test_dummy_weights_are_packed_too(folder: Path) -> None:
    usual = open_llm(folder, dtype="bfloat16", load_format="dummy")
    coded = open_formats(folder, matrices(usual.spec), load_format="dummy")
    for tensor, views in coded._engine.store.packed():
        whole = torch.cat([p for s, p in usual._engine.store.parameters() if s in tensor.parts])
        assert torch.equal(restore(views), whole)
    coded.close()
    usual.close()


def test_control_a_stale_code_changes_tokens(folder: Path, expected: list[list[int]]) -> None:
    spec = build.read_model(make_config(folder).model).spec
    llm = open_formats(folder, matrices(spec), cpu_offload_gb=1)
    (_, views), *_ = llm._engine.store.packed()
    views["codes"] ^= 1
    assert greedy(llm, PROMPTS, 6) != expected
    llm.close()


@pytest.mark.parametrize("names", [(), MLP])
def test_a_plan_counts_the_bytes_of_every_format(names: tuple[str, ...]) -> None:
    spec = small_spec(hidden_size=256, intermediate_size=512)
    config = make_config("absent", dtype="bfloat16", cpu_offload_gb=0.001)
    facts = open_device("cpu").facts()
    usual = plan_memory(config, spec, facts)
    formats = matrices(spec, names)
    plan = plan_memory(config, spec, facts, tensor_formats=formats)
    sizes = {t.name: plan.formats.num_bytes(t) for t in spec.tensors()}
    for tensor in spec.tensors():
        share = sizes[tensor.name] / usual.formats.num_bytes(tensor)
        assert 0.75 <= share < 0.77 if tensor.name in formats else share == 1
    assert sum(plan.placed_bytes().values()) == sum(sizes.values())
    assert (
        usual.placed_bytes()["uva"]
        == spec.weight_bytes("bfloat16") - usual.placed_bytes()["resident"]
    )
    # The budget of uva is in bytes, so it takes more of what is smaller.
    moved = [name for name, found in plan.placements.items() if found is UVA]
    assert sum(sizes[name] for name in moved[:-1]) < 0.001 * 2**30 <= sum(sizes[n] for n in moved)
    largest = max(
        sum(align(sizes[t.name]) for t in layer.offloaded_tensors) for layer in plan.layers
    )
    assert plan.slot_bytes == largest
    assert plan.to_dict()["formats"] == dict.fromkeys(formats, "codes12")
    assert "formats" not in usual.to_dict()
    assert plan.host_items["load_staging"] > usual.host_items["load_staging"]


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.9.mlp.down_proj.weight"])
def test_a_format_for_what_is_no_matrix_of_the_model_is_refused(name: str) -> None:
    config, facts = make_config("absent"), open_device("cpu").facts()
    with pytest.raises(ConfigError, match=f"expected a matrix .* got {name}"):
        plan_memory(config, small_spec(), facts, tensor_formats={name: CODES})


def test_the_formats_of_a_dtype_are_all_the_same() -> None:
    formats = plain("float16")
    assert formats["anything"] is FORMATS["float16"]
    assert formats.to_dict() == {}
