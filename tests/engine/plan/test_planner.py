"""Plans: every byte is counted, what is planned fits, refusals carry figures and sound advice."""

import re
from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.asked.config import EngineConfig, GPUConfig, PlannerConfig
from engine.asked.offload import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from engine.errors import CapacityError
from engine.model.spec import ModelSpec
from engine.plan.planner import plan_memory
from tests.engine.specs import (
    CPU,
    GIB,
    H200,
    NO_PIN,
    NO_UVA,
    OLMO_7B,
    advised,
    check_plan,
    configuration,
    model_specs,
    plan_olmo,
    plan_small,
    prefetch,
    uva,
)
from tests.slow import slow

# The 7B model on a card of 16 GB.


def test_olmo_7b_resident_is_refused_on_16_gb() -> None:
    with pytest.raises(CapacityError) as error:
        plan_olmo()
    text = str(error.value)
    assert text.startswith(
        "test does not fit H200: 2.45 GiB short (needs 2.00 GiB of KV for 4,096 tokens, has -0.45 "
        "GiB).\nBest fix   offload=auto "
    )
    assert "Budget     14.39 GiB of GPU memory: weights 13.59 GiB, " in text
    assert max(map(len, text.splitlines()[1:])) <= 80
    words = advised(error.value)
    assert [item.split("=")[0] for item in words] == [
        *("offload", "offload.uva.cpu_offload_gb", "offload")
    ]
    assert "offload.prefetch.offload_group_size=8" in words[2]
    assert error.value.plan is not None
    assert error.value.plan["placements"]["resident"] == OLMO_7B.weight_bytes()  # type: ignore[index]


@pytest.mark.parametrize("offload", [uva(8), prefetch(8, 5, 2)], ids=["uva", "prefetch"])
def test_olmo_7b_offloaded_fits_16_gb(offload: Any) -> None:
    plan = plan_olmo(offload=offload)
    assert plan.gpu_total_bytes <= plan.gpu_budget_bytes == int(int(15.99 * GIB) * 0.9)
    assert plan.kv_tokens >= 4096
    assert not any("not needed" in note for note in plan.notes)
    placed = plan.placed_bytes()
    assert sum(placed.values()) == OLMO_7B.weight_bytes()


def test_olmo_7b_prefetch_moves_twenty_layers_a_step() -> None:
    plan = plan_olmo(offload=prefetch(8, 5, 2))
    layers = [layer.index for layer in plan.offloaded_layers]
    assert layers == [i for i in range(32) if i % 8 >= 3]
    layer_bytes = plan.layers[3].offloaded_bytes
    assert (plan.num_slots, plan.slot_bytes) == (3, layer_bytes)
    assert plan.bytes_per_step() == 20 * layer_bytes


# Figures and advice.


OLMO_ON_16_GB = {"gpu_memory_utilization": 0.85, "max_model_len": 4096}


def follow(config: EngineConfig, advice: str) -> EngineConfig:
    """Apply one alternative of a refusal."""
    fields = dict(part.split("=", 1) for part in advice.split())
    is_uva = any(name.startswith("offload.uva.") for name in fields)
    kind, parts = fields.pop("offload", "uva" if is_uva else ""), dict[str, dict[str, Any]]()
    for name, value in fields.items():
        section, _, field = name.rpartition(".")
        parts.setdefault(section, {})[field] = yaml.safe_load(value)
    if kind:
        offload = OffloadConfig(
            offload_backend="auto" if kind == "none" else kind,
            uva=UVAOffloadConfig(**parts.pop("offload.uva", {})),
            prefetch=PrefetchOffloadConfig(**parts.pop("offload.prefetch", {})),
        )
        planner = replace(config.planner, choose=kind == "auto", **parts.pop("planner", {}))
        config = replace(config, offload=offload, planner=planner)
    changed = {name: replace(getattr(config, name), **values) for name, values in parts.items()}
    return replace(config, **changed)


def test_a_refusal_for_host_memory_says_that_nothing_need_be_moved() -> None:
    facts = replace(H200, host_available_bytes=8 * GIB)
    config = configuration(OLMO_7B, memory_gib=40, offload=prefetch(1))
    with pytest.raises(CapacityError, match="host memory") as error:
        plan_memory(config, OLMO_7B, facts)
    [advice] = advised(error.value)
    assert advice == "offload=none"
    assert not plan_memory(follow(config, advice), OLMO_7B, facts).offloaded_layers


@settings(max_examples=30, deadline=None)
@given(
    spec=model_specs(),
    share=st.floats(0.05, 1.3),
    kind=st.sampled_from(["cpu", "cuda"]),
    gaps=st.sampled_from([{}, NO_UVA, NO_PIN]),
    host_share=st.sampled_from([0.3, 1.0, 5.0]),
    sizes=st.sampled_from(
        [{}, {}, {"swap_space": 0.5}, {"cpu_gib": 0.1}, {"num_cpu_blocks": 3}, {"cpu_gib": 2}]
    ),
    block_size=st.sampled_from([8, 16, 128]),
)
@pytest.mark.thorough
def test_advice_fits_when_it_is_followed(
    spec: ModelSpec,
    share: float,
    kind: str,
    gaps: dict[str, Any],
    host_share: float,
    sizes: dict[str, float],
    block_size: int,
) -> None:
    weights = spec.weight_bytes() / GIB
    facts = replace(
        H200 if kind == "cuda" else CPU,
        host_available_bytes=int((3 + 2 * weights) * host_share * GIB),
    )
    facts = replace(facts, **gaps)
    config = configuration(
        spec,
        memory_gib=weights * share + 1.2,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        kv={**sizes, "block_size": block_size},
    )
    try:
        plan = plan_memory(config, spec, facts)
    except CapacityError as error:
        for advice in advised(error):
            check_plan(plan_memory(follow(config, advice), spec, facts), spec)
    else:
        check_plan(plan, spec)


@settings(max_examples=30, deadline=None)
@given(
    spec=model_specs(),
    step=st.integers(1, 50),
    group=st.integers(1, 40),
    data=st.data(),
    gaps=st.sampled_from([{}, NO_UVA, NO_PIN]),
)
def test_plans_of_every_placement_account_for_all(
    spec: ModelSpec, step: int, group: int, data: st.DataObject, gaps: dict[str, Any]
) -> None:
    group = min(group, spec.num_hidden_layers)
    num = data.draw(st.integers(1, group))
    offload = data.draw(
        st.sampled_from([None, uva(0.01), uva(1000), uva(1000, "mlp"), prefetch(group, num, step)])
    )
    facts = replace(CPU, host_available_bytes=2**50, **gaps)
    config = configuration(
        spec, offload=offload, memory_gib=4000, max_num_seqs=4, max_num_batched_tokens=300
    )
    plan = plan_memory(config, spec, facts)
    check_plan(plan, spec)
    num_moved = len(plan.offloaded_layers)
    kind = plan.offloaded_layers[0].units[0].residence.name if num_moved else "resident"
    expected = {
        "resident": 0,
        "uva": min(2, num_moved),
        "prefetch": min(step + 1, num_moved),
        "on_demand": 1,
    }
    assert plan.num_slots == expected[kind]
    assert {unit.residence.name for layer in plan.layers for unit in layer.units} <= {kind}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["uva", "prefetch"])
def test_advice_takes_back_selectors_that_hold_too_little(kind: str) -> None:
    offload = uva(14, "k_proj") if kind == "uva" else prefetch(8, 8, 1, "k_proj")
    config = configuration(OLMO_7B, memory_gib=15.99, offload=offload, **OLMO_ON_16_GB)
    with pytest.raises(CapacityError) as error:
        plan_memory(config, OLMO_7B, H200)
    taken = [item for item in advised(error.value) if "_params=[]" in item]
    assert [item.split("=")[0] for item in taken] == (
        ["offload", "offload.uva.cpu_offload_gb"] if kind == "uva" else ["offload", "offload"]
    )
    for item in taken:
        plan_memory(follow(config, item), OLMO_7B, H200)


def test_a_refusal_gives_negative_room_and_every_part() -> None:
    with pytest.raises(CapacityError) as error:
        plan_olmo(memory_gib=10)
    text = str(error.value)
    found = re.search(r", has (-[\d.]+) GiB\)", text)
    assert found
    words = " ".join(text.partition("\nBudget")[2].split())
    budget, parts = words.rstrip(".").split(" of GPU memory: ")
    sizes = [part.split()[-2:] for part in (budget, *parts.split(", "))]
    first, *taken = [float(size) / (1 if unit == "GiB" else 1024) for size, unit in sizes]
    assert float(found[1]) == pytest.approx(first - sum(taken), abs=0.05)
    assert error.value.plan is not None
    assert error.value.plan["gpu"]["free_bytes"] < 0  # type: ignore[index]
    assert error.value.plan["kv"]["num_gpu_blocks"] == 0  # type: ignore[index]


def test_a_shorter_length_is_advised_where_it_fits() -> None:
    with pytest.raises(CapacityError) as error:
        plan_olmo(memory_gib=17)
    [length] = [a for a in advised(error.value) if a.startswith("engine.max_model_len")]
    assert 16 <= int(length.split("=")[1]) < 4096


def test_a_larger_card_is_advised_where_nothing_else_helps() -> None:
    spec = replace(OLMO_7B, num_hidden_layers=1)
    config = configuration(spec, memory_gib=1.0)
    with pytest.raises(CapacityError) as error:
        plan_memory(config, spec, H200)
    found = advised(error.value)
    assert [advice.split("=")[0] for advice in found] == ["gpu.memory_gib"]
    smaller = replace(H200, free_bytes=int(1.5 * GIB))
    with pytest.raises(CapacityError, match="No single change makes it fit: lower") as error:
        plan_memory(config, spec, smaller)
    [size] = re.findall(r"a card of ([\d.]+) GiB", " ".join(str(error.value).split()))
    larger = replace(H200, free_bytes=8 * GIB)
    plan_memory(replace(config, gpu=GPUConfig(memory_gib=float(size))), spec, larger)
    less = GPUConfig(memory_gib=float(size) - 0.01)
    with pytest.raises(CapacityError):
        plan_memory(replace(config, gpu=less), spec, larger)


def test_limits_of_a_step_are_advised_together_with_offload() -> None:
    """On a card on which neither fits alone."""
    settings = {"max_model_len": 256, "max_num_seqs": 64, "max_num_batched_tokens": 8192}
    config = configuration(OLMO_7B, memory_gib=3, **settings)
    card = replace(H200, free_bytes=3 * GIB)
    with pytest.raises(CapacityError) as error:
        plan_memory(config, OLMO_7B, card)
    assert "No single change" not in str(error.value)
    first = advised(error.value)[0]
    words, tokens = first.rsplit("=", 1)
    assert words == "offload=auto engine.max_num_batched_tokens"
    engine = replace(config.engine, max_num_batched_tokens=int(tokens))
    chosen = replace(config.choosing(), engine=engine)
    assert plan_memory(chosen, OLMO_7B, card).holds_one


@pytest.mark.thorough
@pytest.mark.parametrize("is_followed", [False, slow(True)])
def test_limits_of_a_step_are_advised_where_no_offload_is_enough(is_followed: bool) -> None:
    settings = {"max_model_len": 256, "max_num_seqs": 64, "max_num_batched_tokens": 8192}
    config = configuration(OLMO_7B, memory_gib=3, **settings)
    config = replace(config, planner=PlannerConfig(choose=True))
    with pytest.raises(CapacityError) as error:
        plan_memory(config, OLMO_7B, H200)
    found = advised(error.value)
    assert [advice.split("=")[0] for advice in found] == [
        "engine.max_num_batched_tokens",
        "engine.gpu_memory_utilization",
        "gpu.memory_gib",
    ]
    if not is_followed:
        return
    for advice, step in zip(found, (16, -0.01, -0.01), strict=True):
        plan_memory(follow(config, advice), OLMO_7B, H200)
        name, value = advice.split("=")
        beyond = round(yaml.safe_load(value) + step, 2)
        with pytest.raises(CapacityError):
            plan_memory(follow(config, f"{name}={beyond}"), OLMO_7B, H200)


@pytest.mark.thorough
def test_the_least_uva_that_is_advised_is_the_least() -> None:
    config = configuration(OLMO_7B, memory_gib=15.9921875, **OLMO_ON_16_GB)
    with pytest.raises(CapacityError) as error:
        plan_memory(config, OLMO_7B, H200)
    [least] = [float(x.split("=")[-1]) for x in advised(error.value) if "uva" in x]
    plan_memory(replace(config, offload=uva(least)), OLMO_7B, H200)
    with pytest.raises(CapacityError):
        plan_memory(replace(config, offload=uva(round(least - 0.01, 2))), OLMO_7B, H200)


def test_kv_room_of_exactly_one_sequence_is_enough_and_a_byte_less_is_not() -> None:
    plan = plan_small()
    need = 4 * plan.block_bytes
    budget = plan.gpu_total_bytes - plan.gpu_items["kv_cache"] + need
    exact = plan_small(memory_gib=budget / GIB, gpu_memory_utilization=1.0)
    assert (exact.num_gpu_blocks, exact.gpu_total_bytes) == (4, budget)
    with pytest.raises(CapacityError, match="1 bytes short"):
        plan_small(memory_gib=(budget - 1) / GIB, gpu_memory_utilization=1.0)


def test_kv_takes_no_more_than_all_sequences_can_use() -> None:
    plan = plan_small(memory_gib=1.0)
    assert plan.num_gpu_blocks == 4 * 4
    assert plan_small(memory_gib=1.0, max_model_len=65).num_gpu_blocks == 4 * 5


def test_a_budget_above_what_is_free_is_refused() -> None:
    facts = replace(H200, free_bytes=20 * GIB)
    config = configuration(OLMO_7B, memory_gib=40, gpu_memory_utilization=0.9)
    with pytest.raises(CapacityError) as error:
        plan_memory(config, OLMO_7B, facts)
    for part in ("20.00 GiB", "36.00 GiB", "H200", "gpu.memory_gib"):
        assert part in str(error.value)


def test_without_memory_gib_the_card_is_the_budget() -> None:
    plan = plan_memory(configuration(OLMO_7B), OLMO_7B, H200)
    assert plan.gpu_budget_bytes == int(H200.total_bytes * 0.9)


def test_an_offload_that_is_not_needed_is_noted() -> None:
    for offload in (uva(0.001), prefetch(2)):
        notes = plan_small(memory_gib=0.1, offload=offload).notes
        assert any("is not needed" in note and "offload=none" in note for note in notes)


@pytest.mark.parametrize("link_gb_s", [1.0, 1e6])
def test_a_cost_that_is_none_is_not_told_as_one(link_gb_s: float) -> None:
    asked = configuration(OLMO_7B, memory_gib=60, offload=prefetch(8))
    asked = replace(asked, gpu=replace(asked.gpu, link_gb_s=link_gb_s))
    text = " ".join(plan_memory(asked, OLMO_7B, H200).notes)
    assert "over the link needlessly" in text
    assert ("A decode step takes about as long" in text) == (link_gb_s == 1e6)
    assert not re.search(r"takes about -?0(\.0*)? ms", text)
