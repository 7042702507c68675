"""What is measured of the KV cache, with an engine whose times and finds are known."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from engine.errors import ConfigError
from harness.config.compose import Composer
from harness.config.study import TIERS_PARTS, TiersScenario
from harness.forecast.rows import forecast
from harness.observe.link import LinkCounter, LinkFactors
from harness.studies.run import compose_points
from harness.work.kv import counts, since
from harness.work.tiers import PARTS, Tiers, measure_tiers
from tests.harness.studies.kv_engine import BLOCK, Clock, TieredLLM
from tests.slow import slow

WORK = TiersScenario(
    prefix_tokens=40,
    own_tokens=6,
    shared_tokens=40,
    shared_requests=3,
    shared_output=5,
    fit_requests=2,
    fit_prompt=8,
    fit_output=5,
    rounds_output=6,
    rounds_fill=4,
    parked_tokens=60,
    turn_output=10,
    together_sequences=3,
    together_output=6,
    prefixed_sequences=3,
    prefixed_tokens=40,
    prefixed_total=90,
    prefixed_output=8,
    running=2,
    loads=3,
    alone_steps=5,
    streamed_tokens=40,
    steps=4,
)


@pytest.fixture
def clock():
    return Clock()


def part(name, llm, work=WORK):
    """The figures of one part."""
    return PARTS[name](Tiers(llm, llm.clock), work)


def test_counters_are_flat_and_subtracted():
    stats = {"kv": {"moved": {"loaded_bytes": 5}, "swaps_out": 2, "name": "x", "is_on": True}}
    assert counts(stats) == {"moved.loaded_bytes": 5, "swaps_out": 2}
    assert counts({}) == counts({"kv": None}) == {}
    assert since({"a": 5, "b": 1}, {"a": 3}) == {"a": 2, "b": 1}


def test_requests_that_fit_are_timed_with_new_prompts(clock):
    llm = TieredLLM(clock)
    got = part("fits", llm)
    assert got["wall_s"] == pytest.approx(2 * 8 * 0.001 + 4 * 0.01)  # the first token is prefill's
    assert got["kept_wall_s"] == got["wall_s"]  # its moves take no time
    assert (got["output_tokens"], got["preemptions"], llm.resets) == (10, 0, 5)
    got = part("fits", TieredLLM(clock, gpu_blocks=8))
    assert got == {"no_room": "34 tokens of KV are needed, 32 fit"}


def test_first_tokens_behind_a_prefix_by_where_it_is(clock):
    got = part("ttft", TieredLLM(clock))
    assert got["recompute_s"] == pytest.approx(0.046)
    assert got["host_s"] == pytest.approx(6 * 0.001 + 40 * 0.0001)
    assert got["gpu_s"] == pytest.approx(0.006)
    assert got["hits_cpu_tokens"] == 40


def test_gaps_beside_a_load_leave_out_the_prefill_of_the_request(clock):
    llm = TieredLLM(clock, gpu_blocks=200)
    plain = llm.decode

    def decode():
        events = plain()
        if llm.new:  # the load slows the others down
            clock.now += 0.002
        return events

    llm.decode = decode
    got = part("itl", llm)
    assert got["alone_p99_s"] == pytest.approx(0.01)
    assert got["loading_p99_s"] == pytest.approx(0.012)
    assert got["mixed_p50_s"] == pytest.approx(6 * 0.001 + 40 * 0.0001)
    assert (got["loads"], got["hits_cpu_tokens"]) == (3, 40)
    assert (got["num_alone"], got["num_loading"]) == (6, 6)  # two steps a load: each is one gap
    assert (got["num_mixed"], got["num_beside"]) == (3, 9)
    assert got["beside_p50_s"] == pytest.approx(0.012)  # of both kinds
    assert not llm.has_unfinished()
    assert "no_room" in part("itl", TieredLLM(clock, gpu_blocks=16))


@pytest.mark.parametrize(("cpu_blocks", "loaded"), [(64, 10), (0, 0)])
def test_a_shared_prefix_is_held_by_the_host_tier_where_there_is_one(clock, cpu_blocks, loaded):
    got = part("shared", TieredLLM(clock, cpu_blocks=cpu_blocks))
    assert got["loaded_bytes"] == 100 * loaded
    assert got["hits_cpu_tokens"] == loaded * BLOCK
    assert got["hits_gpu_tokens"] == 3 * 40 - loaded * BLOCK
    assert got["wall_s"] == pytest.approx(3 * 6 * 0.001 + loaded * BLOCK * 0.0001 + 4 * 0.01)


def test_parked_conversations_come_back_from_the_host_tier(clock):
    llm = TieredLLM(clock, gpu_blocks=50)
    got = part("parked", llm)
    assert got["conversations"] == 5  # 1.32 x 200 tokens in conversations of 60
    assert got["resident_turn_s"] == pytest.approx(6 * 0.001 + 9 * 0.01)
    assert got["loaded_bytes"] == 1500  # all blocks of the history of each
    assert got["parked_turn_s"] == pytest.approx(got["resident_turn_s"] + 60 * 0.0001)


def test_sequences_beyond_the_room_are_more_where_there_is_a_host_tier(clock):
    far = part("rounds", TieredLLM(clock))
    near = part("rounds", TieredLLM(clock, cpu_blocks=0))
    assert (far["sequences"], near["sequences"]) == (6, 4)
    assert (far["excess"], near["excess"]) == (6 * 60 / 256, 4 * 60 / 256)
    assert near["wall_s"] == pytest.approx(4 * 54 * 0.001 + 5 * 0.01)
    assert far["wall_s"] > near["wall_s"] * 1.5  # 104 tokens and more are read in place
    assert "no_room" in part("rounds", TieredLLM(clock, gpu_blocks=8))


def test_long_sequences_at_once_and_one_after_another(clock):
    llm = TieredLLM(clock, gpu_blocks=20, cpu_blocks=100)
    got = part("together", llm)
    assert (got["total"], got["sequences"], got["output_tokens"]) == (104, 3, 18)
    assert got["prefill_s"] == pytest.approx(98 * 0.001)
    # This engine decodes all at once: each step reads what exceeds 80 tokens.
    assert got["alone_s"] == pytest.approx(3 * 0.098 + 3 * (5 * 0.01 + 5 * 21 * 0.0002), abs=1e-3)
    assert got["last_first_s"] == pytest.approx(0.098)
    assert not llm.has_unfinished()
    assert "no_room" in part("together", TieredLLM(clock, gpu_blocks=20, cpu_blocks=40))


def test_long_sequences_with_a_common_prefix(clock):
    got = part("prefixed", TieredLLM(clock, gpu_blocks=20, cpu_blocks=100))
    assert (got["sequences"], got["ended"], got["total"]) == (3, 3, 90)
    # Own tokens at the middle of the decode, less the room beside the prefix; 100 bytes a token.
    assert got["planned_bytes"] == pytest.approx((3 * (42 + 4) - 40) * 100)
    assert got["steps"] > 0
    assert "no_room" in part("prefixed", TieredLLM(clock, gpu_blocks=20, cpu_blocks=20))


def test_short_requests_beside_a_long_one(clock):
    llm = TieredLLM(clock, gpu_blocks=20, cpu_blocks=100)
    got = part("beside", llm)
    assert (got["total"], got["requests"], got["output_tokens"]) == (160, 2, 10)
    assert got["alone_s"] == pytest.approx(2 * 8 * 0.001 + 4 * 0.01)
    assert got["wall_s"] > got["alone_s"]
    assert got["long_tokens"] == 4
    assert not llm.has_unfinished()


def test_one_sequence_is_resident_then_beyond_the_room(clock):
    llm = TieredLLM(clock, gpu_blocks=20, cpu_blocks=60, max_model_len=256)
    got = part("long", llm)
    assert (got["room"], got["reach"]) == (80, 320)
    runs = got["runs"]
    assert {name: run["total"] for name, run in runs.items()} == {
        "resident": 72,
        "1.3": 104,
        "longest": 256,
    }
    assert runs["resident"]["step_s"] == pytest.approx(0.01)
    assert runs["resident"]["kv_in_place_bytes"] == 0
    # 10 tokens come, 3 of their steps settle and 4 are timed: 246 + 4.5 tokens before, on average.
    assert runs["longest"]["step_s"] == pytest.approx(
        0.01 + (250.5 - 1 + 1 - 80) * 0.0002, rel=0.01
    )
    assert runs["longest"]["steps"] == 4
    assert all(run["has_ended"] for run in runs.values())
    assert llm.resets == 3


def test_what_the_longest_sequence_reads_is_held_against_the_counter(clock):
    llm = TieredLLM(clock, gpu_blocks=20, cpu_blocks=60, max_model_len=256)
    factors = LinkFactors(copied=0.9, in_place=0.6)
    counter = LinkCounter(lambda: None, factors, clock=clock)
    counter.measured = lambda work: (work(), 5.0)
    work = replace(WORK, counter_s=0.5)
    found = PARTS["long"](Tiers(llm, clock, counter), work)["counter"]
    assert (found["nvml_gb_s"], found["factor"]) == (3.0, 0.6)  # it reads KV in place
    assert 0.5 <= found["wall_s"] < 0.6
    # From 129 tokens on, one more a step; 80 of them are on the GPU.
    far, wall_s, num = 49, 0.0, 0
    while wall_s < 0.5:
        wall_s += 0.01 + far * 0.0002
        num, far = num + 100 * far, far + 1
    assert found["engine_gb_s"] == pytest.approx(num / wall_s / 1e9)
    assert not llm.has_unfinished()


def test_a_length_without_room_for_its_output_is_said(clock):
    got = part("streamed", TieredLLM(clock, 2, 0, max_model_len=8))
    assert got["no_room"] == "8 tokens leave no prompt for 10 of output"


def test_streamed_sequences_end_beyond_the_room(clock):
    got = part("streamed", TieredLLM(clock, gpu_blocks=20))
    assert (got["room"], got["total"], got["h2d_bytes"]) == (80, 120, 5)
    assert got["kv_in_place_bytes"] > 0


def test_a_part_that_fails_leaves_the_others(clock):
    llm, saved, names = TieredLLM(clock), [], []
    plain, llm.reset_cache = llm.reset_cache, lambda: 1 / 0
    work = replace(WORK, parts=["shared", "parked"])

    def on_part(name):
        names.append(name)
        if name == "parked":
            llm.reset_cache = plain

    measure_tiers(llm, work, clock=clock, on_part=on_part, save=saved.append)
    assert names == ["shared", "parked"]
    assert [list(figures["parts"]) for figures in saved] == [["shared"], ["shared", "parked"]]
    parts = saved[-1]["parts"]
    assert parts["shared"]["failed"] == "ZeroDivisionError: division by zero"
    assert parts["parked"]["conversations"] == 6


def test_every_part_of_the_configuration_exists():
    assert tuple(PARTS) == TIERS_PARTS
    with pytest.raises(ConfigError, match="expected one of fits"):
        TiersScenario(parts=["nosuch"])


def test_work_is_scaled_as_a_whole():
    small = TiersScenario(scale=0.01).scaled()
    assert (small.prefix_tokens, small.prefixed_total, small.own_tokens) == (82, 520, 2)
    assert (small.steps, small.rounds_fill, small.beyond) == (22, 2, [1.3, 3.0])
    assert TiersScenario().scaled() == TiersScenario()
    assert TiersScenario(rounds_fill=10).rounds_sequences == 13


class BeganError(Exception):
    """A request was sent: there was room for what is measured."""


def planned_llm(name):
    """Blocks of a point of the study as they are planned for the card of its figures, and its work.

    The first request that is sent ends what runs.
    """
    card = ["gpu=h200_141gb", "gpu.memory_gib=24.0"]
    (found,) = Composer().plan(["study=bench_kv", f"study.rows=[{name}]", *card]).points
    point = compose_points(found.config, found.overrides)[name]
    plan = forecast(point.config, tuple(point.overrides)).plan
    assert plan is not None

    def begin(*_, **__):
        raise BeganError

    blocks = {
        "gpu": {"blocks": plan.num_gpu_blocks},
        "cpu": {"blocks": sum(group.num_host_blocks for group in plan.kv.groups)},
    }
    llm = SimpleNamespace(
        plan=plan,
        max_model_len=plan.max_model_len,
        spec=SimpleNamespace(vocab_size=1000),
        tokenizer=None,
        stats=lambda: {"kv": blocks},
        reset_cache=lambda: None,
        add_request=begin,
    )
    return llm, point.config.scenario.tiers.scaled()


@pytest.mark.parametrize(
    "name", ["kv_together", *map(slow, ("kv_gpu", "kv_cpu", "kv_long", "kv_weights"))]
)
def test_what_the_study_measures_has_room_on_its_card(name, clock):
    llm, work = planned_llm(name)
    for part_name in work.parts:
        with pytest.raises(BeganError):
            PARTS[part_name](Tiers(llm, clock), work)
