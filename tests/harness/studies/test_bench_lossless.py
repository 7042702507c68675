"""Rows of weights in codes against values worked out by hand."""

import pytest

from harness.studies.bench_lossless import judge
from tests.harness.studies.examples import bare_case, case, decode, failed

H200 = "NVIDIA H200"


def rows(found, card=H200, *, is_default=True):
    return {row.what: row for row in judge(found, card=card, is_default=is_default).rows}


def of_tokens(found):
    return [row for what, row in rows(found).items() if what.startswith("greedy tokens of ")]


def small(decodes=(), *, chunks=None, chunk_tokens=None, **metrics):
    """The point of 13.6 GiB."""
    point = case("lossless, 13.6 GiB", decodes, chunks=chunks)
    point.record.samples["steps"]["chunk_tokens"] = chunk_tokens or {}
    point.record.metrics.update(metrics)
    return point


def plain(decodes=(), *, chunks=None, chunk_tokens=None):
    """The point of plain weights in 40 GiB."""
    point = case("bf16, 40 GiB", decodes, chunks=chunks)
    point.record.samples["steps"] |= {"read_bytes": 8_000_000_000}
    point.record.samples["steps"]["chunk_tokens"] = chunk_tokens or {}
    return point


@pytest.mark.parametrize(
    ("card", "is_default", "target"),
    [(H200, True, "at most 3.9"), ("NVIDIA H100", True, ""), (H200, False, "")],
)
def test_milliseconds_are_held_on_the_card_and_at_the_shape_they_are_of(card, is_default, target):
    found = {"lossless_13gib": small({1: decode(0.0038)})}
    row = rows(found, card, is_default=is_default)["lossless, 13.6 GiB, batch 1: step, ms"]
    assert (row.figure, row.share) == ("3.80 ms", pytest.approx(3.8))
    assert (row.target, row.is_met) == (target, True if target else None)


@pytest.mark.parametrize(("step_s", "is_met"), [(0.0044, True), (0.0046, False)])
def test_a_step_of_sixteen_has_a_target_of_its_own(step_s, is_met):
    found = rows({"lossless_13gib": small({16: decode(step_s)})})
    assert found["lossless, 13.6 GiB, batch 16: step, ms"].is_met is is_met
    assert "lossless, 13.6 GiB, batch 1: step, ms" not in found


@pytest.mark.parametrize(("moved", "is_met"), [(0, True), (1, False)])
@pytest.mark.parametrize("point", ["lossless_13gib", "lossless_13b"])
def test_not_a_byte_of_a_layer_crosses_the_link(moved, is_met, point):
    found = {point: small({1: decode(0.003), 16: decode(0.003, read=moved)})}
    (row,) = (row for what, row in rows(found).items() if "over the link a step" in what)
    assert (row.share, row.is_met) == (moved, is_met)
    assert row.figure == f"{moved} bytes, batch 1, 16"


def test_the_room_for_kv_in_tokens_and_over_that_of_plain_weights():
    point = small({1: decode(0.003)})
    row = rows({"lossless_13gib": point})["lossless, 13.6 GiB: KV tokens"]
    assert (row.share, row.target, row.is_met) == (9000, "at least 4600", True)
    point.record.plan["kv"]["tokens"] = 4599
    assert rows({"lossless_13gib": point})["lossless, 13.6 GiB: KV tokens"].is_met is False
    llama = case("lossless"), case("bf16")
    llama[1].record.plan["kv"]["tokens"] = 5000
    found = rows({"lossless_llama": llama[0], "plain_llama": llama[1]})
    row = found["Llama-3.1-8B in 21.6 GiB, lossless / bf16: KV tokens"]
    assert (row.share, row.is_met) == (pytest.approx(1.8), True)


@pytest.mark.parametrize(
    ("point", "batch", "most"),
    [
        ("lossless_13gib", 1, 0.95),
        ("lossless_13gib", 8, 0.95),
        ("lossless_13gib", 16, 0.97),
        ("lossless_16gib", 32, 1.0),
        ("lossless_24gib", 64, 1.15),
    ],
)
def test_steps_over_those_of_resident_plain_weights(point, batch, most):
    for ratio, is_met in ((most - 0.01, True), (most + 0.01, False)):
        ours, theirs = small({batch: decode(0.004 * ratio)}), plain({batch: decode(0.004)})
        found = rows({"plain_40gib": theirs, point: ours}, "NVIDIA H100", is_default=False)
        row = found[f"lossless / bf16, batch {batch}: step"]
        assert (row.share, row.is_met) == (pytest.approx(ratio), is_met)
        assert row.target == f"at most {most:g}"


def test_stored_bytes_over_those_of_plain_weights():
    found = rows({"plain_40gib": plain(), "lossless_13gib": small()})
    row = found["lossless / bf16: weight bytes that a step reads"]
    assert (row.figure, row.share) == ("6.00 against 8.00 GB", 0.75)
    assert row.is_met


@pytest.mark.parametrize(("tokens", "most"), [(128, 2.0), (512, 1.4), (2048, 1.15)])
def test_prompts_over_plain_weights(tokens, most):
    theirs = plain(chunks={str(tokens): 0.1})
    for ratio, is_met in ((most - 0.01, True), (most + 0.01, False)):
        found = {"plain_40gib": theirs, "lossless_13gib": small(chunks={str(tokens): 0.1 * ratio})}
        row = rows(found)[f"lossless / bf16, prefill 1 x {tokens} tokens"]
        assert (row.share, row.is_met) == (pytest.approx(ratio), is_met)
    found = rows({"plain_40gib": theirs, "lossless_13gib": small(chunks={})})
    assert not any("prefill" in what for what in found)


def test_copies_ahead_against_the_link_and_the_bytes_of_plain_weights():
    ahead = case("lossless, prefetch", {1: decode(0.15, copied=6_000_000_000)})
    theirs = case("bf16, prefetch", {1: decode(0.2, copied=8_000_000_000)})
    found = rows({"plain_prefetch": theirs, "lossless_prefetch": ahead})
    words = "lossless, 20 of 32 layers off the GPU, prefetch"
    row = found[f"{words}, batch 1: bytes / step time / link rate"]
    assert (row.share, row.is_met) == (pytest.approx(1.0), True)  # 6 GB in 0.15 s of 40 GB/s
    assert found[f"{words}, batch 1: step, ms"].is_met is False
    row = found[f"{words}: bytes copied a step / those of bf16"]
    assert (row.share, row.is_met) == (pytest.approx(0.75), True)
    still = case("lossless, prefetch", {1: decode(0.15)})
    row = rows({"lossless_prefetch": still})[f"{words}, batch 1: bytes / step time / link rate"]
    assert (row.figure, row.is_met) == ("not measured: nothing was moved", None)


@pytest.mark.parametrize(("step_s", "is_met"), [(0.18, True), (0.182, False)])
def test_reads_in_place_against_their_rate(step_s, is_met):
    found = {"lossless_uva": case("uva", {64: decode(step_s, read=6_000_000_000)})}
    (row,) = rows(found).values()  # 6 GB in 0.18 s are 33.3 of 35 GB/s
    assert row.what.endswith("uva, batch 64: bytes / step time / in-place rate")
    assert row.is_met is is_met


def test_a_larger_model_and_a_queue():
    found = rows({"lossless_13b": case("13B", {1: decode(0.0076)})})
    assert found["lossless, 13B in 21.6 GiB, batch 1: step, ms"].is_met is False
    what = "lossless, 13.6 GiB, 100 queued requests (128 in, 128 out): output tokens/s"
    point = small(**{"throughput/output_tok_s": 2600.0})
    point.record.samples["throughput"] = {"num_requests": 100, "num_completed": 100}
    row = rows({"lossless_13gib": point})[what]
    assert (row.figure, row.is_met) == ("2600 tokens/s", True)
    point.record.samples["throughput"]["num_completed"] = 99
    row = rows({"lossless_13gib": point})[what]
    assert (row.figure, row.share) == ("not measured: 99 of 100 requests finished", None)


def test_restoring_alone_counts_where_it_gave_the_bits():
    figures = {"ms": 0.5, "shape": "2 of 64 x 64", "written_gb_s": 2200.0, "is_equal": True}
    (row,) = rows({"lossless_bare": bare_case(restore=figures)}).values()
    assert (row.figure, row.share, row.is_met) == ("0.500 ms (2 of 64 x 64)", 2.2, True)
    (row,) = rows({"lossless_bare": bare_case(restore=figures | {"is_equal": False})}).values()
    assert row.figure == "not measured: what was restored was not what was packed"
    assert row.is_met is None


@pytest.mark.parametrize("is_kept", [False, True])
def test_compiling_stands_apart_from_the_load(is_kept):
    name, source, most = ("kept", "a kept copy", 4) if is_kept else ("ready", "page cache", 10)
    what = f"lossless, engine ready from {source}: s, without compiling"
    build = {"seconds": most + 4.5, "phases": {"compile": 5.0}, "moved_bytes": {"kept": 9}}
    point = case(name, {1: decode(0.003)})
    point.record.samples["build"] = build | ({} if is_kept else {"moved_bytes": {"read": 9}})
    row = rows({f"lossless_{name}": point})[what]
    assert row.figure == f"{most - 0.5:.2f} s, compiling 5.00 s more"
    assert (row.share, row.target, row.is_met) == (most - 0.5, f"at most {most}", True)
    # What was read is what the row says, or there is no figure.
    point.record.samples["build"] = build | ({"moved_bytes": {}} if is_kept else {})
    row = rows({f"lossless_{name}": point})[what]
    begin = "no copy" if is_kept else "a copy"
    assert (row.figure, row.is_met) == (f"not measured: {begin} that was kept was read", None)


def test_greedy_tokens_are_compared_in_all_that_both_made():
    ours = small(
        {1: decode(0.003, tokens=[5, 6]), 16: decode(0.003, tokens=[7, 8])},
        chunk_tokens={"128": [3, 4], "512": None},
    )
    theirs = plain(
        {1: decode(0.004, tokens=[5, 6, 7]), 64: decode(0.004)},
        chunk_tokens={"128": [3, 4], "512": [1]},
    )
    (row,) = of_tokens({"plain_40gib": theirs, "lossless_13gib": ours})
    assert row.what == "greedy tokens of lossless, 13.6 GiB equal to those of bf16, 40 GiB: share"
    assert (row.figure, row.share, row.is_met) == ("batch 1, prompts of 128", 1.0, True)
    ours.record.samples["steps"]["chunk_tokens"]["128"] = [3, 5]
    (row,) = of_tokens({"plain_40gib": theirs, "lossless_13gib": ours})
    assert (row.figure, row.share, row.is_met) == ("**not** in prompts of 128", 0.5, False)
    made = judge({"plain_40gib": theirs, "lossless_13gib": ours}, card=H200, is_default=True)
    assert row.what in made.missed


def test_tokens_that_were_never_made_are_not_equal():
    found = {
        "plain_40gib": plain({1: decode(0.004, tokens=[])}),
        "lossless_13gib": small({1: decode(0.003, tokens=[])}),
    }
    (row,) = of_tokens(found)
    assert row.is_met is False
    found["lossless_13gib"] = small({16: decode(0.003)})
    assert of_tokens(found) == []


def test_tokens_of_another_model_are_not_compared():
    found = {
        "plain_40gib": plain({1: decode(0.004)}),
        "lossless_llama": case("llama", {1: decode(0.003, tokens=[9])}),
    }
    assert of_tokens(found) == []


def test_a_point_without_figures_leaves_its_rows_not_measured():
    found = {"lossless_13gib": failed("lossless, 13.6 GiB"), "plain_40gib": plain({1: decode(1.0)})}
    made = judge(found, card=H200, is_default=True)
    held = [row for row in made.rows if row.target]
    assert {row.is_met for row in held} == {None}
    assert {row.figure for row in held} == {"not measured: no_fit: no_fit it is"}
    assert "lossless / bf16, batch 1: step" in made.missed
    full = small({16: {"no_room": "4096 tokens of KV are needed, 9 fit"}})
    row = rows({"lossless_13gib": full})["lossless, 13.6 GiB, batch 16: step, ms"]
    assert row.figure == "not measured: 4096 tokens of KV are needed, 9 fit"


def test_rows_of_points_that_were_not_chosen_are_absent():
    assert rows({}) == {}
    assert rows({"plain_40gib": plain({1: decode(0.004)})}) == {}
