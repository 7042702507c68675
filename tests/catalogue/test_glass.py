"""Conversion of the glass layout, checked with transformers against a NumPy forward."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from catalogue.conversions import convert_glass
from tests.catalogue.wheels import SIZES, glass_arrays, glass_logits, write_glass_wheel

REFERENCE = Path(__file__).with_name("glass_reference.json")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glass")
    wheel = write_glass_wheel(folder, glass_arrays())
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    assert convert_glass(wheel, checkpoint)["license"] == "MIT"
    return checkpoint


def test_logits_equal_the_numpy_forward(converted: Path) -> None:
    from transformers import AutoModelForCausalLM

    ids = [5, 3, 9, 9, 0, 15, 2, 7, 1, 12]
    model = AutoModelForCausalLM.from_pretrained(converted)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double().numpy()
    assert model.dtype == torch.float32
    np.testing.assert_allclose(logits, glass_logits(glass_arrays(), ids), atol=2e-5)


def test_config_has_no_end_token(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    assert config["eos_token_id"] is None
    assert config["max_position_embeddings"] == SIZES["max_len"]
    assert json.loads((converted / "generation_config.json").read_text())["eos_token_id"] is None


@pytest.mark.parametrize(
    ("text", "words", "back"),
    [
        ("abc", ["abc"], "abc"),
        (" d", ["_d"], " d"),
        ("  d\n", ["_", "_d", "\n"], "  d\n"),
        ("ab?", ["ab", "<unk>"], "ab\N{DOUBLE QUESTION MARK}"),
        ("cc  ", ["cc", "_", "_"], "cc  "),
        ("<eos>", ["<unk>"] * 5, "\N{DOUBLE QUESTION MARK}" * 5),
        ("", [], ""),
    ],
)
def test_tokenizer_splits_and_joins(
    converted: Path, text: str, words: list[str], back: str
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted)
    ids = tokenizer(text)["input_ids"]
    found = [
        word.replace("\N{LOWER ONE EIGHTH BLOCK}", "_")
        for word in tokenizer.convert_ids_to_tokens(ids)
    ]
    assert found == words
    assert tokenizer.decode(ids) == back


def test_unknown_parameter_is_refused(tmp_path: Path) -> None:
    arrays = glass_arrays()
    arrays["blocks.0.attn.W_X"] = arrays.pop("blocks.0.attn.W_O")
    with pytest.raises(ValueError, match=r"known parameter name, got 'blocks\.0\.attn\.W_X'"):
        convert_glass(write_glass_wheel(tmp_path, arrays), tmp_path)


def test_real_model_gives_the_package_own_tokens(glass_model_dir: Path) -> None:
    """The reference was written by the package's own NumPy forward, not by this project."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference = json.loads(REFERENCE.read_text())
    tokenizer = AutoTokenizer.from_pretrained(glass_model_dir)
    model = AutoModelForCausalLM.from_pretrained(glass_model_dir)
    prompt = tokenizer(reference["prompt"])["input_ids"]
    assert prompt == reference["prompt_ids"]
    with torch.no_grad():
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0]
        logits = model(tokens[None]).logits[0, -1, :8].tolist()
    assert tokens[len(prompt) :].tolist() == reference["greedy_ids"]
    assert logits == pytest.approx(reference["last_logits"], abs=2e-5)


@pytest.mark.weights
def test_real_model_equals_the_installed_package(glass_model_dir: Path) -> None:
    glassllm = pytest.importorskip("glassllm", reason="needs glassllm==0.1.0")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs, words = glassllm.load_pretrained("en")
    model = AutoModelForCausalLM.from_pretrained(glass_model_dir)
    tokenizer = AutoTokenizer.from_pretrained(glass_model_dir)
    for text in (
        "Alice was beginning to",
        "The Queen said,\n\n'Off  with",
        "x",
        "\u00e9 \u2014 7 ?!",
    ):
        ids = words.encode(text)
        assert tokenizer(text)["input_ids"] == ids
        greedy = [step.token for step in theirs.generate(ids, 40, greedy=True)]
        with torch.no_grad():
            ours = model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)[0]
            logits = model(ours[None]).logits[0].numpy()
        assert ours[len(ids) :].tolist() == greedy
        np.testing.assert_allclose(logits, theirs.forward(ours.numpy()).data[0], atol=2e-5)
