"""Text settings stay what was written, in any place; mappings, references and null keep theirs."""

from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from catalogue.files import load_yaml, quote_texts
from engine.errors import ConfigError
from engine.sealed import settings, without_null
from harness.config.compose import Composer, Plan
from harness.config.schema import RunConfig
from harness.config.source import is_text, keep_texts, split
from harness.studies.search_request import parse_request

TEXTS = ("2024_11_29", "1.10", "81e5034", "007", "true", "1e5", "inf", "0x10")


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


def plan(composer: Composer, *typed: str) -> Plan:
    return composer.plan(["model=glass", *typed], multirun=True)


@pytest.mark.thorough_but("2024_11_29", "1e5")
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_on_the_command_line_is_the_one_typed(composer: Composer, text: str) -> None:
    (point,) = plan(composer, f"tracking.experiment={text}", f"gpu.name={text}").points
    assert (point.config.tracking.experiment, point.config.gpu.name) == (text, text)


def test_every_text_setting_is_known_as_one() -> None:
    texts = [found.path for found in settings(RunConfig) if without_null(found.hint) is str]
    assert len(texts) > 30
    assert all(map(is_text, texts))
    assert is_text("offload.uva.cpu_offload_params")
    assert not is_text("engine.seed")


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("tracking.experiment=1.10,1.20", ["1.10", "1.20"]),
        ("tracking.experiment=choice(1.10,b)", ["1.10", "b"]),
        ("tracking.experiment='1.10','x,y'", ["1.10", "x,y"]),
    ],
)
def test_values_of_a_sweep_are_texts(composer: Composer, typed: str, found: list[str]) -> None:
    points = plan(composer, typed).points
    assert [point.config.tracking.experiment for point in points] == found


def test_a_text_in_a_mapping_is_the_one_typed(composer: Composer) -> None:
    hub = "model.source={kind:hub,repo:a/b,revision:1.10,package:null,version:null,sha256:null}"
    (point,) = plan(composer, hub).points
    assert point.config.model.source.revision == "1.10"


def test_a_text_in_files_of_the_user_is_the_one_written(tmp_path: Path) -> None:
    for group in ("model", "experiment"):
        (tmp_path / group).mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(
        "name: 7\nsource: {kind: hub, repo: a/b, revision: 81e5034}\nspec:\n"
        "  {model_type: llama, vocab_size: 32, hidden_size: 32, intermediate_size: 32,"
        " num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2, head_dim: 16,"
        " max_position_embeddings: 8192, rms_norm_eps: 1e-5}\n"
    )
    (tmp_path / "experiment" / "e.yaml").write_text(
        "# @package _global_\ntracking: {experiment: 2024_11_29, uri: null}\n"
        "hydra: {sweeper: {params: {gpu.name: 1.10}}}\n"
    )
    (point,) = plan(Composer(tmp_path), "model=mine", "+experiment=e").points
    assert point.config.model.name == "7"
    assert point.config.model.source.revision == "81e5034"
    assert point.config.model.spec is not None
    assert point.config.model.spec.rms_norm_eps == 1e-5
    assert point.config.tracking.experiment == "2024_11_29"
    assert point.config.tracking.uri is None
    assert point.config.gpu.name == "1.10"


def test_a_search_file_keeps_texts_and_null(tmp_path: Path) -> None:
    file = tmp_path / "search.yaml"
    file.write_text(
        "base: [model=glass, gpu.name=1.10]\nname: 2024_11\nmaximize: throughput/output_tok_s\n"
        "space:\n  kv.num_cpu_blocks: [null, 64]\n  tracking.experiment: [1.10, b]\n"
        "  engine.enforce_eager: [true, false]\n"
    )
    request = parse_request(["--file", str(file)])
    assert request is not None
    assert request.name == "2024_11"
    found = {parameter.key: parameter.choices for parameter in request.space.parameters}
    assert found["kv.num_cpu_blocks"] == ("null", "64")
    assert found["engine.enforce_eager"] == ("True", "False")
    assert [text.strip("'") for text in found["tracking.experiment"]] == ["1.10", "b"]


def test_two_mappings_of_one_node_both_count(composer: Composer) -> None:
    lines = ["engine={max_num_seqs:4,seed:1}", "engine={seed: 3}"]
    (point,) = plan(composer, *lines).points
    assert (point.config.engine.max_num_seqs, point.config.engine.seed) == (4, 3)
    twice = ["offload.uva={cpu_offload_gb:0.001}", "offload.uva={cpu_offload_params:[mlp]}"]
    (point,) = plan(composer, *twice).points
    assert point.config.offload.uva.cpu_offload_gb == 0.001
    assert point.config.offload.uva.cpu_offload_params == ["mlp"]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("engine..max_num_seqs=4", "Did you mean engine.max_num_seqs?"),
        ("engine.=4", "engine.: there is no such key. Keys of engine: dtype"),
        (".engine.seed=4", "Did you mean engine.seed?"),
        ("=4", "expected key=value"),
        ("hydra.searchpath=[x]", "Give --config-dir FOLDER"),
    ],
)
def test_keys_of_another_form_are_refused_with_a_suggestion(
    composer: Composer, typed: str, words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        plan(composer, typed)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("gpu.name=a", "gpu.name=a"),
        ("gpu.name=1", "gpu.name='1'"),
        ("++gpu.name=null", "++gpu.name=null"),
        ("gpu.name=${model.name}", "gpu.name=${model.name}"),
        ("gpu.name='1.10'", "gpu.name='1.10'"),
        ("engine.seed=1.10", "engine.seed=1.10"),
        ("model.path=~/a b", "model.path='~/a b'"),
        ("model.routing=synthetic\\:0.5", "model.routing=synthetic:0.5"),
        ("model.routing='a\\:b'", "model.routing='a\\:b'"),
        ("a={gpu:{name:1}}", "a={gpu:{name:1}}"),
        ("model.source={version:1.10, kind:hub}", "model.source={version:'1.10', kind:hub}"),
        ("offload.prefetch.offload_params=[1.10,a]", "offload.prefetch.offload_params=['1.10',a]"),
    ],
)
def test_only_values_that_would_be_converted_are_quoted(typed: str, kept: str) -> None:
    parser: Any = OverridesParser.create()
    assert keep_texts(typed, parser) == kept


def test_a_document_keeps_all_but_its_texts() -> None:
    text = "a: 1.10\nb: [1, 2.50, null]\nc: {d: 007, e: 1e-6, f: ~}\ng: &x {d: 1}\nh: *x\n"
    found = load_yaml(quote_texts(text, {"a", "c.d", "h.d"}.__contains__))
    assert found["a"] == "1.10"
    assert found["b"] == [1, 2.5, None]
    assert found["c"] == {"d": "007", "e": 1e-6, "f": None}
    assert load_yaml("") is None
    assert quote_texts("# nothing\n", is_text) == "# nothing\n"


def test_splitting_heeds_brackets_and_quotes() -> None:
    assert split("a,'b,c',[d,e],{f:1,g:2},x(1,2)") == ["a", "'b,c'", "[d,e]", "{f:1,g:2}", "x(1,2)"]
