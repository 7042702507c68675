"""An option chosen by name is what it says, or the command is refused."""

from pathlib import Path

import pytest

from engine.errors import ConfigError
from harness.config.compose import Composer
from harness.config.engine import engine_config, kv_tokens_in_use


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (
            "offload=none offload.uva.cpu_offload_gb=8",
            [
                "offload=none conflicts with offload.uva.cpu_offload_gb=8. "
                "Use offload=uva, or drop one."
            ],
        ),
        (
            "offload=none offload.prefetch.offload_group_size=8",
            ["Use offload=prefetch, or drop one."],
        ),
        (
            "offload=none kv.swap_space=4",
            [
                "offload=none conflicts with kv.swap_space=4. Use kv.cpu_gib=4, which holds KV "
                "blocks and no weights, or drop one."
            ],
        ),
        (
            "offload=none planner.auto_fields=[cpu_offload_gb]",
            ["conflicts with planner.auto_fields=[cpu_offload_gb]. Use offload=uva, or drop one."],
        ),
        (
            "offload=prefetch offload.uva.cpu_offload_gb=4",
            [
                "offload=prefetch does not use offload.uva.cpu_offload_gb=4. Use offload=uva, or "
                "drop one."
            ],
        ),
        ("offload=none planner.choose=true", ["Use offload=auto, or drop one."]),
        (
            "offload=uva offload.offload_backend=auto offload.prefetch.offload_group_size=4",
            [
                "offload=uva conflicts with",
                "Use offload=prefetch, or drop one.",
            ],
        ),
        (
            "+experiment=peers offload=none system=native",
            ["=6. Use offload=uva, or set offload.uva.cpu_offload_gb=0."],
        ),
        (
            "kv=gpu kv.cpu_gib=4",
            ["conflicts with kv.cpu_gib=4. Use kv=cpu, or drop one."],
        ),
        ("kv=gpu kv.num_cpu_blocks=64", ["kv.num_cpu_blocks=64"]),
        ("system=http system.kind=native", ["system=http conflicts with", "or drop one."]),
        (
            "tracking=none tracking.backend=mlflow",
            ["tracking=none conflicts with", "or drop one."],
        ),
        (
            "offload=none,uva offload.uva.cpu_offload_gb=8",
            [
                "offload=none conflicts with offload.uva.cpu_offload_gb=8. Use offload=uva, "
                "or drop one, or sweep offload.uva.cpu_offload_gb=0,8 instead of offload.",
                "(point 0 of the sweep",
            ],
        ),
    ],
)
def test_settings_that_make_another_option_of_it_are_refused(
    typed: str, words: list[str], composer: Composer
) -> None:
    model = [] if "experiment" in typed else ["model=olmo7b"]
    with pytest.raises(ConfigError) as error:
        composer.plan([*model, *typed.split()], multirun="," in typed)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("typed", "offload", "has_host_tier"),
    [
        ("offload.uva.cpu_offload_gb=8", "uva", False),
        ("offload.prefetch.offload_group_size=8", "prefetch", False),
        ("kv.cpu_gib=4", "none", True),
        ("planner.auto_fields=[cpu_offload_gb]", "uva", False),
        ("offload=none planner.auto_fields=[max_model_len]", "none", False),
        ("kv.swap_space=4", "swap_space", True),
        ("offload=uva kv.swap_space=4", "uva", True),
        ("offload=none kv.swap_space=0", "none", False),
        ("kv=cpu kv.cpu_gib=0", "none", False),
        ("kv=gpu kv.cpu_gib=0 offload=none", "none", False),
        ("offload=auto planner.choose=false offload.uva.cpu_offload_gb=8", "uva", False),
    ],
)
def test_where_no_option_is_contradicted_the_fields_say_what_runs(
    typed: str, offload: str, has_host_tier: bool, composer: Composer
) -> None:
    [point] = composer.plan(["model=olmo7b", *typed.split()]).points
    assert point.config.offload_name == offload
    assert point.config.kv.has_host_tier == has_host_tier


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [
        ([], 8 * (32 + 16 + 16)),
        (["engine.max_num_seqs=4"], 4 * (32 + 16 + 16)),
        (["scenario=latency"], 128 + 32 + 16),
        (["scenario=serve", "scenario.serve.max_concurrency=3"], 3 * (32 + 16 + 16)),
        (["kv=cpu"], 2 * (32 + 16) + (12 + 9) * (48 + 16) + 1 + 16),
        (["kv=cpu", "scenario=serve"], None),
    ],
)
def test_tokens_of_kv_that_a_scenario_can_use(composer, asked, tokens):
    (point,) = composer.plan(["model=smollm2_135m", *asked]).points
    assert kv_tokens_in_use(point.config) == tokens
    assert engine_config(point.config, Path("folder")).emulated_kv_tokens == tokens
