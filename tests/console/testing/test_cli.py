"""`tightfit models test` with a stand-in for the harness."""

import json
from functools import partial

import pytest

from catalogue.terminal import EXIT_NOT_ALL_OK, EXIT_OK
from console.registry.database import Database
from console.testing import cli
from console.testing.tests import Tests
from engine.errors import ConfigError
from tests.console.testing.conftest import StandIn, record
from tests.console.testing.test_results import ROW, ab_record


@pytest.fixture(autouse=True)
def _plays(tests: Tests, monkeypatch: pytest.MonkeyPatch) -> None:
    played = partial(Tests, command=tests._command, has_gpu=lambda: False, look_s=0.01)
    monkeypatch.setattr(cli, "Tests", played)


@pytest.mark.thorough
def test_figures_are_told(stand_in: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in.plays(records={".": record()})
    assert cli.main(["toy", "--requests", "1"]) == EXIT_OK
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "test 1 of toy: finished"
    assert told[1].startswith("  output 100.0 tok/s")
    assert cli.main(["toy", "--json"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["test"]["num_requests"] == 100
    assert cli.main(["toy", "--csv"]) == EXIT_OK
    assert capsys.readouterr().out.startswith(
        "model,test,profile,card,part,metric,unit,value\ntoy,"
    )


@pytest.mark.thorough
def test_both_sides_are_told(stand_in: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in.plays(records={".": ab_record(rows=[ROW])})
    assert cli.main(["toy", "--against", "uva", "--pairs", "1", "--aa-pairs", "0"]) == EXIT_OK
    told = capsys.readouterr().out
    assert "  a = default, b = uva\n" in told
    assert "  output tokens: 100.0 against 25.0 tok/s, b / a 0.250\n" in told
    assert "  4 of 4 requests gave equal tokens\n" in told
    stand_in.plays(records={".": ab_record(b="no_fit")})
    assert cli.main(["toy", "--against", "uva"]) == EXIT_OK
    told = capsys.readouterr().out
    assert "  side b does not fit: GPU: 3 GiB short.\n" in told
    assert "0 tok/s" not in told


@pytest.mark.thorough
def test_one_that_does_not_fit_says_why(
    stand_in: StandIn, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in.plays(records={".": record("no_fit")})
    assert cli.main(["toy"]) == EXIT_NOT_ALL_OK
    assert "no_fit\n  it is no_fit" in capsys.readouterr().out
    stand_in.plays(records={".": record()})
    assert cli.main(["toy", "--resume"]) == EXIT_OK
    with pytest.raises(ConfigError, match="expected one that ended early, got status finished"):
        cli.main(["toy", "--resume"])
    with pytest.raises(ConfigError, match=r"a model of the registry \(toy\), got 'none'"):
        cli.main(["none"])
