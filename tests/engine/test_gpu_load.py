"""On a GPU: pinned slabs of exact size, reading into GPU memory, limits on pinning."""

import gc
import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM
from engine.asked.offload import OffloadWarning
from engine.device import cuda
from engine.device.cuda import CUDADevice, probe_pinning
from engine.errors import CapacityError, PinningError
from engine.model.checkpoint import copy_folder
from engine.pack import pack_checkpoint
from engine.weights import reader
from tests.engine.conftest import TinyModels
from tests.engine.smaps import anonymous_bytes, mapped, present_bytes
from tests.tiny import greedy, make_config, make_prompt, open_llm

pytestmark = pytest.mark.gpu

MIB, GIB = 2**20, 2**30
PROMPTS = [make_prompt(length, seed=9) for length in (1, 19, 90)]
SIZES: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8000,
    "hidden_size": 1024,
    "intermediate_size": 3000,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


def open_gpu(folder: Any, **keywords: Any) -> LLM:
    return open_llm(folder, **({"device": "cuda"} | keywords))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of some 200 MiB in three files."""
    from engine.model.spec import ModelSpec

    folder = tmp_path_factory.mktemp("shards")
    (folder / "config.json").write_text(json.dumps(SIZES))
    spec = ModelSpec.from_hf_config(SIZES)
    generator = torch.Generator().manual_seed(5)
    parts = [part for tensor in spec.tensors() for part in tensor.parts]
    for at in range(3):
        tensors = {
            part.name: torch.randn(part.shape, generator=generator).mul_(0.05).bfloat16()
            for part in parts[at::3]
        }
        save_file(tensors, folder / f"model-{at}.safetensors")
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def digest(llm: LLM) -> str:
    total = hashlib.blake2b()
    parts = llm._engine.store.parameters()
    for part, tensor in sorted(parts, key=lambda pair: pair[0].name):
        total.update(part.name.encode())
        total.update(tensor.cpu().contiguous().view(torch.uint8).numpy())
    return total.hexdigest()


@pytest.mark.parametrize("num_bytes", [1, 4097, 2 * MIB - 1, 33 * MIB, 133 * MIB + 5])
def test_pinned_slabs_take_what_was_asked(num_bytes: int) -> None:
    device = CUDADevice()
    torch.zeros(1, device="cuda")
    buffer = device.host_buffer(num_bytes, pin=True)
    address = buffer.tensor.data_ptr()
    assert (
        num_bytes
        <= present_bytes(buffer.tensor)
        <= max(-(-num_bytes // 4096) * 4096, 1.02 * num_bytes)
    )
    assert mapped(address, num_bytes)["dc"] >= 1
    source = torch.arange(num_bytes, dtype=torch.int32).to(torch.uint8)
    buffer.tensor.copy_(source)
    assert torch.equal(buffer.tensor.cuda(non_blocking=True).cpu(), source)
    assert buffer.tensor.is_pinned()
    buffer.close()
    assert buffer.tensor.numel() == 0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of fork, in 3.12
def test_a_forked_child_leaves_pinned_memory_alone() -> None:
    device = CUDADevice()
    buffer = device.host_buffer(8 * MIB, pin=True)
    view = device.in_place(buffer, buffer.tensor)
    buffer.tensor.fill_(1)
    child = os.fork()
    if child == 0:
        os._exit(1 if mapped(buffer.tensor.data_ptr(), 8 * MIB) else 0)
    buffer.tensor.fill_(2)  # where pages were shared, this write would move them
    assert bool((view == 2).all())
    assert os.waitpid(child, 0)[1] == 0
    buffer.tensor.fill_(3)
    assert bool((view == 3).all())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("piece_bytes", [4 * MIB, 100_000])
@pytest.mark.parametrize("keywords", [{}, {"cpu_offload_gb": 0.1}, {"offload_group_size": 2}])
def test_weights_are_those_of_the_files(
    shards: Path,
    monkeypatch: pytest.MonkeyPatch,
    keywords: dict[str, Any],
    piece_bytes: int,
    dtype: str,
) -> None:
    monkeypatch.setattr(reader, "PIECE_BYTES", piece_bytes)
    expected = stored(shards)
    llm = open_gpu(shards, dtype=dtype, **keywords)
    parts = llm._engine.store.parameters()
    for part, tensor in sorted(parts, key=lambda pair: pair[0].name):
        assert torch.equal(tensor.cpu(), expected[part.name].to(tensor.dtype)), part.name
    llm.close()


def test_checksums_outlive_pinned_memory_and_engines(shards: Path) -> None:
    found = []
    for keywords in ({"cpu_offload_gb": 0.1}, {"offload_group_size": 1}) * 2:
        llm = open_gpu(shards, dtype="bfloat16", **keywords)
        before = digest(llm)
        for size in (4096, 100_000, 33 * MIB, 70 * MIB + 3):
            blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(3)]
            blocks += [llm._engine.device.host_buffer(size, pin=True).tensor for _ in range(3)]
            for block in blocks:
                block.fill_(255)
            del blocks
            gc.collect()
        greedy(llm, [make_prompt(40, vocab=8000)], 4)
        assert digest(llm) == before
        found.append(before)
        llm.close()
        del llm
    assert len(set(found)) == 1


@pytest.mark.alone
@pytest.mark.parametrize("keywords", [{"cpu_offload_gb": 0.15}, {"offload_group_size": 1}], ids=str)
def test_both_memories_are_given_back(shards: Path, keywords: dict[str, Any]) -> None:
    def open_once() -> LLM:
        return open_gpu(shards, dtype="bfloat16", gpu_memory_gib=3.0, **keywords)

    def settled() -> tuple[int, int]:
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return anonymous_bytes(), total - free

    llm = open_once()
    greedy(llm, [make_prompt(40, vocab=8000)], 4)
    llm.close()
    del llm
    host, card = settled()
    for _ in range(2):
        llm = open_once()
        greedy(llm, [make_prompt(40, vocab=8000)], 4)
        assert anonymous_bytes() > host + 100 * MIB
        del llm
        after = settled()
        assert after[0] <= 1.02 * host
        assert after[1] <= 1.02 * card + 2 * MIB


# Limits on pinning.


def test_this_driver_is_asked() -> None:
    CUDADevice()
    refusal, limit = probe_pinning()
    assert refusal == ""
    assert limit is None or limit >= 0


def test_a_driver_that_counts_locked_memory_is_refused_with_the_figures(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "probe_pinning", lambda: ("", 64 * MIB))
    with pytest.raises(
        CapacityError, match=r"0\.\d+ GiB would be pinned.*leaves 0\.062 GiB.*ulimit"
    ):
        open_gpu(shards, dtype="bfloat16", offload_group_size=1)


def test_a_driver_that_pins_nothing_leads_to_pageable_memory(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tiny.greedy("llama", PROMPTS, 5)
    monkeypatch.setattr(cuda, "probe_pinning", lambda: ("no pinning: tests say so", None))
    llm = open_gpu(tiny.folder("llama"), offload_group_size=1)
    assert greedy(llm, PROMPTS, 5) == expected
    memory = llm.memory()
    assert memory["host_pinned_bytes"] == 0
    assert memory["host_pageable_bytes"] > 0
    assert any("tests say so" in note for note in llm.effective()["fallbacks"])
    llm.close()


def test_a_registration_that_fails_late_leads_to_pageable_memory(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One page can be registered, the slab cannot."""
    register = cuda._register

    def fail(address: int, num_bytes: int) -> int:
        return 2 if num_bytes > 4096 else register(address, num_bytes)

    monkeypatch.setattr(cuda, "_register", fail)
    with pytest.raises(PinningError, match="error 2"):
        CUDADevice().host_buffer(MIB, pin=True)
    config = make_config(tiny.folder("llama"), device="cuda", offload_group_size=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OffloadWarning)
        llm = LLM.from_config(config)
    assert any("error 2" in str(warning.message) for warning in caught)
    assert greedy(llm, PROMPTS, 5) == tiny.greedy("llama", PROMPTS, 5)
    assert llm.memory()["host_pinned_bytes"] == 0
    llm.close()


@pytest.mark.parametrize("place", [{}, {"cpu_offload_gb": 0.1}, {"offload_group_size": 2}])
def test_codes_that_were_kept_or_packed_ahead_are_read_into_place(
    shards: Path, tmp_path: Path, place: dict[str, Any]
) -> None:
    plain = open_gpu(shards, dtype="bfloat16", weight_format="lossless", **place)
    expected = greedy(plain, PROMPTS, 8)
    plain.close()
    asked = {"dtype": "bfloat16", "weight_format": "lossless", "kept_folder": str(tmp_path)}
    moved = []
    for _ in range(2):
        llm = open_gpu(shards, keep_lossless=True, **asked, **place)
        assert greedy(llm, PROMPTS, 8) == expected
        moved.append(llm.load_report.moved)
        llm.close()
    assert moved[1]["kept"] == moved[0]["keep"] > 0
    made = []
    for device in ("cuda", "cpu"):
        folder = pack_checkpoint(
            shards, tmp_path / device, tmp_path / "facts", device=device
        ).folder
        made.append(load_file(next(folder.glob("*.safetensors"))))
    kept = load_file(next(copy_folder(tmp_path, shards).glob("*.safetensors")))
    for arrays in made:
        assert arrays.keys() == kept.keys()
        assert all(torch.equal(array, kept[name]) for name, array in arrays.items())
