"""Tensors that codes cannot hold: loaded again with these plain, noted, and known to the next."""

import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine import LLM
from engine.asked.config import EngineConfig
from engine.asked.offload import OffloadWarning
from engine.build import build_engine
from engine.model.checkpoint import checkpoint_identity, read_unpackable, write_unpackable
from tests.slow import slow
from tests.tiny import greedy, hf_model, make_config, make_prompt, open_llm, save

SIZES = {"vocab_size": 160, "intermediate_size": 128}
PROMPTS = [make_prompt(length) for length in (3, 40)]
SPOILT = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with one matrix whose exponents no code reaches."""
    found = save(hf_model("llama", **SIZES), tmp_path / "model", "bfloat16")
    tensors = load_file(found / "model.safetensors")
    tensors[SPOILT][:, ::3] *= 2.0**-40
    save_file(tensors, found / "model.safetensors", metadata={"format": "pt"})
    return found


def ask(folder: Path, facts: Path, **keywords: Any) -> EngineConfig:
    return make_config(
        folder,
        dtype="bfloat16",
        weight_format="lossless",
        facts_folder=str(facts),
        **keywords,
    )


def open_noting(folder: Path, facts: Path, **keywords: Any) -> tuple[LLM, list[str]]:
    """Build an engine; return what it warned of too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OffloadWarning)
        llm = LLM.from_config(ask(folder, facts, **keywords))
    return llm, [str(found.message) for found in caught]


@pytest.mark.parametrize("place", [slow({}), {"cpu_offload_gb": 1}])
def test_a_matrix_that_codes_cannot_hold_is_loaded_again_as_it_is(
    folder: Path, tmp_path: Path, place: dict[str, Any]
) -> None:
    usual = open_llm(folder, dtype="bfloat16")
    expected = greedy(usual, PROMPTS, 6)
    usual.close()
    facts = tmp_path / "facts"
    llm, notes = open_noting(folder, facts, **place)
    assert greedy(llm, PROMPTS, 6) == expected
    assert [note for note in notes if "loaded a second time" in note and SPOILT in note]
    [(reason, names)] = [
        item
        for item in llm.plan.to_dict()["weight_format"]["plain_matrices"].items()
        if "escapes" in item[0]
    ]
    assert names == [SPOILT]
    assert SPOILT not in llm.plan.formats.others
    llm.close()
    assert read_unpackable(str(facts), str(folder)) == {SPOILT: reason}
    llm, notes = open_noting(folder, facts, **place)
    assert not [note for note in notes if "loaded a second time" in note]
    assert SPOILT not in llm.plan.formats.others
    assert greedy(llm, PROMPTS, 6) == expected
    llm.close()
    config = ask(folder, facts)
    assert SPOILT not in LLM.plan_for(config).formats.others
    assert SPOILT in LLM.plan_for(replace(config, facts_folder=None)).formats.others


@pytest.mark.thorough
def test_a_plan_that_was_handed_in_keeps_its_placements(folder: Path, tmp_path: Path) -> None:
    """Where it is planned again, as it is what is to be built: another choice would be timed."""
    other = LLM.plan_for(ask(folder, tmp_path / "facts", offload_group_size=1))
    assert SPOILT in other.formats.others
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OffloadWarning)
        llm = LLM._of(build_engine(ask(folder, tmp_path / "facts"), plan=other))
    assert llm.plan.placements == other.placements
    assert llm.plan.num_slots == other.num_slots > 0
    assert set(llm.plan.formats.others) == set(other.formats.others) - {SPOILT}
    assert llm.plan.weight_format is not None
    kept = llm.plan.weight_format["plain_matrices"]
    assert [names for reason, names in kept.items() if "escapes" in reason] == [[SPOILT]]
    assert [w for w in caught if "loaded a second time" in str(w.message)]
    usual = open_llm(folder, dtype="bfloat16")
    assert greedy(llm, PROMPTS, 6) == greedy(usual, PROMPTS, 6)
    usual.close()
    llm.close()


def test_what_is_noted_holds_for_that_checkpoint_alone(folder: Path, tmp_path: Path) -> None:
    facts = str(tmp_path / "facts")
    write_unpackable(facts, str(folder), {SPOILT: "many escapes"})
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert checkpoint_identity(copy) == checkpoint_identity(folder)
    assert read_unpackable(facts, str(copy)) == {SPOILT: "many escapes"}
    tensors = load_file(copy / "model.safetensors")
    for tensor in tensors.values():
        tensor.add_(1)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert read_unpackable(facts, str(copy)) == {}
    [file] = Path(facts).iterdir()
    older = file.read_text().replace('"version": 1', '"version": 0')
    for damaged in ("{", "{}", "[]", '{"version": 1, "unpackable": []}', older):
        file.write_text(damaged)
        assert read_unpackable(facts, str(folder)) == {}
    assert read_unpackable(None, str(folder)) == read_unpackable(facts, None) == {}
    assert read_unpackable(facts, str(tmp_path)) == {}


def test_a_folder_that_cannot_be_written_costs_the_next_load_alone(
    folder: Path, tmp_path: Path
) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    llm, notes = open_noting(folder, taken)
    assert [note for note in notes if "loaded a second time" in note]
    llm.close()
    assert taken.read_text() == ""
