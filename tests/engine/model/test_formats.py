"""Formats of tensors: a plan counts them, the store places them, products take them."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, build
from engine.asked.offload import OffloadWarning
from engine.clock import PhaseClock
from engine.device.cpu import CPUDevice
from engine.device.cuda import open_device
from engine.errors import CapacityError, ConfigError
from engine.model import formats as formats_module
from engine.model.formats import (
    EMBEDDING,
    FORMATS,
    HEAD,
    Format,
    ParamSpec,
    TensorFormats,
    TensorSpec,
    align,
    plain,
)
from engine.model.lossless import LOSSLESS, lossless_formats
from engine.model.quantised import Quantisation
from engine.plan.planner import plan_memory
from engine.plan.units import UVA
from engine.weights.reader import DummyWeights, pack
from kernels.arguments import CODES_PARTS, Codes, empty_codes
from kernels.ops import codes
from tests.engine.specs import H200, OLMO_7B, small_spec
from tests.slow import slow
from tests.tiny import greedy, hf_model, make_config, make_prompt, open_llm, save

PROMPTS = [make_prompt(length) for length in (3, 40)]
MLP = ("mlp.gate_up_proj.weight", "mlp.down_proj.weight")
SIZES = {"vocab_size": 160, "intermediate_size": 128}
"""So that every matrix of the small models fills tiles."""


def tensor_of(rows: int, columns: int) -> TensorSpec:
    """A matrix of two parameters."""
    return TensorSpec("w", (ParamSpec("a", (rows - 5, columns)), ParamSpec("b", (5, columns))))


def arrays(tensor: TensorSpec, value: int = 1) -> dict[str, torch.Tensor]:
    return {
        view.name: torch.full(view.shape, value, dtype=getattr(torch, view.dtype))
        for view in LOSSLESS.views(tensor)
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_plain_tensor_is_its_elements(dtype: str) -> None:
    tensor, form = tensor_of(8, 6), FORMATS[dtype]
    size = getattr(torch, dtype).itemsize
    assert form.num_bytes(tensor) == 48 * size
    assert form.row_bytes(tensor) == 6 * size
    assert [(view.shape, view.dtype, view.offset) for view in form.views(tensor)] == [
        ((8, 6), dtype, 0)
    ]
    assert form.holds(tensor, dtype)
    whole = torch.arange(48).view(8, 6)
    (first, rows), (second, last) = form.targets(tensor, {"": whole})
    assert (first.name, second.name) == ("a", "b")
    assert torch.equal(torch.cat([rows, last]), whole)


def test_rows_of_a_joined_tensor_are_rows_of_its_parameters() -> None:
    tensor = tensor_of(8, 6)
    assert list(tensor.row_parts(2, 8)) == [
        (ParamSpec("a", (1, 6), 12), 0, 1),
        (ParamSpec("b", (5, 6), 0), 1, 6),
    ]
    assert list(tensor.row_parts(4, 5)) == [(ParamSpec("b", (1, 6), 6), 0, 1)]


@pytest.mark.parametrize("shape", [(64, 64), (128, 1024), (4096, 11264), (100352, 4096)])
def test_a_lossless_tensor_is_the_arrays_of_its_codes(shape: tuple[int, int]) -> None:
    tensor, expected = tensor_of(*shape), empty_codes(*shape, "meta")
    views = LOSSLESS.views(tensor)
    assert [view.name for view in views] == list(CODES_PARTS)
    end = 0
    for view in views:
        array = getattr(expected, view.name)
        assert (view.shape, getattr(torch, view.dtype)) == (array.shape, array.dtype)
        assert view.offset == align(end)
        end = view.offset + array.nbytes
    assert LOSSLESS.num_bytes(tensor) == end
    if shape[0] * shape[1] >= 2**20:
        assert align(end) <= 0.755 * FORMATS["bfloat16"].num_bytes(tensor)


@pytest.mark.parametrize("shape", [(8, 64), (64, 32), (72, 64), (64, 96), (16, 64), (64,)])
def test_what_fills_no_tiles_or_gains_nothing_is_not_lossless(shape: tuple[int, ...]) -> None:
    tensor = TensorSpec("w", (ParamSpec("w", shape),))
    assert not LOSSLESS.holds(tensor, "bfloat16")
    gates = ParamSpec("gate", (72, 64)), ParamSpec("up", (72, 64))
    assert not LOSSLESS.holds(TensorSpec("gate_up", gates), "bfloat16")
    gates = ParamSpec("gate", (80, 64)), ParamSpec("up", (80, 64))
    assert LOSSLESS.holds(TensorSpec("gate_up", gates), "bfloat16")
    assert not LOSSLESS.holds(TensorSpec("gate_up", gates), "float16")


def test_matrices_of_the_layers_and_the_head_are_lossless() -> None:
    untied, tied = (small_spec(tie_word_embeddings=tie) for tie in (False, True))
    matrices = {t.name for t in untied.tensors() if len(t.shape) == 2}
    assert lossless_formats(untied).others.keys() == matrices - {EMBEDDING}
    assert lossless_formats(tied).others.keys() == matrices - {HEAD}
    assert lossless_formats(untied, plain=[HEAD]).others.keys() == matrices - {EMBEDDING, HEAD}
    for dtype in ("float16", "float32"):
        assert lossless_formats(untied, dtype) == plain(dtype)
    odd = lossless_formats(small_spec(intermediate_size=72)).others
    assert not any(name.endswith("down_proj.weight") for name in odd)
    assert not any(name.endswith("gate_up_proj.weight") for name in odd)
    assert sum(name.endswith("qkv_proj.weight") for name in odd) == 8


@pytest.mark.parametrize("batch_bytes", [1, 20_000, 2**20])
@pytest.mark.parametrize("chunk_rows", [32, 2**10])
def test_a_tensor_is_packed_by_blocks_of_rows(
    batch_bytes: int, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats_module, "PACK_BATCH_BYTES", batch_bytes)
    monkeypatch.setattr("engine.model.lossless.pack_chunk_rows", lambda columns: chunk_rows)
    tensors = [tensor_of(80, 128), TensorSpec("v", (ParamSpec("v", (48, 64)),))]
    whole = {t.name: torch.randn(t.shape).bfloat16() for t in tensors}
    for values in whole.values():
        values.view(-1)[::70] *= 2.0**40
    sources = {"a": whole["w"][:75], "b": whole["w"][75:], "v": whole["v"]}
    views = {tensor.name: arrays(tensor) for tensor in tensors}
    asked = 0

    def fill(parameters: Any) -> None:
        nonlocal asked
        for part, target in parameters:
            values = sources[part.name].flatten()[part.first : part.first + part.numel]
            target.copy_(values.view(part.shape))
            asked += part.numel

    formats = TensorFormats(FORMATS["bfloat16"], dict.fromkeys(views, LOSSLESS))
    device = CPUDevice()
    device.enforce_budget(formats.packing_bytes(tensors))
    packed = [(tensor, views[tensor.name]) for tensor in tensors]
    pack(formats, packed, fill, device, PhaseClock())
    assert device.peak_bytes() == formats.packing_bytes(tensors)
    assert device.allocated_bytes() == 0
    assert asked == sum(values.numel() for values in whole.values())
    for name, values in whole.items():
        expected = codes.pack(values)
        for view, array in views[name].items():
            assert torch.equal(array, getattr(expected, view)), (name, view)


def test_memory_of_packing_is_bounded_and_free_again_when_kv_is_allocated() -> None:
    lossless = lossless_formats(OLMO_7B)
    needed = lossless.packing_bytes(OLMO_7B.tensors())
    assert 128 * 2**20 < needed <= 256 * 2**20
    assert plain("bfloat16").packing_bytes(OLMO_7B.tensors()) == 0
    config = make_config("absent", dtype="bfloat16", gpu_memory_gib=20.0, device="cuda")
    plan = plan_memory(config, OLMO_7B, H200, tensor_formats=lossless.others)
    assert "packing" not in plan.gpu_items


def test_a_budget_without_room_to_pack_is_refused() -> None:
    spec, facts = small_spec(), open_device("cpu").facts()
    formats = lossless_formats(spec)
    least: dict[str, Any] = {"max_model_len": 16, "max_num_seqs": 1, "max_num_batched_tokens": 16}
    least["gpu_memory_utilization"] = 1.0

    def plan(num_bytes: int) -> Any:
        config = make_config("absent", dtype="bfloat16", gpu_memory_gib=num_bytes / 2**30, **least)
        return plan_memory(config, spec, facts, tensor_formats=formats.others)

    items = plan(2**27).gpu_items
    later = items["activations"] + items["logits"] + items["kv_cache"]
    needed = formats.packing_bytes(spec.tensors())
    assert needed > later
    total = sum(items.values()) - later + needed
    assert "packing" not in plan(total).gpu_items
    with pytest.raises(CapacityError) as caught:
        plan(total - 256)
    assert caught.value.plan["gpu"]["items"]["packing"] > 0  # type: ignore[index]


def lossless(spec: Any, names: tuple[str, ...] = ()) -> dict[str, Format]:
    """Codes for every matrix that gains, or for those of these endings."""
    found = lossless_formats(spec).others
    return {name: each for name, each in found.items() if not names or name.endswith(names)}


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
    "in place, the table too": {"cpu_offload_gb": 1},
    "staged": {"cpu_offload_gb": 1, "uva_stage_tokens": 2},
    "on demand": {"reference": True},
}


@pytest.fixture(scope="module", params=["untied", slow("tied")])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 checkpoint with values that no window of exponents holds."""
    kind = {"untied": "llama", "tied": "qwen2"}[request.param]
    folder = save(hf_model(kind, **SIZES), tmp_path_factory.mktemp("codes"), "bfloat16")
    spoil(folder, lambda tensor: tensor.view(-1)[::97].mul_(2.0**-20))
    return folder


def spoil(folder: Path, change: Any, ending: str = "") -> None:
    """Change tensors of a checkpoint whose names end so."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(ending):
            change(tensor)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def spec_of(folder: Path) -> Any:
    return build.read_model(make_config(folder).model).spec


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """The tokens of the same weights in bf16."""
    llm = open_llm(folder, dtype="bfloat16")
    found = greedy(llm, PROMPTS, 6)
    llm.close()
    return found


@pytest.mark.thorough_but("untied-prefetch")
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
    spec, keywords = spec_of(folder), dict(PLACES[place])
    if place == "in place, the table too":
        # A tied table stays on the GPU.
        outer = [] if spec.tie_word_embeddings else ["embed_tokens", "lm_head"]
        keywords["cpu_offload_params"] = [*outer, "mlp", "self_attn"]
    llm = open_formats(folder, lossless(spec, names), **keywords)
    assert greedy(llm, PROMPTS, 6) == expected
    store, moved = llm._engine.store, llm.plan.layers[1].offloaded_bytes
    assert len(list(store.packed())) == (6 if names else 13)
    assert store.host_bytes()[0] == llm.plan.host_items["pinned_weights"]
    assert bool(moved) is (place != "resident")
    if place in {"prefetch", "staged", "on demand"}:
        assert store.copied_bytes > 0
        if not spec_of(folder).tie_word_embeddings:
            assert store.copied_bytes % moved == 0
    llm.close()


@pytest.mark.thorough
def test_a_checkpoint_is_read_and_converted_by_blocks_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(hf_model("llama", **SIZES), tmp_path, "float32")
    usual = open_llm(folder, dtype="bfloat16")
    monkeypatch.setattr(formats_module, "PACK_BATCH_BYTES", 20_000)
    monkeypatch.setattr("engine.model.lossless.pack_chunk_rows", lambda columns: 48)
    coded = open_formats(folder, lossless(usual.spec), offload_group_size=2)
    plain_values = dict(usual._engine.store.parameters())
    packed = list(coded._engine.store.packed())
    assert len(packed) == 13
    for tensor, views in packed:
        whole = torch.cat([plain_values[part] for part in tensor.parts])
        assert torch.equal(codes.restore(Codes(**views)), whole)
    assert coded._engine.load_report.moved["read"] == usual._engine.load_report.moved["read"]
    coded.close()
    usual.close()


def test_dummy_weights_are_those_of_bf16(folder: Path) -> None:
    usual = open_llm(folder, dtype="bfloat16", load_format="dummy")
    coded = open_formats(folder, lossless(usual.spec), load_format="dummy")
    plain_values = dict(usual._engine.store.parameters())
    for tensor, views in coded._engine.store.packed():
        whole = torch.cat([plain_values[part] for part in tensor.parts])
        assert torch.equal(codes.restore(Codes(**views)), whole)
    coded.close()
    usual.close()


def test_dummy_rows_are_those_of_the_whole_parameter() -> None:
    spec, whole, rows = ParamSpec("w", (64, 96)), torch.empty(64, 96), torch.empty(10, 96)
    dummy = DummyWeights(3, lambda _: None)
    dummy.fill([(spec, whole), (spec.rows(16, 26), rows)])
    assert torch.equal(rows, whole[16:26])


def test_control_a_wrong_escape_changes_tokens(folder: Path, expected: list[list[int]]) -> None:
    llm = open_formats(folder, lossless(spec_of(folder)), cpu_offload_gb=1)
    views = next(v for t, v in llm._engine.store.packed() if t.name.endswith("down_proj.weight"))
    assert views["table"][0] != 0
    views["table"][0] = torch.tensor(1000.0).bfloat16().view(torch.int16)
    assert greedy(llm, PROMPTS, 6) != expected
    llm.close()


def test_all_tensors_with_too_many_escapes_are_named_at_once_and_left_plain(
    folder: Path, tmp_path: Path
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    spoil(tmp_path, lambda tensor: tensor[:, ::3].mul_(2.0**30), "1.mlp.down_proj.weight")
    spoil(tmp_path, lambda tensor: tensor[:5, ::7].mul_(2.0**-60), "0.self_attn.v_proj.weight")
    spoil(
        tmp_path,
        lambda tensor: tensor[:16].copy_(2.0 ** torch.arange(-60, 4)),
        "2.mlp.up_proj.weight",
    )
    spec = spec_of(tmp_path)
    names = ["model.layers.1.mlp.down_proj.weight", "model.layers.2.mlp.gate_up_proj.weight"]
    coded = open_formats(tmp_path, lossless(spec))
    [note] = [note for note in coded.plan.notes if "loaded a second time" in note]
    assert (
        f"2 tensors have values that codes cannot hold and stay plain ({', '.join(names)})" in note
    )
    assert set(coded.plan.formats.others) == set(lossless_formats(spec, plain=names).others)
    usual = open_llm(tmp_path, dtype="bfloat16")
    assert greedy(coded, PROMPTS, 6) == greedy(usual, PROMPTS, 6)
    assert len(list(coded._engine.store.packed())) == 11
    usual.close()
    coded.close()


@pytest.mark.parametrize("names", [(), MLP])
def test_a_plan_counts_the_bytes_of_every_format(names: tuple[str, ...]) -> None:
    spec = small_spec(hidden_size=256, intermediate_size=512)
    config = make_config("absent", dtype="bfloat16", cpu_offload_gb=0.001)
    facts = open_device("cpu").facts()
    usual = plan_memory(config, spec, facts)
    formats = lossless(spec, names)
    plan = plan_memory(config, spec, facts, tensor_formats=formats)
    sizes = {t.name: plan.formats.num_bytes(t) for t in spec.tensors()}
    for tensor in spec.tensors():
        share = sizes[tensor.name] / usual.formats.num_bytes(tensor)
        assert 0.75 <= share < 0.8 if tensor.name in formats else share == 1
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
    assert plan.to_dict()["formats"] == dict.fromkeys(formats, "lossless12")
    assert "formats" not in usual.to_dict()
    assert plan.host_items["load_staging"] == usual.host_items["load_staging"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("model.norm.weight", "bfloat16"),
        ("model.layers.9.mlp.down_proj.weight", "bfloat16"),
        ("model.layers.1.mlp.down_proj.weight", "float32"),
    ],
)
def test_a_format_for_what_it_cannot_hold_is_refused(name: str, dtype: str) -> None:
    config, facts = make_config("absent", dtype=dtype), open_device("cpu").facts()
    with pytest.raises(ConfigError, match=f"lossless12 can hold, got {name}"):
        plan_memory(config, small_spec(), facts, tensor_formats={name: LOSSLESS})


def test_the_formats_of_a_dtype_are_all_the_same() -> None:
    formats = plain("float16")
    assert formats["anything"] is FORMATS["float16"]
    assert formats.to_dict() == {}


def test_neighbours_in_one_format_are_one_part() -> None:
    schemes = [
        {"layout": "gguf-q6_k", "bits": 6, "group": 256, "targets": ["re:.*v_proj"]},
        {"layout": "gguf-q4_k", "bits": 4, "group": 256},
    ]
    stored = Quantisation.of({"method": "gguf", "schemes": schemes})
    names = [f"model.layers.0.self_attn.{each}_proj" for each in "qkv"]
    tensor = TensorSpec("w", tuple(ParamSpec(f"{name}.weight", (32, 256)) for name in names))
    mixed = stored.formats([tensor], "bfloat16")["w"]
    rows = {view.name: view.shape[0] for view in mixed.views(tensor)}
    assert {name: rows[name] for name in ("0.values", "1.values")} == {
        "0.values": 64,
        "1.values": 32,
    }
    assert "2.values" not in rows
    apart = TensorSpec("w", tuple(replace(each, shape=(24, 256)) for each in tensor.parts))
    views = stored.formats([apart], "bfloat16")["w"].views(apart)
    assert {"0.values", "1.values", "2.values"} <= {view.name for view in views}
