"""The harness's own cost, measured: figures are there; how large they are is the machine's."""

import json

import pytest

from harness.overhead import BARE, main

pytestmark = pytest.mark.slow


def test_figures_of_every_part_and_of_a_known_rate(capsys):
    assert main(["--json", "--repeats", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["costs"]) == {*BARE, *BARE.values()}
    for cost in found["costs"].values():
        assert cost["per_request_us"]["count"] == 2
        assert cost["per_request_us"]["mean"] > 0
    known = found["known_rate"]
    assert known["latency/ttft_ms/mean"] >= 5
    assert known["latency/tpot_ms/mean"] >= 5
    assert known["serve/schedule_lag_ms/mean"] >= 0


def test_the_table_has_a_line_a_part(capsys):
    assert main(["--repeats", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith(f"  {part}  ") for line in lines) for part in BARE)


def test_one_repeat_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--repeats", "1"])
    assert "at least 2" in capsys.readouterr().err
