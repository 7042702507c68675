import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.config.schema import ScenarioConfig
from harness.config.serve import Arrivals, ServeScenario, TraceSource
from harness.point.point import prepare
from harness.work.trace import (
    TraceError,
    TraceRow,
    block_lengths,
    check_lengths,
    read_trace,
    scaled_tokens,
)
from tests.harness.cases import run_config

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
MOONCAKE = [
    {"timestamp": 1500, "input_length": 1300, "output_length": 5, "hash_ids": [0, 7, 8]},
    {"timestamp": 1500, "input_length": 512, "output_length": 9, "hash_ids": [0]},
    {"timestamp": 4000.5, "input_length": 3, "output_length": 1},
]


def written(tmp_path, text, name="trace.csv"):
    path = tmp_path / name
    path.write_bytes(text.encode())
    return TraceSource(path=str(path))


def mooncake(tmp_path, rows):
    return written(tmp_path, "\n".join(json.dumps(row) for row in rows), "trace.jsonl")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("begin", ["", "\ufeff"])
def test_azure_rows(tmp_path, begin, end):
    rows = read_trace(written(tmp_path, begin + AZURE.replace("\n", end)), None)
    assert [row.line for row in rows] == [2, 3, 4]
    assert [row.time_s for row in rows] == pytest.approx([0, 4.314579, 4.541877], abs=2e-6)
    assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [
        (374, 44),
        (396, 109),
        (879, 55),
    ]
    assert len(read_trace(written(tmp_path, AZURE), 2)) == 2


def test_azure_times_may_carry_a_zone_and_columns_another_order(tmp_path):
    text = (
        "GeneratedTokens,TIMESTAMP,ContextTokens\n"
        "5,2024-05-10 02:00:00.5+02:00,7\n\n"
        "6,2024-05-10 00:00:00+00:00,8\n"
    )
    rows = read_trace(written(tmp_path, text), None)
    assert [(row.line, row.time_s, row.prompt_tokens) for row in rows] == [(4, 0, 8), (2, 0.5, 7)]


def test_mooncake_rows(tmp_path):
    rows = read_trace(mooncake(tmp_path, MOONCAKE), None)
    assert [row.time_s for row in rows] == pytest.approx([0, 0, 2.5005])
    assert [row.hash_ids for row in rows] == [(0, 7, 8), (0,), ()]
    assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [(1300, 5), (512, 9), (3, 1)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("2023-11-16 18:15:47,1", "line 3: expected 3 columns, got 2"),
        ("2023-11-16 18:15:47,1,2,3", "line 3: expected 3 columns, got 4"),
        ("yesterday,1,2", "line 3: TIMESTAMP: expected a date and time, got 'yesterday'"),
        ("2023-11-16,1,2", "line 3: TIMESTAMP: expected a date and time, got '2023-11-16'"),
        ("x" * 5000 + ",1,2", f"line 3: TIMESTAMP: expected a date and time, got '{'x' * 79}..."),
        ("2023-11-16 18:15:47,x,2", "line 3: ContextTokens: expected a whole number from 1"),
        ("2023-11-16 18:15:47,1,0", "line 3: GeneratedTokens: expected a whole number from 1"),
        ("2023-11-16 18:15:47,-4,2", "line 3: ContextTokens"),
        ("2023-11-16 18:15:47,1.5,2", "line 3: ContextTokens"),
        ("2023-11-16 18:15:47,,2", "line 3: ContextTokens"),
        ("2023-11-16 18:15:47,1,9999999999999", "line 3: GeneratedTokens"),
    ],
)
def test_malformed_azure_rows_are_named_by_line(tmp_path, line, words):
    lines = AZURE.splitlines()
    lines[2] = line
    with pytest.raises(TraceError) as caught:
        read_trace(written(tmp_path, "\n".join(lines)), 1)  # even one that would not be used
    assert words in str(caught.value)
    assert "Correct or remove these lines" in str(caught.value)


def test_only_the_first_malformed_rows_are_shown(tmp_path):
    text = AZURE.splitlines()[0] + "\nx,1,2" * 7
    with pytest.raises(TraceError, match=r"line 6: .* And 2 more\."):
        read_trace(written(tmp_path, text), None)


@pytest.mark.parametrize(
    "text",
    ["", "a,b\n1,2\n", "2023-11-16 18:15:46.6805900,374,44\n", "x" * 200_000, "\0\n" + AZURE],
)
def test_azure_without_its_header_is_refused(tmp_path, text):
    with pytest.raises(TraceError, match="line 1: expected the columns TIMESTAMP"):
        read_trace(written(tmp_path, text), None)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: not JSON"),
        ("[" * 100_000, "line 2: brackets nested too deep"),
        (
            '{"timestamp": 1, "timestamp": 2, "input_length": 2, "output_length": 1}',
            "line 2: 'timestamp' stands there twice",
        ),
        ("[1]", "line 2: expected an object, got list"),
        ('{"timestamp": 1, "input_length": 2}', "line 2: output_length: expected a value"),
        ('{"timestamp": -1, "input_length": 2, "output_length": 1}', "line 2: timestamp"),
        ('{"timestamp": NaN, "input_length": 2, "output_length": 1}', "line 2: timestamp"),
        ('{"timestamp": "1", "input_length": 2, "output_length": 1}', "line 2: timestamp"),
        ('{"timestamp": 1e999, "input_length": 2, "output_length": 1}', "line 2: timestamp"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "line 2: input_length"),
        ('{"timestamp": 1, "input_length": true, "output_length": 1}', "line 2: input_length"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 1.5}', "line 2: output_length"),
        (
            '{"timestamp": 1, "input_length": 2, "output_length": 1, "hash_ids": [1.5]}',
            "line 2: hash_ids",
        ),
        (
            '{"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]}',
            "line 2: hash_ids: expected at most 1 for 512 tokens, one for each 512, got 2",
        ),
    ],
)
def test_malformed_mooncake_rows_are_named_by_line(tmp_path, line, words):
    lines = [json.dumps(row) for row in MOONCAKE]
    lines[1] = line
    with pytest.raises(TraceError) as caught:
        read_trace(written(tmp_path, "\n".join(lines), "t.jsonl"), None)
    assert words in str(caught.value)


def test_a_file_that_is_not_there_or_not_text_or_short_is_refused(tmp_path):
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(TraceSource(path=str(tmp_path / "none.csv")), None)
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="expected text in UTF-8"):
        read_trace(TraceSource(path=str(tmp_path / "bytes.csv")), None)
    with pytest.raises(TraceError, match="expected at least 4 rows, got 3"):
        read_trace(written(tmp_path, AZURE), 4)
    with pytest.raises(TraceError, match=r"at most .* 250,000,000 prompt tokens in all, got 3 and"):
        read_trace(TraceSource(path=str(tmp_path / "trace.csv"), length_scale=1e6), 3)
    with pytest.raises(TraceError, match="expected rows, got none"):
        read_trace(mooncake(tmp_path, []), None)


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("trace")
    for name in ("t.csv", "t.jsonl"):
        (folder / name).write_text(text, encoding="utf-8", newline="")
        with pytest.raises(TraceError):
            read_trace(TraceSource(path=str(folder / name)), None)


def test_lengths_are_scaled_and_keep_a_token():
    assert [scaled_tokens(tokens, 0.1) for tokens in (1, 15, 374)] == [1, 2, 37]
    assert block_lengths(1300, 3, 1.0) == [512, 512, 276]
    assert block_lengths(130, 3, 0.1) == [51, 51, 28]
    assert block_lengths(10, 3, 1.0) == [10, 0, 0]
    assert sum(block_lengths(2000, 3, 1.0)) == 1536  # the hashes end before the prompt


def test_a_packed_file_and_one_in_another_encoding_are_named(tmp_path):
    packed = tmp_path / "trace.csv"
    packed.write_bytes(gzip.compress(AZURE.encode()))
    with pytest.raises(TraceError, match="packed with gzip"):
        read_trace(TraceSource(path=str(packed)), None)
    packed.write_bytes(AZURE.encode("utf-16"))
    with pytest.raises(TraceError, match="expected text in UTF-8"):
        read_trace(TraceSource(path=str(packed)), None)
    packed.write_bytes(AZURE.encode() + b"# caf\xe9")
    with pytest.raises(TraceError, match="in UTF-8: line 5 has the byte 0xe9"):
        read_trace(TraceSource(path=str(packed)), None)


@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 200_000), st.integers(1, 5000)), min_size=1, max_size=20
    ),
    limit=st.integers(128, 10_000),
)
def test_the_factor_that_a_refusal_names_makes_every_row_fit(lengths, limit):
    rows = [
        TraceRow(line=line, time_s=0.0, prompt_tokens=prompt, output_tokens=output)
        for line, (prompt, output) in enumerate(lengths, start=2)
    ]
    try:
        check_lengths(rows, TraceSource(path="a.csv"), limit_tokens=limit, limit_name="a limit")
    except TraceError as error:
        text = str(error)
    else:
        assert max(map(sum, lengths)) <= limit
        return
    first = next(row for row in rows if row.prompt_tokens + row.output_tokens > limit)
    assert f"the first in line {first.line}:" in text
    factor = float(text.partition("at most ")[2].partition(",")[0])
    scaled = TraceSource(path="a.csv", length_scale=factor)
    check_lengths(rows, scaled, limit_tokens=limit, limit_name="a limit")


def test_a_trace_that_is_too_long_for_the_model_is_refused_before_anything_loads(tmp_path):
    source = written(tmp_path, AZURE.replace("879,55", "500,40"))
    part = ServeScenario(num_requests=3, arrivals=Arrivals(process="trace"), trace=source)
    asked = run_config(scenario=ScenarioConfig(name="test", serve=part))
    with pytest.raises(TraceError, match=r"more than 512 tokens .*\(the model's context\)"):
        prepare(asked, print)
