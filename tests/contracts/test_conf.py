"""The files of conf/: each composes, and the sizes and rates that they state are the real ones."""

import functools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from catalogue.cards import size_gb
from catalogue.entry import ModelSource
from catalogue.files import CONF
from catalogue.models import find
from engine.asked.config import GPUConfig
from engine.errors import ConfigError
from engine.model.spec import ModelSpec
from harness.config.cli_args import parse_command_line
from harness.config.compose import Composer, Point
from tests.slow import mostly_slow

PARAMETERS = {
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 3_880_263_168,
    "glass": 852_608,
    "gpt_oss_20b": 20_914_757_184,
    "llama2_7b": 6_738_415_616,
    "llama2_7b_awq": 6_738_415_616,
    "llama31_8b": 8_030_261_248,
    "llama31_8b_awq": 8_030_261_248,
    "llama31_8b_fp8": 8_030_261_248,
    "llama32_1b": 1_235_814_400,
    "llama32_3b": 3_212_749_824,
    "mistral_7b": 7_248_023_552,
    "mixtral_8x7b": 46_702_792_704,
    "olmo2_13b": 13_716_198_400,
    "olmo7b": 7_298_617_344,
    "olmoe_1b_7b": 6_919_161_856,
    "qwen25_0_5b": 494_032_768,
    "qwen25_7b_gptq": 7_615_616_512,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_coder_30b_a3b_awq": 30_532_122_624,
    "qwen3_14b": 14_768_307_200,
    "qwen3_14b_awq": 14_768_307_200,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b_awq": 8_190_735_360,
    "smollm2_135m": 134_515_008,
    "smollm2_135m_q4": 134_515_008,
}
"""As published with the checkpoints."""
MEMORY_MIB = {
    "a100_40gb": 40960,
    "a100_80gb": 81920,
    "a10_24gb": 23028,
    "a4500_20gb": 20470,
    "a6000_48gb": 49140,
    "b200_180gb": 183359,
    "h100_80gb": 81559,
    "h200_141gb": 143771,
    "l40s_48gb": 46068,
    "l4_24gb": 23034,
    "rtx2060_6gb": 6144,
    "rtx2070_8gb": 8192,
    "rtx2080_8gb": 8192,
    "rtx2080ti_11gb": 11264,
    "rtx3050_8gb": 8192,
    "rtx3060_12gb": 12288,
    "rtx3060_laptop_6gb": 6144,
    "rtx3060ti_8gb": 8192,
    "rtx3070_8gb": 8192,
    "rtx3070_laptop_8gb": 8192,
    "rtx3070ti_8gb": 8192,
    "rtx3080_10gb": 10240,
    "rtx3080_laptop_16gb": 16384,
    "rtx3080ti_12gb": 12288,
    "rtx3090_24gb": 24576,
    "rtx4000ada_20gb": 20475,
    "rtx4050_laptop_6gb": 6141,
    "rtx4060_8gb": 8188,
    "rtx4060_laptop_8gb": 8188,
    "rtx4060ti_16gb": 16380,
    "rtx4060ti_8gb": 8188,
    "rtx4070_12gb": 12282,
    "rtx4070_laptop_8gb": 8188,
    "rtx4070super_12gb": 12282,
    "rtx4070ti_12gb": 12282,
    "rtx4070tisuper_16gb": 16376,
    "rtx4080_16gb": 16376,
    "rtx4080_laptop_12gb": 12282,
    "rtx4080super_16gb": 16376,
    "rtx4090_24gb": 24564,
    "rtx4090_laptop_16gb": 16376,
    "rtx5060_8gb": 8151,
    "rtx5060ti_16gb": 16311,
    "rtx5060ti_8gb": 8151,
    "rtx5070_12gb": 12227,
    "rtx5070_laptop_8gb": 8151,
    "rtx5070ti_16gb": 16303,
    "rtx5080_16gb": 16303,
    "rtx5080_laptop_16gb": 16303,
    "rtx5090_32gb": 32607,
    "rtx5090_laptop_24gb": 24463,
    "rtx6000ada_48gb": 49140,
    "t4_16gb": 15360,
    "v100_16gb": 16384,
    "v100_32gb": 32768,
}
"""As nvidia-smi shows it."""
OPTIONS = {
    "offload": {
        *("none", "uva", "prefetch", "auto"),
        *("experts", "experts_in_place", "experts_prefetch"),
    },
    "kv": {"gpu", "cpu"},
    "scenario": {
        *("quick", "load", "throughput", "latency", "all"),
        *("serve", "serve_peak", "serve_trace", "ab", "probe", "quality"),
    },
    "tracking": {"mlflow", "none"},
}


def names(group: str) -> list[str]:
    """Names of the files of a group."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def content(group: str, name: str) -> dict[str, Any]:
    """The content of one file."""
    return yaml.safe_load((CONF / group / f"{name}.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


@functools.cache
def point(composer: Composer, *overrides: str) -> Point:
    """The only point of some overrides."""
    (found,) = composer.plan(overrides).points
    return found


def test_groups_hold_what_is_promised() -> None:
    assert set(names("model")) == {"local", "fake", *PARAMETERS}
    assert set(names("gpu")) == {"auto", "cpu", *MEMORY_MIB}
    for group, options in OPTIONS.items():
        assert set(names(group)) == options
    assert len(names("experiment")) >= 4


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_parameters_and_bytes_are_the_published_ones(name: str) -> None:
    file = content("model", name)
    spec = ModelSpec(**file["spec"])
    assert spec.num_parameters == PARAMETERS[name]
    if spec.quantization:
        quantised = sum(t.numel for t in spec.tensors() if t.name in spec.formats(spec.dtype))
        plain = PARAMETERS[name] - quantised
        bits = (spec.weight_bytes() - 2 * plain) / quantised * 8
        assert 4.1 < bits < 8.01 if name != "smollm2_135m_q4" else 5.7 < bits < 5.8
        return
    assert spec.weight_bytes() == PARAMETERS[name] * (4 if name == "glass" else 2)
    comment = (CONF / "model" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert f"{PARAMETERS[name]:,} parameters" in comment
    found = find(name)
    assert (found.name, found.spec, found.source) == (name, spec, ModelSource(**file["source"]))


@pytest.mark.thorough_but("glass")
@pytest.mark.parametrize(
    "name", mostly_slow(sorted(PARAMETERS), lambda x: x in {"glass", "gemma3_4b", "llama31_8b"})
)
def test_the_model_that_is_composed_is_the_one_of_the_catalogue(
    name: str, composer: Composer
) -> None:
    config = point(
        composer, f"model={name}", "scenario=latency", "scenario.latency.prompt_tokens=32"
    )
    assert config.config.model.name == name
    assert vars(find(name)).items() <= vars(config.config.model).items()


NO_COMMIT = {"llama2_7b_awq", "llama31_8b_fp8"}
"""Models whose commit is not known yet."""


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_model_files_state_only_what_they_need(name: str) -> None:
    file = content("model", name)
    assert list(file) == ["name", "source", "spec"]
    source = ModelSource(**file["source"])
    assert source.kind == ("package" if name == "glass" or name.startswith("smollm2") else "hub")
    if name in NO_COMMIT:  # a record has the commit that was downloaded
        assert source.revision == "main"
    elif source.kind == "hub":  # a branch would let a record name weights that it does not have
        assert re.fullmatch("[0-9a-f]{40}", str(source.revision))


@pytest.mark.parametrize("name", sorted(MEMORY_MIB))
def test_cards_have_the_memory_that_nvidia_smi_shows_and_named_sources(name: str) -> None:
    file = content("gpu", name)
    gpu = GPUConfig(**file)
    assert gpu.name == name
    assert gpu.device == "auto"
    assert gpu.memory_gib is not None
    assert gpu.memory_gib * 1024 == MEMORY_MIB[name]
    assert gpu.link_gb_s in {16.0, 32.0, 64.0}
    assert gpu.hbm_gb_s
    assert gpu.bf16_tflops
    assert gpu.compute_capability in {7.0, 7.5, 8.0, 8.6, 8.9, 9.0, 10.0, 12.0}
    lines = (CONF / "gpu" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    for key in list(file)[2:]:
        (line,) = [number for number, text in enumerate(lines) if text.startswith(key)]
        assert lines[line - 1].startswith("# "), f"{key} has no source"


def test_cards_that_people_have_are_there() -> None:
    assert {8, 10, 11, 12, 16, 20, 24, 32, 48} <= {size_gb(name) for name in MEMORY_MIB}


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("rtx4070ti", "Did you mean rtx4070ti_12gb or rtx4070tisuper_16gb?"),
        ("4090", "Did you mean rtx4090_24gb or rtx4090_laptop_16gb?"),
        (
            "RTX4060",
            "Did you mean rtx4060_8gb or rtx4060ti_8gb or rtx4060ti_16gb or rtx4060_laptop_8gb?",
        ),
        ("RTX4080_16GB", "Did you mean rtx4080_16gb or "),
        ("rtx9999_17gb", "Cards of 16 GB: "),
        ("rx7900xtx_24gb", "Cards of 24 GB: a10_24gb, "),
        ("gtx1070_7gb", "Cards of 6 GB: rtx2060_6gb, "),
        ("arc", "There are: a100_40gb, "),
        ("x", "There are: a100_40gb, "),
        ("", "There are: a100_40gb, "),
    ],
)
def test_an_unknown_card_is_told_the_nearest_ones_and_how_to_state_its_own(
    word: str, expected: str, composer: Composer
) -> None:
    with pytest.raises(ConfigError) as error:
        composer.plan(["model=glass", f"gpu={word}"])
    text = str(error.value)
    assert f"got '{word}'" in text
    assert expected in text
    assert "gpu.memory_gib=12 gpu.link_gb_s=16" in text
    assert "FOLDER/gpu/NAME.yaml" in text


def test_auto_and_cpu_have_no_budget_of_their_own(composer: Composer) -> None:
    assert point(composer).config.gpu.memory_gib is None
    assert point(composer).config.gpu.device == "auto"
    assert point(composer, "gpu=cpu").config.gpu.device == "cpu"


def test_offload_choices(composer: Composer) -> None:
    none, uva, prefetch = (
        point(composer, f"offload={name}").config.offload for name in ("none", "uva", "prefetch")
    )
    assert (none.backend, uva.backend, prefetch.backend) == ("none", "uva", "prefetch")
    assert uva.uva.cpu_offload_gb == 8
    node = prefetch.prefetch
    assert (node.offload_group_size, node.offload_num_in_group) == (8, 5)
    assert node.offload_prefetch_step == 2


def test_quick_measures_all_three_and_enough_requests_for_a_median(composer: Composer) -> None:
    scenario = point(composer).config.scenario
    assert scenario.name == "quick"
    assert scenario.load is not None
    assert scenario.throughput is not None
    assert scenario.latency is not None
    assert scenario.latency.num_requests >= 11
    assert scenario.correctness.enabled


@pytest.mark.thorough
def test_serving_is_an_open_loop_a_search_or_a_trace(composer: Composer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.touch()
    found = {
        name: point(composer, "model=olmo7b", f"scenario={name}", *more).config.scenario
        for name, more in {
            "serve": (),
            "serve_peak": (),
            "serve_trace": (f"scenario.serve.trace.path='{trace}'",),
        }.items()
    }
    assert {name: scenario.name for name, scenario in found.items()} == {n: n for n in found}
    for name, scenario in found.items():
        assert (scenario.load, scenario.throughput, scenario.latency) == (None, None, None)
        assert scenario.serve is not None
        assert scenario.serve.slo.bounds()
        assert (scenario.serve.search is not None) == (name == "serve_peak")
        assert (scenario.serve.trace is not None) == (name == "serve_trace")


@pytest.mark.thorough_but("latency")
@pytest.mark.parametrize("name", ["load", "throughput", "latency"])
def test_a_scenario_measures_what_its_name_says(name: str, composer: Composer) -> None:
    scenario = point(composer, "model=olmo7b", f"scenario={name}").config.scenario
    parts = ("load", "throughput", "latency")
    assert [part for part in parts if getattr(scenario, part) is not None] == [name]
    full = point(composer, "model=olmo7b", "scenario=all").config.scenario
    assert getattr(full, name) == getattr(scenario, name)
    assert full.name == "all"


EXPERIMENTS = [
    (path, line.removeprefix("#").split("    #")[0].strip())
    for path in sorted((CONF / "experiment").glob("*.yaml"))
    for line in re.sub(r"\\\n# *", "", path.read_text(encoding="utf-8")).splitlines()
    if re.match(r"#\s+python -m harness", line)
]


def test_every_experiment_states_a_question_and_its_command() -> None:
    for name in names("experiment"):
        text = (CONF / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")
        first, second = text.splitlines()[:2]
        assert first == "# @package _global_"
        assert second.startswith("# Question: ")
        assert "?" in text.split("defaults:")[0]
        assert f"python -m harness +experiment={name}" in text
    assert {path.stem for path, _ in EXPERIMENTS} == set(names("experiment"))


FIRST = dict(reversed(EXPERIMENTS))


@pytest.mark.thorough_but("python -m harness +experiment=ab_4b_uva")
@pytest.mark.parametrize(
    ("path", "command"),
    [
        pytest.param(path, command, marks=[] if FIRST[path] == command else pytest.mark.slow)
        for path, command in EXPERIMENTS
    ],
)
def test_commands_of_experiments_compose(
    path: Path, command: str, composer: Composer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8")
    line = parse_command_line(shlex.split(command)[3:])
    if "=dummy" in command:  # the same points as in the file's first command
        assert not composer.plan([*line.overrides, "hydra.mode=RUN"]).multirun
        return
    plan = composer.plan(line.overrides, multirun=line.multirun)
    assert plan.multirun or plan.points[0].config.ab is not None
    assert plan.points
    assert len({repr(item.config) for item in plan.points}) == len(plan.points)
    assert [item.warnings for item in plan.points] == [[] for _ in plan.points]


def test_the_7b_case_compares_all_ways_on_a_16_gb_card(composer: Composer) -> None:
    plan = composer.plan(["+experiment=fit_7b_16gb"])
    ways = [item.config.offload_name for item in plan.points]
    assert ways == ["none", "uva", "prefetch", "auto"]
    assert {item.config.model.name for item in plan.points} == {"olmo7b"}
    assert {item.config.gpu.name for item in plan.points} == {"rtx4080_16gb"}


def test_what_runs_when_nothing_is_chosen_states_no_default_again() -> None:
    file = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))
    assert set(file) == {"defaults", "hydra"}
