"""Which tokenizer and end tokens a folder has, and the clash of package names."""

import json
import shutil
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from engine.errors import CheckpointError, EngineError
from engine.text import tokenizer


def test_a_folder_without_tokenizer_files_has_none(tmp_path):
    assert tokenizer.load_tokenizer(tmp_path) is None
    assert tokenizer.load_tokenizer(None) is None


@pytest.mark.parametrize("content", [b"{", b"{}", b"\xff"])
def test_damaged_tokenizer_files_are_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match=r"tokenizer cannot be loaded.*send token ids"):
        tokenizer.load_tokenizer(tmp_path)


def test_end_tokens_come_from_the_generation_config_first(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert tokenizer.eos_token_ids(tmp_path, 9) == {1}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    assert tokenizer.eos_token_ids(tmp_path, 9) == {2, 3}


@pytest.mark.parametrize(("value", "found"), [(-1, set()), (9, set()), ([8, 9, -1, 0], {0, 8})])
def test_end_tokens_outside_the_vocabulary_are_left_out(tmp_path, value, found):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert tokenizer.eos_token_ids(tmp_path, 9) == found


def test_sampling_defaults_are_those_of_the_generation_config(tmp_path):
    assert tokenizer.sampling_defaults(None) == {}
    assert tokenizer.sampling_defaults(tmp_path) == {}
    content = {"do_sample": False, "top_k": 20, "top_p": 0.8, "min_p": None, "max_new_tokens": 7}
    (tmp_path / "generation_config.json").write_text(json.dumps(content | {"temperature": 0.7}))
    expected = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "max_tokens": 7}
    assert tokenizer.sampling_defaults(tmp_path) == expected
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 2}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: top_p"):
        tokenizer.sampling_defaults(tmp_path)


def test_an_installed_package_of_our_folder_name_is_named(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(tokenizer, "version", lambda _: "0.18.3")
    with pytest.raises(EngineError, match=r"kernels 0\.18\.3 is installed.*pip uninstall kernels"):
        tokenizer.load_tokenizer(tmp_path)


def test_another_import_error_is_passed_on(tmp_path, monkeypatch):
    def absent(name):
        raise PackageNotFoundError(name)

    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(tokenizer, "version", absent)
    with pytest.raises(ImportError):
        tokenizer.load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["[]", "null", '{"eos_token_id": "</s>"}', "\xff", "{"])
def test_end_tokens_that_are_none_are_refused(tmp_path, content):
    (tmp_path / "generation_config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: "):
        tokenizer.eos_token_ids(tmp_path, 9)
    for value in (True, 2.0, [1, None], [[1]]):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        with pytest.raises(CheckpointError, match="eos_token_id: expected a token id"):
            tokenizer.eos_token_ids(tmp_path, 9)


@pytest.mark.parametrize("names_its_class", [True, False])
def test_the_tokenizer_is_the_one_that_transformers_finds_by_the_model_s_class(
    glass_model_dir, tmp_path, names_its_class
):
    from transformers import AutoTokenizer

    folder = shutil.copytree(glass_model_dir, tmp_path / "glass")
    file = folder / "tokenizer_config.json"
    if not names_its_class:
        found = json.loads(file.read_text(encoding="utf-8"))
        del found["tokenizer_class"]
        file.write_text(json.dumps(found), encoding="utf-8")
    ours = tokenizer.load_tokenizer(folder)
    theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    assert ours is not None
    assert type(ours) is type(theirs)
    assert ours.init_kwargs == theirs.init_kwargs
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
