"""The engine of model=fake: scripted tokens, times, bytes and failures."""

import asyncio
import math
import os
import selectors
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextvars import Context
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, Final, NoReturn, TypeVar, TypeVarTuple

from engine.asked.config import EngineConfig
from engine.asked.request import NO_TOKEN, FinishReason, TokenEvent
from engine.asked.sampling import SamplingParams
from engine.clock import StepStats
from engine.errors import CapacityError, EngineError, RequestError
from engine.sealed import GIB
from harness.config.schema import FakeScript
from harness.systems.base import nothing
from harness.systems.door import EngineDoor, Progress
from harness.work.correctness import STREAM


@dataclass(frozen=True, kw_only=True)
class FakePlan:
    """What lies where, in bytes."""

    budget_bytes: int
    resident_bytes: int
    """Weights on the GPU."""
    offloaded_bytes: int
    """Weights in host memory."""
    kv_bytes: int
    is_read_in_place: bool
    """Offloaded weights are read where they are, else copied."""
    block_size: int = 16
    """Tokens in a block of KV."""

    @property
    def gpu_total_bytes(self) -> int:
        """What the GPU holds."""
        return self.resident_bytes + self.kv_bytes

    def moved_per_step(self, num_decodes: int = 1) -> tuple[int, int]:
        """Return bytes copied and bytes read in place by a step, whatever its tokens."""
        del num_decodes
        return (0, self.offloaded_bytes) if self.is_read_in_place else (self.offloaded_bytes, 0)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan for the record, with the keys of the engine's own."""
        return {
            "gpu": {
                "budget_bytes": self.budget_bytes,
                "items": {"weights": self.resident_bytes, "kv_cache": self.kv_bytes},
                "total_bytes": self.gpu_total_bytes,
                "free_bytes": self.budget_bytes - self.gpu_total_bytes,
            },
            "host": {
                "items": {"pinned_weights": self.offloaded_bytes},
                "total_bytes": self.offloaded_bytes,
            },
            "bytes_per_step": self.offloaded_bytes,
        }


def plan_fake(script: FakeScript, config: EngineConfig) -> FakePlan:
    """Place the scripted bytes, or raise CapacityError.

    With offload=auto what is over the budget is moved.
    """
    card_gib = script.gpu_gib if config.gpu.memory_gib is None else config.gpu.memory_gib
    budget = round(card_gib * config.engine.gpu_memory_utilization * GIB)
    weights, kv = round(script.weights_gib * GIB), round(script.kv_gib * GIB)
    moved = min(weights, _offloaded(config, weights, over=max(0, weights + kv - budget)))
    plan = FakePlan(
        budget_bytes=budget,
        resident_bytes=weights - moved,
        offloaded_bytes=moved,
        kv_bytes=kv,
        is_read_in_place=config.planner.choose or config.offload.backend == "uva",
    )
    over = plan.gpu_total_bytes - budget
    if over > 0:
        raise CapacityError(
            f"GPU: need {plan.gpu_total_bytes / GIB:.2f} GiB, have {budget / GIB:.2f} GiB "
            f"({over / GIB:.2f} GiB over). Offload more, or raise gpu.memory_gib.",
            plan.to_dict(),
        )
    return plan


def _offloaded(config: EngineConfig, weights: int, *, over: int) -> int:
    if config.planner.choose:
        return over
    offload = config.offload
    match offload.backend:
        case "uva":
            return round(offload.uva.cpu_offload_gb * GIB) or weights
        case "prefetch":
            node = offload.prefetch
            return weights * node.offload_num_in_group // node.offload_group_size
        case _:
            return 0


T = TypeVar("T")
Ts = TypeVarTuple("Ts")

SPIN_S: Final = 0.0005
"""The end of a wait is spun for: a sleep may take so much longer than asked."""
DIGITS: Final = 9
"""Decimals of scripted seconds."""


class RealClock:
    """The machine's clock."""

    def __call__(self) -> float:
        """Return the time."""
        return time.perf_counter()

    def wait_until(self, time_s: float) -> None:
        """Sleep, and spin for the last part, until it is `time_s`."""
        left_s = time_s - time.perf_counter()
        if left_s > SPIN_S:
            time.sleep(left_s - SPIN_S)
        while time.perf_counter() < time_s:
            pass


class ScriptedClock:
    """Begins at 0 and moves only when it is told to, so that a script means the same at any time.

    It keeps whole nanoseconds: sums of scripted times are exact, and what is due together is due
    at one time, however the times were added up.
    """

    def __init__(self, begin_s: float = 0.0) -> None:
        self._now_s = begin_s
        self._settling: list[asyncio.Future[None]] = []

    def __call__(self) -> float:
        """Return the time."""
        return self._now_s

    def wait_until(self, time_s: float) -> None:
        """Make it `time_s`, unless it is later already."""
        self._now_s = max(self._now_s, round(time_s, DIGITS))

    async def settle(self) -> None:
        """Return when everything else that is due at this time has been done."""
        self._settling.append(asyncio.get_running_loop().create_future())
        await self._settling[-1]

    def move(self, timeout_s: float | None) -> None:
        """Wake those that settle, else let the time pass until the next timer, if there is one."""
        settling, self._settling = self._settling, []
        for future in settling:
            if not future.done():
                future.set_result(None)
        if settling or not timeout_s:
            return
        self.wait_until(self._now_s + timeout_s)
        # A timer is due once the time is beyond its own, which asyncio makes sure of by adding
        # 1 ns: after half a year that adds nothing to a time, and no timer would ever be due.
        if self._now_s + 10.0**-DIGITS == self._now_s:
            self._now_s = math.nextafter(self._now_s, math.inf)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on an event loop whose time is this clock; return its result."""
        with asyncio.Runner(loop_factory=lambda: _ScriptedLoop(self)) as runner:
            return runner.run(main)


FakeClock = RealClock | ScriptedClock


class _Selector(selectors.SelectSelector):
    """Moves the clock where a real selector would wait."""

    def __init__(self, clock: ScriptedClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        is_idle = timeout is None or timeout > 0
        if not ready and is_idle:
            self._clock.move(timeout)
        return ready


class _ScriptedLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: ScriptedClock) -> None:
        super().__init__(_Selector(clock))
        self._scripted = clock

    def time(self) -> float:
        return self._scripted()

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return super().call_at(round(when, DIGITS), callback, *args, context=context)


EXIT_CODE = 7


class OutOfMemoryError(RuntimeError):
    """Named as torch's, which the harness tells by its name."""


def strike(failure: str, plan: dict[str, Any] | None) -> NoReturn:
    """Fail in a way of `harness.config.schema.FAILURES`, by an exception or by an end."""
    match failure:
        case "no_fit":
            raise CapacityError("GPU: scripted not to fit. Set model.fake.fail=none.", plan)
        case "oom":
            raise OutOfMemoryError("scripted: tried to allocate 2.00 GiB")
        case "host_oom":
            raise MemoryError("scripted: no host memory")
        case "error":
            raise RuntimeError("scripted: the engine broke down")
        case "exit":
            os._exit(EXIT_CODE)
        case "sigkill" | "sigsegv":
            os.kill(os.getpid(), signal.Signals[failure.upper()])
            threading.Event().wait()  # until the signal is here
        case "hang":
            threading.Event().wait()
        case _:
            pass
    raise ValueError(f"model.fake.fail: expected a failure, got {failure!r}.")


WARNING: Final = (
    "model=fake: times, memory and tokens are scripted. Nothing was computed, so the figures say "
    "nothing about a machine."
)
WARM_UP: Final = "warm-up"
"""Part of the ids of requests that are not timed."""
_PAGE_BYTES: Final = 4096
_NUM_SPECIAL: Final = 2


@dataclass(kw_only=True, eq=False)
class FakeSequence:
    """One request and how far it is."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    is_broken: bool = False
    """Ends with an error after its first token."""
    num_out: int = 0

    @property
    def is_check(self) -> bool:
        """Whether it belongs to the comparison of tokens."""
        return self.request_id.startswith(STREAM)


class FakeTokenizer:
    """One token a byte."""

    all_special_ids = tuple(range(_NUM_SPECIAL))

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        free = self._vocab_size - _NUM_SPECIAL
        return [_NUM_SPECIAL + byte % free for byte in text.encode()]


class FakeLLM:
    """Stands in for engine.LLM; fails as the script says, as it is built or in a step."""

    def __init__(
        self,
        script: FakeScript,
        clock: FakeClock,
        config: EngineConfig,
        *,
        progress: Progress,
        reference: bool = False,
    ) -> None:
        if config.model.spec is None:
            raise RequestError("model.spec: expected sizes for model=fake, got null.")
        self.spec = config.model.spec
        self.plan = plan_of(script, config, reference=reference)
        self.max_model_len = config.engine.max_model_len or self.spec.max_position_embeddings
        self.tokenizer = FakeTokenizer(self.spec.vocab_size)
        self.last_step: StepStats | None = None
        self._script, self._clock, self._is_reference = script, clock, reference
        self._max_num_seqs = config.engine.max_num_seqs
        self._num_steps = self._num_prefills = self._num_decodes = self._num_requests = 0
        self._num_timed = 0
        """Steps without a sequence of the comparison of tokens."""
        self._waiting: list[FakeSequence] = []
        self._running: list[FakeSequence] = []
        self._work: tuple[list[FakeSequence], bool] | None = None
        """Sequences of the step under way, and whether it is a prefill."""
        total = self.plan.resident_bytes + self.plan.offloaded_bytes
        self._touched = bytearray(round(script.host_touched_gib * GIB))
        self._touched[::_PAGE_BYTES] = b"\1" * len(self._touched[::_PAGE_BYTES])
        progress("read", 0, total)
        clock.wait_until(clock() + script.load_s)
        progress("read", total, total)
        if script.fails_at("reference" if reference else "build"):
            strike(script.fail, self.plan.to_dict())
        self.load_report = SimpleNamespace(
            phases={"read": script.load_s},
            total_s=script.load_s,
            busy={"read": script.load_s},
            moved={"read": total},
        )

    def add_request(
        self, prompt: Sequence[int], params: SamplingParams, request_id: str | None = None
    ) -> str:
        """Queue a request, unless it is too long or the script refuses it."""
        name = request_id or f"request-{self._num_requests}"
        room = self.max_model_len - len(prompt)
        if room < 1:
            raise RequestError(
                f"prompt: expected fewer than {self.max_model_len} tokens, got {len(prompt)}. "
                "Shorten it, or raise engine.max_model_len."
            )
        sequence = FakeSequence(
            request_id=name, prompt=list(prompt), max_tokens=min(params.max_tokens or room, room)
        )
        if not sequence.is_check and WARM_UP not in name:
            self._num_requests += 1
            if _is_due(self._num_requests, self._script.refuse_every):
                raise RequestError(
                    f"request: scripted to be refused (model.fake.refuse_every="
                    f"{self._script.refuse_every})."
                )
            sequence.is_broken = _is_due(self._num_requests, self._script.break_every)
        self._waiting.append(sequence)
        return name

    def has_unfinished(self) -> bool:
        """Return whether a step has work."""
        return bool(self._waiting or self._running)

    def step(self) -> list[TokenEvent]:
        """Run one step: its time passes, then its tokens are there."""
        self._clock.wait_until(self._clock() + self.begin_step())
        return self.end_step()

    def begin_step(self) -> float:
        """Choose what the next step does; return the seconds that it takes."""
        script = self._script
        room = self._max_num_seqs - len(self._running)
        is_prefill = bool(self._waiting) and room > 0
        if is_prefill:
            sequences, self._waiting = self._waiting[:room], self._waiting[room:]
            self._running += sequences
        else:
            sequences = list(self._running)
        if not any(sequence.is_check for sequence in sequences) and not self._is_reference:
            self._num_timed += 1
            is_now = self._num_timed > script.fail_after_steps
            if script.fails_at("step") and is_now:
                strike(script.fail, self.plan.to_dict())
        self._work = (sequences, is_prefill)
        time_ms = self.plan.offloaded_bytes / GIB * script.ms_per_offloaded_gib
        if is_prefill:
            time_ms += script.prefill_ms[self._num_prefills % len(script.prefill_ms)]
            time_ms += script.prefill_ms_per_token * sum(len(s.prompt) for s in sequences)
            self._num_prefills += 1
        else:
            time_ms += script.decode_ms[self._num_decodes % len(script.decode_ms)]
            self._num_decodes += 1
        self._num_steps += 1
        return time_ms / 1e3

    def end_step(self) -> list[TokenEvent]:
        """Return the tokens of the step that was begun; it is over now."""
        work, self._work = self._work, None
        if work is None:
            raise RuntimeError("end_step: expected a step under way, found none.")
        sequences, is_prefill = work
        copied, read = self.plan.moved_per_step()
        num_prompt = sum(len(sequence.prompt) for sequence in sequences)
        running = set(self._running)  # without those that were aborted meanwhile
        alive = [sequence for sequence in sequences if sequence in running]
        self.last_step = StepStats(
            num_prefill_tokens=num_prompt if is_prefill else 0,
            num_decode_tokens=0 if is_prefill else len(sequences),
            h2d_bytes=copied,
            in_place_bytes=read,
        )
        now_s = self._clock()
        return [self._next_event(sequence, now_s) for sequence in alive]

    def _next_event(self, sequence: FakeSequence, now_s: float) -> TokenEvent:
        is_failure = sequence.is_broken and sequence.num_out > 0
        reason: FinishReason | None = "error"
        why, token, position = None, NO_TOKEN, len(sequence.prompt) + sequence.num_out
        if is_failure:
            every = self._script.break_every
            why = f"request: scripted to break (model.fake.break_every={every})."
        else:
            token = _token(sequence, self.spec.vocab_size)
            if not self._is_reference and sequence.num_out == self._script.wrong_token_at:
                free = self.spec.vocab_size - _NUM_SPECIAL
                token = _NUM_SPECIAL + (token + 1 - _NUM_SPECIAL) % free
            sequence.num_out += 1
            reason = self._end_of(sequence)
        if reason is not None:
            self._running.remove(sequence)
        return TokenEvent(
            request_id=sequence.request_id,
            token_id=token,
            position=position,
            finish_reason=reason,
            stop_reason=why,
            logprob=math.nan if is_failure else 0.0,
            time_s=now_s,
        )

    def _end_of(self, sequence: FakeSequence) -> FinishReason | None:
        """Return why a sequence ends with its newest token; None if it goes on."""
        if sequence.is_broken:
            return None
        if sequence.num_out == sequence.max_tokens:
            return "length"
        is_stopped = sequence.num_out == self._script.stop_after and not sequence.is_check
        return "stop" if is_stopped else None

    def abort(self, request_id: str) -> None:
        """Drop a request; unknown ones are ignored."""
        for queue in (self._waiting, self._running):
            for sequence in [s for s in queue if s.request_id == request_id]:
                queue.remove(sequence)

    def stats(self) -> dict[str, Any]:
        """Return totals since the engine started."""
        return {
            "steps": self._num_steps,
            "prefill_steps": self._num_prefills,
            "decode_steps": self._num_decodes,
            "requests": self._num_requests,
            "prefix_hit_tokens": 0,
        }

    def memory(self) -> dict[str, Any]:
        """Return scripted bytes in use."""
        peak_gib = self._script.gpu_peak_gib
        return {
            "gpu_peak_bytes": (
                self.plan.gpu_total_bytes if peak_gib is None else round(peak_gib * GIB)
            ),
            "gpu_budget_bytes": self.plan.budget_bytes,
            "host_pinned_bytes": self.plan.offloaded_bytes,
        }

    def effective(self) -> dict[str, Any]:
        """Return what is really used: nothing."""
        return {"device": "fake", "emulated": True, "warnings": [WARNING], "fallbacks": []}

    def close(self) -> None:
        """Drop all requests and the memory that was touched."""
        self._waiting, self._running = [], []
        self._touched = bytearray()


def plan_of(script: FakeScript, config: EngineConfig, *, reference: bool = False) -> FakePlan:
    """Return the plan, or fail as the script says; the reference has all weights on the host."""
    if script.fails_at("plan") and not reference:
        strike(script.fail, None)
    if not reference:
        return plan_fake(script, config)
    size = round(script.weights_gib * GIB)
    return FakePlan(
        budget_bytes=size + round(script.kv_gib * GIB),
        resident_bytes=0,
        offloaded_bytes=size,
        kv_bytes=round(script.kv_gib * GIB),
        is_read_in_place=False,
    )


def _token(sequence: FakeSequence, vocab_size: int) -> int:
    """Return the next token: it depends on the prompt and on the position alone."""
    found = sum(chain(sequence.prompt[:8], (31 * len(sequence.prompt), 7 * sequence.num_out)))
    return _NUM_SPECIAL + found % (vocab_size - _NUM_SPECIAL)


def _is_due(number: int, every: int | None) -> bool:
    return every is not None and number % every == 0


class ScriptedServer:
    """Steps the engine while it has work; a request that comes during a step waits for its end.

    At most `max_pending` requests may be unfinished; `on_step` gets each step's counts and seconds.
    """

    def __init__(
        self,
        llm: FakeLLM,
        /,
        *,
        clock: ScriptedClock,
        max_pending: int,
        on_step: Callable[[Any, float], None],
    ) -> None:
        self._llm, self._clock = llm, clock
        self._max_pending, self._on_step = max_pending, on_step
        self._answers: dict[str, asyncio.Queue[TokenEvent | BaseException]] = {}
        self._stepping: asyncio.Task[None] | None = None
        self.failure: BaseException | None = None

    async def tokens(
        self, prompt: Any, params: Any = None, request_id: str | None = None
    ) -> AsyncGenerator[list[TokenEvent], None]:
        """Yield the tokens of a request as they come; EngineError where the engine failed."""
        if len(self._answers) >= self._max_pending:
            raise RequestError(f"queue: expected fewer than {self._max_pending} requests.")
        name = self._llm.add_request(prompt, params, request_id)
        answer = self._answers[name] = asyncio.Queue()
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        try:
            is_last = False
            while not is_last:
                event = await answer.get()
                if isinstance(event, BaseException):
                    raise EngineError(f"the engine failed: {event}") from event
                if event.finish_reason == "error":
                    raise RequestError(str(event.stop_reason))
                is_last = event.finish_reason is not None
                yield [event]
        finally:
            del self._answers[name]
            self._llm.abort(name)

    async def _step(self) -> None:
        try:
            while True:
                # What comes at the end of a step goes into the next one.
                await self._clock.settle()
                if not self._llm.has_unfinished():
                    return
                begin_s = self._clock()
                await asyncio.sleep(self._llm.begin_step())
                events = self._llm.end_step()
                self._on_step(self._llm.last_step, self._clock() - begin_s)
                for event in events:
                    if event.request_id in self._answers:
                        self._answers[event.request_id].put_nowait(event)
        except Exception as error:  # noqa: BLE001  the edge: carried to every client
            self.failure = error
            for answer in self._answers.values():
                answer.put_nowait(error)

    def release(self) -> FakeLLM:
        """Stop stepping and return the engine."""
        if self._stepping is not None:
            self._stepping.cancel()
        return self._llm


def fake_door(script: FakeScript) -> EngineDoor:
    """Return a door to an engine that pretends what the script says."""
    clock: FakeClock = RealClock() if script.clock == "real" else ScriptedClock()
    door = EngineDoor(
        load_code=lambda: partial(FakeLLM, script, clock),
        probe=nothing,
        plan_for=partial(plan_of, script),
        predict=nothing,
        clock=clock,
    )
    if isinstance(clock, RealClock):
        return door
    return replace(
        door,
        clock_zero_s=time.perf_counter() - clock(),
        open_async=partial(ScriptedServer, clock=clock),
        run_async=clock.run,
    )
