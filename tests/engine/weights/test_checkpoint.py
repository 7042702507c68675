"""Checkpoints: straight into place, in every dtype; damage is refused and named."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM
from engine.errors import CheckpointError
from engine.model.checkpoint import read_folder
from engine.plan.cards import resolve_dtype
from tests.engine.conftest import TinyModels
from tests.slow import mostly_slow, slow
from tests.tiny import (
    FAMILIES,
    greedy,
    greedy_of_transformers,
    hf_model,
    make_config,
    make_prompt,
    open_llm,
    save,
    write_config,
)

PROMPTS = [make_prompt(length) for length in (3, 40)]
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def folder(tiny: TinyModels, tmp_path: Path) -> Path:
    """A copy of the tiny Llama that may be damaged."""
    return Path(shutil.copytree(tiny.folder("llama"), tmp_path / "llama"))


def rewrite(folder: Path, **changes: Any) -> None:
    """Change tensors of the checkpoint by name (with dots as __); None removes one."""
    tensors = load_file(folder / "model.safetensors")
    for key, value in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def rewrite_header(folder: Path, change: Any) -> None:
    """Let `change` edit the header in place; the data stay."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def engine_weights(folder: Path, **keywords: Any) -> dict[str, torch.Tensor]:
    llm = open_llm(folder, **keywords)
    found = {part.name: tensor.clone() for part, tensor in llm._engine.store.parameters()}
    llm.close()
    return found


@pytest.mark.thorough_but("bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16"), "float32"])
def test_every_dtype_is_converted_as_torch_does(tmp_path: Path, dtype: str) -> None:
    folder = save(hf_model("qwen2", tie_word_embeddings=False), tmp_path, dtype)
    stored = load_file(folder / "model.safetensors")
    assert {str(tensor.dtype) for tensor in stored.values()} == {f"torch.{dtype}"}
    for wanted in ("bfloat16", "float16", "float32"):
        for offload in ({}, {"cpu_offload_gb": 1}, {"offload_group_size": 2}):
            found = engine_weights(folder, dtype=wanted, **offload)
            assert found.keys() == stored.keys()
            for name, tensor in found.items():
                assert tensor.dtype == getattr(torch, wanted)
                assert torch.equal(tensor, stored[name].to(tensor.dtype)), name


@pytest.mark.thorough_but("float16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_engine_in_half_precision_answers(tiny: TinyModels, dtype: str) -> None:
    resident = open_llm(tiny.folder("qwen3"), dtype=dtype)
    offloaded = open_llm(tiny.folder("qwen3"), dtype=dtype, offload_group_size=2)
    assert resident.effective()["dtype"] == dtype
    assert greedy(resident, PROMPTS, 8) == greedy(offloaded, PROMPTS, 8)
    resident.close()
    offloaded.close()


def test_shards_and_pieces_of_any_size(
    tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(hf_model("llama"), tmp_path, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    expected = tiny.greedy("llama", PROMPTS, 6)
    llm = open_llm(folder)
    assert greedy(llm, PROMPTS, 6) == expected
    llm.close()
    stored = load_file(tiny.folder("llama") / "model.safetensors")
    monkeypatch.setattr("engine.weights.reader.PIECE_BYTES", 1000)
    for dtype in ("float32", "bfloat16"):
        found = engine_weights(folder, dtype=dtype)
        assert all(torch.equal(found[n], stored[n].to(found[n].dtype)) for n in stored)


def test_an_index_and_a_single_file_come_before_other_files(folder: Path) -> None:
    save_file({"adapter": torch.zeros(1)}, folder / "adapter_model.safetensors")
    open_llm(folder).close()
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(CheckpointError, match="adapter"):
        open_llm(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = save(hf_model("llama"), tmp_path, max_shard_size="100KB")
    victim = sorted(folder.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=victim.name):
        open_llm(folder)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_is_named(folder: Path, text: str) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        open_llm(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_a_file_that_is_cut_short_is_refused(folder: Path, keep: float) -> None:
    file = folder / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, int(keep * size) if isinstance(keep, float) else keep)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*[Ff]etch it again"):
        open_llm(folder)


def test_a_file_that_shrinks_after_its_header_was_read_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.weights.reader import CheckpointReader

    read = CheckpointReader.read

    def cut(self: CheckpointReader, *args: Any) -> None:
        os.truncate(folder / "model.safetensors", 20_000)
        read(self, *args)

    monkeypatch.setattr(CheckpointReader, "read", cut)
    with pytest.raises(CheckpointError, match="ended early"):
        open_llm(folder)


def test_headers_that_contradict_themselves_are_refused(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()

    def refuse(change: Any, *parts: str) -> None:
        (folder / "model.safetensors").write_bytes(whole)
        rewrite_header(folder, change)
        with pytest.raises(CheckpointError) as error:
            open_llm(folder)
        for part in ("model.safetensors", *parts):
            assert part in str(error.value)

    def shift(header: Any) -> None:
        header[DOWN]["data_offsets"][0] += 4

    refuse(shift, DOWN, "bytes")
    refuse(lambda header: header[DOWN].pop("shape"), "shape")
    refuse(lambda header: header[DOWN].update(dtype="F8_E5M2"), DOWN, "F8_E5M2", "quantised")
    refuse(lambda header: header[DOWN].update(data_offsets=[0]))
    refuse(lambda header: header[DOWN].update(shape=["a", 64]), DOWN, "whole numbers")
    refuse(lambda header: header[DOWN].update(shape=[-1, -1]), DOWN, "whole numbers")
    other = DOWN.replace("layers.1", "layers.0")
    refuse(lambda header: header[DOWN].update(header[other]), DOWN, other, "share bytes")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"[{}]")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_llm(folder)


def test_missing_extra_and_misshapen_tensors_are_named(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    name = DOWN.replace(".", "__")
    for changes, parts in (
        ({name: None}, ["1 tensors are missing", DOWN]),
        ({name: torch.zeros(64, 95)}, [DOWN, "[64, 95]", "[64, 96]"]),
        ({"model__extra__weight": torch.zeros(3)}, ["model.extra.weight", "llama"]),
    ):
        (folder / "model.safetensors").write_bytes(whole)
        rewrite(folder, **changes)
        with pytest.raises(CheckpointError) as error:
            open_llm(folder)
        assert all(part in str(error.value) for part in parts)


def test_rotary_tables_of_old_checkpoints_are_ignored(tiny: TinyModels, folder: Path) -> None:
    rewrite(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8))
    llm = open_llm(folder)
    assert greedy(llm, PROMPTS, 6) == tiny.greedy("llama", PROMPTS, 6)
    llm.close()


def test_a_single_file_comes_before_an_index_of_shards_that_are_gone(
    tiny: TinyModels, tmp_path: Path
) -> None:
    folder = save(hf_model("llama", seed=2), tmp_path, max_shard_size="100KB")
    for shard in folder.glob("model-*.safetensors"):
        shard.unlink()
    shutil.copy(tiny.folder("llama") / "model.safetensors", folder)
    assert (folder / "model.safetensors.index.json").is_file()
    llm = open_llm(folder)
    assert greedy(llm, PROMPTS, 6) == tiny.greedy("llama", PROMPTS, 6)
    llm.close()


@pytest.mark.thorough
@pytest.mark.parametrize("family", mostly_slow(FAMILIES, lambda x: x == "llama"))
def test_a_head_that_differs_from_a_tied_embedding_is_used(
    tiny: TinyModels, tmp_path: Path, family: str
) -> None:
    folder = Path(shutil.copytree(tiny.folder(family), tmp_path / family))
    write_config(folder, tie_word_embeddings=True)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    for changes, is_tied in (
        ({"lm_head__weight": table.flip(0).contiguous()}, False),
        ({"lm_head__weight": table.clone()}, True),
        ({"lm_head__weight": table, "model__embed_tokens__weight": None}, True),
    ):
        rewrite(folder, **changes)
        llm = open_llm(folder)
        assert llm.spec.tie_word_embeddings == is_tied
        notes = [note for note in llm.effective()["warnings"] if "ties the embeddings" in note]
        assert len(notes) == (not is_tied)
        assert greedy(llm, PROMPTS, 6) == greedy_of_transformers(folder, PROMPTS, 6)
        llm.close()


@pytest.mark.parametrize("stated", [None, "float16"])
def test_the_dtype_is_that_of_the_files_where_config_json_states_none(
    tmp_path: Path, stated: str | None
) -> None:
    folder = save(hf_model("gemma3"), tmp_path, "bfloat16")
    write_config(folder, dtype=stated, torch_dtype=None)
    found = read_folder(folder)
    assert found.spec.dtype == (stated or "bfloat16")
    assert found.notes == ()
    assert resolve_dtype(make_config(folder, dtype="auto"), found.spec, "cuda") == found.spec.dtype


def test_of_files_of_several_dtypes_that_of_most_elements_is_taken(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    few = {"model__norm__weight": tensors["model.norm.weight"]}
    rewrite(folder, **{name.replace(".", "__"): x.bfloat16() for name, x in tensors.items()})
    rewrite(folder, **few)
    write_config(folder, dtype=None)
    llm = open_llm(folder)
    assert llm.spec.dtype == "bfloat16"
    [note] = [note for note in llm.effective()["warnings"] if "no dtype" in note]
    assert "counts as bfloat16, which most elements have (64 of float32)" in note
    assert note in LLM.plan_for(make_config(folder)).notes
    llm.close()


def test_an_untied_model_needs_its_head(folder: Path) -> None:
    rewrite(folder, lm_head__weight=None)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        open_llm(folder)
    write_config(folder, tie_word_embeddings=True)
    open_llm(folder).close()


def test_folders_that_are_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent: expected a folder with config\.json"):
        open_llm(tmp_path / "absent")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"expected \*\.safetensors.*load_format=dummy"):
        open_llm(folder)
    open_llm(folder, load_format="dummy").close()
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not JSON"):
        open_llm(folder, load_format="dummy")
    (folder / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"config\.json: not JSON"):
        open_llm(folder, load_format="dummy")


def test_a_damaged_generation_config_is_named(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: not JSON"):
        open_llm(folder)


def test_nothing_is_allocated_for_a_checkpoint_that_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine import build

    def place(*_: Any) -> None:
        pytest.fail("weights were placed")

    rewrite(folder, **{DOWN.replace(".", "__"): None})
    monkeypatch.setattr(build, "WeightStore", place)
    with pytest.raises(CheckpointError):
        open_llm(folder)


def test_progress_ends_at_the_total(folder: Path) -> None:
    for keywords in ({}, {"dtype": "bfloat16"}, {"load_format": "dummy"}):
        seen: list[tuple[str, int, int]] = []

        def note(*args: Any, seen: list[Any] = seen) -> None:
            seen.append(args)

        llm = LLM.from_config(make_config(folder, **keywords), note)
        assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
        phase, done, total = seen[-1]
        assert (phase, done) == ("load", total)
        assert total == sum(
            part.numel * (2 if keywords.get("dtype") and "load_format" in keywords else 4)
            for part, _ in llm._engine.store.parameters()
        )
        llm.close()


PEAK = """
import gc, json, re, sys, torch
from pathlib import Path
from tests.tiny import open_llm

def status(key):
    return int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

torch.set_num_threads(1)
folder, found = sys.argv[1], []
small = {"max_num_batched_tokens": 8, "gpu_memory_gib": 0.5}
open_llm(folder, **small).close()
for keywords in json.loads(sys.argv[2]):
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    llm = open_llm(folder, **small, **keywords)
    plan = llm.plan
    found.append({
        "growth": status("VmHWM") - before,
        "weights": llm.spec.weight_bytes(plan.dtype),
        "slots": plan.num_slots * plan.slot_bytes,
    })
    llm.close()
    del llm, plan
print(json.dumps(found))
"""


@pytest.mark.slow
def test_no_second_copy_of_the_model_while_loading(tmp_path: Path) -> None:
    """The resident set grows by the weights, the slots and bounded buffers, nothing else."""
    from engine.model.spec import ModelSpec

    sizes: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 4000,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    spec = ModelSpec.from_hf_config(sizes)
    names = {part.name: part.shape for tensor in spec.tensors() for part in tensor.parts}
    save_file(
        {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in names.items()},
        tmp_path / "model.safetensors",
    )
    cases = [
        {"dtype": "bfloat16"},
        {"dtype": "float32"},
        {"dtype": "float32", "offload_group_size": 2},
        {"dtype": "float32", "cpu_offload_gb": 1},
    ]
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path), json.dumps(cases)],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    for case, found in zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert found["weights"] > 60 * 2**20
        buffers = 48 * 2**20 if case["dtype"] == "bfloat16" else 96 * 2**20
        assert found["growth"] < found["weights"] * 1.05 + found["slots"] + buffers, (case, found)
