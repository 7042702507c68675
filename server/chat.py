"""`tightfit chat`: talk to a server in the terminal, one that runs or one of its own."""

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
from httpx_sse import connect_sse
from rich.console import Console

from catalogue.own_server import OwnServer
from catalogue.terminal import CommandParser, UsageError, say
from engine.errors import EngineError
from server.flags import parse
from server.lifecycle import ERROR
from server.settings import API_KEY_VARIABLE

URL: Final = "http://127.0.0.1:8000"
END_S: Final = 10.0
"""Seconds that a server of its own has to end."""
POLL_S: Final = 0.1
HELP: Final = "/clear forgets the conversation, /exit (or Ctrl-D) ends; Ctrl-C stops an answer."


class ChatError(EngineError):
    """The server cannot be reached, or refuses."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long an answer took."""

    num_tokens: int
    ttft_s: float
    decode_s: float
    """From the first text to the last."""

    def __str__(self) -> str:
        """Return a line for people."""
        rate = f", {(self.num_tokens - 1) / self.decode_s:.1f} tokens/s" if self.decode_s else ""
        return f"{self.num_tokens} tokens, the first after {self.ttft_s:.2f} s{rate}"


@dataclass
class Conversation:
    """What was said, and how answers are asked for."""

    client: httpx.Client
    model: str
    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    def clear(self) -> None:
        """Forget all but the system's message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(
        self, text: str, clock: Callable[[], float] = time.perf_counter
    ) -> Generator[str | Timing, None, None]:
        """Yield the answer's text as it comes, then how long it took.

        The answer, also one that is cut short, is part of the conversation afterwards.

        Raises:
            ChatError: There is no answer; the conversation is as before.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        body = {
            "model": self.model,
            "messages": asked,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.options,
        }
        answer, begin_s = "", clock()
        first_s = last_s = begin_s
        usage: dict[str, Any] = {}
        try:
            with connect_sse(self.client, "POST", "/v1/chat/completions", json=body) as source:
                _check(source.response)
                for event in source.iter_sse():
                    if event.data == "[DONE]":
                        break
                    part = json.loads(event.data)
                    if "error" in part:
                        raise ChatError(part["error"]["message"])
                    usage = part.get("usage") or usage
                    for choice in part["choices"]:
                        if piece := choice["delta"].get("content"):
                            first_s, last_s = (first_s if answer else clock()), clock()
                            answer += piece
                            yield piece
        except httpx.HTTPError as error:
            raise ChatError(f"the server is gone ({type(error).__name__}: {error}).") from error
        finally:
            if answer:
                self.messages = [*asked, {"role": "assistant", "content": answer}]
        yield Timing(
            num_tokens=usage.get("completion_tokens", 0),
            ttft_s=first_s - begin_s,
            decode_s=last_s - first_s,
        )


def _check(response: httpx.Response) -> None:
    if response.status_code == 200:
        return
    response.read()
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:300]
    raise ChatError(f"the server answered {response.status_code}: {message}")


def main(arguments: Sequence[str], prog: str = "tightfit chat") -> int:
    """Talk until the user ends it; return the exit code.

    Raises:
        ConfigError: The command line is wrong.
    """
    # A word behind a flag of serve may be its value; the model comes first.
    model = next((word for word in arguments[:1] if not word.startswith("-")), None)
    asked, flags = _parser(prog).parse_known_args(list(arguments[model is not None :]))
    console = Console(highlight=False, soft_wrap=True)
    try:
        if model is None:
            if flags:
                raise UsageError(
                    f"{prog}: expected a model before flags of an engine of its own, got "
                    f"{' '.join(flags)}."
                )
            _talk(console, asked.url, asked)
        else:
            parse([model, *flags])  # refuses a wrong flag without a server
            with own_server(model, flags, console) as url:
                _talk(console, url, asked)
    except ChatError as error:
        say(f"error: {error}")
        return 1
    return 0


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=prog,
        usage="%(prog)s [MODEL] [--FLAG VALUE ...]",
        description="Talk to a running server, or with MODEL to an engine that is started for it.",
        epilog=f"Other flags are those of serve, for the engine of MODEL. {HELP}",
        allow_abbrev=False,
    )
    parser.add_argument("--url", default=URL, help=f"address of the server (default: {URL})")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="maximum number of tokens in an answer"
    )
    parser.add_argument("--temperature", type=float, metavar="X", help="0 is greedy")
    return parser


@contextlib.contextmanager
def own_server(model: str, flags: Sequence[str], console: Console) -> Iterator[str]:
    """Start a server for a model on a free port; yield its address once it is ready.

    Raises:
        ChatError: It ended instead; its last lines say why.
    """
    server = OwnServer([model, "--port", "0", "--no-access-log", *flags], is_apart=True)
    try:
        with console.status(f"loading {model}"):
            url = server.wait_ready()
        if url is None:
            lines = list(server.last_lines)
            why = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
            raise ChatError("\n".join(why or lines))
        yield url
    finally:
        server.end(END_S)


def _talk(console: Console, url: str, asked: argparse.Namespace) -> None:
    key = os.environ.get(API_KEY_VARIABLE, "").strip()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    options = {"max_tokens": asked.max_tokens, "temperature": asked.temperature}
    timeout = httpx.Timeout(600.0, connect=5.0)
    with httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False) as client:
        try:
            listed = client.get("/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ChatError(
                f"no server answers at {url} ({type(error).__name__}). Start one with `tightfit "
                "serve MODEL`, name another with --url, or give a model: `tightfit chat MODEL`."
            ) from error
        _check(listed)
        conversation = Conversation(client, listed.json()["data"][0]["id"], asked.system, options)
        conversation.clear()
        console.print(f"[bold]{conversation.model}[/bold]. {HELP}")
        while (text := _read(console)) is not None:
            if text in {"/exit", "/quit"}:
                return
            if text == "/clear":
                conversation.clear()
            elif text:
                _answer(console, conversation, text)


def _read(console: Console) -> str | None:
    """Return the user's next line; None at the end."""
    try:
        return console.input("[bold cyan]>[/bold cyan] " if console.is_terminal else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _answer(console: Console, conversation: Conversation, text: str) -> None:
    parts = conversation.ask(text)
    try:
        with contextlib.closing(parts):
            for part in parts:
                if isinstance(part, Timing):
                    console.print(f"\n[dim]{part}[/dim]", end="")
                else:
                    console.print(part, end="", markup=False)
    except KeyboardInterrupt:
        console.print(" [dim](stopped)[/dim]", end="")
    console.print()
