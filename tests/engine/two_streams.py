"""A CPU engine on a simulated compute stream and copy stream, in any order that waits allow.

The engine enqueues as on a GPU: inputs, embedding, each layer, logits and sampling on the compute
stream, copies of the slot ring on the copy stream. Nothing runs until a mark is waited for; then
both streams advance by turns that a seed and a policy choose, each no further than its waits
allow. A copy is three pieces: its slot is filled with NaN, as soon as the slot's last copy is there
and its readers are done, then one half lands, then the other. A read that no wait orders behind its
copy, or before the next one, finds NaN or another layer.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from engine import LLM
from engine.inputs import Upload
from engine.kv.blocks import BlockPool
from engine.models import decoder
from engine.models.decoder import Decoder
from engine.sampler import Sampler
from engine.weights.ring import OnDemandSlot, SlotRing
from engine.weights.store import WeightStore
from kernels import ops

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
    _compute_needs: int = 0
    _copy_needs: int = 0

    def __post_init__(self) -> None:
        self._chance = random.Random(f"{self.policy} {self.seed}")
        self._now = self.policy

    @property
    def num_enqueued(self) -> int:
        """Works of the compute stream so far."""
        return self._num_computed + len(self._compute)

    def compute(self, run: Callable[[], object]) -> None:
        """Enqueue work on the compute stream."""
        self._compute.append((self._compute_needs, run))
        self.most_ahead = max(self.most_ahead, len(self._compute))

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
        self._compute_needs = max(self._compute_needs, event)

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

    def _advance(self) -> None:
        kinds = list(self._ready())
        assert kinds, "the streams wait for each other"
        if self.policy == "any order" and self._chance.random() < CHANGE:
            self._now = self._chance.choice(list(POLICIES))
        weights = [POLICIES[self._now][kind] for kind in kinds]
        kind = self._chance.choices(kinds, weights if any(weights) else None)[0]
        if kind == "compute":
            _, run = self._compute.popleft()
            run()
            self._num_computed += 1
        elif kind == "poison":
            self._poisons.popleft().run()
            self._num_poisoned += 1
        else:
            piece = self._copies.popleft()
            piece.run()
            self._num_copied += piece.is_last

    def _ready(self) -> Iterator[str]:
        if self._compute and self._compute[0][0] <= self._num_copied:
            yield "compute"
        if self._poisons and self._may_run(self._poisons[0]):
            yield "poison"
        is_poisoned = self._num_copied < self._num_poisoned
        if self._copies and is_poisoned and self._may_run(self._copies[0]):
            yield "copy"

    def _may_run(self, piece: _Piece) -> bool:
        return piece.needs <= self._num_computed and piece.after <= self._num_copied


def _copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    dst.copy_(src)


@dataclass(frozen=True)
class _Mark:
    streams: TwoStreams
    stop: int

    def wait(self) -> None:
        self.streams.run(self.stop)


class _Later:
    """A tensor that the compute stream has yet to make."""

    value: Any = None


def _now(value: Any) -> Any:
    return value.value if isinstance(value, _Later) else value


@contextmanager
def on_two_streams(llm: LLM, policy: str, seed: int = 0) -> Iterator[TwoStreams]:
    """Let an engine run on simulated streams; no other engine may run meanwhile.

    Slots are poisoned, and the ring begins anew. KV blocks are poisoned too: all of them now, and
    each one on the compute stream when it becomes free.
    """
    engine = llm._engine
    assert engine is not None
    streams = TwoStreams(seed, policy)
    with pytest.MonkeyPatch.context() as patch:
        _delay_decoder(patch, streams)
        _delay_copies_of_compute(patch, streams)
        upload, sample = Upload.run, Sampler._enqueue
        patch.setattr(Upload, "run", lambda self: streams.compute(partial(upload, self)))
        patch.setattr(Sampler, "_enqueue", lambda *args: streams.compute(partial(sample, *args)))
        patch.setattr(engine.device, "mark", lambda: _Mark(streams, streams.num_enqueued))
        patch.setattr(engine.device, "synchronize", streams.drain)
        for slot in engine.store._slots:
            poison(slot)
        feed = engine.store._feed
        if isinstance(feed, SlotRing):
            patch.setattr(feed, "_stream", streams)
            feed._held[:] = [None] * len(feed._held)
        engine.cache.tensor.fill_(torch.nan)
        poison_freed_blocks(patch, llm, streams.compute)
        yield streams
        streams.drain()


def _delay_decoder(patch: pytest.MonkeyPatch, streams: TwoStreams) -> None:
    """Enqueue what a forward pass computes: the embedding, each layer, the logits."""
    embedding, write_logits = ops.embedding, Decoder._write_logits

    def embed(ids: torch.Tensor, table: Callable[[], torch.Tensor]) -> _Later:
        out = _Later()
        streams.compute(lambda: setattr(out, "value", embedding(ids, table())))
        return out

    def late_layer(run: Callable[..., Any]) -> Callable[..., Any]:
        def enqueue(
            model: Any, batch: Any, weights: Any, index: int, hidden: Any, residual: Any
        ) -> tuple[_Later, _Later]:
            outs = _Later(), _Later()

            def compute() -> None:
                found = run(model, batch, weights, index, _now(hidden), _now(residual))
                outs[0].value, outs[1].value = found

            streams.compute(compute)
            return outs

        return enqueue

    def late_logits(self: Decoder, batch: Any, hidden: Any, residual: Any, out: Any) -> None:
        streams.compute(lambda: write_logits(self, batch, _now(hidden), _now(residual), out))

    patch.setattr(ops, "embedding", embed)
    for name in ("_pre_norm_layer", "_post_norm_layer"):
        patch.setattr(decoder, name, late_layer(getattr(decoder, name)))
    patch.setattr(Decoder, "_write_logits", late_logits)


def _delay_copies_of_compute(patch: pytest.MonkeyPatch, streams: TwoStreams) -> None:
    """Enqueue the copies that run on the compute stream: on demand, of layers and of others."""
    acquire, outer = OnDemandSlot.acquire, WeightStore.outer
    depth = 0

    def late_acquire(self: OnDemandSlot, k: int) -> int:
        streams.compute(lambda: poison(self._slot))
        streams.compute(lambda: acquire(self, k))
        return 0

    def late_outer(self: WeightStore, name: str) -> Any:
        # The table of a forward pass is asked for by the host, the rest by work that runs.
        is_asked_by_host = depth == 0
        return partial(outer, self, name) if is_asked_by_host else outer(self, name)

    run_compute = streams._advance

    def advance() -> None:
        nonlocal depth
        depth += 1
        try:
            run_compute()
        finally:
            depth -= 1

    patch.setattr(streams, "_advance", advance)
    patch.setattr(OnDemandSlot, "acquire", late_acquire)
    patch.setattr(WeightStore, "outer", late_outer)


def poison_freed_blocks(
    patch: pytest.MonkeyPatch, llm: LLM, enqueue: Callable[[Callable[[], object]], object]
) -> None:
    """Fill KV blocks with NaN when they become free, in the order of the compute stream."""
    engine = llm._engine
    assert engine is not None
    pool, cache, free = engine.core.pool, engine.cache, BlockPool.free

    def free_and_poison(block_ids: Iterable[int]) -> None:
        ids = list(block_ids)
        free(pool, ids)
        for block in {i for i in ids if pool.ref_count(i) == 0}:
            enqueue(partial(cache.tensor[block].fill_, torch.nan))

    patch.setattr(pool, "free", free_and_poison)
