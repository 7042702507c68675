"""Refusals of choices: what they advise was planned, and fits where it is followed."""

import re
from dataclasses import replace

import pytest

from engine.errors import CapacityError
from engine.plan.planner import plan_memory
from tests.engine.plan.test_choose import OLMO, choose
from tests.engine.specs import CPU, GIB, H200, OLMO_7B, advised, configuration


@pytest.mark.thorough
def test_where_host_memory_alone_is_short_no_card_is_advised() -> None:
    facts = replace(CPU, host_available_bytes=2 * GIB)
    tiny = replace(
        OLMO_7B, num_hidden_layers=2, hidden_size=64, intermediate_size=64, vocab_size=96
    )
    with pytest.raises(CapacityError) as error:
        choose(tiny, 0.5, facts, max_num_seqs=2, max_num_batched_tokens=64, host_reserve_gib=1000)
    assert "memory_gib" not in str(error.value)
    [advice] = advised(error.value)
    assert advice.startswith("engine.host_reserve_gib=")
    reserve = float(advice.split("=")[1])
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 64}
    choose(tiny, 0.5, facts, host_reserve_gib=reserve, **limits)
    with pytest.raises(CapacityError):
        choose(tiny, 0.5, facts, host_reserve_gib=reserve + 0.02, **limits)


def test_a_budget_of_next_to_nothing_is_refused_with_figures() -> None:
    with pytest.raises(CapacityError) as error:
        choose(OLMO_7B, 0.005, H200, **OLMO)
    assert re.fullmatch(r"gpu\.memory_gib=4\.\d+", advised(error.value)[0])


@pytest.mark.thorough
def test_advice_to_choose_placements_can_be_followed_beside_a_chosen_size() -> None:
    config = configuration(OLMO_7B, memory_gib=6, **OLMO)
    planner = replace(config.planner, auto_fields=["cpu_offload_gb"])
    with pytest.raises(CapacityError) as error:
        plan_memory(replace(config, planner=planner), OLMO_7B, H200)
    words = "offload=auto planner.auto_fields=[]"
    assert advised(error.value)[0] == words
    config = configuration(OLMO_7B, memory_gib=4, **OLMO)
    with pytest.raises(CapacityError) as error:
        plan_memory(replace(config, planner=planner), OLMO_7B, H200)
    assert re.fullmatch(re.escape(words) + r" engine\.max_model_len=\d{4}", advised(error.value)[0])


def test_where_no_host_memory_is_short_no_smaller_card_is_advised() -> None:
    tiny = replace(
        OLMO_7B, num_hidden_layers=2, hidden_size=64, intermediate_size=64, vocab_size=96
    )
    limits = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    config = configuration(tiny, memory_gib=0.0001, **limits)
    with pytest.raises(CapacityError) as error:
        plan_memory(config, tiny, CPU)
    assert sum("gpu.memory_gib=" in words for words in advised(error.value)) == 1
