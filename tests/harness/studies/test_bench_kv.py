"""Rows on the KV cache against values worked out by hand, and what keeps one unmeasured."""

import pytest

from harness.studies.bench_kv import judge
from harness.studies.table import Result
from tests.harness.studies.examples import bare_case, record
from tests.harness.studies.examples import kv_case as case

H200 = "NVIDIA H200"


def kv_rows(found, card=H200, *, is_default=True):
    return judge(found, card=card, is_default=is_default).rows


def row(found, begin, *, is_default=True):
    [only] = [
        line for line in kv_rows(found, H200, is_default=is_default) if line.what.startswith(begin)
    ]
    return only


def test_moves_are_held_against_their_direction_of_the_link():
    moves = {"block_bytes": 2**21, "store_gb_s": 36.0, "load_gb_s": 43.0, "both_gb_s": 78.0}
    found = {"kv_bare": bare_case(moves=moves, attention={"no_room": "no card"})}
    got = row(found, "block moves, 16-token blocks, to the host tier")
    assert (got.share, got.is_met) == (pytest.approx(0.90), True)
    got = row(found, "block moves, 16-token blocks, from the host tier")
    assert (got.share, got.is_met) == (pytest.approx(0.86), False)
    got = row(found, "block moves, 16-token blocks, both ways")
    assert (got.share, got.is_met, got.target) == (pytest.approx(0.78), True, "at least 0.78")
    got = row(found, "decode attention alone")
    assert (got.figure, got.share, got.is_met) == ("not measured: no card", None, None)
    assert got.target == "at least 0.8"
    lacking = {"kv_bare": bare_case(rates={}, moves=moves)}
    got = row(lacking, "block moves, 16-token blocks, both ways")
    assert got.figure == "not measured: the link's rate is not known"


def test_attention_alone_against_the_copy_rate():
    timing = {"shape": "32 x 4096 keys", "ms": 0.2, "gb_s": 2460.0, "copy_gb_s": 3000.0}
    got = row({"kv_bare": bare_case(attention=timing)}, "decode attention alone")
    assert (got.share, got.is_met) == (pytest.approx(0.82), True)


def far_bytes(in_place, copied):
    return {"kv_in_place_bytes": in_place, "kv_copied_bytes": copied}


def long_case(**changes):
    runs = {
        "resident": {"total": 39_000, "step_s": 0.006} | far_bytes(0, 0),
        "1.3": {"total": 52_000, "step_s": 0.0451} | far_bytes(1.5e9, 0),
        "longest": {
            "total": 131_072,
            "step_s": 0.24,
            "has_ended": True,
            "prefill_s": 30.0,
            **far_bytes(1e9, 10e9),
        },
    }
    for name, more in changes.items():
        runs[name] = runs[name] | more
    return {"kv_long": case(long={"room": 40_000, "reach": 171_072, "runs": runs})}


def test_steps_beyond_the_room_against_their_parts():
    found = long_case()
    got = row(found, "one sequence of 1.3 times")
    # 1.5 GB at 50 GB/s are 30 ms, beside 6 ms for what the GPU holds.
    assert (got.share, got.is_met) == (pytest.approx(45.1 / 36), False)
    got = row(found, "one sequence of 3 times")
    assert (got.share, got.is_met) == (pytest.approx(240 / 226), True)
    assert got.figure == "240.0 ms against 6.0 + 220.0 ms at 3.28 times"
    got = row(found, "copies ahead")
    assert (got.share, got.is_met) == (pytest.approx(240 / 220), False)
    assert got.figure == "240.0 against 220.0 ms at 3.28 times, 90.9% of the bytes copied"
    got = row(found, "decode, at least 4 GB")
    assert (got.share, got.is_met) == (pytest.approx(11 / 0.24 / 50), True)


@pytest.mark.parametrize(
    ("counter", "is_met", "figure"),
    [
        (None, None, "not measured: scenario.tiers.counter_s is 0"),
        ({"nvml_gb_s": None}, None, "not measured: NVML's counter is not known"),
        ({"nvml_gb_s": 40.0}, True, "44.00 against 40.00 GB/s in 10 s (x 0.900)"),
        ({"nvml_gb_s": 39.0}, False, "44.00 against 39.00 GB/s in 10 s (x 0.900)"),
    ],
)
def test_kv_read_in_place_against_nvml(counter, is_met, figure):
    ours = {"engine_gb_s": 44.0, "wall_s": 10.5, "factor": 0.9}
    parts = {"room": 1, "reach": 2, "runs": {}, "counter": counter and ours | counter}
    got = row({"kv_long": case(long=parts)}, "the longest: engine's bytes / NVML's counter")
    assert (got.figure, got.is_met) == (figure, is_met)
    assert got.target == "at least 0.9, at most 1.1"


def test_the_longest_context_counts_where_it_ran_to_its_end():
    got = row(long_case(), "longest context")
    assert (got.share, got.is_met) == (1.0, True)
    assert "131,072 tokens, 40,000 of them on the GPU; first token after 30.0 s" in got.figure
    got = row(long_case(longest={"has_ended": False}), "longest context")
    assert got.figure == "not measured: 131,072 tokens did not finish"


@pytest.mark.parametrize(
    ("changes", "begin", "why"),
    [
        ({"resident": {"kv_in_place_bytes": 5}}, "one sequence of 1.3", "was not resident"),
        ({"1.3": {"kv_in_place_bytes": 0}}, "one sequence of 1.3", "nothing was read"),
        ({"longest": {"total": 100_000}}, "one sequence of 3", "the longest is 2.50 times"),
        ({"longest": far_bytes(1e9, 2e9)}, "decode, at least", "a step read 3.00 GB"),
        ({"longest": far_bytes(11e9, 0)}, "copies ahead", "nothing"),
        ({"longest": {"no_room": "short"}}, "longest context", "short"),
    ],
)
def test_what_did_not_happen_is_not_measured(changes, begin, why):
    got = row(long_case(**changes), begin)
    assert why in got.figure
    assert (got.share, got.is_met) == (None, None)
    assert got.target


def test_a_parked_turn_against_a_resident_one():
    parked = {
        "resident_turn_s": 0.5,
        "parked_turn_s": 0.52,
        "loaded_bytes": 5e8,
        "tokens": 56_000,
        "room": 42_000,
    }
    got = row({"kv_cpu": case(parked=parked)}, "a parked conversation")
    assert (got.share, got.is_met) == (pytest.approx(0.04), True)
    got = row({"kv_cpu": case(parked=parked | {"loaded_bytes": 0})}, "a parked conversation")
    assert "no turn found its conversation in the host tier" in got.figure


def run(wall_s, **more):
    return {"wall_s": wall_s, "output_tokens": 1000} | more


ROUNDS = {"excess": 1.3, "sequences": 13, "swaps_out": 5, "swaps_in": 5, "recomputes": 0}
SHARED = {"hits_cpu_tokens": 9984, "prefix_tokens": 10_000, "loaded_bytes": 1e9}


@pytest.mark.parametrize(
    ("part", "name", "more", "begin", "bad"),
    [
        ("rounds", "kv_cpu", ROUNDS, "sequences of 1.3", {"excess": 1.1}),
        ("shared", "kv_cpu", SHARED, "50 requests", {"hits_cpu_tokens": 100}),
    ],
)
def test_tokens_a_second_with_a_host_tier_over_those_without(part, name, more, begin, bad):
    found = {
        "kv_gpu": case(**{part: run(2.0, **more)}),
        name: case(**{part: run(1.0, **more)}),
    }
    got = row(found, begin)
    assert (got.share, got.is_met) == (2.0, True)
    assert got.figure.startswith("1000 against 500 tokens/s (")
    found[name] = case(**{part: run(1.0, **more) | bad})
    assert row(found, begin).figure.startswith("not measured: ")


def test_rows_of_cases_that_were_not_chosen_are_absent():
    rounds = case(rounds=run(1.0, **ROUNDS))
    names = [line.what for line in kv_rows({"kv_gpu": rounds}, H200, is_default=True)]
    assert names == []
    assert "requests" not in " ".join(
        line.what for line in kv_rows({"kv_cpu": rounds}, H200, is_default=True)
    )


@pytest.mark.parametrize(("wall_s", "is_met"), [(1.0199, True), (1.03, False)])
def test_a_host_tier_costs_nothing_where_everything_fits(wall_s, is_met):
    found = {
        "kv_gpu": case(fits=run(1.0, kept_wall_s=1.0)),
        "kv_cpu": case(fits=run(wall_s, kept_wall_s=1.1, preemptions=0)),
    }
    assert row(found, "kv=cpu where everything fits").is_met is is_met


def test_first_tokens_behind_a_prefix():
    ttft = {
        "host_s": 0.034,
        "recompute_s": 0.3,
        "gpu_s": 0.02,
        "prefix_tokens": 8192,
        "hits_cpu_tokens": 8192,
    }
    found = {"kv_cpu": case(ttft=ttft)}
    name = "first token behind a prefix of 8k tokens"
    assert row(found, f"{name} in the host tier").is_met
    assert row(found, f"{name}: computed").share == pytest.approx(0.3 / 0.034)
    assert row(found, f"{name}, computed").is_met is False
    assert row(found, f"{name}, computed", is_default=False).target == ""
    lost = {"kv_cpu": case(ttft=ttft | {"hits_cpu_tokens": 4096})}
    assert row(lost, f"{name} in the host tier").figure == (
        "not measured: the host tier had 50% of the prefix"
    )


def test_gaps_beside_a_load_need_enough_steps_for_p99():
    itl = {"loads": 90, "prefix_tokens": 8192, "hits_cpu_tokens": 8192, "mixed_p50_s": 0.01}
    for name, p99_s in (("alone", 0.006), ("loading", 0.0071), ("beside", 0.012)):
        itl |= {f"{name}_p99_s": p99_s, f"{name}_p50_s": 0.006, f"num_{name}": 700}
    found = {"kv_cpu": case(itl=itl)}
    got = row(found, "gaps of running")
    assert (got.share, got.is_met) == (pytest.approx(7.1 / 6), True)
    got = row(found, "likewise, with the step")
    assert (got.share, got.target, got.is_met) == (pytest.approx(2), "at most 1.3", False)
    got = row({"kv_cpu": case(itl=itl | {"num_loading": 600})}, "gaps of running")
    assert got.figure == "not measured: 600 steps are too few for p99"


TOGETHER = {
    "sequences": 4,
    "total": 52_000,
    "output_tokens": 1024,
    "wall_s": 40.0,
    "alone_s": 42.0,
    "turns": 8,
    "waited_steps": 441,
    "prefill_s": 3.0,
    "last_first_s": 3.6,
}
PREFIXED = {
    "sequences": 16,
    "ended": 16,
    "steps": 50,
    "step_s": 0.5,
    "read_bytes": 25e9,
    "planned_bytes": 24e9,
}
BESIDE = {
    "total": 80_000,
    "requests": 32,
    "output_tokens": 4096,
    "wall_s": 2.0,
    "alone_s": 1.1,
    "first_s": 0.4,
    "alone_first_s": 0.3,
    "long_tokens": 9,
}


@pytest.mark.parametrize(
    ("part", "figures", "begin", "share", "bad"),
    [
        ("together", TOGETHER, "four sequences", 1.05, {}),
        ("together", TOGETHER, "first token of the last", 1.2, {}),
        ("prefixed", PREFIXED, "16 sequences", 25 / 24, {"ended": 15}),
        ("prefixed", PREFIXED, "16 sequences", 25 / 24, {"steps": 0}),
        ("beside", BESIDE, "32 short", 0.55, {"long_tokens": 0}),
    ],
)
def test_long_sequences_together(part, figures, begin, share, bad):
    got = row({"kv_together": case(**{part: figures})}, begin)
    assert (got.share, got.is_met) == (pytest.approx(share), True)
    if bad:
        got = row({"kv_together": case(**{part: figures | bad})}, begin)
        assert got.figure.startswith("not measured: ")


def experiment(**metrics):
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    plan = {"predicted": {"host_kv": {"decode_step_ms": 90.0}}}
    return Result(title="x", record=record({}, metrics=named, plan=plan))


def test_rows_of_experiments_are_of_their_metrics():
    hits = {"kv__cpu_hit_tokens": 5.0}
    found = {
        "multi_turn_gpu": experiment(serve__output_tok_s=900.0),
        "multi_turn": experiment(serve__output_tok_s=1800.0, **hits),
    }
    got = row(found, "64 conversations")
    assert (got.share, got.is_met) == (2.0, True)
    assert got.figure == "1800 against 900 tokens/s (5 tokens found in host blocks)"
    found["multi_turn"] = experiment(serve__output_tok_s=1800.0, kv__cpu_hit_tokens=0.0)
    assert "nothing was found" in row(found, "64 conversations").figure
    parked = {
        "parked_gpu": experiment(serve__turn_ttft_ms__p50=120.0),
        "parked": experiment(serve__turn_ttft_ms__p50=30.0, **hits),
    }
    assert row(parked, "parked conversations").share == 4.0
    near = experiment(latency__tpot_ms__mean=81.0, kv__in_place_gib=3.0)
    got = row({"long_context": near}, "one sequence of 54,000")
    assert (got.share, got.figure) == (pytest.approx(0.9), "81.0 against 90.0 ms")
    lost = Result(title="x", record=None, why="it was not run")
    assert row({"long_context": lost}, "one sequence of 54,000").figure == (
        "not measured: it was not run"
    )


def test_weights_and_kv_together_against_the_link():
    streamed = {
        "h2d_bytes": 3.5e9,
        "in_place_bytes": 0,
        "step_s": 0.17,
        **far_bytes(1.5e9, 3e9),
    }
    got = row({"kv_weights": case(streamed=streamed)}, "weights and KV")
    assert (got.share, got.is_met) == (pytest.approx(8 / 0.17 / 50), True)
    found = {"kv_weights": case(streamed=streamed | far_bytes(0, 0))}
    assert "0 of KV were moved" in row(found, "weights and KV").figure


def test_a_failed_part_is_named_and_its_row_not_measured():
    found = {"kv_cpu": case("kv=cpu", itl={"failed": "ValueError: it broke\nmore"})}
    got = row(found, "gaps of running")
    assert got.figure == "not measured: ValueError: it broke"
    assert row(found, "a parked conversation").figure == "not measured: it did not run"
    judged = judge(found, card=H200, is_default=True)
    assert judged.lacks == ["kv=cpu, itl: no figures: ValueError: it broke\nmore."]
    assert "| at most 1.2 | **not measured** |" in judged.section("about")
    assert len(judged.missed) == 6  # all of kv_cpu alone that have a target
    emulated = judge(
        {"kv_bare": bare_case(attention={"no_room": "timed on a GPU only"})},
        card=None,
        is_default=True,
    )
    assert emulated.lacks == []
    assert emulated.without_targets().missed == []
