"""A CPU engine whose device work runs as late as on a GPU that is far behind the host."""

from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import pytest

from engine import LLM
from engine.run.executor import DeviceExecutor
from engine.run.inputs import Upload
from engine.run.sampler import Sampler


class LateWork:
    """Uploads, forward passes and sampling, queued in order; they run when a mark is waited for."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], Any]] = deque()
        self._enqueued = self._done = 0
        self.most = 0
        """The longest that the queue was."""

    def put(self, work: Callable[[], Any]) -> None:
        self._queue.append(work)
        self._enqueued += 1
        self.most = max(self.most, len(self._queue))

    def mark(self) -> "LateMark":
        return LateMark(self, self._enqueued)

    def run(self, stop: int) -> None:
        while self._done < stop:
            self._queue.popleft()()
            self._done += 1


class LateMark:
    def __init__(self, work: LateWork, stop: int) -> None:
        self._work, self._stop = work, stop
        self._passed_s: float | None = None

    def wait(self) -> float:
        self._work.run(self._stop)
        assert self.is_done()
        return self._passed_s or 0.0

    def is_done(self) -> bool:
        if self._passed_s is None and self._work._done >= self._stop:
            self._passed_s = perf_counter()
        return self._passed_s is not None


def make_late(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LateWork:
    """Let the device work of an engine run no earlier than it must; no other may run meanwhile."""
    work = LateWork()
    engine = llm._engine
    assert engine is not None
    logits = engine.executor._decoder.logits
    execute, upload, sample = DeviceExecutor.execute, Upload.run, Sampler._enqueue

    def execute_late(self: DeviceExecutor, batch: Any) -> Any:
        work.put(partial(execute, self, batch))
        rows = batch.num_tokens if batch.logits_rows is None else batch.logits_rows.shape[0]
        return logits[:rows]

    monkeypatch.setattr(Upload, "run", lambda self: work.put(partial(upload, self)))
    monkeypatch.setattr(DeviceExecutor, "execute", execute_late)
    monkeypatch.setattr(Sampler, "_enqueue", lambda *args: work.put(partial(sample, *args)))
    monkeypatch.setattr(engine.device, "mark", work.mark)
    monkeypatch.setattr(engine.device, "synchronize", lambda: work.mark().wait())
    return work


def drain(llm: LLM, tokens: dict[str, list[int]]) -> dict[str, list[int]]:
    """Step until nothing is unfinished; add the tokens that come to those by request."""
    while llm.has_unfinished():
        for event in llm.step():
            tokens.setdefault(event.request_id, []).append(event.token_id)
    return tokens
