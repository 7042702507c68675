"""Experts of a part: found on the GPU over time, by layer, and what crossed the link."""

from typing import Any, cast

import pytest

from engine.clock import StepStats
from harness.work.drive import Engine, StepTotals
from harness.work.predicted import expert_metrics, transfer_metrics, transfer_reasons
from harness.work.watch import ExpertWatch
from tests.harness.fakes import FakeClock

pytestmark = pytest.mark.usefixtures("clock_start_s")


class Counting:
    """Every step takes 0.1 s; before the first, something was counted already."""

    name = "counting"

    def __init__(self, clock: FakeClock, *, has_experts: bool = True) -> None:
        self.clock, self.count, self.has_experts = clock, 0, has_experts

    def step(self) -> list[str]:
        self.clock.advance(0.1)
        self.count += 1
        return ["event"]

    def stats(self) -> dict[str, Any]:
        if not self.has_experts:
            return {}
        hits, misses = [5 + 3 * self.count, 7], [2, 9 + self.count]
        sizes = [10 * misses[0], 100 * misses[1]]
        return {"experts": {"layers": [1, 4], "hits": hits, "misses": misses, "bytes": sizes}}


def run(steps: int, **kind: bool) -> tuple[dict[str, Any], list[float | None]]:
    clock, told = FakeClock(), list[float | None]()
    watch = ExpertWatch(cast(Engine, Counting(clock, **kind)), clock, told.append)
    for _ in range(steps):
        assert watch.step() == ["event"]
    assert watch.name == "counting"
    result: dict[str, Any] = {"samples": {}}
    watch.note("latency", result)
    return result["samples"], told


def test_rows_and_layers_are_of_the_part() -> None:
    samples, told = run(6)
    found = samples["experts"]
    assert found["part"] == "latency"
    assert found["columns"] == ["time_s", "hits", "misses", "bytes"]
    times, *counts = zip(*found["rows"], strict=True)
    assert times == pytest.approx((0, 0.3, 0.6, 0.6))
    assert counts == [(0, 9, 18, 18), (0, 3, 6, 6), (0, 300, 600, 600)]
    assert found["layers"] == {
        "layer": [1, 4],
        "hits": [18, 0],
        "misses": [0, 6],
        "bytes": [0, 600],
    }
    assert told == [None, 0.75, 0.75, None]


def test_a_model_without_counters_has_no_rows() -> None:
    assert run(6, has_experts=False) == ({}, [])


def test_long_parts_keep_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.work.watch.MOST_ROWS", 4)
    rows = run(60)[0]["experts"]["rows"]
    assert len(rows) <= 5
    assert rows[0][0] == 0
    assert rows[-1][0] == pytest.approx(6)


def totals(*steps: StepStats) -> StepTotals:
    class Plan:
        @staticmethod
        def moved_per_step(num_tokens: int) -> tuple[int, int]:
            return 100, 20

    found = StepTotals()
    for step in steps:
        found.add(step, 0.5, Plan)
    return found


DECODE = StepStats(
    num_decode_tokens=2,
    h2d_bytes=100,
    in_place_bytes=20,
    expert_hits=6,
    expert_misses=2,
    expert_bytes=500,
)
PREFILL = StepStats(num_prefill_tokens=9, expert_hits=1, expert_misses=90, expert_bytes=10**6)


def test_metrics_are_of_steps_that_only_decode() -> None:
    found = totals(PREFILL, DECODE, DECODE)
    planned = {"hit_share": 0.7, "bytes_per_step": 450.5, "expert_bytes": [0, 9]}
    assert expert_metrics(found, planned) == {
        "experts/hit_share": 0.75,
        "experts/hits_per_step": 6,
        "experts/misses_per_step": 2,
        "experts/bytes_per_step": 500,
        "experts/planned_hit_share": 0.7,
        "experts/planned_bytes_per_step": 450.5,
    }
    moved = transfer_metrics(found, {"link/h2d_gb_s": 1e-6})
    assert moved["offload/bytes_per_step"] == 620
    assert moved["link/share"] == pytest.approx(620 / 0.5 / 1e3)
    assert transfer_reasons(found) == []  # the plan's bytes are those of other weights


def test_without_experts_off_the_gpu_nothing_is_measured() -> None:
    assert expert_metrics(totals(DECODE), None) == {}
    planned = {"hit_share": None, "bytes_per_step": 0, "expert_bytes": [0, 0]}
    assert expert_metrics(totals(DECODE), planned) == {}


def test_without_decodes_shares_are_unknown() -> None:
    planned = {"hit_share": None, "bytes_per_step": 0, "expert_bytes": [9]}
    found = expert_metrics(totals(PREFILL), planned)
    assert found["experts/hit_share"] is None
    assert found["experts/bytes_per_step"] is None
