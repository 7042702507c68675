"""The chat in the terminal."""

import io

import httpx
import pytest
from rich.console import Console

from engine.errors import ConfigError
from server import chat
from server.chat import ChatError, Conversation, Timing, main
from tests.server.launch import Served


def test_a_conversation_goes_on_and_is_forgotten(served: Served) -> None:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        talk = Conversation(client, "tiny", "be brief", {"max_tokens": 6, "temperature": 0})
        talk.clear()
        *texts, timing = talk.ask("hello")
        assert [message["role"] for message in talk.messages] == ["system", "user", "assistant"]
        assert talk.messages[-1]["content"] == "".join(map(str, texts))
        assert isinstance(timing, Timing)
        assert timing.num_tokens == 6
        assert "6 tokens, the first after" in str(timing)
        cut = talk.ask("and now?")
        next(cut)
        cut.close()  # as Ctrl-C does
        assert [message["role"] for message in talk.messages][3:] == ["user", "assistant"]
        talk.clear()
        assert len(talk.messages) == 1
        talk.options["temperature"] = -1
        with pytest.raises(ChatError, match="400: temperature"):
            list(talk.ask("x"))
        assert len(talk.messages) == 1


def test_the_terminal_shows_answers_and_rates(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    lines = iter(["", "hello", "/clear", "/exit", "never read"])
    console = Console(file=out, highlight=False)
    monkeypatch.setattr(console, "input", lambda _: next(lines))
    monkeypatch.setattr(chat, "Console", lambda **_: console)
    assert main(["--url", served.url, "--max-tokens", "4", "--temperature", "0"]) == 0
    shown = out.getvalue()
    assert shown.startswith("tiny. /clear")
    assert "4 tokens, the first after" in shown
    assert next(lines) == "never read"


def test_what_cannot_be_talked_to_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:1"]) == 1
    assert "tightfit chat MODEL" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-num-seqs", "4"], "tightfit chat: expected a model before flags"),
        (["glass", "--max-num-seq", "4"], "tightfit serve: expected flags .* --max-num-seqs?"),
        (["glass", "--max-num-seqs", "x"], "max-num-seqs: expected an integer"),
    ],
)
def test_a_wrong_command_line_is_refused_before_a_server_starts(arguments, message) -> None:
    with pytest.raises(ConfigError, match=message):
        main(arguments)


@pytest.mark.slow
def test_a_model_gets_a_server_of_its_own_which_ends_with_the_chat(
    tiny_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    lines = iter(["hello", "/exit"])
    console = Console(file=out, highlight=False)
    monkeypatch.setattr(console, "input", lambda _: next(lines))
    monkeypatch.setattr(chat, "Console", lambda **_: console)
    flags = ["--load-format", "dummy", "--device", "cpu", "--gpu-memory-gib", "0.2"]
    assert main([str(tiny_model), "--max-tokens", "3", *flags]) == 0
    assert "3 tokens" in out.getvalue()
    out.truncate(0)
    assert main(["no_such_model"]) == 1
