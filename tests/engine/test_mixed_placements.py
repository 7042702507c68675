"""Embedding in place beside copied layers, whole or in part, and chosen placements: same tokens."""

from dataclasses import replace
from typing import Any

import pytest

from engine import LLM
from engine.model.spec import ModelSpec
from engine.plan import planner
from engine.plan.memory import MemoryPlan
from engine.plan.policy import Assignment, assign_resident, spread_layers
from engine.plan.units import ON_DEMAND, PREFETCH, UVA
from engine.weights.residence import SlotRing
from tests.engine.conftest import TinyModels
from tests.engine.faults import leave_stale
from tests.engine.placements import (
    FEW_TOKENS,
    MAX_TOKENS,
    OF_ANY,
    PROMPTS,
    Residents,
    copies,
)
from tests.slow import slow
from tests.tiny import greedy, greedy_params

LAYERS = 5
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MLP = ("mlp.gate_up_proj.weight", "mlp.down_proj.weight")


@pytest.fixture(scope="module")
def residents(tiny: TinyModels) -> Residents:
    return Residents(tiny)


def mixed(spec: ModelSpec, outer: tuple[str, ...], count: int, lookahead: int) -> Assignment:
    """`outer` read in place, the MLPs of some layers copied ahead, the last one in part."""
    placements = assign_resident(spec).placements
    placements |= dict.fromkeys(outer, UVA)
    layers = spread_layers(spec.num_hidden_layers, count)
    for layer in layers:
        for name in MLP[:1] if layer == layers[-1] else MLP:
            placements[f"model.layers.{layer}.{name}"] = PREFETCH
    return Assignment(placements, lookahead)


def check_steps(llm: LLM) -> None:
    """Every decode step copies what the plan says, and reads the head in place where it is off."""
    plan = llm.plan
    llm.add_request(PROMPTS[1], greedy_params(4))
    in_place = 0
    if plan.placements.get(HEAD) is UVA:
        [head] = [t for t in plan.outer_offloaded.tensors if t.name == HEAD]
        in_place = head.numel * 4
    num_decodes = 0
    while llm.has_unfinished():
        llm.step()
        step = llm.last_step
        if step is None or step.num_prefill_tokens or not step.num_decode_tokens:
            continue
        num_decodes += 1
        assert step.h2d_bytes == plan.bytes_per_step() - in_place
        assert step.in_place_bytes == in_place
    assert num_decodes >= 2


@pytest.mark.thorough_but("outer1")
@pytest.mark.parametrize("eager", [False, slow(True)], ids=["late copies", "early copies"])
@pytest.mark.parametrize(
    ("outer", "count", "lookahead"),
    [((EMBED,), 3, 1), ((EMBED,), 5, 1), ((EMBED, HEAD), 4, 2), ((EMBED,), 2, 3)],
)
def test_tokens_are_those_of_everything_resident(
    residents: Residents,
    outer: tuple[str, ...],
    count: int,
    lookahead: int,
    eager: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = residents.tokens(LAYERS)
    copies(monkeypatch, eager=eager)
    monkeypatch.setattr(planner, "assign", lambda spec, *_: mixed(spec, outer, count, lookahead))
    llm = residents.open(LAYERS)
    assert llm.plan.placements[EMBED] is UVA
    assert {unit.residence for x in llm.plan.layers for unit in x.units} == {PREFETCH}
    assert greedy(llm, PROMPTS, MAX_TOKENS) == expected
    check_steps(llm)
    assert greedy(llm, PROMPTS[1:2], MAX_TOKENS) == expected[1:2]
    llm.close()


@pytest.fixture
def tight(residents: Residents) -> dict[str, Any]:
    """A budget in which not all weights have room beside one sequence."""
    llm = residents.open(LAYERS)
    plan: MemoryPlan = llm.plan
    llm.close()
    other = plan.gpu_total_bytes - plan.gpu_items["kv_cache"] - plan.gpu_items["weights"]
    kv = plan.block_bytes * 64 // plan.block_size
    budget = other + kv + int(0.8 * plan.gpu_items["weights"])
    return {"gpu_memory_gib": budget / 2**30, "gpu_memory_utilization": 1.0}


@pytest.mark.thorough_but("latency")
@pytest.mark.parametrize(
    ("objective", "switch"),
    [
        (objective, switch) if at == other else slow(objective, switch)
        for at, objective in enumerate(["latency", "throughput", "context"])
        for other, switch in enumerate(["", "TIGHTFIT_DISABLE_UVA", "TIGHTFIT_DISABLE_PIN_MEMORY"])
    ],
)
def test_chosen_placements_give_the_same_tokens(
    residents: Residents,
    tight: dict[str, Any],
    objective: str,
    switch: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if switch:
        monkeypatch.setenv(switch, "1")
    if objective == "context":
        tight = tight | {"auto_fields": ["max_model_len"]}
    llm = residents.open(LAYERS, choose=True, objective=objective, **tight)
    plan = llm.plan
    assert sum(plan.placed_bytes().values()) > plan.placed_bytes()["resident"]
    assert (plan.placements[EMBED] is UVA) is not bool(switch)
    assert plan.choice is not None
    assert greedy(llm, PROMPTS, MAX_TOKENS) == residents.tokens(LAYERS)
    assert llm.effective()["backend"] == "auto"
    assert bool(switch) is bool(llm.effective()["fallbacks"])
    llm.close()


def test_nothing_is_chosen_where_all_fits(residents: Residents) -> None:
    llm = residents.open(LAYERS, choose=True)
    assert llm.plan.offloaded_layers == ()
    assert llm.plan.choice is not None
    assert llm.plan.to_dict()["predicted"]["rates"]["source"].startswith("assumed for a CPU")
    config = replace(llm.config, measured_rates={"h2d_gb_s": 3.0, "d2h_gb_s": None})
    llm.close()
    again = LLM.plan_for(config)
    assert again.predicted is not None
    assert again.predicted["rates"]["h2d_gb_s"] == 3.0
    assert FEW_TOKENS["max_model_len"] == again.max_model_len


PRODUCTS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


def patchwork(spec: ModelSpec) -> Assignment:
    """Each product of a layer in another residence, and in the next layer in the next one."""
    placements = assign_resident(spec).placements
    for layer in range(spec.num_hidden_layers):
        for at, name in enumerate(PRODUCTS):
            place = OF_ANY[(layer + at) % len(OF_ANY)]
            placements[f"model.layers.{layer}.{name}.weight"] = place
    return Assignment(placements, lookahead=1)


@pytest.mark.thorough_but("prompts staged-late copies", "never staged-early copies")
@pytest.mark.parametrize("eager", [False, True], ids=["late copies", "early copies"])
@pytest.mark.parametrize("stage_tokens", [4, 2**20], ids=["prompts staged", "never staged"])
def test_a_layer_holds_units_of_every_residence(
    residents: Residents, stage_tokens: int, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = residents.tokens(LAYERS)
    copies(monkeypatch, eager=eager)
    monkeypatch.setattr(planner, "assign", lambda spec, *_: patchwork(spec))
    llm = residents.open(LAYERS, uva_stage_tokens=stage_tokens)
    plan = llm.plan
    assert [unit.residence for unit in plan.layers[0].units] == [UVA, PREFETCH, ON_DEMAND]
    assert {slots.residence for slots in plan.slots} == {UVA, PREFETCH, ON_DEMAND}
    assert greedy(llm, PROMPTS, MAX_TOKENS) == expected
    placed = llm.effective()["placement_bytes"]
    assert min(placed[place.name] for place in OF_ANY) > 0
    llm.add_request(PROMPTS[1], greedy_params(4))
    moved = []
    while llm.has_unfinished():
        llm.step()
        step = llm.last_step
        if step is not None and step.num_decode_tokens and not step.num_prefill_tokens:
            moved.append((step.h2d_bytes, step.in_place_bytes))
    assert len(moved) >= 2
    assert set(moved) == {plan.moved_per_step()}
    llm.close()


def test_control_a_stale_unit_of_one_residence_changes_tokens(
    residents: Residents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products copied ahead of one layer stay those of another."""
    expected = residents.tokens(LAYERS)
    monkeypatch.setattr(planner, "assign", lambda spec, *_: patchwork(spec))
    monkeypatch.setattr(SlotRing, "_start", leave_stale(3))
    llm = residents.open(LAYERS)
    assert greedy(llm, PROMPTS, MAX_TOKENS) != expected
    llm.close()
