"""GGUF files as models: weights that the gguf package reads, tokens of transformers, refusals."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from catalogue.checkpoint import ModelUnavailableError, identify
from catalogue.entry import Model
from catalogue.models import describe, fetch, located, state
from engine.errors import CheckpointError
from engine.model.checkpoint import read_folder
from engine.model.gguf import read_gguf
from engine.text.tokenizer import eos_token_ids, load_tokenizer, sampling_defaults
from tests.engine.gguf_files import GEMMA_SIZES, WIDE, Kind, write_gguf
from tests.engine.quantised import read_back
from tests.engine.test_quantised import LIMITS, PLACES, PROMPTS
from tests.slow import mostly_slow, slow
from tests.tiny import greedy, greedy_of_transformers, open_llm

TYPES = [
    *(Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K),
    *(Kind.F16, Kind.BF16, Kind.F32),
]
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def mix(name: str) -> Kind:
    """Return the types of a mix such as Q4_K_M: other ones for v, down and the table."""
    if "embed_tokens" in name:
        return Kind.Q6_K
    if "lm_head" in name:
        return Kind.Q8_0
    if "v_proj" in name or "0.mlp.down" in name:
        return Kind.Q6_K
    return Kind.BF16 if "1.self_attn.k_proj" in name else Kind.Q4_K


def check(llm: Any, plain: Path, meant: dict[str, torch.Tensor]) -> None:
    """Weights have the package's values in every bit, and tokens are those of transformers."""
    found = read_back(llm)
    assert found.keys() >= meant.keys()
    for name, weight in meant.items():
        assert torch.equal(found[name], weight.to(found[name].dtype)), name
    assert greedy(llm, PROMPTS, 12) == greedy_of_transformers(plain, PROMPTS, 12)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", mostly_slow(TYPES, lambda kind: kind in {Kind.Q5_1, Kind.Q6_K}))
def test_every_type_has_the_values_of_the_package(kind, tmp_path):
    file, plain, meant = write_gguf(tmp_path, "llama", lambda _: kind, **WIDE)
    assert bool(meant) == (kind not in {Kind.F16, Kind.BF16, Kind.F32})
    llm = open_llm(file, **LIMITS)
    plain_dtypes = {Kind.F16: "float16", Kind.F32: "float32"}
    assert llm.spec.dtype == plain_dtypes.get(kind, "bfloat16")
    check(llm, plain, meant)
    llm.close()


@pytest.mark.thorough_but("qwen3")
@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        slow("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("gemma3", GEMMA_SIZES),
        ("llama_llama3_rope", {"rope_parameters": SCALED}),
        slow("llama_linear_rope", {}),
        slow("llama_biases", {}),
    ],
    ids=str,
)
def test_every_family_has_the_tokens_of_transformers(variant, changes, tmp_path):
    file, plain, meant = write_gguf(tmp_path, variant, lambda _: Kind.Q8_0, **changes)
    llm = open_llm(file, **LIMITS, offload_group_size=2)
    assert llm.spec.rope_scaling.get("factor") == changes.get("rope_parameters", {}).get(
        "factor", 2.5 if "linear" in variant else 4.0 if variant == "gemma3" else None
    )
    check(llm, plain, meant)
    llm.close()


@pytest.mark.thorough
@pytest.mark.parametrize("place", mostly_slow(PLACES, lambda place: place == "prefetch"))
def test_a_mix_of_types_in_every_residence(place, tmp_path_factory):
    file, plain, meant = mixed(tmp_path_factory)
    llm = open_llm(file, **LIMITS, **PLACES[place])
    check(llm, plain, meant)
    llm.close()


MIXED: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def forget():
    yield
    MIXED.clear()


def mixed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if not MIXED:
        MIXED["made"] = write_gguf(tmp_path_factory.mktemp("mix"), "llama", mix, **WIDE)
    return MIXED["made"]


@pytest.mark.thorough
def test_random_weights_have_the_size_of_real_ones(tmp_path_factory):
    file, _, _ = mixed(tmp_path_factory)
    real, dummy = (open_llm(file, load_format=x, **LIMITS) for x in ("auto", "dummy"))
    assert real.plan.placed_bytes() == dummy.plan.placed_bytes()
    for parameter, weight in read_back(dummy).items():
        assert 0.012 < weight.float().std() < 0.03, parameter


@pytest.mark.thorough
def test_a_model_may_be_split_into_files(tmp_path):
    file, plain, meant = write_gguf(tmp_path, "qwen3", lambda _: Kind.Q4_0, shards=3)
    assert file.name == "model-00001-of-00003.gguf"
    for given in (file, tmp_path / "model-00003-of-00003.gguf"):
        llm = open_llm(given, **LIMITS)
        check(llm, plain, meant)
        llm.close()
    (tmp_path / "model-00002-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.gguf: expected a GGUF file"):
        read_folder(file)


def test_headers_are_read_as_the_package_reads_them(tmp_path):
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_eos_token_id(3)
        writer.add_array("x.words", ["a", "\u00e9", ""])
        writer.add_array("x.numbers", [1, 2, 3])
        writer.add_float32("x.half", 0.5)
        writer.add_custom_alignment(64)

    file, _, _ = write_gguf(tmp_path, "llama", lambda _: Kind.Q5_0, change=change)
    found, theirs = read_gguf(file), gguf.GGUFReader(file)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert found.metadata[key] == field.contents(), key
    assert len(found.tensors) == len(theirs.tensors)
    for tensor in theirs.tensors:
        ours = found.tensors[tensor.name]
        assert (ours.type, ours.start) == (tensor.tensor_type.name, tensor.data_offset)
        assert (ours.shape, ours.num_bytes) == (tuple(map(int, tensor.shape[::-1])), tensor.n_bytes)
    assert eos_token_ids(file, 160) == {3}
    assert sampling_defaults(file) == {}


def test_damaged_files_are_refused_by_name(tmp_path):
    file, _, _ = write_gguf(tmp_path, "llama", lambda _: Kind.Q8_0)
    data = file.read_bytes()
    other = tmp_path / "other.gguf"
    for content, message in (
        (data[:-200], "ends at byte .* cut short"),
        (data[:300], "not a GGUF file"),
        (b"GGUX" + data[4:], "does not begin with GGUF"),
        (data[:4] + struct.pack("<I", 1) + data[8:], "version"),
        (data[:8] + struct.pack("<Q", 1 << 60) + data[16:], "more entries than bytes"),
    ):
        other.write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            read_folder(other)


def test_entries_of_a_header_that_contradict_each_other_are_refused(tmp_path):
    def of(values: bytes, infos: bytes = b"", *, counts: tuple[int, int] = (0, 1)) -> Path:
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf"
        head = b"GGUF" + struct.pack("<IQQ", 3, *counts) + values + infos
        file.write_bytes(head.ljust(1024, b"\0"))
        return file

    def text(word: bytes) -> bytes:
        return struct.pack("<Q", len(word)) + word

    def info(name: bytes, offset: int) -> bytes:
        return text(name) + struct.pack("<IQIQ", 1, 8, 0, offset)

    nested = struct.pack("<IQ", 9, 1) * 20_000
    alignment = text(b"general.alignment") + struct.pack("<IIQ", 9, 4, 0)
    for file, message in (
        (of(text(b"a") + struct.pack("<I", 9) + nested), "not a GGUF file"),
        (of(alignment), "not a GGUF file"),
        (of(b"", info(b"a", 0) + info(b"a", 32), counts=(2, 0)), "expected a once"),
        (of(b"", info(b"a", 0) + info(b"b", 16), counts=(2, 0)), "a and b share bytes"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_gguf(file)
    parts = [tmp_path / f"x-0000{n}-of-00002.gguf" for n in (1, 2)]
    for part in parts:
        of(b"", info(b"a", 0), counts=(1, 0)).rename(part)
    with pytest.raises(CheckpointError, match=r"00002\.gguf: expected a once"):
        read_gguf(parts[0])


def test_what_is_not_supported_is_refused_by_name(tmp_path):
    def of(arch: str, kind: Kind = Kind.F32, name: str = "token_embd.weight") -> Path:
        file = tmp_path / f"{arch}_{kind.name}_{name}.gguf"
        writer = gguf.GGUFWriter(file, arch)
        shape = (4, 256)
        if kind is Kind.F32:
            writer.add_tensor(name, np.zeros(shape, np.float32))
        else:
            block, size = gguf.GGML_QUANT_SIZES[kind]
            raw = np.zeros((4, 256 // block * size), np.uint8)
            writer.add_tensor(name, raw, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file

    for file, message in (
        (of("phi3"), "general.architecture among llama, .* got 'phi3'"),
        (of("llama", Kind.IQ4_XS), "token_embd.weight is stored in IQ4_XS, expected one of F32"),
        (of("llama", Kind.Q2_K), "stored in Q2_K"),
        (of("llama", Kind.MXFP4), "stored in MXFP4"),
        (of("llama", name="blk.0.ffn_gate_exps.weight"), "ffn_gate_exps.weight is no tensor"),
        (of("llama"), "expected the key llama.attention.head_count"),
        (tmp_path / "none.gguf", "expected a GGUF file, found none"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_folder(file)


def test_rotary_factors_that_are_unknown_are_refused(tmp_path):
    rope = SCALED | {"factor": 5.0}
    file, _, _ = write_gguf(
        tmp_path, "llama_llama3_rope", lambda _: Kind.Q8_0, rope_parameters=rope
    )
    with pytest.raises(CheckpointError, match="factors of no scaling that is known"):
        read_folder(file)


def test_rotary_scaling_of_another_kind_is_refused_by_name(tmp_path):
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)

    file, _, _ = write_gguf(tmp_path, "llama", lambda _: Kind.Q8_0, change=change)
    with pytest.raises(CheckpointError, match=r"none, linear and yarn, got 'longrope'"):
        read_folder(file)


CHARACTERS = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a"]


def with_words(**changes: Any) -> Any:
    """Return what writes a byte-level BPE of ASCII with some merges."""
    merges = ["1 2", "12 3", "\u0120 a", "a b", "\u010a \u010a"]
    words = ["<s>", "</s>", "<user>", *CHARACTERS, *(merge.replace(" ", "") for merge in merges)]

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(changes.get("pre", "default"))
        writer.add_token_list(words)
        writer.add_token_types([3, 3, 4] + [1] * (len(words) - 3))
        writer.add_token_merges(merges)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_add_bos_token(changes.get("bos", False))
        writer.add_chat_template("{{ messages[0].content }}!")

    return change


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("default", "12345 ab", ["123", "4", "5", "\u0120a", "b"]),
        ("qwen2", "123 ab", ["1", "2", "3", "\u0120a", "b"]),
        ("llama-bpe", "1234 ab", ["123", "4", "\u0120a", "b"]),
        ("smollm", "123", ["1", "2", "3"]),
        ("qwen2", "a\n\n<user>b<s>", ["a", "\u010a\u010a", "<user>", "b", "<s>"]),
    ],
)
def test_text_is_split_as_the_file_says(pre, text, expected, tmp_path):
    file, _, _ = write_gguf(
        tmp_path, "llama", lambda _: Kind.Q8_0, change=with_words(pre=pre), num_hidden_layers=1
    )
    tokenizer = load_tokenizer(file)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == expected
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == 1
    asked = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(asked, tokenize=False) == "a!"


def test_the_first_token_is_added_where_the_file_says_so(tmp_path):
    for bos in (True, False):
        folder = tmp_path / str(bos)
        folder.mkdir()
        change = with_words(bos=bos)
        file, _, _ = write_gguf(
            folder, "llama", lambda _: Kind.Q8_0, change=change, num_hidden_layers=1
        )
        assert load_tokenizer(file)("ab").tokens() == ["<s>"] * bos + ["ab"]


def test_a_tokenizer_that_is_unknown_is_refused(tmp_path):
    change = with_words(pre="tekken")
    file, _, _ = write_gguf(
        tmp_path, "llama", lambda _: Kind.Q8_0, change=change, num_hidden_layers=1
    )
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre among .*, got tekken"):
        open_llm(file, **LIMITS)


def test_a_vocabulary_of_sentencepiece(tmp_path):
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["\u2581", "a", "b", "ab", "\u2581ab", "\u2581a"]

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([*pieces, *words])
        writer.add_token_scores([0.0] * len(pieces) + [-9.0, -9.0, -9.0, -1.0, -2.0, -3.0])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(words))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    file, _, _ = write_gguf(
        tmp_path,
        "llama",
        lambda _: Kind.Q8_0,
        change=change,
        num_hidden_layers=1,
        vocab_size=len(pieces) + len(words),
    )
    tokenizer = load_tokenizer(file)
    ids = tokenizer("ab ab")["input_ids"]
    assert ids[0] == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab ab"
    assert tokenizer.convert_ids_to_tokens(ids[1:]) == ["\u2581ab", "\u2581ab"]


def test_the_catalogue_takes_a_file(tmp_path):
    file, _, _ = write_gguf(
        tmp_path, "llama", lambda _: Kind.Q8_0, change=with_words(), num_hidden_layers=1
    )
    model = Model(name="x", path=str(file))
    assert state(model).kind == "present"
    assert state(model).num_bytes == file.stat().st_size
    assert fetch(model) == file
    assert located(str(file))["path"] == str(file)
    assert describe(model).spec.quantization["method"] == "gguf"
    assert identify(file, "auto")["source"] == "folder"
    with pytest.raises(ModelUnavailableError, match=r"a \.gguf file, found none"):
        fetch(Model(name="x", path=str(tmp_path / "none.gguf")))
