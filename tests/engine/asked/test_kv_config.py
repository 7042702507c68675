"""How a host tier of KV blocks is asked for: sizes, the published KVTransferConfig, refusals."""

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.asked.keywords import config_from_keywords
from engine.asked.kv import KVConfig, KVTransferConfig
from engine.errors import ConfigError
from engine.plan.sizes import cpu_blocks

SIZES: dict[str, Any] = {"num_cpu_blocks": 512, "cpu_gib": 2.5, "swap_space": 4.0}


def transfer(**extra: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )


def kv_of(**keywords: Any) -> KVConfig:
    return config_from_keywords("model", keywords).kv


@pytest.mark.parametrize("name", SIZES)
def test_each_size_asks_for_a_host_tier(name: str) -> None:
    found = kv_of(**{name: SIZES[name]}, pin_limit_gib=1.0, enable_prefix_caching=True)
    assert found.has_host_tier
    assert found.sizes == {name: SIZES[name]}
    assert (found.pin_limit_gib, found.enable_prefix_caching) == (1.0, True)


@pytest.mark.parametrize("names", [*combinations(SIZES, 2), tuple(SIZES)])
def test_two_sizes_are_refused_and_both_are_named(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="one size of the host tier") as error:
        kv_of(**{name: SIZES[name] for name in names})
    assert all(f"kv.{name}={SIZES[name]:g}" in str(error.value) for name in names)


@pytest.mark.parametrize("none", [{}, {"num_cpu_blocks": 0}, {"cpu_gib": 0}, {"swap_space": 0}])
def test_nothing_or_zero_is_no_host_tier_and_a_pin_limit_has_no_effect(
    none: dict[str, Any],
) -> None:
    assert not kv_of(**none).has_host_tier
    with pytest.raises(ConfigError, match=r"kv\.pin_limit_gib: expected null without a host tier"):
        kv_of(**none, pin_limit_gib=10)


# KVTransferConfig.


@pytest.mark.parametrize(
    ("extra", "keywords", "expected"),
    [
        ({"num_cpu_blocks": 1000}, {}, {"num_cpu_blocks": 1000}),
        ({"num_cpu_blocks": 1000, "block_size": 16}, {"block_size": 16}, {"num_cpu_blocks": 1000}),
        ({"num_cpu_blocks": 1000, "block_size": 64}, {"block_size": 16}, {"num_cpu_blocks": 4000}),
        ({"num_cpu_blocks": 10, "block_size": 128}, {"block_size": 128}, {"num_cpu_blocks": 10}),
        ({"cpu_bytes_to_use": 3 * 2**29}, {}, {"cpu_gib": 1.5}),
        ({"cpu_bytes_to_use": 2**34, "block_size": 32}, {"block_size": 8}, {"cpu_gib": 16.0}),
    ],
)
def test_the_published_config_means_the_same(
    extra: dict[str, int], keywords: dict[str, Any], expected: dict[str, Any]
) -> None:
    given_as_dict = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    for config in (transfer(**extra), given_as_dict):
        found = kv_of(kv_transfer_config=config, **keywords)
        assert found == KVConfig(enable_prefix_caching=True, **keywords, **expected)
    limited = kv_of(kv_transfer_config=transfer(**extra), pin_limit_gib=1.0, **keywords)
    assert limited.pin_limit_gib == 1.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_connector": None}, ["kv_connector", "OffloadingConnector", "None"]),
        ({"kv_connector": "LMCacheConnectorV1"}, ["kv_connector", "'LMCacheConnectorV1'"]),
        ({"kv_connector": "NixlConnector"}, ["kv_connector", "'NixlConnector'"]),
        ({"kv_role": None}, ["kv_role", "kv_both", "None"]),
        ({"kv_role": "kv_producer"}, ["kv_role", "'kv_producer'"]),
        ({"kv_role": "kv_consumer"}, ["kv_role", "'kv_consumer'"]),
        ({"kv_connector_extra_config": {}}, ["one of num_cpu_blocks and cpu_bytes_to_use"]),
        ({"kv_connector_extra_config": {"block_size": 16}}, ["num_cpu_blocks", "block_size"]),
        (
            {"kv_connector_extra_config": {"num_cpu_blocks": 1, "cpu_bytes_to_use": 1}},
            ["one of num_cpu_blocks and cpu_bytes_to_use"],
        ),
        ({"kv_connector_extra_config": {"num_cpu_blocks": 0}}, ["num_cpu_blocks", ">= 1"]),
        ({"kv_connector_extra_config": {"num_cpu_blocks": 1.5}}, ["num_cpu_blocks", "integer"]),
        ({"kv_connector_extra_config": {"num_cpu_blocks": True}}, ["num_cpu_blocks", "True"]),
        (
            {"kv_connector_extra_config": {"num_cpu_blocks": 4, "eviction_policy": "arc"}},
            ["eviction_policy", "Remove"],
        ),
        ({"kv_connector_extra_config": [1]}, ["expected a dict", "[1]"]),
        ({"kv_rank": 0}, ["kv_transfer_config", "kv_rank"]),
    ],
)
def test_what_the_published_config_cannot_ask_for_is_refused_by_name(
    changes: dict[str, Any], words: list[str]
) -> None:
    given_as_dict = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"num_cpu_blocks": 4},
    }
    with pytest.raises(ConfigError) as error:
        kv_of(kv_transfer_config=given_as_dict | changes)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"num_cpu_blocks": 5}, ["no other size", "num_cpu_blocks=5"]),
        ({"cpu_gib": 5}, ["no other size", "cpu_gib=5"]),
        ({"swap_space": 5}, ["no other size", "swap_space=5"]),
        ({"enable_prefix_caching": False}, ["enable_prefix_caching", "expected true", "False"]),
        ({"block_size": 32}, ["block_size: expected a multiple of kv.block_size=32", "got 16"]),
        ({"block_size": "x"}, ["kv.block_size", "'x'"]),
    ],
)
def test_contradictions_with_other_keywords_are_refused(
    keywords: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        kv_of(kv_transfer_config=transfer(num_cpu_blocks=9, block_size=16), **keywords)
    assert all(word in str(error.value) for word in words)


def test_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected an object of KVTransferConfig or a dict"):
        kv_of(kv_transfer_config="OffloadingConnector")


# CPU memory = blocks x layers x block bytes.


def test_the_published_formula() -> None:
    block_bytes = 2 * 8 * 128 * 2 * 16  # keys and values, KV heads, head size, bfloat16, tokens
    assert cpu_blocks(16 * 2**30, 32, block_bytes) == 8192


@given(blocks=st.integers(0, 10**7), layers=st.integers(1, 200), size=st.integers(1, 10**7))
def test_blocks_and_memory_are_inverse(blocks: int, layers: int, size: int) -> None:
    memory = blocks * layers * size
    assert cpu_blocks(memory, layers, size) == blocks
    assert cpu_blocks(memory - 1, layers, size) == max(0, blocks - 1)
