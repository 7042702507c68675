"""Rows of the bench against values worked out by hand, and what a document makes of them."""

import pytest

from harness.bench.document import BENCH, markdown, write_section
from harness.bench.table import crossover, equal_tokens, rate, rows
from harness.errors import ConfigError
from tests.harness.bench.examples import case, decode

H100 = "NVIDIA H100 80GB HBM3"
H200 = "NVIDIA H200"


def by_name(found, card=H100, *, is_default=True):
    return {row.what: row for row in rows(found, card, is_default=is_default)}


def test_rates_are_means_of_before_and_after():
    both = case("x", {})
    assert rate(both, "h2d_gb_s") == 40
    assert rate(both | {"after": {"h2d_gb_s": None}}, "h2d_gb_s") == 41
    assert rate(both, "two_way_gb_s") is None


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
    (row,) = rows(found, H100, is_default=True)
    assert (row.share, row.is_met) == (None, None)
    assert "nothing moved" in row.figure


def test_prefills_in_seconds_and_as_a_ratio():
    found = {
        "prefetch": case("prefetch", {}, prefill_s={"1": 0.16, "4": 0.25}),
        "uva": case("uva", {}, prefill_s={"1": 0.20, "4": None}),
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
    plan = case("", {})["plan"] | {"chosen": "18 layers"}
    found = {"chosen": case("auto", {1: decode(0.188, copied=1)}, plan=plan)}
    (row,) = (row for name, row in by_name(found).items() if name.startswith("auto (18 layers)"))
    assert row.share == pytest.approx(0.188 / 0.21575625)
    assert row.is_met
    (row,) = (r for r in rows(found, H100, is_default=False) if r.what.startswith("auto ("))
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
    got = by_name({"prefetch": case("prefetch", {}, counter=counter)})
    row = got.get("prefetch: engine's bytes / NVML's counter of the link, calibrated")
    assert (row.is_met if row else None) is is_met


def test_an_emulated_card_is_held_against_no_target():
    found = {"prefetch": case("prefetch", {1: decode(1.0, copied=8_000_000_000)})}
    made = rows(found, None, is_default=True)
    assert made
    assert {(row.target, row.is_met) for row in made} == {("", None)}


def test_cases_without_figures_give_no_rows():
    found = {
        "prefetch": {"title": "prefetch", "no_fit": "too large"},
        "uva": case("uva", {64: {"no_room": "10240 tokens of KV are needed, 9000 have room"}}),
    }
    assert rows(found, H100, is_default=True) == []
    text = markdown(found, [], "about")
    assert "prefetch: no figures: too large" in text
    assert "uva, batch 64: no figures: 10240 tokens of KV are needed, 9000 have room." in text


def test_staging_pays_from_where_it_stays_faster():
    def staging(place, stage):
        return {
            "uva_in_place": case("uva, 8 layers, never staged", {}, chunk_s=place),
            "uva_staged": case("uva, 8 layers, always staged", {}, chunk_s=stage),
        }

    place = {"1": 0.1, "8": 0.1, "64": 0.2, "256": 0.4, "512": None}
    found = staging(place, {"1": 0.3, "8": 0.09, "64": 0.2, "256": 0.2, "512": 0.2})
    assert crossover(found)[1] == 256  # equal at 64
    assert [tokens for tokens, *_ in crossover(found)[0]] == [1, 8, 64, 256]
    text = markdown(found, [], "about")
    assert "uva, 8 layers: one prompt of so many tokens" in text
    assert "| 64 | 200.0 | 200.0 |" in text
    assert "Staging is faster from 256 tokens on." in text
    never = staging(place, {"1": 0.1, "8": 0.1, "64": 0.1, "256": 0.5})
    assert crossover(never)[1] is None
    assert "not faster at the largest" in markdown(never, [], "about")


def test_tokens_are_compared_as_far_as_both_went():
    found = {
        "resident": case("resident", {1: decode(1.0, tokens=[5, 6, 7, 8])}),
        "uva": case("uva", {1: decode(1.0, tokens=[5, 6])}),
        "prefetch": case("prefetch", {1: decode(1.0, tokens=[5, 7])}),
        "chosen": case("chosen", {16: decode(1.0, tokens=[1])}),
    }
    assert equal_tokens(found) == {"uva": True, "prefetch": False}
    assert "**not equal** to the resident engine's in prefetch" in markdown(found, [], "about")
    del found["prefetch"]
    assert "Greedy tokens: equal" in markdown(found, [], "about")


def test_the_section_has_rows_engines_rates_and_remarks():
    found = {
        "prefetch": case(
            "prefetch", {1: decode(0.2, copied=8_000_000_000)}, utilization=0.9, load_s=7.25
        )
    }
    text = markdown(found, rows(found, H100, is_default=True), "about this run")
    assert text.startswith("about this run\n")
    assert (
        "| prefetch, batch 1: bytes / step time / link rate | 200.00 ms (8.000 GB copied) | 1.000 "
        "| at least 0.97 | met |"
    ) in text
    # 8 GiB in 2 s of touch and pin; ready after 4 s of them, allocate and convert.
    assert "| prefetch | 7.2 | 4.0 | 8.00 | 4.0 | 3 | 1.50 | 13.00 | 9000 |" in text
    assert "| prefetch | 41.0 / 39.0 |  |  | 36.0 / 34.0 | 2100.0 / 1900.0 |" in text
    assert "gpu_memory_utilization 0.9 instead of 0.85" in text


def test_a_sweep_is_a_table_of_its_own():
    steps = {
        "1": {"num_slots": 2, "slot_bytes": 2**29, "decode": decode(0.1, copied=4_000_000_000)},
        "6": {"num_slots": 5, "slot_bytes": 2**29, "decode": decode(0.02)},
    }
    text = markdown({"prefetch_step": {"title": "prefetch 8/5, 8 layers", "sweep": steps}}, [], "a")
    assert "| 1 | 2 | 1.00 | 100.00 | 4.000 | 40.0 |" in text
    assert "| 6 | 5 | 2.50 | 20.00 | 0.000 |  |" in text
    assert text.index("| prefetch_step | slots |") < text.index("| 1 | 2 |")


def test_the_marked_section_is_replaced_and_nothing_else(tmp_path):
    file = tmp_path / "performance.md"
    file.write_text(f"# Head\n\n{BENCH.begin}\nold\n{BENCH.end}\n\n## Tail\n")
    write_section(file, "| new |\n")
    assert file.read_text() == f"# Head\n\n{BENCH.begin}\n\n| new |\n\n{BENCH.end}\n\n## Tail\n"
    write_section(file, "again\n")
    assert file.read_text() == f"# Head\n\n{BENCH.begin}\n\nagain\n\n{BENCH.end}\n\n## Tail\n"


@pytest.mark.parametrize(
    "text",
    [
        "no marks",
        f"{BENCH.begin}\n",
        f"{BENCH.end}\n{BENCH.begin}\n",
        f"{BENCH.begin}{BENCH.begin}{BENCH.end}",
    ],
)
def test_a_document_without_its_marks_is_refused(tmp_path, text):
    file = tmp_path / "performance.md"
    file.write_text(text)
    with pytest.raises(ConfigError, match="once each"):
        write_section(file, "x")
    assert file.read_text() == text
    with pytest.raises(ConfigError, match="No such file"):
        write_section(tmp_path / "absent.md", "x")
