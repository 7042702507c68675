"""Codes that a load has packed are kept, read by the next one, and made anew where they are bad."""

import errno
import json
import os
import struct
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine import LLM
from engine.asked.offload import OffloadWarning
from engine.errors import ConfigError
from engine.model.checkpoint import CHECKED_BYTES, copy_folder, write_unpackable
from engine.pack import PackedCheckpoint, pack_checkpoint
from engine.plan.sizes import PIECE_BYTES
from engine.weights import kept, reader
from engine.weights.kept import BusyError, KeptCopy, alone, source_identity
from kernels.arguments import Codes
from kernels.ops import codes
from tests.slow import slow
from tests.tiny import greedy, hf_model, make_config, make_prompt, open_llm, save

PROMPTS = [make_prompt(length) for length in (3, 40)]
SIZES = {"vocab_size": 160, "intermediate_size": 128}
"""So that every matrix of the small models fills tiles."""
CODED = 13
"""Tensors in codes: four in each of three layers, and the head."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(hf_model("llama", **SIZES), tmp_path_factory.mktemp("kept"), "bfloat16")
    change(folder, lambda tensor: tensor.view(-1)[::97].mul_(2.0**-20))
    return folder


@pytest.fixture(scope="module")
def expected(original: Path) -> list[list[int]]:
    """The tokens of the same weights in bf16."""
    llm = open_llm(original, dtype="bfloat16")
    found = greedy(llm, PROMPTS, 6)
    llm.close()
    return found


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A checkpoint of one's own."""
    copied = tmp_path / "checkpoint"
    copied.mkdir()
    for file in original.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    return copied


def change(folder: Path, how: Any, ending: str = "") -> None:
    """Change tensors of a checkpoint whose names end so."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(ending):
            how(tensor)
    save_file(tensors, file, metadata={"format": "pt"})
    later_ns = file.stat().st_mtime_ns + 10**9
    os.utime(file, ns=(later_ns, later_ns))


def copies(folder: Path) -> Path:
    return folder.parent / "lossless"


def own(folder: Path) -> Path:
    return copy_folder(copies(folder), folder)


def files(folder: Path) -> list[Path]:
    return sorted(own(folder).glob("*.safetensors"))


def load(folder: Path, **keywords: Any) -> LLM:
    given = {"dtype": "bfloat16", "weight_format": "lossless", "keep_lossless": True}
    return open_llm(folder, kept_folder=str(copies(folder)), **{**given, **keywords})


class Reads:
    """Counts bytes read of each file, for each load."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tensors: Counter[str] = Counter()
        before = reader._OneThread._read

        def spy(thread: Any, piece: Any, raw: torch.Tensor) -> None:
            self.tensors[piece.name] += piece.num_bytes
            before(thread, piece, raw)

        monkeypatch.setattr(reader._OneThread, "_read", spy)

    def of_source(self) -> set[str]:
        """The matrices in codes that were read of the checkpoint since the last call."""
        found = {x for x in self.tensors if x.endswith(("proj.weight", "lm_head.weight"))}
        self.tensors.clear()
        return found


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def notes(llm: LLM) -> list[str]:
    return [note for note in llm.plan.notes if "keep_lossless" in note or "kept copy" in note]


def run(folder: Path, **keywords: Any) -> tuple[list[list[int]], list[str], dict[str, int]]:
    """Load, and return tokens, notes and moved bytes."""
    llm = load(folder, **keywords)
    found = greedy(llm, PROMPTS, 6), notes(llm), llm.load_report.moved
    llm.close()
    return found


@pytest.mark.parametrize(
    "place", [slow({}), slow({"cpu_offload_gb": 1}), {"offload_group_size": 2}]
)
def test_the_second_load_reads_no_packed_tensor_of_the_checkpoint(
    folder: Path, expected: list[list[int]], reads: Reads, place: dict[str, Any]
) -> None:
    tokens, said, moved = run(folder, **place)
    assert tokens == expected
    assert not said
    assert len(reads.of_source()) == 3 * 7 + 1
    [file] = files(folder)
    assert file.stat().st_size > moved["keep"] > 0
    assert "kept" not in moved
    tokens, said, again = run(folder, **place)
    assert tokens == expected
    assert not said
    assert reads.of_source() == set()
    assert again["kept"] == moved["keep"]
    assert again["keep"] == 0
    assert again["read"] < moved["read"]
    assert files(folder) == [file]


def test_a_copy_is_a_safetensors_file_that_restores_to_the_checkpoint(folder: Path) -> None:
    load(folder).close()
    source, [file] = load_file(folder / "model.safetensors"), files(folder)
    with safe_open(file, "pt") as opened:
        facts = opened.metadata()
    assert facts["version"] == kept.VERSION
    assert facts["source"] == source_identity(folder)
    described = json.loads(facts["tensors"])
    assert len(described) == CODED
    arrays = load_file(file)
    for name, entry in described.items():
        found = Codes(**{view: arrays[f"{name}.{view}"] for view in entry["checks"]})
        whole = torch.cat([source[part] for part, _ in entry["parts"]])
        assert torch.equal(codes.restore(found), whole), name
        assert entry["format"] == "lossless12"
        assert torch.count_nonzero(found.table) >= entry["escapes"] > 0


@pytest.mark.thorough
def test_a_copy_of_another_placement_and_an_unasked_load_are_read_too(
    folder: Path, expected: list[list[int]], reads: Reads
) -> None:
    load(folder).close()
    reads.of_source()
    for keywords in ({"keep_lossless": False}, {"cpu_offload_gb": 1}):
        tokens, said, _ = run(folder, **keywords)
        assert (tokens, said) == (expected, [])
        assert reads.of_source() == set()
    assert len(files(folder)) == 1


def test_nothing_is_kept_unasked(folder: Path) -> None:
    llm = load(folder, keep_lossless=False)
    assert "keep" not in llm.load_report.phases
    llm.close()
    assert not copies(folder).exists()


def damage(folder: Path, offset: int) -> None:
    """Change one bit of a copy's arrays; negative: from the end."""
    [file] = files(folder)
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


def cut(folder: Path) -> None:
    [file] = files(folder)
    os.truncate(file, file.stat().st_size - 1)


def lengthen_header(folder: Path) -> None:
    [file] = files(folder)
    data = bytearray(file.read_bytes())
    data[:8] = struct.pack("<Q", 2**60)
    file.write_bytes(data)


def rewrite(folder: Path, how: Any) -> None:
    """Change the metadata of a copy."""
    [file] = files(folder)
    with safe_open(file, "pt") as opened:
        facts = opened.metadata()
    how(facts)
    save_file(load_file(file), file, metadata=facts)


def other_version(folder: Path) -> None:
    rewrite(folder, lambda facts: facts.update(version="0"))


def odd_metadata(folder: Path) -> None:
    rewrite(folder, lambda facts: facts.update(tensors='{"a": 1}'))


def touched(folder: Path) -> None:
    file = folder / "model.safetensors"
    later_ns = file.stat().st_mtime_ns + 1
    os.utime(file, ns=(later_ns, later_ns))


def retrained(folder: Path) -> None:
    change(folder, lambda tensor: tensor.mul_(2.0), "down_proj.weight")


FAULTS: dict[str, tuple[Any, str]] = {
    "bit": (lambda folder: damage(folder, -5), "is damaged (checksums differ)"),
    "first bit": (lambda folder: damage(folder, first_byte(folder)), "is damaged"),
    "cut": (cut, "is damaged (cut short)"),
    "header": (lengthen_header, "is damaged"),
    "empty": (lambda folder: os.truncate(files(folder)[0], 0), "is damaged"),
    "version": (other_version, "is of version 0, not 1"),
    "metadata": (odd_metadata, "is damaged"),
    "touched": (touched, "is of another state of the checkpoint"),
    "retrained": (retrained, "is of another state of the checkpoint"),
}
QUICK = ("bit", "version")
"""Noticed by what is read, and before."""


def first_byte(folder: Path) -> int:
    [file] = files(folder)
    (length,) = struct.unpack("<Q", file.read_bytes()[:8])
    return int(8 + length)


@pytest.mark.thorough_but("bit-True")
@pytest.mark.parametrize(
    ("fault", "asked"),
    [
        *((fault, True) for fault in QUICK),
        *(slow(fault, True) for fault in FAULTS if fault not in QUICK),
        ("touched", False),
        slow("bit", False),
    ],
)
def test_a_bad_copy_is_noticed_and_made_anew(
    folder: Path, expected: list[list[int]], fault: str, asked: bool, reads: Reads
) -> None:
    load(folder).close()
    spoil, why = FAULTS[fault]
    spoil(folder)
    bad = files(folder)
    if fault == "retrained":
        plain = open_llm(folder, dtype="bfloat16")
        expected = greedy(plain, PROMPTS, 6)
        plain.close()
    reads.of_source()
    tokens, [said], _ = run(folder, keep_lossless=asked)
    assert tokens == expected
    assert why in said
    assert bad[0].name in said
    assert reads.of_source()
    [file] = files(folder)
    assert [file] != bad
    assert run(folder)[:2] == (expected, [])
    assert reads.of_source() == set()


def test_control_an_unnoticed_bit_changes_tokens(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(folder).close()
    [file] = files(folder)
    with safe_open(file, "pt") as opened:
        described = json.loads(opened.metadata()["tensors"])
    arrays = load_file(file)
    for name in described:
        arrays[f"{name}.first"] += 3
    with safe_open(file, "pt") as opened:
        save_file(arrays, file, metadata=opened.metadata())
    monkeypatch.setattr(reader._Piece, "check", None)
    assert run(folder)[0] != expected


def test_only_the_damaged_tensor_is_packed_again(folder: Path, reads: Reads) -> None:
    load(folder).close()
    damage(folder, -5)
    reads.of_source()
    load(folder).close()
    assert reads.of_source() == {"lm_head.weight"}


@pytest.mark.thorough
def test_a_plan_that_has_other_tensors_in_codes_reads_what_it_can(
    folder: Path, expected: list[list[int]], reads: Reads
) -> None:
    names, facts = {"lm_head.weight", "model.layers.1.mlp.down_proj.weight"}, folder.parent / "f"
    write_unpackable(str(facts), str(folder), dict.fromkeys(names, "so it is said"))
    assert run(folder, facts_folder=str(facts))[:2] == (expected, [])
    reads.of_source()
    assert run(folder)[:2] == (expected, [])
    assert reads.of_source() == names
    assert len(files(folder)) == 2
    assert run(folder)[:2] == (expected, [])
    assert reads.of_source() == set()
    assert run(folder, facts_folder=str(facts))[:2] == (expected, [])
    assert reads.of_source() == names
    assert len(files(folder)) == 2


@pytest.mark.thorough
def test_what_is_joined_otherwise_is_read_from_the_checkpoint(
    folder: Path, expected: list[list[int]], reads: Reads
) -> None:
    load(folder).close()

    def swap(facts: dict[str, str]) -> None:
        described = json.loads(facts["tensors"])
        described["model.layers.0.self_attn.qkv_proj.weight"]["parts"].reverse()
        facts["tensors"] = json.dumps(described)

    rewrite(folder, swap)
    reads.of_source()
    assert run(folder)[0] == expected
    assert reads.of_source() == {f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"}


@pytest.mark.thorough
def test_a_copy_that_vanishes_while_it_is_read_does_no_harm(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(folder).close()
    [file] = files(folder)
    before = kept.KeptCopy.arrays

    def vanish(copy: KeptCopy, *args: Any) -> Iterator[Any]:
        yield from before(copy, *args)
        file.unlink(missing_ok=True)

    monkeypatch.setattr(kept.KeptCopy, "arrays", vanish)
    tokens, [said], _ = run(folder)
    assert tokens == expected
    assert "is damaged" in said
    assert len(files(folder)) == 1


@pytest.mark.thorough
def test_while_another_process_writes_a_load_goes_on(
    folder: Path, expected: list[list[int]]
) -> None:
    with alone(own(folder)):
        tokens, [said], moved = run(folder)
        with pytest.raises(BusyError):
            pack(folder)
    assert tokens == expected
    assert "another process is writing it" in said
    assert moved["keep"] == 0
    assert files(folder) == []


@pytest.mark.thorough
def test_two_that_have_packed_write_one_copy(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one opened the copy before the first one wrote it."""
    before = KeptCopy(own(folder), source_identity(folder))
    load(folder).close()
    with monkeypatch.context() as patch:
        patch.setattr("engine.build._open_copy", lambda _: before)
        assert run(folder)[:2] == (expected, [])
    assert len(files(folder)) == 1


def test_what_a_killed_process_left_is_removed(folder: Path) -> None:
    own(folder).mkdir(parents=True)
    left = own(folder) / "0123.partial"
    left.write_bytes(b"half")
    load(folder).close()
    assert not left.exists()


@pytest.mark.thorough
def test_a_full_disk_is_told_in_one_line_and_the_engine_goes_on(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(free=kept.SPARE_BYTES)
    with monkeypatch.context() as patch:
        patch.setattr("engine.weights.kept.shutil.disk_usage", lambda _: free)
        tokens, [said], _ = run(folder)
        with pytest.raises(OSError, match="GiB free at"):
            pack(folder)
    assert tokens == expected
    assert "expected 0.25 GiB free at" in said
    assert "\n" not in said
    assert files(folder) == []

    def full(descriptor: int, data: Any, position: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("engine.weights.kept.os.pwrite", full)
        tokens, [said], _ = run(folder)
    assert tokens == expected
    assert "No space left on device" in said
    assert [file.name for file in own(folder).iterdir()] == ["lock"]


def test_a_folder_that_cannot_be_made_is_told(folder: Path, expected: list[list[int]]) -> None:
    copies(folder).write_text("a file")
    tokens, [said], _ = run(folder)
    assert tokens == expected
    assert "could not be written" in said


def test_weights_without_codes_are_not_kept_and_that_is_said(folder: Path) -> None:
    _, [said], _ = run(folder, dtype="float32", weight_format="auto")
    assert "no weights are in codes" in said
    assert not copies(folder).exists()


@pytest.mark.parametrize(
    ("keywords", "why"),
    [
        ({"weight_format": "checkpoint"}, "got checkpoint: nothing is packed"),
        ({"weight_format": None}, "got checkpoint: nothing is packed"),
        ({"load_format": "dummy"}, "expected false with load_format=dummy"),
        ({"kept_folder": None}, "expected a folder to keep weights in"),
    ],
)
def test_keeping_without_effect_is_refused(keywords: dict[str, Any], why: str) -> None:
    given = {"weight_format": "lossless", "keep_lossless": True, "kept_folder": "somewhere"}
    with pytest.raises(ConfigError, match=why):
        make_config("absent", **{**given, **keywords})


def test_a_checksum_fits_a_buffer() -> None:
    assert CHECKED_BYTES <= PIECE_BYTES


@pytest.mark.thorough
def test_tensors_of_many_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a size that no checksum divides, written and read by pieces."""
    for module in (kept, reader):
        monkeypatch.setattr(module, "CHECKED_BYTES", 1000)
    folder = save(hf_model("qwen2", **SIZES), tmp_path / "checkpoint", "bfloat16")
    plain = open_llm(folder, dtype="bfloat16")
    expected = greedy(plain, PROMPTS, 6)
    plain.close()
    assert run(folder)[0] == expected
    tokens, said, moved = run(folder)
    assert (tokens, said) == (expected, [])
    assert moved["kept"] > 0


def pack(folder: Path, told: Any = None, **keywords: Any) -> PackedCheckpoint:
    if told is not None:
        keywords["progress"] = lambda *numbers: told.append(numbers)
    facts = folder.parent / "facts"
    return pack_checkpoint(folder, copies(folder), facts, device="cpu", **keywords)


@pytest.mark.thorough
@pytest.mark.parametrize("group_bytes", [1, slow(2**30)])
def test_packing_ahead_makes_what_a_load_reads(
    folder: Path,
    expected: list[list[int]],
    reads: Reads,
    group_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.pack.GROUP_BYTES", group_bytes)
    told: list[tuple[int, int]] = []
    found = pack(folder, told)
    assert len(found.escapes) == found.num_made == CODED
    assert told[-1][0] == told[-1][1] == found.plain_bytes
    assert 0.75 < found.num_bytes / found.plain_bytes < 1
    assert {name for x in found.plain.values() for name, _ in x} >= {"model.norm.weight"}
    assert found.plain["looked up by row"] == [("model.embed_tokens.weight", 160 * 64 * 2)]
    assert all(0 < count < of for count, of in found.escapes.values())
    reads.of_source()
    tokens, said, moved = run(folder, keep_lossless=False)
    assert (tokens, said) == (expected, [])
    assert reads.of_source() == set()
    assert "keep" not in moved
    again = pack(folder)
    assert again.num_made == 0
    assert (again.escapes, again.plain) == (found.escapes, found.plain)
    assert reads.of_source() == set()
    damage(folder, -5)
    mended = pack(folder)
    assert mended.num_made == CODED
    assert "checksums differ" in mended.note
    assert mended.escapes == found.escapes


@pytest.mark.thorough
def test_packing_ahead_leaves_what_codes_cannot_hold(folder: Path, reads: Reads) -> None:
    change(folder, lambda tensor: tensor[:, ::3].mul_(2.0**30), "1.mlp.down_proj.weight")
    plain = open_llm(folder, dtype="bfloat16")
    expected = greedy(plain, PROMPTS, 6)
    plain.close()
    found, name = pack(folder), "model.layers.1.mlp.down_proj.weight"
    assert len(found.escapes) == CODED - 1
    [why] = [why for why, tensors in found.plain.items() if tensors[0][0] == name]
    assert "escapes" in why
    [file] = files(folder)
    assert len(load_file(file)) == 5 * (CODED - 1)
    reads.of_source()
    facts = str(folder.parent / "facts")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)
        tokens, said, _ = run(folder, keep_lossless=False, facts_folder=facts)
    assert (tokens, said) == (expected, [])
    assert reads.of_source() == {name}
    assert pack(folder).plain == found.plain


@pytest.mark.parametrize(
    ("dtype", "sizes", "why"),
    [
        ("float16", SIZES, "expected weights in bfloat16, got float16"),
        ("bfloat16", {**SIZES, "hidden_size": 72, "intermediate_size": 72}, "got none in this"),
    ],
)
def test_packing_what_gains_nothing_is_refused(
    tmp_path: Path, dtype: str, sizes: dict[str, int], why: str
) -> None:
    folder = save(hf_model("llama", **sizes), tmp_path / "checkpoint", dtype)
    with pytest.raises(ConfigError, match=why):
        pack(folder)
    assert not copies(folder).exists()
