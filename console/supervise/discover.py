"""Foreign servers: who listens on this machine and answers as OpenAI's API does; never ended.

Found by socket and by what answers there, not by a file, so that what is shown is so.
"""

import asyncio
import contextlib
import json
import re
import shlex
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import httpx
import psutil

LOOK_S: Final = 10.0
"""Seconds between two looks at who listens."""
TIMEOUT_S: Final = 1.0
"""Seconds that a server has to say its models."""
AGAIN_S: Final = (10.0, 60.0, 300.0)
"""Seconds until a listener that was no such server is asked again: it may load, or be no HTTP."""
AT_ONCE: Final = 8
"""Listeners that are asked at the same time."""
FIRST_PORT: Final = 1024
"""Below are the services of the system, which are not asked."""
MAX_ANSWER_BYTES: Final = 2**18
MAX_MODELS: Final = 20
MAX_CHARACTERS: Final = 300
"""Of a command, and of a model's name."""
HIDDEN: Final = "HIDDEN"
"""Stands for a key in a command."""
_SECRET: Final = re.compile(r"(?i)(?:key|secret|password|(?:^|[-_])token)$")


@dataclass(frozen=True)
class Listener:
    """A process that listens on a port."""

    address: str
    port: int
    pid: int | None
    """None: this user cannot see it."""
    started_s: float | None
    """When the process began, which tells it from a later one with its id."""
    command: str | None
    user: str | None

    @property
    def url(self) -> str:
        """Where it answers on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.address, self.address)  # noqa: S104
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


@dataclass(frozen=True)
class _Answer:
    """What a listener said when it was asked for its models."""

    owner: str | None = None
    models: tuple[str, ...] = ()
    max_model_len: int | None = None
    needs_key: bool = False


class Discovery:
    """Looks for foreign servers every few seconds; all calls are of one event loop.

    Args:
        own: returns the ids of processes that are no foreign ones: the console and its children.
        on_change: called after a look that found something else than the one before.
        list_listeners: returns who listens; runs in a thread.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        own: Callable[[], set[int]],
        *,
        on_change: Callable[[], None] = lambda: None,
        list_listeners: Callable[[], list[Listener]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own, self._on_change, self._clock = own, on_change, clock
        self._list = list_listeners or listeners
        self._found: dict[Listener, tuple[_Answer, float]] = {}
        """Servers, with what they said and when."""
        self._refused: dict[Listener, tuple[int, float]] = {}
        """Others: how often they were asked, and when next, of a clock that never goes back."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look, on the loop that runs."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Look no longer."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the servers by port, as plain data; what is not known is None.

        Keys: port, address, url, pid, started_s, command, user, owner (of its models, as it says:
        vllm, llamacpp, ...), models, max_model_len, needs_key (then models are unknown), checked_s.
        """
        return [
            {
                "port": who.port,
                "address": who.address,
                "url": who.url,
                "pid": who.pid,
                "started_s": who.started_s,
                "command": who.command,
                "user": who.user,
                "owner": said.owner,
                "models": None if said.needs_key else list(said.models),
                "max_model_len": said.max_model_len,
                "needs_key": said.needs_key,
                "checked_s": checked_s,
            }
            for who, (said, checked_s) in sorted(
                self._found.items(), key=lambda item: (item[0].port, item[0].address)
            )
        ]

    async def _run(self) -> None:
        while True:
            before = {who: said for who, (said, _) in self._found.items()}
            await self.look()
            if before != {who: said for who, (said, _) in self._found.items()}:
                self._on_change()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Look once: list who listens, and ask those who may be servers."""
        now_s, own = self._clock(), self._own()
        there = [who for who in await asyncio.to_thread(self._list) if who.pid not in own]
        self._found = {who: said for who, said in self._found.items() if who in there}
        self._refused = {who: when for who, when in self._refused.items() if who in there}
        due = [who for who in there if self._refused.get(who, (0, now_s))[1] <= now_s]
        gate = asyncio.Semaphore(AT_ONCE)
        # Nothing is verified, as only http is spoken: reading certificates takes long.
        async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, verify=False) as client:  # noqa: S501

            async def asked(who: Listener) -> _Answer | None:
                async with gate:
                    return await _ask(client, who)

            answers = await asyncio.gather(*map(asked, due))
        for who, said in zip(due, answers, strict=True):
            if said is not None:
                self._found[who] = said, time.time()
                self._refused.pop(who, None)
                continue
            self._found.pop(who, None)
            times = self._refused.get(who, (0, 0.0))[0]
            wait_s = AGAIN_S[min(times, len(AGAIN_S) - 1)]
            self._refused[who] = times + 1, now_s + wait_s


def listeners() -> list[Listener]:
    """Return who listens for TCP on this machine, once for a process and port."""
    found: dict[tuple[int | None, int], Listener] = {}
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            address, port = (*connection.laddr, "", 0)[:2]
            if connection.status != psutil.CONN_LISTEN or port < FIRST_PORT:
                continue
            place = connection.pid, port
            # An IPv4 address is shorter to read.
            if place not in found or ":" in found[place].address:
                found[place] = _listener(address, *place)
    return list(found.values())


def _listener(address: str, pid: int | None, port: int) -> Listener:
    started_s = command = user = None
    if pid is not None:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            started_s = process.create_time()
            command = shown_command(process.cmdline() or [process.name()])
            user = process.username()
    return Listener(address, port, pid, started_s, command, user)


def shown_command(words: Iterable[str]) -> str:
    """Return a command for people: on one line, not too long, without keys."""
    found: list[str] = []
    is_hidden = False
    for word in words:
        name, has_value, _ = word.partition("=")
        is_flag, is_secret = word.startswith("-"), _SECRET.search(name) is not None
        if is_hidden and not is_flag:
            found.append(HIDDEN)
            continue  # a flag may have several
        found.append(f"{name}={HIDDEN}" if is_secret and has_value else word)
        is_hidden = is_flag and is_secret and not has_value
    text = shlex.join(found)
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 3]}..."


async def _ask(client: httpx.AsyncClient, who: Listener) -> _Answer | None:
    """Return what a listener says of its models; None where it is no such server."""
    try:
        async with (
            asyncio.timeout(2 * TIMEOUT_S),  # httpx bounds each part of an answer, not all of it
            client.stream("GET", f"{who.url}/v1/models") as response,
        ):
            content = bytearray()
            async for part in response.aiter_raw():
                content += part
                if len(content) > MAX_ANSWER_BYTES:
                    return None
        return _answer(response.status_code, json.loads(content))
    except (httpx.HTTPError, OSError, ValueError, TimeoutError, RecursionError):
        return None


def _answer(status: int, content: Any) -> _Answer | None:
    """Return what a list of models says; None where it is none."""
    if not isinstance(content, dict):
        return None
    if status in {401, 403}:
        return _Answer(needs_key=True) if "error" in content else None
    cards = content.get("data")
    if status != 200 or not isinstance(cards, list):
        return None
    known = [card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)]
    if len(known) < len(cards) or content.get("object", "list") != "list":
        return None
    first = known[0] if known else {}
    owner, length = first.get("owned_by"), first.get("max_model_len")
    return _Answer(
        owner=owner[:MAX_CHARACTERS] if isinstance(owner, str) else None,
        models=tuple(card["id"][:MAX_CHARACTERS] for card in known[:MAX_MODELS]),
        max_model_len=length if type(length) is int else None,
    )
