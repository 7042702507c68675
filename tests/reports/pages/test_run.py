"""Facts, verdicts and which sections a page has."""

import shlex
from dataclasses import replace

import pytest

from reports import facts
from reports.pages.page import tree_table
from reports.pages.run import asked_section, failed_section, run_page
from reports.pages.verdict import error_line, status_kind, verdict
from reports.pages.write import render
from reports.record.text import ABSENT
from tests.reports.examples import config, expert_rows, gib, no_fit_record, ok_record
from tests.reports.figures.test_run import served


def titles(record):
    return [section.title for section in run_page(record).sections]


def table_rows(record, title):
    (section,) = [s for s in run_page(record).sections if s.title.startswith(title)]
    return {row[0]: row for table in section.tables for row in table.rows}


def test_sections_come_in_reading_order():
    assert titles(ok_record()) == [
        "Latency",
        "Token timeline",
        "Throughput",
        "Memory: budget 13.6 GiB (0.85 of 16.0) on NVIDIA H200",
        "Over time",
        "KV cache",
        "Experts",
        "Load",
        "Roofline of decode",
        "Link, offload and other metrics",
        "Asked and used",
        "Configuration",
        "What was used",
        "Environment",
        "Definitions",
    ]


def test_serving_shows_its_accounts_and_the_rates_of_a_search():
    record = ok_record()
    record.metrics |= {
        "serve/peak_requests_s": 4.0,
        "serve/good_share": 0.96,
        "serve/output_tok_s": 61.0,
        "serve/ttft_ms/p50": 120.0,
    }
    record.samples["serve"] = {
        "num_planned": 40,
        "num_completed": 38,
        "num_failed": 1,
        "num_cancelled": 1,
        "requests": [],
        "trials": [
            {"rate_per_s": 4.0, "good_share": 0.96, "has_passed": True},
            {"rate_per_s": 8.0, "good_share": 0.5, "has_passed": False},
        ],
    }
    (section,) = [s for s in run_page(record).sections if s.title == "Serving"]
    assert section.text == ("Requests: 40 planned, 38 completed, 1 failed, 1 cancelled.",)
    trials, requests, metrics = section.tables
    assert [row[2] for row in trials.rows] == ["yes", "no"]
    assert requests.columns[:3] == ("", "mean", "p50")
    assert [row[:3] for row in requests.rows] == [("TTFT from arrival (ms)", "n/a", "120.0")]
    single = {"serve/peak_requests_s", "serve/good_share", "serve/output_tok_s"}
    assert {row[0] for row in metrics.rows} == single
    assert "n/a" not in {row[1] for row in metrics.rows}
    cards = {card.label: (card.value, card.unit) for card in run_page(record).cards}
    assert cards["Peak rate"][0].startswith("4")
    assert "TTFT from arrival p50" in cards
    assert "serve/good_share" not in table_rows(record, "Link, offload")


def test_the_kv_cache_shows_its_sizes_and_counts():
    (section,) = [s for s in run_page(ok_record()).sections if s.title == "KV cache"]
    assert section.text == (
        "256 blocks (0.50 GiB) on the GPU, 800 blocks (1.56 GiB) in the host tier; counted during "
        "throughput.",
    )
    assert {row[0] for row in section.tables[0].rows} == {"kv/cpu_hit_tokens", "kv/loaded_gib"}
    bare = ok_record(samples={})
    bare.metrics |= {"kv/swaps_in": 0, "kv/hit_share": None}
    (section,) = [s for s in run_page(bare).sections if s.title == "KV cache"]
    assert section.text == ()
    (_, folded) = section.tables
    assert folded.is_folded
    assert {row[0] for row in folded.rows} == {"kv/swaps_in", "kv/hit_share"}


def test_experts_show_who_chose_them_and_what_was_found():
    routing = {"kind": "synthetic", "reuse": 0.8, "measured_reuse": 0.7995}
    record = ok_record(samples={"experts": expert_rows()})
    record.effective = record.effective | {"routing": routing}
    record.config["model"]["routing"] = "synthetic:0.8"
    record.metrics |= {
        "experts/hit_share": 0.7125,
        "experts/planned_hit_share": 0.7,
        "experts/bytes_per_step": gib(0.5),
        "experts/misses_per_step": 20.0,
    }
    page = run_page(record)
    [section] = [section for section in page.sections if section.title == "Experts"]
    assert section.figures == ("experts",)
    words = "drawn with a reuse of 0.8, 80.0 % reuse measured"
    assert section.text == (f"Chosen by: {words}.",)
    values, layers = section.tables
    assert ("experts/hit_share", "71.2 %") in values.rows
    assert layers.rows == [
        ("1", "100.0 %", "0 GiB"),
        ("2", "0.0 %", "92.2 MiB"),
        ("5", "n/a", "0 GiB"),
    ]
    assert f"experts {words}" in page.subtitle
    rows = asked_section(record).tables[0].rows
    assert ("experts", "synthetic:0.8", words) in rows


def test_the_model_s_own_router_is_not_worth_a_title():
    record = ok_record()
    record.effective = record.effective | {"routing": {"kind": "router"}}
    del record.metrics["experts/hits_per_step"]
    page = run_page(record)
    assert "router" not in page.subtitle
    assert "Experts" not in [section.title for section in page.sections]
    assert ("experts", "", "the model's router") in asked_section(record).tables[0].rows


def test_an_empty_record_is_a_page():
    bare = ok_record(plan=None, metrics={}, samples={}, config={}, overrides=[], effective={})
    bare.environment = {}
    page = run_page(bare)
    assert [section.title for section in page.sections] == ["Over time", "Definitions"]
    assert page.cards == ()


@pytest.mark.parametrize(
    ("memory_gib", "emulated", "card", "title"),
    [
        (16.0, False, True, "budget 13.6 GiB (0.85 of 16.0) on NVIDIA H200"),
        (16.0, False, False, "budget 13.6 GiB (0.85 of 16.0)"),
        (16.0, True, False, "budget 13.6 GiB (0.85 of 16.0), emulated on the CPU"),
        (None, True, False, "budget 13.6 GiB, emulated on the CPU"),
        (None, False, True, "NVIDIA H200, 140.4 GiB"),
        (140.4, False, True, "NVIDIA H200, 140.4 GiB"),
        (None, False, False, None),
    ],
)
def test_budget_title(memory_gib, emulated, card, title):
    record = ok_record(config=config(memory_gib=memory_gib))
    record.environment["emulated"] = emulated
    if not card:
        record.environment["gpu"] = None
    assert facts.budget_title(record) == title


@pytest.mark.parametrize("name", ["none", "uva", "prefetch"])
def test_offload_name(name):
    assert facts.offload_name(ok_record(config=config(name))) == name
    chosen = config(name)
    chosen["offload"]["offload_backend"] = "auto"
    assert facts.offload_name(ok_record(config=chosen)) == name


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"kv": {"swap_space": 4.0}}, "swap_space"),
        ({"offload": {"offload_backend": "auto", "experts": {"expert_slots": 8}}}, "experts"),
        ({"planner": {"auto_fields": ["cpu_offload_gb"]}}, "uva"),
    ],
)
def test_what_places_weights_without_a_backend_is_named(settings, name):
    assert facts.offload_name(ok_record(config=config("none") | settings)) == name


def test_link_bound():
    record = ok_record()
    assert facts.link_bound_ms(record) == pytest.approx(8.01 * 2**30 / 55.5e9 * 1e3, rel=1e-6)
    record.metrics["offload/bytes_per_step"] = None
    assert facts.link_bound_ms(record) == pytest.approx(8.01 * 2**30 / 55.5e9 * 1e3, rel=1e-6)
    record.plan["bytes_per_step"] = 0
    assert facts.link_bound_ms(record) is None


def test_latency_rows_show_absent_percentiles_and_say_why():
    rows = table_rows(ok_record(), "Latency")
    assert rows["TTFT (ms)"][3:6] == ("n/a", "n/a", "n/a")
    assert rows["TTFT (ms)"][9] == "20"
    assert rows["ITL, pooled (ms)"][9] == "620"
    (section,) = [s for s in run_page(ok_record()).sections if s.title == "Latency"]
    assert "(E2E - TTFT) / (output tokens - 1)" in section.tables[0].tips[1]
    assert section.text == (
        "Not shown, because 20 samples are too few: p90 (needs 64), p95 (needs 130),"
        " p99 (needs 662).",
    )


def test_intervals_over_repeats_stand_beside_the_means():
    record = ok_record()
    assert "95 % interval" not in latency_table(record).columns
    record.metrics |= {"latency/tpot_ms/ci95_low": 150.0, "latency/tpot_ms/ci95_high": 160.0}
    table = latency_table(record)
    place = table.columns.index("95 % interval")
    cells = {row[0]: row[place] for row in table.rows}
    assert (cells["TPOT (ms)"], cells["TTFT (ms)"]) == ("150.0 to 160.0", "n/a")
    assert all(len(row) == len(table.columns) for row in table.rows)


def latency_table(record):
    (section,) = [s for s in run_page(record).sections if s.title == "Latency"]
    return section.tables[0]


def test_every_metric_is_on_the_page_once():
    record = ok_record()
    record.metrics |= {"custom/thing_s": 1.0, "latency/odd_ms/p50": 2.0}
    named = {
        row[0]
        for section in run_page(record).sections
        for table in section.tables
        for row in table.rows
    }
    per_statistic = {name for name in record.metrics if name.split("/")[1] in STATISTIC_TABLE}
    assert set(record.metrics) - per_statistic <= named
    assert {"custom/thing_s", "latency/odd_ms/p50"} <= named


STATISTIC_TABLE = {"ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"}


def test_unknown_metrics_say_that_they_have_no_definition():
    record = ok_record(metrics={"custom/thing_s": 1.0})
    (section,) = [s for s in run_page(record).sections if s.title.startswith("Link")]
    assert section.tables[0].rows == [("custom/thing_s", "1.00 s")]
    assert section.tables[0].tips == {0: "no definition is recorded for this name"}


def test_parts_sum_to_the_total():
    rows = table_rows(ok_record(), "Memory")
    assert rows["kv cache"] == ("kv cache", "6.20 GiB", "45.6 %")
    assert rows["usable"][1] == "13.6 GiB"
    plan = ok_record().plan
    del plan["gpu"]["total_bytes"]
    assert facts.total_bytes(plan, "gpu") == sum(plan["gpu"]["items"].values())


def test_load_table_has_phases_busy_times_and_totals():
    rows = table_rows(ok_record(), "Load")
    assert rows["read"] == ("read", "9.80 (busy 9.80)", "2.00 (busy 2.00)")
    assert rows["total"] == ("total", "16.9", "9.10")
    assert rows["load/cold_total_s"] == ("load/cold_total_s", "16.9 s")
    (section,) = [s for s in run_page(ok_record()).sections if s.title == "Load"]
    assert section.tables[1].tips[1].endswith("dropped from the page cache first")


def test_load_table_has_the_bytes_of_phases():
    record = ok_record()
    for row, size in zip(record.samples["load"], (2 * 2**30, 0), strict=True):
        row["moved_bytes"] = {"read": size}
    assert table_rows(record, "Load")["read"] == (
        "read",
        "9.80 (busy 9.80, 2.00 GiB)",
        "2.00 (busy 2.00)",
    )


@pytest.mark.parametrize(
    ("status", "valid", "kind", "label"),
    [
        ("ok", True, "good", "ok, valid: the run ended and was measured"),
        ("ok", False, "warn", "ok, not valid: the run ended and was measured"),
        ("ok", None, "good", "ok, not judged: the run ended and was measured"),
        ("oom", None, "bad", "oom"),
        ("skipped", None, "warn", "skipped"),
    ],
)
def test_verdict_labels(status, valid, kind, label):
    found = verdict(ok_record(status=status, valid=valid))
    assert (found.kind, found.label) == (kind, label)


def test_verdict_carries_reasons_fallbacks_and_warnings():
    record = ok_record(valid=False, reasons=["drift of 12 %: lock the clocks"])
    record.effective |= {"fallbacks": ["no pinning: limit"], "warnings": ["w"], "notes": ["n"]}
    assert verdict(record).lines == (
        "drift of 12 %: lock the clocks",
        "Fallback: no pinning: limit",
        "Warning: w",
        "Note: n",
    )


def test_a_refusal_alone_says_what_to_change():
    found = verdict(no_fit_record())
    assert found.advice == ()
    assert "Set uva.cpu_offload_gb=2 or more." in found.lines[0]
    assert status_kind(no_fit_record()) == "bad"
    labels = {card.label: card.value for card in run_page(no_fit_record()).cards}
    assert labels == {"GPU needed": "15.5", "GPU usable": "13.6", "Over budget": "1.90"}


def test_an_error_points_to_its_traceback_only_where_there_is_one():
    error = {"type": "ModelUnavailableError", "message": "m", "phase": "prepare"}
    found = verdict(ok_record(status="failed", metrics={}, error=error | {"traceback": None}))
    assert (found.answer, found.label) == ("The run ended with an error", "failed")
    assert (found.advice, found.traceback) == ((), None)
    found = verdict(ok_record(status="failed", metrics={}, error=error | {"traceback": "t"}))
    assert found.advice == ("The traceback is below; worker.log is in the run's folder.",)


def test_a_host_over_its_limit_gives_no_advice_beside_the_error():
    record = no_fit_record(config=config("none"))
    record.plan["host"]["total_bytes"] = gib(200)
    assert verdict(record).advice == ()


def test_a_partial_run_names_its_parts_and_keeps_its_figures():
    error = {
        "type": "CapacityError",
        "message": "load could not be measured (no_fit): m",
        "phase": "build",
        "status": "no_fit",
        "measured": ["latency", "throughput"],
        "missing": ["load"],
    }
    record = ok_record(status="partial", valid=True, error=error)
    found = verdict(record)
    assert (found.kind, found.advice) == ("warn", ())
    assert found.label == "partial, valid: some parts were measured, others could not be"
    assert found.lines[0] == "Measured: latency, throughput. Not measured: load."
    assert found.lines[1].startswith("CapacityError: load could not be measured (no_fit)")
    assert [card.label for card in run_page(record).cards] == [
        card.label for card in run_page(ok_record()).cards
    ]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("timeout", "Raise timeout_s (now 1800)"),
        ("oom", "engine.gpu_memory_utilization (now 0.85)"),
        ("killed", "Run the point again"),
    ],
)
def test_every_bad_end_says_what_to_change(status, words):
    record = ok_record(status=status, error={"type": "X", "message": "m"})
    assert words in " ".join(verdict(record).advice)


def test_an_error_s_first_line_stands_alone_and_columns_of_others_stay():
    rows = "Best fix   offload=auto  9 tok/s  2 GiB in\n                                  host"
    record = no_fit_record(error={"type": "X", "message": f"does not\t fit.\n{rows}"})
    assert error_line(record) == "X: does not fit."
    page = run_page(record)
    assert page.verdict.rest == rows
    assert f"<pre>{rows}</pre>" in render(page, "html")
    assert f"```\n{rows}\n```" in render(page, "md")


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"gpu": None, "host": [], "kv": 3, "placements": "x"},
        {"gpu": {"items": {"weights": None, "kv_cache": True, "a.b": 5}}},
        {"gpu": {"items": {"weights": 5}}, "host": {"items": {}, "limit_bytes": None}},
    ],
)
def test_plans_with_missing_or_odd_parts_still_make_a_page(plan):
    page = run_page(ok_record(plan=plan))
    assert page.title == "olmo7b-uva-rtx4080_16gb"


def test_rates_are_told_by_the_second():
    table = tree_table({"rates": {"store_bytes_s": 2**31, "held_bytes": 2**31}})
    assert table.rows == [("rates.store_bytes_s", "2.00 GiB/s"), ("rates.held_bytes", "2.00 GiB")]


def test_lists_of_settings_have_a_row_for_each_and_floats_few_digits():
    groups = [{"layers": 30, "window": None}, {"layers": 4, "window": 512}]
    table = tree_table({"kv": {"groups": groups, "max_kept": 26.611328125, "share": 0.9}})
    assert table.rows == [
        ("kv.groups.0.layers", "30"),
        ("kv.groups.0.window", "null"),
        ("kv.groups.1.layers", "4"),
        ("kv.groups.1.window", "512"),
        ("kv.max_kept", "26.611"),
        ("kv.share", "0.9"),
    ]


def test_failed_requests_are_counted_by_error():
    record = ok_record()
    assert failed_section(record) is None
    record.samples["serve"] = {"requests": [served(), *[served(error="queue full")] * 3]}
    record.samples["latency"][0]["error"] = "too long"
    (table,) = failed_section(record).tables
    assert table.rows == [
        ("latency", "1 of 20", "too long"),
        ("serve", "3 of 4", "queue full"),
    ]


def test_asked_stands_beside_used():
    record = ok_record()
    record.effective |= {
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "placement_bytes": {"resident": gib(5), "uva": gib(8), "prefetch": 0},
        "correctness": {"checked": True, "num_tokens": 32},
        "stats": {"peak_running": 7},
    }
    found = {row[0]: row[1:] for row in asked_section(record).tables[0].rows}
    assert found["system"] == ("native", "this project")
    assert found["dtype"] == ("bfloat16", "bfloat16")
    assert found["GPU memory"] == ("85 % of 16.0 GiB", "peak 12.9 GiB")
    assert found["offload"] == ("uva", "5.00 GiB resident, 8.00 GiB uva")
    assert found["sequences at once"] == ("64", "7 at most")
    assert found["longest sequence"] == ("the model's own limit", "4,096 tokens")
    assert found["tokens compared"][1] == "32 tokens: equal"


def test_a_peer_names_its_versions_and_how_far_its_tokens_agree():
    record = ok_record()
    record.config["system"] = {"kind": "accelerate"}
    record.effective |= {
        "system_version": "transformers 5.17, accelerate 1.15",
        "correctness": {"checked": True, "num_tokens": 32},
    }
    record.metrics["correctness/equal_share"] = 0.75
    found = {row[0]: row[1:] for row in asked_section(record).tables[0].rows}
    assert found["system"] == ("accelerate", "transformers 5.17, accelerate 1.15")
    assert found["tokens compared"][1] == "32 tokens: 75 % equal"
    record.effective["correctness"] = {"checked": False}
    found = {row[0]: row[1:] for row in asked_section(record).tables[0].rows}
    assert found["tokens compared"][1] == "not compared"


def test_the_answer_comes_first_and_says_what_was_not_needed():
    record = ok_record()
    assert verdict(record).answer == (
        "402.7 tok/s with all requests at once, 6.38 tok/s of one request alone (median), first"
        " token after 223.7 ms"
    )
    assert verdict(record).kind == "good"
    record.effective["warnings"] = ["offload=uva is not needed: everything fits. Set offload=none."]
    found = verdict(record)
    assert found.answer.endswith("; uva was not needed")
    assert (found.kind, found.label) == (
        "warn",
        "ok, valid: the run ended and was measured, with 1 warning",
    )
    killed = ok_record(status="killed", valid=None)
    assert verdict(killed).answer == "The worker was ended by a signal"


def test_fallbacks_count_as_warnings_but_for_those_of_an_emulation():
    record = ok_record()
    record.effective = record.effective | {"fallbacks": ["fallback: pageable memory"]}
    assert verdict(record).kind == "warn"
    assert verdict(record).lines == ("Fallback: pageable memory",)
    record.environment = record.environment | {"emulated": True}
    assert verdict(record).kind == "good"


def test_cards_have_context_and_their_definitions_as_tips():
    record = ok_record()
    record.metrics |= {
        "latency/tpot_ms/p90": 170.0,
        "predicted/tpot_ms": 120.0,
        "predicted/tpot_ms_difference_pct": -23.4,
        "predicted/gpu_peak_gib": 12.94,
        "predicted/gpu_peak_gib_difference_pct": 0.0,
    }
    cards = {card.label: card for card in run_page(record).cards}
    tpot = cards["TPOT p50"]
    assert tpot.kind == "warn"
    assert tpot.tip.startswith("time per output token of a request")
    assert tpot.note == (
        "p90 170.0 ms; the link allows 155.0 ms (99 % reached); predicted 120.0 ms, 23 % too low"
    )
    plan = record.plan | {"predicted": {"rates": {"source": "sheet of x", "is_cpu": False}}}
    assert run_page(replace(record, plan=plan)).cards == run_page(record).cards  # on that card
    page = run_page(replace(record, plan=plan, effective={"emulated": True}))
    other = next(card for card in page.cards if card.label == "TPOT p50")
    assert (other.kind, other.note.split("; ")[-1]) == ("plain", "predicted for the card: 120.0 ms")
    (table,) = next(s for s in page.sections if s.title.startswith("Pred")).tables
    assert (table.kinds, {row[3] for row in table.rows}) == ({}, {ABSENT})
    peak = cards["GPU peak"]
    assert (peak.kind, peak.note) == (
        "plain",
        "of 13.6 GiB usable; predicted 12.9 GiB, as measured",
    )
    (table,) = next(s for s in run_page(record).sections if s.title.startswith("Pred")).tables
    assert table.kinds == {0: "warn"}
    assert run_page(record).commands[0].text == (
        "tightfit run +model=olmo7b offload=uva gpu=rtx4080_16gb"
    )


def test_a_command_is_quoted_so_that_it_can_be_read():
    record = ok_record(overrides=["ab.a=['offload=none']", "x='$HOME'", "gpu=a b"])
    text = run_page(record).commands[0].text
    assert text.startswith("tightfit run \"ab.a=['offload=none']\" ")
    assert shlex.split(text)[2:] == record.overrides
    mine = replace(record, effective={"config_dir": "/my files"})
    words = shlex.split(run_page(mine).commands[0].text)
    assert words[2:] == ["--config-dir", "/my files", *record.overrides]


def test_a_run_that_mlflow_does_not_have_is_not_looked_for_there():
    tracking = {"backend": "mlflow", "uri": "sqlite:///my runs.db"}
    record = ok_record(config=ok_record().config | {"tracking": tracking}, run_id="a-1")
    assert [command.label for command in run_page(record).commands] == ["Run it again"]


@pytest.mark.parametrize(
    ("uri", "before"),
    [
        ("http://host:5000/", ""),
        (None, "tightfit ui    # then "),
        ("sqlite:///my runs.db", "tightfit ui --store 'sqlite:///my runs.db'    # then "),
    ],
)
def test_a_run_whose_experiment_is_known_has_its_address_in_mlflow(uri, before):
    tracking = {"backend": "mlflow", "uri": uri}
    config, effective = ok_record().config, ok_record().effective
    record = ok_record(
        config=config | {"tracking": tracking},
        run_id="a-1",
        effective=effective | {"mlflow_experiment_id": "3"},
    )
    page = run_page(record)
    base = "http://127.0.0.1:5000" if before else "http://host:5000"
    text = page.commands[1].text
    assert text.startswith(f"{before}{base}/#/experiments/3/runs?workflowType=machine_learning&")
    assert text.endswith("searchFilter=tags.%60harness.run_id%60%20LIKE%20%27%25a-1%25%27")
    assert ('<a href="http://host:5000/#/experiments/3' in render(page, "html")) is not bool(before)


def test_what_is_long_is_folded_and_not_printed():
    sections = {section.short: section for section in run_page(ok_record()).sections}
    assert not sections["Configuration"].is_printed
    assert all(table.is_folded for table in sections["Configuration"].tables)
    parts = [table for table in sections["Memory"].tables if "by part" in table.caption]
    assert [(table.is_folded, table.is_printed) for table in parts] == [(True, True)] * 2
