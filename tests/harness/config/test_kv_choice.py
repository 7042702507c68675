"""kv=cpu: a size of its own that gives way to any other, and sizes on the command line."""

import pytest

from engine.asked.kv import KVConfig
from engine.errors import ConfigError
from harness.config.compose import Composer
from harness.point.describe import flat_params


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


def kv_of(composer: Composer, *overrides: str) -> KVConfig:
    [point] = composer.plan(overrides).points
    return point.config.kv


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        ((), {"cpu_gib": 8.0}),
        (("kv.cpu_gib=2.5",), {"cpu_gib": 2.5}),
        (("kv.num_cpu_blocks=4096",), {"num_cpu_blocks": 4096}),
        (("kv.num_cpu_blocks=0",), {"num_cpu_blocks": 0}),
        (("kv.swap_space=4",), {"swap_space": 4.0}),
        (("kv.cpu_gib=null",), {}),
        (("kv.cpu_gib=16", "kv.pin_limit_gib=10"), {"cpu_gib": 16.0}),
    ],
)
def test_the_default_size_gives_way(
    composer: Composer, overrides: tuple[str, ...], sizes: dict[str, float]
) -> None:
    found = kv_of(composer, "kv=cpu", *overrides)
    assert found.sizes == sizes
    assert found.enable_prefix_caching


def test_sizes_beside_the_gpu_tier_alone(composer: Composer) -> None:
    assert not kv_of(composer).has_host_tier
    found = kv_of(composer, "kv.cpu_gib=3")
    assert (found.sizes, found.enable_prefix_caching) == ({"cpu_gib": 3.0}, False)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("kv=cpu", "kv.cpu_gib=2", "kv.num_cpu_blocks=9"),
            ["kv.num_cpu_blocks=9", "kv.cpu_gib=2"],
        ),
        (
            ("kv=cpu", "kv.swap_space=2", "kv.num_cpu_blocks=9"),
            ["swap_space=2", "num_cpu_blocks=9"],
        ),
        (("kv.pin_limit_gib=3",), ["kv.pin_limit_gib", "without a host tier"]),
        (("kv=cpu", "kv.cpu_gb=3"), ["kv.cpu_gb", "cpu_gib"]),
        (("kv=cpu", "kv.num_cpu_blocks=few"), ["kv.num_cpu_blocks", "an integer or null"]),
        (("kv=host",), ["kv", "cpu, gpu", "host"]),
    ],
)
def test_refusals(composer: Composer, overrides: tuple[str, ...], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        composer.plan(overrides)
    assert all(word in str(error.value) for word in words)


def test_a_sweep_over_sizes_and_parameters_of_a_tracker(composer: Composer) -> None:
    points = composer.plan(["kv=cpu", "kv.num_cpu_blocks=0,64"], multirun=True).points
    assert [point.config.kv.num_cpu_blocks for point in points] == [0, 64]
    params = flat_params(points[1].config)
    assert params["kv.num_cpu_blocks"] == 64
    assert params["kv.enable_prefix_caching"] is True
    assert params["kv.cpu_gib"] is None
