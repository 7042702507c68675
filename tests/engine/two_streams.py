"""A CPU engine on a simulated compute stream and copy stream, in any order that waits allow.

The engine enqueues as on a GPU: inputs, the layers of a forward pass one by one, and sampling on
the compute stream, copies of the slot ring on the copy stream. Nothing runs until a mark is waited
for; then both streams advance by turns that a seed and a policy choose, each no further than its
waits allow. A copy is three pieces: its slot is filled with NaN, as soon as the slot's last copy is
there and its readers are done, then one half lands, then the other. A read that no wait orders
behind its copy, or before the next one, finds NaN or another layer.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial, partialmethod
from time import perf_counter
from typing import Any

import pytest
import torch

from engine import LLM
from engine.kv.pool import Retain
from engine.run.decoder import Decoder
from engine.run.inputs import Upload
from engine.run.sampler import Sampler
from engine.weights.residence import OnDemandSlot, SlotRing
from engine.weights.store import WeightStore
from tests.engine.feeds import feeds, numbers

POLICIES: dict[str, dict[str, int]] = {
    "copies late": {"compute": 1, "poison": 0, "copy": 0},
    "copies early": {"compute": 0, "poison": 1, "copy": 1},
    "poison early, copies late": {"compute": 1, "poison": 1000, "copy": 0},
    "any order": {"compute": 1, "poison": 1, "copy": 1},
}
"""How often each kind of work goes next where several may; 0: only where no other may."""
CHANGE = 0.2
"""In any order: the chance, at each turn, that another policy is followed for a while."""


def poison(memory: torch.Tensor) -> None:
    """Fill uint8 memory with bytes that are NaN in every floating dtype."""
    memory.fill_(255)


@dataclass(slots=True)
class _Piece:
    """A part of a copy."""

    needs: int
    """Works of the compute stream that come before it."""
    after: int
    """Copies that come before it."""
    run: Callable[[], object]
    is_last: bool = False


@dataclass
class TwoStreams:
    """What is enqueued on both streams, and what of it has run."""

    seed: int
    policy: str
    most_ahead: int = 0
    """The most works that waited on the compute stream."""
    num_enqueued: int = 0
    """Works of the compute stream so far; each layer of a forward pass is one."""
    needs: int = 0
    """Copies that the next work of the compute stream comes behind."""
    _compute: deque[tuple[int, Callable[[], object]]] = field(default_factory=deque)
    """Each with the number of copies that come before it."""
    _poisons: deque[_Piece] = field(default_factory=deque)
    _copies: deque[_Piece] = field(default_factory=deque)
    _num_computed: int = 0
    _num_poisoned: int = 0
    _num_copied: int = 0
    _num_copies: int = 0
    _last_copies: dict[int, int] = field(default_factory=dict)
    """By address, how many copies there were with the last one that writes there."""
    _copy_needs: int = 0

    def __post_init__(self) -> None:
        self._chance = random.Random(f"{self.policy} {self.seed}")
        self._now = self.policy

    def compute(self, run: Callable[[], object]) -> None:
        """Enqueue work on the compute stream."""
        with self.enqueued(run):
            pass

    @contextmanager
    def enqueued(self, run: Callable[[], object]) -> Iterator[None]:
        """Enqueue work on the compute stream, of which parts are counted inside."""
        self._compute.append((self.needs, run))
        try:
            yield
        finally:
            self.num_enqueued += 1
            self.most_ahead = max(self.most_ahead, self.num_enqueued - self._num_computed)

    # What a ring sees of the copy stream.

    def after_compute(self) -> None:
        self._copy_needs = self.num_enqueued

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        half, needs, number = src.numel() // 2, self._copy_needs, self._num_copies
        last = self._last_copies.get(dst.data_ptr(), 0)
        self._poisons.append(_Piece(needs, last, partial(poison, dst)))
        self._copies.append(_Piece(needs, number, partial(_copy, dst[:half], src[:half])))
        self._copies.append(_Piece(needs, number, partial(_copy, dst[half:], src[half:]), True))
        self._num_copies = self._last_copies[dst.data_ptr()] = number + 1

    def record(self) -> int:
        return self._num_copies

    def compute_after(self, event: int) -> None:
        self.needs = max(self.needs, event)

    def wait(self, event: int) -> None:
        while self._num_copied < event:
            self._advance()

    # Running it.

    def run(self, stop: int) -> None:
        """Run the first `stop` works of the compute stream, and of the copies what comes by."""
        while self._num_computed < stop:
            self._advance()

    def drain(self) -> None:
        """Run everything."""
        self.run(self.num_enqueued)
        self.wait(self._num_copies)

    def pause(self, needs: int) -> None:
        """Within a work: let the copy stream go on, at least until `needs` copies are done."""
        while (kind := self._choose(needs)) != "compute":
            self._run_copies(kind)

    def finish_work(self) -> None:
        """Within a work: a part that is counted is done."""
        self._num_computed += 1

    def _advance(self) -> None:
        needs = self._compute[0][0] if self._compute else None
        kind = self._choose(needs)
        if kind != "compute":
            self._run_copies(kind)
            return
        _, run = self._compute.popleft()
        run()
        self._num_computed += 1

    def _choose(self, needs: int | None) -> str:
        """Choose what goes next; compute does where no more than `needs` copies are missing."""
        kinds = list(self._ready())
        if needs is not None and needs <= self._num_copied:
            kinds.append("compute")
        assert kinds, "the streams wait for each other"
        if self.policy == "any order" and self._chance.random() < CHANGE:
            self._now = self._chance.choice(list(POLICIES))
        weights = [POLICIES[self._now][kind] for kind in kinds]
        return self._chance.choices(kinds, weights if any(weights) else None)[0]

    def _run_copies(self, kind: str) -> None:
        if kind == "poison":
            self._poisons.popleft().run()
            self._num_poisoned += 1
        else:
            piece = self._copies.popleft()
            piece.run()
            self._num_copied += piece.is_last

    def _ready(self) -> Iterator[str]:
        if self._poisons and self._may_run(self._poisons[0]):
            yield "poison"
        is_poisoned = self._num_copied < self._num_poisoned
        if self._copies and is_poisoned and self._may_run(self._copies[0]):
            yield "copy"

    def _may_run(self, piece: _Piece) -> bool:
        return piece.needs <= self._num_computed and piece.after <= self._num_copied


def _copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    dst.copy_(src)


@dataclass
class _Mark:
    streams: TwoStreams
    stop: int
    passed_s: float | None = None

    def is_done(self) -> bool:
        if self.passed_s is None and self.streams._num_computed >= self.stop:
            self.passed_s = perf_counter()
        return self.passed_s is not None

    def wait(self) -> float:
        self.streams.run(self.stop)
        assert self.is_done()
        return self.passed_s or 0.0


@contextmanager
def on_two_streams(llm: LLM, policy: str, seed: int = 0) -> Iterator[TwoStreams]:
    """Let an engine run on simulated streams; no other engine may run meanwhile.

    Slots are poisoned, and the ring begins anew. KV blocks are poisoned too: all of them now, and
    each one on the compute stream when it becomes free.
    """
    engine = llm._engine
    assert engine is not None
    streams, store = TwoStreams(seed, policy), engine.store
    with pytest.MonkeyPatch.context() as patch:
        upload, sample = Upload.run, Sampler._enqueue
        patch.setattr(Upload, "run", lambda self: streams.compute(partial(upload, self)))
        patch.setattr(Sampler, "_enqueue", lambda *args: streams.compute(partial(sample, *args)))
        forward, copy = Decoder.forward, OnDemandSlot.acquire
        patch.setattr(Decoder, "forward", partialmethod(_LatePass.enqueue, streams, forward, copy))
        patch.setattr(OnDemandSlot, "acquire", lambda self, k: 0)
        patch.setattr(engine.device, "mark", lambda: _Mark(streams, streams.num_enqueued))
        patch.setattr(engine.device, "synchronize", streams.drain)
        for units in store.held.values():
            for slot in units.slots:
                poison(slot)
        for feed in feeds(store):
            if isinstance(feed, SlotRing):
                patch.setattr(feed, "_stream", streams)
                feed._held[:] = [None] * len(feed._held)
        engine.cache.tensor.fill_(torch.nan)
        poison_freed_blocks(patch, llm, streams.compute)
        yield streams
        streams.drain()


class _LatePass:
    """A forward pass: what the host asks of the store now, and what is computed later."""

    def __init__(self, store: WeightStore, copy: Callable[[OnDemandSlot, int], int]) -> None:
        self._store, self._copy = store, copy
        self._weights: dict[int, tuple[int, Any]] = {}
        """By layer: the copies that it waits for, and its tensors."""

    @staticmethod
    def enqueue(
        model: Decoder,
        streams: TwoStreams,
        forward: Callable[[Decoder, Any], torch.Tensor],
        copy: Callable[[OnDemandSlot, int], int],
        batch: Any,
        between: Callable[[], object] | None,
    ) -> torch.Tensor:
        """Take the place of Decoder.forward: make the host's calls, and enqueue the rest."""
        store = model.weights
        late = _LatePass(store, copy)
        run = partial(late.run, streams, lambda: forward(model, batch))
        with streams.enqueued(run):
            store.begin_step(batch.num_tokens)
            for layer in range(model.spec.num_hidden_layers):
                weights = store.acquire(layer)
                late._weights[layer] = streams.needs, weights
                streams.num_enqueued += 1
                store.release(layer)
                if between is not None:
                    between()
            store.end_step()
        rows = batch.num_tokens if batch.logits_rows is None else batch.logits_rows.shape[0]
        return model.logits[:rows]

    def run(self, streams: TwoStreams, forward: Callable[[], torch.Tensor]) -> None:
        """Compute; where the host failed amid the layers, those that it had enqueued."""
        store = self._store

        def acquire(layer: int) -> Any:
            if layer not in self._weights:
                raise _NotEnqueuedError
            needs, weights = self._weights[layer]
            streams.pause(needs)
            for feed, k in numbers(store, layer):
                if isinstance(feed, OnDemandSlot):
                    poison(feed._slot)
                    self._copy(feed, k)
            return weights

        with pytest.MonkeyPatch.context() as patch, suppress(_NotEnqueuedError):
            patch.setattr(store, "begin_step", lambda num_tokens: None)
            patch.setattr(store, "acquire", acquire)
            patch.setattr(store, "release", lambda layer: streams.finish_work())
            patch.setattr(store, "end_step", lambda: None)
            forward()


class _NotEnqueuedError(Exception):
    """The host failed before it enqueued this layer."""


def poison_freed_blocks(
    patch: pytest.MonkeyPatch, llm: LLM, enqueue: Callable[[Callable[[], object]], object]
) -> None:
    """Fill KV blocks with NaN when they become free, in the order of the compute stream."""
    engine = llm._engine
    assert engine is not None
    pool, cache = engine.core.pools[0], engine.cache
    free = pool.free

    def free_and_poison(block_ids: Iterable[int], retain: Retain = "demote") -> None:
        ids = list(block_ids)
        free(ids, retain)
        gone = {i for i in ids if pool.states.owners[i] == 0 and pool.states.keys[i] is None}
        for block in gone & set(range(pool.num_gpu_blocks)):
            enqueue(partial(cache.tensor[block].fill_, torch.nan))

    patch.setattr(pool, "free", free_and_poison)
