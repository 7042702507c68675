"""Tables of experts that stand in for a dummy router's choice; recorder and counters of real ones.

L layers with experts, P rows of a table, T tokens of a step, E experts, k picks of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from engine.asked.config import EngineConfig
from engine.device.base import Device
from engine.model.routing import (
    DUMMY,
    ROUTER,
    TABLE_ROWS,
    WINDOW_TOKENS,
    ExpertSizes,
    Routing,
    RoutingTrace,
    expert_sizes,
    is_replaced,
    read_trace,
    reuse_share,
)
from engine.model.spec import ModelSpec
from engine.plan.sizes import step_tokens

_STREAM: Final = 0x526F7574
"""Keeps the draws of tables apart from those of weights with the same seed."""


def synthetic_ids(sizes: ExpertSizes, reuse: float, seed: int, num_rows: int) -> np.ndarray:
    """Return a table of experts with a stated reuse, int16 [num_rows, L, k].

    Each pick repeats, with probability `reuse`, one of the experts that its layer had in the
    WINDOW_TOKENS rows before, uniform over them; else it is uniform over the other experts. The
    experts of a row and layer are distinct: where one of the two sets is used up, picks come from
    the other.
    """
    draws = np.random.default_rng([_STREAM, seed])
    num_layers, num_experts, top_k = len(sizes.layers), sizes.num_experts, sizes.top_k
    last_row = np.full((num_layers, num_experts), -WINDOW_TOKENS - 1)
    place = np.arange(top_k)
    table = np.empty((num_rows, num_layers, top_k), dtype=np.int16)
    for row in range(num_rows):
        is_recent = row - last_row <= WINDOW_TOKENS
        num_recent = is_recent.sum(axis=1, keepdims=True)
        repeats = (draws.random((num_layers, top_k)) < reuse).sum(axis=1, keepdims=True)
        repeats = np.minimum(repeats, num_recent)
        repeats = np.maximum(repeats, top_k - (num_experts - num_recent))
        # A random order of the recent experts, then one of the others.
        order = np.argsort(draws.random(is_recent.shape) + ~is_recent, axis=1)
        chosen = np.where(place < repeats, place, num_recent + place - repeats)
        ids = np.take_along_axis(order, chosen, axis=1)
        np.put_along_axis(last_row, ids, row, axis=1)
        table[row] = ids
    return table


def read_routing(
    config: EngineConfig, spec: ModelSpec
) -> tuple[np.ndarray | None, dict[str, Any] | None]:
    """Return the table that model.routing asks for, int16 [P, L, k], and what a record says of it.

    No table where the routers choose, and nothing to say of a model without experts.

    Raises:
        ConfigError: A trace is absent, malformed, or of other sizes than the model.
    """
    sizes, text = expert_sizes(spec), config.model.routing
    if sizes is None:
        return None, None
    if not is_replaced(text):
        return None, {"kind": DUMMY if config.model.load_format == DUMMY else ROUTER}
    routing = Routing.parse(text)
    facts: dict[str, Any] = {"kind": routing.kind}
    if routing.file is not None:
        trace = read_trace(Path(routing.file).expanduser())
        trace.check_model(routing.file, sizes)
        ids = trace.ids[:TABLE_ROWS]
        facts |= {"file": routing.file, "sha256": trace.digest, "trace_model": trace.model}
        facts["trace_tokens"] = len(trace.ids)
    else:
        assert routing.reuse is not None
        ids = synthetic_ids(sizes, routing.reuse, config.engine.seed, TABLE_ROWS)
        facts["reuse"] = routing.reuse
    return ids, facts | {"rows": len(ids), "measured_reuse": reuse_share(ids)}


@dataclass(frozen=True, eq=False)
class RoutingTable:
    """Experts by row of the table; the row of a token follows from its sequence and position.

    It replaces the ids that a router chose. Weights stay those of the router's logits at these ids.
    """

    ids: Tensor
    """int32 [L, P, k] on the device."""
    taken: Tensor
    """int32 [L * most tokens of a step * k] on the device: those of the newest step."""

    @classmethod
    def of(cls, ids: np.ndarray, most_tokens: int, device: Device) -> "RoutingTable":
        """Put a table on the device.

        Args:
            ids: int [P, L, k].
            most_tokens: Most tokens of a step.
            device: Where steps run.
        """
        host = torch.from_numpy(np.ascontiguousarray(ids.transpose(1, 0, 2), dtype=np.int32))
        table = device.empty(host.nbytes).view(torch.int32).view(host.shape)
        table.copy_(host)
        num_bytes = 4 * most_tokens * ids.shape[1] * ids.shape[2]
        return cls(table, device.empty(num_bytes).view(torch.int32))

    @property
    def num_rows(self) -> int:
        """Rows of the table, P."""
        return int(self.ids.shape[1])

    def take(self, rows_T: Tensor) -> Tensor:
        """Return the experts of a step's tokens, int32 [L, T, k], until the next call.

        Args:
            rows_T: int64 [T], below P.

        Stream: enqueued on the current stream.
        """
        num_layers, _, top_k = self.ids.shape
        shape = num_layers, len(rows_T), top_k
        out = self.taken[: num_layers * len(rows_T) * top_k].view(shape)
        return torch.index_select(self.ids, 1, rows_T, out=out)


@dataclass(frozen=True, slots=True)
class RecordedPart:
    """Where a sequence's tokens lie in a step."""

    seq_id: int
    start: int
    """Position of the first."""
    first: int
    """Its place among the step's tokens."""
    count: int


@dataclass(eq=False)
class RoutingRecorder:
    """Keeps the experts of every token that runs, by sequence and position.

    A step writes them into a buffer on the device, also within a graph; a copy to one of two host
    buffers is enqueued behind it, and read when its tokens are. Tokens that are computed again
    replace themselves.
    """

    sizes: ExpertSizes
    buffer: Tensor
    """int16 [L, most tokens of a step, k] on the device."""
    hosts: tuple[Tensor, Tensor]
    """Two of the same shape, on the host."""
    _turn: int = 0
    _sequences: dict[int, list[tuple[int, np.ndarray]]] = field(default_factory=dict)
    """Parts of each sequence as they came: first position, and int16 [L, count, k]."""

    @classmethod
    def of(cls, sizes: ExpertSizes, most_tokens: int, device: Device) -> "RoutingRecorder":
        """Allocate the buffers."""
        shape = len(sizes.layers), most_tokens, sizes.top_k
        num_bytes = 2 * shape[0] * shape[1] * shape[2]
        buffer = device.empty(num_bytes).view(torch.int16).view(shape)
        hosts = device.upload_buffer(shape, torch.int16), device.upload_buffer(shape, torch.int16)
        return cls(sizes, buffer, hosts)

    def note(self, place: int, ids_Tk: Tensor) -> None:
        """Write the experts of a step's tokens in the layer at `place` among those with experts.

        Stream: enqueued on the current stream.
        """
        self.buffer[place, : len(ids_Tk)].copy_(ids_Tk)

    def send(self, num_tokens: int) -> Tensor:
        """Enqueue the copy of the newest step to the host; return where it will be.

        int16 [L, num_tokens, k], to be read before the call after the next one.

        Stream: enqueued on the current stream.
        """
        self._turn = 1 - self._turn
        found = self.hosts[self._turn][:, :num_tokens]
        found.copy_(self.buffer[:, :num_tokens], non_blocking=True)
        return found

    def keep(self, sent: Tensor, parts: Sequence[RecordedPart]) -> None:
        """Keep the experts of sequences, once the copy is known to be done."""
        ids = sent.numpy()
        for part in parts:
            kept = self._sequences.setdefault(part.seq_id, [])
            kept.append((part.start, ids[:, part.first : part.first + part.count].copy()))

    def trace(self, model: str) -> RoutingTrace:
        """Return what was recorded: one sequence after the other, each in order of position."""
        found = [_in_order(parts) for _, parts in sorted(self._sequences.items())]
        shape = 0, len(self.sizes.layers), self.sizes.top_k
        ids = np.concatenate(found) if found else np.empty(shape, dtype=np.int16)
        return RoutingTrace(model, self.sizes, ids)

    def clear(self) -> None:
        """Forget what was recorded."""
        self._sequences.clear()


@dataclass(frozen=True, slots=True)
class Recorded:
    """Experts of a step on their way to the host."""

    recorder: RoutingRecorder
    sent: Tensor
    parts: tuple[RecordedPart, ...]

    def collect(self) -> None:
        """Keep them, once the step is known to be done."""
        self.recorder.keep(self.sent, self.parts)


def _in_order(parts: Sequence[tuple[int, np.ndarray]]) -> np.ndarray:
    """Return the experts of one sequence, int16 [N, L, k], each position once, the newest of it."""
    by_position = {
        start + offset: ids[:, offset] for start, ids in parts for offset in range(ids.shape[1])
    }
    return np.stack([by_position[position] for position in sorted(by_position)])


@dataclass(frozen=True, kw_only=True)
class Routers:
    """How the tokens of an engine find their experts."""

    facts: dict[str, Any] | None = None
    """For the record: `kind` (router | dummy | trace | synthetic) and more; None: no experts."""
    table: RoutingTable | None = None
    """None: the routers choose."""
    recorder: RoutingRecorder | None = None
    """None: nothing is recorded."""

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        spec: ModelSpec,
        picked: tuple[np.ndarray | None, dict[str, Any] | None],
        device: Device,
    ) -> "Routers":
        """Put what `read_routing` returned on the device, and allocate what records."""
        (ids, facts), sizes, tokens = picked, expert_sizes(spec), step_tokens(config.engine)
        recorder = None
        if config.record_routing and sizes is not None:
            recorder = RoutingRecorder.of(sizes, tokens, device)
        table = None if ids is None else RoutingTable.of(ids, tokens, device)
        return cls(facts=facts, table=table, recorder=recorder)


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """Experts that tokens were routed to, each counted once a layer and step."""

    hits: np.ndarray
    """int64 [L]: those that lay on the GPU."""
    misses: np.ndarray
    """int64 [L]: those that crossed the host link."""
    bytes: np.ndarray
    """int64 [L]: what crossed it for them."""

    @property
    def totals(self) -> tuple[int, int, int]:
        """Hits, misses and bytes of all layers."""
        return int(self.hits.sum()), int(self.misses.sum()), int(self.bytes.sum())


class ExpertMeter:
    """Reads the counters of a device behind every step, without waiting for it.

    A copy to one of two host buffers is enqueued behind a step, and read when its tokens are.

    `counters` are hits and misses by layer, int64 [L, 2] on the device, which only grow;
    `expert_bytes` is what crosses the link for one miss, int64 [L].
    """

    def __init__(self, counters: Tensor, expert_bytes: np.ndarray, device: Device) -> None:
        self._counters, self._bytes = counters, expert_bytes
        shape = (counters.shape[0], 2)
        self._hosts = [device.upload_buffer(shape, torch.int64) for _ in range(2)]
        self._turn = 0
        self._newest = np.zeros(shape, dtype=np.int64)

    def start(self) -> None:
        """Count from here on.

        Stream: enqueued on the current stream.
        """
        self._counters.zero_()
        self._newest = np.zeros_like(self._newest)

    def send(self) -> Tensor:
        """Enqueue the copy of the counters; return where it will be until the call but one.

        Stream: enqueued on the current stream.
        """
        self._turn = 1 - self._turn
        sent = self._hosts[self._turn]
        sent.copy_(self._counters, non_blocking=True)
        return sent

    def collect(self, sent: Tensor) -> ExpertCounts:
        """Return what came since the last call, once the copy is known to be done."""
        now, before = sent.numpy().copy(), self._newest
        self._newest = now
        return self._counts(now - before)

    @property
    def totals(self) -> ExpertCounts:
        """All that was collected."""
        return self._counts(self._newest)

    def _counts(self, found: np.ndarray) -> ExpertCounts:
        return ExpertCounts(found[:, 0], found[:, 1], found[:, 1] * self._bytes)
