"""Work without an engine: a checkpoint of random weights, and what needs a GPU."""

import pytest

from engine.asked.config import EngineConfig, ModelConfig
from engine.model.checkpoint import read_folder, read_headers
from harness.config.study import BareScenario
from harness.work import bare
from harness.work.bare import measure_bare
from tests.engine.specs import configuration, small_spec
from tests.tiny import greedy, open_llm


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path))
    return tmp_path


def written(spec):
    config = configuration(spec)
    return measure_bare(BareScenario(parts=["checkpoint"]), config, None)["checkpoint"]


def test_a_checkpoint_of_random_weights_is_that_of_the_model(home, monkeypatch):
    monkeypatch.setattr(bare, "DUMMY_POOL_SIZE", 1009)
    spec = small_spec(dtype="bfloat16")
    found = written(spec)
    folder, linked = sorted((home / "bench").iterdir())
    assert (found["folder"], found["linked_folder"]) == (str(folder), str(linked))
    for file in folder.iterdir():
        assert (linked / file.name).samefile(file)
    assert found["num_bytes"] == (folder / "model.safetensors").stat().st_size
    assert read_folder(folder).spec == spec
    stored = read_headers(folder)
    parts = [part for tensor in spec.tensors() for part in tensor.parts]
    assert {name: each.shape for name, each in stored.items()} == {p.name: p.shape for p in parts}
    llm = open_llm(folder, dtype="bfloat16")
    tokens = greedy(llm, [[1, 2, 3], [4]], 4)
    llm.close()
    assert all(len(each) == 4 for each in tokens)


def test_a_checkpoint_that_is_there_is_not_written_again(home, monkeypatch):
    monkeypatch.setattr(bare, "DUMMY_POOL_SIZE", 1009)
    first = written(small_spec(dtype="bfloat16"))
    folder, linked = sorted((home / "bench").iterdir())
    file = folder / "model.safetensors"
    marked = file.read_bytes()[:-1] + b"x"
    file.write_bytes(marked)
    assert written(small_spec(dtype="bfloat16")) == first
    assert file.read_bytes() == marked
    file.write_bytes(marked[:-1])  # cut short: made anew
    assert written(small_spec(dtype="bfloat16")) == first
    assert file.stat().st_size == len(marked)
    assert (linked / file.name).samefile(file)


def test_restoring_is_timed_on_a_gpu_only():
    config = EngineConfig(model=ModelConfig(name="x", load_format="dummy", spec=small_spec()))
    found = measure_bare(BareScenario(parts=["restore"]), config, None)
    assert found == {"restore": {"no_room": "operators are timed on a GPU only"}}
