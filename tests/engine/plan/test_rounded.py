"""The row of 4 bits in answers and refusals: where plain weights do not fit and rounded ones do."""

import re
from dataclasses import replace
from typing import Any

import pytest

from engine.errors import CapacityError, ConfigError
from engine.model.loading import weight_formats
from engine.plan.planner import answer, plan_memory
from tests.engine.specs import H200, OLMO_7B, configuration, moe_spec, uva

ROW = re.compile(r"4-bit +(\S+)(?: (?=[\d.]+ tok/s)| +)([\d.]+) tok/s")


def refused(**asked: Any) -> CapacityError:
    config = configuration(OLMO_7B, **asked)
    with pytest.raises(CapacityError) as caught:
        plan_memory(config, OLMO_7B, H200)
    return caught.value


def test_a_refusal_has_the_rate_of_4_bits_and_recommends_it_not() -> None:
    error = refused(memory_gib=12)
    text = " ".join(str(error).split())
    found = ROW.search(text)
    assert found is not None
    assert found[1] == "model.quantize=int4"
    assert "tokens differ from" in text
    assert error.plan is not None
    assert not any("quantize" in " ".join(way["settings"]) for way in error.plan["ways"])
    config = configuration(OLMO_7B, memory_gib=12)
    rounded = replace(config, model=replace(config.model, quantize="int4"))
    plan = plan_memory(rounded, OLMO_7B, H200)
    assert plan.predicted is not None
    assert float(found[2]) == pytest.approx(plan.predicted["decode_tokens_s"], rel=0.01)
    assert plan.placed_bytes()["resident"] == sum(plan.placed_bytes().values())


def test_a_plan_that_offloads_names_4_bits_and_one_that_does_not_names_none() -> None:
    offloads = configuration(OLMO_7B, memory_gib=12, offload=uva(8))
    lines = "\n".join(answer(offloads, OLMO_7B, H200).lines)
    assert re.search(r"4-bit +offload=none", lines)
    assert "model.quantize=int4" in lines
    resident = configuration(OLMO_7B, memory_gib=24)
    assert not any("4-bit" in line for line in answer(resident, OLMO_7B, H200).lines)


@pytest.mark.thorough
def test_no_row_where_4_bits_do_not_fit_or_are_ruled_out() -> None:
    assert "4-bit" not in str(refused(memory_gib=4))
    quantised = {"method": "awq", "schemes": [{"layout": "awq", "bits": 4, "group": 128}]}
    spec = replace(OLMO_7B, quantization=quantised)
    config = configuration(spec, memory_gib=4)
    with pytest.raises(CapacityError) as caught:
        plan_memory(config, spec, H200)
    assert "4-bit" not in str(caught.value)
    lossless = configuration(OLMO_7B, memory_gib=8)
    lossless = replace(lossless, engine=replace(lossless.engine, weight_format="lossless"))
    with pytest.raises(CapacityError) as caught:
        plan_memory(lossless, OLMO_7B, H200)
    assert "4-bit" not in str(caught.value)


def test_experts_that_cannot_be_rounded_are_refused_with_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"got int4 and 33 rows\. Remove model\.quantize\."):
        weight_formats("int4", moe_spec(moe_intermediate_size=33), "bfloat16")
