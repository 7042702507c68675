"""The time of a ring of slots: worked by hand, and the engine's own ring on a clock."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.plan.times import ring_s
from engine.weights.residence import SlotRing


@pytest.mark.parametrize(
    ("compute", "copies", "slots", "wrap", "expected"),
    [
        ([1, 1, 1, 1], [0, 0, 0, 0], 1, True, 4),
        # One layer that has a slot to itself is never copied again.
        ([1, 1, 1, 1], [0, 9, 0, 0], 1, True, 4),
        ([1, 1, 1, 1], [0, 9, 0, 9], 2, True, 4),
        # Copy-bound, every layer off, 2 slots: the link rests during the first layer alone.
        ([1, 1, 1, 1], [5, 5, 5, 5], 2, True, 21),
        # 3 slots: layers 1 and 2 have slots to themselves, 0 and 3 take turns in one.
        ([1, 1, 1, 1], [5, 5, 5, 5], 3, True, 12),
        # One slot: copies and layers take turns; all but the first layer's copy are waited for,
        # and that one after the last layer.
        ([1, 1, 1, 1], [5, 5, 5, 5], 1, True, 24),
        # Spread (0, 3, 6) hides copies of 2 behind three layers of 1; lumped (0, 1, 2) does not.
        ([1] * 9, [2, 0, 0, 2, 0, 0, 2, 0, 0], 2, True, 9),
        ([1] * 9, [2, 2, 2, 0, 0, 0, 0, 0, 0], 2, True, 10),
        # Lumped at the end: the copies for the next step are waited for when the step ends.
        ([1] * 9, [0, 0, 0, 0, 0, 0, 2, 2, 2], 2, True, 12),
        # The first layers resident: the link rests until the first release.
        ([1, 1, 1, 1], [0, 0, 5, 5], 1, True, 14),
        # Without wrap the first copies are waited for, and none follows the last layer.
        ([1, 1, 1, 1], [5, 5, 5, 5], 2, False, 21),
        ([1, 1, 1, 1], [5, 5, 0, 0], 1, False, 14),
        ([1, 1, 1, 1], [5, 5, 0, 0], 2, False, 4),
    ],
)
def test_rings_worked_by_hand(
    compute: list[float], copies: list[float], slots: int, wrap: bool, expected: float
) -> None:
    assert ring_s(compute, copies, slots, wrap=wrap) == pytest.approx(expected)


def test_work_after_the_layers_hides_copies() -> None:
    assert ring_s([1, 1], [4, 4], 1, wrap=True) == 10
    assert ring_s([1, 1], [4, 4], 1, wrap=True, after_s=3) == 10
    assert ring_s([1, 1], [4, 4], 1, wrap=True, after_s=6) == 12


@pytest.mark.parametrize(
    ("compute", "copies", "slots", "wrap", "launch", "expected"),
    [
        # Launches last longer than the work, or are hidden behind all of it but the first.
        ([1, 1, 1, 1], [0, 0, 0, 0], 1, False, 3, 13),
        ([3, 3, 3, 3], [0, 0, 0, 0], 1, False, 1, 13),
        ([1, 1, 1, 1], [0, 0, 0, 0], 1, False, 0, 4),
        # Layers in GPU memory are launched while the first ones are copied.
        ([1, 1, 1, 1], [5, 5, 0, 0], 2, False, 2, 9),
        ([1, 1, 1, 1], [20, 0, 0, 0], 1, False, 2, 9),
        ([1, 1, 1, 1], [5, 5, 0, 0], 1, False, 2, 14),
        # Copies that begin when a layer is over begin later where it is launched later.
        ([1, 1, 1, 1], [0, 0, 5, 5], 1, True, 2, 18),
    ],
)
def test_launches_run_ahead_of_layers(
    compute: list[float],
    copies: list[float],
    slots: int,
    wrap: bool,
    launch: float,
    expected: float,
) -> None:
    found = ring_s(compute, copies, slots, wrap=wrap, launch_s=launch)
    assert found == pytest.approx(expected)


class Clock:
    """Two streams on which work takes as long as it says; the interface of CopyStream."""

    def __init__(self) -> None:
        self.compute = 0.0
        self.copies = 0.0

    def after_compute(self) -> None:
        self.copies = max(self.copies, self.compute)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.copies += src.numel()

    def record(self) -> float:
        return self.copies

    def compute_after(self, event: float) -> None:
        self.compute = max(self.compute, event)


def real_ring(
    compute: Sequence[int], copies: Sequence[int], slots: int, wrap: bool, after: int
) -> float:
    """The time of the third step of the engine's own ring."""
    clock, sizes = Clock(), [size for size in copies if size]
    ring = SlotRing(
        clock,
        [torch.empty(max(sizes), dtype=torch.uint8) for _ in range(min(slots, len(sizes)))],
        [torch.empty(size, dtype=torch.uint8) for size in sizes],
        wrap=wrap,
    )
    spent = 0.0
    for _ in range(3):
        begun, k = clock.compute, 0
        clock.copies = max(clock.copies, begun)
        ring.begin_step()
        for seconds, size in zip(compute, copies, strict=True):
            if size:
                ring.acquire(k)
            clock.compute += seconds
            if size:
                ring.release(k)
                k += 1
        clock.compute += after
        ring.end_step()
        spent = clock.compute - begun
    return spent


@settings(max_examples=150, deadline=None)
@given(
    layers=st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from([0, 0, 1, 3, 8])), min_size=1, max_size=12
    ).filter(lambda items: any(size for _, size in items)),
    slots=st.integers(1, 14),
    wrap=st.booleans(),
    after=st.integers(0, 9),
)
def test_the_model_is_the_engines_ring(
    layers: list[tuple[int, int]], slots: int, wrap: bool, after: int
) -> None:
    compute, copies = [item[0] for item in layers], [item[1] for item in layers]
    found = ring_s(compute, copies, slots, wrap=wrap, after_s=after)
    assert found == pytest.approx(real_ring(compute, copies, slots, wrap, after))
