"""Calls of tools in texts, whole and in every way of parting them."""

import json

import pytest

from server.tools import Call, Piece, parser_of

HERMES = 'Let me look.\n<tool_call>\n{"name": "find", "arguments": {"q": "a < b"}}\n</tool_call>'
TWO = HERMES + '\n<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>\n'
LLAMA = '{"name": "find", "parameters": {"q": "\u00e9"}}; {"name": "add", "parameters": {}}'


def parsed(parser: str, parts: list[str]) -> tuple[str, list[Call]]:
    """The text and the calls of an answer that comes in parts."""
    found: list[Piece] = []
    reader = parser_of(parser)
    for part in parts:
        found += reader.feed(part)
    found += reader.finish()
    text = "".join(piece for piece in found if isinstance(piece, str))
    return text, [piece for piece in found if isinstance(piece, Call)]


@pytest.mark.parametrize(
    ("parser", "text", "plain", "names"),
    [
        ("hermes", HERMES, "Let me look.", ["find"]),
        ("hermes", TWO, "Let me look.", ["find", "add"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "", ["f"]),
        ("hermes", "no call <tool at all ", "no call <tool at all ", []),
        ("hermes", "<tool_call>no</tool_call> after", "<tool_call>no</tool_call> after", []),
        ("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ("hermes", "   ", "   ", []),
        ("llama3_json", LLAMA, "", ["find", "add"]),
        ("llama3_json", f"<|python_tag|>{LLAMA}", "", ["find", "add"]),
        ("llama3_json", "It is {not} a call", "It is {not} a call", []),
        ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
        ("llama3_json", '{"name": "f", "param', '{"name": "f", "param', []),
        ("none", HERMES, HERMES, []),
    ],
)  # fmt: skip
def test_text_and_calls_are_the_same_however_the_answer_is_parted(
    parser: str, text: str, plain: str, names: list[str]
) -> None:
    for size in (1, 2, 3, 7, len(text)):
        parts = [text[begin : begin + size] for begin in range(0, len(text), size)]
        found, calls = parsed(parser, parts)
        assert found == plain
        assert [call.name for call in calls] == names
        assert all(isinstance(json.loads(call.arguments), dict) for call in calls)


def test_arguments_are_kept() -> None:
    _, [call] = parsed("hermes", [HERMES])
    assert json.loads(call.arguments) == {"q": "a < b"}
    _, [call, other] = parsed("llama3_json", [LLAMA])
    assert (call.arguments, other.arguments) == ('{"q": "\u00e9"}', "{}")
