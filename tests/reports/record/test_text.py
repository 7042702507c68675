"""Digits, units and names."""

import pytest

from reports.record.text import duration, flatten, gib, last_keys, leaf, number, shorten

GIB = 2**30


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"),
        (0, "0"),
        (0.0, "0"),
        (0.01234, "0.0123"),
        (0.1, "0.10"),
        (5.516, "5.52"),
        (90.5, "90.5"),
        (176.84, "176.8"),
        (11876.4, "11,876"),
        (8602124288.0, "8,602,124,288"),
        (-3.14159, "-3.14"),
    ],
)
def test_number(value, text):
    assert number(value) == text


def test_bytes_and_durations():
    assert gib(None) == "n/a"
    assert gib(0) == "0 GiB"
    assert gib(8.01 * GIB) == "8.01 GiB"
    assert gib(64 * 2**20) == "64.0 MiB"
    assert gib(32 * 2**10) == "32.0 KiB"
    assert duration(None) == "n/a"
    assert duration(12.34) == "12.3 s"
    assert duration(312.4) == "5 min 12 s"
    assert duration(7380) == "2 h 03 min"


def test_trees_are_flattened_to_leaves():
    tree = {"a": {"b": 1, "c": {}}, "d": [1, 2], "e": None}
    assert dict(flatten(tree)) == {"a.b": 1, "a.c": {}, "d": [1, 2], "e": None}
    assert [leaf(value) for value in ("x", None, True, [1], {})] == [
        "x",
        "null",
        "true",
        "[1]",
        "{}",
    ]


@pytest.mark.parametrize(
    ("overrides", "short"),
    [
        ("offload.uva.cpu_offload_gb=4 offload=none", "cpu_offload_gb=4 offload=none"),
        ("scenario.a.seed=1 scenario.b.seed=2 x.y=[0.5]", "a.seed=1 b.seed=2 y=[0.5]"),
        ("a.b c", "a.b c"),
    ],
)
def test_figures_name_settings_by_their_last_key(overrides, short):
    assert last_keys(overrides) == short


def test_long_text_is_cut_in_the_middle():
    assert shorten("a  b\nc", 10) == "a b c"
    cut = shorten("0123456789" * 3, 11)
    assert cut == "0123...6789"
    assert len(cut) == 11
