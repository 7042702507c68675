"""The front's end of the engine's process: starts it, watches it, hands out its answers."""

import asyncio
import contextlib
import os
import socket
import subprocess
from asyncio import StreamWriter
from collections.abc import Callable, Sequence
from itertools import count
from time import monotonic
from typing import Any, Final

import psutil

from catalogue.processes import module_command, python_path
from server.errors import APIError, engine_gone, refused
from server.lifecycle import Lifecycle
from server.wire import (
    Abort,
    Accepted,
    Answered,
    Beat,
    Detokenize,
    Failed,
    Load,
    Loading,
    Planned,
    Ready,
    Refused,
    Stop,
    Submit,
    Token,
    Tokenize,
    Tokens,
    receive,
    send,
)

WATCH_S: Final = 0.5
"""Seconds between two looks at the engine's process."""
STOPPED_S: Final = 3.0
"""Silence after which a process that is stopped (SIGSTOP) is given up."""
SILENT_S: Final = 60.0
"""Silence after which a process that runs is given up; none comes while it loads."""


class Answer:
    """What the engine sent for one prompt and its client has not taken yet."""

    def __init__(self, submit: Submit, wake: asyncio.Event) -> None:
        self.request_id = submit.request_id
        self.accepted: Accepted | None = None
        self.num_open = submit.params.n
        """Answers to the prompt that have not ended."""
        self.failure: APIError | None = None
        self.tokens: list[Token] = []
        self._wake = wake

    @property
    def is_over(self) -> bool:
        """Whether the engine has nothing more for it."""
        return self.failure is not None or self.num_open <= 0

    def take(self, message: Accepted | list[Token] | APIError) -> None:
        """Take what the engine sent."""
        if isinstance(message, Accepted):
            self.accepted = message
        elif isinstance(message, APIError):
            self.failure = message
        else:
            self.tokens += message
            self.num_open -= sum(token.finish_reason is not None for token in message)
        self._wake.set()


class Answers:
    """The way of the tokens of one client's prompts from the engine's process to its response."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self.parts: list[Answer] = []
        """One for each prompt, in order."""

    async def start(self) -> list[Accepted]:
        """Return once the engine took all prompts.

        Raises:
            APIError: One was refused.
        """
        while True:
            self._check()
            found = [part.accepted for part in self.parts if part.accepted is not None]
            if len(found) == len(self.parts):
                return found
            await self._sleep()

    async def next(self) -> list[tuple[int, list[Token]]]:
        """Return the tokens that came since the last call, by prompt; none after the last.

        Raises:
            APIError: A prompt failed, or the engine did; the tokens before it were returned.
        """
        while True:
            found = []
            for place, part in enumerate(self.parts):
                if part.tokens:
                    found.append((place, part.tokens))
                    part.tokens = []
            if found:
                return found
            self._check()
            if all(part.is_over for part in self.parts):
                return []
            await self._sleep()

    def _check(self) -> None:
        for part in self.parts:
            if part.failure is not None:
                raise part.failure

    async def _sleep(self) -> None:
        self.wake.clear()
        await self.wake.wait()


class EngineLink:
    """One engine's process, from its start to its end.

    Args:
        lifecycle: Told where the server stands.
        on_plan: Called with the lines of the plan, before the load.
    """

    def __init__(self, lifecycle: Lifecycle, on_plan: Callable[[list[str]], None]) -> None:
        self._lifecycle, self._on_plan = lifecycle, on_plan
        self.ready: Ready | None = None
        """Facts of the engine; None until it is loaded."""
        self.counts: dict[str, float] = {}
        """The engine's own, as of the last sign of life."""
        self.num_live_beats = 0
        """Signs of life of an engine that has no work, or made a step since the one before."""
        self.failure: Failed | None = None
        """What the engine's process said before it ended."""
        self._answers: dict[str, Answer] = {}
        self._calls: dict[str, asyncio.Future[Any]] = {}
        self._names = count()
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._beat_s = monotonic()
        self._is_stopping = False
        self._takers: dict[type, Callable[[Any], None]] = {
            Tokens: self._take_tokens,
            Accepted: self._take_acceptance,
            Refused: self._take_refusal,
            Answered: self._take_answer,
            Beat: self._take_beat,
            Loading: self._take_progress,
            Planned: self._take_plan,
            Ready: self._take_ready,
            Failed: self._take_failure,
        }

    @property
    def pid(self) -> int | None:
        """Of the engine's process."""
        return None if self._process is None else self._process.pid

    @property
    def num_open(self) -> int:
        """Answers that have not ended, of all requests."""
        return sum(answer.num_open for answer in self._answers.values() if not answer.is_over)

    async def open(self, load: Load) -> None:
        """Start the process and let it load; returns at once.

        Called on the main thread: the kernel ends the process with the thread that started it.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            path = python_path(os.environ.get("PYTHONPATH", ""))
            self._process = subprocess.Popen(
                [
                    *module_command("server.engine_process"),
                    *(str(theirs.fileno()), str(os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path},
            )
        ours.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=2**26)
        self._lifecycle.enter("loading")
        send(self._writer, load)
        self._tasks = [
            asyncio.create_task(self._read(reader)),
            asyncio.create_task(self._watch()),
        ]

    def submit(self, makes: Sequence[Callable[[str], Submit]]) -> Answers:
        """Send one client's prompts; each of `makes` gets its request's name."""
        answers = Answers()
        for make in makes:
            submit = make(f"r{next(self._names)}")
            self._send(submit)
            answer = Answer(submit, answers.wake)
            self._answers[submit.request_id] = answer
            answers.parts.append(answer)
        return answers

    def drop(self, answers: Answers) -> None:
        """Forget a client's prompts, and end those that the engine has not."""
        for answer in answers.parts:
            del self._answers[answer.request_id]
            if not answer.is_over and self._lifecycle.state != "failed":
                self._send(Abort(answer.request_id))

    async def call(self, make: Callable[[str], Tokenize | Detokenize]) -> Any:
        """Return what the engine's process answers.

        Raises:
            APIError: It refuses, or ended.
        """
        message = make(f"c{next(self._names)}")
        future = asyncio.get_running_loop().create_future()
        self._calls[message.request_id] = future
        self._send(message)
        try:
            return await future
        finally:
            del self._calls[message.request_id]

    def _send(self, message: object) -> None:
        if self._writer is None or self._lifecycle.state == "failed":
            raise engine_gone(self._lifecycle.reason)
        send(self._writer, message)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while (message := await receive(reader)) is not None:
                self._take(message)
        except Exception as error:  # noqa: BLE001  the edge: no client would ever hear of it
            self._fail(f"the link to the engine failed: {type(error).__name__}: {error}")
        if not self._is_stopping:
            self._fail(self._how_it_ended())

    def _how_it_ended(self) -> str:
        if self.failure is not None:
            return self.failure.reason
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.2)
        code = self._process.returncode
        how = "closed its socket" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was ended by signal {-code}"
        return f"the engine's process {self.pid} {how}"

    def _take(self, message: object) -> None:
        self._beat_s = monotonic()
        self._takers[type(message)](message)

    def _take_tokens(self, message: Tokens) -> None:
        for name, tokens in message.by_request:
            if answer := self._answers.get(name):
                answer.take(tokens)

    def _take_acceptance(self, message: Accepted) -> None:
        if answer := self._answers.get(message.request_id):
            answer.take(message)

    def _take_answer(self, message: Answered) -> None:
        future = self._calls.get(message.request_id)
        if future is not None and not future.done():
            future.set_result(message.value)

    def _take_beat(self, message: Beat) -> None:
        before, self.counts = self.counts, message.counts
        has_work = self.counts.get("running", 0) + self.counts.get("waiting", 0) > 0
        if not has_work or self.counts["steps"] != before.get("steps"):
            self.num_live_beats += 1

    def _take_progress(self, message: Loading) -> None:
        self._lifecycle.note_load(message.phase, message.bytes_done, message.bytes_total)

    def _take_plan(self, message: Planned) -> None:
        self._on_plan(message.lines)

    def _take_ready(self, message: Ready) -> None:
        self.ready = message
        self._lifecycle.enter("ready")

    def _take_failure(self, message: Failed) -> None:
        self.failure = message
        self._fail(message.reason)

    def _take_refusal(self, message: Refused) -> None:
        error = refused(message)
        if answer := self._answers.get(message.request_id):
            answer.take(error)
        future = self._calls.get(message.request_id)
        if future is not None and not future.done():
            future.set_exception(error)

    async def _watch(self) -> None:
        """Give up a process that says nothing: stopped, or stuck."""
        while True:
            await asyncio.sleep(WATCH_S)
            silent_s = monotonic() - self._beat_s
            if silent_s >= STOPPED_S and self._is_stopped():
                self._fail(f"the engine's process {self.pid} is stopped (SIGSTOP)")
                return
            if silent_s >= SILENT_S and self._lifecycle.state in {"ready", "draining"}:
                self._fail(f"the engine's process {self.pid} has said nothing for {SILENT_S:g} s")
                return

    def _is_stopped(self) -> bool:
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False  # it ended, which its socket tells

    def _fail(self, reason: str) -> None:
        """Tell every client, and end what is left of the process."""
        if not self._lifecycle.enter("failed", reason):
            return
        if self._process is not None:
            self._process.kill()
        for answer in self._answers.values():
            answer.take(engine_gone(reason))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(engine_gone(reason))

    def cut_short(self, why: APIError) -> None:
        """End every open request with an error event."""
        for answer in self._answers.values():
            if not answer.is_over:
                self._send(Abort(answer.request_id))
                answer.take(why)

    async def close(self, limit_s: float) -> None:
        """Have the process end itself, and kill it where it has not within the limit."""
        self._is_stopping = True
        process = self._process
        if process is None:
            return
        if self._writer is not None and self._lifecycle.state != "failed":
            send(self._writer, Stop())
        end_s = monotonic() + limit_s
        while process.poll() is None and monotonic() < end_s:
            await asyncio.sleep(0.02)
        if process.poll() is None:
            process.kill()
            process.wait()
        for task in self._tasks:
            task.cancel()
        if self._writer is not None:
            self._writer.close()
