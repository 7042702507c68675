"""Host tiers that cannot be had, and what is advised instead, before anything is loaded."""

import re
from dataclasses import replace
from typing import Any

import pytest

from engine.asked.config import PlannerConfig
from engine.asked.kv import KVConfig
from engine.errors import CapacityError, ConfigError
from engine.plan.planner import plan_memory
from tests.engine.specs import GIB, H200, advised, check_plan, configuration, llama, plan_llama


@pytest.mark.parametrize(
    ("kv", "advice"),
    [
        ({"cpu_gib": 200}, r"kv\.cpu_gib=11\d\.\d+"),
        ({"num_cpu_blocks": 102_400}, r"kv\.num_cpu_blocks=6\d{4}"),
        ({"swap_space": 200}, r"kv\.swap_space=11\d\.\d+"),
    ],
    ids=str,
)
def test_a_tier_beyond_host_memory_is_refused_with_figures(kv: dict[str, Any], advice: str) -> None:
    with pytest.raises(
        CapacityError,
        match=r"201\.\d\d GiB of host memory are needed, .*pinned_kv 200",
    ) as error:
        plan_llama(30_000, kv=kv)
    text = str(error.value)
    assert "119.00 GiB are available after a reserve of 1 GiB" in text
    assert "offload less" not in text
    found = advised(error.value)[0]
    assert re.fullmatch(advice, found)
    name, value = re.findall(r"kv\.(\w+)=([\d.]+)", found)[0]
    size = int(value) if name == "num_cpu_blocks" else float(value)
    assert plan_llama(30_000, kv={name: size}).host_kv is not None


def test_a_tier_beyond_the_memlock_limit_is_refused_with_what_may_be_pinned() -> None:
    facts = replace(H200, pin_limit_bytes=9 * GIB)
    with pytest.raises(CapacityError, match=r"memlock limit leaves 9\.000") as error:
        plan_llama(30_000, facts, kv={"cpu_gib": 16})
    assert "(pinned_kv 16.000)" in str(error.value)
    found = re.search(r"kv\.pin_limit_gib=([\d.]+)", str(error.value))
    assert found is not None
    plan = plan_llama(30_000, facts, kv={"cpu_gib": 16, "pin_limit_gib": float(found[1]) - 0.1})
    assert 8 * GIB < plan.host_items["pinned_kv"] <= 9 * GIB


def test_a_size_of_less_than_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv\.cpu_gib: expected at least one block of 16 tokens"):
        plan_llama(8000, kv={"cpu_gib": 0.001})
    assert plan_llama(8000, kv={"cpu_gib": 0.002}).host_kv is not None


@pytest.mark.parametrize("cpu_gib", [1, 4])
def test_a_refusal_says_how_much_more_is_needed_beside_the_host_tier(cpu_gib: int) -> None:
    with pytest.raises(CapacityError) as error:
        plan_llama(131_072, kv={"cpu_gib": cpu_gib})
    found = re.search(
        r"([\d.]+) GiB short \(needs ([\d.]+) GiB .* up to ([\d.]+) GiB .* has ([\d.]+) GiB",
        str(error.value),
    )
    assert found is not None
    short, need, host, left = map(float, found.groups())
    assert host == cpu_gib
    assert short == pytest.approx(need - host - left, abs=0.02)
    assert plan_llama(131_072, kv={"cpu_gib": cpu_gib + short + 0.01}).host_kv is not None
    with pytest.raises(CapacityError):
        plan_llama(131_072, kv={"cpu_gib": cpu_gib + short - 0.01})


@pytest.mark.thorough
def test_a_host_tier_is_advised_where_it_is_what_is_short() -> None:
    """Of the placement that is set, and of those that auto chooses from."""
    for memory_gib, planner in ((24, PlannerConfig()), (8, PlannerConfig(choose=True))):
        asked = {"memory_gib": memory_gib, "max_model_len": 110_000, "max_num_seqs": 4}
        config = replace(configuration(llama(), **asked), planner=planner)
        with pytest.raises(CapacityError) as error:
            plan_memory(config, llama(), H200)
        [found] = [words for words in advised(error.value) if words.startswith("kv.cpu_gib=")]
        size = float(found.split("=")[1])
        plan = plan_memory(replace(config, kv=KVConfig(cpu_gib=size)), llama(), H200)
        check_plan(plan, llama())
        with pytest.raises(CapacityError):
            plan_memory(replace(config, kv=KVConfig(cpu_gib=size - 0.6)), llama(), H200)
