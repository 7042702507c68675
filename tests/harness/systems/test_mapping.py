from dataclasses import replace

import pytest

from catalogue.terminal import EXIT_BAD_CONFIG
from engine.asked.config import EngineConfig, EngineSettings, ModelConfig, PlannerConfig
from engine.asked.kv import KVConfig
from engine.asked.offload import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from engine.errors import CapacityError, ConfigError
from engine.model.spec import ModelSpec
from engine.sealed import GIB
from harness.__main__ import main
from harness.config.compose import Composer
from harness.config.engine import check_system
from harness.config.schema import SystemConfig
from harness.point.point import prepare
from harness.search import TrialRunner
from harness.systems.accelerate_engine import Sizes, device_map, host_layers, largest_batch
from harness.systems.base import agree, config_json
from harness.systems.vllm_engine import check_arguments, vllm_arguments
from tests.harness.cases import SPEC, load_only, run_config

SYSTEMS = {
    "accelerate": SystemConfig(kind="accelerate"),
    "vllm": SystemConfig(kind="vllm"),
    "http": SystemConfig(kind="http", base_url="http://localhost:1/v1"),
}
UVA = OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=2.0, cpu_offload_params=["mlp"]))
PREFETCH = OffloadConfig(
    prefetch=PrefetchOffloadConfig(
        offload_group_size=4, offload_num_in_group=2, offload_prefetch_step=3
    )
)


@pytest.mark.parametrize(
    ("kind", "changes", "name"),
    [
        ("accelerate", {"offload": UVA}, "offload.uva.cpu_offload_params"),
        ("accelerate", {"offload": PREFETCH}, "offload.prefetch.offload_group_size"),
        ("accelerate", {"kv": KVConfig(block_size=32)}, "kv.block_size"),
        (
            "accelerate",
            {"engine": EngineSettings(max_num_batched_tokens=512)},
            "engine.max_num_batched_tokens",
        ),
        (
            "accelerate",
            {"planner": PlannerConfig(choose=True, objective="throughput")},
            "planner.objective",
        ),
        ("vllm", {"planner": PlannerConfig(choose=True)}, "planner.choose"),
        ("vllm", {"kv": KVConfig(swap_space=1.0)}, "kv.swap_space"),
        ("vllm", {"engine": EngineSettings(uva_stage_tokens=1)}, "engine.uva_stage_tokens"),
        ("http", {"offload": UVA}, "offload.uva.cpu_offload_gb"),
        ("http", {"engine": EngineSettings(max_num_seqs=8)}, "engine.max_num_seqs"),
        ("http", {"scenario": load_only()}, "scenario.load"),
        ("http", {}, "scenario.correctness.enabled"),
    ],
)
def test_what_a_system_does_not_follow_is_refused_by_name(kind, changes, name):
    config = run_config(system=SYSTEMS[kind], **changes)
    with pytest.raises(ConfigError, match=f"^{name}: expected .* system={kind}"):
        check_system(config)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("accelerate", {"offload": OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=1))}),
        ("accelerate", {"planner": PlannerConfig(choose=True, kv_tokens=100)}),
        ("vllm", {"offload": UVA}),
        ("vllm", {"offload": PREFETCH}),
        ("accelerate", {}),
        ("vllm", {}),
    ],
)
def test_what_a_system_follows_is_taken(kind, changes):
    check_system(run_config(system=SYSTEMS[kind], **changes))


def engine(**changes):
    return EngineConfig(model=ModelConfig(name="m", load_format="dummy", spec=SPEC), **changes)


def test_settings_of_vllm_are_those_of_its_command_line():
    asked = engine(
        offload=UVA,
        engine=EngineSettings(max_model_len=256, max_num_seqs=8, dtype="float16", seed=3),
        kv=KVConfig(block_size=32),
    )
    assert vllm_arguments(asked, "folder", 0.25) == {
        "model": "folder",
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "float16",
        "seed": 3,
        "gpu_memory_utilization": 0.25,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "enforce_eager": False,
        "block_size": 32,
        "enable_prefix_caching": False,
        "max_model_len": 256,
        "offload_backend": "uva",
        "cpu_offload_gb": 2.0,
        "cpu_offload_params": {"mlp"},
    }


def test_prefetch_and_no_offload_of_vllm():
    ahead = vllm_arguments(engine(offload=PREFETCH), "folder", 0.5)
    assert ahead["offload_backend"] == "prefetch"
    assert (ahead["offload_group_size"], ahead["offload_num_in_group"]) == (4, 2)
    assert ahead["offload_prefetch_step"] == 3
    assert ahead["offload_params"] == set()
    for plain in (engine(), engine(kv=KVConfig(cpu_gib=0))):
        assert not any("offload" in name for name in vllm_arguments(plain, "folder", 0.5))


def test_a_vllm_without_a_setting_is_refused_with_its_version():
    with pytest.raises(ConfigError, match=r"offload_group_size among the settings of vLLM 0\.1"):
        check_arguments({"model": 1, "offload_group_size": 4}, ["model"], "0.1")
    check_arguments({"model": 1}, ["model"], "0.1")


def sizes(room_gib, **changes):
    fields = {
        "spec": SPEC,
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 4,
        "kv_tokens": 64,
        "room_bytes": int(room_gib * GIB),
    }
    return Sizes(**(fields | changes))


def test_layers_go_to_the_host_as_many_as_are_asked_or_needed():
    roomy = sizes(1)
    layer = roomy.layer_bytes
    assert host_layers(roomy, engine()) == 0
    for asked_bytes, num in ((1, 1), (layer, 1), (layer + 1, 2), (10 * layer, 2)):
        config = engine(
            offload=OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=asked_bytes / GIB))
        )
        assert host_layers(roomy, config) == num
    auto = engine(planner=PlannerConfig(choose=True))
    assert host_layers(roomy, auto) == 0
    need = roomy.sequence_bytes(64) + roomy.outer_bytes
    short = sizes(1, room_bytes=need + roomy.copy_bytes + layer)
    assert host_layers(short, auto) == 1
    with pytest.raises(CapacityError, match=r"Set engine\.max_model_len=\d+\.$"):
        host_layers(sizes(1, room_bytes=need), auto)
    with pytest.raises(CapacityError, match=r"offload=auto"):
        host_layers(sizes(1, room_bytes=need + layer), engine())


def test_the_device_map_ends_with_layers_in_host_memory():
    assert device_map(3, 0, 0) == {"": 0}
    found = device_map(3, 2, 0)
    assert [found[f"model.layers.{index}"] for index in range(3)] == [0, "cpu", "cpu"]
    assert found["lm_head"] == found["model.embed_tokens"] == found["model.norm"] == 0


def test_a_batch_is_as_large_as_its_longest_sequence_allows():
    roomy = sizes(1)
    assert largest_batch(roomy, 0, dict.fromkeys("abcdef", 10)) == 4
    weights = roomy.outer_bytes + 2 * roomy.layer_bytes
    tight = sizes(1, room_bytes=weights + 2 * roomy.sequence_bytes(10))
    assert largest_batch(tight, 0, dict.fromkeys("abc", 10)) == 2
    assert largest_batch(tight, 0, {"a": 10, "b": 11}) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model_type": "mistral", "sliding_window": 8},
        {"model_type": "qwen2", "sliding_window": 8, "tie_word_embeddings": True},
        {"model_type": "qwen3", "attention_bias": True, "rope_theta": 1e6},
        {"model_type": "olmo2"},
        {
            "model_type": "gemma3_text",
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_local_base_freq": 1e4,
            "query_pre_attn_scalar": 16.0,
        },
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
)
def test_a_config_written_from_sizes_reads_as_the_same_sizes(changes):
    spec = replace(SPEC, **changes)
    assert ModelSpec.from_hf_config(config_json(spec)) == spec


def test_agreement_counts_up_to_the_first_difference():
    found = agree([[1, 2, 3], [4, 5, 6]], [[1, 2, 9], [4, 5, 6]])
    assert found.metrics == {"correctness/equal_share": 5 / 6}
    assert found.facts["leading_equal"] == [2, 3]
    assert found.reasons == []
    assert "5 of 6 tokens" in found.notes[0]
    assert agree([[1, 2]], [[1, 2]]).notes == []


def test_nothing_in_common_is_a_reason_and_unknown_ids_are_not_compared():
    assert "for none of" in agree([[1, 2], [3]], [[5, 2], [4]]).reasons[0]
    unknown = agree([[1, 2]], [[-1, -1]])
    assert unknown.facts["checked"] is False
    assert "does not report token ids" in unknown.notes[0]


@pytest.mark.parametrize("kind", SYSTEMS)
def test_what_a_system_runs_on_must_be_there_before_anything_is_built(kind, monkeypatch):
    monkeypatch.setattr("harness.config.engine.find_spec", lambda _: None)
    config = run_config(system=SYSTEMS[kind])
    with pytest.raises(ConfigError, match=f"system={kind}: expected the package"):
        prepare(config, print)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "words",
    [
        ["-m", "system=accelerate", "engine.seed=1,2"],
        ["scenario=ab", "ab.a=[]", "ab.b=[system=accelerate]"],
    ],
)
def test_an_absent_package_is_told_before_any_point_begins(words, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("harness.config.engine.find_spec", lambda _: None)
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path))
    assert main(["+model=smollm2_135m", "tracking=none", *words]) == EXIT_BAD_CONFIG
    said = capsys.readouterr().err
    assert "expected the package accelerate, found none. Run: `pip install" in said
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.thorough
def test_a_search_tells_an_absent_package_before_its_trials(monkeypatch):
    monkeypatch.setattr("harness.config.engine.find_spec", lambda _: None)
    runner = TrialRunner(Composer(), ["+model=glass", "system=accelerate"], goal=None)
    with pytest.raises(ConfigError, match="expected the package accelerate"):
        runner.check_goal([])
