"""A registry in a folder of its own, and checkpoints of a tiny model."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest

from catalogue.conversions import write_weights
from console.registry.database import Database
from console.registry.models import Models
from console.registry.results import Results
from console.registry.tables import Performance, TestRun
from engine.model.spec import ModelSpec

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}


def checkpoint(folder: Path, *, shards: int = 1, **changes: Any) -> Path:
    """Write a whole checkpoint of zeros; several shards have an index."""
    config = CONFIG | changes
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    spec = ModelSpec.from_hf_config(config)
    tensors = {
        part.name: np.zeros(part.shape, dtype=np.float32)
        for tensor in spec.tensors()
        for part in tensor.parts
    }
    if shards == 1:
        write_weights(folder, tensors)
        return folder
    names = [f"model-{index + 1:05}-of-{shards:05}.safetensors" for index in range(shards)]
    weight_map = {name: names[at % shards] for at, name in enumerate(sorted(tensors))}
    for shard in names:
        write_weights(
            folder, {name: tensors[name] for name in tensors if weight_map[name] == shard}
        )
        (folder / "model.safetensors").rename(folder / shard)
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """TIGHTFIT_HOME, and an empty cache of the hub's client."""
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "theirs"))
    return tmp_path / "home"


@pytest.fixture(scope="session")
def empty_registry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database without rows: migrations run once."""
    path = tmp_path_factory.mktemp("registry") / "registry.db"
    Database.open(path).close()
    return path


@pytest.fixture
def database(home: Path, empty_registry: Path) -> Iterator[Database]:
    home.mkdir()
    shutil.copy(empty_registry, home)
    found = Database.open()
    yield found
    found.close()


@pytest.fixture
def models(database: Database) -> Models:
    return Models(database)


def measured(results: Results, run: TestRun, card: str, part: str, metrics: dict[str, Any]) -> None:
    """Store what a test measured, as console.testing does."""
    row = Performance(
        model_id=run.model_id,
        profile_id=run.profile_id,
        test_run_id=run.id,
        card=card,
        part=part,
        metrics=metrics,
    )
    with results._database.write() as session:
        session.add(row)
