"""The engine's process: builds the engine, turns text into tokens and back, answers the front.

It ends when the front does: the kernel kills it with its parent, and the socket's end says so too.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Event, Thread
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import uvloop

from catalogue.checkpoint import ModelUnavailableError
from catalogue.files import note_folders
from catalogue.models import find, located, state
from catalogue.processes import die_with_parent
from engine.asked.config import ModelConfig
from engine.asked.keywords import config_from_keywords
from engine.errors import (
    SPOKEN,
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineError,
    FailedRequestError,
    RequestError,
)
from engine.text.tokenizer import sampling_defaults
from server.errors import about_form
from server.flags import as_flags
from server.plan_lines import plan_lines
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

if TYPE_CHECKING:
    from engine.async_llm import AsyncLLM
    from engine.llm import LLM
    from engine.snapshot import Snapshot
    from server.text import Text

BEAT_S: Final = 0.25
"""Seconds between two signs of life."""
SWITCH_S: Final = 0.0005
"""Seconds after which the thread of the engine lets that of the messages run; Python's 5 ms are
longer than a step, and a request waits for them when it comes and when its token goes."""
FETCH_LOOK_S: Final = 1.0
"""Seconds between two looks at how much of a model was fetched."""
TOKENIZER_THREADS: Final = 2
"""A long prompt keeps one; the other goes on with short ones."""

Work = Callable[[], Coroutine[Any, Any, None]]
"""What answers a request; called when its task runs, which a client that leaves may prevent."""


class EngineProcess:
    """Answers the messages of one front."""

    def __init__(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="text")
        self._counting = ThreadPoolExecutor(1, thread_name_prefix="count")
        """For /tokenize and /detokenize, whose texts may be longer than a context."""
        self._running: dict[str, asyncio.Task[None]] = {}
        self._outbox: list[tuple[str, list[Token]]] = []
        self._engine: AsyncLLM | None = None
        self._text: Text | None = None

    async def run(self) -> None:
        """Load, then answer until the front says stop or ends."""
        load = await receive(self._reader)
        if not isinstance(load, Load):
            return
        beats = asyncio.create_task(self._beat())
        building = asyncio.create_task(self._build(load))
        while (message := await receive(self._reader)) is not None:
            if isinstance(message, Stop):
                break
            self._obey(message)
        if not building.done() or message is None:
            os._exit(1)  # nobody waits for an answer, and a load cannot be cut short
        beats.cancel()
        if self._engine is not None:
            await self._engine.close()
        for threads in (self._threads, self._counting):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _build(self, load: Load) -> None:
        loop = asyncio.get_running_loop()

        def tell(message: object) -> None:
            loop.call_soon_threadsafe(send, self._writer, message)

        try:
            llm, text, defaults = await asyncio.to_thread(build, load, tell)
        except (
            ConfigError,
            CapacityError,
            CheckpointError,
            ModelUnavailableError,
            EngineError,
        ) as error:
            is_permanent = not isinstance(error, CapacityError) or error.plan is not None
            send(self._writer, Failed(as_flags(str(error)), is_permanent))
            return
        except Exception as error:  # noqa: BLE001  the edge: told to the front, which ends
            send(self._writer, Failed(f"{type(error).__name__}: {error}", is_permanent=False))
            return
        from engine.async_llm import AsyncLLM  # noqa: PLC0415  brings torch

        self._text = text
        self._engine = AsyncLLM(llm, max_pending=load.max_pending)
        ready = Ready(
            max_model_len=llm.max_model_len,
            max_num_seqs=llm.plan.max_num_seqs,
            vocab_size=llm.spec.vocab_size,
            has_tokenizer=text.has_tokenizer,
            has_chat_template=text.has_template,
            takes_tools=text.takes_tools,
            tool_parser=text.tool_parser,
            facts=llm.effective(),
            memory=memory_of(llm),
            sampling_defaults=defaults,
        )
        send(self._writer, ready)

    async def _beat(self) -> None:
        while True:
            engine = self._engine
            if engine is not None and engine.failure is not None:
                self._fail(engine.failure)
                return
            send(self._writer, Beat({} if engine is None else counts_of(engine.snapshot())))
            await asyncio.sleep(BEAT_S)

    def _fail(self, error: BaseException) -> None:
        reason = f"the engine failed: {type(error).__name__}: {error}"
        send(self._writer, Failed(reason, is_permanent=False))

    def _obey(self, message: object) -> None:
        match message:
            case Submit():
                self._start(message.request_id, partial(self._answer, message), message.form_name)
            case Abort(request_id):
                if task := self._running.get(request_id):
                    task.cancel()
            case Tokenize():
                self._start(message.request_id, partial(self._tokenize, message))
            case Detokenize():
                self._start(message.request_id, partial(self._detokenize, message))
            case _:
                raise TypeError(f"expected a message of the front, got {message!r}.")

    def _start(self, name: str, work: Work, form_name: str = "") -> None:
        task = asyncio.create_task(self._guarded(name, work, form_name))
        self._running[name] = task
        task.add_done_callback(lambda _: self._running.pop(name, None))

    async def _guarded(self, name: str, work: Work, form_name: str) -> None:
        """Run a request's work; what it raises is told to its client."""
        try:
            await work()
        except FailedRequestError as error:
            self._refuse(Refused(request_id=name, message=str(error), status=500))
        except RequestError as error:
            message, param = about_form(error, form_name)
            # A message begins with the parameter where it does not tell it apart.
            begin = message.partition(":")[0].partition("=")[0]
            param = param or (begin if begin.isidentifier() else None)
            self._refuse(Refused(request_id=name, message=message, param=param, code=error.code))
        except Exception as error:  # noqa: BLE001  the edge: a client must not wait for ever
            if self._engine is not None and self._engine.failure is not None:
                self._fail(self._engine.failure)
            message = f"{type(error).__name__}: {error}"
            status = 503 if isinstance(error, EngineError) else 500
            self._refuse(Refused(request_id=name, message=message, status=status))

    def _refuse(self, refusal: Refused) -> None:
        self._flush()  # its tokens come before
        send(self._writer, refusal)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _in_counting(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._counting, work)

    async def _answer(self, asked: Submit) -> None:
        engine, text = self._engine, self._text
        assert engine is not None
        assert text is not None
        arrival_s = perf_counter()
        encode = partial(
            text.encode,
            asked.prompt,
            add_special_tokens=asked.add_special_tokens,
            check=text.check_length,
        )
        ids = asked.prompt if isinstance(asked.prompt, list) else await self._in_thread(encode)
        params = text.with_room(ids, asked.params, clamp=asked.room)
        prompt_text = None
        if asked.wants_text and isinstance(asked.prompt, list):
            text.check_ids(ids)
            prompt_text = await self._in_thread(partial(text.decode, ids))
        accepted = Accepted(
            request_id=asked.request_id, prompt_token_ids=ids, prompt_text=prompt_text
        )
        with_logprobs = params.logprobs is not None
        stream = engine.tokens(
            ids, params, asked.request_id, priority=asked.priority, tell_start=True
        )
        async with contextlib.aclosing(stream) as parts:
            is_first = True
            async for events in parts:
                if is_first:
                    send(self._writer, accepted)
                    is_first = False
                if events:
                    tokens = [
                        text.token(event, arrival_s, with_logprobs=with_logprobs)
                        for event in events
                    ]
                    if (found := events[0].prompt_logprobs) is not None:
                        prompt = await self._in_thread(partial(text.prompt_tokens, ids, found))
                        tokens[0] = tokens[0]._replace(prompt=prompt)
                    self._put(asked.request_id, tokens)

    def _put(self, name: str, tokens: list[Token]) -> None:
        if not self._outbox:
            # Behind the tasks that the same step woke: all go out as one message.
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append((name, tokens))

    def _flush(self) -> None:
        if self._outbox:
            send(self._writer, Tokens(self._outbox))
            self._outbox = []

    async def _tokenize(self, asked: Tokenize) -> None:
        text = self._text
        assert text is not None
        encode = partial(
            text.encode,
            asked.prompt,
            add_special_tokens=asked.add_special_tokens,
            check=text.check_counted,
        )
        ids = await self._in_counting(encode)
        texts = await self._in_counting(partial(text.pieces, ids)) if asked.with_texts else None
        send(self._writer, Answered(request_id=asked.request_id, value=(ids, texts)))

    async def _detokenize(self, asked: Detokenize) -> None:
        text = self._text
        assert text is not None
        text.check_ids(asked.token_ids)
        value = await self._in_counting(partial(text.decode, asked.token_ids))
        send(self._writer, Answered(request_id=asked.request_id, value=value))


def counts_of(snapshot: "Snapshot") -> dict[str, float]:
    """Return what is known of an engine's counts, by name."""
    found = asdict(snapshot) | {"gpu_kv_usage": snapshot.gpu_kv_usage}
    found["prefix_hit_tokens"] = snapshot.prefix_hit_gpu_tokens + snapshot.prefix_hit_host_tokens
    return {name: value for name, value in found.items() if value is not None}


def memory_of(llm: "LLM") -> dict[str, Any]:
    """Return what `Ready.memory` tells of an engine."""
    found, plan = llm.memory(), llm.plan
    return {
        "gpu_uuid": llm.engine.device.uuid,
        "gpu_budget_bytes": plan.gpu_budget_bytes,
        "gpu_items": dict(plan.gpu_items),
        "host_items": dict(plan.host_items),
        "host_pinned_bytes": found["host_pinned_bytes"],
        "host_pageable_bytes": found["host_pageable_bytes"],
    }


def build(load: Load, tell: Callable[[object], None]) -> "tuple[LLM, Text, dict[str, Any]]":
    """Find the model, plan, and build the engine; blocks for as long as that takes.

    Returns the engine, its text, and its sampling defaults.

    Args:
        load: What is asked.
        tell: Gets Loading and Planned as they come, on this thread.

    Raises:
        EngineError: The model is not to be had, does not fit, or a setting is refused.
    """
    tell(Loading("start"))
    from engine.llm import LLM  # noqa: PLC0415  brings torch
    from server.text import Text  # noqa: PLC0415

    with _telling_fetch(load.model, tell):
        model = ModelConfig(**located(load.model, load.keywords.get("load_format")))
    config = config_from_keywords(model, note_folders() | load.keywords)
    folder = model.path if load.generation_config == "auto" else None
    defaults = sampling_defaults(None if folder is None else Path(folder))
    tell(Loading("plan"))
    tell(Planned([as_flags(line) for line in plan_lines(LLM.plan_for(config))]))
    tell(Loading("load"))

    def progress(phase: str, bytes_done: int, bytes_total: int) -> None:
        tell(Loading(phase, bytes_done, bytes_total))

    llm = LLM.from_config(config, progress)
    return llm, Text(llm, load.chat_template), defaults


@contextlib.contextmanager
def _telling_fetch(name: str, tell: Callable[[object], None]) -> Iterator[None]:
    """Tell once a second how many bytes of a model are on this machine, while it is fetched."""
    over = Event()

    def look() -> None:
        while not over.wait(FETCH_LOOK_S):
            with contextlib.suppress(OSError):  # files get their last names meanwhile
                tell(Loading("fetch", state(find(name)).num_bytes))

    tell(Loading("fetch"))
    looking = Thread(target=look, daemon=True)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()


async def _serve(end: socket.socket) -> None:
    end.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=end, limit=2**26)
    await EngineProcess(reader, writer).run()
    with contextlib.suppress(ConnectionError):
        await writer.drain()


def main() -> None:
    """Serve the front at the other end of the socket that the first argument numbers."""
    descriptor, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent_pid)
    # A terminal sends Ctrl-C to both processes; the front decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    SPOKEN.set(as_flags)
    sys.setswitchinterval(SWITCH_S)
    uvloop.run(_serve(socket.socket(fileno=descriptor)))


if __name__ == "__main__":
    main()
