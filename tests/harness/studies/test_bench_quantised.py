"""Rows of quantised weights against values worked out by hand."""

import pytest

from harness.studies.bench_quantised import judge
from tests.harness.studies.examples import case, decode, failed


def rows(found, card="NVIDIA H200"):
    return {row.what: row for row in judge(found, card=card, is_default=True).rows}


@pytest.mark.parametrize(
    ("point", "batch", "most"),
    [("awq", 1, 0.43), ("awq", 16, 0.55), ("int8", 1, 0.65), ("fp8", 1, 0.65), ("q4_k_m", 1, 0.5)],
)
def test_a_step_is_held_against_that_of_16_bits(point, batch, most):
    plain = case("float16", {batch: decode(0.004)})
    for ratio, is_met in ((most - 0.01, True), (most + 0.01, False)):
        ours = case("ours", {batch: decode(0.004 * ratio)})
        row = rows({"plain": plain, point: ours})[f"ours / 16 bits, batch {batch}: step"]
        assert (row.share, row.is_met) == (pytest.approx(ratio), is_met)
        assert row.target == f"at most {most:g}"


def test_targets_are_over_the_version_before_where_it_is_given():
    found = {
        "before": case("the version before", {1: decode(0.005)}),
        "plain": case("float16", {1: decode(0.004)}),
        "awq": case("int4", {1: decode(0.002)}),
    }
    found = rows(found)
    row = found["int4 / 16 bits of the version before, batch 1: step"]
    assert (row.share, row.target, row.is_met) == (pytest.approx(0.4), "at most 0.43", True)
    row = found["int4 / 16 bits, batch 1: step"]
    assert (row.share, row.target) == (pytest.approx(0.5), "")


def test_other_batches_and_prompts_are_told_without_a_target():
    found = {
        "plain": case("float16", {64: decode(0.01)}, chunks={"512": 0.02}),
        "awq": case("int4", {64: decode(0.008)}, chunks={"512": 0.03}),
    }
    found = rows(found)
    assert found["int4 / 16 bits, batch 64: step"].share == pytest.approx(0.8)
    row = found["int4 / 16 bits, prefill 1 x 512 tokens"]
    assert (row.share, row.target) == (pytest.approx(1.5), "")
    assert len(found) == 2


def test_offloaded_weights_are_held_against_the_link():
    found = {
        "awq_prefetch": case("ahead", {1: decode(0.05, copied=1_950_000_000)}),
        "awq_uva": case("in place", {16: decode(0.1, read=3_000_000_000)}),
    }
    found = rows(found)  # of 40 and 35 GB/s
    row = found["ahead, batch 1: bytes / step time / link rate"]
    assert (row.share, row.is_met) == (pytest.approx(0.975), True)
    row = found["in place, batch 16: bytes / step time / in-place rate"]
    assert (row.share, row.is_met) == (pytest.approx(30 / 35), False)


def test_a_point_without_figures_is_named():
    found = {"plain": case("float16", {1: decode(0.004)}), "awq": failed("int4")}
    judged = judge(found, card="x", is_default=True)
    assert judged.lacks == ["int4: no figures: no_fit: no_fit it is"]
    assert {row.figure for row in judged.rows if row.target} == {
        "not measured: no_fit: no_fit it is"
    }
