"""Rows of the bench against values worked out by hand, and what a document makes of them."""

from dataclasses import replace

import pytest

from harness.studies.bench import crossover, equal_tokens, judge
from harness.studies.table import Result
from tests.harness.studies.examples import case, decode, failed

H100 = "NVIDIA H100 80GB HBM3"
H200 = "NVIDIA H200"


def rows(found, card=H100, *, is_default=True):
    made = judge(found, card=card, is_default=is_default).rows
    return [row for row in made if "touched and registered" not in row.what]


def by_name(found, card=H100, *, is_default=True):
    return {row.what: row for row in rows(found, card, is_default=is_default)}


def text_of(found):
    return judge(found, card=H100, is_default=True).section("about")


def test_rates_are_means_of_before_and_after():
    both = case("x")
    assert both.rate("h2d") == 40
    metrics = both.record.metrics | {"link/h2d_after_gb_s": None}
    assert replace(both, record=replace(both.record, metrics=metrics)).rate("h2d") == 41
    assert both.rate("two_way") is None


@pytest.mark.parametrize(
    ("step_s", "share", "is_met"), [(0.206, 0.9709, True), (0.207, 0.9662, False)]
)
def test_prefetch_is_held_against_the_link(step_s, share, is_met):
    found = {"prefetch": case("prefetch 8/5/2", {16: decode(step_s, copied=8_000_000_000)})}
    row = by_name(found)["prefetch 8/5/2, batch 16: bytes / step time / link rate"]
    assert row.share == pytest.approx(share, abs=1e-4)  # 8 GB / step / 40 GB/s
    assert (row.target, row.is_met) == ("at least 0.97", is_met)
    assert row.figure == f"{step_s * 1e3:.2f} ms (8.000 GB copied)"


def test_uva_is_held_against_in_place_reads():
    found = {"uva_2": case("uva 4 GiB", {1: decode(0.125, read=4_200_000_000)})}
    row = by_name(found)["uva 4 GiB, batch 1: bytes / step time / in-place rate"]
    assert row.share == pytest.approx(0.96)  # 33.6 of 35 GB/s
    assert row.is_met


def test_a_step_that_moves_nothing_has_no_share():
    found = {"prefetch": case("prefetch 8/5/9", {1: decode(0.01)})}
    (row,) = rows(found)
    assert (row.share, row.is_met) == (None, None)
    assert "nothing moved" in row.figure


def test_prefills_in_seconds_and_as_a_ratio():
    found = {
        "prefetch": case("prefetch", prefills={"1": 0.16, "4": 0.25}),
        "uva": case("uva", prefills={"1": 0.20, "4": None}),
    }
    got = by_name(found)
    assert got["prefetch, prefill 1 x 2048 tokens: s"].is_met
    assert got["prefetch, prefill 4 x 2048 tokens: s"].is_met is False
    assert got["uva, prefill 1 x 2048 tokens: s"].is_met is None
    ratio = got["uva, prefill 1 x 2048 tokens / prefetch"]
    assert (ratio.share, ratio.is_met) == (pytest.approx(1.25), False)
    assert "uva, prefill 4 x 2048 tokens / prefetch" not in got
    other = by_name(found, is_default=False)
    assert other["prefetch, prefill 4 x 2048 tokens: s"].is_met is None
    assert other["uva, prefill 1 x 2048 tokens / prefetch"].is_met is False


@pytest.mark.parametrize(("card", "is_met"), [(H100, False), (H200, True), ("Other", None)])
def test_resident_weights_against_the_copy_rate_of_each_card(card, is_met):
    # 6 GB in 4 ms are 1500 of 2000 GB/s.
    found = {"resident": case("resident", {1: decode(0.004, kv_bytes=7)})}
    row = by_name(found, card)["resident, batch 1: weight bytes / step time / memory copy rate"]
    assert row.share == pytest.approx(0.75)
    assert row.is_met is is_met


def test_resident_batches_read_their_keys_and_values_too():
    found = {"resident": case("resident", {64: decode(0.005, kv_bytes=300_000_000)})}
    [row] = [row for name, row in by_name(found).items() if "copy rate" in name]
    assert row.share == pytest.approx(0.63)  # 6.3 GB in 5 ms of 2000 GB/s
    assert (row.target, row.is_met) == ("at least 0.62", True)


@pytest.mark.parametrize(("step_s", "is_met"), [(0.00504, True), (0.00506, False)])
def test_an_embedding_in_place_costs_at_most_one_percent(step_s, is_met):
    found = {
        "resident": case("resident", {1: decode(0.005)}),
        "embed_in_place": case("embed", {1: decode(step_s)}),
    }
    assert by_name(found)["embedding table in place / resident, batch 1: step"].is_met is is_met


def test_the_largest_batch_is_held_against_its_bare_replay():
    decodes = {1: decode(0.1, replay_s=0.09), 64: decode(0.104, replay_s=0.1)}
    other = case("auto", {1: decode(0.1, replay_s=0.09)})
    got = by_name({"resident": case("resident", decodes), "chosen": other})
    assert not any(name.startswith("auto, batch 1: whole") for name in got)
    assert "resident, batch 1: whole step / bare graph replay" not in got
    row = got["resident, batch 64: whole step / bare graph replay"]
    assert (row.share, row.is_met) == (pytest.approx(1.04), True)


def test_the_chosen_placement_against_the_peer_at_this_link():
    # At 40 GB/s the peer's 155.5 ms at 55.5 GB/s are 215.75625 ms.
    found = {"chosen": case("auto", {1: decode(0.188, copied=1)}, chosen="18 layers")}
    (row,) = (row for name, row in by_name(found).items() if name.startswith("auto (18 layers)"))
    assert row.share == pytest.approx(0.188 / 0.21575625)
    assert row.is_met
    (row,) = (r for r in rows(found, is_default=False) if r.what.startswith("auto ("))
    assert (row.share, row.target) == (None, "")


def test_counted_bytes_against_planned_ones():
    one = decode(0.1, copied=1000)
    two = decode(0.1, copied=1000, planned_h2d_bytes=900)
    got = by_name({"prefetch": case("prefetch", {1: one, 16: two})})
    row = got["prefetch: bytes of a step, counted / planned"]
    assert (row.share, row.is_met) == (pytest.approx(10 / 9), False)
    got = by_name({"prefetch": case("prefetch", {1: one})})
    assert got["prefetch: bytes of a step, counted / planned"].is_met
    got = by_name({"resident": case("resident", {1: decode(0.1)})})
    assert "resident: bytes of a step, counted / planned" not in got


@pytest.mark.parametrize(
    ("nvml", "is_met"), [(44.0, True), (36.5, True), (45.0, False), (None, None)]
)
def test_nvml_agrees_within_a_tenth(nvml, is_met):
    counter = {"engine_gb_s": 40.0, "nvml_gb_s": nvml, "wall_s": 10.5, "factor": 0.95}
    got = by_name({"prefetch": case("prefetch", counter=counter)})
    row = got.get("prefetch: engine's bytes / NVML's counter of the link, calibrated")
    assert (row.is_met if row else None) is is_met


@pytest.mark.parametrize(("load_s", "is_met"), [(7.25, True), (9.4, False)])
def test_loading_is_held_against_a_rate_behind_the_first_point(load_s, is_met):
    found = {"resident": case("resident"), "uva": case("uva")}
    found["uva"].record.samples["build"]["seconds"] = load_s
    got = {what: row for what, row in by_name(found).items() if "to ready" in what}
    assert list(got) == ["uva: LLM() to ready: weights / time, GiB/s"]
    (row,) = got.values()
    assert (row.figure, row.is_met) == (f"14.00 GiB in {load_s:.2f} s", is_met)
    assert row.share == pytest.approx(14 / load_s)


def test_an_emulated_card_is_held_against_no_target():
    found = {"prefetch": case("prefetch", {1: decode(1.0, copied=8_000_000_000)})}
    made = judge(found, card=None, is_default=True).without_targets().rows
    assert made
    assert {(row.target, row.is_met) for row in made} == {("", None)}


def test_cases_without_figures_give_no_rows():
    found = {
        "resident": failed("resident"),
        "prefetch": Result(title="prefetch", record=None, why="it was left out"),
        "uva": case("uva", {64: {"no_room": "10240 tokens of KV are needed, 9000 fit"}}),
    }
    assert rows(found) == []
    text = text_of(found)
    assert "resident: no figures: no_fit: no_fit it is\n" in text
    assert "prefetch: no figures: it was left out" in text
    assert "uva, batch 64: no figures: 10240 tokens of KV are needed, 9000 fit." in text


def test_staging_pays_from_where_it_stays_faster():
    def staging(place, stage):
        return {
            "uva_in_place": case("uva, 8 layers, never staged", chunks=place),
            "uva_staged": case("uva, 8 layers, always staged", chunks=stage),
        }

    place = {"1": 0.1, "8": 0.1, "64": 0.2, "256": 0.4, "512": None}
    found = staging(place, {"1": 0.3, "8": 0.09, "64": 0.2, "256": 0.2, "512": 0.2})
    assert crossover(found)[1] == 256  # equal at 64
    assert [tokens for tokens, *_ in crossover(found)[0]] == [1, 8, 64, 256]
    text = text_of(found)
    assert "uva, 8 layers: one prompt, its weights" in text
    assert "| 64 | 200.0 | 200.0 |" in text
    assert "Staging is faster from 256 tokens on." in text
    never = staging(place, {"1": 0.1, "8": 0.1, "64": 0.1, "256": 0.5})
    assert crossover(never)[1] is None
    assert "not faster at the largest" in text_of(never)


def test_tokens_are_compared_as_far_as_both_went():
    found = {
        "resident": case("resident", {1: decode(1.0, tokens=[5, 6, 7, 8])}),
        "uva": case("uva", {1: decode(1.0, tokens=[5, 6])}),
        "prefetch": case("prefetch", {1: decode(1.0, tokens=[5, 7])}),
        "chosen": case("chosen", {16: decode(1.0, tokens=[1])}),
    }
    assert equal_tokens(found) == {"uva": True, "prefetch": False}
    assert "**not equal** to the resident engine's in prefetch" in text_of(found)
    del found["prefetch"]
    assert "Greedy tokens: equal" in text_of(found)


def test_only_engines_of_the_same_model_are_compared():
    found = {
        "resident": case("resident", {1: decode(1.0)}),
        "prefetch_step_1": case("cut", {1: decode(1.0, tokens=[9])}, num_hidden_layers=8),
    }
    assert equal_tokens(found) == {}


def test_a_tied_table_is_read_whole_and_not_judged():
    found = {
        "resident": case("resident", {1: decode(0.005)}),
        "embed_in_place": case("embed", {1: decode(0.009)}, tie_word_embeddings=True),
    }
    assert not any("embedding" in name for name in by_name(found))


@pytest.mark.parametrize(("pinned_gib", "is_met"), [(16, True), (15.9, False), (3.9, None)])
def test_pinning_has_a_row_where_much_is_pinned(pinned_gib, is_met):
    point = case("uva 8 GiB")
    point.record.samples["steps"]["memory"]["host_pinned_bytes"] = int(pinned_gib * 2**30)
    made = judge({"uva": point}, card=H200, is_default=True).rows  # in 2 s of touch and pin
    assert [row.is_met for row in made] == ([] if is_met is None else [is_met])


def test_the_section_has_rows_engines_rates_and_remarks():
    found = {"prefetch": case("prefetch", {1: decode(0.2, copied=8_000_000_000)})}
    text = text_of(found)
    assert text.startswith("about\n")
    assert (
        "| prefetch, batch 1: bytes / step time / link rate | 200.00 ms (8.000 GB copied) | 1.000 "
        "| at least 0.97 | met |"
    ) in text
    # 8 GiB in 2 s of touch and pin; ready after 4 s of them, allocate and convert.
    assert "| prefetch | 0.9 | 7.2 | 4.0 | 8.00 | 4.0 | 3 | 1.50 | 13.00 | 9000 |" in text
    assert "| prefetch | 41.0 / 39.0 |  |  | 36.0 / 34.0 | 2100.0 / 1900.0 |" in text


def test_the_headline_shows_every_backend_once():
    found = {
        "uva": case("uva 8 GiB", {1: decode(0.2, read=7_000_000_000), 64: decode(0.25)}),
        "chosen": case("auto", {1: decode(0.1, copied=4_000_000_000)}),
        "resident": case("resident", {1: decode(0.004)}),
    }
    lines = judge(found, card=H200, is_default=True).headline
    assert lines[2:] == [
        "| `offload=uva` | 0.9 | 8.0 GiB | 200 ms | 256 | 1.00 of in-place reads |",
        "| `offload=auto` | 0.9 | 8.0 GiB | 100 ms |  | 1.00 of copies |",
    ]


def test_a_sweep_is_a_table_of_its_own():
    found = {
        "prefetch_step_1": case("prefetch 8/5, 8 layers, step 1", {1: decode(0.1, copied=4e9)}),
        "prefetch_step_6": case("prefetch 8/5, 8 layers, step 6", {1: decode(0.02)}),
    }
    text = text_of(found)
    assert "prefetch 8/5, 8 layers: what each prefetch_step costs and gives" in text
    assert "| 1 | 3 | 1.50 | 100.00 | 4.000 | 40.0 |" in text
    assert "| 6 | 3 | 1.50 | 20.00 | 0.000 |  |" in text
    assert "counted / planned" not in text
