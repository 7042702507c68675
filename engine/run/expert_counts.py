"""What steps found of their experts on the GPU, and what crossed the link for the others.

L layers with experts.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.device.base import Device


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
