"""Rows of mixtures of experts against values worked out by hand."""

import pytest

from harness.studies.bench_experts import judge
from harness.studies.table import Result
from tests.harness.studies.examples import KV_RATES, bare_case, case, decode, failed, record

H200 = "NVIDIA H200"


def rows(found, card=H200):
    return {row.what: row for row in judge(found, card=card, is_default=True).rows}


def routed(step_s, hits=300.0, misses=84.0, num_bytes=5e8):
    counts = {"expert_hits": hits, "expert_misses": misses, "expert_bytes": num_bytes}
    return decode(step_s, **counts)


def served(title, *, done, asked, decode_s=1.0, steps=10, max_model_len=131_072):
    """A point of queued requests; the GPU holds 31,072 tokens of 1,000 bytes."""
    work = {"num_completed": done, "num_requests": asked}
    work |= {"decode_s": decode_s, "num_decode_steps": steps}
    kv = {"max_model_len": max_model_len, "tokens": 31_072, "block_bytes": 16_000, "block_size": 16}
    return Result(title=title, record=record({"throughput": work}, KV_RATES, plan={"kv": kv}))


@pytest.mark.parametrize(("other", "least"), [("in_place", 3.0), ("prefetch", 30.0)])
def test_cached_experts_over_other_backends(other, least):
    for ratio, is_met in ((least + 0.1, True), (least - 0.1, False)):
        found = {
            other: case("other", {1: routed(0.02 * ratio)}),
            "cached": case("cached", {1: routed(0.02)}),
        }
        words = other.replace("_", " ")
        row = rows(found)[f"bf16 in 21.6 GiB, batch 1: tokens/s, cached / {words}"]
        assert (row.share, row.is_met) == (pytest.approx(ratio), is_met)


def prompted(title, time_s, copied=None):
    point = case(title, chunks={"2048": time_s})
    point.record.samples["steps"]["chunk_expert_bytes"] = {"2048": copied}
    return point


def test_prompts_over_other_backends_and_against_the_link():
    for time_s, is_met in ((1.1, True), (0.9, False)):
        found = rows(
            {"prefetch": prompted("other", time_s), "cached": prompted("ours", 1.0, 17.5e9)}
        )
        row = found["bf16 in 21.6 GiB, prompt of 2048 tokens: time, prefetch / cached"]
        assert (row.share, row.is_met) == (pytest.approx(time_s), is_met)
        row = found["ours, prompt of 2048 tokens: bytes / time / in-place rate"]
        assert (row.figure, row.share) == ("1000.0 ms (17.50 GB of experts)", pytest.approx(0.5))


@pytest.mark.parametrize(
    ("point", "least"), [("cached", 60), ("lossless", 90), ("awq", 250), ("awq_cached", 180)]
)
def test_tokens_a_second_are_held_on_one_card(point, least):
    for rate, is_met in ((least + 1, True), (least - 1, False)):
        found = {point: case("ours", {1: routed(1 / rate)})}
        row = rows(found)["ours, batch 1: tokens/s"]
        assert (row.share, row.is_met) == (pytest.approx(rate), is_met)
        assert row.figure.endswith(" ms, 78.1% of experts found, 500 MB of others")
        assert rows(found, "NVIDIA L4")["ours, batch 1: tokens/s"].target == ""


def test_a_batch_counts_all_of_its_tokens():
    row = rows({"awq": case("ours", {16: routed(0.02, hits=0.0, misses=0.0)})})
    assert row["ours, batch 16: tokens/s"].share == pytest.approx(800)
    assert row["ours, batch 16: tokens/s"].figure == "20.00 ms"


def test_bytes_of_a_resident_step_over_the_copy_rate():
    found = rows({"resident": case("resident", {1: routed(0.006)})})
    row = found["resident, batch 1: bytes of weights / step time / copy rate"]
    assert (row.share, row.is_met) == (pytest.approx(0.5), True)  # 6 GB of 2,000 GB/s


def test_copies_and_products_alone():
    timing = {"shape": "x", "ms": 1.0, "gb_s": 43.0, "rate_gb_s": 50.0}
    slow = {**timing, "gb_s": 30.0}
    found = rows({"bare": bare_case(experts={"gather": timing, "products": slow})})
    row = found["copies of experts alone / in-place rate"]
    assert (row.figure, row.is_met) == ("43.0 of 50.0 GB/s (x)", True)
    assert found["products of one token's experts alone / copy rate"].is_met is False
    found = rows({"bare": bare_case(experts={"no_room": "on a GPU only"})})
    assert found["copies of experts alone / in-place rate"].is_met is None


def test_requests_that_end_and_the_bound_of_the_longest():
    found = rows({"longest": served("one", done=1, asked=1, decode_s=0.021)})
    assert found["one: share of requests answered"].is_met
    row = found["one of 131,072 tokens: step / time of its host blocks on the link"]
    # 100,000 tokens of 1,000 bytes at 50 GB/s take 2 ms
    assert (row.figure, row.is_met) == ("2.1 ms, 2.0 ms on the link", True)
    found = rows({"four": served("four", done=3, asked=4), "published": failed("published")})
    assert found["four: share of requests answered"].is_met is False
    assert found["published: share of requests answered"].is_met is None
    short = rows({"longest": served("one", done=1, asked=1, max_model_len=31_072)})
    row = short["one of 131,072 tokens: step / time of its host blocks on the link"]
    assert row.figure == "not measured: the GPU holds all blocks"
