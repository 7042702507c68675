"""Composing a command line: every spelling that is legal, every mistake that is refused."""

from pathlib import Path

import pytest

from engine.errors import ConfigError
from harness.config.compose import Composer, Plan


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


def plan(composer: Composer, command: str) -> Plan:
    """Compose a command line without options; words are apart by two spaces."""
    words = [word for word in command.split("  ") if word]
    multirun = "-m" in words
    return composer.plan([word for word in words if word != "-m"], multirun=multirun)


@pytest.mark.parametrize("spelling", ["model=olmo7b", "+model=olmo7b", "++model=olmo7b"])
def test_every_spelling_of_a_model_is_the_same(spelling: str, composer: Composer) -> None:
    found = plan(composer, f"{spelling}  offload=uva")
    assert not found.is_demo
    assert not found.multirun
    (point,) = found.points
    assert point.config.model.name == "olmo7b"
    assert point.config.offload.backend == "uva"
    assert point.overrides == ["+model=olmo7b", "offload=uva"]


@pytest.mark.parametrize("command", ["", "model.load_format=dummy", "+engine.seed=3"])
def test_without_a_model_the_demo_model_is_taken(command: str, composer: Composer) -> None:
    found = plan(composer, command)
    assert found.is_demo
    assert found.points[0].config.model.name == "smollm2_135m"


def test_plus_on_a_known_key_or_group_changes_nothing(composer: Composer) -> None:
    config = plan(composer, "+gpu=cpu  ++offload=uva  +engine.seed=3  ++kv.block_size=32").points[0]
    assert config.config.gpu.device == "cpu"
    assert config.config.offload.backend == "uva"
    assert config.config.engine.seed == 3
    assert config.config.kv.block_size == 32


@pytest.mark.thorough
def test_auto_is_an_offload_among_others(composer: Composer) -> None:
    command = "-m  model=olmo7b  gpu=rtx4080_16gb  offload=none,uva,auto"
    found = plan(composer, command).points
    assert [point.config.offload_name for point in found] == ["none", "uva", "auto"]
    assert [point.config.planner.choose for point in found] == [False, False, True]
    auto = plan(composer, "model=olmo7b  offload=auto  planner.objective=throughput").points[0]
    assert auto.config.planner.objective == "throughput"
    assert auto.config.offload.backend == "none"
    fields = plan(composer, "offload=uva  planner.auto_fields=[cpu_offload_gb]").points[0]
    assert fields.config.planner.auto_fields == ["cpu_offload_gb"]


def test_the_later_of_two_values_holds(composer: Composer) -> None:
    found = plan(composer, "model=olmo7b  +model=glass  offload=uva  offload=none")
    assert found.points[0].overrides == ["+model=glass", "offload=none"]


@pytest.mark.thorough
def test_a_sweep_is_the_product_of_its_values(composer: Composer) -> None:
    found = plan(composer, "-m  model=olmo7b  offload=none,uva  gpu=rtx4080_16gb,rtx4090_24gb")
    assert found.multirun
    chosen = [(p.config.offload.backend, p.config.gpu.name) for p in found.points]
    cards = ("rtx4080_16gb", "rtx4090_24gb")
    assert chosen == [(way, card) for way in ("none", "uva") for card in cards]


@pytest.mark.thorough
def test_a_sweep_may_use_patterns_and_ranges(composer: Composer) -> None:
    found = plan(composer, "-m  model=glob(llama32*)  engine.seed=range(2)")
    assert [(p.config.model.name, p.config.engine.seed) for p in found.points] == [
        ("llama32_1b", 0),
        ("llama32_1b", 1),
        ("llama32_3b", 0),
        ("llama32_3b", 1),
    ]


@pytest.mark.thorough_but("glass")
@pytest.mark.parametrize("model", ["glass", "olmo7b", "glass,olmo7b"])
def test_a_model_may_be_given_beside_an_experiment_that_chooses_it_too(
    model: str, composer: Composer
) -> None:
    found = plan(composer, f"-m  +experiment=smoke  +model={model}  offload=none")
    assert [point.config.model.name for point in found.points] == model.split(",")


@pytest.mark.thorough_but("++experiment")
@pytest.mark.parametrize("spelling", ["+experiment", "experiment", "++experiment"])
def test_choices_win_over_an_experiment(spelling: str, composer: Composer) -> None:
    found = plan(
        composer, f"{spelling}=fit_7b_16gb  offload=uva  gpu=rtx4090_24gb  kv.block_size=32"
    )
    (point,) = found.points
    assert point.config.model.name == "olmo7b"
    assert point.config.offload.backend == "uva"
    assert point.config.gpu.name == "rtx4090_24gb"
    assert point.config.kv.block_size == 32


@pytest.mark.thorough_but("+model")
@pytest.mark.parametrize("spelling", ["model", "+model", "++model"])
def test_a_model_beside_an_experiment_that_has_one(spelling: str, composer: Composer) -> None:
    found = plan(composer, f"+experiment=smoke  {spelling}=qwen25_0_5b  offload=none")
    assert [point.config.model.name for point in found.points] == ["qwen25_0_5b"]


def test_a_sweep_over_experiments_that_sweep_is_refused(composer: Composer) -> None:
    with pytest.raises(ConfigError, match=r"a sweep of its own \(offload\), which would be left"):
        plan(composer, "-m  +experiment=smoke,long_prompts")


def test_an_experiment_that_sweeps_may_run_as_one_point(composer: Composer) -> None:
    found = plan(composer, "+experiment=smoke  hydra.mode=RUN")
    assert not found.multirun
    assert len(found.points) == 1


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with a model, an experiment without a model, and files with mistakes."""
    files = {
        "model/mine.yaml": "name: mine\npath: /data/mine\nload_format: dummy\n",
        "experiment/plain.yaml": "# @package _global_\nengine:\n  seed: 7\n",
        "experiment/both.yaml": (
            "# @package _global_\ndefaults:\n  - /model: mine\nmodel:\n  name: x\n"
        ),
        "gpu/typo.yaml": "name: typo\nmemory_gb: 3\n",
        "gpu/words.yaml": "name: words\nmemory_gib: much\n",
        "gpu/broken.yaml": "name: [\n",
        "experiment/nowhere.yaml": "# @package _global_\ndefaults:\n  - override /gpu: h999\n",
        "experiment/bare.yaml": "engine:\n  seed: 7\n",
        "experiment/extra.yaml": "# @package _global_\nmodell: 3\n",
        "experiment/group.yaml": "# @package _global_\ndefaults:\n  - override /ofload: uva\n",
        "experiment/override.yaml": "# @package _global_\ndefaults:\n  - override /model: mine\n",
        "experiment/swept.yaml": (
            "# @package _global_\nhydra:\n  mode: MULTIRUN\n"
            "  sweeper:\n    params:\n      engine.sed: 1,2\n"
        ),
        "experiment/models.yaml": (
            "# @package _global_\nhydra:\n  mode: MULTIRUN\n"
            "  sweeper:\n    params:\n      model: glass,mine\n"
        ),
        "experiment/plus.yaml": (
            "# @package _global_\nhydra:\n  mode: MULTIRUN\n"
            "  sweeper:\n    params:\n      +model: glass,mine\n"
        ),
    }
    folder = tmp_path_factory.mktemp("a b [c]{d}")
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "gpu/latin.yaml").write_bytes(b"name: caf\xe9\n")
    return folder


@pytest.fixture(scope="module")
def own_composer(mine: Path) -> Composer:
    return Composer(mine)


@pytest.mark.parametrize("path", ["~/mine", "/data/my model \u00fc", "C:/x~1"])
def test_a_path_needs_no_quotes(path: str, composer: Composer) -> None:
    typed = ["model=local", f"model.path={path}"]
    (point,) = composer.plan([*typed, "model.load_format=dummy"]).points
    assert point.config.model.path == path
    with pytest.raises(ConfigError, match=r"^model\.path: expected a folder or a \.gguf file"):
        composer.plan(typed)


@pytest.mark.thorough
def test_a_user_s_folder_adds_files(own_composer: Composer) -> None:
    composer = own_composer
    (point,) = plan(composer, "model=mine").points
    assert point.config.model.path == "/data/mine"
    found = plan(composer, "+experiment=plain")
    assert found.is_demo
    assert found.points[0].config.engine.seed == 7
    found = plan(composer, "+experiment=plain  model=glass")
    assert found.points[0].config.model.name == "glass"
    assert plan(composer, "+experiment=both").points[0].config.model.name == "x"
    assert [point.config.model.name for point in plan(composer, "+experiment=plus").points] == [
        "glass",
        "mine",
    ]
    (point,) = plan(composer, "+experiment=plus  model=glass").points
    assert point.config.model.name == "glass"


@pytest.mark.thorough_but(
    "gpu=words", "gpu=broken", "gpu=latin", "+experiment=group", "+experiment=override"
)
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("gpu=typo", ["gpu.memory_gb", "Did you mean memory_gib?"]),
        ("gpu=words", ["gpu.memory_gib", "a number or null", "'much'"]),
        ("gpu=broken", ["YAML", "broken.yaml"]),
        ("gpu=latin", ["UTF-8", "0xe9"]),
        ("+experiment=bare", ["begins with the line # @package _global_"]),
        ("+experiment=nowhere", ["gpu", "h999", "rtx4080_16gb"]),
        ("+experiment=extra", ["modell", "Did you mean model?"]),
        ("+experiment=group", ["experiment/group", "ofload", "Did you mean offload?"]),
        ("+experiment=override", ["experiment/override", "model", "without override"]),
        ("+experiment=swept", ["engine.sed", "Did you mean seed?"]),
        ("+experiment=models", ["model", "+model in a sweep"]),
        ("+experiment=models  model=glass", ["sweeps model=glass,mine", "Write +model in its"]),
        ("-m  +experiment=plain,both", ["model", "Run them apart"]),
        ("-m  +experiment=plain,both  model=glass", ["model", "Run them apart"]),
    ],
)
def test_mistakes_in_a_user_s_files_are_named(
    command: str, words: list[str], own_composer: Composer
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(own_composer, command)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("+modell=olmo7b", ["modell", "Did you mean model?"]),
        ("modell=olmo7b", ["modell", "Did you mean model?"]),
        ("ofload=uva", ["ofload", "Did you mean offload?"]),
        ("engine.typo=1", ["engine.typo", "max_num_seqs"]),
        ("engine.enforce_eager=3", ["engine.enforce_eager", "true or false", "got 3"]),
        ("-m  fail_fast=true,0", ["fail_fast", "true or false", "got 0"]),
        ("+engine.typo=1", ["engine.typo", "max_num_seqs"]),
        ("++engine.max_num_seq=1", ["engine.max_num_seq", "Did you mean max_num_seqs?"]),
        ("+offload.uva.cpu_offload_gib=1", ["Did you mean cpu_offload_gb?"]),
        ("cpu_offload_gb=1", ["cpu_offload_gb", "Did you mean offload.uva.cpu_offload_gb?"]),
        ("max_num_seqs=1", ["max_num_seqs", "Did you mean engine.max_num_seqs?"]),
        ("offload.cpu_offload_gb=1", ["Did you mean offload.uva.cpu_offload_gb?"]),
        ("seeds.prompts=1", ["Did you mean scenario.serve.seeds.prompts?"]),
        ("engin.seed=1", ["engin.seed", "Did you mean engine.seed?"]),
        ("MODEL=olmo7b", ["MODEL", "Did you mean model?"]),
        ("+hydra.typo=1", ["hydra.typo", "Hydra has no such key"]),
        ("hydra.swep.dir=x", ["Did you mean hydra.sweep.dir?"]),
        ("hydra/launcher=jobli", ["hydra/launcher", "basic, joblib", "Did you mean joblib?"]),
        ("hydra.mode=TWICE", ["hydra.mode", "RUN, MULTIRUN"]),
        ("offload=uvaa", ["offload", "none, prefetch, uva", "Did you mean uva?"]),
        ("offload=null", ["offload", "none, prefetch, uva"]),
        ("offload={offload_backend: uva}", ["offload", "none, prefetch, uva"]),
        ("model=nosuch", ["model", "olmo7b", "'nosuch'"]),
        ("+model=/a/folder", ["A folder is +model=local model.path=/a/folder."]),
        ("model=allenai/OLMo-2-1124-7B-Instruct", ["That is +model=olmo7b."]),
        ("+model=qwen/qwen3-4b", ["That is +model=qwen3_4b."]),
        ("+model=an/other", ["hf download an/other --local-dir FOLDER", "model.path=FOLDER"]),
        ("-m  offload=none,uvaa", ["offload", "'uvaa'", "Did you mean uva?"]),
        ("-m  model=glob(x*)", ["no option of model", "olmo7b"]),
        ("engine.seed=abc", ["engine.seed", "an integer", "'abc'"]),
        ("engine.seed=1.5", ["engine.seed", "an integer", "1.5"]),
        ("engine.seed=true", ["engine.seed", "an integer"]),
        ("engine.enforce_eager=maybe", ["enforce_eager: expected true or false, got 'maybe'."]),
        ("engine.max_num_seqs=4k", ["engine.max_num_seqs: expected an integer, got '4k'."]),
        ("gpu.memory_gib=16GB", ["gpu.memory_gib: expected a number or null, got '16GB'."]),
        ("tracking.experiment=null", ["tracking.experiment: expected text, got null."]),
        ("planner.auto_fields=x", ["auto_fields: expected a list of texts, ", ", got str."]),
        ("engine=3", ["engine", "a mapping with the keys", "max_num_seqs"]),
        ("gpu.memory_gib=lots", ["gpu.memory_gib", "a number or null", "'lots'"]),
        ("offload.uva.cpu_offload_params=mlp", ["cpu_offload_params", "a list of texts"]),
        ("model.spec.hidden_size=???", ["model.spec.hidden_size", "expected a value"]),
        ("engine.seed=${kv.nosuch}", ["engine.seed", "kv.nosuch"]),
        ("offload.uva.cpu_offload_gb=-1", ["offload.uva.cpu_offload_gb", ">= 0", "-1"]),
        (
            "offload=prefetch  offload.prefetch.offload_num_in_group=9",
            ["offload_group_size=8", "9"],
        ),
        ("offload=prefetch  offload.prefetch.offload_prefetch_step=0", ["at least 1", "got 0"]),
        ("offload.offload_backend=foo", ["auto, uva, prefetch", "'foo'"]),
        ("olmo7b", ["expected key=value or group=option. Did you mean model=olmo7b?"]),
        ("offload=uva  offload.uva.cpu_offload_params=[w2]", ["cpu_offload_params", "w2"]),
        ("offload=uva  offload.uva.cpu_offload_gb=0", ["cpu_offload_gb", "nothing would move"]),
        ("mode=guess", ["mode", "run, plan", "'guess'"]),
        ("offload=uva  planner.choose=true", ["planner.choose", "not overridden"]),
        (
            "offload=auto  offload.uva.cpu_offload_gb=4",
            ["got offload.uva.cpu_offload_gb=4.0", "not overridden"],
        ),
        ("planner.objective=throughput", ["planner.objective", "offload=auto"]),
        ("offload=auto  planner.objective=speed", ["planner.objective", "latency, throughput"]),
        ("planner.auto_fields=[gpus]", ["planner.auto_fields", "cpu_offload_gb", "'gpus'"]),
        ("scenario=latency  scenario.load.warm_starts=2", ["scenario.load", "null"]),
        ("scenario=latency  scenario.load={warm_starts: 2}", ["scenario.load", "null"]),
        ("scenario.latency.prompt_tokens=9000", ["scenario.latency", "8192", "9016"]),
        ("-m  offload.uva.cpu_offload_gb=1,-3", ["-3", "point 1 of the sweep"]),
        ("-m  engine.seed=range(3,3)", ["sweep", "at least one point"]),
        ("-m  engine.seed=interval(0,1)", ["range(start,stop,step)"]),
        ("offload=none,uva", ["several values", "-m"]),
        (
            "offload.uva.cpu_offload_gb=3,11",
            ["several values", "A decimal number has a point: 3.11."],
        ),
        (
            "engine.max_model_len=4,096",
            ["Write thousands without a comma: 4096.", "A decimal number has a point: 4.096."],
        ),
        ("plan.reported_kv_gib=\u22123.44", ["Write the minus of the keyboard: -3.44."]),
        ("'available KV cache memory: -3.44 GiB'", ["Did you mean plan.reported_kv_gib=-3.44?"]),
        ("gpu.memory_gib=16384", ["expected a number > 0 and <= 4000", "divide MiB by 1024"]),
        ("engine.gpu_memory_utilization='0,9'", ["A decimal number has a point: 0.9."]),
        ("offload=none,,uva", ["Remove the comma that has no value beside it."]),
        ("offload=none,uva,", ["Remove the comma that has no value beside it."]),
        ("allenai/OLMo-2-1124-7B-Instruct", ["Did you mean model=allenai/OLMo-2-1124-7B-Ins"]),
        ("~offload", ["cannot be removed", "offload=none"]),
        ("~engine.seed", ["cannot be removed"]),
        ("gpu@model=cpu", ["@model"]),
        ("offload", ["offload", "key=value"]),
        ("=3", ["key=value"]),
        ("engine.seed=[", ["engine.seed=[", "Quote"]),
        ("+hydra.sweeper.params.x=1", ["-m key=a,b"]),
    ],
)
def test_mistakes_are_refused_with_a_remedy(
    command: str, words: list[str], composer: Composer
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(composer, command)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_warnings_are_returned_once_and_not_raised(composer: Composer) -> None:
    swept = "-m  offload=uva,prefetch  offload.prefetch.offload_group_size=8"
    uva, prefetch = plan(composer, swept).points
    (message,) = uva.warnings
    assert "offload.prefetch" in message
    assert prefetch.warnings == []
    assert plan(composer, "offload=uva").points[0].warnings == []


def test_free_mappings_take_new_keys(composer: Composer) -> None:
    value = "{rope_type: linear, factor: 2}"
    (point,) = plan(composer, f"model=glass  model.spec.rope_scaling={value}").points
    assert point.config.model.spec is not None
    assert point.config.model.spec.rope_scaling == {"rope_type": "linear", "factor": 2}


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("latency", "Lower scenario.latency.prompt_tokens or scenario.latency.output_tokens."),
        ("serve  scenario.serve.prompt.tokens=300", "Lower the lengths of its prompts or outputs."),
    ],
)
def test_lengths_beyond_the_context_name_what_to_lower(
    part: str, words: str, composer: Composer
) -> None:
    with pytest.raises(ConfigError, match=r"at most 128 in all \(the model's context\)") as caught:
        plan(composer, f"model=glass  scenario={part}")
    assert str(caught.value).endswith(words)
