import json
import sys

import pytest

from catalogue.terminal import CommandParser, UsageError, columns, say, say_error

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


WIDE = [
    ("point", "fits", "metric a (ms)", "metric b (ms)", "best settings"),
    ("gpu=a offload=none", "no", "-", "-", "offload=none engine.weight_format=lossless"),
    ("gpu=b offload=prefetch", "yes", "1.25", "2.5", "as set"),
]


def test_a_table_is_wrapped_by_words_to_80_columns_and_what_is_wider_follows_below():
    assert columns([(row[0], row[1], row[3], row[4]) for row in WIDE], left={0, 3}) == [
        "  point                   fits  metric b (ms)  best settings",
        "  gpu=a offload=none        no              -  offload=none",
        "                                               engine.weight_format=lossless",
        "  gpu=b offload=prefetch   yes            2.5  as set",
    ]
    narrow = ("model=x gpu=a offload=none", *WIDE[1][1:])
    lines = columns([*WIDE[:2], narrow], left={0, 4})
    assert max(map(len, lines)) <= 80
    assert lines == [
        "  point                       fits  metric a (ms)  metric b (ms)",
        "  gpu=a offload=none            no              -              -",
        "  model=x gpu=a offload=none    no              -              -",
        "",
        "  point                       best settings",
        "  gpu=a offload=none          offload=none engine.weight_format=lossless",
        "  model=x gpu=a offload=none  offload=none engine.weight_format=lossless",
    ]
    assert columns([("point",), (" ".join(["gpu=rtx4080_16gb"] * 5),)])[1:] == [
        f"  {' '.join(['gpu=rtx4080_16gb'] * 4)}",
        "    gpu=rtx4080_16gb",
    ]


REFUSED = (
    "error: model olmo7b: expected its files, found none. Download them where the hub can be "
    "reached: `tightfit models fetch olmo7b --config-dir '/a b/c'`. Then copy the folder here, "
    "`ls` shows it."
)


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (
            "",  # not set, and no terminal
            [
                "error: model olmo7b: expected its files, found none. Download them where the hub",
                "can be reached:",
                "  tightfit models fetch olmo7b --config-dir '/a b/c'",
                "Then copy the folder here, `ls` shows it.",
            ],
        ),
        (
            "40",
            [
                "error: model olmo7b: expected its files,",
                "found none. Download them where the hub",
                "can be reached:",
                "  tightfit models fetch olmo7b --config-dir '/a b/c'",
                "Then copy the folder here, `ls` shows",
                "it.",
            ],
        ),
        ("400", [REFUSED]),
    ],
)
def test_what_is_said_is_wrapped_by_words_and_commands_are_not(
    width: str,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    say(REFUSED)
    assert capsys.readouterr().err.splitlines() == lines
    row = f"  one line that is indented: {'x ' * 60}"
    say(f"short\n{row}")
    assert capsys.readouterr().err == f"short\n{row}\n"


def test_an_error_beside_json_is_a_document_and_not_wrapped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = REFUSED.removeprefix("error: ")
    assert say_error(text, ["list", "--json"], 2, {"points": []}) == 2
    said = capsys.readouterr()
    assert said.err == f"{REFUSED}\n"
    document = {"points": [], "kind": "error", "exit_code": 2, "message": text}
    assert json.loads(said.out) == document
    assert say_error(text, ["list"], 3) == 3
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 6
    assert said.out == ""


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["lst"], "of list, show, got 'lst'. Did you mean list? See `tool --help`."),
        (["list", "--jsn"], "unknown argument --jsn. Did you mean --json? See `tool --help`."),
        ([], "the following arguments are required: verb. See `tool --help`."),
    ],
)
def test_a_command_line_is_refused_with_what_is_closest(typed: list[str], said: str) -> None:
    parser = CommandParser(prog="tool")
    parser.add_argument("verb", choices=("list", "show"))
    parser.add_argument("--json", action="store_true")
    with pytest.raises(UsageError) as error:
        parser.parse_args(typed)
    assert str(error.value).endswith(said)
