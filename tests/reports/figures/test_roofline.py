"""The roofline of decode."""

import pytest

from reports.figures.run import FIGURES, decode_points
from reports.pages.run import roofline_section
from tests.reports.examples import gib, ok_record
from tests.reports.figures.pictures import LIGHT


def test_roofs_are_rates_over_bytes_of_a_token():
    record = ok_record()
    record.metrics |= {"link/h2d_gb_s": 50.0, "link/hbm_copy_gb_s": 2000.0}
    record.plan["placements"] = {"resident": gib(5), "uva": gib(3), "prefetch": gib(2)}
    record.plan["bytes_per_step"] = gib(5)
    record.samples["throughput"] = {"num_decode_steps": 10, "num_decode_tokens": 200}
    record.metrics["throughput/decode_tok_s"] = 150.0
    one, many = decode_points(record)
    assert one.bound_tok_s("link") == pytest.approx(50e9 / gib(5))
    assert one.bound_tok_s("hbm") == pytest.approx(2000e9 / gib(7))
    assert many.batch == 20
    assert many.bound_tok_s("link") == pytest.approx(20 * 50e9 / gib(5))
    (table,) = roofline_section(record).tables
    assert [row[0] for row in table.rows] == [
        "one sequence, 1.00 a step",
        "throughput, 20.0 a step",
    ]


def test_no_roofline_of_an_emulation_or_a_peer_without_a_plan():
    emulated = ok_record()
    emulated.environment["emulated"] = True
    assert roofline_section(emulated) is None
    assert roofline_section(ok_record(plan={"max_model_len": 5})) is None


def test_resident_weights_have_no_link_roof():
    record = ok_record()
    record.plan |= {"bytes_per_step": 0, "placements": {"resident": gib(5)}}
    record.metrics |= {"link/hbm_copy_gb_s": 2000.0}
    assert all(point.bound_tok_s("link") is None for point in decode_points(record))
    assert FIGURES["roofline"](record, LIGHT) is not None
