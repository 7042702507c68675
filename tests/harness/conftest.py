"""Clocks that begin as on machines that have been up for long, or have not; cheap workers."""

from functools import partial

import pytest

from catalogue.processes import start_child
from harness.systems.fake import ScriptedClock
from tests.harness import fakes
from tests.harness.forked import fork_child, git_state_once, start_idle_sampler
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


@pytest.fixture
def forked_workers(monkeypatch):
    """Have workers of the fake engine begin as forks of this process, not as new interpreters.

    Their telemetry has no rows, and the commit is asked for once: both have tests of their own.
    """
    monkeypatch.setattr("harness.point.process.start_child", fork_child)
    monkeypatch.setattr("harness.observe.run.start_child", start_idle_sampler)
    monkeypatch.setattr("harness.observe.environment.git_state", git_state_once)


@pytest.fixture
def interpreted_workers(monkeypatch):
    """Have them begin as the product has them, where that is what a test is about."""
    monkeypatch.setattr("harness.point.process.start_child", start_child)
