import sys

import pytest

from catalogue.terminal import columns

ROWS = [("point", "GiB", "folder"), ("gpu[red]:smile:", "1.5", "a b"), ("", "12.25", "")]
LINES = [
    "  point              GiB  folder",
    "  gpu[red]:smile:    1.5  a b",
    "                   12.25",
]


def test_columns_are_as_wide_as_their_content_and_cells_are_literal():
    assert columns(ROWS, left={0, 2}) == LINES


@pytest.mark.parametrize(
    "environment", [{"COLUMNS": "12"}, {"FORCE_COLOR": "1", "COLUMNS": "20"}, {"TERM": "dumb"}]
)
def test_lines_do_not_depend_on_the_terminal(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    long = "x" * 300
    assert columns([*ROWS, (long, "1", "")], left={0, 2})[3] == f"  {long}      1"
    assert columns(ROWS, left={0, 2}) == LINES


def test_no_rows_are_no_lines():
    assert columns([]) == []
