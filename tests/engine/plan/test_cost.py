"""The time model: measured steps, monotonicity, rates, what a plan leaves out."""

import re
from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from catalogue.files import CONF
from engine.asked.config import GPUConfig
from engine.plan.cards import CARDS, UNKNOWN_CARD, Sheet
from engine.plan.memory import MemoryPlan
from engine.plan.planner import plan_memory, predict
from engine.plan.queue import queue_s
from engine.plan.rates import (
    HBM_SHARE,
    LINK_SHARE,
    cpu_rates,
    rates_for,
    sheet_rates,
)
from engine.plan.times import Shape, decode_step_s, load_s, prefill_s, shape_of, step_s
from tests.engine.specs import (
    CPU,
    H200,
    NO_PIN,
    NO_UVA,
    OLMO_7B,
    at,
    configuration,
    llama,
    plan_llama,
    plan_olmo,
    plan_small,
    planned,
    prefetch,
    small_spec,
    uva,
)

H100 = replace(H200, name="NVIDIA H100 80GB HBM3")
PROBE = {"h2d_gb_s": 54.8, "in_place_gb_s": 50.7, "hbm_copy_gb_s": 2850.0, "d2h_gb_s": None}
RATES = rates_for(GPUConfig(), H100, PROBE)

# Against measured steps: OLMo-2-7B on an H100, prompts of 128 tokens, rates of the same run. It was
# made by hand; `study=validate` measures the same on other cards.


def olmo(offload: Any, memory_gib: float = 15.99) -> MemoryPlan:
    return plan_olmo(memory_gib=memory_gib, offload=offload, max_num_batched_tokens=8192)


@pytest.mark.parametrize(
    ("offload", "memory_gib", "steps_ms", "prefill_ms"),
    [
        (prefetch(8, 5, 2), 15.99, (148.1, 148.4, 149.0), 153.8),
        (uva(8), 15.99, (184.0, 177.3, 179.5), 173.0),
    ],
    ids=["prefetch", "uva"],
)
def test_measured_steps_are_predicted_within_fifteen_percent(
    offload: Any, memory_gib: float, steps_ms: tuple[float, ...], prefill_ms: float
) -> None:
    shape = shape_of(olmo(offload, memory_gib), OLMO_7B, RATES)
    for batch, measured in zip((1, 16, 64), steps_ms, strict=True):
        predicted = decode_step_s(shape, batch, 150) * 1e3
        assert predicted == pytest.approx(measured, rel=0.15), batch
    assert prefill_s(shape, 2048) * 1e3 == pytest.approx(prefill_ms, rel=0.15)


@pytest.mark.parametrize(
    ("offload", "memory_gib", "steps_ms", "prefills_ms"),
    [
        (prefetch(8, 5, 2), 15.9921875, (148.7, 148.8), (151.8, 458.5)),
        (uva(8), 15.9921875, (171.3, 171.1), (162.5, 498.1)),
        (None, 40, (3.82, 4.50), (7.74,)),
    ],
    ids=["prefetch", "uva", "resident"],
)
def test_steps_measured_on_an_h200_are_predicted_within_fifteen_percent(
    offload: Any, memory_gib: float, steps_ms: tuple[float, ...], prefills_ms: tuple[float, ...]
) -> None:
    """The points of `study=validate` on an H200: 256 tokens, batches 1 and 16."""
    plan = plan_olmo(memory_gib=memory_gib, offload=offload, max_model_len=512, max_num_seqs=64)
    probe = {"h2d_gb_s": 55.23, "in_place_gb_s": 51.0, "hbm_copy_gb_s": 4181, "bf16_tflops": 769.4}
    shape = shape_of(plan, OLMO_7B, RATES)
    rates = rates_for(GPUConfig(), replace(H200, name="NVIDIA H200"), probe)
    for batch, step_ms in zip((1, 16), steps_ms, strict=True):
        predicted = decode_step_s(at(shape, rates), batch, 266) * 1e3
        assert predicted == pytest.approx(step_ms, rel=0.15), batch
    for batch, prefill_ms in zip((1, 16), prefills_ms, strict=False):
        predicted = prefill_s(at(shape, rates), 256, batch) * 1e3
        assert predicted == pytest.approx(prefill_ms, rel=0.15), batch


@pytest.mark.parametrize(
    ("context", "own", "before", "measured_ms"),
    [
        (60, 0, 0, 4.11),
        (60, 8, 8192, 5.19),
        (60, 16, 8192, 5.25),
        (60, 32, 8192, 5.74),
        (60, 56, 8192, 6.33),
        (60, 32, 2048, 5.57),
        (60, 200, 8192, 11.05),
        (1200, 0, 0, 4.50),
    ],
)
def test_few_prompt_tokens_beside_decodes_are_predicted_within_ten_percent(
    context: float, own: int, before: int, measured_ms: float
) -> None:
    """llama31_8b on an H200: 8 decodes, and tokens of one prompt behind those of a cached prefix.

    Medians of five steps each, between two that only decode; those of 32 tokens before products
    of 33 to 40 rows became faster. They were measured by hand: no study repeats them.
    """
    plan = plan_llama(16384, max_num_seqs=64, max_num_batched_tokens=4096)
    probe = {"h2d_gb_s": 55.23, "hbm_copy_gb_s": 4150.0, "bf16_tflops": 769.4}
    rates = rates_for(GPUConfig(), replace(H200, name="NVIDIA H200"), probe)
    shape = shape_of(plan, llama(), RATES)
    found = step_s(at(shape, rates), decodes=8, context=context, prefill=own, before=before)
    assert found * 1e3 == pytest.approx(measured_ms, rel=0.1)


def test_sheets_alone_predict_nearly_the_same() -> None:
    shape = shape_of(olmo(prefetch(8, 5, 2)), OLMO_7B, RATES)
    sheet = decode_step_s(at(shape, rates_for(GPUConfig(), H100)), 1, 150)
    assert sheet == pytest.approx(decode_step_s(shape, 1, 150), rel=0.05)


# Monotonicity.

PLACEMENTS = {
    "resident": None,
    "uva": uva(0.0002),
    "all uva": uva(1),
    "prefetch": prefetch(4, 3, 1),
    "all prefetch": prefetch(1, 1, 2),
}
ANY_RATE = st.floats(0.01, 5000)


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(sorted(PLACEMENTS)),
    rates=st.fixed_dictionaries({"h2d_gb_s": ANY_RATE, "hbm_copy_gb_s": ANY_RATE}),
    factor=st.floats(1, 50),
    batch=st.integers(1, 4),
    gaps=st.sampled_from([{}, NO_UVA, NO_PIN]),
)
def test_a_faster_link_is_never_slower(
    name: str, rates: dict[str, float], factor: float, batch: int, gaps: dict[str, Any]
) -> None:
    spec = small_spec()
    plan = plan_small(replace(H200, **gaps), offload=PLACEMENTS[name], memory_gib=2)
    shape = shape_of(plan, spec, RATES)
    slow = sheet_rates(UNKNOWN_CARD, "test").measured(rates)
    faster = [
        slow.measured({**rates, "h2d_gb_s": rates["h2d_gb_s"] * factor}),
        slow.measured({**rates, "hbm_copy_gb_s": rates["hbm_copy_gb_s"] * factor}),
        replace(slow, bf16_tflops=slow.bf16_tflops * factor),
        replace(slow, float32_tflops=slow.float32_tflops * factor),
    ]
    for fast in faster:
        times = [
            (
                decode_step_s(at(shape, rate), batch, 60),
                prefill_s(at(shape, rate), 60),
                queue_s(at(shape, rate), 30, 30, 30),
                load_s(at(shape, rate)),
            )
            for rate in (slow, fast)
        ]
        for before, after in zip(*times, strict=True):
            assert after <= before * (1 + 1e-9)


@settings(max_examples=10, deadline=None)
@given(num=st.integers(1, 7), step=st.integers(1, 9), link=ANY_RATE)
def test_more_resident_layers_are_never_slower_at_batch_1(num: int, step: int, link: float) -> None:
    spec = small_spec()
    rates = rates_for(GPUConfig(), H100, {**PROBE, "h2d_gb_s": link})
    plans = [
        plan_small(H200, offload=offload, memory_gib=2)
        for offload in (prefetch(8, num, step), prefetch(8, num + 1, step))
    ]
    more, fewer = (shape_of(plan, spec, RATES) for plan in plans)
    assert decode_step_s(at(more, rates), 1, 60) <= decode_step_s(at(fewer, rates), 1, 60) * (
        1 + 1e-9
    )
    assert decode_step_s(at(more, rates), 1, 60) >= plans[0].bytes_per_step() / (link * 1e9)


def test_larger_batches_and_contexts_take_longer_and_give_more_tokens() -> None:
    shape = shape_of(olmo(None, 40 / 0.9), OLMO_7B, RATES)
    times = [decode_step_s(shape, batch, 500) for batch in (1, 4, 16, 64)]
    assert times == sorted(times)
    assert times[3] / 64 < times[0]
    assert decode_step_s(shape, 1, 4000) > times[0]
    assert prefill_s(shape, 2048, 4) < 4.1 * prefill_s(shape, 2048)
    # Later tokens of a prompt attend to more.
    first, second, third, fourth = (prefill_s(shape, 1000 * n) for n in (1, 2, 3, 4))
    assert fourth - third > second - first


def test_staging_beats_in_place_prefills() -> None:
    staged = shape_of(olmo(uva(8)), OLMO_7B, RATES)
    in_place = planned(staged, stage_tokens=None)
    assert prefill_s(in_place, 2048) > 5 * prefill_s(staged, 2048)


def test_on_demand_and_pageable_memory_are_slower_than_prefetch() -> None:
    config = configuration(OLMO_7B, memory_gib=15.99, offload=prefetch(8, 5, 2))
    times = []
    for gaps in ({}, NO_PIN):
        plan = plan_memory(config, OLMO_7B, replace(H100, **gaps))
        times.append(decode_step_s(shape_of(plan, OLMO_7B, RATES), 1, 150))
    assert times[1] > 5 * times[0]


@pytest.mark.parametrize(
    ("offload", "gaps", "is_hidden"),
    [
        (prefetch(8, 5, 2), {}, True),
        (uva(8), {}, True),  # copied through slots
        (prefetch(8, 5, 2), NO_UVA, True),  # on demand, from pinned memory
        (prefetch(8, 5, 2), NO_PIN, False),
    ],
    ids=["prefetch", "uva", "on demand", "pageable"],
)
def test_launches_hide_behind_copies_that_the_host_need_not_wait_for(
    offload: Any, gaps: dict[str, Any], is_hidden: bool
) -> None:
    config = configuration(OLMO_7B, memory_gib=15.99, offload=offload)
    shape = shape_of(plan_memory(config, OLMO_7B, replace(H100, **gaps)), OLMO_7B, RATES)
    launch_s = 1e-3
    without = prefill_s(at(shape, replace(RATES, eager_layer_overhead_s=0.0)), 128)
    more = prefill_s(at(shape, replace(RATES, eager_layer_overhead_s=launch_s)), 128) - without
    # Layers on the GPU before the first that is copied wait for theirs.
    assert more < 4 * launch_s if is_hidden else more > 0.7 * OLMO_7B.num_hidden_layers * launch_s


def test_launches_of_a_step_without_graphs_are_those_that_were_probed() -> None:
    """Layers read in place and on the GPU; on a CPU they are in what a layer takes anyway."""
    for offload, memory_gib in ((None, 40), (uva(0.5), 40)):
        shape = shape_of(olmo(offload, memory_gib), OLMO_7B, RATES)
        eager = planned(shape, use_graphs=False, captured_prefills=())
        slow = RATES.measured({"launch_us": 1000.0})
        for tokens in (1, 64):
            seconds = step_s(at(eager, slow), prefill=tokens)
            assert seconds == pytest.approx(0.05 * OLMO_7B.num_hidden_layers, rel=0.02)
        cpu = cpu_rates().measured({"eager_layer_overhead_s": 1.0})  # an earlier version's probe
        assert decode_step_s(at(eager, cpu), 1, 64) == decode_step_s(at(shape, cpu), 1, 64)


def test_predicted_figures_are_complete_and_consistent() -> None:
    plan = olmo(prefetch(8, 5, 2))
    found = predict(plan, OLMO_7B, RATES)
    assert found["decode_tokens_s"] == pytest.approx(1e3 / found["decode_step_ms"])
    assert found["full_batch"] == min(64, plan.kv_tokens // found["context_tokens"])
    assert found["bytes_per_step"] == plan.bytes_per_step()
    assert found["rates"]["source"].startswith("probe of this machine")
    queue = found["queue"]
    assert queue["output_tokens_s"] == pytest.approx(200 * 128 / queue["total_s"])
    assert found["decode_tokens_s"] < queue["output_tokens_s"] < 64 * found["decode_tokens_s"]
    assert found["ttft_ms"] < found["prefill_ms"]
    shape = shape_of(plan, OLMO_7B, RATES)
    read_s = load_s(planned(shape, reads_files=True)) - found["load_s"]  # here dummy weights
    assert read_s == pytest.approx(OLMO_7B.weight_bytes() / (RATES.file_read_gb_s * 1e9), rel=0.1)
    assert found["load_s"] > 8
    assert all(value > 0 for value in found.values() if isinstance(value, float | int))


# Rates.


def test_rates_come_from_probe_device_sheet_or_assumption_and_say_so() -> None:
    card = GPUConfig(name="rtx4080_16gb", link_gb_s=32, hbm_gb_s=716.8, bf16_tflops=97.5)
    on_h100 = rates_for(card, H100, None)
    assert on_h100.source == "data sheet of NVIDIA H100 80GB HBM3"
    assert on_h100.h2d_gb_s == pytest.approx(64 * LINK_SHARE)
    probed = rates_for(card, H100, {"h2d_gb_s": 50.0})
    assert probed.source == "probe of this machine; the rest: data sheet of NVIDIA H100 80GB HBM3"
    assert (probed.h2d_gb_s, probed.in_place_gb_s) == (50.0, 46.0)
    assert probed.hbm_gb_s == on_h100.hbm_gb_s == pytest.approx(3350 * HBM_SHARE)
    absent = replace(H200, name="rtx4080_16gb")
    assert rates_for(card, absent, None).source == "data sheet of rtx4080_16gb"
    assert rates_for(card, absent, None).bf16_tflops < 97.5
    assert rates_for(GPUConfig(), absent, None).source.startswith("assumed: no data sheet")
    assert "which a CPU stands in for" in rates_for(card, CPU, {"h2d_gb_s": 3.0}).source
    assert rates_for(GPUConfig(), CPU, None) == cpu_rates()
    assert rates_for(GPUConfig(), CPU, {"h2d_gb_s": 3.0}).h2d_gb_s == 3.0


def test_a_card_that_a_cpu_stands_in_for_is_predicted_as_if_it_were_here() -> None:
    """An emulation captures no graphs; the card would."""
    card = GPUConfig(name="rtx4080_16gb", link_gb_s=32, hbm_gb_s=716.8, bf16_tflops=97.5)
    config = configuration(OLMO_7B, memory_gib=20, dtype="bfloat16")
    found = [
        predict(plan_memory(config, OLMO_7B, facts), OLMO_7B, rates_for(card, facts, None))
        for facts in (replace(H200, name="rtx4080_16gb"), CPU)
    ]
    assert found[1]["decode_step_ms"] == pytest.approx(found[0]["decode_step_ms"], rel=1e-6)


def test_no_card_reaches_more_than_its_sheet() -> None:
    for sheet in CARDS.values():
        rates = sheet_rates(sheet, "test")
        assert rates.in_place_gb_s < rates.h2d_gb_s < sheet.link_gb_s
        assert rates.hbm_gb_s < sheet.hbm_gb_s
        assert rates.float32_tflops < rates.bf16_tflops < sheet.bf16_tflops
        assert rates.pageable_gb_s <= rates.h2d_gb_s


def test_sheets_in_conf_are_those_of_the_device_names() -> None:
    """Each file of conf/gpu says what nvidia-smi calls the card."""
    found = {}
    for path in sorted((CONF / "gpu").glob("*_*gb.yaml")):
        text = path.read_text(encoding="utf-8")
        [device] = re.findall(r"^# nvidia-smi: (.+), \d+ MiB$", text, re.MULTILINE)
        gpu = yaml.safe_load(text)
        sheet = Sheet(gpu["link_gb_s"], gpu["hbm_gb_s"], gpu["bf16_tflops"])
        assert found.setdefault(device, sheet) == sheet
    assert found == CARDS


def test_a_window_bounds_what_its_layers_read_and_compute() -> None:
    spec = small_spec(
        sliding_window=128,
        layer_types=["full_attention", *["sliding_attention"] * 7],
        max_position_embeddings=100_000,
    )
    full, some = (
        shape_of(plan_memory(config, spec, CPU), spec, RATES)
        for config in (
            configuration(spec, kv={"disable_sliding_window": True}),
            configuration(spec),
        )
    )
    assert full.kv_limits == (100_000,) * 8
    assert some.kv_limits == (100_000, *[128] * 7)
    bare = replace(RATES, eager_layer_overhead_s=0.0)  # else launches hide so small a model's work
    short, long = (
        [decode_step_s(at(shape, bare), 4, context) for shape in (full, some)]
        for context in (128, 50_000)
    )
    assert short[0] == short[1]
    grown = long[0] - short[0], long[1] - short[1]
    assert grown[1] == pytest.approx(grown[0] / 8)
    assert prefill_s(at(some, bare), 50_000) < prefill_s(at(full, bare), 50_000)


def test_prompts_that_are_complete_decode_beside_the_others() -> None:
    """16 prompts of 256 tokens fill 2 steps of 2048 but for the tokens that the first 8 decode."""
    plan, spec = plan_olmo(offload=uva(8), max_model_len=512, max_num_seqs=16), OLMO_7B
    shape = shape_of(plan, spec, RATES)
    assert shape.plan.max_num_batched_tokens == 2048
    whole = prefill_s(shape, 256, 8)
    assert prefill_s(shape, 256, 16) > 2.9 * whole  # each step moves all offloaded layers
    assert prefill_s(shape, 255, 16) < 2.1 * whole


# What crosses the link: copies that are made.


@pytest.mark.parametrize(("num", "step"), [(1, 1), (2, 1), (4, 2), (8, 3), (8, 4), (8, 6), (8, 7)])
def test_layers_with_a_slot_of_their_own_do_not_hold_the_link(num: int, step: int) -> None:
    """A head that is read in place shares the link with the copies that are made, no others."""
    spec = small_spec()
    plan = plan_small(H200, offload=prefetch(8, num, step), memory_gib=2)
    copied, _ = plan.moved_per_step()
    rates = replace(RATES, h2d_gb_s=1e-3, copy_overhead_s=0.0, in_place_gb_s=1e-3)
    shape = shape_of(plan, spec, RATES)
    bare = decode_step_s(at(shape, rates), 1, 60)
    shared = replace(shape, head_bytes=0, head_in_place_bytes=10**6)
    found = decode_step_s(at(shared, rates), 1, 60)
    assert found >= (copied + 10**6) / 1e6
    assert found <= (copied + 10**6) / 1e6 + bare - copied / 1e6 + 1e-3


def test_prompts_that_run_as_graphs_do_not_wait_for_launches() -> None:
    shape = shape_of(plan_olmo(memory_gib=24, max_model_len=512, max_num_seqs=64), OLMO_7B, RATES)
    eager = planned(shape, captured_prefills=())
    rates = replace(RATES, eager_layer_overhead_s=1e-3)
    launches = OLMO_7B.num_hidden_layers * rates.eager_layer_overhead_s
    assert prefill_s(at(shape, rates), 256) < 0.5 * launches < prefill_s(at(eager, rates), 256)
    assert prefill_s(at(shape, rates), 257) >= launches
    assert prefill_s(at(shape, rates), 16, 5) >= launches  # more prompts than a graph has


def test_prompts_beside_decodes_are_padded_to_what_the_engine_runs() -> None:
    """57 tokens beside one decode run as 8 + 256; 16 beside nine as 64 + 16."""
    shape = shape_of(plan_olmo(memory_gib=24, max_model_len=512, max_num_seqs=64), OLMO_7B, RATES)
    bare = planned(shape, captured_prefills=())

    def seconds(shape: Shape, decodes: int, prefill: int) -> float:
        rates = replace(RATES, eager_layer_overhead_s=0.0, bf16_tflops=10.0)
        return step_s(at(shape, rates), decodes=decodes, prefill=prefill)

    assert seconds(shape, 1, 56) < 0.5 * seconds(shape, 1, 57)
    for decodes, prefill, padded in ((1, 57, 128), (9, 16, 80)):
        assert seconds(shape, decodes, prefill) == pytest.approx(seconds(bare, 0, padded), rel=0.02)
