"""What restoring quantised weights costs, by what they are."""

from dataclasses import replace
from typing import Any

import pytest

from engine.model.schemes import GGUF_TYPES
from engine.plan.planner import plan_memory
from engine.plan.rates import Rates
from engine.plan.times import decode_step_s, shape_of
from engine.plan.weight_times import RESTORING_WORK
from kernels.arguments import QUANTISED_KINDS
from tests.engine.specs import H200, OLMO_7B, configuration

AWQ = {"layout": "awq", "bits": 4, "group": 128}


def scheme_of(word: str) -> dict[str, Any]:
    return {"layout": f"gguf-{word.lower()}", "bits": int(word[1]), "group": GGUF_TYPES[word][0]}


def step_s(scheme: dict[str, Any], batch: int) -> float:
    method = "awq" if scheme is AWQ else "gguf"
    spec = replace(OLMO_7B, quantization={"method": method, "schemes": [scheme]})
    plan = plan_memory(configuration(spec, memory_gib=40), spec, H200)
    assert plan.placed_bytes()["resident"] == sum(plan.placed_bytes().values())
    assert plan.predicted is not None
    rates = Rates(**plan.predicted["rates"])
    return decode_step_s(shape_of(plan, spec, rates), batch, 256)


def test_every_kind_has_its_work() -> None:
    assert {kind.removesuffix("+sub") for kind in RESTORING_WORK} == set(QUANTISED_KINDS)


@pytest.mark.parametrize("word", GGUF_TYPES)
def test_types_of_gguf_files_take_as_long_as_awq_or_longer(word: str) -> None:
    ratio = step_s(scheme_of(word), 16) / step_s(AWQ, 16)
    assert 0.98 < ratio < 2.0
    assert (ratio > 1.05) == (word != "Q4_0")
