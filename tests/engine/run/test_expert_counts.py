"""Counters of experts, read behind each step."""

import numpy as np
import torch

from engine.device.cpu import CPUDevice
from engine.run.routing import ExpertMeter


def test_each_step_has_its_own_counts() -> None:
    counters = torch.tensor([[9, 9], [9, 9]])  # of warming up
    meter = ExpertMeter(counters, np.array([10, 100]), CPUDevice())
    meter.start()
    counters += torch.tensor([[3, 1], [4, 0]])
    first = meter.send()
    counters += torch.tensor([[2, 2], [0, 4]])
    second = meter.send()  # the step behind, launched before the first is read
    counts = meter.collect(first)
    assert counts.hits.tolist() == [3, 4]
    assert counts.misses.tolist() == [1, 0]
    assert counts.bytes.tolist() == [10, 0]
    assert counts.totals == (7, 1, 10)
    assert meter.collect(second).totals == (2, 6, 420)
    assert meter.totals.hits.tolist() == [5, 4]
    assert meter.totals.totals == (9, 7, 430)
