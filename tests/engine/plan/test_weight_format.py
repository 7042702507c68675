"""engine.weight_format: what is refused, what auto chooses, what plans and records hold of it."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import yaml

from catalogue.files import CONF
from engine.asked.config import EngineConfig, GPUConfig, PlannerConfig
from engine.errors import CapacityError, ConfigError
from engine.model.formats import EMBEDDING, HEAD, align
from engine.model.lossless import lossless_formats
from engine.model.spec import ModelSpec
from engine.plan.advise import off_gpu_bytes
from engine.plan.cards import CARDS, DeviceFacts
from engine.plan.memory import MemoryPlan
from engine.plan.planner import asked_of, plan_memory
from engine.plan.policy import Assignment, assign_resident, spread_layers
from engine.plan.rates import Rates, sheet_rates
from engine.plan.sizes import restore_bytes
from engine.plan.times import decode_step_s, prefill_s, shape_of
from engine.plan.units import PREFETCH, RESIDENT, UVA
from engine.plan.weight_format import CODES_WORTH, MIXED, best_mix
from engine.plan.weight_times import LOSSLESS_MOST_GB_S
from engine.sealed import GIB
from tests.engine.plan.test_choose import conf_spec
from tests.engine.specs import (
    CPU,
    H200,
    OLMO_7B,
    advised,
    at,
    configuration,
    prefetch,
    small_spec,
    uva,
)
from tests.slow import slow

AUTO = PlannerConfig(choose=True)
LIMITS: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 32}
FITTING = small_spec(hidden_size=64, intermediate_size=128, vocab_size=512)


def card(name: str) -> GPUConfig:
    """A card of conf/gpu."""
    return GPUConfig(**yaml.safe_load((CONF / "gpu" / f"{name}.yaml").read_text()))


def on_card(name: str, planner: PlannerConfig | None = None, **settings: Any) -> MemoryPlan:
    gpu = card(name)
    if "memory_gib" in settings:
        gpu = replace(gpu, memory_gib=settings.pop("memory_gib"))
    config = configuration(OLMO_7B, **(LIMITS | {"weight_format": None} | settings))
    config = replace(config, gpu=gpu, planner=planner or PlannerConfig())
    return plan_memory(config, OLMO_7B, DeviceFacts.of_card(gpu))


def asked(word: str | None, **changes: Any) -> EngineConfig:
    settings = {"memory_gib": 40, "weight_format": word, **LIMITS}
    return configuration(OLMO_7B, **(settings | changes))


def chosen(plan: MemoryPlan) -> str:
    assert plan.weight_format is not None
    return str(plan.weight_format["chosen"])


def step_ms(plan: MemoryPlan) -> float:
    assert plan.predicted is not None
    return float(plan.predicted["decode_step_ms"])


@pytest.mark.thorough
def test_the_mix_that_takes_the_least_room_may_move_nothing() -> None:
    """In codes alone the largest tensor needs more room to be restored than codes save."""
    spec, gpu = conf_spec("llama31_8b_fp8"), card("rtx5090_laptop_24gb")
    config = configuration(spec, weight_format=None, max_num_seqs=256, max_model_len=81104)
    plan = plan_memory(replace(config, gpu=gpu, planner=AUTO), spec, DeviceFacts.of_card(gpu))
    assert plan.num_gpu_blocks * plan.block_size >= 81104


def test_the_format_that_is_not_set_is_the_checkpoint_s_unless_placements_are_chosen() -> None:
    config = asked(None)
    assert config.weight_format == "checkpoint"
    assert replace(config, planner=AUTO).weight_format == "auto"
    for word in ("checkpoint", "lossless", "auto"):
        assert replace(asked(word), planner=AUTO).weight_format == word
    with pytest.raises(ConfigError, match=r"engine\.weight_format: expected one of"):
        asked("codes")
    plain = plan_memory(config, OLMO_7B, H200)
    assert plain == plan_memory(asked("checkpoint"), OLMO_7B, H200)
    assert not plain.formats.others
    assert {"weight_format", "formats"}.isdisjoint(plain.to_dict())


def test_lossless_weights_are_counted_as_they_are_stored() -> None:
    plan, plain = (plan_memory(asked(x), OLMO_7B, H200) for x in ("lossless", "checkpoint"))
    assert set(plan.formats.others) == set(lossless_formats(OLMO_7B).others)
    record = plan.to_dict()["weight_format"]
    assert (record["asked"], record["chosen"], record["why"]) == (
        "lossless",
        "lossless",
        "engine.weight_format sets it",
    )
    codes, rest = record["formats"]["lossless12"], record["formats"]["bfloat16"]
    assert codes["tensors"] == 4 * 32 + 1
    assert codes["ratio"] == codes["bytes"] / codes["plain_bytes"] <= 0.755
    assert rest["bytes"] == rest["plain_bytes"]
    assert codes["bytes"] + rest["bytes"] == sum(plan.placed_bytes().values())
    assert codes["plain_bytes"] + rest["bytes"] == sum(plain.placed_bytes().values())
    assert record["plain_matrices"] == {"looked up by row": [EMBEDDING]}
    assert plan.gpu_items["weights"] < 0.77 * plain.gpu_items["weights"]


def test_cpu_offload_gb_and_the_link_count_codes() -> None:
    by_hand = {
        word: plan_memory(asked(word, offload=uva(4)), OLMO_7B, H200)
        for word in ("lossless", "checkpoint")
    }
    placed = {word: plan.placed_bytes()["uva"] for word, plan in by_hand.items()}
    moved = {w: [n for n, p in plan.placements.items() if p is UVA] for w, plan in by_hand.items()}
    assert all(4 * GIB <= size < 4.2 * GIB for size in placed.values())
    assert len(moved["lossless"]) > 1.25 * len(moved["checkpoint"])
    ahead = {
        word: plan_memory(asked(word, offload=prefetch(8, 5, 2)), OLMO_7B, H200)
        for word in ("lossless", "checkpoint")
    }
    share = ahead["lossless"].bytes_per_step() / ahead["checkpoint"].bytes_per_step()
    assert 0.75 < share < 0.755
    assert ahead["lossless"].slot_bytes < 0.755 * ahead["checkpoint"].slot_bytes
    assert ahead["lossless"].host_items["pinned_weights"] == sum(
        layer.offloaded_bytes for layer in ahead["lossless"].offloaded_layers
    )


@pytest.mark.parametrize(
    ("spec", "changes", "facts", "words"),
    [
        (replace(FITTING, dtype="float16"), {}, {}, "computed with in bfloat16, got float16"),
        (FITTING, {"dtype": "float32"}, {}, r"got float32 \(engine\.dtype=bfloat16 keeps"),
        (FITTING, {"dtype": "float16"}, {}, "got float16"),
        (small_spec(hidden_size=48, intermediate_size=100), {}, {}, "16 rows and of 64 columns"),
        (FITTING, {}, {"compute_capability": (7, 5)}, r"capability 8\.0 or more, got 7\.5 of"),
    ],
)
def test_what_has_no_use_of_codes_is_refused_and_left_plain_by_auto(
    spec: ModelSpec, changes: dict[str, Any], facts: dict[str, Any], words: str
) -> None:
    limits = {"memory_gib": 4, "max_num_seqs": 4}
    machine = replace(H200, **facts)
    config = configuration(spec, weight_format="lossless", **limits, **changes)
    with pytest.raises(ConfigError, match=rf"engine\.weight_format=lossless: expected .*{words}"):
        plan_memory(config, spec, machine)
    plan = plan_memory(
        configuration(spec, weight_format="auto", **limits, **changes), spec, machine
    )
    assert not plan.formats.others
    assert chosen(plan) == "checkpoint"
    assert plan_memory(config, spec, machine, reference=True).weight_format is None


def test_a_cpu_needs_a_dtype_that_codes_hold() -> None:
    config = configuration(FITTING, memory_gib=1, weight_format="lossless")
    with pytest.raises(ConfigError, match=r"engine\.dtype=bfloat16 keeps those of the checkpoint"):
        plan_memory(config, FITTING, CPU)
    config = configuration(FITTING, memory_gib=1, weight_format="lossless", dtype="bfloat16")
    assert plan_memory(config, FITTING, CPU).formats.others


def test_a_tied_table_is_kept_in_codes() -> None:
    spec = conf_spec("llama32_1b")
    config = configuration(spec, memory_gib=16, weight_format="lossless", **LIMITS)
    plan = plan_memory(config, spec, H200)
    assert EMBEDDING in plan.formats.others
    assert (plan.weight_format or {})["plain_matrices"] == {}


@pytest.mark.thorough
def test_olmo_7b_stays_on_a_16_gb_card_in_codes() -> None:
    with pytest.raises(CapacityError):
        on_card("rtx4080_16gb")
    plan = on_card("rtx4080_16gb", AUTO)
    assert chosen(plan) == "lossless"
    assert plan.bytes_per_step() == 0
    assert plan.offloaded_layers == ()
    assert plan.kv_tokens > 4600
    plain = on_card("rtx4080_16gb", AUTO, weight_format="checkpoint")
    assert plain.bytes_per_step() > GIB / 2
    assert step_ms(plain) > 1.2 * step_ms(plan)
    assert f"{step_ms(plain):.3g} ms plain" in (plan.weight_format or {})["why"]


@pytest.mark.parametrize("name", [slow("a100_80gb"), "h100_80gb"])
def test_where_both_fit_the_faster_one_is_chosen(name: str) -> None:
    plan, plain = on_card(name, AUTO), on_card(name, AUTO, weight_format="checkpoint")
    assert chosen(plan) == "lossless"
    assert step_ms(plain) > step_ms(plan)
    assert plan.offloaded_layers == plain.offloaded_layers == ()


@pytest.mark.thorough
def test_a_queue_on_a_fast_card_is_served_from_plain_weights() -> None:
    """Its steps have as many tokens as restoring weights in registers costs more than it reads."""
    planner = PlannerConfig(choose=True, objective="throughput")
    plan = on_card("h200_141gb", planner)
    assert chosen(plan) == "checkpoint"
    assert not plan.formats.others
    lossless = on_card("h200_141gb", planner, weight_format="lossless")
    totals = [(p.predicted or {})["queue"]["total_s"] for p in (plan, lossless)]
    assert totals[0] < totals[1]


def test_the_longest_sequence_is_that_of_codes() -> None:
    planner = PlannerConfig(choose=True, objective="context")
    plan = on_card("rtx4090_24gb", planner, max_model_len=None)
    plain = on_card("rtx4090_24gb", planner, max_model_len=None, weight_format="checkpoint")
    assert chosen(plan) == "lossless" or plan.longest_tokens == plain.longest_tokens
    assert plan.longest_tokens >= plain.longest_tokens


def test_what_fits_in_neither_format_is_refused() -> None:
    with pytest.raises(CapacityError, match="does not fit H200"):
        plan_memory(asked("auto", memory_gib=4), OLMO_7B, H200)


def test_tensors_that_codes_cannot_hold_stay_plain_and_are_named() -> None:
    reasons = {"model.layers.3.mlp.down_proj.weight": "900000 escapes", HEAD: "2 escapes"}
    plan = plan_memory(asked("lossless"), OLMO_7B, H200, unpackable=reasons)
    assert set(lossless_formats(OLMO_7B).others) - set(plan.formats.others) == set(reasons)
    kept = (plan.weight_format or {})["plain_matrices"]
    assert kept == {
        "looked up by row": [EMBEDDING],
        **{reason: [name] for name, reason in reasons.items()},
    }
    every = dict.fromkeys(lossless_formats(OLMO_7B).others, "escapes")
    for word in ("lossless", "auto"):
        assert not plan_memory(asked(word), OLMO_7B, H200, unpackable=every).formats.others


def test_room_for_restoring_holds_the_largest_matrix() -> None:
    formats = lossless_formats(OLMO_7B)
    size = {t.name: align(2 * t.numel) for t in OLMO_7B.tensors()}
    largest = size["model.layers.0.mlp.gate_up_proj.weight"]
    limits = {"max_tokens": 65, "max_rows": 64}
    assert restore_bytes(OLMO_7B, formats, **limits) == largest
    assert restore_bytes(OLMO_7B, formats, **(limits | {"max_tokens": 64})) == 0
    assert restore_bytes(OLMO_7B, lossless_formats(OLMO_7B, "float16"), **limits) == 0
    assert restore_bytes(OLMO_7B, formats, max_tokens=128, max_rows=65) == size[HEAD]
    only = {HEAD: formats.others[HEAD]}
    assert restore_bytes(OLMO_7B, replace(formats, others=only), **limits) == 0
    assert (
        restore_bytes(OLMO_7B, replace(formats, others=only), max_tokens=99, max_rows=99)
        == (size[HEAD])
    )
    plan = plan_memory(asked("lossless"), OLMO_7B, H200)
    assert plan.gpu_items["restore"] == largest
    few = plan_memory(asked("lossless", max_num_batched_tokens=64), OLMO_7B, H200)
    assert "restore" not in few.gpu_items


H200_RATES = replace(
    sheet_rates(CARDS["NVIDIA H200"], "sheet"), hbm_gb_s=4257.0, lossless_gb_s=4257.0 * 0.9
)


def products_us(tokens: int, rates: Rates = H200_RATES) -> float:
    """Microseconds of the products of a layer of OLMo-2-7B over codes, beside the rest of it."""
    shape = shape_of(plan_memory(asked("lossless"), OLMO_7B, H200), OLMO_7B, H200_RATES)
    bare = replace(rates, layer_overhead_s=0.0, step_overhead_s=0.0)
    none = replace(shape, head_bytes=0, head_packed=type(shape.head_packed)(), kv_layer_bytes=0)
    return decode_step_s(at(none, bare), tokens, 1) / 32 * 1e6


@pytest.mark.parametrize(
    ("tokens", "measured_us"), [(1, 80.0), (16, 85.0), (32, 101.6), (64, 137.4)]
)
def test_products_over_codes_take_what_was_measured(tokens: int, measured_us: float) -> None:
    assert products_us(tokens) == pytest.approx(measured_us, rel=0.05)


def test_a_slow_memory_is_what_bounds_products_over_codes() -> None:
    slow = replace(H200_RATES, hbm_gb_s=600.0, lossless_gb_s=540.0)
    assert products_us(64, slow) == pytest.approx(products_us(1, slow), rel=0.01)
    assert LOSSLESS_MOST_GB_S[-1][0] == 64


def test_what_restoring_carries_follows_the_card() -> None:
    """Slow memory hides it; of two cards with equal memory that with fewer cores takes longer."""
    for name in ("NVIDIA GeForce RTX 3060", "NVIDIA GeForce RTX 4090", "NVIDIA L4"):
        rates = sheet_rates(CARDS[name], "sheet")
        assert products_us(16, rates) == pytest.approx(products_us(1, rates), rel=0.03)
    quarter = replace(H200_RATES, bf16_tflops=H200_RATES.bf16_tflops / 4)
    more = replace(H200_RATES, bf16_tflops=H200_RATES.bf16_tflops * 4)
    assert products_us(32, quarter) == pytest.approx(2 * products_us(32), rel=0.03)
    assert products_us(32, more) == pytest.approx(products_us(32), rel=0.03)


def test_a_prompt_takes_longer_by_what_restoring_is_not_hidden() -> None:
    shapes = {
        word: shape_of(plan_memory(asked(word), OLMO_7B, H200), OLMO_7B, H200_RATES)
        for word in ("lossless", "checkpoint")
    }
    times = {word: prefill_s(shape, 2048) for word, shape in shapes.items()}
    packed = [each for _, each in shapes["lossless"].dense[RESIDENT]]
    restore_s = sum(p.plain for p in packed) / (H200_RATES.restore_gb_s * 1e9)
    assert 0 < times["lossless"] - times["checkpoint"] <= restore_s


def test_rates_of_a_probe_that_knew_no_codes_follow_from_its_memory() -> None:
    base = sheet_rates(CARDS["NVIDIA H200"], "sheet")
    older = base.measured({"hbm_copy_gb_s": 4000.0})
    assert older.lossless_gb_s == pytest.approx(3600.0)
    assert older.restore_gb_s == pytest.approx(2080.0)
    newer = base.measured({"hbm_copy_gb_s": 4000.0, "lossless_gb_s": 3700.0, "restore_gb_s": 2.1e3})
    assert (newer.lossless_gb_s, newer.restore_gb_s) == (3700.0, 2100.0)


def test_lossless_weights_are_advised_first_where_they_fit() -> None:
    with pytest.raises(CapacityError) as error:
        on_card("rtx4080_16gb")
    lossless = on_card("rtx4080_16gb", weight_format="lossless")
    assert advised(error.value)[0] == "engine.weight_format=lossless"
    text = " ".join(str(error.value).split())
    rate = f"{1e3 / step_ms(lossless):.3g} tok/s"
    assert f"Best fix engine.weight_format=lossless {rate} no layer leaves the" in text
    assert "same tokens" in text
    for settings in ({"weight_format": "checkpoint"}, {"dtype": "float16"}):
        with pytest.raises(CapacityError) as error:
            on_card("rtx4080_16gb", **settings)
        assert "lossless" not in str(error.value)


@pytest.mark.thorough
def test_lossless_weights_are_advised_first_where_fewer_leave_the_gpu() -> None:
    with pytest.raises(CapacityError) as error:
        on_card("rtx3060_12gb")
    chosen, plain = (
        on_card("rtx3060_12gb", AUTO, **settings)
        for settings in ({}, {"weight_format": "checkpoint"})
    )
    words = ["offload=auto", "offload=auto engine.weight_format=checkpoint"]
    assert advised(error.value)[:2] == words
    assert error.value.plan is not None
    ways: Any = error.value.plan["ways"]
    for way, plan in zip(ways, (chosen, plain), strict=False):
        assert way["tokens_s"] == pytest.approx(1e3 / step_ms(plan))
        assert way["host_weights_bytes"] == off_gpu_bytes(plan)


def with_uva(gib: float, name: str, **settings: Any) -> MemoryPlan:
    gpu = card(name)
    limits = LIMITS | {"weight_format": None} | settings
    config = replace(configuration(OLMO_7B, offload=uva(gib), **limits), gpu=gpu)
    return plan_memory(config, OLMO_7B, DeviceFacts.of_card(gpu))


@pytest.mark.thorough
def test_an_offload_that_is_enough_for_codes_alone_is_kept_in_the_advice() -> None:
    with pytest.raises(CapacityError) as error:
        with_uva(4, "rtx3060_12gb")
    plan = with_uva(4, "rtx3060_12gb", weight_format="lossless")
    assert error.value.plan is not None
    ways: Any = error.value.plan["ways"]
    [way] = [each for each in ways if each["settings"] == ["engine.weight_format=lossless"]]
    assert way["tokens_s"] == pytest.approx(1e3 / step_ms(plan))
    assert way["host_weights_bytes"] == off_gpu_bytes(plan)


def test_an_offload_that_lossless_weights_do_not_need_says_what_it_costs() -> None:
    plan = with_uva(5, "rtx4080_16gb")
    lossless = on_card("rtx4080_16gb", weight_format="lossless")
    [note] = [note for note in plan.notes if "is not needed" in note]
    assert note.startswith("offload=uva is not needed with engine.weight_format=lossless: ")
    more = f"{step_ms(plan) - step_ms(lossless):.3g} ms more than {step_ms(lossless):.3g} ms"
    assert more in note
    assert note.endswith("Set offload=none engine.weight_format=lossless.")
    for other in (
        with_uva(5, "rtx4080_16gb", weight_format="checkpoint"),  # asked for
        with_uva(8, "rtx3060_12gb"),  # no room in codes either
    ):
        assert not any("is not needed" in note for note in other.notes)
    wide = replace(card("rtx4080_16gb"), link_gb_s=1e5)
    config = configuration(OLMO_7B, offload=uva(5), **(LIMITS | {"weight_format": None}))
    free = plan_memory(replace(config, gpu=wide), OLMO_7B, DeviceFacts.of_card(wide))
    assert not any("is not needed" in note for note in free.notes)


@pytest.mark.thorough
def test_an_offload_that_does_not_fit_is_told_that_codes_need_none() -> None:
    gpu = card("rtx4080_16gb")
    config = configuration(OLMO_7B, offload=uva(0.1), **(LIMITS | {"weight_format": None}))
    with pytest.raises(CapacityError) as error:
        plan_memory(replace(config, gpu=gpu), OLMO_7B, DeviceFacts.of_card(gpu))
    assert advised(error.value)[0] == "offload=none engine.weight_format=lossless"


def test_codes_in_host_memory_are_restored_no_faster_than_on_the_gpu() -> None:
    configs = asked("lossless"), asked("lossless", offload=uva(2))
    slow = replace(H200_RATES, lossless_gb_s=0.2)
    here, there = (
        decode_step_s(shape_of(plan_memory(config, OLMO_7B, H200), OLMO_7B, slow), 1, 100)
        for config in configs
    )
    assert there >= here * (1 - 1e-9)


QUEUE = PlannerConfig(choose=True, objective="throughput")
MANY: dict[str, Any] = {"max_num_seqs": 256}


def ratio(plan: MemoryPlan) -> float:
    return float((plan.weight_format or {})["ratio"])


@pytest.mark.thorough
def test_a_card_that_lacks_a_little_packs_some_layers() -> None:
    """A queue's steps have many tokens: what is in codes makes room, and makes them longer."""
    plan = on_card("rtx4090_24gb", QUEUE, memory_gib=21.5, **MANY)
    lossless = on_card("rtx4090_24gb", weight_format="lossless", memory_gib=21.5, **MANY)
    assert chosen(plan) == MIXED
    record = plan.weight_format or {}
    times = {word: float(time) for time, word in re.findall(r"(\S+) s (\w+)", record["why"])}
    assert times.keys() == {"plain", "lossless", "mixed"}
    assert CODES_WORTH * times["mixed"] < min(times["plain"], times["lossless"])
    assert ratio(lossless) < ratio(plan) < 1
    assert plan.offloaded_layers == ()
    codes, rest = record["formats"]["lossless12"], record["formats"]["bfloat16"]
    assert codes["bytes"] + rest["bytes"] == sum(plan.placed_bytes().values())
    assert len(plan.formats.others) == codes["tensors"]
    left = record["plain_matrices"]["predicted to be faster so"]
    assert not set(left) & set(plan.formats.others)
    assert set(left) | set(plan.formats.others) == set(lossless.formats.others)


@pytest.mark.slow
def test_what_leaves_the_gpu_is_in_codes_where_what_stays_is_plain() -> None:
    """More room is asked for than plain weights leave; the copies are hidden behind long steps."""
    plan = on_card("rtx4090_24gb", replace(QUEUE, kv_tokens=17_000), **MANY)
    assert chosen(plan) == MIXED
    assert plan.kv_tokens >= 17_000
    moved = {t.name for layer in plan.layers for t in layer.offloaded_tensors}
    assert moved < set(plan.formats.others)
    assert sum(name.endswith("down_proj.weight") for name in plan.formats.others) < 4
    assert plan.choice is not None
    assert plan.choice["chosen"].endswith("copied ahead, 2 slots")


@pytest.mark.thorough
def test_the_head_stays_plain_where_to_restore_it_takes_more_room_than_its_codes_save() -> None:
    plan, lossless = (
        on_card("rtx3060_12gb", AUTO, weight_format=word, **MANY) for word in ("auto", "lossless")
    )
    assert chosen(plan) == MIXED
    assert set(lossless.formats.others) - set(plan.formats.others) == {HEAD}
    assert step_ms(plan) * CODES_WORTH < step_ms(lossless)
    moved = {t.name for layer in plan.layers for t in layer.offloaded_tensors if len(t.shape) == 2}
    assert moved <= set(plan.formats.others)
    few = on_card("rtx3060_12gb", AUTO, **(MANY | {"max_num_seqs": 32}))
    assert chosen(few) == "lossless"


def mixing(moved: set[str], seconds: Callable[[set[str]], float]) -> set[str] | None:
    """Names of what the best mix has in codes."""
    asked = asked_of(configuration(OLMO_7B, memory_gib=40, weight_format="lossless"), OLMO_7B, H200)
    places = assign_resident(OLMO_7B).placements | dict.fromkeys(moved, PREFETCH)
    found = best_mix(asked, Assignment(places), lambda mix, _: seconds(set(mix.tensor_formats)))
    return None if found is None else set(found.tensor_formats)


def test_a_mix_has_as_many_layers_in_codes_as_are_best_and_all_that_leaves_the_gpu() -> None:
    moved = {"model.layers.5.mlp.down_proj.weight"}
    for count in (1, 3, 13, 31):
        names = mixing(moved, partial(distance, 4 * count))
        assert names is not None
        assert moved <= names
        assert abs(len(names - moved - {HEAD}) - 4 * count) <= 1
    assert mixing(set(), lambda taken: HEAD not in taken) == {HEAD}
    assert mixing(set(), lambda _: math.inf) is None


def distance(count: int, taken: set[str]) -> float:
    """From so many tensors of layers in codes, beside what leaves the GPU."""
    return abs(len(taken - {HEAD, "model.layers.5.mlp.down_proj.weight"}) - count)


def mixing_layers(count: int) -> set[str]:
    layers = spread_layers(32, count)
    names = {tensor.name for index in layers for tensor in OLMO_7B.layer_tensors(index)}
    return names & set(lossless_formats(OLMO_7B).others)


def test_the_time_of_a_mix_is_between_those_of_its_parts() -> None:
    """Of decodes and of a prompt, by how much is in codes, wherever it lies."""
    every = lossless_formats(OLMO_7B).others
    for offload in (None, prefetch(8, 5, 2)):
        config = asked("checkpoint", **({} if offload is None else {"offload": offload}))
        times = []
        for count in (0, 8, 16, 32):
            formats = {name: every[name] for name in mixing_layers(count)}
            plan = plan_memory(config, OLMO_7B, H200, tensor_formats=formats)
            shape = shape_of(plan, OLMO_7B, H200_RATES)
            times.append((decode_step_s(shape, 1, 1), prefill_s(shape, 99)))
        steps, prompts = zip(*times, strict=True)
        assert list(steps) == sorted(steps, reverse=True)
        if offload is None:
            assert list(prompts) == sorted(prompts)
