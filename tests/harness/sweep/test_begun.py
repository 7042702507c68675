"""Points of one sweep in several processes, which meet in the sweep's folder."""

import itertools
import os
import signal
import subprocess
import sys
import threading

import pytest

from harness.point.streams import sigterm_as_interrupt
from harness.sweep import launch as module
from harness.sweep.launch import BegunPoints, Owner
from reports.record.record import RESULT_NAME, RunRecord

SLEEP = "import signal, sys; print('ready', flush=True); signal.pause()"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"


def start(code):
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdout.close()
    return process


def begin_as(points, monkeypatch, index, folder, pid):
    monkeypatch.setattr(module.os, "getpid", lambda: pid)
    points.begin(index, folder)
    monkeypatch.undo()


def test_records_are_found_where_each_point_ran(tmp_path):
    points = BegunPoints(tmp_path)
    assert points.records(3) == {}
    points.begin(1, tmp_path / "other")
    assert points.record(1) is None
    (tmp_path / "other").mkdir()
    record = RunRecord(run_id="a", name="a", status="ok")
    record.write(tmp_path / "other" / RESULT_NAME)
    assert points.records(3) == {1: record}
    owner = points.owner(1)
    assert owner is not None
    assert (owner.pid, owner.is_alive) == (os.getpid(), True)


def test_a_pid_that_is_used_again_is_not_the_owner(tmp_path):
    points = BegunPoints(tmp_path)
    points.begin(0, tmp_path)
    owner = points.owner(0)
    assert owner is not None
    again = Owner(folder=owner.folder, host=owner.host, pid=owner.pid, ticks=1)
    elsewhere = Owner(folder=owner.folder, host="other", pid=owner.pid, ticks=owner.ticks)
    assert not again.is_alive
    assert not elsewhere.is_alive


def test_all_points_that_run_are_ended_and_none_begins(tmp_path, monkeypatch):
    points = BegunPoints(tmp_path)
    processes = [start(SLEEP), start(DEAF)]
    for index, process in enumerate(processes):
        begin_as(points, monkeypatch, index, tmp_path / str(index), process.pid)
    assert len(points.running(2)) == 2
    times = iter([0.0, 0.0])
    points.end_all(2, clock=lambda: next(times, 1e9))
    assert points.is_stopped
    codes = {process.wait() for process in processes}
    assert -signal.SIGKILL in codes
    points.wait(2)
    assert points.running(2) == []


def test_a_process_that_stays_after_its_record_is_killed(tmp_path, monkeypatch):
    points = BegunPoints(tmp_path)
    process = start(DEAF)
    begin_as(points, monkeypatch, 0, tmp_path / "0", process.pid)
    signalled = []

    def note(owner, number):
        signalled.append(number)
        if number == signal.SIGTERM:
            (tmp_path / "0").mkdir()
            RunRecord(run_id="a", name="a", status="killed").write(tmp_path / "0" / RESULT_NAME)
        else:
            process.kill()
            process.wait()

    monkeypatch.setattr(module, "_signal", note)
    times = itertools.count(0.0, 10.0)
    points.end_all(1, clock=lambda: next(times))
    assert signalled == [signal.SIGTERM, signal.SIGKILL]


def test_a_launcher_s_process_is_interrupted_when_that_of_the_sweep_is_gone(tmp_path, monkeypatch):
    points = BegunPoints(tmp_path)
    session = start(SLEEP)
    begin_as(points, monkeypatch, "session", tmp_path, session.pid)
    codes = []

    def work():
        session.kill()
        session.wait()
        threading.Event().wait(60)

    with sigterm_as_interrupt():
        with points.ends_with_session(0.01, codes.append):
            pass  # it lives
        assert codes == []
        with pytest.raises(KeyboardInterrupt), points.ends_with_session(0.01, codes.append):
            work()
    assert codes == [130]
    assert points.is_stopped


def test_the_sweep_s_own_process_and_one_of_no_sweep_watch_nobody(tmp_path):
    points = BegunPoints(tmp_path)
    with points.ends_with_session():
        before = {thread.name for thread in threading.enumerate()}
    points.claim()
    with points.ends_with_session():
        assert {thread.name for thread in threading.enumerate()} == before
    assert "session" not in before
