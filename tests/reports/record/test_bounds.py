"""Rates that no link can carry, whoever measured them."""

import pytest

from reports.pages.compare import winner
from reports.pages.sweep import sweep_page
from reports.pages.verdict import state, status_kind, verdict
from reports.record.judging import impossible_rate, link_gb_s, offloaded_bytes
from reports.record.metrics import METRICS
from tests.reports.examples import config, environment, gib, ok_record
from tests.reports.test_compare import rows_of

PROBED = {"link/h2d_gb_s": 50.0}


def foreign(tpot_ms, size=None, **changes):
    """A run of a peer, which counts no bytes: 8 GiB asked for over PCIe 5 x16, 63 GB/s."""
    record = ok_record(
        name="peer",
        config=config(),
        plan=None,
        samples={},
        metrics={"latency/tpot_ms/p50": tpot_ms},
        effective={"host_pinned_bytes": size},
        **changes,
    )
    record.config["system"] = {"kind": "vllm"}
    return record


@pytest.mark.parametrize(
    ("tpot_ms", "size", "probed", "is_possible"),
    [
        (137.0, None, {}, True),  # 8 GiB in 137 ms are 62.7 GB/s
        (120.0, None, {}, False),
        (10.0, None, {}, False),
        (172.0, None, PROBED, True),
        (137.0, None, PROBED, False),
        (43.0, gib(2), PROBED, True),
        (20.0, gib(2), PROBED, False),
    ],
)
def test_one_request_cannot_outrun_the_link(tpot_ms, size, probed, is_possible):
    record = foreign(tpot_ms, size)
    record.metrics |= probed
    assert (impossible_rate(record) == "") is is_possible


def test_the_flag_says_what_is_wrong_and_the_page_does_not_call_it_valid():
    record = foreign(20.0, valid=True)
    text = impossible_rate(record)
    assert "50.0 tokens/s of one request are impossible: 8.00 GiB were to be in host memory" in text
    assert "the link carries 63.0 GB/s (PCIe 5 x16), which is 7.34 tokens/s at most" in text
    assert text in verdict(record).lines
    assert (state(record), status_kind(record)) == ("ok, not valid", "warn")
    said = foreign(20.0, valid=False, reasons=[text])
    assert impossible_rate(said) == ""
    assert verdict(said).lines == (text,)


def test_an_impossible_run_wins_nothing(tmp_path):
    rows = rows_of(tmp_path, ok_record(), foreign(20.0))
    assert winner(rows, [METRICS["latency/tpot_ms"].at("p50")]).startswith("No winner: no two")
    cards = {card.label: card.note for card in sweep_page("s", rows, {}).cards}
    assert cards["Only TPOT p50"].startswith("point 0. olmo7b")


def test_bytes_are_the_counted_ones_then_the_planned_then_those_in_host_memory():
    record = ok_record()
    assert offloaded_bytes(record) == (gib(8.01), "were counted")
    del record.metrics["offload/bytes_per_step"]
    record.plan["bytes_per_step"] = 0
    assert offloaded_bytes(record) == (0.0, "are planned")
    record.plan = None
    assert offloaded_bytes(record) == (gib(8.01), "are in host memory")


@pytest.mark.parametrize(
    "changes",
    [
        {"environment": environment() | {"emulated": True}},
        {"environment": {}},
        {"environment": {"gpu": {"pcie": {"gen": 9, "width": 16}}}},
        {"environment": {"gpu": None}},
    ],
)
def test_what_is_not_known_is_not_judged(changes):
    record = foreign(0.1)
    for key, value in changes.items():
        setattr(record, key, value)
    assert impossible_rate(record) == ""


def test_the_link_is_its_widest():
    record = foreign(1.0)
    record.environment = {"gpu": {"pcie": {"gen": 1, "width": 16, "max_gen": 4, "max_width": 8}}}
    assert link_gb_s(record) == (pytest.approx(15.75, rel=0.001), "PCIe 4 x8")
