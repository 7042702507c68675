"""A CPU engine on a simulated compute stream and any number of copy streams, in any order.

The engine enqueues as on a GPU: a step's inputs, its forward pass and its sampling on the compute
stream, moves of KV blocks and staged copies on streams of their own. Nothing runs before it must;
whenever something is waited for, streams advance by turns that a seed and a policy choose, each no
further than its waits allow. What a copy is about to write is filled with NaN first, as soon as the
copy may run. So a read that no wait orders behind its copy, or before the next one, finds NaN or
another block.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import pytest
import torch

from engine import LLM, build
from engine.device.cpu import CPUDevice
from engine.run.executor import DeviceExecutor
from engine.run.inputs import Upload
from engine.run.sampler import Sampler
from tests.engine.two_streams import poison

POLICIES = ("copies late", "copies early", "any order")


@dataclass(frozen=True, slots=True)
class Event:
    """A point in a queue."""

    queue: "Queue"
    stop: int


@dataclass
class Queue:
    """Work that runs in order; a wait is work that can be done once its event has come."""

    name: str
    works: deque[Callable[[], object] | Event] = field(default_factory=deque)
    enqueued: int = 0
    done: int = 0

    def put(self, work: "Callable[[], object] | Event") -> None:
        self.works.append(work)
        self.enqueued += 1

    def may_run(self) -> bool:
        if not self.works:
            return False
        first = self.works[0]
        return not isinstance(first, Event) or first.queue.done >= first.stop

    def run(self) -> None:
        work = self.works.popleft()
        if not isinstance(work, Event):
            work()
        self.done += 1


class ManyStreams:
    """All queues of a device."""

    def __init__(self) -> None:
        self.compute = Queue("compute")
        self.copies: list[Queue] = []
        self.policy, self.chance = "copies late", random.Random(0)
        self.is_on = False
        """Compute is queued; before, it runs when it is called."""
        self.lock = threading.RLock()
        self.is_computing = False

    def start(self, policy: str, seed: int) -> None:
        self.policy, self.chance, self.is_on = policy, random.Random(f"{policy} {seed}"), True

    def until(self, event: Event) -> None:
        """Let streams go on until the event has come."""
        with self.lock:
            while event.queue.done < event.stop:
                self.advance(event.queue)

    def advance(self, wanted: Queue) -> None:
        """Let one stream do one piece of work."""
        queues = [queue for queue in self.copies if queue.may_run()]
        if not self.is_computing and self.compute.may_run():
            queues.append(self.compute)
        assert queues, "the streams wait for each other"
        weights = {"copies late": (1, 0), "copies early": (0, 1), "any order": (1, 1)}[self.policy]
        chances = [weights[queue is not self.compute] for queue in queues]
        if self.policy == "copies late" and wanted in queues and wanted is not self.compute:
            chances = [int(queue is wanted) for queue in queues]
        self.chance.choices(queues, chances if any(chances) else None)[0].run()

    def compute_work(self, work: Callable[[], object]) -> None:
        with self.lock:
            self.compute.put(partial(self._compute, work))

    def _compute(self, work: Callable[[], object]) -> None:
        self.is_computing = True
        try:
            work()
        finally:
            self.is_computing = False

    def drain(self) -> None:
        for queue in (self.compute, *self.copies):
            self.until(Event(queue, queue.enqueued))


class SimulatedStream:
    """A copy stream of the simulation."""

    def __init__(self, streams: ManyStreams) -> None:
        self.streams, self.queue = streams, Queue(f"copies {len(streams.copies)}")
        streams.copies.append(self.queue)

    def after_compute(self) -> None:
        compute = self.streams.compute
        if not self.streams.is_computing:  # within a pass, what is enqueued has run
            with self.streams.lock:
                self.queue.put(Event(compute, compute.enqueued))

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        with self.streams.lock:
            self.queue.put(partial(_poison, dst))
            self.queue.put(partial(dst.copy_, src))
        self._note()

    def copy_all(self, pairs: Any) -> None:
        for dst, src in pairs:
            self.copy(dst, src)

    def copy_rows(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.copy(dst, src)

    def run(self, work: Callable[[], object]) -> None:
        with self.streams.lock:
            if isinstance(work, partial):  # ops.copy_blocks
                dst, _, ids, _ = work.args
                self.queue.put(lambda: dst.__setitem__(ids, -1))
            self.queue.put(work)
        self._note()

    def _note(self) -> None:
        """Within a pass, let what is early run at once."""
        if self.streams.is_computing and self.streams.policy != "copies late":
            self.streams.until(self.record())

    def after(self, other: Any, event: Event) -> None:
        with self.streams.lock:
            self.queue.put(event)

    def record(self) -> Event:
        return Event(self.queue, self.queue.enqueued)

    def compute_after(self, event: Event) -> None:
        if self.streams.is_computing or not self.streams.is_on:
            self.wait(event)
            return
        with self.streams.lock:
            self.streams.compute.put(event)

    def wait(self, event: Event) -> None:
        self.streams.until(event)

    def is_done(self, event: Event) -> bool:
        with self.streams.lock:
            if self.streams.chance.random() < 0.5 and self.queue.may_run():
                self.queue.run()
            return event.queue.done >= event.stop


def _poison(memory: torch.Tensor) -> None:
    poison(memory.view(torch.uint8))


class SimulatedDevice(CPUDevice):
    """A CPU whose copy streams, and on demand whose compute, are simulated."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = ManyStreams()

    def copy_stream(self) -> SimulatedStream:  # type: ignore[override]
        return SimulatedStream(self.streams)


class _Mark:
    def __init__(self, event: Event, streams: ManyStreams) -> None:
        self._event, self._streams = event, streams
        self._passed_s: float | None = None

    def wait(self) -> float:
        self._streams.until(self._event)
        assert self.is_done()
        return self._passed_s or 0.0

    def is_done(self) -> bool:
        with self._streams.lock:
            if self._passed_s is None and self._event.queue.done >= self._event.stop:
                self._passed_s = perf_counter()
        return self._passed_s is not None


def simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines that are built from now on have simulated copy streams."""
    monkeypatch.setattr(build, "open_device", lambda _: SimulatedDevice())


@contextmanager
def on_many_streams(llm: LLM, policy: str, seed: int = 0) -> Iterator[ManyStreams]:
    """Let an engine built under `simulate` run late; no other engine may run meanwhile."""
    engine = llm._engine
    assert engine is not None
    assert isinstance(engine.device, SimulatedDevice)
    streams, logits = engine.device.streams, engine.executor._decoder.logits
    streams.drain()
    streams.start(policy, seed)
    execute, upload, sample = DeviceExecutor.execute, Upload.run, Sampler._enqueue

    def execute_late(self: DeviceExecutor, batch: Any) -> Any:
        streams.compute_work(partial(execute, self, batch))
        rows = batch.num_tokens if batch.logits_rows is None else batch.logits_rows.shape[0]
        return logits[:rows]

    def mark() -> _Mark:
        return _Mark(Event(streams.compute, streams.compute.enqueued), streams)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Upload, "run", lambda self: streams.compute_work(partial(upload, self)))
        patch.setattr(DeviceExecutor, "execute", execute_late)
        patch.setattr(
            Sampler, "_enqueue", lambda *args: streams.compute_work(partial(sample, *args))
        )
        patch.setattr(engine.device, "mark", mark)
        patch.setattr(engine.device, "synchronize", streams.drain)
        yield streams
        streams.drain()
        streams.is_on = False
