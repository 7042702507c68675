"""Clocks that begin as on machines that have been up for long, or have not."""

from functools import partial

import pytest

from harness.systems.fake import ScriptedClock
from tests.harness import fakes
from tests.harness.work import virtual

STARTS_S = (0.0, 1e3, 1e6, 1e7)


@pytest.fixture(
    params=[STARTS_S[0], *(pytest.param(start, marks=pytest.mark.slow) for start in STARTS_S[1:])],
    ids=lambda start_s: f"{start_s:g}s",
)
def clock_start_s(request, monkeypatch):
    """Have every scripted clock begin at so many seconds; the long ones are slow tests."""
    start_s = request.param
    door = "harness.systems.fake.ScriptedClock"
    monkeypatch.setattr(door, partial(ScriptedClock, begin_s=start_s))
    monkeypatch.setattr(fakes, "BEGIN_S", start_s)
    monkeypatch.setattr(virtual, "BEGIN_S", start_s)
    return start_s
